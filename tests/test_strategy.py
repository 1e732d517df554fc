"""Strategies: where tables put parameters, gradients and optimizer state."""

from dataclasses import replace

import pytest
import torch

from mpar import models
from mpar.errors import ShardingError, UnknownNameError
from mpar.mesh import Mesh
from mpar.optim import SGD
from mpar.program.compile import compile_step
from mpar.spec import P
from mpar.strategy import dim_sizes, preset
from tests.small_llama import CONFIG

MESH = Mesh(dp=2, fsdp=4, tp=2)
GATE = ("embed", "mlp")


@pytest.mark.parametrize(
    ("name", "param", "grad", "opt"),
    [
        ("ddp", P(), P(), P()),
        ("zero1", P(), P(), P("fsdp")),
        ("zero2", P(), P("fsdp"), P("fsdp")),
        ("zero3", P("fsdp"), P("fsdp"), P("fsdp")),
        ("zero1_tp", P(None, "tp"), P(None, "tp"), P("fsdp", "tp")),
        ("zero3_tp_sp", P("fsdp", "tp"), P("fsdp", "tp"), P("fsdp", "tp")),
    ],
)
def test_zero_is_a_table(name, param, grad, opt):
    """The stage of ZeRO decides which of parameters, gradients and optimizer state are sharded over fsdp."""
    strategy = preset(name)
    assert [strategy.storage_spec(GATE, kind, MESH) for kind in ("param", "grad", "opt")] == [param, grad, opt]


def test_a_mesh_axis_is_used_once():
    """A storage rule does not use an axis that compute already gives to the tensor."""
    strategy = replace(preset("zero3"), compute={**preset("zero3").compute, "mlp": ("fsdp",)})
    assert strategy.storage_spec(GATE, "param", MESH) == P(None, "fsdp")


def test_sequence_parallel_shards_the_residual_stream_only():
    """SP differs from TP in one row."""
    tp, sp = preset("tp"), preset("tp_sp")
    assert sp.compute_spec(("batch", "residual_seq", "embed"), MESH) == P(("dp", "fsdp"), "tp")
    assert (
        sp.compute_spec(("batch", "seq", "embed"), MESH) == tp.compute_spec(("batch", "seq", "embed"), MESH) == P(("dp", "fsdp"))
    )


@pytest.mark.parametrize(
    ("num_kv_heads", "kept", "sizes"),
    [(4, ("tp",), {"tp": 4}), (2, ("tp_outer",), {"tp_outer": 2, "tp_inner": 2}), (1, (), {"tp": 4})],
)
def test_fewer_kv_heads_than_tp(num_kv_heads, kept, sizes):
    """kv heads are sharded over the largest outer part of tp that divides them."""
    k_DKH = torch.empty(8, num_kv_heads, 4, device="meta")
    strategy, mesh = preset("tp").refine(Mesh(tp=4), dim_sizes((k_DKH,), (("embed", "kv_heads", "head"),)))
    assert strategy.compute["kv_heads"] == kept and dict(mesh.sizes) == sizes


def test_what_does_not_divide_is_listed_at_once():
    """Every offending parameter and batch entry is named, and an axis without a use too."""
    shapes = {"a": torch.empty(6, 8, device="meta"), "b": torch.empty(10, device="meta")}
    axes = {"a": GATE, "b": ("embed",)}
    with pytest.raises(ShardingError) as error:
        preset("zero3").check(Mesh(fsdp=4, tp=2), shapes, axes, {"tokens": ((6, 3), ("batch", "seq"))})
    for words in ("parameter a", "parameter b", "batch 'tokens'", "mesh axes ['tp'] are used by no row"):
        assert words in str(error.value)


def test_what_all_layers_have_is_said_once():
    """A parameter of every layer that does not divide is one line with the number of layers; others keep their lines."""
    layer = {"w": torch.empty(6, 8, device="meta")}
    shapes = {"layers": (layer, layer, layer), "b": torch.empty(10, device="meta")}
    axes = {"layers": ({"w": GATE},) * 3, "b": ("embed",)}
    with pytest.raises(ShardingError) as error:
        preset("zero3").check(Mesh(fsdp=4), shapes, axes, {})
    lines = str(error.value).splitlines()[1:-2]
    assert [line.split(" by ")[0] for line in lines] == ["  parameter layers.*.w (6, 8)", "  parameter b (10,)"]
    assert lines[0].endswith("does not divide, in 3 layers")


def test_unknown_names():
    """The message has the list of what there is."""
    with pytest.raises(UnknownNameError, match="zero3_tp_sp"):
        preset("zero4")
    with pytest.raises(UnknownNameError, match=r"storage tables have rows for \['embd'\]"):
        replace(preset("zero3"), param_storage={"embd": ("fsdp",)})
    with pytest.raises(UnknownNameError, match="'hedas'"):
        preset("tp").compute_spec(("hedas",), MESH)


def test_strategies_are_keys_of_dicts():
    """Equal strategies have one hash, whatever the order of their tables; strategies that differ in a table alone have two."""
    zero3 = preset("zero3")
    turned = replace(zero3, compute=dict(reversed(zero3.compute.items())))
    assert turned == zero3 and hash(turned) == hash(zero3)
    for table in ("param_storage", "grad_storage", "opt_storage"):
        other = replace(zero3, **{table: {}})
        assert other != zero3 and hash(other) != hash(zero3), table


@pytest.mark.parametrize("table", ["compute", "param_storage", "grad_storage", "opt_storage"])
def test_axes_that_no_mesh_has_are_refused(table):
    """A misspelt mesh axis in any table, which would else count as one of size 1; an axis of this mesh alone is one."""
    zero3 = preset("zero3")
    wrong = replace(zero3, **{table: {**getattr(zero3, table), "mlp": ("tpp",)}})
    with pytest.raises(UnknownNameError, match=r"no mesh axis is called \['tpp'\]; Mesh\(dp=2\) has"):
        compile_step(models.from_config(CONFIG), SGD(lr=1.0), Mesh(dp=2), wrong, (8, 8))
    replace(zero3, **{table: {**getattr(zero3, table), "mlp": ("other",)}}).check_axes(Mesh(other=2))
