"""Queues as threads: what they compute is what one thread computes, errors arrive, and nothing is kept that nobody holds."""

import gc
import random
import threading
import time
import weakref

import pytest
import torch

from mpar.ir import HOME, Instruction, plan_threads
from mpar.runtime._threads import _MOST_UNDER_WAY, issue_on_threads, kept
from tests.runtime.test_streams import Communicating, Stored

QUEUES = ("gather", "reduce")
KINDS = {"k": Communicating()}
ALONE = dict.fromkeys(QUEUES)


def random_program(rng):
    """Instructions on three queues that make values, or write over one that they free."""
    values, instructions, alive = [Stored(i) for i in range(3)], [], [0, 1, 2]
    for _ in range(rng.randint(5, 40)):
        inputs = tuple(rng.sample(alive, min(len(alive), rng.randint(1, 3))))
        frees = {v for v in inputs if rng.random() < 0.3}
        outputs = []
        for _ in range(rng.randint(0, 2)):
            over = rng.choice(inputs)
            shares = rng.random() < 0.3 and all(values[v].storage != values[over].storage for v in outputs)
            frees |= {over} if shares else set()
            values.append(Stored(values[over].storage if shares else 1000 + len(values)))
            outputs.append(len(values) - 1)
        queue = rng.choice([HOME, HOME, *QUEUES])
        instructions.append(Instruction("forward", "k", inputs, tuple(outputs), tuple(frees), queue=queue))
        alive = [v for v in (*alive, *outputs) if v not in frees]
        if not alive:
            break
    return instructions, values, alive


def function_of(instruction, values, line, slow):
    """Adds up its operands, slowly. A result that shares a storage with an operand is written over it."""

    def run(args, comm):
        time.sleep(slow.random() * 2e-3)
        total, by_storage = sum(args) + line, {values[v].storage: x for v, x in zip(instruction.inputs, args, strict=True)}
        args.clear()
        results = []
        for number, value in enumerate(instruction.outputs):
            held = by_storage.get(values[value].storage)
            results.append(total + number if held is None else held.copy_(total + number))
        return tuple(results)

    return run


def run(instructions, functions, alive):
    """What is alive in the end, as one thread executes functions."""
    env = {v: torch.tensor(float(v)) for v in range(3)}
    for instruction, function in zip(instructions, functions, strict=True):
        args = [env[v] for v in instruction.inputs]
        for v in (v for v in instruction.frees if v not in instruction.outputs):
            env.pop(v, None)
        env.update(zip(instruction.outputs, function(args, None), strict=True))
    return {v: float(kept(env[v])) for v in alive}


@pytest.mark.parametrize("block", range(10))
def test_random_programs_compute_the_same(block):
    """Whatever runs on which queue, and however long it takes."""
    for seed in range(15 * block, 15 * (block + 1)):
        rng = random.Random(seed)
        instructions, values, alive = random_program(rng)
        functions = [function_of(i, values, line, rng) for line, i in enumerate(instructions)]
        expected = run(instructions, functions, alive)
        issued = issue_on_threads(functions, instructions, plan_threads(instructions, values, KINDS, ALONE), ALONE, None)
        assert run(instructions, issued, alive) == run(instructions, issued, alive) == expected, seed


def on_gather(num, *, reads=()):
    """`num` instructions of the queue `gather`, each with a result, then one of the caller's that reads those of `reads`."""
    instructions = [Instruction("gather", "k", (), (line,), queue="gather") for line in range(num)]
    instructions.append(Instruction("forward", "k", tuple(reads), ()))
    return instructions, [Stored(line) for line in range(num)]


def issued(instructions, values, functions, progress=None):
    return issue_on_threads(functions, instructions, plan_threads(instructions, values, KINDS, ALONE), ALONE, progress)


def test_an_error_reaches_whoever_waits():
    """It is raised where the result is read; nothing more runs on that queue."""
    instructions, values = on_gather(2, reads=[1])
    ran = []

    def fail(args, comm):
        raise ConnectionError("the network is gone")

    first, second, last = issued(instructions, values, [fail, lambda args, comm: ran.append(1), lambda args, comm: ()])
    first([], None)
    (promise,) = second([], None)
    with pytest.raises(ConnectionError, match="the network is gone"):
        last([promise], None)
    assert not ran


def test_few_are_under_way():
    """The operands of what waits for the network take memory, so the caller waits once there are enough of them."""
    instructions, values = on_gather(_MOST_UNDER_WAY + 1)
    go_on, begun = threading.Event(), []

    def slow(args, comm):
        begun.append(1)
        go_on.wait(60)
        return (torch.zeros(()),)

    *calls, _ = issued(instructions, values, [slow] * len(values) + [lambda args, comm: ()])
    held = [call([], None) for call in calls[:_MOST_UNDER_WAY]]
    late = threading.Thread(target=lambda: held.append(calls[_MOST_UNDER_WAY]([], None)))
    late.start()
    late.join(0.2)
    assert late.is_alive() and len(begun) == 1
    go_on.set()
    late.join(60)
    assert [float(kept(promise)) for (promise,) in held] == [0.0] * (_MOST_UNDER_WAY + 1)


def test_an_operand_is_freed_while_the_code_runs():
    """As soon as the code drops it: that is what the prediction of the peak counts on."""
    instructions, values = on_gather(1, reads=[0])
    gone = []

    def drop(args, comm):
        ref = weakref.ref(args[0])
        args.clear()
        gc.collect()
        gone.append(ref() is None)
        return ()

    first, last = issued(instructions, values, [lambda args, comm: (torch.ones(3),), drop])
    args = list(first([], None))
    last(args, None)
    assert gone == [True]


def test_nothing_is_kept_that_nobody_holds():
    """Neither operands nor results that were dropped before, and after, they were made."""
    instructions, values = on_gather(2, reads=[1])
    made = []

    def make(args, comm):
        args.clear()
        x = torch.ones(3)
        made.append(weakref.ref(x))
        return (x,)

    first, second, last = issued(instructions, values, [make, make, lambda args, comm: args.clear() or ()])
    operand = torch.ones(3)
    made.append(weakref.ref(operand))
    given = [operand]
    del operand
    first(given, None)
    promises = list(second([], None))
    last(promises, None)
    del promises
    gc.collect()
    assert len(made) == 3 and not [ref for ref in made if ref() is not None]


def test_the_caller_says_for_which_line_it_waits():
    """So that the place of a rank is the collective that is late, not the line that needs its result."""
    instructions, values = on_gather(1, reads=[0])
    places = []

    class Places:
        def __call__(self, line, instruction):
            places.append((line, instruction.op, "goes on"))

        def waits(self, line, instruction):
            places.append((line, instruction.op, "waits"))

    def slow(args, comm):
        time.sleep(0.1)
        return (torch.zeros(()),)

    first, last = issued(instructions, values, [slow, lambda args, comm: ()], Places())
    last(list(first([], None)), None)
    assert places == [(0, "gather", "waits"), (1, "forward", "goes on")]
