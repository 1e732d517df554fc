"""Verify: what must hold of every program before it may run. Linear in the number of instructions."""

from collections import Counter
from typing import TYPE_CHECKING

from mpar.errors import ProgramError

if TYPE_CHECKING:
    from mpar.program._program import Instruction, Program

__all__ = ["verify"]


def verify(program: "Program") -> None:
    """Raise ProgramError, naming the line, unless

    - every value is made once, read only while it lives, and freed once, and nothing is left but results;
    - every instruction hands its segment values of the shapes and dtypes that it was compiled for;
    - every collective runs over axes of the mesh, with the size of their group;
    - every microbatch's contribution enters each stored gradient exactly once.
    """
    _check_lifetimes(program)
    _check_shapes(program)
    _check_collectives(program)
    _check_contributions(program)


def _fail(program: "Program", line: int, step: "Instruction", why: str) -> None:
    raise ProgramError(f"invalid program: line {line:04d}, {step.op} {step.segment} mb{step.microbatch}: {why}")


def _check_lifetimes(program: "Program") -> None:
    names = program.values
    live = {leaf.value for leaf in program.reads()}
    made = set(live)
    freed: set[int] = set()
    for line, step in enumerate(program.instructions):
        for v in step.inputs:
            if v not in live:
                _fail(
                    program, line, step, f"reads {names[v].name}, which {'was freed' if v in freed else 'nothing has made yet'}"
                )
        for v in step.outputs:
            if v in made:
                _fail(program, line, step, f"makes {names[v].name} a second time")
            made.add(v)
            live.add(v)
        for v in step.frees:
            if v not in live:
                _fail(
                    program, line, step, f"frees {names[v].name}, which {'was freed before' if v in freed else 'does not exist'}"
                )
            live.remove(v)
            freed.add(v)
    kept = {leaf.value for leaf in (*program.state_out, *program.metrics, *program.batch, *program.scalars)}
    missing, leaked = kept - live, live - kept
    if missing or leaked:
        raise ProgramError(
            f"invalid program: at its end {sorted(names[v].name for v in missing)} are missing and "
            f"{sorted(names[v].name for v in leaked)} were never freed"
        )


def _check_shapes(program: "Program") -> None:
    for line, step in enumerate(program.instructions):
        kind = program.kinds[step.kind]
        for what, found, expected in (("operand", step.inputs, kind.operands), ("result", step.outputs, kind.results)):
            if len(found) != len(expected):
                _fail(program, line, step, f"has {len(found)} {what}s, its segment {kind.name!r} {len(expected)}")
            for v, (shape, dtype) in zip(found, expected, strict=True):
                value = program.values[v]
                if (value.shape, value.dtype) != (shape, dtype):
                    _fail(
                        program,
                        line,
                        step,
                        f"{what} {value.name} is {value.dtype} {value.shape}, its segment has {dtype} {shape}",
                    )


def _check_collectives(program: "Program") -> None:
    for name, kind in program.kinds.items():
        for use in kind.collectives:
            unknown = [axis for axis in use.axes if axis not in program.mesh.axes]
            if unknown or program.mesh.axis_size(use.axes) != use.size:
                raise ProgramError(
                    f"invalid program: segment {name!r} has a {use.op} of {use.size} ranks over {use.axes} on {program.mesh}"
                )


def _check_contributions(program: "Program") -> None:
    """Follow what each gradient is the sum of: (use of the parameter, microbatch), from backward to update."""
    parts: dict[int, Counter] = {v: Counter({(use, m): 1}) for v, (_, use, m) in program.contributions.items()}
    for step in program.instructions:
        if step.op == "reduce":
            parts |= {out: parts[v] for v, out in zip(step.inputs, step.outputs, strict=True) if v in parts}
        elif step.op == "accumulate":
            n = len(step.outputs)
            for a, b, out in zip(step.inputs[:n], step.inputs[n:], step.outputs, strict=True):
                if a in parts or b in parts:
                    parts[out] = parts.get(a, Counter()) + parts.get(b, Counter())
    uses: dict[str, set[str]] = {}
    for path, use, _ in program.contributions.values():
        uses.setdefault(path, set()).add(use)
    for path, value in program.gradients.items():
        expected = Counter({(use, m): 1 for use in uses[path] for m in range(program.num_microbatches)})
        found = parts.get(value, Counter())
        if found != expected:
            missing, extra = sorted((expected - found).elements()), sorted((found - expected).elements())
            raise ProgramError(
                f"invalid program: the gradient of {path} lacks the contributions {missing} (use, microbatch)"
                f" and has {extra} too often"
            )
