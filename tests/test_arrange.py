"""Arranging: the order of positions, the rows of a strategy's table, and what cannot be arranged."""

from dataclasses import replace

import pytest
import torch

from mpar import Mesh
from mpar.arrange import arrange, check_sequence, num_order_parts, sequence_order
from mpar.errors import ConfigError, ShapeError
from mpar.strategy import Strategy, preset

AXES = {"q": ("embed", "heads"), "k": ("embed", "kv_heads"), "up": ("expert", "embed", "expert_mlp")}


def arranged(mesh: Mesh, base: str = "ddp", *, heads=8, kv_heads=4, experts=8, **options) -> tuple[Strategy, Mesh]:
    shapes = {"q": torch.empty(16, heads), "k": torch.empty(16, kv_heads), "up": torch.empty(experts, 16, 8)}
    return arrange(replace(preset(base), **options), mesh, shapes, AXES)


def rows(strategy: Strategy, *names: str) -> list[tuple[str, ...]]:
    return [strategy.compute[name] for name in names]


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 8])
def test_order_gives_every_rank_an_early_and_a_late_part(num_ranks):
    """Rank i has parts i and 2 n - 1 - i, whole and in order; the sum of what they see is the same."""
    length = 6 * num_ranks
    order = sequence_order(length, 2 * num_ranks)
    parts = torch.arange(length).view(2 * num_ranks, 3)
    for rank, own in enumerate(order.chunk(num_ranks)):
        assert torch.equal(own, torch.cat([parts[rank], parts[-1 - rank]]))
        assert int((own + 1).sum()) * num_ranks == length * (length + 1) // 2
    assert order.dtype == torch.int64


def test_one_part_leaves_the_order():
    """Nothing is dealt out to one rank, or to ranks that have everything by heads."""
    assert torch.equal(sequence_order(5, 1), torch.arange(5))


@pytest.mark.parametrize(
    ("mesh", "options", "parts"),
    [
        (Mesh(cp=4), {}, 8),
        (Mesh(cp=4), {"sequence": "zigzag"}, 8),
        (Mesh(cp=4), {"sequence": "contiguous"}, 1),
        (Mesh(cp=4), {"context_parallel": "all_gather"}, 8),
        (Mesh(cp=4), {"context_parallel": "all_to_all"}, 1),
        (Mesh(cp=4), {"context_parallel": "all_to_all+ring"}, 4),
        (Mesh(dp=4), {}, 1),
    ],
    ids=str,
)
def test_parts_are_two_for_each_rank_that_attends_by_sequence(mesh, options, parts):
    """Ranks that share attention by heads alone see the whole sequence and need no balance."""
    assert num_order_parts(*arranged(mesh, **({"context_parallel": "ring"} | options))) == parts


@pytest.mark.parametrize(
    ("method", "found"),
    [
        ("ring", [("cp",), ("cp",), ("tp",), ("tp",)]),
        ("all_gather", [("cp",), (), ("tp",), ("tp",)]),
        ("all_to_all", [(), (), ("tp", "cp"), ("tp", "cp")]),
    ],
)
def test_a_method_is_four_rows(method, found):
    """Where queries and keys are by sequence and by heads while attention runs; heads go to tensor parallel ranks first."""
    strategy, mesh = arranged(Mesh(cp=2, tp=2), "tp_sp", context_parallel=method)
    assert mesh == Mesh(cp=2, tp=2)
    assert rows(strategy, "attend_seq", "attend_kv_seq", "attend_heads", "attend_kv_heads") == found


@pytest.mark.parametrize(("heads", "kv_heads", "inner"), [(8, 4, 2), (12, 4, 2), (6, 2, 2), (8, 1, 2), (4, 4, 2)])
def test_two_levels_split_the_axis(heads, kv_heads, inner):
    """By heads within groups of ranks, by sequence between them."""
    strategy, mesh = arranged(Mesh(cp=4), heads=heads, kv_heads=kv_heads, context_parallel="all_to_all+ring")
    assert mesh == Mesh(cp_outer=4 // inner, cp_inner=inner)
    assert rows(strategy, "attend_seq", "attend_kv_seq", "attend_heads") == [("cp_outer",), ("cp_outer",), ("cp_inner",)]
    assert strategy.compute["seq"] == ("cp_outer", "cp_inner")


def test_fewer_kv_heads_than_ranks_are_shared():
    """Four kv heads on eight ranks: pairs of ranks have the same one."""
    strategy, mesh = arranged(Mesh(cp=8), context_parallel="all_to_all")
    assert mesh == Mesh(cp_outer=4, cp_inner=2)
    assert rows(strategy, "attend_heads", "attend_kv_heads") == [("cp_outer", "cp_inner"), ("cp_outer",)]


@pytest.mark.parametrize(("heads", "kv_heads", "cp"), [(6, 3, 2), (6, 2, 4), (9, 3, 2), (10, 5, 2)])
def test_heads_that_cannot_be_divided_are_refused(heads, kv_heads, cp):
    """Too few heads, or kv heads that would be shared by ranks whose query heads read others too."""
    with pytest.raises(ConfigError, match=rf"(?s)among {cp} of the {cp} ranks.*{heads} heads.*{kv_heads} kv heads.*ring"):
        arranged(Mesh(cp=cp), heads=heads, kv_heads=kv_heads, context_parallel="all_to_all")


@pytest.mark.parametrize(
    ("mesh", "base", "options", "refined", "expert", "inside"),
    [
        (Mesh(dp=4), "ddp", {"expert_parallel": 4}, Mesh(dp=4), ("dp",), ()),
        (Mesh(dp=4), "ddp", {"expert_parallel": 2}, Mesh(dp_outer=2, dp_inner=2), ("dp_inner",), ()),
        (Mesh(dp=2, tp=2), "tp", {"expert_parallel": 2}, Mesh(dp=2, tp=2), ("dp",), ("tp",)),
        (Mesh(dp=2, tp=2), "tp", {"expert_parallel": 4}, Mesh(dp=2, tp=2), ("dp", "tp"), ()),
        (Mesh(dp=2, tp=2), "tp", {"expert_parallel": 2, "expert_axes": ("tp",)}, Mesh(dp=2, tp=2), ("tp",), ()),
        (Mesh(dp=2, tp=2), "tp", {"expert_parallel": 2, "expert_tensor_parallel": False}, Mesh(dp=2, tp=2), ("dp",), ()),
        (Mesh(pp=2, dp=2, cp=2), "ddp", {"expert_parallel": 4}, Mesh(pp=2, dp=2, cp=2), ("dp", "cp"), ()),
    ],
    ids=str,
)
def test_experts_take_axes_from_inside(mesh, base, options, refined, expert, inside):
    """Innermost axes first, tensor parallel ones last; an axis that is too large is split, stages are left alone."""
    strategy, found = arranged(mesh, base, **options)
    assert found == refined
    assert rows(strategy, "expert", "expert_mlp") == [expert, inside]


def test_a_gathering_dispatcher_gathers_over_the_experts_axes_only():
    """Other axes shard the tokens still."""
    strategy, _ = arranged(Mesh(dp=2, cp=2), expert_parallel=2, dispatcher="all_gather", expert_axes=("cp",))
    assert [axis for axis in strategy.compute["moe_batch"] if axis == "dp"] == ["dp"]
    assert strategy.compute["moe_seq"] == ()


@pytest.mark.parametrize(("length", "longer"), [(30, 32), (1, 8), (33, 40)])
def test_a_sequence_that_does_not_divide_is_refused(length, longer):
    """The message names the length with padding that would do."""
    strategy, mesh = arranged(Mesh(cp=4), context_parallel="ring")
    check_sequence(strategy, mesh, longer, dealt=True)
    with pytest.raises(ShapeError, match=rf"{length} positions.*\n?.*Use {longer} \({longer - length} positions of padding\)"):
        check_sequence(strategy, mesh, length, dealt=True)
    contiguous, _ = arranged(Mesh(cp=4), context_parallel="ring", sequence="contiguous")
    check_sequence(contiguous, mesh, 4, dealt=True)


def test_words_are_checked_on_any_mesh():
    """A wrong word is refused on one rank too, where it would change nothing."""
    for options in ({"context_parallel": "rings"}, {"dispatcher": "all"}, {"expert_parallel": 3}, {"expert_parallel": 0}):
        with pytest.raises(ConfigError):
            arranged(Mesh(), **options)
