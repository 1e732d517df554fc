"""Programs as plain data: what is read is what was written, it verifies, and it trains with the same bits."""

from dataclasses import dataclass, replace

import pytest
import torch

from mpar import Mesh, models
from mpar.compiler import policy
from mpar.errors import PlainDataError
from mpar.optim import CLASSES, SGD, WSD, AdamW, Constant, Cosine, Linear, Optimizer
from mpar.program import Program
from mpar.program.compile import compile_eval, compile_step
from mpar.strategy import preset
from tests.program.oracle import BASE, DEEPSEEK, MOE
from tests.program.test_golden import CASES as GOLDEN

pytestmark = pytest.mark.cases(3)  # each compiles a program of its own
QWEN3 = {**BASE, "model_type": "qwen3"}
STEPS = {
    "golden zero3": (QWEN3, *GOLDEN["zero3_fsdp2"]),
    "golden ddp": (QWEN3, *GOLDEN["ddp_dp2"]),
    "golden tp_sp": (QWEN3, *GOLDEN["zero3_tp_sp_fsdp2_tp2"]),
    "pipeline": (QWEN3, Mesh(pp=2, dp=2), "zero1", {"num_microbatches": 4, "schedule": "zb_h1"}),
    "experts": (MOE, Mesh(fsdp=2, tp=2), replace(preset("zero3_tp_sp"), expert_parallel=2), {}),
    "latent, slices": (DEEPSEEK, Mesh(dp=2), "zero2", {"num_slices": 2, "recompute": "full"}),
    "ring": (QWEN3, Mesh(cp=2), replace(preset("ddp"), context_parallel="ring"), {}),
    "bf16, offload": (QWEN3, Mesh(dp=1), "ddp", {"precision": "bf16", "recompute": policy("full", offload=True)}),
}
RATES = {
    "golden ddp": SGD(lr=Constant(lr=0.1, warmup_steps=2), momentum=0.9),
    "golden tp_sp": AdamW(lr=WSD(lr=1e-3, total_steps=10, shape="1-sqrt")),
    "pipeline": AdamW(lr=Linear(lr=1e-3, total_steps=10, min_ratio=0.1)),
    "ring": AdamW(lr=1e-3, clip_norm=None),
}


def make_batch() -> dict[str, torch.Tensor]:
    """8 rows of 16 tokens."""
    generator = torch.Generator().manual_seed(1)
    return {key: torch.randint(0, BASE["vocab_size"], (8, 16), generator=generator) for key in ("tokens", "labels")}


def same(program: Program, again: Program) -> None:
    """Compare all that two programs hold, besides the tensors of their kinds, which are compared by their bits."""
    assert again.to_plain(CLASSES) == program.to_plain(CLASSES)
    assert again.facts == program.facts
    for kind, other in zip(program.kinds.values(), again.kinds.values(), strict=True):
        assert replace(kind, constants={}) == replace(other, constants={})
        assert all(torch.equal(value, other.constants[name]) for name, value in kind.constants.items())
    bare = [replace(p, kinds={}, facts=None) for p in (program, again)]
    assert bare[0] == bare[1]


@pytest.mark.parametrize("case", STEPS)
def test_a_read_program_trains_alike(case):
    """It is equal in every field, verifies, and its step has the bits of the one that was written."""
    config, mesh, strategy, options = STEPS[case]
    model = models.from_config(config, dtype=torch.float32)
    optimizer = RATES.get(case, AdamW(lr=Cosine(lr=1e-2, total_steps=5)))
    program = compile_step(model, optimizer, mesh, strategy, (8, 16), **options)
    again = Program.from_plain(program.to_plain(CLASSES), CLASSES)
    same(program, again)
    again.verify()
    state, metrics = program.simulate(program.init_state(model.init(0)), make_batch())
    read_state, read_metrics = again.simulate(again.init_state(model.init(0)), make_batch())
    for one, other in ((state.leaves, read_state.leaves), (metrics, read_metrics)):
        assert one.keys() == other.keys()
        assert all(torch.equal(value, other[name]) for name, value in one.items())


def test_a_read_evaluation_reports_alike():
    """A program without an optimizer comes back too, and needs no classes."""
    model = models.from_config(QWEN3, dtype=torch.float32)
    program = compile_eval(model, Mesh(fsdp=2), "zero3", (8, 16))
    again = Program.from_plain(program.to_plain())
    same(program, again)
    state = program.init_state(model.init(0))
    assert torch.equal(program.simulate(state, make_batch())[1]["loss"], again.simulate(state, make_batch())[1]["loss"])


@dataclass(frozen=True)
class SignSGD(Optimizer):
    """An optimizer of one's own."""

    lr: float
    slots = ()

    def update_leaf(self, param, grad, slots, lr, step, scale, *, decays):
        return param - (lr * torch.sign(grad)).to(param.dtype), ()

    def decays(self, path, leaf):
        return False

    def rate(self, step):
        return self.lr

    def scale(self, norm):
        return torch.ones_like(norm)


class Shapeless(SignSGD):
    """One that holds more than its fields say."""


def test_an_optimizer_of_ones_own_is_named_or_refused():
    """Its class has to be given for writing and for reading; a class that is no dataclass of its own is never written."""
    model = models.from_config({**QWEN3, "num_hidden_layers": 1})
    program = compile_step(model, SignSGD(0.1), Mesh(dp=1), "ddp", (8, 16))
    with pytest.raises(PlainDataError, match=r"optimizer: SignSGD\(lr=0.1\) is not of a class that was given for Optimizer"):
        program.to_plain(CLASSES)
    text = program.to_plain((SignSGD,))
    assert Program.from_plain(text, (SignSGD,)).facts.optimizer == SignSGD(0.1)
    with pytest.raises(PlainDataError, match="other classes"):
        Program.from_plain(text, CLASSES)
    program.facts = replace(program.facts, optimizer=Shapeless(0.1))
    with pytest.raises(PlainDataError):
        program.to_plain((SignSGD,))
