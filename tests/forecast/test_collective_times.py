"""The cost model of collectives: what a ring sends, over which link, what hides it; and that `auto` goes by it."""

from dataclasses import replace

import pytest
import torch

from mpar import Mesh
from mpar.arrange import CONTEXT_PARALLEL
from mpar.forecast import message_durations
from mpar.hardware import Hardware
from mpar.ir import CollectiveUse, Kind, OpUse, Stretch, exposed_time, segment_time
from mpar.optim import AdamW
from mpar.program.compile import compile_step
from mpar.strategy import preset

NEAR, FAR = 1000.0, 10.0  # bytes per second
HARDWARE = Hardware(
    name="made up",
    flops_per_s={"float32": 50.0, "bfloat16": 400.0},
    memory_bytes_per_s=20.0,
    memory_bytes=1,
    link_bytes_per_s=NEAR,
    link_latency_s=3.0,
    cross_bytes_per_s=FAR,
    cross_latency_s=7.0,
    ranks_per_node=4,
)


def segment(*uses: CollectiveUse, ops: tuple[OpUse, ...] = (), meanwhile: tuple[OpUse, ...] = ()) -> Kind:
    """A segment that does nothing but this: `ops`, then one collective after the other, during the last of them `meanwhile`."""
    *blocking, last = range(len(uses)) or [None]
    stretches = [Stretch(ops=ops)]
    for number in blocking:
        stretches += [Stretch(posts=(number,)), Stretch(awaits=(number,))]
    if last is not None:
        stretches += [Stretch(posts=(last,)), Stretch(ops=meanwhile), Stretch(awaits=(last,))]
    return Kind("segment", "", {}, uses, tuple(stretches), 0, None, 0, (), (), ())


def use(op: str, axes: tuple[str, ...], mesh: Mesh, nbytes: int) -> CollectiveUse:
    return CollectiveUse(op, axes, mesh.axis_size(axes), nbytes, 1, "")


def bytes_of_a_ring(op: str, n: int, contributed: float) -> float:
    """What one rank of n sends to its neighbour, round by round, for the bytes that it brings."""
    piece = contributed / n
    return {
        "shift": contributed,
        "all_gather": sum(contributed for _ in range(n - 1)),  # its own shard, then each that it has just received
        "reduce_scatter": sum(piece for _ in range(n - 1)),  # partial sums of one piece after the other
        "all_reduce": sum(piece for _ in range(n - 1)) * 2,  # a reduce_scatter, then an all_gather of the pieces
        "all_to_all": sum(piece for _ in range(n - 1)),  # a piece for each of the others
    }[op]


@pytest.mark.parametrize("n", [2, 3, 4, 8])
@pytest.mark.parametrize("op", ["shift", "all_gather", "reduce_scatter", "all_reduce", "all_to_all"])
def test_a_collective_takes_what_its_ring_sends(op, n):
    """One latency and the bytes of one rank's link, near and far."""
    mesh = Mesh(tp=n)
    kind = segment(use(op, ("tp",), mesh, 2400))
    near, far = replace(HARDWARE, ranks_per_node=8), replace(HARDWARE, ranks_per_node=1)
    sent = bytes_of_a_ring(op, n, 2400)
    assert segment_time(kind, mesh, near) == pytest.approx(3.0 + sent / NEAR, rel=1e-12)
    assert segment_time(kind, mesh, far) == pytest.approx(7.0 + sent / FAR, rel=1e-12)


@pytest.mark.parametrize(
    ("axes", "ranks_per_node", "crosses"),
    [
        (("tp",), 4, False),  # ranks 0 to 3
        (("tp",), 3, True),
        (("dp",), 4, True),  # ranks 0 and 4
        (("dp",), 5, False),
        (("dp", "tp"), 7, True),  # ranks 0 to 7
        (("dp", "tp"), 8, False),
    ],
)
def test_a_group_that_leaves_its_node_takes_the_slow_link(axes, ranks_per_node, crosses):
    """The last rank of a group decides: whether it is on the node of the first."""
    mesh = Mesh(dp=2, tp=4)
    found = segment_time(segment(use("shift", axes, mesh, 50)), mesh, replace(HARDWARE, ranks_per_node=ranks_per_node))
    assert found == pytest.approx(7.0 + 50 / FAR if crosses else 3.0 + 50 / NEAR, rel=1e-12)


@pytest.mark.parametrize("op", ["all_gather", "reduce_scatter", "all_reduce"])
@pytest.mark.parametrize(("ranks_per_node", "rate"), [(1, FAR), (2, 2 * FAR), (4, 4 * FAR), (8, NEAR)])
def test_rings_leave_a_node_by_all_its_links(op, ranks_per_node, rate):
    """Eight ranks, as many on a node as it has: a node's links to others work together, up to the rate within a node."""
    mesh = Mesh(tp=8)
    kind, latency = segment(use(op, ("tp",), mesh, 2400)), 3.0 if ranks_per_node == 8 else 7.0
    found = segment_time(kind, mesh, replace(HARDWARE, ranks_per_node=ranks_per_node))
    assert found == pytest.approx(latency + bytes_of_a_ring(op, 8, 2400) / rate, rel=1e-12)
    fast = replace(HARDWARE, ranks_per_node=4, cross_bytes_per_s=NEAR / 2, cross_latency_s=3.0)
    assert segment_time(kind, mesh, fast) == pytest.approx(3.0 + bytes_of_a_ring(op, 8, 2400) / NEAR, rel=1e-12)


@pytest.mark.parametrize("op", ["all_to_all", "exchange_rows"])
def test_an_exchange_leaves_a_node_by_the_link_of_each_rank(op):
    """Eight ranks on two nodes: half of the bytes leave the node, each by the link of its rank; three eighths stay."""
    mesh = Mesh(tp=8)
    kind = segment(use(op, ("tp",), mesh, 800))
    assert segment_time(kind, mesh, HARDWARE) == pytest.approx(7.0 + 400 / FAR, rel=1e-12)
    narrow = replace(HARDWARE, link_bytes_per_s=1.0)
    assert segment_time(kind, mesh, narrow) == pytest.approx(7.0 + 300 / 1.0, rel=1e-12)


def test_every_rank_that_a_ring_passes_adds_a_hop():
    """Of a gather and a reduce_scatter; a short all_reduce takes a tree, and an exchange no ring."""
    mesh, hops = Mesh(tp=8), replace(HARDWARE, ranks_per_node=8, hop_s=0.25)
    for op in ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "shift"):
        kind = segment(use(op, ("tp",), mesh, 2400))
        added = segment_time(kind, mesh, hops) - segment_time(kind, mesh, replace(hops, hop_s=0.0))
        assert added == pytest.approx(7 * 0.25 if op in ("all_gather", "reduce_scatter") else 0.0)


def test_exponentials_are_added_to_the_arithmetic():
    """Not to the memory traffic, which runs beside both; on hardware that counts them."""
    op = OpUse(500, 0, "float32", transcendentals=30)
    assert segment_time(segment(ops=(op,)), Mesh(tp=1), HARDWARE) == pytest.approx(10.0)
    counting = replace(HARDWARE, transcendentals_per_s=6.0)
    assert segment_time(segment(ops=(op,)), Mesh(tp=1), counting) == pytest.approx(15.0)
    assert segment_time(segment(ops=(replace(op, bytes=300),)), Mesh(tp=1), counting) == pytest.approx(15.0)


def test_a_fixed_time_is_of_one_primitive():
    """It replaces that of all others, and no factor multiplies it."""
    ops = (OpUse(500, 0, "float32", "rope", calls=2), OpUse(500, 0, "float32", "einsum"))
    slower = replace(HARDWARE, launch_s=1.0, op_launch_s={"rope": 4.0}, op_factors={"rope": 3.0})
    assert segment_time(segment(ops=ops), Mesh(tp=1), slower) == pytest.approx(2 * (30.0 + 4.0) + 10.0 + 1.0)


def test_a_factor_is_of_one_primitive():
    ops = (OpUse(500, 0, "float32", "rope"), OpUse(500, 0, "float32", "einsum"))
    slower = replace(HARDWARE, op_factors={"rope": 3.0})
    assert segment_time(segment(ops=ops), Mesh(tp=1), slower) == pytest.approx(30.0 + 10.0)


@pytest.mark.parametrize(
    ("flops", "nbytes", "dtype", "expected"),
    [
        (500, 100, "float32", 10.0),  # arithmetic at 50 per second takes longer
        (500, 300, "float32", 15.0),  # memory at 20 bytes per second does
        (4000, 0, "bfloat16", 10.0),
        (4000, 0, "float64", 10.0),  # a rate that the profile has not: its best
    ],
)
def test_an_op_takes_its_longer_half_and_its_launch(flops, nbytes, dtype, expected):
    """Arithmetic and memory traffic of one op overlap; the launch of each call and the segment's collectives come on top."""
    mesh = Mesh(tp=4)
    uses = [use("shift", ("tp",), mesh, size) for size in (1000, 2000)]
    kind = segment(*uses, ops=(OpUse(flops, nbytes, dtype, calls=3),))
    found = segment_time(kind, mesh, replace(HARDWARE, launch_s=0.5))
    assert found == pytest.approx(3 * (expected + 0.5) + (3.0 + 1.0) + (3.0 + 2.0), rel=1e-12)


def test_memory_traffic_of_one_op_hides_under_no_other():
    """A product and a norm of one segment run one after the other."""
    ops = (OpUse(500, 0, "float32"), OpUse(0, 300, "float32"))
    assert segment_time(segment(ops=ops), Mesh(tp=4), HARDWARE) == pytest.approx(10.0 + 15.0, rel=1e-12)


@pytest.mark.parametrize(
    ("flops", "nbytes", "exposed"),
    [(0, 0, 5.0), (100, 0, 3.0), (0, 80, 1.0), (100, 80, 1.0), (200, 80, 1.0), (200, 20, 1.0), (500, 0, 0.0), (0, 500, 0.0)],
)
def test_what_is_computed_meanwhile_hides_a_collective(flops, nbytes, exposed):
    """A shift of 5 seconds, of which those are hidden that the arithmetic or the memory traffic takes, the longer; never more."""
    mesh = Mesh(tp=4)
    meanwhile = OpUse(flops, nbytes, "float32")
    kind = segment(use("shift", ("tp",), mesh, 2000), meanwhile=(meanwhile,))
    assert exposed_time(kind, mesh, HARDWARE) == pytest.approx(exposed, rel=1e-12)
    alone = segment_time(segment(ops=(meanwhile,)), mesh, HARDWARE)
    assert segment_time(kind, mesh, HARDWARE) == pytest.approx(alone + exposed, rel=1e-12)


def test_messages_of_a_segment_travel_one_after_the_other():
    """Two shifts of 5 seconds that are posted at once: the second arrives after 10, of which 4 are computed."""
    mesh, op = Mesh(tp=4), OpUse(200, 0, "float32")
    uses = (use("shift", ("tp",), mesh, 2000), use("shift", ("tp",), mesh, 2000))
    stretches = (Stretch(posts=(0, 1)), Stretch(ops=(op,)), Stretch(awaits=(1,)))
    kind = Kind("segment", "", {}, uses, stretches, 0, None, 0, (), (), ())
    assert segment_time(kind, mesh, HARDWARE) == pytest.approx(10.0)
    assert exposed_time(kind, mesh, HARDWARE) == pytest.approx(6.0)


def test_computation_is_slower_beside_a_message_of_its_segment():
    """A shift of 5 seconds with a contention of one half: 8 seconds of arithmetic take 5 for the first 3 and a third, then 4 and
    two thirds; if all of it fits beside the message, one half more."""
    mesh, slow = Mesh(tp=4), replace(HARDWARE, contention=0.5)
    shift = use("shift", ("tp",), mesh, 2000)
    long, short = (segment(shift, meanwhile=(OpUse(flops, 0, "float32"),)) for flops in (400, 100))
    assert segment_time(long, mesh, slow) == pytest.approx(5.0 + 8.0 - 5.0 / 1.5)
    assert segment_time(short, mesh, slow) == pytest.approx(5.0)


@pytest.mark.parametrize(
    ("stages", "ranks_per_node", "far"),
    [(4, 8, set()), (4, 4, {(1, 2)}), (4, 2, {(0, 1), (1, 2), (2, 3)}), (2, 2, {(0, 1)}), (2, 4, set())],
    ids=str,
)
def test_messages_between_stages_take_the_link_between_them(stages, ranks_per_node, far, make_model):
    """Stages of two ranks each: on one node, on two, on one each."""
    mesh = Mesh(pp=stages, tp=2)
    model = make_model(torch.float32, num_hidden_layers=4)
    program = compile_step(model, AdamW(1e-3), mesh, "tp", (4, 8), num_microbatches=4, schedule="one_f_one_b")
    found = message_durations(program, replace(HARDWARE, ranks_per_node=ranks_per_node))
    expected = {}
    for position, part in enumerate(program.parts):
        for step in part.instructions:
            if step.op == "send":
                nbytes = program.values[step.inputs[0]].bytes
                crosses = tuple(sorted((position, step.peer))) in far
                expected[step.message] = 7.0 + nbytes / FAR if crosses else 3.0 + nbytes / NEAR
    assert len(expected) == 2 * (stages - 1) * 4
    assert found == pytest.approx(expected, rel=1e-12)


def test_communication_of_a_step_is_the_sum_of_its_collectives(make_model):
    """Of each microbatch and each use, at what its ring sends; arithmetic and launches are apart."""
    mesh = Mesh(fsdp=2, tp=4)
    program = compile_step(make_model(torch.float32), AdamW(1e-3), mesh, "zero3_tp_sp", (8, 8), num_microbatches=2)
    expected = 0.0
    for step in program.parts[0].instructions:
        for collective in program.kinds[step.kind].collectives:
            sent = bytes_of_a_ring(collective.op, mesh.axis_size(collective.axes), collective.bytes)
            links = 4 if "tp" in collective.axes else 1  # of a node of four ranks
            expected += 7.0 + sent / (links * FAR) if "fsdp" in collective.axes else 3.0 + sent / NEAR
    assert program.predict(HARDWARE).communication_s == pytest.approx(expected, rel=1e-9)


QUICK = {"flops_per_s": {"float32": 1e15}, "memory_bytes_per_s": 1e15}
PROFILES = {
    # few messages, however long
    "all_gather": replace(HARDWARE, **QUICK, link_bytes_per_s=1e12, link_latency_s=1.0, ranks_per_node=8),
    # few bytes, in however many messages
    "all_to_all": replace(HARDWARE, **QUICK, link_bytes_per_s=1e3, link_latency_s=0.0, ranks_per_node=8),
    # messages that hide behind attention where they leave a node of two ranks, and no latency
    "all_to_all+ring": replace(
        HARDWARE,
        flops_per_s={"float32": 100.0},
        memory_bytes_per_s=1e15,
        link_bytes_per_s=1e9,
        link_latency_s=0.0,
        cross_bytes_per_s=1.0,
        cross_latency_s=0.0,
        ranks_per_node=2,
    ),
}


@pytest.mark.parametrize("best", PROFILES)
def test_auto_divides_attention_in_the_least_predicted_time(best, make_model):
    """Of the ways to divide a sequence, the one whose whole step is predicted to be the shortest on these links."""
    hardware, model, mesh = PROFILES[best], make_model(torch.float32), Mesh(cp=4)

    def compiled(method: str):
        strategy = replace(preset("ddp"), context_parallel=method)
        return compile_step(model, AdamW(1e-3), mesh, strategy, (2, 64), hardware=hardware)

    times = {method: compiled(method).predict(hardware).step_s for method in CONTEXT_PARALLEL}
    assert min(times, key=times.__getitem__) == best
    assert compiled("auto").facts.context_parallel == best
