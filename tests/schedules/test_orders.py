"""Orders against torch's generators, and laws that hold for all sizes, also those that torch refuses."""

import gc
from collections import Counter
from itertools import groupby
from time import process_time

import pytest
from torch.distributed.pipelining import schedules as torch_schedules

from mpar.errors import ConfigError, UnknownNameError
from mpar.schedules import SCHEDULES, Action, Costs, actions, timeline

RANKS, MICROBATCHES = range(1, 9), range(1, 33)
TORCH = {  # our name: torch's class, how many of our cases it accepts, and our options that give its order
    "gpipe": ("ScheduleGPipe", 256, {}),
    "one_f_one_b": ("Schedule1F1B", 228, {}),
    "interleaved": ("ScheduleInterleaved1F1B", 652, {}),
    "looped_bfs": ("ScheduleLoopedBFS", 1024, {"order": "torch"}),
    "zb1p": ("ScheduleInterleavedZeroBubble", 652, {}),
    "zbv": ("ScheduleZBVZeroBubble", 256, {}),
    "dual_pipe_v": ("ScheduleDualPipeV", 192, {}),
}


def chunks_of(name: str) -> range:
    """Numbers of chunks that are tried."""
    return range(1, 5) if SCHEDULES[name].any_chunks else range(SCHEDULES[name].chunks, SCHEDULES[name].chunks + 1)


def possible(name: str, ranks: int, microbatches: int) -> bool:
    """Whether the schedule says that it has an order for these sizes."""
    if name == "dual_pipe" and (ranks % 2 or microbatches % 2):
        return False
    return not name.startswith("dual_pipe") or microbatches >= 2 * ranks


def cases(name: str) -> list[tuple[int, int, int]]:
    """All (P, V, M) that are tried and possible."""
    return [(p, v, m) for p in RANKS for v in chunks_of(name) for m in MICROBATCHES if possible(name, p, m)]


class Stub:
    """What torch's schedules ask of a stage before they run it."""

    def __init__(self, ranks: int, stages: int):
        self.group_rank, self.group_size, self.num_stages, self.submod = 0, ranks, stages, None
        self.is_first, self.is_last, self.stage_index, self.has_backward = True, stages == 1, 0, True


def torch_order(name: str, ranks: int, chunks: int, microbatches: int) -> list[list[str]] | None:
    """torch's order, pairs taken apart, nothing but computation; None where torch refuses the sizes."""
    made = torch_schedule(name, ranks, chunks, microbatches)
    if made is None:
        return None
    order = made._get_pipeline_order() if isinstance(made, torch_schedules.PipelineScheduleSingle) else made.pipeline_order
    table = []
    for rank in range(ranks):
        computations = [action for action in order[rank] if action is not None and action.is_compute_op]
        table.append([str(part) for action in computations for part in action.sub_actions or (action,)])
    return table


def torch_schedule(name: str, ranks: int, chunks: int, microbatches: int) -> object | None:
    """torch's schedule object; None where torch refuses the sizes. Without its lowering, which takes minutes for all sizes."""
    kind = getattr(torch_schedules, TORCH[name][0])
    stages = [Stub(ranks, ranks * chunks) for _ in range(chunks)]
    try:
        return kind(stages[0] if issubclass(kind, torch_schedules.PipelineScheduleSingle) else stages, microbatches)
    except ValueError:
        return None


@pytest.fixture
def unlowered(monkeypatch):
    """torch's schedules do not insert messages."""
    monkeypatch.setattr(torch_schedules._PipelineScheduleRuntime, "_prepare_schedule_with_comms", lambda *_, **__: None)


@pytest.mark.parametrize("name", [name for name in TORCH if name != "one_f_one_b"])
def test_orders_are_those_of_torch(name, unlowered):
    """Wherever torch has an order, ours is the same, action for action on every rank."""
    compared = 0
    for p, v, m in cases(name):
        expected = torch_order(name, p, v, m)
        if expected is not None:
            ours = actions(name, num_ranks=p, num_chunks=v, num_microbatches=m, **TORCH[name][2])
            assert [[str(action) for action in own] for own in ours] == expected, (p, v, m)
            compared += 1
    assert compared == TORCH[name][1]


def test_1f1b_is_that_of_torch_but_for_its_last_rank(unlowered):
    """torch's list of 1F1B equals ours on all ranks but the last, where torch's has no forward of microbatch 0, but one of M."""
    compared = 0
    for p, v, m in cases("one_f_one_b"):
        expected = torch_order("one_f_one_b", p, v, m)
        if expected is not None:
            ours = [[str(action) for action in own] for own in actions("one_f_one_b", num_ranks=p, num_microbatches=m)]
            assert ours[:-1] == expected[:-1]
            wrong = [f"{p - 1}{kind}{i + (kind == 'F')}" for i in range(m) for kind in "FB"]
            assert expected[-1] == wrong
            compared += 1
    assert compared == TORCH["one_f_one_b"][1]


def test_1f1b_is_the_published_one():
    """P - r forwards at most ahead, as counted by stepping through: a backward as soon as P - r microbatches are live."""
    for p in RANKS:
        for m in MICROBATCHES:
            for r, own in enumerate(actions("one_f_one_b", num_ranks=p, num_microbatches=m)):
                done = {"F": 0, "B": 0}
                for action in own:
                    backward = done["F"] - done["B"] == p - r or done["F"] == m
                    kind = "B" if backward else "F"
                    assert action == Action(r, kind, done[kind])
                    done[kind] += 1
                assert done == {"F": m, "B": m}


def test_most_sizes_are_possible():
    """Sizes in all, and those of them that torch refuses."""
    every = {name: len(cases(name)) for name in SCHEDULES}
    chunked, single = 8 * 4 * 32, 8 * 32
    assert every == {
        name: chunked if SCHEDULES[name].any_chunks else {"dual_pipe": 48, "dual_pipe_v": 192}.get(name, single)
        for name in SCHEDULES
    }
    assert sum(every[name] - count for name, (_, count, _) in TORCH.items()) == 28 + 372 + 372


@pytest.mark.parametrize("name", list(SCHEDULES))
def test_orders_are_valid(name):
    """For all sizes: everything once, on the rank of the placement, microbatches ascending, and it comes to its end."""
    for p, v, m in cases(name):
        table = actions(name, num_ranks=p, num_chunks=v, num_microbatches=m)
        check(table, SCHEDULES[name].placement, p, v, m, backward=name != "forward_only")


@pytest.mark.parametrize(
    "name, options",
    [
        ("one_f_one_b", {"extra_warmup": 1}),
        ("one_f_one_b", {"extra_warmup": 2}),
        ("one_f_one_b", {"extra_warmup": 1, "forwards_ahead": 1}),
        ("interleaved", {"forwards_ahead": 1}),
        ("looped_bfs", {"order": "torch"}),
        ("forward_only", {"placement": "v"}),
    ],
    ids=str,
)
def test_orders_with_options_are_valid(name, options):
    """As without options, but for the order of microbatches in backward if torch's was asked for."""
    placement = options.get("placement", "loop")
    for p, v, m in cases(name):
        if placement == "loop" or v == 2:
            table = actions(name, num_ranks=p, num_chunks=v, num_microbatches=m, **options)
            check(table, placement, p, v, m, backward=name != "forward_only", ascending="order" not in options)


@pytest.mark.parametrize("name", ["interleaved", "zb1p"])
def test_groups_of_any_size_are_valid(name):
    """Every group size from the smaller of P and M on; no group is larger than asked if groups of P or more can be that small."""
    for p in range(1, 7):
        for v in (1, 2, 3):
            for m in (1, 2, 3, 5, 8, 12, 13, 19):
                for size in range(min(p, m), m + 2):
                    table = actions(name, num_ranks=p, num_chunks=v, num_microbatches=m, group_size=size)
                    check(table, "loop", p, v, m)
                    runs = [len(list(run)) for _, run in groupby(a.stage for a in table[0] if a.kind == "F")]
                    if v > 1:
                        assert max(runs) <= max(size, m if m < 2 * p else 2 * p - 1)


def check(
    table: list[list[Action]], placement: str, p: int, v: int, m: int, backward: bool = True, ascending: bool = True
) -> None:
    """The laws of all orders. That parts of one backward follow each other, timeline() checks."""
    assert len(table) == p
    for r, own in enumerate(table):
        seen = Counter(own)
        assert set(seen.values()) <= {1}
        places = {(stage, i) for stage in range(p * v) for i in range(m) if holds(placement, p, m, r, stage, i)}
        kinds: dict[tuple[int, int], set[str]] = {place: set() for place in places}
        for action in own:
            kinds[action.stage, action.microbatch].add(action.kind)
        allowed = ({"F", "B"}, {"F", "I", "W"}) if backward else ({"F"},)
        assert all(kind in allowed for kind in kinds.values())
        if ascending:
            assert_ascending(own, m if placement != "bidirectional" else m // 2)
    if backward:
        assert timeline(table, Costs.uniform(p * v)).makespan >= 3 * v * m
    else:
        assert timeline(table, Costs.uniform(p * v)).makespan >= v * m


def holds(placement: str, p: int, m: int, rank: int, stage: int, microbatch: int) -> bool:
    """Whether the rank has the stage for the microbatch."""
    if placement == "loop":
        return stage % p == rank
    if placement == "v":
        return stage in (rank, 2 * p - 1 - rank)
    return rank == (stage if microbatch < m // 2 else p - 1 - stage)


def assert_ascending(own: list[Action], way: int) -> None:
    """In each stage, direction and phase microbatches ascend; what adds to a gradient counts as one phase."""
    last: dict[tuple[int, int, str], int] = {}
    for stage, kind, microbatch in own:
        for phase in {"F": "f", "I": "i", "W": "w", "B": "iw"}[kind]:
            key = (stage, microbatch // way, phase)
            assert last.get(key, -1) < microbatch
            last[key] = microbatch


def test_examples_in_docstrings():
    """The last lines of a docstring are an order of that schedule."""
    printed = {
        "gpipe": [(2, 4, 1, 3, {})],
        "one_f_one_b": [(2, 4, 1, 6, {})],
        "interleaved": [(1, 2, 2, 4, {})],
        "looped_bfs": [(0, 2, 2, 2, {})],
        "zb_h1": [(2, 4, 1, 4, {})],
        "zb_h2": [(2, 3, 1, 6, {})],
        "zb1p": [(1, 2, 2, 2, {})],
        "zbv": [(1, 2, 2, 3, {})],
        "v_half": [(1, 2, 2, 3, {})],
        "v_min": [(1, 2, 2, 3, {})],
        "dual_pipe": [(0, 2, 1, 4, {})],
        "dual_pipe_v": [(1, 2, 2, 4, {})],
        "forward_only": [(0, 2, 2, 3, {}), (0, 2, 2, 3, {"placement": "v"})],
    }
    assert set(printed) == set(SCHEDULES)
    for name, examples in printed.items():
        lines = [line.split() for line in SCHEDULES[name].function.__doc__.strip().splitlines()][-len(examples) :]
        for line, (rank, p, v, m, options) in zip(lines, examples, strict=True):
            own = actions(name, num_ranks=p, num_chunks=v, num_microbatches=m, **options)[rank]
            assert line == [str(action) for action in own]


@pytest.mark.parametrize(
    "name, sizes, message",
    [
        ("zbv", {"num_chunks": 3}, "3 chunks on 4 ranks are 12 stages, but it has 2 per rank, 8 in all.*interleaved"),
        ("gpipe", {"num_chunks": 2}, "2 chunks on 4 ranks are 8 stages, but it has 1 per rank, 4 in all"),
        ("dual_pipe", {"num_microbatches": 6}, r"6 microbatches are fewer than 2 \* 4 ranks = 8: use that many"),
        ("dual_pipe", {"num_ranks": 3, "num_microbatches": 7}, r"num_ranks is odd \(3\).*num_microbatches is odd \(7\)"),
        ("dual_pipe_v", {"num_microbatches": 7}, r"7 microbatches are fewer than 2 \* 4 ranks = 8"),
        ("interleaved", {"group_size": 3}, "group_size is 3, needs to be 4 or more"),
        ("zb1p", {"group_size": 0}, "group_size is 0, needs to be 4 or more"),
        ("one_f_one_b", {"extra_warmup": -1}, "extra_warmup is -1, needs to be 0 or more"),
        ("one_f_one_b", {"forwards_ahead": -1}, "forwards_ahead is -1, needs to be 0 or more"),
        ("interleaved", {"forwards_ahead": -1}, "forwards_ahead is -1, needs to be 0 or more"),
        ("looped_bfs", {"order": "down"}, "order is 'down', needs to be 'ascending' or 'torch'"),
        ("forward_only", {"placement": "v", "num_chunks": 3}, "placement='v' has 2 chunks, not 3"),
        ("forward_only", {"placement": "w", "num_chunks": 2}, "placement is 'w', needs to be 'loop' or 'v'"),
        ("gpipe", {"num_microbatches": 0}, "num_microbatches is 0, needs to be 1 or more"),
        ("interleaved", {"num_ranks": 0, "num_chunks": -1}, "num_ranks is 0.*num_chunks is -1"),
        (
            "zbv",
            {"group_size": 4, "extra_warmup": 1},
            "no option 'group_size' .its options: none.; it has no option 'extra_warmup'",
        ),
    ],
)
def test_impossible_requests_say_why(name, sizes, message):
    """The error has the arithmetic, and all that is wrong."""
    with pytest.raises(ConfigError, match=message):
        actions(name, **{"num_ranks": 4, "num_microbatches": 8, **sizes})


def test_every_schedule_refuses_sizes_that_are_none():
    """No ranks, no microbatches, no chunks: for all schedules, by name."""
    for name in SCHEDULES:
        for sizes in ({"num_ranks": 0}, {"num_microbatches": 0}, {"num_microbatches": -8}, {"num_chunks": 0}):
            with pytest.raises(ConfigError):
                actions(name, **{"num_ranks": 2, "num_microbatches": 8, **sizes})


def test_every_function_refuses_a_rank_that_is_none():
    """rank is one of 0 .. num_ranks - 1."""
    for schedule in SCHEDULES.values():
        chunks = {"num_chunks": 2} if schedule.any_chunks else {}
        for rank in (-1, 2):
            with pytest.raises(ConfigError, match=f"rank is {rank}, needs to be 0 .. 1"):
                schedule.function(rank, num_ranks=2, num_microbatches=8, **chunks)


def test_unknown_names_have_neighbours():
    """The error names schedules that are spelled alike, and all there are."""
    with pytest.raises(UnknownNameError, match=r"'zb_v'; did you mean zbv.*There are gpipe, one_f_one_b"):
        actions("zb_v", num_ranks=2, num_microbatches=2)


def test_default_chunks_are_the_schedules_own():
    """Without num_chunks: the same as with the number that SCHEDULES has."""
    for name, schedule in SCHEDULES.items():
        explicit = actions(name, num_ranks=2, num_chunks=schedule.chunks, num_microbatches=8)
        assert actions(name, num_ranks=2, num_microbatches=8) == explicit


@pytest.mark.parametrize("name", list(SCHEDULES))
def test_generation_is_linear(name):
    """Eight times the actions take at most thirty times as long: a quadratic generator takes 64 times, ours about 8."""
    short, long = (
        min(generation_s(name, ranks, microbatches) for _ in range(3)) for ranks, microbatches in ((16, 128), (32, 512))
    )
    assert long < 30 * short


def generation_s(name: str, ranks: int, microbatches: int) -> float:
    """Processor seconds of all ranks' orders, without the garbage collector, which visits all that other tests hold."""
    gc.disable()
    try:
        start = process_time()
        actions(name, num_ranks=ranks, num_microbatches=microbatches)
        return process_time() - start
    finally:
        gc.enable()
