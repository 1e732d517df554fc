"""Groups of tokens and padded experts in the layer: against the layer on each group alone, and against ragged rows."""

import dataclasses
import functools

import pytest
import torch

from mpar import testing, tree
from mpar.errors import ConfigError, ShapeError
from mpar.models.layers.moe import moe
from tests.models.layers.test_moe import BASE, FULL, LOSSES, WEIGHT, D, drawn, normal

B, S = 4, 6
X = normal(B, S, D, seed=40)
DOCUMENTS = torch.tensor([[0] * 6, [0] * 3 + [-1] * 3, [1] * 6, [-1] * 6])
GROUPS = [(2, 1), (1, 3), (2, 3), (4, 6)]
ORDER = torch.tensor([0, 5, 1, 2, 4, 3])


def context(packed: bool) -> dict:
    return {"weight": WEIGHT, "order": ORDER, **({"documents": DOCUMENTS} if packed else {})}


def of_groups(groups, fn):
    """`fn(rows, positions)` of each group, as slices; the results group by group, positions faster."""
    g, h = groups
    rows = [slice(i * B // g, (i + 1) * B // g) for i in range(g)]
    positions = [slice(j * S // h, (j + 1) * S // h) for j in range(h)]
    return [fn(i, j) for i in rows for j in positions]


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed"])
@pytest.mark.parametrize("groups", GROUPS, ids=str)
@pytest.mark.parametrize("options", [{"capacity_factor": 0.5}, {"kind": "sinkhorn", "choice_bias": False}], ids=str)
def test_a_group_is_as_if_it_were_alone(options, groups, packed):
    """Rows that are kept, the balance that is chosen from, and aux_loss; z_loss and counts are of all tokens."""
    config = dataclasses.replace(FULL, **options, aux_loss=0.3, z_loss=0.2, token_groups=groups)
    params, single = drawn(config), dataclasses.replace(config, token_groups=(1, 1))
    y, losses, metrics = moe(params, config, X, context(packed), training=True)

    def alone(rows, positions):
        part = {"weight": WEIGHT, "order": ORDER[positions]}
        part |= {"documents": DOCUMENTS[rows, positions]} if packed else {}
        y, own, counted = moe(params, single, X[rows, positions], part, training=True)
        testing.assert_close(together[rows, positions], y, name="y")
        return own["aux_loss"], counted

    together = y
    parts = of_groups(groups, alone)
    testing.assert_close(losses["aux_loss"], sum(aux for aux, _ in parts) / len(parts), name="aux_loss")
    for name, value in metrics.items():
        assert torch.equal(value, sum(counted[name] for _, counted in parts)), name
    whole = moe(params, single, X, context(packed), training=True)
    testing.assert_close(losses["z_loss"], whole[1]["z_loss"], name="z_loss")
    assert not torch.equal(y, whole[0])
    assert not torch.equal(losses["aux_loss"], whole[1]["aux_loss"])


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed"])
@pytest.mark.parametrize("groups", [(1, 1), *GROUPS], ids=str)
@pytest.mark.parametrize("options", [{}, {"clamp": 0.7}, {"score": "sigmoid", "shared": None, "shared_gate": False}], ids=str)
def test_padded_experts_equal_ragged_ones(options, groups, packed):
    """Output, losses, metrics and the gradients of every parameter, biases too, of which empty slots see none."""
    config = dataclasses.replace(FULL, **LOSSES, **options, capacity_factor=0.8, token_groups=groups)
    params = drawn(config)

    def run(config, params, x):
        y, losses, _ = moe(params, config, x, context(packed), training=True)
        return y, losses

    results, grads = {}, {}
    for padded in (True, False):
        chosen = dataclasses.replace(config, padded=padded)
        results[padded], pull_back = testing.vjp(functools.partial(run, chosen), params, X)
        grads[padded] = pull_back(tree.map_leaves(lambda x: normal(*x.shape, seed=31), results[padded]))
    testing.assert_close(results[True][0], results[False][0], name="y")
    for name, loss in results[True][1].items():
        testing.assert_close(loss, results[False][1][name], name=name)
    for path, grad in tree.leaves_with_path(grads[True]):
        testing.assert_close(grad, tree.get(grads[False], path), name=path)
        assert bool(grad.any()) == ("choice_bias_E" not in path), path
    dropped = int(moe(params, config, X, context(packed), training=True)[2]["dropped"])
    assert (dropped > 0) == (groups != (4, 6))  # groups of one token drop nothing


def test_all_is_dropped_but_one():
    """Every token chooses the same experts: of each group C stay, and the others get nothing."""
    config = dataclasses.replace(BASE, capacity_factor=0.2, token_groups=(2, 1), padded=True)  # ceil(12 * 3 / 8 * 0.2) = 1
    params = dataclasses.replace(drawn(config), router_DE=torch.zeros(D, 8, dtype=torch.float64))
    y, _, metrics = moe(params, config, X, {"weight": WEIGHT}, training=True)
    assert y.any(-1).nonzero().tolist() == [[0, 0], [2, 0]]
    assert int(metrics["dropped"]) == 3 * (B * S - 2)


def test_generation_is_not_padded():
    """Without labels nothing is dropped, and groups, which may not divide what is generated, are not looked at."""
    config = dataclasses.replace(BASE, capacity_factor=0.2, token_groups=(3, 5), padded=True)
    params = drawn(config)
    testing.assert_close(moe(params, config, X, {}, training=False)[0], moe(params, BASE, X, {}, training=False)[0])


def test_groups_that_do_not_divide_are_refused():
    """With both numbers."""
    config = dataclasses.replace(BASE, capacity_factor=1.0, token_groups=(3, 4))
    with pytest.raises(ShapeError, match=r"3 does not divide the 4 sequences and 4 does not divide the 6 positions"):
        moe(drawn(config), config, X, {"weight": WEIGHT}, training=True)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"padded": True}, "padded=True needs a capacity: set capacity_factor"),
        ({"padded": True, "capacity_factor": 1.0, "grouped": False}, "padded=True .* needs grouped=True"),
        ({"padded": "yes"}, "padded='yes': must be True or False"),
        ({"token_groups": (2, 1)}, r"token_groups=\(2, 1\) changes nothing"),
        ({"token_groups": (2, 0), "aux_loss": 0.1}, "must be two positive ints"),
        ({"token_groups": [2], "aux_loss": 0.1}, r"token_groups=\(2,\): must be two"),
        ({"token_groups": 2, "aux_loss": 0.1}, "token_groups=2: must be two"),
        ({"token_groups": (True, 1), "aux_loss": 0.1}, "must be two positive ints"),
    ],
    ids=str,
)
def test_bad_configs_are_refused(change, text):
    """What contradicts itself, or would do nothing."""
    with pytest.raises(ConfigError, match=text):
        dataclasses.replace(BASE, **change)
