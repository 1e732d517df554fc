"""Predictions for pipelines: bytes against storages that are counted, times against timelines worked out by hand."""

import pytest
import torch

from mpar.compiler import Schedule
from mpar.errors import ProgramError
from mpar.forecast import memory_timeline, message_durations, step_times
from mpar.hardware import REFERENCE, hardware
from mpar.ir import SegmentMemory, sweep
from mpar.mesh import Mesh
from mpar.optim import AdamW
from mpar.program import Program, RankRun, State, batch_rows
from mpar.program.compile import compile_eval, compile_step
from mpar.runtime.comm._lockstep import run_ranks
from mpar.schedules import Costs, timeline
from mpar.shards import shard
from tests.forecast.storage_tracker import StorageTracker, TrackedComm
from tests.forecast.test_memory import OPS

pytestmark = pytest.mark.cases(2)  # each compiles a program of its own
NUM_STAGES = 8
PIPELINES = [
    (Mesh(pp=2), "ddp", "gpipe", False),
    (Mesh(pp=2), "ddp", "zb_h1", True),
    (Mesh(pp=2), "ddp", "looped_bfs", True),
    (Mesh(pp=4), "ddp", "one_f_one_b", True),
    (Mesh(pp=4), "ddp", "zb_h2", False),
    (Mesh(pp=4), "ddp", "zbv", True),
    (Mesh(pp=4), "ddp", "v_min", False),
    (Mesh(pp=4), "ddp", "dual_pipe", True),
    (Mesh(pp=4), "ddp", "interleaved", False),
    (Mesh(pp=2, fsdp=2), "zero3", "interleaved", True),
    (Mesh(pp=2, fsdp=2), "zero3", "zbv", False),
    (Mesh(pp=2, fsdp=2), "zero2", "zb_h1", True),
    (Mesh(pp=4, fsdp=2), "zero3", "one_f_one_b", True),
    (Mesh(pp=2, tp=2), "tp_sp", "zb1p", True),
    (Mesh(pp=2, fsdp=2, tp=2), "zero3_tp_sp", "dual_pipe_v", False),
]


def compiled(make_model, mesh: Mesh, strategy: str, schedule, *, tied=False, count=8, **options) -> Program:
    """A step of 8 layers in float32."""
    model = make_model(torch.float32, num_hidden_layers=8, tie_word_embeddings=tied)
    rows = count * mesh.axis_size(("dp", "fsdp"))
    return compile_step(model, AdamW(lr=1e-3), mesh, strategy, (rows, 8), num_microbatches=count, schedule=schedule, **options)


def random_batch(program: Program) -> dict[str, torch.Tensor]:
    rows, columns = program.facts.batch["tokens"]
    shape = (rows * program.num_microbatches, columns)
    generator = torch.Generator().manual_seed(1)
    return {key: torch.randint(0, 96, shape, generator=generator) for key in ("tokens", "labels")}


def measured_peaks(program: Program, state: State, batch: dict[str, torch.Tensor]) -> list[int]:
    """The most bytes alive on each simulated rank during one step."""

    def work(rank, comm):
        tracker, part = StorageTracker(), program.part(rank)
        local = {leaf.path: shard(state.leaves[leaf.path], leaf.spec, program.mesh, rank) for leaf in part.state_in}
        rows = batch_rows(program, batch, rank)
        run = RankRun(program, TrackedComm(comm, tracker), progress=tracker.follow, primitives=OPS)
        used = {step.kind for step in part.instructions}
        constants = [c for name, kind in program.kinds.items() if name in used for c in kind.constants.values()]
        tracker.add([*local.values(), *rows.values(), *constants])
        with tracker:
            run(State(local, state.step), rows)
        return tracker.peak

    return run_ranks(program.mesh, work)


def predicted_peaks(program: Program) -> list[int]:
    """The predicted peak of every rank."""
    peaks = [max(peak for peak, _ in memory_timeline(program, position)) for position in range(len(program.parts))]
    return [peaks[program.position(rank)] for rank in range(program.mesh.size)]


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize(("mesh", "strategy", "schedule", "tied"), PIPELINES, ids=str)
def test_peak_of_every_rank_is_exact(mesh, strategy, schedule, tied, recompute, make_model, make_state):
    """Buffers of messages and values held until they are sent included, a rank's fullest moment is predicted to the byte."""
    program = compiled(make_model, mesh, strategy, schedule, tied=tied, recompute=recompute)
    state = make_state(make_model(torch.float32, num_hidden_layers=8, tie_word_embeddings=tied))
    found, expected = measured_peaks(program, state, random_batch(program)), predicted_peaks(program)
    assert found == expected
    assert program.predict().peak_bytes == max(found)


@pytest.mark.parametrize(
    ("ranks", "schedule"), [(4, Schedule(layout=(4, 0, 0, 4))), (2, Schedule("zbv", layout="E|t*8||L"))], ids=str
)
def test_peak_with_empty_stages_is_exact(ranks, schedule, make_model, make_state):
    """A rank that only hands on holds what it hands on, no more."""
    program = compiled(make_model, Mesh(pp=ranks), "ddp", schedule)
    state = make_state(make_model(torch.float32, num_hidden_layers=8))
    assert measured_peaks(program, state, random_batch(program)) == predicted_peaks(program)


@pytest.mark.parametrize("schedule", ["one_f_one_b", "zbv"])
def test_peak_of_evaluation_is_exact(schedule, make_model):
    """Forwards alone, whose residuals nobody keeps."""
    model = make_model(torch.float32, num_hidden_layers=8)
    program = compile_eval(model, Mesh(pp=4), "ddp", (8, 8), num_microbatches=8, schedule=schedule)
    state = program.init_state(model.init(0))
    assert measured_peaks(program, state, random_batch(program)) == predicted_peaks(program)


UNITS = {"forward": 1.0, "backward": 2.0, "backward_input": 1.0, "backward_weight": 1.0}


def durations(program: Program, slow: dict[int, float] | None = None) -> list[list[float]]:
    """Each action takes UNITS, whatever its stage consists of, times the stage's number in `slow`; nothing else takes time.

    The layer of a stage is charged; embedding and head are free.
    """
    out = []
    for part in program.parts:
        own = []
        for step in part.instructions:
            stage = program.facts.stage_of.get(step.segment, -1)
            charged = step.segment.startswith("layer") and step.op in UNITS
            own.append(UNITS[step.op] * (slow or {}).get(stage, 1.0) if charged else 0.0)
        out.append(own)
    return out


def all_messages(program: Program, seconds: float) -> dict[int, float]:
    return dict.fromkeys(message_durations(program, hardware(REFERENCE)), seconds)


def costs(slow: dict[int, float], transfer: float) -> Costs:
    """What `durations` charges, for a table of schedules. The first stage's backward is all W if it is taken apart."""
    factors = [slow.get(stage, 1.0) for stage in range(NUM_STAGES)]
    deferred = [stage == 0 for stage in range(NUM_STAGES)]
    return Costs(
        factors,
        [0.0 if late else f for f, late in zip(factors, deferred, strict=True)],
        [2.0 * f if late else f for f, late in zip(factors, deferred, strict=True)],
        backward=[2.0 * f for f in factors],
        transfer=[transfer] * (NUM_STAGES - 1),
    )


def test_times_of_gpipe_by_hand(make_model):
    """Two stages, two microbatches, F 1, B 2, a message 0.5, the gradient of a tied table 0.5: every moment as on paper."""
    program = compiled(make_model, Mesh(pp=2), "ddp", Schedule("gpipe", layout="Et|t*7L"), tied=False, count=2)
    quick = [
        [
            0.0 if step.segment.startswith("layers") and step.segment not in ("layers.0", "layers.1") else t
            for t, step in zip(own, part.instructions, strict=True)
        ]
        for own, part in zip(durations(program), program.parts, strict=True)
    ]
    times = step_times(program, quick, all_messages(program, 0.5))
    moments = {
        (position, step.op, step.microbatch): (times.start[position][line], times.end[position][line])
        for position, part in enumerate(program.parts)
        for line, step in enumerate(part.instructions)
        if quick[position][line]
    }
    assert moments == {
        (0, "forward", 0): (0.0, 1.0),
        (0, "forward", 1): (1.0, 2.0),
        (1, "forward", 0): (1.5, 2.5),
        (1, "forward", 1): (2.5, 3.5),
        (1, "backward", 0): (3.5, 5.5),
        (1, "backward", 1): (5.5, 7.5),
        (0, "backward", 0): (6.0, 8.0),
        (0, "backward", 1): (8.0, 10.0),
    }
    assert (times.makespan, times.busy, times.bubble) == (10.0, [6.0, 6.0], 4.0)
    assert times.span == [4.0, 0.0]  # the first waits for a gradient; the last computes from its first forward on


@pytest.mark.parametrize("name", ["gpipe", "one_f_one_b", "zb_h1", "zb_h2"])
def test_makespans_are_the_published_ones(name, make_model):
    """Eight stages of one layer, sixteen microbatches, F = I = W: (M - 1 + P) (F + B), or, taken apart, the papers' bubbles."""
    program = compiled(make_model, Mesh(pp=8), "ddp", name, count=16)
    times = step_times(program, durations(program), {})
    bubble = {"gpipe": 7 * 3, "one_f_one_b": 7 * 3, "zb_h1": 7 * 1, "zb_h2": 7}[name]
    assert times.busy == [48.0] * 8
    assert times.makespan == 48 + bubble


SLOW = [{}, {3: 2.0}, {0: 2.0}, {7: 1.5, 2: 0.5}]


@pytest.mark.parametrize("transfer", [0.0, 0.25, 3.0])
@pytest.mark.parametrize("slow", SLOW, ids=str)
@pytest.mark.parametrize(
    ("name", "ranks"), [("gpipe", 8), ("one_f_one_b", 8), ("interleaved", 4), ("zb_h1", 8), ("zbv", 4), ("dual_pipe_v", 4)]
)
def test_steps_take_as_long_as_their_schedule(name, ranks, slow, transfer, make_model, programs):
    """The program's makespan is that of its table of actions, with a slow stage too. No sooner, where messages take far longer
    than it was compiled for: receives are then posted too late."""
    program = programs(name, ranks)
    found = step_times(program, durations(program, slow), all_messages(program, transfer)).makespan
    expected = timeline(program.schedule, costs(slow, transfer)).makespan
    assert found == pytest.approx(expected, rel=1e-12) if transfer < 1 else found >= expected


@pytest.fixture(scope="module")
def programs(make_model):
    """Programs of eight stages, compiled once."""
    cache = {}

    def get(name: str, ranks: int) -> Program:
        if name not in cache:
            cache[name] = compiled(make_model, Mesh(pp=ranks), "ddp", name, count=16)
        return cache[name]

    return get


def test_messages_share_a_direction(make_model, programs):
    """From one rank to the next, messages follow each other; activations do not hold up gradients, which go the other way."""
    program = programs("gpipe", 8)
    times = step_times(program, durations(program), all_messages(program, 4.0))
    ends = {}
    for position, part in enumerate(program.parts):
        for step in part.instructions:
            if step.op == "send":
                ends.setdefault((position, step.peer), []).append(times.messages[step.message])
    for spans in ends.values():
        assert all(a[1] <= b[0] for a, b in zip(sorted(spans), sorted(spans)[1:], strict=False))
    first = [times.messages[step.message] for step in program.parts[0].instructions if step.op == "send"]
    assert first == [(1.0 + 4 * m, 5.0 + 4 * m) for m in range(16)]


def test_a_program_that_cannot_end_is_refused(make_model):
    """A send that is missing leaves its receiver waiting: an error, not a number."""
    program = compiled(make_model, Mesh(pp=2), "ddp", "gpipe", count=2)
    part = program.parts[0]
    line = next(line for line, step in enumerate(part.instructions) if step.op == "send")
    del part.instructions[line]
    with pytest.raises(ProgramError, match="wait for each other for ever"):
        step_times(program, durations(program), {})


def test_prediction_adds_up(programs):
    """The step's time is the busiest rank's plus the bubble; messages and their bytes are those of the fullest rank."""
    program = programs("one_f_one_b", 8)
    found = program.predict(REFERENCE)
    assert found.step_s == pytest.approx(found.compute_s + found.exposed_s + found.bubble_s)
    assert found.num_messages == 2 * 16
    residual = 8 * 32 * 4
    assert found.communication_bytes >= 2 * 16 * residual


def test_workspaces_count_where_they_are():
    """What an op needs while it runs adds to what lives then, not to the peak of another op; by hand, storage by storage."""
    memory = SegmentMemory(
        inputs=(0,),
        outputs=(2,),
        sizes=(10, 40, 5),
        events=(((1,), (0,)), ((2,), (1,))),  # 1 is made of 0, which goes; 2 of 1, which goes
        workspaces=(3, 30),
        idle=(),
    )
    given = frozenset({0})
    assert sweep(memory, given) == 40  # the first op: 40 more than before; the second: 40 - 10 + 5 = 35
    assert sweep(memory, given, workspace=True) == 65  # the second: 35 + 30; the first: 43


def test_need_lies_between_peak_and_sum(make_model):
    """The need of a step is no less than its peak, no more than that and the largest workspace."""
    program = compiled(make_model, Mesh(), "ddp", None, count=2)
    prediction = program.predict()
    assert prediction.peak_bytes < prediction.need_bytes <= prediction.peak_bytes + prediction.workspace_bytes
