"""A brute-force interpreter of programs: what a list of instructions does, tried out, with the meaning of every value as a term.

It shares no code with the verifier and knows nothing of what a program ought to look like. All positions along pp run as far as
they get. A message is transferred when both ends are posted and each is first in its queue. What a value means is the term that
computed it: the name of the segment and the terms of its operands; of a sum, the two terms in either order. A program is right if
it comes to an end, holds nothing but results, and these mean what those of the original mean.
"""

from collections.abc import Hashable
from dataclasses import dataclass, field

from mpar.ir import Part
from mpar.program import Instruction, Program, Value

__all__ = ["Terms", "Wrong", "run"]


class Wrong(Exception):
    """What a program does wrong."""


class Terms:
    """Numbers for terms, the same for equal ones, so that comparing them does not take them apart."""

    def __init__(self) -> None:
        self.numbers: dict[Hashable, int] = {}

    def __call__(self, *parts: Hashable) -> int:
        return self.numbers.setdefault(parts, len(self.numbers))


@dataclass
class Post:
    """One end of a message at position `here`: a send or a receipt, to or from position `there`."""

    op: str
    message: int
    here: int
    there: int
    channel: str
    value: int
    looks: Value
    term: int = -1
    complete: bool = False
    waited: bool = False


@dataclass
class Rank:
    """What one position along pp has done so far."""

    here: int
    part: Part
    terms: dict[int, int] = field(default_factory=dict)  # of the values that are there
    made: set[int] = field(default_factory=set)
    spoiled: set[int] = field(default_factory=set)  # an update wrote over them
    posts: list[Post] = field(default_factory=list)
    line: int = 0
    meetings: int = 0  # that the present line is through with
    arrivals: list[tuple[str, int, str, tuple[int, ...]]] = field(default_factory=list)  # segment, number, queue, operands
    passed: int = 0  # arrivals that are over

    def under_way(self, value: int) -> list[Post]:
        """Messages that hold a value and have not been waited for."""
        return [post for post in self.posts if post.value == value and not post.waited]


def run(program: Program, queues: str, terms: Terms) -> dict[tuple[int, str], int]:
    """The terms of all results, by position and path. Raises Wrong if the program goes wrong or does not end."""
    machine = _Machine(program, queues, terms)
    while any([machine.advance(rank) for rank in machine.ranks]):
        pass
    for rank in machine.ranks:
        if rank.line < len(rank.part.instructions):
            raise Wrong(f"deadlock: position {rank.here} is stuck at line {rank.line}")
        if unfinished := [post for post in rank.posts if not (post.complete and post.waited)]:
            raise Wrong(f"left over: {unfinished[0]}")
    return {entry: term for rank in machine.ranks for entry, term in machine.results(rank).items()}


class _Machine:
    def __init__(self, program: Program, queues: str, terms: Terms) -> None:
        self.program, self.queues, self.term = program, queues, terms
        self.ranks = [Rank(here, part) for here, part in enumerate(program.parts)]
        for rank in self.ranks:
            for leaf in (*rank.part.state_in, *rank.part.batch, *rank.part.scalars):
                rank.terms[leaf.value] = self.term("given", leaf.path)
            rank.made = set(rank.terms)

    def advance(self, rank: Rank) -> bool:
        """Run a position until it blocks; whether it got any further."""
        start = rank.line, rank.passed, len(rank.arrivals)
        while rank.line < len(rank.part.instructions) and self.step(rank, rank.part.instructions[rank.line]):
            rank.line += 1
        return (rank.line, rank.passed, len(rank.arrivals)) != start

    def step(self, rank: Rank, step: Instruction) -> bool:
        """Carry out an instruction; False: it blocks."""
        operands = [self.read(rank, step, v) for v in step.inputs]
        if twice := [v for i, v in enumerate(step.outputs) if v in rank.made or v in step.outputs[:i]]:
            raise Wrong(f"made twice: {twice}")
        kind = self.program.kinds[step.kind]
        for values, expected in ((step.inputs, kind.operands), (step.outputs, kind.results)):
            if [(self.program.values[v].shape, self.program.values[v].dtype) for v in values] != list(expected):
                raise Wrong(f"shape: {step} does not fit its kind")
        if step.op == "wait":
            if not self.wait(rank, step):
                return False
            results = []
        elif step.op in ("send", "recv"):
            results = self.post(rank, step, operands)
        else:
            crossing = sum("pp" in use.axes for use in kind.collectives) if len(self.ranks) > 1 else 0
            while rank.meetings < crossing:
                if not self.meet(rank, step, tuple(operands)):
                    return False
                rank.meetings += 1
            results = self.compute(rank, step, operands, crossing)
        rank.meetings = 0
        for v, term in zip(step.outputs, results, strict=True):
            rank.made.add(v)
            rank.terms[v] = term
        if step.op == "update":  # parameters, gradients and slots are given away to it; the last four operands are scalars
            rank.spoiled |= set(step.inputs[:-4])
            if any(rank.under_way(v) for v in step.inputs[:-4]):
                raise Wrong("written over: an update takes a value that is being sent")
        for v in step.frees:
            if v not in rank.terms:
                raise Wrong(f"freed twice, or never made: {v}")
            if rank.under_way(v):
                raise Wrong(f"freed while its message is under way: {v}")
            del rank.terms[v]
        return True

    def read(self, rank: Rank, step: Instruction, value: int) -> int:
        """The term of an operand, which must be there."""
        if value not in rank.terms:
            raise Wrong(f"read {'after it was freed' if value in rank.made else 'before it was made'}: {value}")
        if value in rank.spoiled:
            raise Wrong(f"read after an update wrote over it: {value}")
        if step.op != "wait" and any(post.op == "recv" for post in rank.under_way(value)):
            raise Wrong(f"read before it arrived: {value}")
        return rank.terms[value]

    def compute(self, rank: Rank, step: Instruction, operands: list[int], crossing: int) -> list[int]:
        if step.op == "accumulate":
            half = len(operands) // 2
            return [self.term("add", *sorted(pair)) for pair in zip(operands[:half], operands[half:], strict=True)]
        together = tuple(other.arrivals[rank.passed - 1] for other in self.ranks) if crossing else ()
        whole = self.term(step.kind, tuple(operands), together)
        return [self.term("part", whole, i) for i in range(len(step.outputs))]

    def meet(self, rank: Rank, step: Instruction, operands: tuple[int, ...]) -> bool:
        """Arrive at a collective of all positions, or see whether everybody has arrived: one may then go on. All positions must
        come on the same queue, because a queue may have groups of its own.
        """
        number = rank.passed
        if len(rank.arrivals) == number:
            rank.arrivals.append((step.kind, rank.meetings, step.queue, operands))
        if any(len(other.arrivals) <= number for other in self.ranks):
            return False
        if len({other.arrivals[number][:3] for other in self.ranks}) > 1:
            raise Wrong(f"different collectives meet: {[other.arrivals[number] for other in self.ranks]}")
        rank.passed += 1
        return True

    def post(self, rank: Rank, step: Instruction, operands: list[int]) -> list[int]:
        value = step.inputs[0] if step.op == "send" else step.outputs[0]
        looks = self.program.values[value]
        post = Post(step.op, step.message, rank.here, step.peer, step.queue[-1], value, looks)
        if any(old.message == post.message for old in rank.posts):
            raise Wrong(f"posted twice: message {post.message} at position {rank.here}")
        rank.posts.append(post)
        if step.op == "send":
            post.term = operands[0]
        while self.transfer():
            pass
        return [] if step.op == "send" else [post.term]

    def wait(self, rank: Rank, step: Instruction) -> bool:
        """Whether the message that is waited for is complete."""
        own = [post for post in rank.posts if post.message == step.message and not post.waited]
        if not own or own[0].value != step.inputs[0] or own[0].there != step.peer:
            raise Wrong(f"waits for what it has not posted: {step}")
        if own[0].complete:
            own[0].waited = True
            rank.terms[own[0].value] = own[0].term
        return own[0].complete

    def transfer(self) -> bool:
        """Carry one message over, if two firsts of queues name each other."""
        firsts = [post for rank in self.ranks for post in self.heads(rank)]
        for out in firsts:
            for into in firsts:
                if (out.op, into.op) == ("send", "recv") and (out.here, out.there) == (into.there, into.here):
                    if (out.message, out.channel) != (into.message, into.channel):
                        raise Wrong(f"messages are crossed: {out} meets {into}")
                    if (out.looks.shape, out.looks.dtype) != (into.looks.shape, into.looks.dtype):
                        raise Wrong(f"the ends of a message differ: {out} meets {into}")
                    out.complete, into.complete, into.term = True, True, out.term
                    return True
        return False

    def heads(self, rank: Rank) -> list[Post]:
        """The first incomplete message of each queue of a rank."""
        first: dict[Hashable, Post] = {}
        for post in rank.posts:
            if not post.complete:
                key = {"direction": (post.op, post.there), "pair": post.there, "single": 0}[self.queues]
                first.setdefault(key, post)
        return list(first.values())

    def results(self, rank: Rank) -> dict[tuple[int, str], int]:
        """Terms of what is left, which must be the results and what the host keeps, and nothing else."""
        part, out = rank.part, {}
        kept = {leaf.value for leaf in (*part.batch, *part.scalars)}
        for leaf in (*part.state_out, *part.metrics):
            if leaf.value not in rank.terms or leaf.value in rank.spoiled:
                raise Wrong(f"no result: {leaf.path}")
            kept.add(leaf.value)
            out[rank.here, leaf.path] = rank.terms[leaf.value]
        if leaked := set(rank.terms) - kept:
            raise Wrong(f"never freed: {sorted(leaked)}")
        if missing := kept - set(rank.terms):
            raise Wrong(f"missing: {sorted(missing)}")
        return out
