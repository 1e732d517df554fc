"""Lowered pipelines: proven over many sizes, on time by a simulation of transfers, exact in the small."""

import random
from itertools import chain

import pytest

from mpar.errors import ConfigError, ProgramError
from mpar.schedules import SCHEDULES, Action, Costs, Transfer, actions, fuse, lower, timeline, verify

MODELS = ("direction", "pair", "single")
CASES_PER_SCHEDULE = 140


def words(text):
    """Actions written as text."""
    return [Action(int(word[0]), word[1], int(word[2:])) for word in text.split()]


def stages(table):
    """How many there are."""
    return 1 + max(action.stage for own in table for action in own)


def sizes(name):
    """(ranks, chunks, microbatches, table) of sizes that the schedule takes, drawn at random; small counts more often."""
    rng = random.Random(name)
    chunks = SCHEDULES[name].allowed_chunks or (1, 2, 3, 4)
    found = {}
    for _ in range(2000):
        size = rng.randint(1, 8), rng.choice(chunks), rng.choice((rng.randint(1, 8), rng.randint(1, 16), rng.randint(1, 32)))
        if size in found:
            continue
        try:
            found[size] = actions(name, num_ranks=size[0], num_chunks=size[1], num_microbatches=size[2])
        except ConfigError:
            continue
        if len(found) == CASES_PER_SCHEDULE:
            break
    return found


def run(lowered, costs):
    """Times at which ranks end their last action, and how long waits for sends before it block, if transfers need both ends.

    Ranks go on in turn, each until it waits; a transfer starts when both ends are posted and the one before it from the same rank
    to the same rank is over.
    """
    clock, at, last = [0.0] * len(lowered), [0] * len(lowered), [0.0] * len(lowered)
    posted, over, free, delays = {}, {}, {}, []
    queues = {}
    for rank, own in enumerate(lowered):
        for item in own:
            if isinstance(item, Transfer) and item.op == "send":
                queues.setdefault((rank, item.peer), []).append(item)
    sent = {(rank, item.message) for (rank, _), queue in queues.items() for item in queue}
    while any(at[rank] < len(own) for rank, own in enumerate(lowered)):
        before = list(at)
        for rank, own in enumerate(lowered):
            while at[rank] < len(own):
                item = own[at[rank]]
                if isinstance(item, Action):
                    last[rank] = clock[rank] = clock[rank] + costs.of(item)
                elif item.op != "wait":
                    posted[item.message, item.op] = clock[rank]
                elif item.message not in over:
                    break
                else:
                    if (rank, item.message) in sent and any(isinstance(later, Action) for later in own[at[rank] :]):
                        delays.append(over[item.message] - clock[rank])
                    clock[rank] = max(clock[rank], over[item.message])
                at[rank] += 1
        for lane, queue in queues.items():
            while queue and (queue[0].message, "send") in posted and (queue[0].message, "recv") in posted:
                item = queue.pop(0)
                begin = max(posted[item.message, "send"], posted[item.message, "recv"], free.get(lane, 0.0))
                edge = item.stage if item.kind == "F" else item.stage - 1
                over[item.message] = free[lane] = begin + (costs.transfer[edge] if costs.transfer else 0.0)
        assert before != at, "stuck"
    return last, delays


def random_costs(count, transfer, seed=0):
    """Positive times that differ from stage to stage."""
    rng = random.Random(seed)
    forward, into, weight = ([rng.uniform(0.5, 1.5) for _ in range(count)] for _ in range(3))
    return Costs(forward, into, weight, transfer=[transfer * rng.uniform(0.5, 1.5) for _ in range(count - 1)])


def assert_accepted(table, lowered, model):
    """The program does what the table says, rank by rank, B being I and W, in its order, and verifies."""
    for own, program in zip(table, lowered, strict=True):
        parts = [[part for a in work if isinstance(a, Action) for part in split(a)] for work in (own, program)]
        assert parts[0] == parts[1]
    verify(lowered, queues=model)


def split(action):
    """B as I, then W."""
    return [action._replace(kind=kind) for kind in ("IW" if action.kind == "B" else action.kind)]


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", SCHEDULES)
def test_lowered_schedules_verify(name):
    """What lower makes for a model of queues is accepted under it, at all sizes."""
    for table in sizes(name).values():
        for model in MODELS:
            assert_accepted(table, lower(table, queues=model), model)


def test_many_sizes():
    """The test above sees over 1,400 programs for each model."""
    assert sum(len(sizes(name)) for name in SCHEDULES) >= 1400


@pytest.mark.cases(2)
@pytest.mark.parametrize("name", SCHEDULES)
def test_programs_for_less_run_on_more(name):
    """What is made for one queue a rank runs on all kinds; what is made for one a pair, on all but that."""
    for table in list(sizes(name).values())[::7]:
        for model in (*MODELS, "tag"):
            assert_accepted(table, lower(table, queues="single"), model)
        for model in ("direction", "pair", "tag"):
            assert_accepted(table, lower(table, queues="pair"), model)


@pytest.mark.parametrize("lead", [0, 1, 3])
@pytest.mark.parametrize("transfer", [0, 0.4, 3])
@pytest.mark.parametrize("name", ["one_f_one_b", "interleaved", "zb1p", "zbv", "dual_pipe", "dual_pipe_v"])
def test_verifies_with_any_costs(name, transfer, lead):
    """Uneven times, transfers longer than actions, and times of zero, where all happens at once, do not make waits cycle."""
    table = actions(name, num_ranks=4, num_microbatches=8)
    count = stages(table)
    for costs in (random_costs(count, transfer), Costs.uniform(count, 0, 0, 0, transfer), Costs.uniform(count, 1, 0, 0)):
        for model in MODELS:
            assert_accepted(table, lower(table, costs, queues=model, lead=lead), model)


@pytest.mark.parametrize("seed", range(40))
def test_verifies_any_placement_of_stages(seed):
    """Stages may lie on any ranks: greedy orders on random maps, some ranks without a stage."""
    rng = random.Random(seed)
    num_ranks, count, microbatches = rng.randint(2, 4), rng.randint(2, 7), rng.randint(1, 6)
    place = [rng.randrange(num_ranks) for _ in range(count)]
    table, done = [[] for _ in range(num_ranks)], set()
    todo = {Action(s, kind, m) for s in range(count) for m in range(microbatches) for kind in ("F", *rng.choice(("B", "IW")))}
    while todo:
        ready = [
            action
            for action in sorted(todo)
            if ((action.stage - 1, "F", action.microbatch) in done or not action.stage if action.kind == "F" else True)
            and (action.kind == "F" or (action.stage, "F", action.microbatch) in done)
            and (action.kind != "W" or (action.stage, "I", action.microbatch) in done)
            and (
                action.kind in "FW"
                or action.stage == count - 1
                or not done.isdisjoint({(action.stage + 1, kind, action.microbatch) for kind in "BI"})
            )
        ]
        action = rng.choice(ready)
        todo.remove(action)
        done.add(tuple(action))
        table[place[action.stage]].append(action)
    for model in MODELS:
        assert_accepted(table, lower(table, random_costs(count, rng.choice((0, 0.5, 4)), seed), queues=model), model)


@pytest.mark.parametrize("transfer", [0, 0.4, 3])
@pytest.mark.parametrize("name", ["gpipe", "one_f_one_b", "interleaved", "looped_bfs", "zb1p", "zbv", "v_half", "dual_pipe_v"])
def test_keeps_the_time_of_the_timeline(name, transfer):
    """With transfers that need both ends, ranks end when the timeline of the table says, and waits for sends do not block."""
    table = actions(name, num_ranks=4, num_microbatches=8)
    costs = random_costs(stages(table), transfer)
    ends, delays = run(lower(table, costs), costs)
    assert ends == pytest.approx([own[-1] for own in timeline(table, costs).end])
    assert max(delays) <= 1e-9


def test_small_program():
    """1F1B on two ranks, line by line."""
    table = actions("one_f_one_b", num_ranks=2, num_microbatches=2)
    assert [" ".join(map(str, own)) for own in lower(table)] == [
        "0F0 0SEND_F0 0RECV_B0 0F1 0SEND_F1 0RECV_B1 0WAIT_F0 0WAIT_B0 0B0 0WAIT_F1 0WAIT_B1 0B1",
        "1RECV_F0 1WAIT_F0 1F0 1RECV_F1 1B0 1SEND_B0 1WAIT_F1 1F1 1WAIT_B0 1B1 1SEND_B1 1WAIT_B1",
    ]


def test_stages_of_one_rank_exchange_nothing():
    """The turn of a V stays on its rank, and one rank alone sends nothing."""
    turn = {("send", 2, "F"), ("recv", 3, "F"), ("send", 3, "B"), ("recv", 2, "B")}
    found = lower(actions("zbv", num_ranks=3, num_microbatches=6))
    ends = {(item.op, item.stage, item.kind) for own in found for item in own if isinstance(item, Transfer) and item.op != "wait"}
    assert len(ends) == 2 * 2 * 4 and ends.isdisjoint(turn)
    alone = lower(actions("zbv", num_ranks=1, num_microbatches=3))
    assert all(isinstance(item, Action) for item in alone[0])


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", ["interleaved", "zb1p", "dual_pipe"])
def test_positions(name, model):
    """A send follows its producer, a wait for a receive precedes its consumer, a send overlaps with at least one action."""
    table = actions(name, num_ranks=4, num_microbatches=8)
    for own in lower(table, queues=model):
        steps = [item for item in own if isinstance(item, Action)]
        number = 0
        at = {}
        for item in own:
            if isinstance(item, Action):
                number += 1
                continue
            at[item.op, item.message] = number
            if item.op == "send":
                producer = steps[number - 1]
                assert (producer.stage, producer.microbatch) == (item.stage, item.microbatch)
                assert producer.kind in ("F" if item.kind == "F" else "BI")
            elif item.op == "wait" and ("send", item.message) in at:
                assert number >= min(at["send", item.message] + 1, len(steps))
            elif item.op == "wait":
                consumer = steps[number]
                assert (consumer.stage, consumer.microbatch) == (item.stage, item.microbatch)
                assert consumer.kind in ("F" if item.kind == "F" else "BI")


def test_receives_are_posted_late():
    """A receive is posted `lead` actions before its consumer, or before that of a message behind it in the queue."""
    table = actions("gpipe", num_ranks=4, num_microbatches=8)
    for lead in (0, 1, 2):
        for own in lower(table, lead=lead):
            number, posted = 0, {}
            for item in own:
                if isinstance(item, Action):
                    number += 1
                elif item.op == "recv":
                    posted[item.message] = number
                elif item.op == "wait" and item.message in posted:
                    assert posted[item.message] == max(number - lead, 0)


def test_a_long_transfer_is_posted_earlier():
    """A receive is posted when its transfer must begin, not just before its consumer."""
    table = actions("gpipe", num_ranks=2, num_microbatches=8)
    costs = Costs(
        [3, 1.5], [1, 1], [1, 1], transfer=[3]
    )  # F of m starts at 3 m + 6 on rank 1, where F of m - 2 ends at 3 m + 1.5
    own = [str(item) for item in lower(table, costs, lead=0)[1]]
    assert own.index("1F2") < own.index("1RECV_F4") < own.index("1F3")


def test_messages_are_numbered_in_time():
    """Numbers go from 0 without gaps; a rank sends in ascending order."""
    lowered = lower(actions("interleaved", num_ranks=4, num_microbatches=8))
    sent = [[item.message for item in own if isinstance(item, Transfer) and item.op == "send"] for own in lowered]
    assert all(own == sorted(own) for own in sent)
    assert sorted(chain.from_iterable(sent)) == list(range(2 * 7 * 8))


def test_fuse():
    """I and W of the same stage and microbatch become B where they stand side by side."""
    table = [words("0F0 1F0 1I0 1W0 0I0 0F1 0W0 0I1 1W1")]
    assert fuse(table) == [words("0F0 1F0 1B0 0I0 0F1 0W0 0I1 1W1")]


@pytest.mark.parametrize("transfer", [0, 0.4, 3])
@pytest.mark.parametrize("name", ["zb1p", "zbv", "v_half", "v_min", "dual_pipe_v"])
def test_fuse_with_costs_delays_nothing(name, transfer):
    """Every action that is left starts and ends as before; some are fused."""
    table = actions(name, num_ranks=4, num_microbatches=12)
    costs = random_costs(stages(table), transfer)
    fused = fuse(table, costs)
    before, after = timeline(table, costs), timeline(fused, costs)
    starts = {
        action: start for own, times in zip(table, before.start, strict=True) for action, start in zip(own, times, strict=True)
    }
    for own, times in zip(fused, after.start, strict=True):
        for action, start in zip(own, times, strict=True):
            assert start == pytest.approx(starts[action._replace(kind="I") if action not in starts else action])
    assert sum(map(len, fused)) < sum(map(len, table))


def test_fuse_keeps_the_gradient_early():
    """Fusing all pairs of ZB-V triples its bubble; lower fuses only what nobody waits for."""
    table = actions("zbv", num_ranks=4, num_microbatches=12)
    costs = Costs.uniform(8)
    lowered = [[item for item in own if isinstance(item, Action)] for own in lower(table)]
    assert timeline(fuse(table), costs).bubble == 9
    assert timeline(table, costs).bubble == timeline(lowered, costs).bubble == 3


@pytest.mark.parametrize(
    "text, told",
    [
        (["0F0 0B0 0F1"], "0B1 is missing"),
        (["0F0 0F0"], "0F0 is on rank 0 and again on rank 0"),
        (["0F0 0I0"], "0W0 is missing"),
        (["0B0 0F0"], "0B0 of rank 0 has no 0F0 before it there"),
        (["0F0", "0B0"], "0B0 of rank 1 has no 0F0 before it there"),
        (["0F0 0W0 0I0"], "0W0 of rank 0 comes after no I of the same"),
        (["0F0 0B0 0W0"], "0W0 of rank 0 comes after a B or W of the same"),
        (["1F0 1B0"], "need 2 F, the table has 1"),
        (["0F0 0X0"], "kinds are F, B, I, W"),
        (["0F0 1F1"], "2 stages of 2 microbatches need 4 F, the table has 2"),
        (["1F0 0F0"], "wait for each other for ever"),
    ],
)
def test_refuses_other_tables(text, told):
    """A table that does not do everything once is told what is wrong."""
    with pytest.raises(ProgramError, match=told):
        lower([words(own) for own in text])


def test_refuses_a_stage_that_would_fill_memory():
    """A huge number is refused in proportion to the table."""
    with pytest.raises(ProgramError, match="the table has 1"):
        lower([[Action(10**12, "F", 10**12)]])


def test_refuses_options():
    """Unknown queues, a negative lead, too few costs."""
    table = actions("gpipe", num_ranks=2, num_microbatches=2)
    with pytest.raises(ConfigError, match="'direction'"):
        lower(table, queues="both")
    with pytest.raises(ConfigError, match="not -1"):
        lower(table, lead=-1)
    with pytest.raises(ConfigError, match="2 stages"):
        lower(table, Costs.uniform(1))
