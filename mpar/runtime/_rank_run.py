"""The run of one rank: a small interpreter of the instructions of its part, which needs no part of the compiler."""

import copy
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from mpar.ir import Instruction, Leaf, ProgramData, plan_streams, plan_threads
from mpar.runtime._batch import batch_key
from mpar.runtime._device import check_device
from mpar.runtime._load import Code, load
from mpar.runtime._state import NO_LIMITS, Expected, Limits, State, check_given
from mpar.runtime._streams import issue_on_streams
from mpar.runtime._threads import issue_on_threads, kept
from mpar.runtime.comm import Comm

__all__ = ["Progress", "RankRun"]

Progress = Callable[[int, Instruction], None]


class RankRun:
    """The part of one rank with loaded code; to call it runs a step.

    `progress(line, instruction)` is called before each instruction; `primitives` replaces implementations (see `load`).
    `threads` has the communication of the queues that are threads.
    """

    def __init__(
        self,
        program: ProgramData,
        comm: Comm,
        device: torch.device | str = "cpu",
        progress: Progress | None = None,
        primitives: Mapping[str, Callable] | None = None,
        inductor: bool = False,
        threads: Mapping[str, Comm] | None = None,
    ) -> None:
        self.program, self.comm, self.device, self.progress = program, comm, torch.device(device), progress
        check_device(program.facts.kernels, self.device)
        self.part = part = program.parts[comm.index(("pp",))]
        used = {instruction.kind for instruction in part.instructions}
        functions = {
            name: load(name, kind.source, kind.constants, self.device, primitives, inductor=inductor, neighbours=kind.neighbours)
            for name, kind in program.kinds.items()
            if kind.source and name in used
        }
        self._state = {leaf.path: _local(program, leaf) for leaf in part.state_in}
        self._batch = {batch_key(leaf): _all_pieces(program, *_local(program, leaf)) for leaf in part.batch}
        self._pieces = [self._piece(leaf) for leaf in part.batch]
        calls = [
            functions[instruction.kind] if instruction.kind in functions else self._message(instruction)
            for instruction in part.instructions
        ]
        if self.device.type == "cuda":
            calls = issue_on_streams(calls, plan_streams(part.instructions, program.values, program.kinds), self.device)
        elif threads:
            plan = plan_threads(part.instructions, program.values, program.kinds, threads)
            calls = issue_on_threads(calls, part.instructions, plan, threads, progress)
        self._steps = [
            (
                call,
                instruction.inputs,
                tuple(v for v in instruction.frees if v in instruction.inputs),
                instruction.outputs,
                tuple(v for v in instruction.frees if v not in instruction.inputs),  # behind it: others may still read them
                instruction,
            )
            for call, instruction in zip(calls, part.instructions, strict=True)
        ]

    def _message(self, instruction: Instruction) -> Code:
        """The function of a send, recv or wait, which posts a message or waits for it."""
        message, peer, kind = instruction.message, instruction.peer, instruction.queue[-1]
        if instruction.op == "wait":

            def wait(args: list[Tensor], comm: Comm) -> tuple[Tensor, ...]:
                comm.wait(message)
                return ()

            return wait
        if instruction.op == "send":

            def send(args: list[Tensor], comm: Comm) -> tuple[Tensor, ...]:
                comm.send(args[0], peer=peer, message=message, kind=kind)
                return ()

            return send
        value, device = self.program.values[instruction.outputs[0]], self.device

        def receive(args: list[Tensor], comm: Comm) -> tuple[Tensor, ...]:
            buffer = torch.empty(value.shape, dtype=value.dtype, device=device)
            comm.receive(buffer, peer=peer, message=message, kind=kind)
            return (buffer,)

        return receive

    def __call__(self, state: State, batch: Mapping[str, Tensor], limits: Limits = NO_LIMITS) -> tuple[State, dict[str, Tensor]]:
        """Run one step. `batch` is what `batch_rows` returns, piece after piece. The tensors of `state` are taken out of it.

        Returns the new state and the metrics: loss (mean), microbatch_losses, weight, grad_norm, skipped (whether loss or norm
        exceeded `limits`, so that the new state has the tensors of the old one), and the lr of the step. Raises ShapeError,
        listing all problems, if the batch or the state does not fit the program; `state` then keeps its tensors.
        """
        numbers = self.begin(state, batch, limits)
        scalars = [  # filled on the device, because a copy from the host would wait for it
            number.to(leaf.dtype) if isinstance(number, Tensor) else torch.full((), number, dtype=leaf.dtype, device=self.device)
            for leaf, number in zip(self.part.scalars, numbers, strict=True)
        ]
        return self.end(*self.execute(state.take(), batch, scalars), numbers[0], state)

    def examined(self, look: Callable[[int, Sequence[Tensor]], None]) -> "RankRun":
        """The same run, which calls `look(line, results)` behind each instruction that computes, on the queue `compute`."""

        def looked(function: Code, line: int) -> Code:
            def call(args: list[Tensor], comm: Comm) -> tuple[Tensor, ...]:
                results = function(args, comm)
                look(line, results)
                return results

            return call

        run = copy.copy(self)
        run._steps = []
        for line, (function, inputs, frees, outputs, later, instruction) in enumerate(self._steps):
            call = looked(function, line) if instruction.queue == "compute" else function
            run._steps.append((call, inputs, frees, outputs, later, instruction))
        return run

    def begin(
        self, state: State, batch: Mapping[str, Tensor], limits: Limits, *, checks_state: bool = True
    ) -> tuple[float, float | Tensor, float, float]:
        """Check the operands of a step, which may raise ShapeError, and return its scalars: the learning rate, the number of the
        update and the limits. The rate is that of the step; the update's number leaves out steps whose update was skipped.
        """
        optimizer = self.program.facts.optimizer
        check_given("this batch", self._batch, batch)
        if checks_state:
            state.check(self._state)
        lr, step = (0.0, state.step) if optimizer is None else (optimizer.rate(state.step + 1), state.step + 1)
        return lr, step - state.skipped, limits.loss, limits.grad_norm

    def execute(
        self, leaves: dict[str, Tensor], batch: Mapping[str, Tensor], scalars: list[Tensor]
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """`(new state, metrics)` by path. Takes the tensors out of `leaves`, so that each is freed after its last use."""
        env = {leaf.value: leaves.pop(leaf.path) for leaf in self.part.state_in}
        env |= {value: batch[key] if rows is None else batch[key][rows] for value, key, rows in self._pieces}
        env |= {leaf.value: scalar for leaf, scalar in zip(self.part.scalars, scalars, strict=True)}
        with torch.no_grad():
            self._execute(env)
        new = {leaf.path: kept(env.pop(leaf.value)) for leaf in self.part.state_out}
        return new, {leaf.path: kept(env[leaf.value]) for leaf in self.part.metrics}

    def end(
        self, leaves: dict[str, Tensor], metrics: dict[str, Tensor], lr: float, before: State
    ) -> tuple[State, dict[str, Tensor]]:
        """What a step returns, from the results of `execute`, the learning rate and the state before."""
        metrics = metrics | {"lr": torch.tensor(lr, dtype=torch.float64)}
        if self.program.facts.optimizer is None:
            return State(leaves, before.step, before.skipped), metrics
        return State(leaves, before.step + 1, before.skipped + metrics["skipped"].to(torch.int64)), metrics  # without waiting

    def _execute(self, env: dict[int, Tensor]) -> None:
        comm, progress = self.comm, self.progress
        for line, (function, inputs, frees, outputs, later, instruction) in enumerate(self._steps):
            if progress is not None:
                progress(line, instruction)
            args = [env[value] for value in inputs]
            for value in frees:
                del env[value]  # only `args` holds it now, out of which the code takes it
            env.update(zip(outputs, function(args, comm), strict=True))  # a loop variable would keep the last result alive
            for value in later:
                del env[value]

    def _piece(self, leaf: Leaf) -> tuple[int, str, slice | None]:
        """The value of a piece of the batch, the entry that it is of, and the rows there; None for all."""
        key, piece, rows = batch_key(leaf), int(leaf.path.rpartition(".")[2]), self.program.values[leaf.value].shape[0]
        return leaf.value, key, None if self._batch[key][1][0] == rows else slice(piece * rows, (piece + 1) * rows)


def _local(program: ProgramData, leaf: Leaf) -> Expected:
    return leaf.dtype, program.values[leaf.value].shape


def _all_pieces(program: ProgramData, dtype: torch.dtype, shape: tuple[int, ...]) -> Expected:
    """Dtype and shape of a batch entry of a rank, all pieces one after the other, from those of one piece. An entry with one dim,
    such as "order", is the same for all microbatches, so it has one piece for each slice."""
    return dtype, (shape[0] * (program.num_pieces if len(shape) > 1 else program.num_slices), *shape[1:])
