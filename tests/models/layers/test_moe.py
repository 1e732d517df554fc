"""The layer of experts against those of transformers, and against loops over tokens in float64."""

import dataclasses
import functools
import math

import pytest
import torch
from transformers.models.deepseek_v2 import modeling_deepseek_v2 as deepseek_v2
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek_v3
from transformers.models.gpt_oss import modeling_gpt_oss as gpt_oss
from transformers.models.mixtral import modeling_mixtral as mixtral
from transformers.models.qwen2_moe import modeling_qwen2_moe as qwen2_moe
from transformers.models.qwen3_moe import modeling_qwen3_moe as qwen3_moe

from mpar import testing, tree
from mpar.errors import ConfigError, UnknownNameError
from mpar.models.layers import FeedForward, MlpConfig
from mpar.models.layers.moe import Moe, MoeConfig, moe, moe_shapes, router_logits, updated_choice_bias, with_router_options

B, S, D, E, K, F = 2, 9, 10, 8, 3, 7
BASE = MoeConfig(num_experts=E, top_k=K, mlp_size=F)
FULL = dataclasses.replace(BASE, mlp_bias=True, router_bias=True, choice_bias=True, shared=MlpConfig(6), shared_gate=True)
WEIGHT = torch.tensor(5.0, dtype=torch.float64)
LOSSES = {"aux_loss": 0.3, "seq_aux_loss": 0.7, "z_loss": 0.2, "global_aux_loss": 0.5}


def normal(*shape, seed=0, dtype=torch.float64):
    """Normal numbers."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def drawn(config, seed=0):
    """Parameters in float64, biases too."""
    shapes = moe_shapes(config, D)
    paths = tree.leaves_with_path(shapes, is_leaf=lambda x: isinstance(x, tuple))
    leaves = [0.6 * normal(*shape, seed=seed + i) for i, (_, shape) in enumerate(paths)]
    return tree.unflatten(tree.flatten(shapes, is_leaf=lambda x: isinstance(x, tuple))[1], leaves)


def plain_shared(module, gate=None):
    """The shared layer of a module of transformers."""
    weights = (getattr(module, f"{name}_proj").weight.detach().T for name in ("gate", "up", "down"))
    return {"shared": FeedForward(*weights), **({} if gate is None else {"shared_gate_D1": gate.weight.detach().T})}


def params_of(experts, router, **further):
    """Our parameters with the values of the experts and the router of a module of transformers."""
    gate_up, down = experts.gate_up_proj.detach(), experts.down_proj.detach()
    if isinstance(experts, gpt_oss.GptOssExperts):
        gate, up, biases = gate_up[..., ::2], gate_up[..., 1::2], experts.gate_up_proj_bias.detach()
        further |= {
            "gate_bias_EF": biases[:, ::2],
            "up_bias_EF": biases[:, 1::2],
            "down_bias_ED": experts.down_proj_bias.detach(),
        }
    else:
        gate, up = gate_up.transpose(1, 2).chunk(2, -1)
        down = down.transpose(1, 2)
    return Moe(router_DE=router.weight.detach().T, gate_EDF=gate, up_EDF=up, down_EFD=down, **further)


COMMON = {"hidden_size": D, "num_experts_per_tok": K, "num_attention_heads": 2}
GROUPS = {"n_group": 4, "topk_group": 2}
REFERENCES = {
    "mixtral": (
        lambda: mixtral.MixtralSparseMoeBlock(mixtral.MixtralConfig(num_local_experts=E, intermediate_size=F, **COMMON)),
        BASE,
    ),
    "qwen2_moe": (
        lambda: qwen2_moe.Qwen2MoeSparseMoeBlock(
            qwen2_moe.Qwen2MoeConfig(num_experts=E, moe_intermediate_size=F, shared_expert_intermediate_size=6, **COMMON)
        ),
        dataclasses.replace(BASE, normalise=False, shared=MlpConfig(6), shared_gate=True),
    ),
    "qwen3_moe": (
        lambda: qwen3_moe.Qwen3MoeSparseMoeBlock(
            qwen3_moe.Qwen3MoeConfig(num_experts=E, moe_intermediate_size=F, norm_topk_prob=True, **COMMON)
        ),
        BASE,
    ),
    "deepseek_v2": (
        lambda: deepseek_v2.DeepseekV2Moe(
            deepseek_v2.DeepseekV2Config(
                n_routed_experts=E, moe_intermediate_size=F, n_shared_experts=2, routed_scaling_factor=1.7, **COMMON
            )
        ),
        dataclasses.replace(BASE, normalise=False, shared=MlpConfig(2 * F), scale=1.7),
    ),
    "deepseek_v2_groups": (
        lambda: deepseek_v2.DeepseekV2Moe(
            deepseek_v2.DeepseekV2Config(
                n_routed_experts=E,
                moe_intermediate_size=F,
                n_shared_experts=1,
                topk_method="group_limited_greedy",
                **GROUPS,
                **COMMON,
            )
        ),
        dataclasses.replace(BASE, normalise=False, shared=MlpConfig(F), groups=4, groups_kept=2, group_best=1),
    ),
    "deepseek_v3": (
        lambda: deepseek_v3.DeepseekV3MoE(
            deepseek_v3.DeepseekV3Config(n_routed_experts=E, moe_intermediate_size=F, n_shared_experts=1, **GROUPS, **COMMON)
        ),
        dataclasses.replace(BASE, score="sigmoid", groups=4, groups_kept=2, scale=2.5, choice_bias=True, shared=MlpConfig(F)),
    ),
    "gpt_oss": (
        lambda: gpt_oss.GptOssMLP(gpt_oss.GptOssConfig(num_local_experts=E, intermediate_size=F, swiglu_limit=1.5, **COMMON)),
        dataclasses.replace(BASE, order="post", normalise=False, mlp_bias=True, router_bias=True, clamp=1.5),
    ),
}


def reference_of(name):
    """(module of transformers with drawn parameters, our parameters, our config)."""
    make, config = REFERENCES[name]
    module = make().eval()
    with torch.no_grad():
        for seed, parameter in enumerate(module.parameters()):
            parameter.copy_(0.6 * normal(*parameter.shape, seed=seed))
        router, further = module.router if name == "gpt_oss" else module.gate, {}
        if name == "deepseek_v3":
            router.e_score_correction_bias.copy_(0.1 * normal(E, seed=7))
            further = {"choice_bias_E": router.e_score_correction_bias}
        elif name == "gpt_oss":
            further = {"router_bias_E": router.bias.detach()}
        if name == "qwen2_moe":
            further = plain_shared(module.shared_expert, module.shared_expert_gate)
        elif name.startswith("deepseek"):
            further |= plain_shared(module.shared_experts)
    return module, router, params_of(module.experts, router, **further), config


@pytest.mark.parametrize("grouped", [True, False])
@pytest.mark.parametrize("name", REFERENCES)
def test_equals_transformers(name, grouped):
    """Router logits, choice, output and the gradient of the input are those of the layer in transformers."""
    module, router, params, config = reference_of(name)
    config = dataclasses.replace(config, grouped=grouped)
    x, dy = normal(B, S, D, seed=20, dtype=torch.float32), normal(B, S, D, seed=21, dtype=torch.float32)
    expected, pull_back = testing.vjp(lambda x: module(x)[0] if name == "gpt_oss" else module(x), x)
    actual, pull_back_ours = testing.vjp(lambda x: moe(params, config, x, {}, training=False)[0], x)
    testing.assert_close(router_logits(params, x).flatten(0, 1), router(x.flatten(0, 1))[0], name="logits", rtol=1e-5)
    testing.assert_close(actual, expected, name="y", rtol=1e-5)
    testing.assert_close(pull_back_ours(dy)[0], pull_back(dy)[0], name="dx", rtol=1e-5)


def chosen_by_hand(config, logits_E, bias_E):
    """The weight of each chosen expert of one token: a dict."""
    scores = logits_E.softmax(0) if config.score == "softmax" else logits_E.sigmoid()
    values = (scores if config.order == "pre" else logits_E) + (0 if bias_E is None else bias_E)
    size = E // config.groups
    merit = [sum(sorted(values[g * size : (g + 1) * size].tolist())[-2:]) for g in range(config.groups)]
    groups = sorted(range(config.groups), key=lambda g: -merit[g])[: config.groups_kept]
    allowed = [e for e in range(E) if e // size in groups]
    chosen = sorted(allowed, key=lambda e: -float(values[e]))[: config.top_k]
    weights = scores[chosen]
    if config.order == "post" and config.score == "softmax":
        weights = logits_E[chosen].softmax(0)
    if config.normalise:
        weights = weights / weights.sum()
    return {e: weight * config.scale for e, weight in zip(chosen, weights, strict=True)}


def expert_by_hand(params, e, x_D):
    """One expert on one token."""
    gate, up = x_D @ params.gate_EDF[e], x_D @ params.up_EDF[e]
    if params.gate_bias_EF is not None:
        gate, up = gate + params.gate_bias_EF[e], up + params.up_bias_EF[e]
    y = (gate * gate.sigmoid() * up) @ params.down_EFD[e]
    return y if params.down_bias_ED is None else y + params.down_bias_ED[e]


def logits_by_hand(params, x):
    """Logits of all tokens."""
    logits = x @ params.router_DE
    return logits if params.router_bias_E is None else logits + params.router_bias_E


def by_hand(params, config, x):
    """(output token by token, number of slots of each expert)."""
    y, counts = torch.zeros_like(x), torch.zeros(E, dtype=torch.int32)
    for b in range(x.shape[0]):
        for s in range(x.shape[1]):
            for e, weight in chosen_by_hand(config, logits_by_hand(params, x)[b, s], params.choice_bias_E).items():
                y[b, s] += weight * expert_by_hand(params, e, x[b, s])
                counts[e] += 1
            if params.shared is not None:
                gate, up = x[b, s] @ params.shared.gate_DF, x[b, s] @ params.shared.up_DF
                y[b, s] += (gate * gate.sigmoid() * up) @ params.shared.down_FD * (x[b, s] @ params.shared_gate_D1).sigmoid()
    return y, counts


CHOICES = [
    (score, order, normalise) for score in ("softmax", "sigmoid") for order in ("pre", "post") for normalise in (True, False)
]


@pytest.mark.parametrize(("score", "order", "normalise"), CHOICES)
@pytest.mark.parametrize("grouped", [True, False])
def test_every_router_equals_a_loop_over_tokens(score, order, normalise, grouped):
    """Scores, orders, groups, biases, the shared layer with its gate; the counts are those of the choice."""
    config = dataclasses.replace(
        FULL, score=score, order=order, normalise=normalise, grouped=grouped, groups=4, groups_kept=2, scale=1.3
    )
    params, x = drawn(config), normal(B, S, D, seed=30)
    y, losses, metrics = moe(params, config, x, {"weight": WEIGHT}, training=True)
    expected, counts = by_hand(params, config, x)
    testing.assert_close(y, expected)
    assert torch.equal(metrics["expert_counts"], counts)
    assert not losses and set(metrics) == {"expert_counts"}


@pytest.mark.parametrize("options", [{}, {"capacity_factor": 0.5}, {"kind": "sinkhorn", "choice_bias": False}], ids=str)
def test_sequential_experts_equal_grouped_ones(options):
    """Output, losses and the gradients of every parameter are the same, expert by expert or grouped."""
    config = dataclasses.replace(FULL, **LOSSES, **options)
    params, x = drawn(config), normal(B, S, D, seed=30)

    def run(config, params):
        y, losses, _ = moe(params, config, x, {"weight": WEIGHT}, training=True)
        return y, losses

    grads = {}
    for grouped in (True, False):
        outputs, pull_back = testing.vjp(functools.partial(run, dataclasses.replace(config, grouped=grouped)), params)
        (grads[grouped],) = pull_back(tree.map_leaves(lambda x: normal(*x.shape, seed=31), outputs))
    for path, grad in tree.leaves_with_path(grads[True]):
        testing.assert_close(grad, tree.get(grads[False], path), name=path)
        assert bool(grad.any()) == (path != "choice_bias_E"), path


def test_no_token_is_lost_when_all_choose_one_expert():
    """Without a capacity an expert that every token chooses computes all of them, and others none."""
    params, x = drawn(BASE), normal(B, S, D, seed=30)
    params = dataclasses.replace(params, router_DE=torch.zeros_like(params.router_DE), router_bias_E=None)
    y, _, metrics = moe(params, BASE, x, {}, training=False)  # equal logits: the lowest experts
    expected = sum(expert_by_hand(params, e, x) for e in range(K)) / K
    testing.assert_close(y, expected)
    assert metrics["expert_counts"].tolist() == [B * S] * K + [0] * (E - K)


@pytest.mark.parametrize("grouped", [True, False])
@pytest.mark.parametrize("factor", [0.4, 1.0])
def test_capacity_drops_the_least_weights(factor, grouped):
    """An expert keeps its ceil(factor * T * K / E) largest weights of the whole batch; what is dropped is counted exactly."""
    config = dataclasses.replace(BASE, capacity_factor=factor, grouped=grouped)
    params, x = drawn(config), normal(B, S, D, seed=30)
    y, _, metrics = moe(params, config, x, {"weight": WEIGHT}, training=True)
    tokens = x.flatten(0, 1)
    chosen = [chosen_by_hand(config, logits, None) for logits in tokens @ params.router_DE]
    expected, dropped, capacity = torch.zeros_like(tokens), 0, math.ceil(factor * B * S * K / E)
    for e in range(E):
        takers = sorted((t for t in range(B * S) if e in chosen[t]), key=lambda t: -float(chosen[t][e]))
        dropped += len(takers[capacity:])
        for t in takers[:capacity]:
            expected[t] += chosen[t][e] * expert_by_hand(params, e, tokens[t])
    testing.assert_close(y.flatten(0, 1), expected)
    assert int(metrics["dropped"]) == dropped > 0
    assert int(metrics["expert_counts"].sum()) == B * S * K


def test_balanced_routing_gives_slots_to_experts_in_turn():
    """Slot i = token * K + k goes to expert i mod E with the weight that its score gives it."""
    config = dataclasses.replace(BASE, kind="balanced", scale=1.3)
    params, x = drawn(config), normal(B, S, D, seed=30)
    y, _, metrics = moe(params, config, x, {"weight": WEIGHT}, training=True)
    expected = torch.zeros(B * S, D, dtype=torch.float64)
    for t, token in enumerate(x.flatten(0, 1)):
        experts = [(t * K + k) % E for k in range(K)]
        scores = (token @ params.router_DE).softmax(0)[experts]
        for e, weight in zip(experts, 1.3 * scores / scores.sum(), strict=True):
            expected[t] += weight * expert_by_hand(params, e, token)
    testing.assert_close(y.flatten(0, 1), expected)
    counts = metrics["expert_counts"]
    assert int(counts.max() - counts.min()) <= 1


@pytest.mark.parametrize(("score", "order"), [("softmax", "pre"), ("softmax", "post"), ("sigmoid", "pre")])
def test_sinkhorn_chooses_from_balanced_logits(score, order):
    """In training the choice is the largest of the doubly normalised exp(logits), the weights are of the logits themselves."""
    config = dataclasses.replace(BASE, kind="sinkhorn", score=score, order=order, router_bias=True)
    params, x = drawn(config), normal(B, S, D, seed=30)
    params = dataclasses.replace(params, router_bias_E=torch.linspace(0, 4, E, dtype=torch.float64))
    y, _, metrics = moe(params, config, x, {"weight": WEIGHT}, training=True)
    logits = logits_by_hand(params, x).flatten(0, 1)
    balanced = logits.exp()
    for _ in range(300):
        balanced = balanced / balanced.sum(1, keepdim=True)
        balanced = balanced / balanced.sum(0)
    expected = torch.zeros(B * S, D, dtype=torch.float64)
    for t, token in enumerate(x.flatten(0, 1)):
        experts = balanced[t].argsort(descending=True)[:K].tolist()
        weights = logits[t].sigmoid()[experts] if score == "sigmoid" else logits[t].softmax(0)[experts]
        for e, weight in zip(experts, weights / weights.sum(), strict=True):
            expected[t] += weight * expert_by_hand(params, e, token)
    testing.assert_close(y.flatten(0, 1), expected)
    plain = moe(params, dataclasses.replace(config, kind="topk"), x, {}, training=False)[2]
    assert metrics["expert_counts"].max() < plain["expert_counts"].max()


def test_sinkhorn_balances_tokens_without_padding():
    """The experts of a batch's tokens are those of the same tokens without the padding, whatever it holds."""
    config = dataclasses.replace(BASE, kind="sinkhorn")
    params, x = drawn(config), normal(1, S, D, seed=31)
    x[:, 4:] = x[:, :1]  # all of the padding wants what the first token wants
    documents = torch.tensor([[0] * 4 + [-1] * (S - 4)])
    y, _, metrics = moe(params, config, x, {"weight": WEIGHT, "documents": documents}, training=True)
    alone, _, alone_metrics = moe(params, config, x[:, :4], {"weight": WEIGHT}, training=True)
    testing.assert_close(y[:, :4], alone)
    assert metrics["expert_counts"].tolist() == alone_metrics["expert_counts"].tolist()


@pytest.mark.parametrize("documents", [False, True])
def test_aux_loss_equals_transformers(documents):
    """aux_loss, and global_aux_loss of one microbatch, is coefficient times weight times transformers' load_balancing_loss."""
    config = dataclasses.replace(BASE, aux_loss=0.3, global_aux_loss=0.5)
    params, x = drawn(config), normal(B, S, D, seed=30)
    ids = torch.tensor([[0] * 4 + [1] * 5, [2] * 6 + [-1] * 3])
    context = {"weight": WEIGHT, **({"documents": ids} if documents else {})}

    def ours(x):
        losses = moe(params, config, x, context, training=True)[1]
        return losses["aux_loss"], losses["global_aux_loss"]

    def theirs(x):
        mask = (ids >= 0).int() if documents else None
        loss = mixtral.load_balancing_loss_func(((x @ params.router_DE).flatten(0, 1).float(),), E, K, mask)
        return (0.3 * loss * WEIGHT.float(),)

    (actual, whole), pull_back = testing.vjp(ours, x)
    (expected,), expected_pull_back = testing.vjp(theirs, x)
    testing.assert_close(actual, expected, rtol=1e-5)
    testing.assert_close(whole / 0.5, actual / 0.3)
    one = torch.ones((), dtype=torch.float64)
    testing.assert_close(pull_back((one, 0 * one))[0], expected_pull_back((one.float(),))[0], name="dx", rtol=1e-4)


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("documents", [False, True])
def test_losses_equal_their_formulas(score, documents):
    """seq_aux_loss is the mean over rows of E / (K T) sum count * mean share; z_loss the mean square of log-sum-exp."""
    config = dataclasses.replace(BASE, score=score, **LOSSES)
    params, x = drawn(config), normal(B, S, D, seed=30)
    ids = torch.tensor([[0] * 9, [2] * 6 + [-1] * 3])
    losses = moe(params, config, x, {"weight": WEIGHT, **({"documents": ids} if documents else {})}, training=True)[1]
    assert set(losses) == set(LOSSES)
    real = ids >= 0 if documents else torch.ones_like(ids, dtype=torch.bool)
    logits = x @ params.router_DE
    rows = []
    for b in range(B):
        tokens = logits[b][real[b]]
        scores = tokens.softmax(1) if score == "softmax" else tokens.sigmoid()
        shares, counts = scores / scores.sum(1, keepdim=True), torch.zeros(E, dtype=torch.float64)
        for token in tokens:
            counts[list(chosen_by_hand(config, token, None))] += 1
        rows.append((len(tokens), counts, shares.sum(0)))
    seq = sum(E / (K * n) * (counts * shares / n).sum() for n, counts, shares in rows) / B
    testing.assert_close(losses["seq_aux_loss"], 0.7 * 5 * seq, name="seq_aux_loss")
    total, counts, shares = (sum(column) for column in zip(*rows, strict=True))
    aux = E * (counts / total * shares / total).sum()
    testing.assert_close(losses["aux_loss"], 0.3 * 5 * aux, name="aux_loss")
    z = sum(token.exp().sum().log() ** 2 for token in logits[real]) / total
    testing.assert_close(losses["z_loss"], 0.2 * 5 * z, name="z_loss")


def test_padding_goes_to_no_expert():
    """Tokens of document -1 choose nothing: they take no room of a capacity and are not counted; others are as without them."""
    config = dataclasses.replace(BASE, capacity_factor=0.7)
    params, x = drawn(config), normal(1, S, D, seed=30)
    padded = torch.cat([x, normal(1, S, D, seed=31)], 1)
    documents = torch.tensor([[0] * S + [-1] * S])
    context = {"documents": documents, "weight": WEIGHT}
    y, _, metrics = moe(params, dataclasses.replace(config, capacity_factor=0.35), padded, context, training=True)
    expected, _, metrics_alone = moe(params, config, x, {"weight": WEIGHT}, training=True)
    testing.assert_close(y[:, :S], expected)
    assert not y[:, S:].any()
    assert all(torch.equal(metrics[name], metrics_alone[name]) for name in metrics)


@pytest.mark.parametrize("options", [{"kind": "balanced"}, {"capacity_factor": 0.6}, {"kind": "sinkhorn"}, LOSSES], ids=str)
def test_storage_order_changes_nothing(options):
    """Tokens stored in another order, with their places in `order`, give the same rows, losses and counts."""
    config = dataclasses.replace(BASE, **options)
    params, x, order = drawn(config), normal(B, S, D, seed=30), torch.randperm(S, generator=torch.Generator().manual_seed(1))
    y, losses, metrics = moe(params, config, x, {"weight": WEIGHT}, training=True)
    again, losses_again, metrics_again = moe(params, config, x[:, order], {"weight": WEIGHT, "order": order}, training=True)
    testing.assert_close(again, y[:, order])
    for name, loss in losses.items():
        testing.assert_close(losses_again[name], loss, name=name)
    assert all(torch.equal(metrics[name], metrics_again[name]) for name in metrics)


@pytest.mark.parametrize("options", [{"kind": "sinkhorn"}, {"kind": "balanced"}, {"capacity_factor": 0.3}, LOSSES], ids=str)
def test_generation_looks_at_no_other_token(options):
    """Without a weight in the context every router chooses by its logits, nothing is dropped, and there are no losses."""
    config = dataclasses.replace(BASE, **options)
    params, x = drawn(config), normal(B, S, D, seed=30)
    assert config.of_all_tokens
    y, losses, metrics = moe(params, config, x, {}, training=False)
    testing.assert_close(y, moe(params, BASE, x, {}, training=False)[0])
    assert not losses and set(metrics) == {"expert_counts"}


def test_the_router_computes_in_float32():
    """In bfloat16 the logits are those of the rounded operands in float32, not rounded again."""
    params, x = tree.map_leaves(lambda p: p.bfloat16(), drawn(BASE)), normal(B, S, D, dtype=torch.bfloat16)
    logits = router_logits(params, x)
    assert logits.dtype == torch.float32
    testing.assert_close(logits, x.double() @ params.router_DE.double())
    y, _, _ = moe(params, BASE, x, {}, training=False)
    assert y.dtype == torch.bfloat16
    testing.assert_close(y, moe(tree.map_leaves(lambda p: p.double(), params), BASE, x.double(), {}, training=False)[0])


def test_the_bias_moves_towards_balance():
    """Up by the rate for experts with fewer slots than the mean, down for those with more, in place where equal."""
    bias = torch.tensor([0.5, -0.25, 0.0, 1.0])
    actual = updated_choice_bias(bias, torch.tensor([1, 4, 7, 4], dtype=torch.int32), 0.125)
    assert torch.equal(actual, torch.tensor([0.625, -0.25, -0.125, 1.0]))


def test_router_options_set_fields():
    """Options change the fields of their names and nothing else."""
    options = {"capacity_factor": 1.25, "z_loss": 1e-3, "kind": "balanced", "grouped": False}
    assert with_router_options(BASE, options) == dataclasses.replace(BASE, **options)


def test_unknown_router_options_are_all_listed():
    """Every name that is no option is in one error."""
    with pytest.raises(UnknownNameError, match=r"\['capacity', 'mlp_size'\]: there are aux_loss, bias_rate, capacity_factor"):
        with_router_options(BASE, {"capacity": 1.0, "mlp_size": 3, "z_loss": 0.1})


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"top_k": 9}, "top_k=9 is more than num_experts=8"),
        ({"top_k": 0}, "top_k=0: must be a positive int"),
        ({"groups": 3}, "groups=3 does not divide num_experts=8"),
        ({"groups": 4}, "groups_kept=1: 1 of 4 groups of 2 experts do not hold top_k=3"),
        ({"score": "tanh"}, "score='tanh': there are softmax, sigmoid"),
        ({"kind": "hash"}, "kind='hash': there are topk, sinkhorn, balanced"),
        ({"capacity_factor": 0.0}, "capacity_factor=0.0: must be a number > 0"),
        ({"capacity_factor": "1"}, "capacity_factor='1'"),
        ({"aux_loss": -1}, "aux_loss=-1: must be a number >= 0"),
        ({"bias_rate": 1e-3}, "bias_rate=0.001 moves a bias"),
        ({"kind": "sinkhorn", "choice_bias": True}, "kind='sinkhorn' does not use the bias"),
        ({"shared_gate": True}, "shared_gate=True needs a shared layer"),
        ({"top_k": 20, "groups": 3, "order": "both", "z_loss": float("nan")}, "(?s)top_k=20.*groups=3.*order='both'.*z_loss=nan"),
    ],
    ids=str,
)
def test_bad_configs_are_refused(change, text):
    """Each value that cannot be raises ConfigError, all of them at once."""
    with pytest.raises(ConfigError, match=text):
        dataclasses.replace(BASE, **change)
