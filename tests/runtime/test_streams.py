"""Queues as streams: what must be in order is, by an analysis of what happens before what that shares no code with the plan."""

import random
from dataclasses import dataclass

import pytest

from mpar import Mesh
from mpar.ir import HOME, START, Instruction, plan_streams
from mpar.optim import AdamW
from mpar.program.compile import compile_step


@dataclass
class Stored:
    """What the planner asks of a value."""

    storage: int


class Communicating:
    """A kind that has collectives, so that its instructions stay on their queue."""

    collectives = ("all_gather",)


def happens_before(issues):
    """For each line, and for the end on the caller's stream: the lines that are surely done when it starts, and START."""
    done: dict[str, set[int]] = {HOME: {START}}  # by queue: what it has waited for, and what ran on it
    starts, events = [], {START: {START}}
    for line, issue in enumerate(issues):
        own = done.setdefault(issue.queue, set())
        for awaited in issue.waits:
            assert awaited in events, f"line {line} waits for line {awaited}, which has not been recorded"
            own |= events[awaited]
        starts.append(set(own))
        own.add(line)
        if issue.records:
            events[line] = set(own)
        for queue, awaited in issue.holds:
            assert awaited in events, f"line {line} holds {queue} for line {awaited}, which has not been recorded"
            done.setdefault(queue, set()).update(events[awaited])
    return starts, done[HOME]


def check(instructions, values, kinds):
    """Assert that the plan of streams keeps the order, and return it."""
    issues = plan_streams(instructions, values, kinds)
    check_plan(instructions, values, issues)
    return issues


def check_plan(instructions, values, issues):
    """Assert that reads follow writes, overwriting follows reads, and memory is handed on after its last use."""
    starts, end = happens_before(issues)
    assert end == {START, *range(len(instructions))}, "the step leaves work behind that nobody waits for"
    made, users, home, alive, freed = {}, {}, {}, {}, []
    for line, step in enumerate(instructions):
        before, queue = starts[line], issues[line].queue
        assert START in before, f"line {line} may run before the step began"
        for value in step.inputs:
            assert value not in made or made[value] in before or made[value] == line, f"line {line} reads {value} too early"
        for value in step.outputs:
            for user in users.get(values[value].storage, ()):
                assert user in before, f"line {line} writes over what line {user} reads"
        for storage, queues in homes_given_back(step, values, alive, home).items():
            others = {user for user in users[storage] if issues[user].queue != queue}
            assert queues != queue or others <= before, f"line {line} may use memory that others still read"
        for where, readers, when in freed:
            assert where != queue or readers <= before, f"line {line} gets memory of line {when} too early"
        for value in (*step.inputs, *step.outputs):
            storage = values[value].storage
            home.setdefault(storage, queue if value in step.outputs else HOME)
            users.setdefault(storage, set()).add(line)
            alive.setdefault(storage, set()).add(value)
        for value in step.outputs if step.op != "wait" else step.inputs:
            made[value] = line
        for value in step.frees:
            storage = values[value].storage
            alive[storage].discard(value)
            if not alive[storage]:
                freed.append((home.pop(storage), users.pop(storage), line))


def homes_given_back(step, values, alive, home):
    """The storages of operands and results that an instruction gives back, and the queue that each was allocated on. Its code
    drops them while it runs, so that it may use their memory itself.
    """
    left = {storage: set(names) for storage, names in alive.items()}
    for value in (*step.inputs, *step.outputs):
        left.setdefault(values[value].storage, set()).add(value)
    for value in step.frees:
        left[values[value].storage].discard(value)
    touched = {values[value].storage for value in step.frees if value in (*step.inputs, *step.outputs)}
    return {storage: home[storage] for storage in touched if not left[storage] and storage in home}


def random_program(seed, longest=25):
    """Instructions on four queues: some make views, some write over, some free."""
    rng = random.Random(seed)
    values, instructions, alive, used = [Stored(i) for i in range(3)], [], [0, 1, 2], set()
    queues = [HOME, HOME, "gather", "reduce", "->1 F"]
    for _ in range(rng.randint(1, longest)):
        inputs = tuple(rng.sample(alive, min(len(alive), rng.randint(0, 3))))
        outputs = []
        for _ in range(rng.randint(0, 2)):
            shares = inputs and rng.random() < 0.25
            storage = values[rng.choice(inputs)].storage if shares else 1000 + len(values)
            values.append(Stored(storage))
            outputs.append(len(values) - 1)
        others = tuple(v for v in alive if v not in inputs and v in used)
        used.update(inputs, outputs)
        frees = tuple(v for v in (*inputs, *outputs) if rng.random() < 0.4) + tuple(v for v in others if rng.random() < 0.1)
        instructions.append(Instruction("forward", "k", inputs, tuple(outputs), frees, queue=rng.choice(queues)))
        alive = [v for v in (*alive, *outputs) if v not in frees]
    return instructions, values


@pytest.mark.parametrize("block", range(10))
def test_random_programs_are_in_order(block):
    """Whatever the program, nothing is read, overwritten or handed on too early."""
    for seed in range(200 * block, 200 * (block + 1)):
        check(*random_program(seed), {"k": Communicating()})


@pytest.mark.parametrize(
    ("mesh", "strategy", "schedule", "options"),
    [
        (Mesh(), "ddp", None, {}),
        (Mesh(fsdp=2), "zero3", None, {"prefetch_bytes": 1 << 20, "bucket_bytes": 1 << 12}),
        (Mesh(fsdp=2, tp=2), "zero3_tp_sp", None, {"prefetch_bytes": 1 << 20}),
        (Mesh(pp=2), "ddp", "zbv", {}),
        (Mesh(pp=2, fsdp=2), "zero3", "one_f_one_b", {"prefetch_bytes": 1 << 20}),
        (Mesh(pp=4), "ddp", "dual_pipe_v", {}),
    ],
    ids=str,
)
def test_programs_are_in_order(mesh, strategy, schedule, options, make_model):
    """Every rank's program of these meshes is in order, and events are few: at most two waits for each instruction on average."""
    model = make_model(num_hidden_layers=8)
    program = compile_step(model, AdamW(lr=1e-3), mesh, strategy, (16, 8), num_microbatches=8, schedule=schedule, **options)
    for part in program.parts:
        issues = check(part.instructions, program.values, program.kinds)
        assert len({issue.queue for issue in issues}) > 1 or mesh.size == 1
        assert sum(len(issue.waits) + len(issue.holds) for issue in issues) <= 2 * len(issues)


def test_one_queue_needs_no_events(make_model):
    """On one rank everything is on the caller's stream."""
    program = compile_step(make_model(), AdamW(lr=1e-3), Mesh(), "ddp", (8, 8), num_microbatches=2)
    issues = plan_streams(program.parts[0].instructions, program.values, program.kinds)
    assert not any(issue.waits or issue.holds or issue.records for issue in issues)
    assert {issue.queue for issue in issues} == {HOME}
