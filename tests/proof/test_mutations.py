"""The proof of programs against trying them out: programs are spoiled at random, and both must come to the same verdict."""

import functools
import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import pytest

from mpar import Mesh, models
from mpar.compiler import BUCKET_BYTES, Schedule
from mpar.compiler.build import _pipeline
from mpar.compiler.build._writer import message_kind
from mpar.errors import ProgramError
from mpar.hardware import hardware
from mpar.optim import AdamW
from mpar.program import Instruction, Program
from mpar.program.compile import compile_step
from mpar.proof import verify
from mpar.schedules import lower
from tests.proof.interpreter import Terms, Wrong, run

QUEUES = ("direction", "pair", "single")
NUM_MUTANTS = 2300

# positions along pp, other axes, strategy, layers, tied, schedule, microbatches, the queues that messages are ordered for,
# slices, the hardware for which gathers are early, frees late, and instructions joined; a pattern of all that is trained
BASES = (
    (1, {}, "ddp", 2, True, "one_f_one_b", 3, "direction"),
    (2, {}, "ddp", 2, True, "one_f_one_b", 3, "direction"),
    (2, {}, "ddp", 2, False, "gpipe", 2, "single"),
    (4, {}, "ddp", 4, True, "one_f_one_b", 3, "single"),
    (2, {}, "ddp", 4, False, "interleaved", 2, "pair"),
    (2, {}, "ddp", 4, True, "zbv", 2, "direction"),
    (3, {}, "ddp", 3, False, "zb_h1", 3, "single"),
    (2, {}, "ddp", 2, True, "dual_pipe", 4, "direction"),
    (2, {}, "ddp", 4, False, "dual_pipe_v", 4, "single"),
    (2, {"fsdp": 2}, "zero3", 2, True, "one_f_one_b", 3, "single"),
    (2, {"fsdp": 2}, "zero3", 4, False, "zbv", 3, "direction"),
    (1, {}, "ddp", 2, True, "one_f_one_b", 1, "direction", 4),
    (1, {"fsdp": 2}, "zero3", 2, False, "one_f_one_b", 2, "direction", 2),
    (2, {}, "ddp", 2, True, "zb_h1", 2, "direction", 4),
    (1, {"fsdp": 2}, "zero3", 3, False, "one_f_one_b", 2, "direction", 1, "h100_dgx"),
    (2, {"fsdp": 2}, "zero3", 4, True, "one_f_one_b", 2, "direction", 1, "h100_dgx"),
    (1, {"dp": 2}, "ddp", 3, False, "one_f_one_b", 1, "direction", 1, "h100_dgx"),
    (1, {"tp": 2}, "tp_sp", 3, False, Schedule(paired=True), 4, "direction", 1, "h100_dgx"),
    (2, {"fsdp": 2, "tp": 2}, "zero3_tp_sp", 4, True, Schedule("dual_pipe_v", paired=True), 4, "direction", 1, "h100_dgx"),
)


def make_program(pp, axes, strategy, layers, tied, schedule, microbatches, queues, slices=1, box=None, trained=None):
    """A training step of a tiny Llama."""
    config = {
        "model_type": "llama",
        "hidden_size": 8,
        "intermediate_size": 16,
        "num_hidden_layers": layers,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "vocab_size": 16,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e4,
        "max_position_embeddings": 8,
        "tie_word_embeddings": tied,
    }
    model = models.from_config(config, vocab_multiple=1)
    model = model if trained is None else models.freeze(model, names=["*"], trainable=[trained])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_pipeline, "lower", functools.partial(lower, queues=queues))
        return compile_step(
            model,
            AdamW(1e-2),
            Mesh(pp=pp, **axes),
            strategy,
            (4 * microbatches, 4),
            schedule=schedule,
            num_microbatches=microbatches,
            num_slices=slices,
            bucket_bytes=0 if box else BUCKET_BYTES,
            hardware=hardware(box) if box else None,
        )


FROZEN = (
    (2, {"fsdp": 2}, "zero3", 4, False, "zbv", 4, "direction", 1, None, "layers.[23].*_norm*"),
    (2, {}, "ddp", 2, False, "one_f_one_b", 2, "direction", 2, None, "*o_NHD"),
)
"""Those of which only a part is trained."""
ORDERED = [base for base in BASES if "h100_dgx" in base and base[6] > 1]
"""Those whose communication is hidden, with several microbatches. With a single one the proof does not know which entries of the
batch an instruction should read: it compares what is read for each microbatch."""
Steps = list[Instruction]
Mutation = Callable[[random.Random, Program, Steps], Steps | None]
"""What is done to the instructions of one position; None where it does not apply."""


def swap_neighbours(rng: random.Random, program: Program, steps: Steps) -> Steps:
    """Two instructions that follow each other change places."""
    at = rng.randrange(len(steps) - 1)
    return [*steps[:at], steps[at + 1], steps[at], *steps[at + 2 :]]


def swap_far(rng: random.Random, program: Program, steps: Steps) -> Steps:
    """Any two instructions change places."""
    a, b = rng.sample(range(len(steps)), 2)
    out = list(steps)
    out[a], out[b] = steps[b], steps[a]
    return out


def move(rng: random.Random, program: Program, steps: Steps) -> Steps:
    """One instruction goes a few lines up or down."""
    at = rng.randrange(len(steps))
    rest = [*steps[:at], *steps[at + 1 :]]
    to = min(max(0, at + rng.randint(-6, 6)), len(rest))
    return [*rest[:to], steps[at], *rest[to:]]


def move_message(rng: random.Random, program: Program, steps: Steps) -> Steps | None:
    """A message is posted or waited for somewhere else, be it far away."""
    lines = [line for line, step in enumerate(steps) if _is_message(step)]
    if not lines:
        return None
    at, to = rng.choice(lines), rng.randrange(len(steps))
    rest = [*steps[:at], *steps[at + 1 :]]
    return [*rest[:to], steps[at], *rest[to:]]


def exchange_messages(rng: random.Random, program: Program, steps: Steps) -> Steps | None:
    """Two messages that a position sends hold each other's value."""
    sends = [step for step in steps if step.op == "send"]
    if len(sends) < 2:
        return None
    a, b = rng.sample(sends, 2)
    held = {a.message: b, b.message: a}
    kinds = {(step.op, step.message): step.kind for step in steps}
    return [
        replace(step, inputs=held[step.message].inputs, kind=kinds[step.op, held[step.message].message])
        if step.message in held
        else step
        for step in steps
    ]


def delete(rng: random.Random, program: Program, steps: Steps) -> Steps:
    """One instruction is gone."""
    at = rng.randrange(len(steps))
    return [*steps[:at], *steps[at + 1 :]]


def duplicate(rng: random.Random, program: Program, steps: Steps) -> Steps:
    """One instruction is there twice."""
    at, to = rng.randrange(len(steps)), rng.randrange(len(steps) + 1)
    return [*steps[:to], steps[at], *steps[to:]]


def other_peer(rng: random.Random, program: Program, steps: Steps) -> Steps | None:
    """A message names another position along pp."""
    return _change(rng, steps, _is_message, lambda step: replace(step, peer=rng.randrange(len(program.parts))))


def other_message(rng: random.Random, program: Program, steps: Steps) -> Steps | None:
    """A message has another number, mostly that of another message."""
    numbers = sorted({step.message for step in steps if _is_message(step)})
    return _change(rng, steps, _is_message, lambda step: replace(step, message=rng.choice([*numbers, 1 << 30])))


def other_channel(rng: random.Random, program: Program, steps: Steps) -> Steps | None:
    """A message goes through another channel."""
    return _change(
        rng,
        steps,
        lambda step: step.op in ("send", "recv"),
        lambda step: replace(step, queue=step.queue[:-1] + rng.choice("FBG")),
    )


def swap_posts(rng: random.Random, program: Program, steps: Steps) -> Steps | None:
    """Two posts of messages change places, be they far away."""
    posts = [line for line, step in enumerate(steps) if step.op in ("send", "recv")]
    if len(posts) < 2:
        return None
    a, b = rng.sample(posts, 2)
    out = list(steps)
    out[a], out[b] = steps[b], steps[a]
    return out


def other_queue(rng: random.Random, program: Program, steps: Steps) -> Steps | None:
    """An instruction, mostly one with collectives, goes to another queue, which communicates through groups of its own."""
    crowded = rng.random() < 0.8
    return _change(
        rng,
        steps,
        lambda step: not _is_message(step) and (bool(program.kinds[step.kind].collectives) or not crowded),
        lambda step: replace(step, queue=rng.choice(["compute", "gather", "reduce", "host"])),
    )


def other_operand(rng: random.Random, program: Program, steps: Steps) -> Steps | None:
    """An instruction reads another value, mostly one that looks the same."""

    def change(step: Instruction) -> Instruction:
        at = rng.randrange(len(step.inputs))
        known = sorted({v for other in steps for v in (*other.inputs, *other.outputs)})
        alike = [v for v in known if _looks(program, v) == _looks(program, step.inputs[at])]
        return _reading(step, at, rng.choice(alike if rng.random() < 0.95 else known))

    return _change(rng, steps, lambda step: bool(step.inputs), change)


def other_microbatch(rng: random.Random, program: Program, steps: Steps) -> Steps | None:
    """An instruction reads what its like reads for another microbatch."""

    def change(step: Instruction) -> Instruction:
        likes = [other for other in steps if (other.op, other.segment, other.kind) == (step.op, step.segment, step.kind)]
        at = rng.randrange(len(step.inputs))
        return _reading(step, at, rng.choice(likes).inputs[at])

    return _change(rng, steps, lambda step: bool(step.inputs) and step.microbatch >= 0, change)


def move_free(rng: random.Random, program: Program, steps: Steps) -> Steps | None:
    """A value is freed a few lines earlier or later."""
    at = rng.choice([line for line, step in enumerate(steps) if step.frees])
    to = min(max(0, at + rng.choice((-4, -3, -2, -1, 1, 2, 3, 4, 8, 16))), len(steps) - 1)
    value = rng.choice(steps[at].frees)
    out = list(steps)
    out[at] = replace(out[at], frees=tuple(v for v in out[at].frees if v != value))
    out[to] = replace(out[to], frees=(*out[to].frees, value))
    return out


def drop_free(rng: random.Random, program: Program, steps: Steps) -> Steps | None:
    """A value is not freed."""
    return _change(rng, steps, lambda step: bool(step.frees), lambda step: replace(step, frees=_without_one(rng, step.frees)))


def double_free(rng: random.Random, program: Program, steps: Steps) -> Steps | None:
    """A value that is freed somewhere is freed once more."""
    value = rng.choice([v for step in steps for v in step.frees])
    return _change(rng, steps, lambda step: True, lambda step: replace(step, frees=(*step.frees, value)))


def _is_message(step: Instruction) -> bool:
    return step.message >= 0


def _looks(program: Program, value: int) -> tuple:
    return program.values[value].shape, program.values[value].dtype


def _reading(step: Instruction, at: int, value: int) -> Instruction:
    return replace(step, inputs=(*step.inputs[:at], value, *step.inputs[at + 1 :]))


def _without_one(rng: random.Random, values: tuple[int, ...]) -> tuple[int, ...]:
    at = rng.randrange(len(values))
    return values[:at] + values[at + 1 :]


def _change(
    rng: random.Random, steps: Steps, eligible: Callable[[Instruction], bool], change: Callable[[Instruction], Instruction]
) -> Steps | None:
    lines = [line for line, step in enumerate(steps) if eligible(step)]
    if not lines:
        return None
    out, at = list(steps), rng.choice(lines)
    out[at] = change(out[at])
    return out


MUTATIONS: dict[Mutation, int] = {
    swap_neighbours: 32,
    move: 9,
    move_free: 14,
    move_message: 5,
    exchange_messages: 1,
    swap_posts: 2,
    swap_far: 3,
    delete: 4,
    duplicate: 2,
    other_peer: 2,
    other_message: 2,
    other_channel: 1,
    other_queue: 4,
    other_operand: 6,
    other_microbatch: 4,
    drop_free: 2,
    double_free: 2,
}
FAULTS = {
    "computes something else",
    "deadlock",
    "different collectives meet",
    "freed twice, or never made",
    "freed while its message is under way",
    "left over",
    "made twice",
    "messages are crossed",
    "never freed",
    "no result",
    "posted twice",
    "read after it was freed",
    "read before it arrived",
    "read before it was made",
    "shape",
    "waits for what it has not posted",
}
"""What the trial finds, by the first words of its reasons. Different collectives that meet are on different queues. Another order
of collectives takes two changes at once, as the norm reads the loss: test_other_order_of_collectives makes them."""


@dataclass
class Mutant:
    """A program after one or two mutations, and what the two judges say under each model of queues: None if it is right."""

    origin: tuple
    mutations: list[str]
    changes: list[str]
    proved: dict[str, str | None]
    tried: dict[str, str | None]


def mutants(count: int, seed: int, origins: Sequence[tuple] = BASES) -> Iterator[Mutant]:
    """So many mutants of the programs in turn."""
    rng = random.Random(seed)
    bases = [(base, make_program(*base)) for base in origins]
    terms = Terms()
    meanings = [run(program, "direction", terms) for _, program in bases]
    for number in range(count):
        (origin, program), meaning = bases[number % len(bases)], meanings[number % len(bases)]
        mutant, names = program, []
        while len(names) < 1 or rng.random() < 0.1:
            mutation = rng.choices(list(MUTATIONS), MUTATIONS.values())[0]
            position = rng.randrange(len(mutant.parts))
            steps = mutation(rng, mutant, mutant.parts[position].instructions)
            if steps is not None and steps != mutant.parts[position].instructions:
                mutant = _with_steps(mutant, position, steps)
                names.append(f"{mutation.__name__} pp={position}")
        proved = {queues: _proved(mutant, queues) for queues in QUEUES}
        tried = {queues: _tried(mutant, queues, terms, meaning) for queues in QUEUES}
        yield Mutant(origin, names, _difference(program, mutant), proved, tried)


def _with_steps(program: Program, position: int, steps: Steps) -> Program:
    parts = [replace(part, instructions=steps) if at == position else part for at, part in enumerate(program.parts)]
    return replace(program, parts=parts)


def _proved(program: Program, queues: str) -> str | None:
    try:
        verify(program, queues)
    except ProgramError as error:
        return str(error)
    return None


def _tried(program: Program, queues: str, terms: Terms, meaning: dict[tuple[int, str], int]) -> str | None:
    try:
        found = run(program, queues, terms)
    except Wrong as wrong:
        return str(wrong)
    return None if found == meaning else f"computes something else: {[key for key in meaning if found[key] != meaning[key]]}"


def _difference(before: Program, after: Program) -> list[str]:
    """The lines of the two programs that differ."""
    out = []
    for position, (a, b) in enumerate(zip(before.parts, after.parts, strict=True)):
        for sign, own, other in (("-", a.instructions, b.instructions), ("+", b.instructions, a.instructions)):
            out += [f"{sign} pp={position} {line} {step}" for line, step in enumerate(own) if step not in other]
    return out


def _with_message(program: Program, *, size: int, late: bool) -> Program:
    """Position 0 sends a gain to position 1 as well, which receives `size` numbers. `late`: it waits and frees it at the end."""
    gain = next(leaf.value for leaf in program.parts[0].state_in if leaf.path == "params.layers.0.attn_norm_D")
    sent, taken = program.values[gain], len(program.values)
    into = replace(sent, name="copy", shape=(size,))
    kinds = dict(program.kinds)

    def step(op: str, value: int, peer: int, queue: str) -> Instruction:
        looks = into if value == taken else sent
        kinds[f"{op} {value}"] = message_kind(f"{op} {value}", op, looks)
        made = ((), (value,)) if op == "recv" else ((value,), ())
        return Instruction(op, f"{op} {value}", *made, queue=queue, message=1 << 20, peer=peer)

    first, second = (part.instructions for part in program.parts)
    send, wait = step("send", gain, 1, "->1 F"), step("wait", gain, 1, "compute")
    if late:
        first = [replace(other, frees=tuple(v for v in other.frees if v != gain)) for other in first]
        first = [send, *first, replace(wait, frees=(gain,))]
    else:
        first = [send, wait, *first]
    second = [step("recv", taken, 0, "<-0 F"), replace(step("wait", taken, 0, "compute"), frees=(taken,)), *second]
    both = _with_steps(_with_steps(program, 0, first), 1, second)
    return replace(both, values=[*program.values, into], kinds=kinds)


of_all_mutants = pytest.mark.full("their mutants take half a minute; the tests below try some by hand")


@pytest.fixture(scope="module")
def judged() -> list[Mutant]:
    """Many mutants, the same in every run."""
    return list(mutants(NUM_MUTANTS, seed=0))


def assert_agreed(judged: Iterable[Mutant]) -> None:
    """The proof accepts a mutant, under each model of queues, if and only if trying it out finds nothing wrong."""
    wrong = [
        "\n".join([f"{mutant.origin}, {queues}: {mutant.mutations}", *mutant.changes, f"proof: {proof}", f"trial: {trial}"])
        for mutant in judged
        for queues in QUEUES
        for proof, trial in [(mutant.proved[queues], mutant.tried[queues])]
        if (proof is None) != (trial is None)
    ]
    assert not wrong, f"{len(wrong)} disagreements\n\n" + "\n\n".join(wrong[:5])


@of_all_mutants
def test_proof_agrees_with_trial(judged: list[Mutant]) -> None:
    """Of mutants of all programs, the proof refuses those that go wrong and no others."""
    assert_agreed(judged)


@of_all_mutants
def test_proof_agrees_on_ordered_programs(request: pytest.FixtureRequest) -> None:
    """The same of mutants of programs whose communication is hidden; `--attack` makes 2,000 of them."""
    assert_agreed(mutants(2000 if request.config.option.attack else 200, seed=1, origins=ORDERED))


@of_all_mutants
def test_proof_agrees_on_frozen_parameters() -> None:
    """The same of mutants of programs that train a part of their parameters, whose first segments have no backward."""
    assert_agreed(mutants(200, seed=2, origins=FROZEN))


@of_all_mutants
def test_mutants_are_of_both_kinds(judged: list[Mutant]) -> None:
    """Neither judge has it easy: many mutants are right, many are wrong, and models of queues tell some apart."""
    right = {queues: sum(mutant.tried[queues] is None for mutant in judged) for queues in QUEUES}
    assert len(judged) == NUM_MUTANTS
    assert right["direction"] >= 0.25 * NUM_MUTANTS, right
    assert right["direction"] <= 0.7 * NUM_MUTANTS, right
    assert right["direction"] > right["pair"] >= right["single"] > 0.1 * NUM_MUTANTS, right


@of_all_mutants
def test_harmless_swaps_are_accepted(judged: list[Mutant]) -> None:
    """Neighbours that do not need each other may change places, and the proof does not mind."""
    swaps = [mutant for mutant in judged if len(mutant.mutations) == 1 and mutant.mutations[0].startswith("swap_neighbours")]
    harmless = [mutant for mutant in swaps if mutant.tried["direction"] is None]
    assert len(harmless) >= 0.25 * len(swaps) > 100
    assert all(mutant.proved["direction"] is None for mutant in harmless)


@of_all_mutants
def test_every_fault_is_found_some_time(judged: list[Mutant]) -> None:
    """The mutants go wrong in every way that the trial knows, so that each check of the proof is needed."""
    found = Counter(reason.split(":")[0] for mutant in judged for reason in mutant.tried.values() if reason is not None)
    assert set(found) >= FAULTS, sorted(FAULTS - set(found))


@pytest.mark.parametrize(
    ("size", "late", "fault"),
    [(8, False, None), (4, False, "the ends of a message differ"), (8, True, "written over")],
    ids=["good", "another size", "late"],
)
def test_added_message(size: int, late: bool, fault: str | None) -> None:
    """A message more does no harm, unless its ends differ or an update writes over what is being sent."""
    program = make_program(*BASES[2])
    terms = Terms()
    meaning = run(program, "direction", terms)
    more = _with_message(program, size=size, late=late)
    tried, proved = _tried(more, "direction", terms, meaning), _proved(more, "direction")
    assert (tried is None) == (proved is None) == (fault is None), (tried, proved)
    assert fault is None or str(tried).startswith(fault), tried


@pytest.mark.parametrize("base", [BASES[0], BASES[3], BASES[9]], ids=["one stage", "four stages", "reduced each time"])
def test_order_of_addition(base: tuple) -> None:
    """Gradients that are not added in the order in which the schedule's backwards come are refused."""
    program = make_program(*base)
    reversed_schedule = [own[::-1] for own in program.schedule]
    with pytest.raises(ProgramError, match="not added in the order of the schedule"):
        verify(replace(program, schedule=reversed_schedule))


def test_exchanged_operands() -> None:
    """At the end of a step, whichever two operands of an instruction change places, the proof knows whether that matters."""
    program = make_program(*BASES[1])
    terms = Terms()
    meaning = run(program, "direction", terms)
    verdicts = Counter()
    for position, part in enumerate(program.parts):
        for line, step in enumerate(part.instructions):
            if step.op not in ("accumulate", "finish", "norm", "update", "weight"):
                continue
            for a, b in itertools.combinations(range(len(step.inputs)), 2):
                if _looks(program, step.inputs[a]) == _looks(program, step.inputs[b]):
                    exchanged = _reading(_reading(step, a, step.inputs[b]), b, step.inputs[a])
                    steps = [*part.instructions[:line], exchanged, *part.instructions[line + 1 :]]
                    mutant = _with_steps(program, position, steps)
                    tried, proved = _tried(mutant, "direction", terms, meaning), _proved(mutant, "direction")
                    assert (tried is None) == (proved is None), (exchanged, tried, proved)
                    verdicts[step.op, tried is None] += 1
    assert {("accumulate", True), ("finish", False), ("norm", False), ("update", False)} <= set(verdicts), verdicts


@pytest.mark.cases(1)
@pytest.mark.parametrize("base", [BASES[10], BASES[13], FROZEN[0]], ids=["zbv, zero3", "slices", "frozen"])
def test_operands_of_backwards(base: tuple) -> None:
    """Whichever operand of a backward is exchanged for one that looks the same, the proof knows it, though a schedule may run a
    backward as a whole for a single microbatch."""
    program, rng, terms = make_program(*base), random.Random(0), Terms()
    meaning, judged = run(program, "direction", terms), Counter()
    for position, part in enumerate(program.parts):
        steps = part.instructions
        known = sorted({v for step in steps for v in (*step.inputs, *step.outputs)})
        for line, step in enumerate(steps):
            for index, v in enumerate(step.inputs if step.op.startswith("backward") else ()):
                alike = [other for other in known if other != v and _looks(program, other) == _looks(program, v)]
                for other in rng.sample(alike, min(len(alike), 1)):
                    mutant = _with_steps(program, position, [*steps[:line], _reading(step, index, other), *steps[line + 1 :]])
                    tried, proved = _tried(mutant, "direction", terms, meaning), _proved(mutant, "direction")
                    assert (tried is None) == (proved is None), (step, index, other, tried, proved)
                    judged[step.op, tried is None] += 1
    divided = {step.op for part in program.parts for step in part.instructions} & {"backward_weight"}
    assert all(judged[op, False] for op in {"backward", *divided}) and not any(right for _, right in judged), judged


def test_other_order_of_collectives() -> None:
    """Positions that go through the collectives of loss and norm in different orders are refused. So that the norm can come
    first, it reads another number in place of the loss."""
    program = make_program(*BASES[2])
    steps = program.parts[0].instructions
    at = next(line for line, step in enumerate(steps) if step.op == "finish" and program.kinds[step.kind].collectives)
    to = max(line for line, step in enumerate(steps) if step.op == "norm")
    squares, _, *limits = steps[to].inputs
    norm = replace(steps[to], inputs=(squares, steps[at].inputs[1], *limits))
    mutant = _with_steps(program, 0, [*steps[:at], *steps[at + 1 : to], norm, steps[at], *steps[to + 1 :]])
    assert "different collectives" in str(_tried(mutant, "direction", Terms(), {}))
    assert "meet" in str(_proved(mutant, "direction"))


def test_collectives_on_another_queue() -> None:
    """Positions along pp may meet on any queue, but only all of them on the same one."""
    program = make_program(*BASES[9])
    crossing = [name for name, kind in program.kinds.items() if any("pp" in use.axes for use in kind.collectives)]
    first, second = (
        [replace(step, queue="reduce") if step.kind in crossing else step for step in part.instructions] for part in program.parts
    )
    alone = _with_steps(program, 0, first)
    assert "different collectives" in str(_tried(alone, "direction", Terms(), {}))
    assert "members of a meeting do not arrive together" in str(_proved(alone, "direction"))
    assert _proved(_with_steps(alone, 1, second), "direction") is None


def test_freed_result() -> None:
    """A result may not be freed."""
    program = make_program(*BASES[0])
    *steps, last = program.parts[0].instructions
    mutant = _with_steps(program, 0, [*steps, replace(last, frees=(*last.frees, last.outputs[0]))])
    assert str(_tried(mutant, "direction", Terms(), {})).startswith("no result")
    assert "are missing" in str(_proved(mutant, "direction"))


def _with_frozen(program: Program, frozen: Iterable[str]) -> Program:
    return replace(program, facts=replace(program.facts, frozen=tuple(sorted(frozen))))


def test_frozen_parameters_are_proved_not_to_change():
    """A parameter that is said to be frozen and has a gradient, one that is neither frozen nor updated, and an instruction that
    writes over a frozen one are refused."""
    program = make_program(*FROZEN[1])
    frozen, trained = set(program.facts.frozen), "layers.1.attention.o_NHD"
    with pytest.raises(ProgramError, match=f"{trained} is frozen, but has a gradient; .*belongs to a frozen parameter"):
        verify(_with_frozen(program, frozen | {trained}))
    with pytest.raises(ProgramError, match=r"pp=0 params.layers.0.attn_norm_D is not updated"):
        verify(_with_frozen(program, frozen - {"layers.0.attn_norm_D"}))
    values = {leaf.path: leaf.value for part in program.parts for leaf in part.state_in}
    shared = list(program.values)
    place = values["params.layers.1.attn_norm_D"]
    shared[place] = replace(shared[place], storage=shared[values[f"params.{trained}"]].storage)
    with pytest.raises(ProgramError, match=r"writes over params.layers.1.attn_norm_D, which is frozen"):
        verify(replace(program, values=shared))
