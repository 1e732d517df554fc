"""Steps that are recorded as calls of C++: the bits of others, what cannot be recorded, and what fails in a replay."""

import ctypes
import gc
import threading

import pytest
import torch

from mpar import cpp, models, tree
from mpar.infer import Engine, Sampling, Sizes
from mpar.infer.compile import ProgramRunner
from mpar.ops import PRIMITIVES, lay_by_columns
from mpar.ops._few_rows import few_rows
from mpar.ops.sequence._few_tokens import few_tokens
from mpar.program import Replay
from mpar.runtime import cpp_calls
from mpar.torch_private import inductor_compile, onednn_has_bfloat16
from tests.kernels_in_cpp import needs_kernels
from tests.models.variants import KINDS

pytestmark = [needs_kernels, pytest.mark.filterwarnings("ignore::DeprecationWarning")]  # torch's own, when it loads its compiler

SIZES = Sizes(rows=4, tokens=4, pages=40, page_size=4, length=48)
PROMPTS = [[1, 5, 2], [7], list(range(3, 19)), [4] * 9, [60, 0]]
SMALL = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 96, "vocab_size": 64, "initializer_range": 0.3}
SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
GPT2 = {"n_embd": 64, "n_head": 4, "n_layer": 2, "n_inner": 96, "vocab_size": 64, "n_positions": 64, "initializer_range": 0.3}


def answers(runner):
    """Greedy answers to all prompts at once and to one alone, with their log-probabilities."""
    engine, sampling = Engine(runner), Sampling(max_tokens=6, num_alternatives=0)
    requests = [engine.add(prompt, sampling) for prompt in PROMPTS]
    list(engine.run())
    requests.append(engine.add([3, 8], sampling))
    list(engine.run())
    return [request.chosen for request in requests]


def product(rows=2):
    """Operands of a product for which there is a kernel."""
    draw = torch.Generator().manual_seed(0)
    a, b = torch.randn(rows, 64, generator=draw), torch.randn(64, 96, generator=draw)
    return a, lay_by_columns([b], [0])[0]


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [(kind, torch.float32) for kind in ("gemma2", "gpt2", "qwen3")] + [(kind, torch.bfloat16) for kind in ("phi3", "qwen2")],
    ids=str,
)
def test_recorded_steps_are_the_steps(kind, dtype, monkeypatch):
    """Engines that record give the bits of those that do not, also with other parameters, and their state stays where it is.
    Products of bfloat16 that are oneDNN's are not recorded."""
    keys = GPT2 if kind == "gpt2" else SMALL | ({"head_dim": 16} if kind in ("gemma2", "qwen3") else {})
    model = models.build(kind, keys).with_dtype(dtype)
    given = [model.init(seed) for seed in (0, 1)]
    recorded = ProgramRunner(model, given[0], SIZES, execution="inductor")
    with monkeypatch.context() as patch:
        patch.setattr("mpar.infer._program_runner.cpp_calls", lambda work, given: None)
        plain = ProgramRunner(model, given[0], SIZES, execution="inductor")
        expected = answers(plain), answers(plain)
        assert not any(run.replay for run in plain._runs.values())
        plain.load(dict(tree.leaves_with_path(given[1])))
        others = answers(plain)
    assert (answers(recorded), answers(recorded)) == expected
    by_kernels = dtype == torch.float32 or not onednn_has_bfloat16()
    assert [recorded._runs[count].replay is not None for count in recorded.counts] == [by_kernels] * len(recorded.counts)
    places = {path: leaf.data_ptr() for path, leaf in recorded.state.leaves.items()}
    assert answers(recorded) == expected[0]
    assert {path: leaf.data_ptr() for path, leaf in recorded.state.leaves.items()} == places
    recorded.load(dict(tree.leaves_with_path(given[1])))
    assert answers(recorded) == others != expected[0]


@pytest.mark.parametrize("kind", ["mamba2", "mixtral"])
def test_steps_that_call_torch_run_as_they_are(kind):
    """Where torch's ops are left between kernels, nothing is recorded, and a step is made once: the state of a scan moves on."""
    changes = {} if kind == "mamba2" else SMALL
    model = models.build(kind, {**KINDS[kind].base, **changes, "initializer_range": 0.3})
    params = model.init(0)
    runner = ProgramRunner(model, params, SIZES, execution="inductor")
    for ours, plain in zip(answers(runner), answers(ProgramRunner(model, params, SIZES)), strict=True):
        assert [chosen.token for chosen in ours] == [chosen.token for chosen in plain]
    assert all(isinstance(run, Replay) and not run.is_recordable for run in runner._runs.values() if run.calls > 1)


def test_a_record_reads_what_is_there_when_it_is_replayed():
    """Recording computes nothing; a replay reads the operands anew. What was allocated in between is kept."""
    (a, b), made = product(), []
    calls = cpp_calls(lambda: made.append(few_rows(a, b)))
    made[0].fill_(-1.0)
    expected = few_rows(a, b)
    calls()
    assert torch.equal(made[0], expected)
    result = made.pop().untyped_storage().data_ptr()
    gc.collect()
    a.mul_(2)
    calls()
    assert ctypes.cast(result, ctypes.POINTER(ctypes.c_float))[0] == 2 * float(expected[0, 0])


@pytest.mark.parametrize(
    "more",
    [
        lambda x: x + 1,
        lambda x: x.tolist(),
        lambda x: x.numpy(),
        lambda x: float(x[0, 0]),
        lambda x: bool((x > 0).all()),
        lambda x: x.zero_(),
        lambda x: torch.ones(2),
    ],
    ids=["an op", "tolist", "numpy", "float", "bool", "a write", "no operand"],
)
def test_work_that_does_more_is_not_recorded(more):
    """Ops of torch and reads on the host: None, before they had an effect. Afterwards kernels run as always."""
    (a, b), x = product(), torch.full((1, 2), 3.0)
    assert cpp_calls(lambda: (few_rows(a, b), more(x))) is None
    assert x.tolist() == [[3.0, 3.0]]
    assert torch.allclose(few_rows(a, b), a @ b, atol=1e-5) and cpp.calls_of_thread() is None


def test_an_error_in_work_is_raised():
    """What work itself raises is no reason to run it again."""
    with pytest.raises(ZeroDivisionError):
        cpp_calls(lambda: 1 // 0)
    assert cpp.calls_of_thread() is None


def test_other_threads_compute_meanwhile():
    """Only the calls of the thread that records are written down, also those of Inductor's kernels."""
    a, b = product()
    x, expected, found = torch.randn(64), few_rows(a, b), []
    run = inductor_compile(torch.fx.symbolic_trace(lambda x: (x.sin() * 2,)), [x], {}, "a test")
    (wave,) = run(x)

    def work():
        thread = threading.Thread(target=lambda: found.extend([few_rows(a, b), run(x)[0]]))
        thread.start()
        thread.join()
        found.append(run(x)[0])

    calls = cpp_calls(work)
    assert torch.equal(found[0], expected) and torch.equal(found[1], wave)
    found[2].zero_()
    calls()
    assert torch.equal(found[2], wave)


def test_a_position_outside_of_the_pages_is_found_in_a_replay():
    """A check behind a kernel is made behind each replay: the same error as without a record."""
    q, pool = torch.randn(1, 1, 4, 16), torch.randn(1, 8, 2, 16)
    rows, positions, pages = (torch.zeros(1, *shape, dtype=torch.int64) for shape in ((1,), (1,), (1, 2)))
    params = {"shard": False, "page_size": 4, "window": None, "scale": 0.25, "soft_cap": None}
    calls = cpp_calls(lambda: few_tokens(q, pool, pool, rows, positions, pages, None, **params))
    calls()
    positions.fill_(8)
    for _ in range(2):
        with pytest.raises(IndexError, match=r"position 8 of row 0 is in no page"):
            calls()
    positions.fill_(7)
    calls()


def test_long_runs_are_not_computed_as_a_record_of_short_ones():
    """Paged attention of 40 tokens is recorded for runs that a kernel takes. With longer ones, a replay does nothing. Positions
    that other calls write are not known before they run, so that nothing is recorded."""
    draw = torch.Generator().manual_seed(0)
    q, pool = torch.randn(1, 40, 4, 16, generator=draw), torch.randn(1, 256, 2, 16, generator=draw)
    rows, positions = torch.zeros(1, 40, dtype=torch.int64), torch.arange(40)[None]
    operands, made = (q, pool, pool, rows, positions, torch.arange(64)[None, None]), []
    params = {"shard": False, "page_size": 4, "window": None, "scale": 0.25, "soft_cap": None}
    attend = lambda: PRIMITIVES["paged_attention"].meaning(*operands, None, **params)[0]  # noqa: E731
    work, short = lambda: made.append(attend()), attend()
    assert cpp_calls(work, [rows]) is None
    calls = cpp_calls(work, [rows, positions])
    made[-1].zero_()
    assert calls() is True and torch.equal(made[-1], short)
    positions += 200
    made[-1].zero_()
    assert calls() is False and not made[-1].any() and attend().any()
    positions -= 200
    assert calls() is True and torch.equal(made[-1], short)


def test_steps_of_prompts_are_recorded():
    """32 tokens of a prompt, whose later ones are a long run beside a short one that was recorded: the bits of plain steps."""
    sizes = Sizes(rows=2, tokens=32, pages=100, page_size=4, length=192)
    model = models.build("qwen3", SMALL | {"head_dim": 16, "max_position_embeddings": 192})
    runner = ProgramRunner(model, model.init(0), sizes, execution="inductor")
    runner._prepare(32)
    recorded, found = runner._runs[32], []
    for run in (recorded.run, recorded):
        runner._runs[32], engine = run, Engine(runner)
        for prompt in [list(range(30)), [*range(64), *range(64), *range(40)], list(range(9, 40))] * 2:
            engine.forget()
            found.append(engine.add(prompt, Sampling(max_tokens=3, num_alternatives=0)))
            list(engine.run())
    assert [request.chosen for request in found[:6]] == [request.chosen for request in found[6:]]
    assert recorded.replay is not None


def test_what_a_kernel_of_inductor_raises_is_raised():
    """An index outside of a table: the same words as without a record; the next replay runs."""
    table, index = torch.randn(8, 32), torch.tensor([3])
    run = inductor_compile(torch.fx.symbolic_trace(lambda table, index: (table[index] * 2,)), [table, index], {}, "a test")
    (expected,), made = run(table, index), []
    calls = cpp_calls(lambda: made.append(run(table, index)[0]))
    index.fill_(9)
    for call in (lambda: run(table, index), calls):
        with pytest.raises(RuntimeError, match="index out of bounds"):
            call()
    index.fill_(3)
    calls()
    assert torch.equal(made[0], expected)


def test_as_many_operands_as_a_function_may_have():
    """Each number of operands reaches a function in its order; more are refused when they are written down."""
    seen = []
    for count in (0, 1, 6, 7, 20, 64):
        callback = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * count)(lambda *given: seen.append(given))
        calls = cpp.new_calls()
        calls.add(ctypes.cast(callback, ctypes.c_void_p).value, range(1, count + 1))
        calls()
        assert seen.pop() == tuple(range(1, count + 1))
    with pytest.raises(AssertionError, match="65 operands"):
        cpp.new_calls().add(0, range(65))
