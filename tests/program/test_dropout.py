"""Dropout in whole steps: the same is dropped on every mesh, with every schedule, and when a layer is computed again."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from mpar import Mesh, models, testing, tree
from mpar.chain import context_of
from mpar.compiler import Schedule, policy
from mpar.errors import ConfigError, DataError
from mpar.ops import fold_key
from mpar.program import State
from mpar.program.compile import compile_eval, compile_step
from mpar.strategy import preset
from tests.program.oracle import BASE, VOCAB, Problem, Recorder
from tests.program.test_experts import spread

GPT2 = {"model_type": "gpt2", "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 32, "vocab_size": VOCAB}
LLAMA = {**BASE, "model_type": "llama"}
SHAPE = (8, 16)


@pytest.fixture(scope="module")
def problem():
    """A model that drops half of everything, in four microbatches."""
    return Problem(LLAMA, SHAPE, num_microbatches=4, dropout=0.5)


def compiled(problem, mesh, strategy, **how):
    count = {"num_microbatches": problem.num_microbatches}
    return compile_step(problem.model, Recorder(), mesh, strategy, problem.shapes, **count, **how)


PLACES = {
    "dp": (Mesh(dp=2), "ddp", {}),
    "zero3, computed again": (Mesh(fsdp=2), "zero3", {"recompute": policy("full")}),
    "tp of a shared stream": (Mesh(fsdp=2, tp=2), "zero1_tp_sp", {}),
    "zbv": (Mesh(pp=2), "ddp", {"schedule": Schedule("zbv", None, "E|t|t|L")}),
    "ring in zigzag": (Mesh(cp=2), spread(1, "zero3", context_parallel="ring", sequence="zigzag"), {}),
    "slices": (Mesh(pp=2), "ddp", {"num_slices": 2}),
}


@pytest.mark.parametrize("place", PLACES)
def test_step_is_exact(place, problem):
    """Loss and gradients are those of one rank with the same mask; the mask is that of rows, whichever microbatch they are in."""
    mesh, strategy, how = PLACES[place]
    problem.check(compiled(problem, mesh, strategy, **how))


def test_microbatches_do_not_matter(problem):
    """A batch in two microbatches drops what it drops in four."""
    two = Problem(LLAMA, SHAPE, num_microbatches=2, dropout=0.5)
    testing.assert_close(two.loss, problem.loss, name="loss")
    other = Problem(LLAMA, SHAPE, num_microbatches=2, dropout=0.5, seed=1)
    other.params, other.batch = two.params, {**two.batch, "draw": other.batch["draw"]}
    other.differentiate()
    assert abs(other.loss - two.loss) > 1e-3


def uniform(draw_BS: Tensor, number: int, label: str, features: int) -> Tensor:
    """(B, S, features) in [0, 1): the halves of the words of Philox-4x32-10 in Python's integers, whose counter is
    feature // 8, 0 and the draw."""
    key = fold_key(0, "token_dropout", label)
    out = torch.empty(*draw_BS.shape, features)
    for place in torch.cartesian_prod(*(torch.arange(n) for n in draw_BS.shape)).tolist():
        draw = int(draw_BS[tuple(place)])
        for i in range(features // 8):
            c, (k0, k1) = [i, 0, draw % 2**32, draw >> 32], (key[0] ^ number, key[1])
            for _ in range(10):
                low, high = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
                c = [(high >> 32) ^ c[1] ^ k0, high % 2**32, (low >> 32) ^ c[3] ^ k1, low % 2**32]
                k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
            halves = [half for word in c for half in (word % 2**16, word >> 16)]
            out[(*place, slice(8 * i, 8 * i + 8))] = torch.tensor(halves) * 2.0**-16
    return out


def without(block, part, matrix):
    """The parameters of a layer of which one part adds nothing, because its last matrix and bias are zero."""
    leaves = {name: x for name, x in vars(getattr(block, part)).items() if name.startswith(f"{matrix}_") and x is not None}
    zeros = {name: torch.zeros_like(x) for name, x in leaves.items()}
    return replace(block, **{part: replace(getattr(block, part), **zeros)})


def test_equals_plain_torch():
    """The embedding, and what attention and the feed-forward layer add, are masked by a mask that is written out here."""
    problem = Problem(GPT2, SHAPE, dropout=0.5)
    rows = {key: x[:2] for key, x in problem.batch.items()}
    layer, embed = replace(problem.model.config.layers[0], dropout=0.0), problem.params.embed
    block, params = models.decoder.BlockSegment(layer), problem.params.layers[0]
    first, second = problem.model.segments[:2]
    context = problem.model.context(rows)
    read = {segment.name: context_of(segment.name, context) for segment in (first, second)}
    masks = [uniform(rows["draw"], i, label, 16) >= 0.5 for i, label in ((0, "embed"), (1, "attn"), (1, "mlp"))]

    x = (embed.table_VD[rows["tokens"]] + embed.positions_SD[: SHAPE[1]]) * masks[0] * 2
    testing.assert_close(first.fn((embed,), None, read["embed"], training=True)[0], x, name="embedding")
    middle = x + (block((without(params, "mlp", "down"),), x, context, training=True)[0] - x) * masks[1] * 2
    added = block((without(params, "attention", "o"),), middle, context, training=True)[0] - middle
    expected = middle + added * masks[2] * 2
    testing.assert_close(second.fn((params,), x, read["layers.0"], training=True)[0], expected, name="layer")


def test_nothing_is_dropped_in_an_evaluation(problem):
    """An evaluation needs no numbers of tokens, and gives the loss of the model without dropout."""
    plain = Problem(LLAMA, SHAPE, num_microbatches=4)
    program = compile_eval(problem.model, Mesh(dp=2), "ddp", plain.shapes, num_microbatches=4)
    params = State({f"params.{path}": x for path, x in tree.leaves_with_path(plain.params)})
    _, metrics = program.simulate(params, plain.batch)
    testing.assert_close(metrics["loss"], plain.loss, name="loss")


def test_what_is_missing_is_said(problem):
    """A batch without numbers of tokens, and a rate that is no probability."""
    batch = {key: x for key, x in problem.batch.items() if key != "draw"}
    with pytest.raises(DataError, match=r"models\.with_draws makes it"):
        problem.model.loss(problem.params, batch)
    with pytest.raises(ConfigError, match=r"dropout=1.0: it is a probability in \[0, 1\)"):
        models.from_config(GPT2, dropout=1.0)


def test_layers_share_a_program():
    """Equal layers are one kind: their number is data."""
    problem = Problem(LLAMA, SHAPE, dropout=0.1)
    program = compiled(problem, Mesh(dp=1), preset("ddp"))
    problem.check(program)
    assert len({instruction.kind for instruction in program.part(0).instructions if instruction.op == "forward"}) <= 3
