"""Context parallelism in whole steps: loss, gradients, norms, work, memory and messages, simulated."""

import functools
import itertools
import re
import threading
from collections import Counter
from dataclasses import replace

import pytest
import torch

from mpar import Mesh, models
from mpar.arrange import CONTEXT_PARALLEL
from mpar.errors import ConfigError, ShapeError
from mpar.ops.sequence import _attention_blocks as blocks
from mpar.program import Program, batch_rows
from mpar.program.compile import compile_step
from mpar.strategy import Strategy, preset
from tests.forecast.test_prediction import measured_peaks
from tests.program.oracle import BASE, DEEPSEEK, GPT_OSS, Problem, Recorder

pytestmark = pytest.mark.cases(2)  # each compiles a program of its own
SHAPE = (4, 32)
QWEN3 = {**BASE, "model_type": "qwen3"}
WINDOW = {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
MODELS = {
    "causal": (QWEN3, {}),
    "packed": (QWEN3, {"packed": True}),
    "window": ({key: value for key, value in BASE.items() if key != "head_dim"} | WINDOW, {}),
    "one kv head": ({**QWEN3, "num_key_value_heads": 1}, {}),
    "six heads": ({**QWEN3, "num_attention_heads": 6, "num_key_value_heads": 2}, {"packed": True}),
    "latent": (DEEPSEEK, {"packed": True}),
    "sinks": (GPT_OSS, {"packed": True}),
    "microbatches": (QWEN3, {"num_microbatches": 2}),
}


@pytest.fixture(scope="module")
def problems():
    """Problems by name, made once."""
    return functools.cache(lambda name: Problem(MODELS[name][0], SHAPE, **MODELS[name][1]))


def by_method(method: str, base: str = "ddp", **options) -> Strategy:
    return replace(preset(base), context_parallel=method, **options)


def compiled(problem: Problem, mesh: Mesh, strategy: Strategy | str, **options) -> Program:
    options = {"num_microbatches": problem.num_microbatches, **options}
    return compile_step(problem.model, Recorder(), mesh, strategy, problem.shapes, **options)


@pytest.mark.parametrize("name", ["causal", "packed", "window", "one kv head"])
@pytest.mark.parametrize("method", CONTEXT_PARALLEL)
@pytest.mark.parametrize("cp", [2, 4, 8])
def test_step_is_exact(cp, method, name, problems):
    """Loss, every gradient and their norm are one rank's, by every method and mask, with kv heads fewer than ranks too."""
    problems(name).check(compiled(problems(name), Mesh(cp=cp), by_method(method)))


@pytest.mark.parametrize("strategy", [by_method("all_to_all+ring"), by_method("all_to_all", ulysses_size=2)], ids=["", "said"])
def test_heads_that_ranks_do_not_divide_go_by_heads_and_ring(strategy, problems):
    """Six heads on four ranks: pairs of ranks share them by heads, the pairs form a ring."""
    program = compiled(problems("six heads"), Mesh(cp=4), strategy)
    assert program.mesh == Mesh(cp_outer=2, cp_inner=2)
    used = {(use.op, use.axes) for use in program.collectives() if use.op in ("shift", "all_to_all")}
    assert used == {("shift", ("cp_outer",)), ("all_to_all", ("cp_inner",))}
    problems("six heads").check(program)


@pytest.mark.parametrize("method", CONTEXT_PARALLEL)
@pytest.mark.parametrize("name", ["latent", "sinks"])
def test_other_attention_is_exact(name, method, problems):
    """Latent attention, whose keys and values differ in size; sinks, windows of every other layer, biases."""
    problems(name).check(compiled(problems(name), Mesh(dp=2, cp=4), by_method(method)))


GRIDS = {
    "tensor": (Mesh(cp=2, tp=2), by_method("ring", "tp")),
    "sequence": (Mesh(cp=2, tp=4), by_method("ring", "tp_sp")),
    "by heads, sequence": (Mesh(fsdp=2, cp=2, tp=2), by_method("all_to_all", "zero3_tp_sp")),
    "zero3": (Mesh(fsdp=2, cp=4), by_method("all_gather", "zero3")),
    "two levels": (Mesh(dp=2, cp=4, tp=2), by_method("all_to_all+ring", "tp_sp")),
    "eight by heads of two": (Mesh(cp=8), by_method("all_to_all+ring", ulysses_size=2)),
    "contiguous": (Mesh(dp=2, cp=4), by_method("ring", sequence="contiguous")),
    "pipeline": (Mesh(pp=2, cp=2, tp=2), by_method("ring", "tp_sp")),
    "pipeline by heads": (Mesh(pp=2, fsdp=2, cp=2), by_method("all_to_all", "zero3")),
}


@pytest.mark.parametrize("grid", GRIDS)
def test_grid_is_exact(grid, problems):
    """With tensor, sequence and data parallelism, sharded parameters, stages and microbatches."""
    mesh, strategy = GRIDS[grid]
    problems("microbatches").check(compiled(problems("microbatches"), mesh, strategy))


@pytest.mark.parametrize("method", CONTEXT_PARALLEL)
@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_recomputing_is_exact(recompute, method, problems):
    """Messages that are sent again in the backward are the same ones."""
    problems("packed").check(compiled(problems("packed"), Mesh(cp=4), by_method(method), recompute=recompute))


def test_norms_do_not_depend_on_the_split():
    """The gradient norm of one batch on dp=8, on dp=4 with cp=2 and on dp=2 with cp=4."""
    problem = Problem(QWEN3, (8, 16))
    norms = [
        problem.check(compiled(problem, mesh, by_method("ring")))["grad_norm"]
        for mesh in (Mesh(dp=8), Mesh(dp=4, cp=2), Mesh(dp=2, cp=4))
    ]
    assert max(norms) - min(norms) <= 1e-11 * max(norms)


def visible_pairs(program: Program, batch, length: int) -> list[int]:
    """Pairs of a query and a key that it sees, of the positions that each rank is given."""
    orders = [batch_rows(program, batch, rank)["order"] for rank in range(program.mesh.size)]
    assert torch.equal(torch.cat(orders).sort().values, torch.arange(length))
    return [int((order + 1).sum()) for order in orders]


@pytest.mark.parametrize("cp", [2, 4, 8])
def test_ranks_see_equally_many_pairs(cp, problems):
    """Under a causal mask every rank has 1 / cp of the work; in their own order the last rank has most of it."""
    problem = problems("causal")
    found = visible_pairs(compiled(problem, Mesh(cp=cp), by_method("ring")), problem.batch, SHAPE[1])
    share = SHAPE[1] * (SHAPE[1] + 1) / 2 / cp
    assert all(abs(pairs / share - 1) < 0.01 for pairs in found)
    contiguous = compiled(problem, Mesh(cp=cp), by_method("ring", sequence="contiguous"))
    assert visible_pairs(contiguous, problem.batch, SHAPE[1])[-1] > 1.4 * share


@pytest.mark.parametrize("method", ["ring", "all_gather"])
def test_ranks_work_on_equally_many_pairs(method, monkeypatch):
    """What the kernels of a whole step are given, forward and backward: the same on every rank to 1 %, half of all pairs."""
    done: dict[str, Counter] = {"forward": Counter(), "backward": Counter()}

    def counting(direction, kernel, operand, mask):
        def call(*operands):
            q, k, aligned = operands[operand], operands[operand + 1], operands[mask]
            rows, keys = q.shape[2], k.shape[2]
            pairs = sum(min(i + 1, keys) for i in range(rows)) if aligned else rows * keys
            done[direction][threading.get_ident()] += pairs  # a simulated rank is a thread
            return kernel(*operands)

        return call

    forward, backward = blocks.flash, blocks.flash_backward
    monkeypatch.setattr(blocks, "flash", counting("forward", forward, 0, 3))
    monkeypatch.setattr(blocks, "flash_backward", counting("backward", backward, 1, 6))
    problem = Problem({**QWEN3, "num_hidden_layers": 1}, (1, 512))
    for counts in done.values():
        counts.clear()
    compiled(problem, Mesh(cp=4), by_method(method)).simulate(problem.state(), problem.batch)
    for counts in done.values():
        assert len(counts) == 4
        assert all(abs(pairs / (512 * 512 / 2 / 4) - 1) < 0.01 for pairs in counts.values()), counts


@pytest.mark.parametrize("cp", [2, 4])
@pytest.mark.parametrize("packed", [False, True], ids=["", "packed"])
def test_ring_moves_the_fewest_blocks(cp, packed, problems):
    """Of each layer forward cp - 1 blocks of keys, values, orders and documents, backward the same and cp - 1 of gradients."""
    problem = problems("packed" if packed else "causal")
    program = compiled(problem, Mesh(cp=cp), by_method("ring"))
    B, S = SHAPE[0], SHAPE[1] // cp
    keys = 2 * B * S * 4 * 4 * 8  # keys and values of 4 heads of 4 in float64
    block = keys + 8 * S + (8 * B * S if packed else 0)
    for name, wanted in (("forward", [block]), ("backward", [keys, block])):
        uses = [use for use in program.kinds[f"layers {name}"].collectives if use.axes == ("cp",) and use.op == "shift"]
        assert sorted(use.bytes for use in uses) == sorted(wanted * (cp - 1))
        others = {use.op for use in program.kinds[f"layers {name}"].collectives} - {"shift"}
        assert others == set()
    shifts = sum(use.op == "shift" for use in program.collectives())
    assert shifts == 3 * (cp - 1) * 2


def test_heads_move_four_times_each_way(problems):
    """Ulysses: queries, keys, values and results of each layer, forward and backward; besides that only orders."""
    program = compiled(problems("causal"), Mesh(cp=4), by_method("all_to_all"))
    queries, keys = (SHAPE[0] * SHAPE[1] // 4 * heads * 4 * 8 for heads in (8, 4))
    for name in ("forward", "backward"):
        uses = program.kinds[f"layers {name}"].collectives
        assert sorted(use.bytes for use in uses if use.op == "all_to_all") == [keys, keys, queries, queries]
        assert {(use.op, use.bytes) for use in uses if use.op != "all_to_all"} <= {("all_gather", SHAPE[1] // 4 * 8)}


def test_code_posts_before_it_attends(problems):
    """In what runs, every block is posted before attention and waited for after it; attention runs once each way."""
    program = compiled(problems("causal"), Mesh(cp=4), by_method("ring"))
    for name, primitive, calls in (("forward", "attention", 4), ("backward", "attention_bwd", 4)):
        source = program.kinds[f"layers {name}"].source
        (function,) = re.findall(rf"(f\d+) = PRIMITIVES\['{primitive}'\]", source)
        words = re.findall(rf"comm\.(shift|arrived)|= ({function})\(", source)
        order = [post or "attend" for post, _ in words]
        assert order.count("attend") == calls
        for first, following in itertools.pairwise([i for i, word in enumerate(order) if word == "attend"]):
            assert "arrived" in order[first:following]
        assert order[:2] == ["shift", "attend"]
        posted = 0
        for word in order:
            posted += {"shift": 1, "arrived": -1}.get(word, 0)
            assert posted >= 0
        blocks_before_attention = sum(a == "shift" and "attend" in order[i : i + 3] for i, a in enumerate(order))
        assert blocks_before_attention >= 3
    assert "PRIMITIVES['attention']" not in program.kinds["layers backward"].source
    assert "PRIMITIVES['merge_attention']" not in program.kinds["layers backward"].source


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("method", CONTEXT_PARALLEL)
def test_peak_is_exact(method, recompute, problems):
    """The predicted peak is what simulated ranks hold at their fullest, to the byte: blocks in flight too."""
    problem = problems("packed")
    program = compiled(problem, Mesh(cp=4), by_method(method), recompute=recompute)
    assert measured_peaks(program, problem.state(), problem.batch) == [program.predict().peak_bytes] * 4


@pytest.mark.parametrize("method", ["ring", "all_to_all", "all_to_all+ring"])
def test_activations_fall_with_the_ranks(method):
    """What a rank holds beside its state and gradients is 1 / cp of what one rank holds, to 10 %: predicted and counted."""
    problem = Problem(QWEN3, (1, 512))
    state = sum(x.nbytes for x in problem.state().leaves.values())
    state += sum(x.nbytes for x in problem.grads.values())
    found = {}
    for cp in (1, 2, 4, 8):
        program = compiled(problem, Mesh(cp=cp), by_method(method))
        (peak,) = set(measured_peaks(program, problem.state(), problem.batch))
        assert peak == program.predict().peak_bytes
        found[cp] = (peak - state) * cp
    assert all(abs(total / found[1] - 1) < 0.1 for total in found.values()), found


BAD = {
    "sequence": (
        Mesh(cp=4),
        by_method("ring"),
        ShapeError,
        r"36 positions: 4 ranks .* in two parts each.*multiple of 8.*40 \(4 pos",
    ),
    "method": (Mesh(cp=4), by_method("rings"), ConfigError, "'rings'; there are auto, ring, all_gather, all_to_all"),
    "method on one rank": (Mesh(), by_method("rings"), ConfigError, "'rings'; there are auto, ring"),
    "order": (Mesh(cp=4), by_method("ring", sequence="zig"), ConfigError, "'zig'; there are auto, zigzag and contiguous"),
    "order on one rank": (Mesh(), by_method("ring", sequence="zig"), ConfigError, "'zig'; there are auto"),
    "heads": (Mesh(cp=3, tp=4), by_method("all_to_all", "tp"), ConfigError, "(?s)8 heads on 4 tensor.*2 on each.*at most 1 can"),
    "kv heads": (Mesh(cp=3), by_method("all_to_all"), ConfigError, "among 3 of the 3.*8 heads on 1 .* of 4 kv heads"),
    "six heads": (Mesh(cp=12), by_method("all_to_all"), ConfigError, "among 12 of the 12 .*8 heads .* at most 4 can"),
    "only a ring": (Mesh(cp=3), by_method("all_to_all+ring"), ConfigError, "Use context_parallel=ring or all_gather, a smaller"),
    "ranks by heads of a ring": (Mesh(cp=4), by_method("ring", ulysses_size=2), ConfigError, "size=2 .*='ring' none do"),
    "ranks by heads": (Mesh(cp=4), by_method("all_to_all", ulysses_size=3), ConfigError, "among 3 of the 4 ranks.*at most 4 can"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused(case):
    """With the facts that disagree and the ways out, before anything runs."""
    mesh, strategy, error, message = BAD[case]
    length = 36 if case == "sequence" else 24
    model = models.from_config(QWEN3, dtype=torch.float64, vocab_multiple=8)
    with pytest.raises(error, match=f"(?s){message}"):
        compile_step(model, Recorder(), mesh, strategy, (4, length))
