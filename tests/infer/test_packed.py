"""Packed matrices under adapters and in code that Inductor compiled: steps multiply with their blocks, and find what they find
without. Matrices of float32 are packed here, which every CPU multiplies with."""

import dataclasses

import pytest
import torch

from mpar import adapters, tree
from mpar.adapters import LoRA
from mpar.infer import _packed_params
from mpar.infer.compile import ProgramRunner
from mpar.ops import PackedMatrix, _packed_matrix, lie_side_by_side
from mpar.runtime import _inductor
from tests.infer.banks import LORAS, bank_params
from tests.infer.test_adapters import SIZES, answers, make, mixed

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, when it loads its compiler
KINDS_RUN = ["llama", "gpt2", "deepseek_v3", "mixtral"]


@pytest.fixture
def packing(monkeypatch):
    """Matrices of float32 are packed, as where there are no kernels in C++, and no step may put one together again."""
    monkeypatch.setattr(_packed_params, "few_rows_read_columns", lambda dtype: False)
    monkeypatch.setattr(_packed_matrix, "onednn_packs", lambda dtype: dtype == torch.float32)
    monkeypatch.setattr(PackedMatrix, "blocks_as_plain", lambda self: pytest.fail("a step put a matrix together"))


def packed_paths(runner) -> set[str]:
    """The paths of the packed matrices in the state."""
    return {path for path, leaf in runner.state.leaves.items() if isinstance(leaf, PackedMatrix)}


def recorded(graph, operands, *_):
    """The graph, in place of the function that Inductor would make of it."""
    assert all(type(operand) in (torch.Tensor, torch.nn.Parameter) for operand in operands)
    return graph


@pytest.mark.cases(2)
@pytest.mark.parametrize("kind", KINDS_RUN)
def test_adapters_by_request_keep_packed_matrices(packing, monkeypatch, kind):
    """As many matrices are packed as without adapters; rows of unlike adapters find what they find without packing."""
    model, params, bank = make(kind, torch.float32)
    runner = ProgramRunner(bank, bank_params(bank, params), SIZES)
    assert packed_paths(runner) == packed_paths(ProgramRunner(model, params, SIZES)) != set()
    found, _ = answers(runner, mixed(bank))
    scores = runner.scores([torch.tensor([3, 9, 27, 11, 33])], 1, 1)[0].logprobs_S
    monkeypatch.setattr(_packed_matrix, "onednn_packs", lambda dtype: False)
    plain = ProgramRunner(bank, bank_params(bank, params), SIZES)
    assert not packed_paths(plain)
    for (tokens, logits), (expected, expected_logits) in zip(found, answers(plain, mixed(bank))[0], strict=True):
        assert tokens == expected
        assert (logits.log_softmax(-1) - expected_logits.log_softmax(-1)).abs().max() < 1e-5
    assert (scores - plain.scores([torch.tensor([3, 9, 27, 11, 33])], 1, 1)[0].logprobs_S).abs().max() < 1e-5


def test_matrices_whose_norms_are_read_stay_plain(packing):
    """DoRA computes the norms of the matrices that it is added to. These are not packed, nor are those beside which they lie."""
    model, params, _ = make("llama", torch.float32)
    adapted = adapters.add(model, LoRA(rank=2, init="random", dora=True, targets=("q_proj", "down_proj")))
    runner = ProgramRunner(adapted, adapters.first_params(adapted, params, 1), SIZES)
    left = packed_paths(ProgramRunner(model, params, SIZES)) - packed_paths(runner)
    assert {path.rpartition(".")[2] for path in left} == {"q_DNH", "k_DKH", "v_DKH", "down_FD"} and packed_paths(runner)
    answers(runner, [([1, 5, 2], None)])


COMPILED = {"marks": pytest.mark.full("compiles C++ for a minute and more")}


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("kind", "how"),
    [(k, "recorded") for k in ("llama", "mixtral")] + [pytest.param(k, "compiled", **COMPILED) for k in ("llama", "mixtral")],
)
def test_compiled_code_multiplies_with_packed_matrices(packing, monkeypatch, kind, how):
    """With adapters and without, the tokens are those of code that is not compiled, and logits up to rounding. `recorded`: the
    graphs that Inductor gets run as they are; none of them has a packed matrix among its operands."""
    if how == "recorded":
        monkeypatch.setattr(_inductor, "inductor_compile", recorded)
    model, params, bank = make(kind, torch.float32, {name: LORAS[name] for name in ("few", "head")})
    sizes = dataclasses.replace(SIZES, rows=2, tokens=4)
    for adapted, values, asked in ((model, params, [([1, 5, 2], None)]), (bank, bank_params(bank, params), mixed(bank)[:4])):
        runner = ProgramRunner(adapted, values, sizes, execution="inductor")
        found, _ = answers(runner, asked)
        expected, _ = answers(ProgramRunner(adapted, values, sizes), asked)
        assert packed_paths(runner)
        for (tokens, logits), (tokens_without, logits_without) in zip(found, expected, strict=True):
            assert tokens == tokens_without
            assert (logits.log_softmax(-1) - logits_without.log_softmax(-1)).abs().max() < 1e-5


@pytest.mark.parametrize("execution", ["eager", pytest.param("inductor", marks=pytest.mark.full("compiles code"))])
def test_plain_matrices_lie_side_by_side_if_they_stay(execution):
    """Those that a runner has from the start; those of a training, which come by `load`, are read where they are."""
    model, params, _ = make("llama", torch.float32)
    prompts = [([1, 5, 2], None)]
    runner = ProgramRunner(model, params, SIZES, execution=execution)
    q, k, v, gate, up = weights_of(runner)
    assert lie_side_by_side([q, k, v], 1) and lie_side_by_side([gate, up], 1)
    ((tokens, logits),), _ = answers(runner, prompts)
    given = dict(tree.leaves_with_path(params))
    runner.load(given)
    q, k, v, gate, up = weights_of(runner)
    assert q.data_ptr() == given["layers.0.attention.q_DNH"].data_ptr() and not lie_side_by_side([q, k, v], 1)
    ((apart, logits_apart),), _ = answers(runner, prompts)
    assert apart == tokens and (logits - logits_apart).abs().max() < 1e-4


def weights_of(runner):
    """The matrices of the first layer that are multiplied with the same features."""
    attention, mlp = ("q_DNH", "k_DKH", "v_DKH"), ("gate_DF", "up_DF")
    names = [*(f"attention.{name}" for name in attention), *(f"mlp.{name}" for name in mlp)]
    return [runner.state.leaves[f"params.layers.0.{name}"] for name in names]
