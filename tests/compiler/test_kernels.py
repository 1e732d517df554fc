"""The choice of kernels is part of the program: printed, the same on every rank, refused where it cannot be carried out."""

from dataclasses import dataclass

import pytest
import torch

from mpar import Mesh, models, testing
from mpar.errors import ConfigError, KernelError, UnknownNameError
from mpar.hardware import hardware
from mpar.kernels import CATALOGUE, Kernels, _attention_support, choose, implementation
from mpar.optim import AdamW
from mpar.program import RankRun
from mpar.program.compile import compile_step
from mpar.runtime import ALONE, State
from mpar.runtime import _load as runtime
from mpar.runtime._device import check_device

TINY = {
    "model_type": "qwen3",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "vocab_size": 96,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}


def compile_tiny(kernels, dtype=torch.float32):
    """A step of a tiny Qwen3 on one rank."""
    model = models.from_config(TINY, dtype=dtype, vocab_multiple=1)
    return model, compile_step(model, AdamW(lr=1e-2), Mesh(), "ddp", (2, 16), kernels=kernels)


def step(program, model):
    """State and metrics after one step."""
    tokens = torch.randint(0, 96, (2, 17), generator=torch.Generator().manual_seed(3))
    state = program.init_state(model.init(0))
    batch = {"tokens": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}
    return RankRun(program, ALONE)(State({k: v.clone() for k, v in state.leaves.items()}), batch)


def test_step_by_kernels_is_the_step(monkeypatch):
    """A whole training step by Triton's kernels, in the interpreter, gives the references' loss, norm and parameters."""
    monkeypatch.setattr(_attention_support, "DTYPES", (torch.float32,))  # attention too: chips have no kernel of it for float32
    model, program = compile_tiny(Kernels("auto", "sm_90"))
    called = set()

    def load(kernels, key):
        called.add(key)
        return implementation(*key)

    expected, metrics = step(program, model)
    monkeypatch.setattr(runtime._Kernels, "__missing__", load)
    actual, ours = step(program, model)
    testing.assert_close(ours["loss"], metrics["loss"], name="loss")
    testing.assert_close(ours["grad_norm"], metrics["grad_norm"], name="norm")
    for path, leaf in expected.leaves.items():
        testing.assert_close(actual.leaves[path], leaf, name=path, rtol=1e-4)  # Adam divides by tiny roots at the first step
    assert {(name, "triton") for name in ("swiglu", "swiglu_bwd", "attention", "attention_bwd")} <= called


def test_program_names_its_kernels():
    """The text says what carries out what, and on a CPU nothing, for there is nothing to choose."""
    _, program = compile_tiny(Kernels("auto", "sm_90"))
    line = program.text().splitlines()[1]
    assert line.startswith("kernels auto sm_90: triton ")
    assert "swiglu" in line
    _, program = compile_tiny(Kernels())
    assert "kernels" not in program.text()


def test_chip_of_the_profile_is_chosen_for():
    """A plan for an H200 has its kernels, on a machine without one."""
    model = models.from_config(TINY, dtype=torch.float32, vocab_multiple=1)
    program = compile_step(model, AdamW(lr=1e-2), Mesh(tp=1), "ddp", (2, 16), hardware=hardware("h200"))
    assert program.facts.kernels == Kernels("auto", "sm_90")
    assert any(use.implementation == "triton" for kind in program.kinds.values() for use in kind.kernels)


def test_unsupported_dtype_falls_back_or_raises():
    """float64 is for references: auto says why, triton refuses with the same reason."""
    _, program = compile_tiny(Kernels("auto", "sm_90"), torch.float64)
    assert "reference" in program.text().splitlines()[1]
    assert "float64" in program.text().splitlines()[1]
    with pytest.raises(KernelError, match=r"cannot carry out .* on sm_90: triton: .*float64.*kernels=auto"):
        compile_tiny(Kernels("triton", "sm_90"), torch.float64)


def test_torch_means_none_of_ours():
    """kernels=torch leaves every primitive to its reference or to another library's kernel."""
    _, program = compile_tiny(Kernels("torch", "sm_90"))
    assert all(use.implementation != "triton" for kind in program.kinds.values() for use in kind.kernels)


def test_unknown_chip_says_so_once():
    """A chip without kernels runs references, and the program's text has one line about it."""
    _, program = compile_tiny(Kernels("auto", "sm_75"))
    assert program.text().splitlines()[1] == "kernels auto: none for sm_75, only for sm_80, sm_90, sm_100; references run"
    with pytest.raises(KernelError, match="kernels=triton was asked for on sm_75"):
        Kernels("triton", "sm_75")
    with pytest.raises(KernelError, match=r"on a CPU.*kernels=auto"):
        Kernels("triton")
    with pytest.raises(UnknownNameError, match="auto, triton, torch"):
        Kernels("fast")


@dataclass
class FakeDevice:
    """What a check asks of a device."""

    type: str = "cuda"

    def __str__(self):
        return "cuda:0"


def test_another_chip_is_refused(monkeypatch):
    """A program for one chip does not start on another."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A100")
    check_device(Kernels("auto", "sm_80"), FakeDevice())
    check_device(Kernels("auto", "sm_90"), FakeDevice("cpu"))
    with pytest.raises(ConfigError, match=r"cuda:0 \(A100, sm_80\).*for sm_90.*kernels=torch"):
        check_device(Kernels("auto", "sm_90"), FakeDevice())


def test_catalogue_is_whole():
    """Every entry of the catalogue is a primitive's, loads, and answers for meta operands of the wrong dtype in words."""
    for primitive, candidates in CATALOGUE.items():
        for candidate in candidates:
            assert callable(candidate.load()), primitive
    x = torch.empty(4, dtype=torch.float64, device="meta")
    assert choose(Kernels("auto", "sm_90"), "swiglu", (x, x), {}) == (
        "reference",
        "triton: kernels compute in float32 and take no torch.float64",
    )


def test_references_need_what_they_need_on_a_gpu():
    """A head size without a kernel: the scores of a row are in memory at once, and the prediction says so."""
    model = models.from_config(TINY | {"head_dim": 32}, dtype=torch.float32, vocab_multiple=1)
    need = {}
    for length in (64, 128):
        program = compile_step(model, AdamW(lr=1e-2), Mesh(), "ddp", (2, length), kernels=Kernels("auto", "sm_90"))
        need[length] = program.kinds["layers backward"].workspace
    scores = {length: 2 * length * length * 4 for length in need}
    assert need == {length: 3 * size for length, size in scores.items()}
