"""Losses of answers through a whole tiny model: loss, gradient and metrics are the formulas, written out in plain torch."""

import math

import pytest
import torch
from torch.nn.functional import binary_cross_entropy_with_logits, logsigmoid

from mpar import testing, tree
from mpar.errors import ConfigError
from mpar.tasks import Cpo, Dft, Dpo, Kto, Orpo, Prm, Reward, task_means
from tests.tasks.problem import LENGTHS, QWEN3, Problem, answers_batch

E = 0.1


class Written:
    """Log-probabilities by a plain log-softmax of logits: of every answer, found by loops over rows and positions."""

    def __init__(self, problem, params, batch):
        self.batch, self.problem, self.params = batch, problem, params
        model = problem.model
        names = tree.paths(model.abstract_params)
        own = tree.unflatten(tree.flatten(model.abstract_params)[1], [params[name] for name in names])
        self.logits = model.apply(own, batch["tokens"], batch["positions"], batch["documents"])

    def logps(self, row, number, labels="labels"):
        """Of the labels of one document."""
        at = (self.batch["documents"][row] == number) & (self.batch[labels][row] != -100)
        logps = self.logits[row][at].log_softmax(-1)
        return logps.gather(1, self.batch[labels][row][at][:, None])[:, 0]

    def pairs(self):
        """(chosen logps, rejected logps, row, number of the chosen answer) of every pair."""
        for row, lengths in enumerate(LENGTHS):
            for number in range(0, len(lengths), 2):
                yield self.logps(row, number), self.logps(row, number + 1), row, number


def differentiated(problem, formula):
    """(mean loss, gradients by path, mean metrics) of `formula(written)`, which gives (losses, {name: values})."""
    params = {path: leaf.clone().requires_grad_() for path, leaf in tree.leaves_with_path(problem.params)}
    losses, metrics = formula(Written(problem, params, answers_batch()))
    loss = sum(losses) / len(losses)
    grads = torch.autograd.grad(loss, list(params.values()), allow_unused=True)
    filled = {path: torch.zeros_like(x) if g is None else g for (path, x), g in zip(params.items(), grads, strict=True)}
    return loss.detach(), filled, {name: sum(map(float, values)) / len(values) for name, values in metrics.items()}


def check(problem, formula):
    loss, grads, metrics = differentiated(problem, formula)
    testing.assert_close(problem.losses["loss"], loss, name="loss")
    for path, grad in problem.grads.items():
        testing.assert_close(grad, grads[path], name=path)
    found = task_means(problem.metrics)
    assert set(metrics) <= set(found)
    for name, value in metrics.items():
        testing.assert_close(torch.tensor(found[name], dtype=torch.float64), torch.tensor(value, dtype=torch.float64), name=name)


def mixed(bd):
    m = torch.sigmoid(bd / 0.05)
    return (1 - m) * -logsigmoid(bd) + m * torch.exp(-bd)


DPO = {
    "sigmoid": lambda c, r, n, m, b: -logsigmoid(b * (c - r)),
    "sigmoid smoothed": lambda c, r, n, m, b: -(1 - E) * logsigmoid(b * (c - r)) - E * logsigmoid(b * (r - c)),
    "robust": lambda c, r, n, m, b: (-(1 - E) * logsigmoid(b * (c - r)) + E * logsigmoid(b * (r - c))) / (1 - 2 * E),
    "hinge": lambda c, r, n, m, b: torch.relu(1 - b * (c - r)),
    "ipo": lambda c, r, n, m, b: (c / n - r / m - 1 / (2 * b)) ** 2,
    "sigmoid_norm": lambda c, r, n, m, b: -logsigmoid(b * (c / n - r / m)),
    "exo_pair": lambda c, r, n, m, b: (
        torch.sigmoid(b * (c - r)) * (logsigmoid(b * (c - r)) - math.log(1 - E))
        + torch.sigmoid(b * (r - c)) * (logsigmoid(b * (r - c)) - math.log(E))
    ),
    "nca_pair": lambda c, r, n, m, b: -logsigmoid(b * c) - 0.5 * logsigmoid(-b * c) - 0.5 * logsigmoid(-b * r),
    "bco_pair": lambda c, r, n, m, b: -logsigmoid(b * c) - logsigmoid(-b * r),
    "sppo_hard": lambda c, r, n, m, b: (c - 0.5 / b) ** 2 + (r + 0.5 / b) ** 2,
    "apo_zero": lambda c, r, n, m, b: 1 - torch.sigmoid(b * c) + torch.sigmoid(b * r),
    "apo_down": lambda c, r, n, m, b: torch.sigmoid(b * c) + 1 - torch.sigmoid(b * (c - r)),
    "discopop": lambda c, r, n, m, b: mixed(b * (c - r)),
}
"""Of R of the chosen answer, R of the rejected one, their numbers of tokens, and beta."""


def dpo_formula(
    name, beta=0.1, held=lambda ratio: ratio, weigh=lambda logps, shorter: logps.sum(), reference=None, rpo_alpha=0.0
):
    def formula(written):
        losses, metrics = [], {f"rewards/{key}": [] for key in ("chosen", "rejected", "accuracies", "margins")}
        metrics |= {"logps/chosen": [], "logps/rejected": []}
        for chosen, rejected, row, number in written.pairs():
            shorter = min(len(chosen), len(rejected))
            known = [written.batch["reference_logps"][row, number + i] if reference is None else 0.0 for i in (0, 1)]
            b = float(written.batch["beta"][row, number]) if beta == "data" else beta
            ratios = [held(weigh(x, shorter) - y) for x, y in zip((chosen, rejected), known, strict=True)]
            losses.append(DPO[name](*ratios, len(chosen), len(rejected), b) - rpo_alpha * chosen.mean())
            c, r = (b * x.detach() for x in ratios)
            for key, value in (("chosen", c), ("rejected", r), ("accuracies", c > r), ("margins", c - r)):
                metrics[f"rewards/{key}"].append(value)
            metrics["logps/chosen"].append(weigh(chosen, shorter).detach())
            metrics["logps/rejected"].append(weigh(rejected, shorter).detach())
        return losses, metrics

    return formula


@pytest.mark.cases(len(DPO))
@pytest.mark.parametrize("name", DPO)
def test_dpo(name):
    """Each loss of pairs, with log-probabilities of the reference model from the batch."""
    smoothing = E if name in ("sigmoid smoothed", "robust", "exo_pair") else 0.0
    task = Dpo(losses=((name.split()[0], 1.0),), label_smoothing=smoothing, reference="columns")
    check(Problem(task), dpo_formula(name))


def test_dpo_options():
    """beta of each pair, the weight of tokens beyond the shorter answer, divergences, the term of RPO, sums of losses."""
    columns = {"reference": "columns"}
    check(Problem(Dpo(beta="data", **columns)), dpo_formula("sigmoid", "data"))
    check(Problem(Dpo(losses=(("ipo", 1.0),), beta="data", **columns)), dpo_formula("ipo", "data"))
    weigh = lambda logps, shorter: logps[:shorter].sum() + 0.3 * logps[shorter:].sum()  # noqa: E731
    check(Problem(Dpo(ld_alpha=0.3, **columns)), dpo_formula("sigmoid", weigh=weigh))
    check(Problem(Dpo(rpo_alpha=0.7, **columns)), dpo_formula("sigmoid", rpo_alpha=0.7))
    check(Problem(Dpo(reference="none")), dpo_formula("sigmoid", reference=0.0))
    for name, held in (
        ("forward_kl", lambda x: 1 - torch.exp(-x)),
        ("js", lambda x: math.log(2) + logsigmoid(x)),
        ("alpha", lambda x: (torch.exp(-0.5 * x) - 1) / -0.5),
    ):
        check(Problem(Dpo(divergence=name, **columns)), dpo_formula("sigmoid", held=held))

    def summed(written):
        one, metrics = dpo_formula("hinge")(written)
        two, _ = dpo_formula("sppo_hard")(written)
        return [0.5 * a + 2 * b - 0.25 * p[0].mean() for a, b, p in zip(one, two, written.pairs(), strict=True)], metrics

    check(Problem(Dpo(losses=(("hinge", 0.5), ("sppo_hard", 2.0), ("sft", 0.25)), **columns)), summed)


def test_reference_model_in_the_program():
    """The reference model is a second forward with parameters of its own, which have no gradient."""
    problem = Problem(Dpo(), reference=True)

    def formula(written):
        names = tree.paths(problem.model.abstract_params)
        other = Written(problem, {name: written.params[f"reference.{name}"].detach() for name in names}, written.batch)
        losses = []
        for (c, r, *_), (rc, rr, *_) in zip(written.pairs(), other.pairs(), strict=True):
            losses.append(-logsigmoid(0.1 * ((c.sum() - rc.sum()) - (r.sum() - rr.sum()))))
        return losses, {}

    check(problem, formula)
    assert not any(path.startswith("reference") for path in problem.grads)


def kto_formula(z0_of, weights):
    def formula(written):
        batch = written.batch
        ratio = lambda row, n: written.logps(row, n).sum() - batch["reference_logps"][row, n]  # noqa: E731
        answers = [(row, n, int(batch["signs"][row, n])) for row, lengths in enumerate(LENGTHS) for n in range(len(lengths))]
        z0 = z0_of([ratio(row, n).detach() for row, n, sign in answers if sign == 2])
        losses, chosen, rejected = [], [], []
        for row, n, sign in answers:
            if sign == 1:
                losses.append(weights[0] * (1 - torch.sigmoid(0.1 * (ratio(row, n) - z0))))
                chosen.append(0.1 * ratio(row, n).detach())
            elif sign == 0:
                losses.append(weights[1] * (1 - torch.sigmoid(0.1 * (z0 - ratio(row, n)))))
                rejected.append(0.1 * ratio(row, n).detach())
        return losses, {"rewards/chosen": chosen, "rewards/rejected": rejected, "kl": [z0]}

    return formula


def test_kto(monkeypatch):
    """z0 is the mean gain on mismatched answers, or 0 if that is negative; it has no gradient."""
    for shift, options in ((-30.0, {}), (30.0, {}), (-30.0, {"loss_type": "apo_zero_unpaired"})):
        batch = answers_batch()
        batch["signs"] = torch.tensor([[1, 2, 0, 2], [0, 2, -1, -1], [1, 2, 1, 2], [0, 2, -1, -1]])
        batch["reference_logps"] = (batch["reference_logps"] + shift * (batch["signs"] == 2)).masked_fill(
            batch["signs"] == -1, 0.0
        )
        monkeypatch.setattr("tests.tasks.test_offline_losses.answers_batch", lambda batch=batch: batch)
        task = Kto(desirable_weight=1.3, undesirable_weight=0.6, reference="columns", **options)
        zero = options or shift > 0
        z0_of = (lambda gains: 0.0) if zero else (lambda gains: sum(gains) / len(gains))
        problem = Problem(task, batch=batch)
        check(problem, kto_formula(z0_of, (1.3, 0.6)))
        assert (task_means(problem.metrics)["kl"] == 0) == bool(zero)


CPO = {
    "sigmoid": lambda c, r: -(1 - E) * logsigmoid(0.2 * (c.sum() - r.sum())) - E * logsigmoid(-0.2 * (c.sum() - r.sum())),
    "hinge": lambda c, r: torch.relu(1 - 0.2 * (c.sum() - r.sum())),
    "ipo": lambda c, r: (c.mean() - r.mean() - 2.5) ** 2,
    "simpo": lambda c, r: (
        -(1 - E) * logsigmoid(0.2 * (c.mean() - r.mean()) - 0.7) - E * logsigmoid(0.7 - 0.2 * (c.mean() - r.mean()))
    ),
}


@pytest.mark.cases(4)
@pytest.mark.parametrize("name", CPO)
def test_cpo(name):
    """Without a reference model, plus the loss of the preferred answer."""
    smoothing = E if name in ("sigmoid", "simpo") else 0.0
    task = Cpo(loss_type=name, beta=0.2, gamma=0.7, cpo_alpha=0.4, label_smoothing=smoothing)

    def formula(written):
        found = [(CPO[name](c, r) - 0.4 * c.mean(), -c.mean().detach()) for c, r, *_ in written.pairs()]
        return [loss for loss, _ in found], {"nll": [nll for _, nll in found]}

    check(Problem(task), formula)


@pytest.mark.parametrize("prompt", [True, False])
def test_orpo(prompt):
    """The loss of the preferred answer, with or without its prompt, and the ratio of odds."""
    batch = answers_batch()
    if prompt:
        batch["labels"] = batch["all_labels"]

    def formula(written):
        losses, odds = [], []
        for chosen, rejected, row, number in written.pairs():
            c, r = chosen.mean(), rejected.mean()
            nll = -(written.logps(row, number, "all_labels") if prompt else chosen).mean()
            lo = torch.log(c.exp() / (1 - c.exp())) - torch.log(r.exp() / (1 - r.exp()))
            losses.append(nll - 0.3 * logsigmoid(lo))
            odds.append(lo.detach())
        return losses, {"log_odds": odds}

    check(Problem(Orpo(beta=0.3, prompt=prompt), batch=batch), formula)


def hidden(written):
    """The features in front of the output matrix: the model with a matrix that is the identity."""
    problem, width = written.problem, QWEN3["hidden_size"]
    names = tree.paths(problem.model.abstract_params)
    leaves = {name: written.params[name] for name in names}
    matrix = torch.zeros_like(leaves["head.head_DV"])
    matrix[:, :width] = torch.eye(width, dtype=torch.float64)
    return Written(problem, {**leaves, "head.head_DV": matrix}, written.batch).logits[..., :width]


def with_ends(batch):
    ends = torch.full_like(batch["answers"], -1)
    for row, lengths in enumerate(LENGTHS):
        for number in range(len(lengths)):
            ends[row, sum(lengths[: number + 1]) - 1] = number
    return {**batch, "ends": ends}


@pytest.mark.parametrize("margin", ["data", 0.3])
def test_reward(margin):
    """Scores at the last tokens of both answers, with a margin, held near zero."""

    def formula(written):
        scores = hidden(written) @ written.params["task.score_D1"][:, 0]
        losses, right = [], []
        for row, lengths in enumerate(LENGTHS):
            for number in range(0, len(lengths), 2):
                c, r = (scores[row, sum(lengths[: number + i]) - 1] for i in (1, 2))
                wanted = float(written.batch["margin"][row, number]) if margin == "data" else margin
                losses.append(-logsigmoid(c - r - wanted) + 0.05 * (c + r) ** 2)
                right.append(c > r)
        return losses, {"rewards/accuracies": right}

    check(Problem(Reward(margin=margin, centre=0.05), batch=with_ends(answers_batch())), formula)


def test_prm():
    """Every labelled step is right or wrong, by the score at its end."""
    batch = answers_batch()
    labels = torch.full_like(batch["answers"], -1)
    labels[0, 3], labels[0, 8], labels[2, 2], labels[3, 11] = 1, 0, 1, 0

    def formula(written):
        scores = hidden(written) @ written.params["task.score_D1"][:, 0]
        at = [(0, 3, 1.0), (0, 8, 0.0), (2, 2, 1.0), (3, 11, 0.0)]
        losses = [binary_cross_entropy_with_logits(scores[r, s], torch.tensor(y, dtype=torch.float64)) for r, s, y in at]
        return losses, {"accuracies": [(scores[r, s] > 0) == y for r, s, y in at]}

    check(Problem(Prm(), batch={**batch, "step_labels": labels}), formula)


def test_dft():
    """Each token weighs as much as it is probable, without a gradient through that."""
    batch = answers_batch()
    batch["token_weights"] = torch.rand(batch["tokens"].shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    problem = Problem(Dft(), batch=batch)

    def formula(written):
        at = batch["labels"] != -100
        logps = written.logits.log_softmax(-1)[at].gather(1, batch["labels"][at][:, None])[:, 0]
        weights = batch["token_weights"][at]
        return [-(weights * logps * logps.detach().exp()).sum() / weights.sum()], {}

    check(problem, formula)


def test_impossible_values_are_refused():
    """All of them are listed."""
    with pytest.raises(ConfigError, match=r"(?s)beta=0 .*label_smoothing=0.5"):
        Dpo(beta=0, label_smoothing=0.5)
    with pytest.raises(ConfigError, match="there are sigmoid, robust, hinge"):
        Dpo(losses=(("sigmod", 1.0),))
    for make in (lambda: Cpo(gamma=-1), lambda: Orpo(beta=0), lambda: Kto(desirable_weight=-1), lambda: Reward(centre=-1)):
        with pytest.raises(ConfigError, match="cannot make"):
            make()
