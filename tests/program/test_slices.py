"""Slices: rows cut into parts, which every segment takes one after the other, give the step of whole rows, in less memory."""

import functools
import re
from collections import Counter
from dataclasses import replace

import pytest
import torch

from mpar import Mesh, models, testing
from mpar.compiler import RecomputePolicy
from mpar.program import Program
from mpar.program.compile import compile_eval, compile_step
from mpar.strategy import Strategy, preset
from tests.forecast.test_prediction import measured_peaks, predicted_peaks
from tests.models.variants import KINDS, VARIANTS
from tests.program.oracle import BASE, DEEPSEEK, MOE, Problem, Recorder

pytestmark = pytest.mark.cases(2)  # each compiles a program of its own
SHAPE = (4, 32)
QWEN3 = {**BASE, "model_type": "qwen3"}
FOUR = {**QWEN3, "num_hidden_layers": 4}


def window(size: int) -> dict:
    """A config whose second layer has a window."""
    windows = {"use_sliding_window": True, "sliding_window": size, "max_window_layers": 1}
    return {**{key: value for key, value in BASE.items() if key != "head_dim"}, "model_type": "qwen2", **windows}


MODELS = {
    "causal": (QWEN3, {}),
    "packed": (QWEN3, {"packed": True}),
    "short window": (window(5), {}),  # of the slice before, four positions are seen, or one less or more at the bounds
    "window of a slice": (window(9), {"packed": True}),
    "long window": (window(10), {}),  # the first position of a slice of 8 sees one of the last but one
    "window of one": (window(1), {}),
    "experts": (MOE, {"packed": True}),
    "four layers": (FOUR, {}),
}


@pytest.fixture(scope="module")
def problems():
    """Problems by name, made once."""
    return functools.cache(lambda name: without_vanishing(Problem(MODELS[name][0], SHAPE, **MODELS[name][1])))


def without_vanishing(problem: Problem) -> Problem:
    """Of gradients that are zero but for rounding nothing is expected: scores of a window of one, and biases of keys."""
    problem.grads = {path: grad for path, grad in problem.grads.items() if grad.norm() > 1e-12 * problem.norm}
    return problem


def compiled(problem: Problem, num_slices: int, mesh: Mesh = Mesh(), strategy: Strategy | str = "ddp", **options) -> Program:  # noqa: B008
    return compile_step(problem.model, Recorder(), mesh, strategy, problem.shapes, num_slices=num_slices, **options)


def check(problem: Problem, program: Program) -> dict[str, torch.Tensor]:
    """Loss, gradients and norm are one rank's, as are the losses of microbatches; metrics."""
    metrics, count = problem.check(program), program.num_microbatches
    rows = [{key: x.chunk(count)[m] for key, x in problem.batch.items()} for m in range(count)]
    losses = torch.stack([problem.model.loss(problem.params, own)[0] for own in rows])
    assert metrics["microbatch_losses"].shape == (count,)
    testing.assert_close(metrics["microbatch_losses"], losses / problem.model.weight(problem.batch), name="microbatches")
    return metrics


def by_method(method: str, base: str = "ddp", **options) -> Strategy:
    return replace(preset(base), context_parallel=method, **options)


CASES = {
    "one rank, halves": ("causal", 2, Mesh(), "ddp", {}),
    "one rank, packed": ("packed", 4, Mesh(), "ddp", {"num_microbatches": 2}),
    "one rank, short window": ("short window", 4, Mesh(), "ddp", {}),
    "one rank, window of a slice": ("window of a slice", 4, Mesh(), "ddp", {}),
    "one rank, long window": ("long window", 4, Mesh(), "ddp", {}),
    "one rank, window of one": ("window of one", 2, Mesh(), "ddp", {}),
    "ring": ("packed", 4, Mesh(cp=2), by_method("ring"), {}),
    "ring of windows": ("long window", 4, Mesh(cp=2), by_method("ring"), {}),
    "gathered keys": ("short window", 2, Mesh(cp=2), by_method("all_gather"), {}),
    "by heads": ("packed", 4, Mesh(cp=2), by_method("all_to_all"), {}),
    "by heads and ring": ("packed", 2, Mesh(cp=4), by_method("all_to_all+ring"), {}),
    "contiguous": ("causal", 4, Mesh(cp=2), by_method("ring", sequence="contiguous"), {}),
    "sequence and tensor": ("packed", 4, Mesh(fsdp=2, tp=2), "zero3_tp_sp", {"num_microbatches": 2, "prefetch_bytes": 1 << 20}),
    "data and ring": ("causal", 2, Mesh(dp=2, cp=2), by_method("ring"), {"num_microbatches": 2}),
    "stages": ("packed", 2, Mesh(pp=2), "ddp", {"num_microbatches": 4}),
    "stages and ring": ("causal", 2, Mesh(pp=2, cp=2), by_method("ring", "zero3"), {"num_microbatches": 2}),
    "experts": ("experts", 2, Mesh(cp=2), by_method("ring", "zero3", expert_parallel=2), {}),
}


@pytest.mark.parametrize("case", CASES)
def test_step_is_exact(case, problems):
    """Losses, every gradient and their norm are those of whole rows on one rank, wherever documents and windows end."""
    name, num_slices, mesh, strategy, options = CASES[case]
    documents = problems(name).batch.get("documents")
    length = SHAPE[1] // num_slices
    assert documents is None or bool((documents[:, length - 1] == documents[:, length]).any())
    check(problems(name), compiled(problems(name), num_slices, mesh, strategy, **options))


def make_config(name: str) -> dict:
    kind, changes = VARIANTS[name]
    return KINDS[kind].make_config(**changes).to_dict()


ARCHITECTURES = [next(name for name, (other, _) in VARIANTS.items() if other == kind) for kind in KINDS]
ROPES = ["llama_dynamic_long", "phi3_long"]  # turn otherwise in longer rows


@pytest.mark.parametrize("name", [*ARCHITECTURES, *ROPES])
def test_every_architecture_is_exact(name):
    """In three slices, so that one reads two others, packed: the step of whole rows."""
    problem = Problem(make_config(name), (2, 18), packed=name not in ROPES)  # which positions of documents would change
    check(without_vanishing(problem), compiled(problem, 3))


@pytest.mark.parametrize("packed", [False, True], ids=["", "packed"])
def test_scans_of_short_slices_are_exact(packed):
    """Slices shorter than what the convolution of a Mamba layer reaches back, some with documents that begin within its reach."""
    problem = Problem(make_config("mamba2"), (4, 8), packed=packed)
    check(problem, compiled(problem, 4))


def test_a_document_that_comes_back_is_another():
    """Scans begin again wherever the document changes, be its id one that was there before: in a slice, and behind its end."""
    problem = Problem(make_config("mamba2"), (2, 16), packed=True)
    ids = [[0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 2, 0, 2, 2], [1, 1, 0, 1, 1, 1, 1, 1, 0, 1, 0, 0, 0, 0, 0, 0]]
    problem.batch["documents"] = torch.tensor(ids)
    problem.differentiate()
    for num_slices in (2, 4, 8):
        check(problem, compiled(problem, num_slices))


def test_keys_that_are_gathered_are_left_in_shards(problems):
    """Where keys are gathered to be attended to, ranks leave and keep their own part: as many bytes on the host as of a ring."""
    bytes_of = {}
    for method in ("ring", "all_gather"):
        how = {"recompute": RecomputePolicy("full", offload=True)}
        program = compiled(problems("causal"), 4, Mesh(cp=2), by_method(method, "zero3"), **how)
        bytes_of[method] = program.predict().host_bytes
    assert bytes_of["all_gather"] == bytes_of["ring"] > 0


def test_all_can_be_cut():
    """Every variant of every architecture."""
    assert {models.from_config(make_config(name)).forbids_slices for name in VARIANTS} == {None}


def test_further_tokens_are_exact():
    """Multi-token prediction, whose next tokens lie in the next slice: both losses, all gradients, and numbers of experts."""
    config = {**DEEPSEEK, "num_hidden_layers": 1, "first_k_dense_replace": 0}
    problem = Problem(config, (4, 16), router={"bias_rate": 0.01}, mtp_loss_weight=0.3)
    metrics = check(problem, compiled(problem, 2, num_microbatches=2))
    assert metrics["mtp.expert_counts"].sum() == 2 * 4 * 16


SCHEDULES = {
    "one rank, full": (Mesh(), None, "full"),
    "zb_h1": (Mesh(pp=2), "zb_h1", "none"),
    "zb1p, selective": (Mesh(pp=2), "zb1p", "selective"),
    "zbv, full": (Mesh(pp=2), "zbv", "full"),
    "dual_pipe_v": (Mesh(pp=2), "dual_pipe_v", "none"),
}


@pytest.mark.parametrize("case", SCHEDULES)
def test_schedules_are_exact(case, problems):
    """Backwards whole and cut in two, whatever is recomputed; what is kept may wait in the host's memory: no bit changes."""
    mesh, schedule, kind = SCHEDULES[case]
    problem, results = problems("four layers"), []
    for offload in (False, True):
        how = {"schedule": schedule, "num_microbatches": 4, "recompute": RecomputePolicy(kind, offload=offload)}
        program = compiled(problem, 4, mesh, **how)
        assert ("offload" in {step.op for step in program.instructions}) is offload
        if not offload:
            check(problem, program)
        results.append(program.simulate(problem.state(), problem.batch))
    (state, metrics), (same, again) = results
    assert all(torch.equal(again[name], value) for name, value in metrics.items())
    assert all(torch.equal(same.leaves[path], value) for path, value in state.leaves.items())


@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
def test_slices_communicate_no_more(strategy, problems):
    """Parameters are gathered, and gradients reduced, once for all slices of a microbatch: as often as without slices."""
    counts = []
    for num_slices in (1, 4):
        program = compiled(problems("four layers"), num_slices, Mesh(fsdp=2), strategy, num_microbatches=2, bucket_bytes=0)
        counts.append(Counter(step.op for step in program.instructions if step.op in ("gather", "reduce")))
    assert counts[0] == counts[1] and min(counts[0].values()) > 1


MEMORY = {
    "one rank": (Mesh(), "ddp", {}),
    "ring": (Mesh(cp=2), by_method("ring", "zero3"), {}),
    "stages": (Mesh(pp=2), "ddp", {"schedule": "zb_h1", "num_microbatches": 2}),
}


@pytest.mark.parametrize("offload", [False, True], ids=["", "offload"])
@pytest.mark.parametrize("kind", ["none", "full"])
@pytest.mark.parametrize("place", MEMORY)
def test_peak_is_exact(place, kind, offload, problems):
    """The predicted peak of every rank is what it holds at its fullest, to the byte."""
    mesh, strategy, options = MEMORY[place]
    problem = problems("packed")
    program = compiled(problem, 2, mesh, strategy, recompute=RecomputePolicy(kind, offload=offload), **options)
    assert measured_peaks(copying(program), problem.state(), problem.batch) == predicted_peaks(program)


def copying(program: Program) -> Program:
    """The same program, which copies values to the host and back on a CPU too, where both are one memory."""
    sources = {name: re.sub(r"TO_(HOST|DEVICE)\(x\)", "x.clone()", kind.source) for name, kind in program.kinds.items()}
    return replace(program, kinds={name: replace(kind, source=sources[name]) for name, kind in program.kinds.items()})


def peak_beside_state(num_slices: int, length: int, hidden: int, layers: int, *, whole: bool = False) -> int:
    """Bytes on one rank beside its state, of one row of so many slices of `length`; whole: the row is not cut."""
    config = {**BASE, **HEADS, "model_type": "llama", "hidden_size": hidden, "intermediate_size": 4 * hidden}
    model = models.from_config({**config, "num_hidden_layers": layers}, dtype=torch.float64, vocab_multiple=8)
    away = RecomputePolicy("full", offload=True)
    shape, num_slices = (1, num_slices * length), 1 if whole else num_slices
    prediction = compile_step(model, Recorder(), Mesh(), "ddp", shape, num_slices=num_slices, recompute=away).predict()
    return prediction.peak_bytes - prediction.state_bytes


HEADS = {"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 256}


def test_memory_hardly_grows_with_the_row():
    """With twice as many slices, recomputing, and what waits in the host's memory, a position more costs keys and values of one
    layer, their gradients and what is added to these, and tables: 3 (2 K H) + 8 numbers, however wide and deep the model is.

    Without slices it is all that a layer makes.
    """
    length, K, H = 16, HEADS["num_key_value_heads"], HEADS["head_dim"]
    bound = 4 * length * 8 * (6 * K * H + 8)
    growth = {}
    for hidden, layers in ((32, 2), (64, 3)):
        growth[hidden] = peak_beside_state(8, length, hidden, layers) - peak_beside_state(4, length, hidden, layers)
        whole = [peak_beside_state(n, length, hidden, layers, whole=True) for n in (4, 8)]
        assert 7 * growth[hidden] < whole[1] - whole[0]
        assert growth[hidden] <= bound


@pytest.mark.parametrize("place", ["one rank", "ring", "stages"])
def test_evaluation_has_the_same_loss(place, problems):
    """The forwards alone, in slices: the loss of whole rows."""
    mesh, strategy, options = MEMORY[place]
    options = {key: value for key, value in options.items() if key != "schedule"}
    problem = problems("packed")
    program = compile_eval(problem.model, mesh, strategy, problem.shapes, num_slices=4, **options)
    _, metrics = program.simulate(program.init_state(problem.params), problem.batch)
    testing.assert_close(metrics["loss"], problem.loss, name="loss")
    testing.assert_close(metrics["weight"], problem.model.weight(problem.batch), name="weight")
