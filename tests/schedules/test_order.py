"""The proof that ranks come to an end, against programs made by hand and a naive interpreter."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpar.errors import ConfigError, ProgramError
from mpar.schedules import Event, check_order

MODELS = ("direction", "pair", "single", "tag")


def program(*ranks):
    """Ranks written as text: `s0>1` sends message 0 to rank 1, `r0<1` receives it, `w0` waits, `ma@012` meets with key a."""
    found = []
    for text in ranks:
        own = []
        for line, word in enumerate(text.split()):
            key = word[1:].split("<")[0].split(">")[0].split("@")[0]
            peers = tuple(int(c) for c in word.replace("<", ">").replace("@", ">").partition(">")[2])
            own.append(Event({"s": "send", "r": "recv", "w": "wait", "m": "meet"}[word[0]], key, peers, line))
        found.append(own)
    return found


def cycle(error):
    """The lines of the message that tell the cycle."""
    return [line.strip() for line in str(error.value).splitlines()[1:]]


def verdict(events, model):
    """Whether check_order accepts."""
    try:
        check_order(events, queues=model)
    except ProgramError:
        return False
    return True


@pytest.mark.parametrize("model", MODELS)
def test_accepts_an_exchange_posted_before_it_is_waited_for(model):
    """Two ranks that post in one global order and wait later come to an end."""
    check_order(program("s0>1 r1<1 w0 w1", "r0<0 s1>0 w0 w1"), queues=model)


@pytest.mark.parametrize(
    "ranks, accepted",
    [
        (("s0>1 r1<1 w0 w1", "s1>0 r0<0 w0 w1"), {"direction", "tag"}),  # both send first
        (("s0>1 s1>1 w0 w1", "r1<0 r0<0 w0 w1"), {"tag"}),  # taken for each other
        (("s0>1 r2<2 w0 w2", "s1>2 r0<0 w0 w1", "s2>0 r1<1 w1 w2"), {"direction", "pair", "tag"}),  # a ring that sends first
        (("s0>1 w0 r1<1 w1", "s1>0 w1 r0<0 w0"), set()),  # waits before the other can receive
    ],
    ids=["both-send", "swapped", "ring", "waits"],
)
def test_queues_decide(ranks, accepted):
    """Each model of queues accepts exactly the programs that its queues can transfer."""
    assert {model for model in MODELS if verdict(program(*ranks), model)} == accepted


def test_mismatch_names_queue_and_messages():
    """Messages received in another order than sent: the pair of ranks, the place in the queue, both messages with lines."""
    with pytest.raises(
        ProgramError, match=r"queue 0 -> 1, transfer 0: rank 0, line 0 \(send a\) meets rank 1, line 0 \(recv b\)"
    ):
        check_order(program("sa>1 sb>1 wa wb", "rb<0 ra<0 wa wb"))


def test_shortest_cycle_of_waits():
    """Of two cycles, of three ranks and of two, the error gives the one of two, with the texts of the caller."""
    events = program(
        "ra<2 wa sb>1 wb",  # 0 waits for 2, 2 for 1, 1 for 0
        "rb<0 wb sc>2 wc",
        "rc<1 wc sa>0 wa",
        "rd<4 wd se>4 we",  # 3 waits for 4, 4 for 3
        "re<3 we sd>3 wd",
    )
    with pytest.raises(ProgramError, match="5 of 5 ranks are stuck") as error:
        check_order(events, describe=lambda rank, line: f"text {rank}.{line}")
    assert cycle(error) == [
        "rank 3, line 1 (text 3.1) waits for rank 4, line 2 (text 4.2)",
        "rank 4, line 1 (text 4.1) waits for rank 3, line 2 (text 3.2)",
    ]


def test_cycle_through_heads_of_queues():
    """Where a queue holds a message up, the error names what is before it in the queue."""
    with pytest.raises(ProgramError) as error:
        check_order(program("s0>1 r1<1 w0 w1", "s1>0 r0<0 w0 w1"), queues="pair")
    assert cycle(error) == [
        "rank 0, line 0 (send 0) waits for rank 1, line 0 (send 1), which is before it in a queue of rank 1",
        "rank 1, line 0 (send 1) waits for rank 0, line 0 (send 0), which is before it in a queue of rank 0",
    ]


def test_cycle_through_a_meeting():
    """A rank that meets too early waits for one that waits for its send."""
    with pytest.raises(ProgramError) as error:
        check_order(program("mx@01 s0>1 w0", "r0<0 w0 mx@01"))
    assert cycle(error) == [
        "rank 0, line 0 (meet x) waits for rank 1, line 2 (meet x)",
        "rank 1, line 1 (wait 0) waits for rank 0, line 1 (send 0)",
    ]


def test_cycle_leaves_out_those_that_only_wait_for_it():
    """A rank that is stuck behind a cycle is no part of it."""
    with pytest.raises(ProgramError, match="3 of 3 ranks are stuck") as error:
        check_order(program("r2<1 w2", "s0>2 w0 r1<2 w1 s2>0 w2", "s1>1 w1 r0<1 w0"))
    assert [line[:6] for line in cycle(error)] == ["rank 1", "rank 2"]


@pytest.mark.parametrize(
    "ranks, words",
    [
        (("s0>1 w0", ""), "nobody receives message 0"),
        (("r0<1 w0", ""), "nobody sends message 0"),
        (("s0>1 w0 s0>1 w0", "r0<0 w0"), "message 0 has a second send: rank 0, line 2, after rank 0, line 0"),
        (("s0>1 w0", "r0<2 w0", ""), "names rank 2, but the other end is rank 0, line 0"),
        (("s0>0 w0", ""), "needs one other of 2 ranks"),
        (("s0>7 w0", ""), "needs one other of 2 ranks"),
        (("w0 s0>1", "r0<0 w0"), r"rank 0, line 0 \(wait 0\) waits for message 0 that it has not posted before"),
        (("s0>1 w0 w0", "r0<0 w0"), "waits for message 0 a second time"),
        (("s0>1", "r0<0 w0"), r"rank 0, line 0 \(send 0\) is never waited for"),
        (("s0>1 w0", "r0<0"), r"rank 1, line 0 \(recv 0\) is never waited for"),
        (("ma@01", "mb@01"), "with key 'a', rank 1, line 0 .* with key 'b'"),
        (("ma@01 ma@01", "ma@01"), r"rank 0 2 times, rank 1 1 times"),
        (("ma@12", "ma@12", "ma@12"), "but is no member"),
        (("ma@09", ""), "needs different ranks"),
    ],
)
def test_refuses(ranks, words):
    """Errors that need no run are told with rank and line."""
    with pytest.raises(ProgramError, match=words):
        check_order(program(*ranks))


def test_tells_all_offenders():
    """One error lists every message without an end."""
    with pytest.raises(ProgramError, match=r"(?s)message 0.*message 1"):
        check_order(program("s0>1 s1>1 w0 w1", ""))


def test_unknown_queues():
    """The kinds of queues are listed."""
    with pytest.raises(ConfigError, match="'direction', 'pair', 'single', 'tag'"):
        check_order([], queues="pairs")


def test_meetings_of_other_members_do_not_mix():
    """Meetings are ordered per set of members, however the set is written."""
    check_order(program("mx@01 my@02", "mx@10 mz@12", "my@20 mz@12"))


# --- a naive interpreter, and random programs


def lane(model, rank, peer, sends):
    """The queue of a rank that an end of a message is posted to; ends of one lane go in order."""
    return {"direction": (rank, peer, sends), "pair": (rank, peer), "single": (rank,)}[model]


def interpret(events, model, rng):
    """Run in a random order of steps, without any buffering. True if all comes to an end and every message arrives as meant."""
    at, queues, done = [0] * len(events), {}, [set() for _ in events]
    posted = [set() for _ in events]

    def transfer():
        ends = [(rank, end) for (rank, *_), queue in queues.items() for end in (queue if model == "tag" else queue[:1])]
        for rank, (op, key, peer) in ends:
            for rank2, (op2, key2, peer2) in ends:
                if (op, op2) == ("send", "recv") and (rank, peer) == (peer2, rank2) and (model != "tag" or key == key2):
                    if key != key2:
                        raise ValueError("taken for another")
                    for queue in queues.values():
                        queue[:] = [end for end in queue if end not in ((op, key, peer), (op2, key2, peer2))]
                    done[rank].add(key)
                    done[rank2].add(key)
                    return True
        return False

    def step(rank):
        if at[rank] == len(events[rank]):
            return False
        op, key, peers, _ = events[rank][at[rank]]
        if op in ("send", "recv"):
            queue = (rank,) if model == "tag" else lane(model, rank, peers[0], op == "send")
            queues.setdefault(queue, []).append((op, key, peers[0]))
            posted[rank].add(key)
        elif op == "wait":
            if key not in posted[rank]:
                raise ValueError("waits for nothing")
            if key not in done[rank]:
                return False
            posted[rank].remove(key)
        else:
            now = [events[peer][at[peer]] if at[peer] < len(events[peer]) else None for peer in peers]
            if any(event is None or event.op != "meet" or set(event.peers) != set(peers) for event in now):
                return False
            if len({event.key for event in now}) > 1:
                raise ValueError("another meeting")
            for peer in peers:
                at[peer] += 1
            return True
        at[rank] += 1
        return True

    try:
        while True:
            order = [*range(len(events)), -1]
            rng.shuffle(order)
            if not any(transfer() if rank < 0 else step(rank) for rank in order):
                break
    except ValueError:
        return False
    return all(n == len(own) for n, own in zip(at, events, strict=True)) and not any(posted)


@st.composite
def programs(draw):
    """A program that posts in one global order, then a few events moved, dropped or doubled."""
    count = draw(st.integers(2, 4))
    ranks = [[] for _ in range(count)]
    pending = [[] for _ in range(count)]
    for key in range(draw(st.integers(1, 6))):
        here, there = draw(st.permutations(range(count)))[:2]
        if draw(st.integers(0, 5)) == 0:
            for rank in (here, there):
                ranks[rank].append(("meet", f"m{key}", (here, there)))
            continue
        ranks[here].append(("send", key, (there,)))
        ranks[there].append(("recv", key, (here,)))
        for rank in (here, there):
            pending[rank].append(key)
            while pending[rank] and draw(st.booleans()):
                waited = pending[rank].pop(draw(st.integers(0, len(pending[rank]) - 1)))
                ranks[rank].append(("wait", waited, ()))
    for rank, keys in enumerate(pending):
        ranks[rank] += [("wait", key, ()) for key in keys]
    for _ in range(draw(st.integers(0, 3))):
        own = ranks[draw(st.integers(0, count - 1))]
        if not own:
            continue
        what, place = draw(st.integers(0, 12)), draw(st.integers(0, len(own) - 1))
        event = own[place] if what == 1 else own.pop(place)
        if what:
            own.insert(draw(st.integers(0, len(own))), event)
    return [[Event(*event, line) for line, event in enumerate(own)] for own in ranks]


def test_agrees_with_a_naive_interpreter():
    """The verdict on random programs is that of a run of single steps, under every model of queues."""
    counts = {(model, accepted): 0 for model in MODELS for accepted in (True, False)}

    @settings(max_examples=1000, deadline=None)
    @given(programs(), st.sampled_from(MODELS), st.integers(0, 2**32))
    def check(events, model, seed):
        accepted = verdict(events, model)
        counts[model, accepted] += 1
        ends = [(event.op, event.key) for own in events for event in own if event.op in ("send", "recv")]
        whole = len(set(ends)) == len(ends)  # the interpreter would take a doubled end for another message
        assert accepted == (whole and interpret(events, model, random.Random(seed)))

    check()
    assert min(counts.values()) > 30, counts
