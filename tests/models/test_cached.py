"""Decoding through a cache of pages: the logits of the whole forward, on every mesh, in chunks and beside other rows."""

from dataclasses import replace

import pytest
import torch

from mpar import Mesh, adapters, compile_decode, models, testing
from mpar.adapters import LoRA
from mpar.errors import ConfigError
from mpar.models import CacheSizes, Trainable
from mpar.quantised import quantise
from mpar.strategy import preset
from mpar.tree import Tree
from tests.models.variants import KINDS, VARIANTS

SIZES = CacheSizes(tokens=12, rows=3, pages_per_row=8, page_size=4, num_pages=20)
LENGTHS = (20, 5, 13)
PLAN = [{0: 7, 1: 3}, {0: 1, 1: 1, 2: 9}, {2: 1, 0: 1}, {0: 5, 1: 1, 2: 1}, *[{0: 1, 2: 1}] * 6]
"""For each step, how many tokens it reads of each row: chunks and single tokens, in any order of rows."""
MESHES = {
    "one": ({}, "ddp", {}),
    "tp": ({"tp": 2}, "tp", {}),
    "tp_over_kv_heads": ({"tp": 4}, "tp_sp", {}),
    "pp_tp": ({"pp": 2, "tp": 2}, "tp", {}),
    "cp": ({"cp": 2}, "ddp", {}),
    "cp_tp": ({"cp": 2, "tp": 2}, "tp_sp", {}),
    "zero3": ({"fsdp": 2}, "zero3", {"groups": 2}),
    "groups": ({"pp": 2, "dp": 2}, "ddp", {"groups": 2}),
    "ep": ({"tp": 2}, "tp", {"expert_parallel": 2}),
    "ep_groups": ({"dp": 2}, "ddp", {"expert_parallel": 2, "groups": 2}),
}
VARIANTS_RUN = [*KINDS, "gemma2_caps"]
CASES = [
    *((kind, "pp_tp") for kind in VARIANTS_RUN),
    *(("llama", mesh) for mesh in MESHES if mesh not in ("pp_tp", "ep", "ep_groups")),
    *((kind, "cp") for kind in ("gemma2_caps", "gpt_oss", "deepseek_v2", "mamba2")),
    ("deepseek_v2", "tp_over_kv_heads"),
    ("mamba2", "groups"),
    *(("qwen3_moe", mesh) for mesh in ("one", "ep", "ep_groups")),
]


def _model(variant: str) -> models.Model:
    kind, changes = VARIANTS.get(variant, (variant, {}))
    return models.build(kind, {**KINDS[kind].base, **changes, "initializer_range": 0.3}).with_dtype(torch.float64)


def _batches(rows: list[list[int]], groups: int):
    """The batches of the plan, and for each the rows whose logits it wants with the number of tokens that they have by then."""
    generator = torch.Generator().manual_seed(1)
    free, pages = (torch.randperm(19, generator=generator) + 1).tolist(), torch.zeros(3, 8, dtype=torch.int64)
    for row, tokens in enumerate(rows):
        for index in range(-(-len(tokens) // SIZES.page_size)):
            pages[row, index] = free.pop()
    read = [0] * len(rows)
    for step in PLAN:
        table, wanted = [], {}
        last = [-1] * len(rows)
        for row, count in step.items():
            places = range(read[row], min(read[row] + count, len(rows[row])))
            table += [(rows[row][p], p, row) for p in places]
            if places:
                read[row], last[row], wanted[row] = places.stop, len(table) - 1, places.stop
        table += [(0, 0, -1)] * (SIZES.tokens - len(table))
        columns = dict(zip(("tokens", "positions", "rows"), zip(*table, strict=True), strict=True))
        batch = {key: torch.tensor([column]) for key, column in columns.items()}
        batch |= {"pages": pages.view(1, -1), "last": torch.tensor([last])}
        yield {key: x.repeat(groups, 1) for key, x in batch.items()}, wanted


@pytest.mark.cases(6)
@pytest.mark.parametrize(("variant", "mesh"), CASES, ids=lambda value: value)
def test_decoding_equals_the_whole_forward(variant, mesh):
    """Every step's logits are those of `apply` to the row as far as it was read, to 1e-11 in float64."""
    model = _model(variant)
    _compare(model, model.init(0), model, model.init(0), mesh)


@pytest.mark.cases(4)
@pytest.mark.parametrize(
    ("variant", "kind", "mesh"),
    [
        *(("llama", None, mesh) for mesh in ("pp_tp", "cp_tp", "zero3")),
        *(("llama", kind, mesh) for kind in ("nf4", "int8") for mesh in ("tp", "zero3")),
        ("qwen3_moe", None, "ep"),
        ("deepseek_v2", None, "tp_over_kv_heads"),
        ("mamba2", None, "groups"),
    ],
)
def test_decoding_with_adapters_and_codes_equals_the_forward_of_the_weights(variant, kind, mesh):
    """The program reads A, B and the codes; its logits are those of `apply` to the sums, and to what the codes stand for."""
    sizes = {"hidden_size": 128, "intermediate_size": 128, "head_dim": 32} if kind == "nf4" else {}
    plain = models.build(variant, {**KINDS[variant].base, "initializer_range": 0.3, **sizes}).with_dtype(torch.float64)
    adapted = adapters.add(plain, LoRA(rank=2, init="random", alpha=8))
    params = adapters.first_params(adapted, plain.init(0), 1)
    if kind is None:
        _compare(adapted, params, plain, adapters.merge(adapted, params), mesh)
        return
    model = quantise(adapted, kind)
    codes = model.quantise_params(params)
    _compare(model, codes, plain, adapters.merge(adapted, model.dequantise_params(codes, torch.float64)), mesh)


def _compare(model: Trainable, params: Tree, plain: models.Model, plain_params: Tree, mesh: str) -> None:
    """Carry out the plan on a simulated mesh, and compare its logits with those of another model for the same rows."""
    axes, strategy, changes = MESHES[mesh]
    groups = changes.get("groups", 1)
    changed = replace(preset(strategy), expert_parallel=changes.get("expert_parallel", 1))
    program = compile_decode(model, Mesh(**axes), changed, replace(SIZES, groups=groups))
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(0, 61, (n,), generator=generator).tolist() for n in LENGTHS]
    expected = [plain.apply(plain_params, torch.tensor([row]))[0] for row in rows]
    state, num_compared = program.init_state(params), 0
    for batch, wanted in _batches(rows, groups):
        state, results = program.simulate(state, batch)
        for group in range(groups):
            for row, length in wanted.items():
                testing.assert_close(results["logits"][group, row], expected[row][length - 1], rtol=1e-11)
                num_compared += 1
    assert num_compared == 18 * groups  # 10, 3 and 5 steps read the three rows


def test_where_the_cache_lies():
    """Kv heads are sharded over tp, pages over cp, layers live with their stage; each part prints that it writes in place."""
    program = compile_decode(_model("llama"), Mesh(pp=2, tp=2), "tp", SIZES)
    for position, part in enumerate(program.parts):
        kept = {leaf.path: leaf for leaf in part.state_in if leaf.path.startswith("state.")}
        assert list(kept) == [f"state.layers.{position}.k_BPKH", f"state.layers.{position}.v_BPKH"]
        for leaf in kept.values():
            assert leaf.shape == (1, 80, 2, 8) and program.values[leaf.value].shape == (1, 80, 1, 8)
    assert "state.layers.0.k_BPKH', state.layers.0.v_BPKH' = forward layers.0" in program.text()
    program = compile_decode(_model("llama"), Mesh(cp=2), "ddp", SIZES)
    kept = [leaf for leaf in program.parts[0].state_in if leaf.path.startswith("state.")]
    assert {program.values[leaf.value].shape for leaf in kept} == {(1, 40, 2, 8)}


def test_models_that_are_refused():
    """RoPE that turns earlier tokens, too few learned positions; sizes that are none, or that ranks cannot divide."""
    for variant, why in (
        ("llama_dynamic_long", "its RoPE turns earlier tokens anew"),
        ("gpt2", "it has learned 64 positions, which do not reach the last of 20 pages of 4"),
    ):
        with pytest.raises(ConfigError, match=f"{why}(.|\n)*Use mpar.generate"):
            models.with_cache(_model(variant), replace(SIZES, pages_per_row=20))
    with pytest.raises(ConfigError, match=r"rows=0 must be a positive int\n.*page_size=1.5"):
        replace(SIZES, rows=0, page_size=1.5)
    with pytest.raises(ConfigError, match=r"a cache of 21 pages among 2 ranks(.|\n)*Use 22 pages"):
        compile_decode(_model("llama"), Mesh(cp=2), "ddp", replace(SIZES, num_pages=21))
    with pytest.raises(ConfigError, match="page 0 is for padding"):
        replace(SIZES, num_pages=1)
