"""Bubbles and peaks of memory equal their closed forms, exactly, over many sizes and costs."""

import pytest

from mpar.schedules import Action, Costs, Timeline, actions, timeline

COSTS = [(1, 1, 1), (2, 1, 1), (3, 2, 1), (2, 3, 4)]  # of F, I, W in a chunk: whole numbers, so that times are exact
RANKS, MICROBATCHES = range(1, 9), range(1, 33)
PAIRS = [(p, m) for p in RANKS for m in MICROBATCHES]


def run(name: str, p: int, v: int, m: int, costs: tuple[int, int, int] = (1, 1, 1), **options: object) -> Timeline:
    """Times of a schedule if every chunk costs the same and messages nothing; peaks count microbatches in flight."""
    table = actions(name, num_ranks=p, num_chunks=v, num_microbatches=m, **options)
    return timeline(table, Costs.uniform(p * v, *costs))


@pytest.mark.parametrize("costs", COSTS, ids=str)
def test_gpipe(costs):
    """Bubble (P - 1) (F + B), everything in flight; 256 pairs (P, M)."""
    for p, m in PAIRS:
        times = run("gpipe", p, 1, m, costs)
        assert (times.bubble, times.peak_bytes) == ((p - 1) * sum(costs), [m] * p), (p, m)


@pytest.mark.parametrize("costs", COSTS, ids=str)
def test_one_f_one_b(costs):
    """Bubble (P - 1) (F + B), min(P - r, M) in flight on rank r; 256 pairs."""
    for p, m in PAIRS:
        times = run("one_f_one_b", p, 1, m, costs)
        assert (times.bubble, times.peak_bytes) == ((p - 1) * sum(costs), [min(p - r, m) for r in range(p)]), (p, m)


@pytest.mark.parametrize("extra", [1, 2])
def test_extra_warmup_costs_memory_alone(extra):
    """The bubble of 1F1B; (1 + extra) (P - 1 - r) + 1 microbatches in flight."""
    for p, m in PAIRS:
        times = run("one_f_one_b", p, 1, m, extra_warmup=extra)
        assert times.bubble == 3 * (p - 1)
        assert times.peak_bytes == [min((1 + extra) * (p - 1 - r) + 1, m) for r in range(p)]


def test_extra_warmup_hides_messages():
    """If a message takes (F + B) / 2, one extra forward per boundary keeps all ranks busy: only fill and drain are left."""
    p, m = 4, 32
    costs = Costs.uniform(p, transfer=1.5)
    plain, eager = (
        timeline(actions("one_f_one_b", num_ranks=p, num_microbatches=m, extra_warmup=extra), costs).bubble for extra in (0, 1)
    )
    assert eager == (p - 1) * (3 + 2 * 1.5)
    assert plain > 4 * eager


@pytest.mark.parametrize("costs", COSTS, ids=str)
def test_interleaved(costs):
    """Bubble (P - 1) (F + B) of a chunk, min(V M, (V - 1) P + 2 (P - 1 - r) + 1) in flight; 340 cases, P divides M."""
    for p, v, m in divisible():
        times = run("interleaved", p, v, m, costs)
        assert times.bubble == (p - 1) * sum(costs), (p, v, m)
        assert times.peak_bytes == [min(v * m, (v - 1) * p + 2 * (p - 1 - r) + 1) for r in range(p)], (p, v, m)


def divisible() -> list[tuple[int, int, int]]:
    """All (P, V, M) where P divides M."""
    found = [(p, v, m) for p in RANKS for v in range(1, 5) for m in MICROBATCHES if m % p == 0]
    assert len(found) == 340
    return found


@pytest.mark.parametrize("order", ["ascending", "torch"])
def test_looped_bfs(order):
    """Bubble (P - 1) (F + B) of a chunk for M >= P, V M in flight; 912 cases of 1024."""
    checked = 0
    for p, m in PAIRS:
        for v in range(1, 5):
            times = run("looped_bfs", p, v, m, (1, 2, 1), order=order)
            assert times.peak_bytes == [v * m] * p
            if m >= p:
                assert times.bubble == 4 * (p - 1), (p, v, m)
                checked += 1
    assert checked == 912


@pytest.mark.parametrize("costs", [(1, 1, 1), (2, 1, 1), (3, 2, 1), (4, 5, 4)], ids=str)
def test_zb_h1(costs):
    """Bubble (P - 1) (F + I - W) for M >= P and W <= min(F, I); P in flight on every rank."""
    forward, input_, weight = costs
    for p, m in PAIRS:
        times = run("zb_h1", p, 1, m, costs)
        assert max(times.peak_bytes) == min(p, m)
        if m >= p:
            assert times.bubble == (p - 1) * (forward + input_ - weight), (p, m)
            assert times.peak_bytes == [p] * p


@pytest.mark.parametrize("costs", [(1, 1, 1), (2, 1, 1), (3, 2, 1)], ids=str)
def test_zb_h2(costs):
    """No rank idles longer than (P - 1) (F + I - 2 W) for M >= 2 P; 2 P - 1 in flight on every rank."""
    forward, input_, weight = costs
    for p, m in PAIRS:
        times = run("zb_h2", p, 1, m, costs)
        assert max(times.peak_bytes) == min(2 * p - 1, m)
        if m >= 2 * p:
            assert times.span_bubble == (p - 1) * (forward + input_ - 2 * weight), (p, m)
            assert times.peak_bytes == [2 * p - 1] * p


def test_zb1p():
    """Bubble P - 1 if F = I = W, at most V P in flight; 340 cases, P divides M."""
    for p, v, m in divisible():
        times = run("zb1p", p, v, m)
        assert times.bubble == p - 1, (p, v, m)
        assert max(times.peak_bytes) <= v * p, (p, v, m)


def test_zbv():
    """For M >= 2 P and F = I = W nobody idles in between, the makespan has the fill P - 1; 2 P chunks in flight on all ranks."""
    checked = 0
    for p, m in PAIRS:
        times = run("zbv", p, 2, m)
        assert max(times.peak_bytes) <= 2 * p
        if m >= 2 * p:
            assert (times.span_bubble, times.bubble, times.peak_bytes) == (0, p - 1, [2 * p] * p), (p, m)
            checked += 1
    assert checked == 192


def test_v_half():
    """F = I = W = 1, M >= P: a bubble of 3 P - 5 units if P is even, 3 P - 4 if odd: within 1F1B's 6 (P - 1) / 2.

    P + 2 chunks in flight if P is even, P + 1 if odd, where 1F1B has 2 P: on all ranks if M >= 2 P, never more. One pair apart:
    two microbatches on two ranks have a bubble of 2.
    """
    checked = 0
    for p, m in PAIRS:
        times = run("v_half", p, 2, m)
        chunks = p + 2 - p % 2
        assert max(times.peak_bytes) <= chunks
        if m >= p:
            assert times.bubble == (2 if p == m == 2 else max(0, 3 * p - 5 + p % 2)), (p, m)
            checked += 1
        if m >= 2 * p:
            assert times.peak_bytes == [chunks] * p, (p, m)
    assert checked == 228


def test_v_half_if_weights_take_half_as_long():
    """F = I = 2, W = 1, M >= P > 2: a bubble of 7 P - 9 units if P is even, 7 P - 8 if odd, where 1F1B has 10 (P - 1)."""
    for p, m in PAIRS:
        if m >= p > 2:
            assert run("v_half", p, 2, m, (2, 2, 1)).bubble == 7 * p - 9 + p % 2, (p, m)


def test_v_half_waits_for_no_message_in_its_main_phase():
    """If a message takes half as long as an action, more microbatches add no bubble."""
    for p in RANKS:
        costs = Costs.uniform(2 * p, transfer=0.5)
        bubbles = {
            timeline(actions("v_half", num_ranks=p, num_microbatches=m), costs).bubble for m in (2 * p + 1, 3 * p + 2, 6 * p)
        }
        assert len(bubbles) == 1, (p, bubbles)


def test_v_min():
    """For M >= 2 P and F = I = W: at most 2 ceil((P + 2) / 3) chunks in flight, where 1F1B has 2 P.

    The bubble is 4 P - 5 units, or 4 P - 3 if 3 divides P: 2 / 3 of 1F1B's 6 (P - 1), less or more one.
    """
    peaks = []
    for p, m in PAIRS:
        if m >= 2 * p:
            times = run("v_min", p, 2, m)
            assert times.bubble == max(0, 4 * p - 5 if p % 3 else 4 * p - 3), (p, m)
            assert max(times.peak_bytes) == 2 * ((p + 4) // 3), (p, m)
            peaks.append((p, max(times.peak_bytes)))
    assert sorted(set(peaks)) == [(1, 2), (2, 4), (3, 4), (4, 4), (5, 6), (6, 6), (7, 6), (8, 8)]


def test_v_min_pays_where_v_half_needs_more_memory():
    """V-Half has the smaller bubble on 2 to 8 ranks, and the higher peak, but not on 2, 3 and 5."""
    for p in range(2, 9):
        half, least = run("v_half", p, 2, 4 * p), run("v_min", p, 2, 4 * p)
        assert half.bubble < least.bubble
        assert (max(half.peak_bytes) <= max(least.peak_bytes)) == (p in (2, 3, 5)), p


@pytest.mark.parametrize("name, v", [("v_half", 2), ("v_min", 2), ("zbv", 2), ("interleaved", 2), ("one_f_one_b", 1)])
def test_peaks_do_not_grow_with_microbatches(name, v):
    """Twice the microbatches, the same memory."""
    for p in RANKS:
        assert run(name, p, v, 64).peak_bytes == run(name, p, v, 32).peak_bytes


def test_dual_pipe_v():
    """M >= 2 P, F = I = W, a pair's forward sent when it is done: bubble P - 1, 2 P + 1 in flight on all ranks; 192 cases."""
    checked = 0
    for p, m in PAIRS:
        if m >= 2 * p:
            times = run("dual_pipe_v", p, 2, m)
            assert (times.bubble, times.peak_bytes) == (p - 1, [2 * p + 1] * p), (p, m)
            checked += 1
    assert checked == 192


def test_dual_pipe():
    """As dual_pipe_v on half as many ranks: bubble P / 2 - 1, and P + 1 in flight on all ranks; 48 cases."""
    checked = 0
    for p, m in PAIRS:
        if p % 2 == m % 2 == 0 and m >= 2 * p:
            times = run("dual_pipe", p, 1, m)
            assert (times.bubble, times.peak_bytes) == (p // 2 - 1, [p + 1] * p), (p, m)
            checked += 1
    assert checked == 48


@pytest.mark.parametrize("name, v", [("dual_pipe_v", 2), ("dual_pipe", 1)])
def test_pairs_that_run_as_one(name, v):
    """If neither half of a pair gives its result away before both are done, the bubble is (depth - 1) (F&B + B - 3 W).

    Here 2 (depth - 1), as F = I = W = 1, F&B = 3; depth is P, or P / 2 with dual_pipe: the makers' published formula.
    """
    for p in (1, 2, 3, 4, 6, 8):
        depth = p if v == 2 else p // 2
        for m in (2 * p, 2 * p + 2, 4 * p):
            if v == 2 or p % 2 == 0:
                table = actions(name, num_ranks=p, num_chunks=v, num_microbatches=m)
                assert makespan_of_pairs(table, depth) - 3 * v * m == 2 * (depth - 1), (p, m)


def makespan_of_pairs(table: list[list[Action]], depth: int) -> int:
    """Time of the last end, by repeated sweeps over the ranks; units of the second to fourth steps of the order run as one.

    The innermost ranks' first F and B of the main step are no pair.
    """
    p, units = len(table), []
    for r, own in enumerate(table):
        after = depth - 1 - (r if depth == p else min(r, p - 1 - r))
        split = 2 * after + 2 * (depth - after) + 3 * after + (0 if after else 2)
        merged = [[action] for action in own[:split]]
        rest = own[split:]
        while rest:
            pair = len(rest) > 1 and rest[0].kind == "F" and rest[1].kind == "B"
            merged.append(rest[: 1 + pair])
            rest = rest[1 + pair :]
        units.append(merged)
    stages = 1 + max(action.stage for own in table for action in own)
    done: dict[Action, int] = {}
    now, at = [0] * p, [0] * p
    while any(at[r] < len(units[r]) for r in range(p)):
        before = list(at)
        for r in range(p):
            while at[r] < len(units[r]):
                unit = units[r][at[r]]
                needs = [need for action in unit for need in needs_of(action, stages)]
                ends = [max((done[option] for option in need if option in done), default=None) for need in needs]
                if None in ends:
                    break
                now[r] = max([now[r], *ends]) + sum({"F": 1, "B": 2, "I": 1, "W": 1}[action.kind] for action in unit)
                done.update(dict.fromkeys(unit, now[r]))
                at[r] += 1
        assert before != at, "the pairs wait for each other"
    return max(now)


def needs_of(action: Action, stages: int) -> list[tuple[Action, ...]]:
    """What must be over before; of a tuple one."""
    stage, kind, m = action
    if kind == "F":
        return [(Action(stage - 1, "F", m),)] if stage else []
    if kind == "W":
        return [(Action(stage, "I", m),)]
    later = [(Action(stage + 1, "I", m), Action(stage + 1, "B", m))] if stage + 1 < stages else []
    return [(Action(stage, "F", m),), *later]


def test_forward_only():
    """Bubble (P - 1) F for M >= P in the loop, for any V; 2 (P - 1) F on a V, for any M."""
    for p, m in PAIRS:
        assert run("forward_only", p, 2, m, placement="v").bubble == 2 * (p - 1), (p, m)
        for v in range(1, 5):
            assert m < p or run("forward_only", p, v, m).bubble == p - 1, (p, v, m)


def test_the_least_of_all_makespans_is_never_undercut():
    """M >= 2 P, F = I = W: the schedules in the order of their published bubbles, of equal models."""
    for p in range(2, 9):
        m = 4 * p
        names = [("zbv", 2), ("zb1p", 2), ("v_half", 2), ("interleaved", 2), ("v_min", 2)]
        bubbles = [run(name, p, v, m).bubble for name, v in names]
        plain = 2 * run("one_f_one_b", p, 1, m).bubble
        assert bubbles == sorted(bubbles)
        assert max(bubbles) < plain
