"""Join work: joined code computes what its parts do, a joined instruction is proved like its members, and which are joined."""

import contextlib
import itertools
import re
from dataclasses import replace

import pytest
import torch

from mpar import Mesh
from mpar.compiler import Schedule
from mpar.compiler.build._pipeline import _forwards_beside_backwards
from mpar.compiler.segment import RecomputePolicy, Target, compile_function, join_codes
from mpar.errors import ConfigError, ProgramError
from mpar.forecast import predicted_times
from mpar.kernels import Kernels
from mpar.optim import AdamW
from mpar.program.compile import compile_step
from mpar.runtime import load
from mpar.schedules import Action, actions, lower, verify
from mpar.spec import P
from tests.compiler import box

OPTIMIZER = AdamW(lr=1e-3)
BOX = replace(box.BOX, link_bytes_per_s=1e8, link_latency_s=1e-7, cross_latency_s=1e-7)
SLOW = replace(BOX, link_bytes_per_s=4e7)
FAST = replace(BOX, link_bytes_per_s=4e8)  # so that reductions need not begin before layers that are joined end
TARGET = Target(Mesh(), {}, RecomputePolicy(), Kernels(), BOX)
TABLE = torch.arange(4.0)


def code(fn, *shapes):
    args = tuple(torch.empty(shape, device="meta") for shape in shapes)
    return compile_function(fn.__name__, fn, args, TARGET, [P()] * len(shapes))


def run(made, *args):
    return load(made.kind.name, made.kind.source, made.kind.constants, torch.device("cpu"))(list(args), None)


def scaled(x, w):
    return x @ w + TABLE, x.sum(0)


def shifted(x, y):
    return (x * y + torch.arange(4.0).neg(),)


@pytest.mark.parametrize("second", [scaled, shifted])
def test_joined_code_computes_what_its_parts_do(second):
    """With operands of their own, with one that both read, and with results of the first as operands of the second."""
    first = code(scaled, (4, 4), (4, 4))
    other = code(second, (4, 4), (4, 4))
    x, w, y, z = (torch.randn(4, 4) for _ in range(4))
    for operands, args, seconds in [
        ((0, 1, 2, 3), (x, w, y, z), (y, z)),
        ((0, 1, 0, 1), (x, w), (x, w)),
        ((1, 0, 2, 0), (w, x, y), (y, w)),
        ((0, 1, -1, 1), (x, w), (run(first, x, w)[0], w)),
    ]:
        firsts = (x, w)
        joined = join_codes(first, other, operands, TARGET)
        expected = (*run(first, *firsts), *run(other, *seconds))
        assert all(map(torch.equal, run(joined, *args), expected))
        assert len(joined.kind.operands) == len(args) and len(joined.in_specs) == len(args)
    assert joined.kind.name == ("2 x scaled" if second is scaled else "scaled + shifted")
    storages = joined.kind.memory.outputs
    assert len(set(storages)) == len(storages)  # no result of one lies in memory of the other


def pair_program(make_model, mesh, strategy, schedule="one_f_one_b", hardware=BOX, **options):
    options = {"num_microbatches": 4, "bucket_bytes": 0} | options
    schedule = Schedule(schedule, paired=True)
    return compile_step(
        make_model(num_hidden_layers=4), OPTIMIZER, mesh, strategy, (8, 8), schedule=schedule, hardware=hardware, **options
    )


MESHES = [(Mesh(tp=2), "tp_sp"), (Mesh(fsdp=2, tp=2), "zero3_tp_sp"), (Mesh(pp=2, tp=2), "zero1_tp_sp"), (Mesh(tp=2), "tp")]


@pytest.mark.parametrize(("mesh", "strategy"), MESHES, ids=str)
def test_pairs_have_the_bits_of_single_microbatches(mesh, strategy, make_model, make_state, batch):
    """Two at a time, on hardware that hides messages and on hardware that does not: the same state, bit for bit."""
    options = {"num_microbatches": 4, "bucket_bytes": 0, "hardware": replace(BOX, overlaps=False)}
    single = compile_step(make_model(num_hidden_layers=4), OPTIMIZER, mesh, strategy, (8, 8), **options)
    expected, _ = single.simulate(make_state(make_model(num_hidden_layers=4)), batch)
    for hardware in (FAST, replace(FAST, overlaps=False), None):
        paired = pair_program(make_model, mesh, strategy, hardware=hardware)
        paired.verify()
        assert any(step.members for part in paired.parts for step in part.instructions) == (hardware is FAST)
        state, _ = paired.simulate(make_state(make_model(num_hidden_layers=4)), batch)
        assert all(torch.equal(state.leaves[path], expected.leaves[path]) for path in expected.leaves)


@pytest.mark.parametrize("name", ["dual_pipe", "dual_pipe_v", "interleaved", "one_f_one_b"])
@pytest.mark.parametrize(("mesh", "strategy"), [(Mesh(pp=2, tp=2), "tp_sp"), (Mesh(pp=2, fsdp=2, tp=2), "zero3_tp_sp")], ids=str)
def test_forwards_run_beside_backwards_with_the_same_bits(name, mesh, strategy, make_model, make_state, batch):
    """In schedules of forwards and backwards in turn, the forward of one microbatch beside the backward of another, if paired."""
    model = make_model(num_hidden_layers=4)
    single, paired = (
        compile_step(
            model, OPTIMIZER, mesh, strategy, (8, 8), num_microbatches=4, hardware=SLOW, schedule=Schedule(name, paired=paired)
        )
        for paired in (False, True)
    )
    paired.verify()
    words = [step.words for part in paired.parts for step in part.instructions]
    assert any(text.startswith("forward layers.") and " + backward layers." in text for text in words)
    if name != "one_f_one_b":  # of which four microbatches make one pair
        assert predicted_times(paired, SLOW).makespan <= predicted_times(single, SLOW).makespan
    expected, _ = single.simulate(make_state(model), batch)
    state, _ = paired.simulate(make_state(make_model(num_hidden_layers=4)), batch)
    assert all(torch.equal(state.leaves[path], expected.leaves[path]) for path in expected.leaves)


def test_a_picture_names_both_actions(make_model):
    """A bar of a forward beside a backward has the names of both."""
    program = pair_program(make_model, Mesh(pp=2, tp=2), "tp_sp", "dual_pipe_v", SLOW)
    labels = {bar.label for bar in program.picture(SLOW).bars}
    assert any(re.fullmatch(r"\dF\d\+\dB\d", label) for label in labels), labels


def test_a_pair_hides_messages(make_model):
    """Of TP with sequence parallelism, more than half of what is exposed if microbatches are taken one by one."""
    options = {"num_microbatches": 4, "hardware": BOX}
    single = compile_step(make_model(num_hidden_layers=4), OPTIMIZER, Mesh(tp=2), "tp_sp", (8, 8), **options)
    paired = pair_program(make_model, Mesh(tp=2), "tp_sp")
    options["hardware"] = replace(BOX, overlaps=False)
    written = compile_step(make_model(num_hidden_layers=4), OPTIMIZER, Mesh(tp=2), "tp_sp", (8, 8), **options)
    times = [predicted_times(program, BOX).makespan for program in (written, single, paired)]
    assert times[0] > times[1] > times[2]


def test_layers_are_joined_in_fours_but_for_the_last(make_model):
    """Eight layers: forwards of four; of the backwards, which reductions follow, the last ones are alone."""
    model, options = make_model(num_hidden_layers=8), {"schedule": Schedule(paired=True), "num_microbatches": 2}
    program = compile_step(model, OPTIMIZER, Mesh(tp=2), "tp_sp", (8, 8), hardware=SLOW, **options)
    steps = [step for step in program.parts[0].instructions if step.op in ("forward", "backward") and "layers" in step.segment]
    layers = [(step.op, len({member.segment for member in step.alone})) for step in steps]
    assert layers[:2] == [("forward", 4)] * 2
    assert layers[-1] == ("backward", 1) and ("backward", 4) in layers
    assert steps[0].words == "forward layers.0..layers.3 mb0+mb1"


def test_a_wrong_joined_instruction_is_refused(make_model):
    """Operands in another order than those of its members; a member that reads what belongs to the other microbatch."""
    program = pair_program(make_model, Mesh(tp=2), "tp_sp")
    part = program.parts[0]
    line, joined = next((line, step) for line, step in enumerate(part.instructions) if step.members and step.op == "forward")
    first, second, *others = joined.members
    swapped = replace(joined, inputs=joined.inputs[::-1])
    crossed = replace(joined, members=(first, replace(second, inputs=first.inputs), *others))
    relabelled = replace(joined, members=(replace(first, microbatch=1), replace(second, microbatch=0), *others))
    for wrong in (swapped, crossed, relabelled):
        part.instructions[line] = wrong
        with pytest.raises(ProgramError):
            program.verify()
    part.instructions[line] = joined
    program.verify()


def test_in_1f1b_every_steady_forward_has_a_backward_of_another_microbatch(make_model):
    """Whatever the number of microbatches, odd too: on each position all forwards but those of the warmup are in pairs."""
    for name, chunks in (("one_f_one_b", 1), ("interleaved", 2)):
        single, program = (
            compile_step(
                make_model(num_hidden_layers=4),
                OPTIMIZER,
                Mesh(pp=2, tp=2),
                "tp_sp",
                (9, 8),
                num_microbatches=9,
                hardware=SLOW,
                schedule=Schedule(name, paired=paired),
            )
            for paired in (False, True)
        )
        program.verify()
        assert predicted_times(program, SLOW).makespan < predicted_times(single, SLOW).makespan
        for position, row in enumerate(program.schedule):
            warmup = 2 * (1 - position) + 1 + 3 * (chunks - 1)  # nine go through a chunk in groups of 3, 2, 2 and 2
            kinds = "".join(action.kind for action in row)
            steady = 9 * chunks - warmup
            assert kinds == "F" * warmup + "FB" * steady + "B" * warmup
            turns = row[warmup : warmup + 2 * steady]
            assert all(f.microbatch != b.microbatch for f, b in zip(turns[::2], turns[1::2], strict=True))


@pytest.mark.parametrize("name", ["one_f_one_b", "interleaved", "dual_pipe", "dual_pipe_v"])
def test_no_pair_waits_for_ever(name):
    """For all numbers of positions, stages and microbatches, also so few that all forwards come first."""
    for positions, chunks, number in itertools.product((2, 3, 4), (1, 2, 3), range(1, 10)):
        schedule = Schedule(name, paired=True).for_positions(positions)
        sizes = {"num_ranks": positions, "num_microbatches": number, "num_chunks": chunks if name == "interleaved" else None}
        with contextlib.suppress(ConfigError):  # numbers that the schedule does not have
            verify([_forwards_beside_backwards(items) for items in lower(actions(name, **sizes, **schedule.options))])


def test_an_odd_number_of_microbatches_has_no_pairs(make_model):
    with pytest.raises(ConfigError, match="cannot take 1 microbatches two at a time"):
        pair_program(make_model, Mesh(tp=2), "tp_sp", num_microbatches=1)


def test_pairs_are_not_cut_into_slices(make_model):
    with pytest.raises(ConfigError, match="whose rows are cut into 2 slices"):
        pair_program(make_model, Mesh(tp=2), "tp_sp", num_slices=2)


def test_a_table_counts_pairs(make_model):
    """Two numbers for four microbatches; four are refused, and the message says why."""
    rows = [[Action(0, kind, m) for m in range(2) for kind in "FB"]]
    fits = Schedule("mine", table=rows, paired=True)
    program = compile_step(make_model(), OPTIMIZER, Mesh(tp=2), "tp_sp", (8, 8), num_microbatches=4, schedule=fits, hardware=SLOW)
    program.verify()
    assert {action.microbatch for action in program.schedule[0]} == set(range(4))
    with pytest.raises(ConfigError, match="does not fit the 1 pairs of microbatches that paired=True makes"):
        compile_step(make_model(), OPTIMIZER, Mesh(tp=2), "tp_sp", (8, 8), num_microbatches=2, schedule=fits, hardware=SLOW)


def test_a_cap_of_a_search_is_that_of_pairs(make_model):
    """`auto` keeps to half the bytes, because each of its turns is of two microbatches: its order is that of half the cap."""
    orders = []
    for paired, number, cap in ((True, 8, 640_000), (False, 4, 320_000)):
        schedule = Schedule("auto", num_chunks=1, options={"cap_bytes": cap}, paired=paired)
        model, shape = make_model(num_hidden_layers=4), (2 * number, 8)
        options = {"num_microbatches": number, "schedule": schedule, "hardware": BOX}
        program = compile_step(model, OPTIMIZER, Mesh(pp=2), "ddp", shape, **options)
        turns = [[(a.stage, a.kind, a.microbatch // (1 + paired)) for a in row] for row in program.schedule]
        orders.append([list(dict.fromkeys(row)) for row in turns])
    assert orders[0] == orders[1]


@pytest.mark.parametrize(("mesh", "strategy"), MESHES[:2], ids=str)
def test_messages_stay_where_memory_does_not_suffice(mesh, strategy, make_model):
    """On a device with just enough memory for the layers as they are written, they stay so if hiding takes more."""
    written = pair_program(make_model, mesh, strategy, hardware=replace(BOX, overlaps=False))
    tight = replace(BOX, memory_bytes=int(max(written.peaks()) / 0.9) + 1)
    assert max(pair_program(make_model, mesh, strategy, hardware=tight).peaks()) <= 0.9 * tight.memory_bytes
    assert max(pair_program(make_model, mesh, strategy).peaks()) > 0.9 * tight.memory_bytes
