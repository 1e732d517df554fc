"""Run: a thin interpreter of a program on one rank. It loads generated code and needs no part of the compiler."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from mpar import tree
from mpar.arrange import sequence_order
from mpar.errors import ConfigError, ProgramError, ShapeError, UnknownNameError
from mpar.kernels import REFERENCE, implementation
from mpar.mesh import Mesh
from mpar.ops import PRIMITIVES
from mpar.program._capture import Replay
from mpar.program._comm import Comm, Counter, ProcessComm
from mpar.program._inductor import compiled, opaque
from mpar.program._kernels import asking_references, check_device
from mpar.program._simulate import run_ranks
from mpar.program._streams import issue_on_streams, plan_streams
from mpar.shards import assemble, shard
from mpar.spec import local_shape

if TYPE_CHECKING:
    from mpar.program._program import Instruction, Leaf, Program

__all__ = ["ALONE", "RankRun", "State", "batch_rows", "bind", "init_state", "load", "simulate"]

Progress = Callable[[int, "Instruction"], None]
EXECUTIONS = ("eager", "inductor", "cuda_graph")
Expected = tuple[torch.dtype, tuple[int, ...]]


class State:
    """What a rank keeps between steps: its shards of parameters and optimizer slots, and how many updates they have seen.

    A step takes the tensors out of it: after `run(state, batch)` the old state is empty.
    """

    def __init__(self, leaves: dict[str, Tensor], step: int = 0) -> None:
        self.leaves, self.step = leaves, step

    def check(self, expected: Mapping[str, Expected]) -> None:
        """Raise ShapeError, listing all offenders, unless the leaves are there and as expected."""
        if expected and not self.leaves:  # a rank whose stages have no parameters has none to give
            raise ShapeError(
                "this state was given to a step already, which owns its tensors now: use the state that the step returned"
            )
        _check("this state", expected, self.leaves)

    def take(self) -> dict[str, Tensor]:
        """The leaves, which leave the state."""
        leaves, self.leaves = self.leaves, {}
        return leaves

    def params(self, like: Any) -> Any:
        """The parameters as a tree with the structure of `like` (`model.abstract_params`)."""
        return tree.unflatten(tree.flatten(like)[1], [self.leaves[f"params.{path}"] for path in tree.paths(like)])

    def __repr__(self) -> str:
        return f"State({len(self.leaves)} tensors, step={self.step})"


def load(
    name: str,
    source: str,
    constants: Mapping[str, Tensor],
    device: torch.device,
    primitives: Mapping[str, Callable] | None = None,
    *,
    inductor: bool = False,
) -> Callable[[list[Tensor], Comm], tuple[Tensor, ...]]:
    """The function that generated source defines; `primitives` are what it calls, by default what the source says."""
    if primitives is None:
        called = [name for name in PRIMITIVES if f"[{name!r}" in source]
        primitives = {name: opaque(name, REFERENCE) if inductor else implementation(name) for name in called}
    names: dict[str, Any] = {
        "torch": torch,
        "PRIMITIVES": primitives,
        "KERNELS": _Kernels(primitives, device, opaque if inductor else implementation),
        "CONSTANTS": {key: value.to(device) for key, value in constants.items()},
        "DEVICE": device,
        "TO_HOST": _to_host,
        "TO_DEVICE": lambda x: x.to(device, non_blocking=True),
        "inf": float("inf"),
        "nan": float("nan"),
    }
    exec(compile(source, f"<segment {name}>", "exec"), names)
    return compiled(source, names["run"]) if inductor else names["run"]


def _to_host(x: Tensor) -> Tensor:
    """A copy in memory of the host that a device reaches by itself; a tensor of the host is there already."""
    if x.device.type == "cpu":
        return x
    return torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x, non_blocking=True)


class _Kernels(dict[tuple[str, str], Callable]):
    """`(primitive, implementation)` to its function; on a CPU what `primitives` has, whatever the program was compiled for."""

    def __init__(self, primitives: Mapping[str, Callable], device: torch.device, find: Callable[[str, str], Callable]) -> None:
        super().__init__()
        self.primitives, self.device, self.find = primitives, device, find

    def __missing__(self, key: tuple[str, str]) -> Callable:
        function = self.find(*key) if self.device.type == "cuda" else self.primitives[key[0]]
        self[key] = function
        return function


class RankRun:
    """One rank's program with loaded code.

    `progress(line, instruction)` is called before each instruction; `primitives` replaces what the code calls (see `load`).
    """

    def __init__(
        self,
        program: "Program",
        comm: Comm,
        device: torch.device | str = "cpu",
        progress: Progress | None = None,
        primitives: Mapping[str, Callable] | None = None,
        inductor: bool = False,
    ) -> None:
        self.program, self.comm, self.device, self.progress = program, comm, torch.device(device), progress
        check_device(program.info["kernels"], self.device)
        self.part = part = program.parts[comm.index(("pp",))]
        used = {step.kind for step in part.instructions}
        functions = {
            name: load(name, kind.source, kind.constants, self.device, primitives, inductor=inductor)
            for name, kind in program.kinds.items()
            if kind.source and name in used
        }
        self._state = {leaf.path: _local(program, leaf) for leaf in part.state_in}
        self._batch = {_key(leaf): _all_pieces(program, *_local(program, leaf)) for leaf in part.batch}
        calls = [functions[step.kind] if step.kind in functions else self._message(step) for step in part.instructions]
        if self.device.type == "cuda":
            calls = issue_on_streams(calls, plan_streams(part.instructions, program.values, program.kinds), self.device)
        self._steps = [
            (
                call,
                step.inputs,
                tuple(v for v in step.frees if v not in step.outputs),
                step.outputs,
                tuple(v for v in step.frees if v in step.outputs),
                step,
            )
            for call, step in zip(calls, part.instructions, strict=True)
        ]

    def _message(self, step: "Instruction") -> Callable[[list[Tensor], Comm], tuple[Tensor, ...]]:
        """Post a message or wait for it."""
        message, peer, kind = step.message, step.peer, step.queue[-1]
        if step.op == "wait":

            def wait(args: list[Tensor], comm: Comm) -> tuple[Tensor, ...]:
                comm.wait(message)
                return ()

            return wait
        if step.op == "send":

            def send(args: list[Tensor], comm: Comm) -> tuple[Tensor, ...]:
                comm.send(args[0], peer=peer, message=message, kind=kind)
                return ()

            return send
        value, device = self.program.values[step.outputs[0]], self.device

        def receive(args: list[Tensor], comm: Comm) -> tuple[Tensor, ...]:
            buffer = torch.empty(value.shape, dtype=value.dtype, device=device)
            comm.receive(buffer, peer=peer, message=message, kind=kind)
            return (buffer,)

        return receive

    def __call__(self, state: State, batch: Mapping[str, Tensor]) -> tuple[State, dict[str, Tensor]]:
        """One step. `batch` is what `batch_rows` gives, piece after piece. Takes over the tensors of `state`.

        Returns the new state and metrics: loss (mean), microbatch_losses, weight, grad_norm, and lr as used. Raises ShapeError,
        listing all offenders, if the batch or the state is not what the program was compiled for; `state` is whole then.
        """
        numbers = self.begin(state, batch)
        scalars = [  # filled on the device: a copy from the host would wait
            torch.full((), number, dtype=leaf.dtype, device=self.device)
            for leaf, number in zip(self.part.scalars, numbers, strict=True)
        ]
        return self.end(*self.execute(state.take(), batch, scalars), numbers)

    def begin(self, state: State, batch: Mapping[str, Tensor]) -> tuple[float, float]:
        """Check the operands of a step and give its scalars, learning rate and number. Raises ShapeError."""
        optimizer = self.program.info["optimizer"]
        _check("this batch", self._batch, batch)
        state.check(self._state)
        step = state.step if optimizer is None else state.step + 1
        return 0.0 if optimizer is None else optimizer.rate(step), float(step)

    def execute(
        self, leaves: dict[str, Tensor], batch: Mapping[str, Tensor], scalars: list[Tensor]
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """`(new state, metrics)` by path. Empties `leaves`, so that each goes when it was last read."""
        env = {leaf.value: leaves.pop(leaf.path) for leaf in self.part.state_in}
        env |= {leaf.value: self._rows(leaf, batch) for leaf in self.part.batch}
        env |= {leaf.value: scalar for leaf, scalar in zip(self.part.scalars, scalars, strict=True)}
        with torch.no_grad():
            self._execute(env)
        new = {leaf.path: env.pop(leaf.value) for leaf in self.part.state_out}
        return new, {leaf.path: env[leaf.value] for leaf in self.part.metrics}

    def end(
        self, leaves: dict[str, Tensor], metrics: dict[str, Tensor], numbers: tuple[float, float]
    ) -> tuple[State, dict[str, Tensor]]:
        """What a step returns."""
        lr, step = numbers
        return State(leaves, int(step)), metrics | {"lr": torch.tensor(lr, dtype=torch.float64)}

    def _execute(self, env: dict[int, Tensor]) -> None:
        comm, progress = self.comm, self.progress
        for line, (function, inputs, frees, outputs, unread, instruction) in enumerate(self._steps):
            if progress is not None:
                progress(line, instruction)
            args = [env[value] for value in inputs]
            for value in frees:
                del env[value]  # the code takes its operands out of `args`: each goes when it was last read
            env.update(zip(outputs, function(args, comm), strict=True))  # a loop's variable would keep the last result alive
            for value in unread:
                del env[value]

    def _rows(self, leaf: "Leaf", batch: Mapping[str, Tensor]) -> Tensor:
        piece, rows = int(leaf.path.rpartition(".")[2]), self.program.values[leaf.value].shape[0]
        return batch[_key(leaf)][piece * rows : (piece + 1) * rows]


def _key(leaf: "Leaf") -> str:
    """The batch key of a leaf, whose path is `<key>.<piece>`."""
    return leaf.path.rpartition(".")[0]


def _local(program: "Program", leaf: "Leaf") -> Expected:
    return leaf.dtype, program.values[leaf.value].shape


def _all_pieces(program: "Program", dtype: torch.dtype, shape: tuple[int, ...]) -> Expected:
    """A batch entry on a rank, from that of one piece: pieces one after the other; the order of positions is that of all rows."""
    return dtype, (shape[0] * (program.num_pieces if len(shape) > 1 else program.num_slices), *shape[1:])


def _check(what: str, expected: Mapping[str, Expected], given: Mapping[str, Tensor]) -> None:
    """Raise ShapeError, listing all offenders, unless `given` has the keys, dtypes and shapes that are expected."""
    problems = [f"{key!r} is missing" for key in expected if key not in given]
    problems += [f"{key!r} is not read by the program" for key in given if key not in expected]
    for key, (dtype, shape) in expected.items():
        x = given.get(key)
        if x is not None and (x.dtype != dtype or x.shape != shape):
            problems.append(f"{key!r} is {x.dtype} {tuple(x.shape)}, the program was compiled for {dtype} {shape}")
    if problems:
        raise ShapeError(f"{what} does not fit the program:\n  " + "\n  ".join(problems))


def init_state(program: "Program", params: Any, rank: int | None = None) -> State:
    """The state before the first step: `params` and zeros for the optimizer.

    rank: None gives a global state for `simulate`; else that rank's shards. Leaves are global tensors, or DTensors placed as the
    program stores them. Raises ShapeError, listing all offenders, if a parameter is missing, left over, or of another shape.
    """
    held = program.state_in if rank is None else program.part(rank).state_in
    given: dict[str, Any] = {f"params.{path}": x for path, x in tree.leaves_with_path(params)}
    wanted = {leaf.path: leaf for leaf in program.state_in if leaf.path.startswith("params.")}
    problems = [f"{path} is missing" for path in wanted if path not in given]
    problems += [f"{path} is not in the program" for path in given if path not in wanted]
    for path in given.keys() & wanted.keys():
        x, leaf = given[path], wanted[path]
        if (tuple(x.shape), x.dtype) != (leaf.shape, leaf.dtype):
            problems.append(f"{path} is {x.dtype} {tuple(x.shape)}, the program has {leaf.dtype} {leaf.shape}")
    if problems:
        raise ShapeError("these parameters do not fit the program:\n  " + "\n  ".join(sorted(problems)))
    leaves = {}
    for leaf in held:
        if leaf.path not in given:
            local = leaf.shape if rank is None else local_shape(leaf.shape, leaf.spec, program.mesh)
            leaves[leaf.path] = torch.zeros(local, dtype=leaf.dtype)
        elif hasattr(given[leaf.path], "to_local"):
            leaves[leaf.path] = given[leaf.path].to_local().clone()
        else:
            leaves[leaf.path] = given[leaf.path] if rank is None else shard(given[leaf.path], leaf.spec, program.mesh, rank)
    return State(leaves)


def batch_rows(program: "Program", batch: Mapping[str, Tensor], rank: int) -> dict[str, Tensor]:
    """The rows of a global batch (microbatches one after the other) that `rank` works on, and of these its positions.

    Slices of a microbatch follow one another as rows. Where there are several, or ranks share a sequence, "order" says which
    positions they have. Raises ShapeError, listing all offenders, if the batch is not what the program was compiled for.
    """
    first = {_key(leaf): leaf for leaf in program.batch if leaf.path.endswith(".0")}
    expected = {key: _whole_batch(program, leaf) for key, leaf in first.items()}
    if "order" in first and "order" not in batch:
        own = sequence_order(first["order"].shape[0], program.order_parts)
        order = torch.cat([own + c * len(own) for c in range(program.num_slices)])
        _check("this batch", {key: x for key, x in expected.items() if key != "order"}, batch)
        batch = {key: x if program.order_parts == 1 else x[:, order] for key, x in batch.items()} | {"order": order}
    _check("this batch", expected, batch)
    out = {}
    for key, leaf in first.items():
        pieces = batch[key].split(leaf.shape[0])
        if len(leaf.shape) > 1:
            pieces = [piece for rows in pieces for piece in rows.split(leaf.shape[1], 1)]
        out[key] = torch.cat([shard(piece, leaf.spec, program.mesh, rank) for piece in pieces])
    return out


def _whole_batch(program: "Program", leaf: "Leaf") -> Expected:
    """The global batch entry of which `leaf` is one piece."""
    *rows, length = leaf.shape
    return leaf.dtype, (*(n * program.num_microbatches for n in rows), length * program.num_slices)


def simulate(program: "Program", state: State, batch: Mapping[str, Tensor]) -> tuple[State, dict[str, Tensor]]:
    """One step of all ranks in this process on a global state and a global batch. `state` is left as it was.

    Raises ShapeError, listing all offenders, if they are not what the program was compiled for.
    """
    mesh = program.mesh
    state.check({leaf.path: (leaf.dtype, leaf.shape) for leaf in program.state_in})

    def work(rank: int, comm: Comm) -> tuple[State, dict[str, Tensor]]:
        own = program.part(rank).state_in
        local = {leaf.path: shard(state.leaves[leaf.path], leaf.spec, mesh, rank) for leaf in own}
        return RankRun(program, comm)(State(local, state.step), batch_rows(program, batch, rank))

    results = run_ranks(mesh, work)
    within = Mesh(**{axis: size for axis, size in mesh.sizes.items() if axis != "pp"})
    leaves: dict[str, Tensor] = {}
    for position, part in enumerate(program.parts):
        ranks = program.ranks_at(position)
        for leaf in part.state_out:
            whole = assemble([results[rank][0].leaves[leaf.path] for rank in ranks], leaf.spec, within)
            if leaf.path in leaves and not torch.equal(leaves[leaf.path], whole):
                raise ProgramError(f"{leaf.path} is not the same on all positions along pp that hold it")
            leaves.setdefault(leaf.path, whole)
    return State({leaf.path: leaves[leaf.path] for leaf in program.state_out}, results[0][0].step), results[0][1]


def bind(
    program: "Program",
    *,
    device: torch.device | str = "cpu",
    order: str | None = None,
    counter: Counter | None = None,
    progress: Progress | None = None,
    transport: str | None = None,
    execution: str = "eager",
) -> RankRun | Replay:
    """This process's rank of the program, on the processes that torch.distributed has started.

    execution: "eager" calls the generated code; "inductor" compiles it by torch.compile when it is first called; "cuda_graph"
               records the second step and replays it, on one GPU. The bits of "cuda_graph" are those of "eager". What Inductor
               compiled keeps a segment's operands to its end: it needs more memory than is predicted.

    order:     "rank" sums in rank order, the simulator's bits (default but on NCCL); "library" leaves sums to the backend.
    transport: for CPU tensors in rank order, "shared" memory or the "backend"; default: shared where all ranks of a group are on
               one machine. The bits are the same.
    Raises UnknownNameError for another order, transport or execution, ConfigError for shared memory of tensors that are not on
    the CPU, and for CUDA graphs on a CPU or on several ranks.
    """
    if execution not in EXECUTIONS:
        raise UnknownNameError(f"no execution is called {execution!r}; there are {', '.join(EXECUTIONS)}")
    if execution == "cuda_graph" and (torch.device(device).type != "cuda" or program.mesh.size > 1):
        raise ConfigError(
            f"cannot bind with execution='cuda_graph' on device {device!s} and {program.mesh}: a step is recorded on one GPU. "
            "Use eager or inductor."
        )
    asking = sorted({name for kind in program.kinds.values() for name in asking_references(kind.source)})
    if execution == "cuda_graph" and asking:
        raise ConfigError(
            f"cannot bind with execution='cuda_graph': the references of {', '.join(asking)} look at data on the host, which a "
            "recording cannot. Use kernels=auto on a chip that has kernels, or execution='eager'."
        )
    if order not in (None, "rank", "library"):
        raise UnknownNameError(f"no order of addition is called {order!r}; there are rank and library")
    if transport not in (None, "shared", "backend"):
        raise UnknownNameError(f"no transport is called {transport!r}; there are shared and backend")
    if transport == "shared" and (order == "library" or torch.device(device).type != "cpu"):
        raise ConfigError(
            f"cannot bind with transport='shared' on device {device!s} with order={order!r}: "
            "shared memory sums CPU tensors in rank order"
        )
    inductor = execution == "inductor"
    if program.mesh.size == 1:
        run = RankRun(program, ALONE, device, progress, inductor=inductor)
        return Replay(run) if execution == "cuda_graph" else run
    order = order or ("library" if torch.device(device).type == "cuda" else "rank")
    transport = transport if torch.device(device).type == "cpu" else "backend"
    comm = ProcessComm(
        program.mesh,
        program.axes_used(),
        order=order,
        counter=counter,
        transport=transport,
        messages=program.messages(),
        posted=program.posted_bytes(),
        device=device,
    )
    return RankRun(program, comm, device, progress, inductor=inductor)


class _Alone:
    """A mesh of one rank has nothing to say."""

    def index(self, axes: tuple[str, ...]) -> int:
        """The only position."""
        return 0


ALONE = cast(Comm, _Alone())  # code for one rank has no collectives to call
