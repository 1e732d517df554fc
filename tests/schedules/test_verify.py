"""The verifier, against programs of torch (right, and with receives deferred), and against damage to programs of ours."""

import random
from collections import Counter

import pytest
from torch.distributed.pipelining import schedules as torch_schedules

from mpar.errors import ProgramError
from mpar.schedules import Action, Transfer, actions, lower, verify

MODELS = ("direction", "pair", "single")
PEERS = {
    "LoopedBFS": torch_schedules.ScheduleLoopedBFS,
    "Interleaved1F1B": torch_schedules.ScheduleInterleaved1F1B,
    "InterleavedZeroBubble": torch_schedules.ScheduleInterleavedZeroBubble,
    "ZBVZeroBubble": torch_schedules.ScheduleZBVZeroBubble,
    "DualPipeV": torch_schedules.ScheduleDualPipeV,
}
RANKS = (1, 2, 3, 4, 6, 8)
MICROBATCHES = (*range(1, 17), 20, 24, 32)
KINDS = {"FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W"}
ENDS = {"SEND_F": ("send", "F"), "RECV_F": ("recv", "F"), "SEND_B": ("send", "B"), "RECV_B": ("recv", "B")}


class Stage:
    """What torch asks of a stage to make an order."""

    submod = group = device = None
    has_backward = True

    def __init__(self, index, rank, num_ranks, num_stages):
        self.stage_index, self.group_rank, self.group_size, self.num_stages = index, rank, num_ranks, num_stages
        self.is_first, self.is_last = index == 0, index == num_stages - 1


def torch_program(name, num_ranks, chunks, microbatches, *, defer):
    """Torch's instructions of all ranks; None for sizes that torch refuses.

    Its waits are not written down: a receive is waited for right before the action that takes it, sends at the end of the step.
    """
    num_stages = num_ranks * chunks
    own = (0, num_stages - 1) if name in ("ZBVZeroBubble", "DualPipeV") else range(0, num_stages, num_ranks)
    try:
        schedule = PEERS[name]([Stage(i, 0, num_ranks, num_stages) for i in own], microbatches, defer_pp_recv=defer)
    except ValueError:
        return None
    place, number, lowered = schedule.stage_index_to_group_rank, {}, []
    for rank in range(num_ranks):
        program, received, sends = [], {}, []
        for action in schedule.pipeline_order_with_comms[rank]:
            for part in action.sub_actions or (action,):
                stage, kind, microbatch = part.stage_index, part.computation_type.name, part.microbatch_index
                if kind in ENDS:
                    op, what = ENDS[kind]
                    far = stage + 1 if (what == "F") == (op == "send") else stage - 1
                    message = number.setdefault((stage if op == "send" else far, what, microbatch), len(number))
                    program.append(Transfer(op, message, place[far], stage, what, microbatch))
                    wait = program[-1]._replace(op="wait")
                    if op == "send":
                        sends.append(wait)
                    else:
                        received[stage, what, microbatch] = wait
                elif kind in KINDS:
                    wait = (
                        received.pop((stage, "F" if kind == "FORWARD" else "B", microbatch), None)
                        if kind[-6:] != "WEIGHT"
                        else None
                    )
                    program += [wait] if wait else []
                    program.append(Action(stage, KINDS[kind], microbatch))
        lowered.append(program + sends)
    return lowered


def torch_programs(name, *, defer):
    """Over the grid of sizes."""
    chunks = (2,) if name in ("ZBVZeroBubble", "DualPipeV") else (1, 2, 3, 4)
    for num_ranks in RANKS:
        for chunk in chunks:
            for microbatches in MICROBATCHES:
                program = torch_program(name, num_ranks, chunk, microbatches, defer=defer)
                if program is not None:
                    yield program


def refusal(lowered, queues):
    """None, "order" if messages are taken for each other, "cycle" if ranks wait for ever; any other error is raised."""
    try:
        verify(lowered, queues=queues)
    except ProgramError as error:
        if "in another order than they are sent in" in str(error):
            assert "queue " in str(error) and " meets rank " in str(error), "names the pair of ranks and both messages"
            return "order"
        if "wait for each other for ever" in str(error):
            return "cycle"
        raise
    return None


@pytest.mark.parametrize(
    "name, cases",
    [("LoopedBFS", 456), ("Interleaved1F1B", 368), ("InterleavedZeroBubble", 368), ("ZBVZeroBubble", 114), ("DualPipeV", 72)],
)
def test_accepts_torch(name, cases):
    """All that torch makes by default is right, under every model of queues: its two ends follow one order."""
    found = [[refusal(program, model) for model in MODELS] for program in torch_programs(name, defer=False)]
    assert found == [[None] * 3] * cases


@pytest.mark.parametrize(
    "name, direction, pair",
    [
        ("LoopedBFS", {None: 456}, {"cycle": 54, None: 402}),
        ("Interleaved1F1B", {None: 368}, {"cycle": 272, None: 96}),
        ("InterleavedZeroBubble", {"order": 33, None: 335}, {"order": 33, "cycle": 239, None: 96}),
        ("ZBVZeroBubble", {"order": 72, None: 42}, {"order": 72, "cycle": 18, None: 24}),
        ("DualPipeV", {"order": 38, None: 34}, {"order": 38, "cycle": 16, None: 18}),
    ],
)
def test_refuses_deferred_receives_of_torch(name, direction, pair):
    """`defer_pp_recv` moves receives on one side only: messages of other kinds are taken for each other, or ranks get stuck.

    The numbers are those of sizes for which a comparison of the send and receive order of each pair of ranks finds a difference,
    and for which a run with one queue a pair does not end.
    """
    programs = list(torch_programs(name, defer=True))
    assert Counter(refusal(program, "direction") for program in programs) == direction
    assert Counter(refusal(program, "pair") for program in programs) == pair


def test_names_the_pair_of_the_deferred_receives():
    """Where torch's ZB-V on two ranks takes an activation for a gradient."""
    with pytest.raises(
        ProgramError, match=r"queue 0 -> 1, transfer \d+: rank 0, line \d+ \(\dSEND_.*\) meets rank 1, line \d+ \(\dRECV"
    ):
        verify(torch_program("ZBVZeroBubble", 2, 2, 3, defer=True))


# --- damage


def small(name="zbv", num_ranks=3, microbatches=6):
    """A program to damage."""
    return [list(own) for own in lower(actions(name, num_ranks=num_ranks, num_microbatches=microbatches))]


@pytest.mark.parametrize("name", ["one_f_one_b", "zb1p", "zbv", "dual_pipe"])
def test_every_instruction_is_needed(name):
    """A program without any one of its instructions is refused."""
    size = (4, 8) if name == "dual_pipe" else (2, 4)
    whole = small(name, *size)
    verify(whole)
    for rank, own in enumerate(whole):
        for line in range(len(own)):
            damaged = [*whole[:rank], own[:line] + own[line + 1 :], *whole[rank + 1 :]]
            with pytest.raises(ProgramError):
                verify(damaged)


@pytest.mark.parametrize("seed", range(3))
def test_no_instruction_twice(seed):
    """A program with any one of its instructions a second time, anywhere on any rank, is refused."""
    rng = random.Random(seed)
    whole = small("zb1p", 2, 4)
    for own in whole:
        for item in own:
            damaged = [list(other) for other in whole]
            target = rng.choice(damaged)
            target.insert(rng.randint(0, len(target)), item)
            with pytest.raises(ProgramError):
                verify(damaged)


def execute(lowered):
    """Whether a run with values in it, one queue per direction and no buffering, ends with every result computed once.

    Independent of the verifier: tokens ("F", stage, microbatch) are moved between ranks and actions look for their operands.
    """
    at, have = [0] * len(lowered), [set() for _ in lowered]
    lanes, done, posted = {}, set(), {}
    table = [item for own in lowered for item in own if isinstance(item, Action)]
    top, computed = max(action.stage for action in table), Counter()
    progress = True
    while progress:
        progress = False
        for rank, own in enumerate(lowered):
            while at[rank] < len(own):
                item = own[at[rank]]
                if isinstance(item, Action):
                    stage, kind, m = item
                    needs = {
                        "F": [("F", stage - 1, m)] if stage else [],
                        "W": [("residual of I", stage, m)],
                    }.get(kind, [("residual", stage, m)] + ([("B", stage + 1, m)] if stage < top else []))
                    if not have[rank].issuperset(needs):
                        return False
                    have[rank] -= {need for need in needs if need[0].startswith("residual")}
                    made = {"F": ["F", "residual"], "B": ["B"], "I": ["B", "residual of I"], "W": []}[kind]
                    have[rank] |= {(what, stage, m) for what in made}
                    computed[item] += 1
                elif item.op == "wait":
                    if (rank, item.message) not in posted:
                        return False
                    if (rank, item.message) not in done:
                        break
                    token = posted.pop((rank, item.message))
                    have[rank] |= {token} if token else set()
                else:
                    lane = (rank, item.peer) if item.op == "send" else (item.peer, rank)
                    token = (item.kind, item.stage, item.microbatch)
                    if item.op == "send" and token not in have[rank]:
                        return False
                    lanes.setdefault(lane, ([], []))[item.op == "recv"].append((rank, item, token))
                    posted[rank, item.message] = None
                at[rank] += 1
                progress = True
        for sent, received in lanes.values():
            while sent and received:
                (source, out, token), (target, into, _) = sent.pop(0), received.pop(0)
                expected = (into.kind, into.stage + (-1 if into.kind == "F" else 1), into.microbatch)
                if out.message != into.message or token != expected:
                    return False
                posted[target, into.message] = token
                done |= {(source, out.message), (target, into.message)}
    ended = all(n == len(own) for n, own in zip(at, lowered, strict=True))
    return ended and not posted and set(computed.values()) == {1}


def test_moved_instructions():
    """After one or two instructions are moved on their ranks the verdict is that of a run with values; both occur often."""
    rng = random.Random(0)
    counts = Counter()
    for _ in range(600):
        name = rng.choice(("one_f_one_b", "zb1p", "zbv"))
        damaged = small(name, rng.randint(2, 3), 3 if name == "one_f_one_b" else 6)
        for _ in range(rng.randint(1, 2)):
            own = rng.choice(damaged)
            line = rng.randrange(len(own))
            item = own.pop(line)
            own.insert(max(0, line + rng.randint(-3, 3)), item)
        try:
            verify(damaged)
            accepted = True
        except ProgramError:
            accepted = False
        assert accepted == execute(damaged), [" ".join(map(str, own)) for own in damaged]
        counts[accepted] += 1
    assert min(counts[True], counts[False]) > 100, counts


@pytest.mark.parametrize(
    "change, told",
    [
        ({"peer": 2}, "names peer 2, the value goes from rank 0 to rank 1"),
        ({"peer": -1}, "names peer -1"),
        ({"microbatch": 99}, "is no message of 3 stages and 6 microbatches"),
        ({"stage": 99}, "is no message of 3 stages and 6 microbatches"),
        ({"kind": "G"}, "is neither send, recv nor wait"),
        ({"microbatch": 1}, "sends what is not computed yet"),
        ({"op": "post"}, "is neither send, recv nor wait"),
        ({"message": 10**9}, "nobody sends|not posted"),
    ],
    ids=str,
)
def test_fields_of_transfers(change, told):
    """A send of which one field is another is refused with its line."""
    damaged = small("one_f_one_b")
    assert str(damaged[0][1]) == "0SEND_F0"
    damaged[0][1] = damaged[0][1]._replace(**change)
    with pytest.raises(ProgramError, match=told):
        verify(damaged)


def test_nothing_is_sent_twice():
    """A value that goes a second time, as a message of its own with both ends and waits, is refused at both ends."""
    damaged = small("one_f_one_b", 2)
    send = Transfer("send", 1000, 1, 0, "F", 0)
    damaged[0] += [send, send._replace(op="wait")]
    recv = Transfer("recv", 1000, 0, 1, "F", 0)
    damaged[1] += [recv, recv._replace(op="wait")]
    with pytest.raises(ProgramError, match=r"(?s)0SEND_F0\) sends it a second time.*1RECV_F0\) receives it a second time"):
        verify(damaged)


def test_both_ends_carry_the_same_value():
    """Messages that the receiver takes for each other, waits included, are refused though their numbers match."""
    damaged = small("gpipe", 2)
    swapped = {0: 1, 1: 0}
    damaged[1] = [
        item._replace(microbatch=swapped.get(item.microbatch, item.microbatch))
        if isinstance(item, Transfer) and item.kind == "F"
        else item
        for item in damaged[1]
    ]
    line = damaged[1].index(Action(1, "F", 0))
    last = damaged[1].index(Action(1, "F", 1))
    damaged[1].insert(line, damaged[1].pop(last - 1))  # both are waited for before the first is used
    with pytest.raises(ProgramError, match=r"1RECV_F1\) is message 0, whose other end is another value"):
        verify(damaged)


def test_a_wait_says_what_it_waits_for():
    """A wait whose text is that of another message would mislead its reader."""
    damaged = small("one_f_one_b")
    line = next(i for i, item in enumerate(damaged[0]) if item[0] == "wait")
    damaged[0][line] = damaged[0][line]._replace(microbatch=5)
    with pytest.raises(ProgramError, match=r"0WAIT_F5\) waits for message 0, which is 0SEND_F0 here"):
        verify(damaged)


def test_nothing_to_do():
    """A pipeline without instructions is refused by nobody; one that only waits is."""
    verify([[], []])
    with pytest.raises(ProgramError):
        verify([[Transfer("wait", 0, 1, 0, "F", 0)], []])


def test_forward_only():
    """Tables without a backward verify: 4 microbatches cross 2 boundaries. One message less, and they do not."""
    lowered = lower(actions("forward_only", num_ranks=3, num_microbatches=4))
    verify(lowered)
    assert sum(item[0] == "send" for own in lowered for item in own) == 8
    with pytest.raises(ProgramError):
        verify([[item for item in own if not (item[0] == "send" and item.message == 0)] for own in lowered])
