"""A model of what a Hopper multiprocessor does with the kernels of `_attention_gluon`, which runs their own source on the CPU.

Gluon has no interpreter. Here its functions run as Python: partitions are threads of which one runs at a time, copies and matrix
products are events that happen at any moment between their beginning and what awaits them, and a seed decides who is next. A
barrier that is awaited in a wrong phase ends in a deadlock, which is reported; a tile that is overwritten while it is read, or
read before it is there, gives wrong numbers. Layouts, registers and the order of memory inside a partition are not modelled.
"""

import random
import threading
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language import constexpr
from triton.runtime.jit import JITFunction

Condition = Callable[[], bool]


class Deadlock(Exception):
    """No partition can go on, and nothing is under way."""


@dataclass
class Partition:
    """A thread that runs only when it is told to."""

    name: str
    condition: Condition = lambda: True
    waits_for: str = ""
    go: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    products: list[Callable[[], None]] = field(default_factory=list)
    stores: list[Callable[[], None]] = field(default_factory=list)
    error: BaseException | None = None
    done: bool = False


class Machine:
    """One program's partitions, and the copies and products that are under way."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.haste = {kind: self.random.choice([1.0, 0.02]) for kind in ("loads", "others")}  # slow ones end when all else waits
        self.loads: list[Callable[[], None]] = []
        self.back = threading.Semaphore(0)
        self.running = Partition("the whole program")
        self.stopped = False

    def run(self, functions: Sequence[tuple[Callable[..., None], tuple[Any, ...]]]) -> None:
        """Run to the end, or raise what went wrong."""
        partitions = [Partition(f"{function.__name__} {i}") for i, (function, _) in enumerate(functions)]
        for partition, (function, args) in zip(partitions, functions, strict=True):
            threading.Thread(target=self._body, args=(partition, function, args), daemon=True).start()
        while not all(partition.done for partition in partitions):
            ready = [partition for partition in partitions if not partition.done and partition.condition()]
            queues = [self.loads] + [queue for partition in partitions for queue in (partition.products, partition.stores)]
            queues = [queue for queue in queues if queue]
            if ready:
                queues = [q for q in queues if self.random.random() < self.haste["loads" if q is self.loads else "others"]]
            if not ready and not queues:
                self._stop(partitions)
                raise Deadlock("; ".join(f"{p.name} waits for {p.waits_for}" for p in partitions if not p.done))
            chosen = self.random.choice([*ready, *queues])
            if isinstance(chosen, list):  # products of a group and stores end in order, loads in any
                chosen.pop(self.random.randrange(len(chosen)) if chosen is self.loads else 0)()
                continue
            self.running = chosen
            chosen.go.release()
            self.back.acquire()
            if chosen.error is not None:
                self._stop(partitions)
                raise chosen.error
        assert not any(partition.products or partition.stores for partition in partitions), (
            "a partition ended before its products"
        )
        assert not self.loads, "the program ended before its loads"

    def _body(self, partition: Partition, function: Callable[..., None], args: tuple[Any, ...]) -> None:
        partition.go.acquire()
        try:
            if not self.stopped:
                function(*args)
        except BaseException as error:
            partition.error = error
        partition.done = True
        self.back.release()

    def _stop(self, partitions: Sequence[Partition]) -> None:
        self.stopped = True
        for partition in partitions:
            if not partition.done:
                partition.go.release()
                self.back.acquire()

    def pause(self, condition: Condition = lambda: True, waits_for: str = "its turn") -> None:
        """Let others run, until `condition` holds and this one is chosen."""
        me = self.running
        me.condition, me.waits_for = condition, waits_for
        self.back.release()
        me.go.acquire()
        if self.stopped:
            raise SystemExit


class Barrier:
    """An mbarrier: a phase ends when all have arrived and all bytes that were announced are there."""

    def __init__(self, name: str) -> None:
        self.name, self.phase, self.count, self.missing, self.size_bytes = name, 0, 0, 0, 0

    def init(self, count: int) -> None:
        self.count = self.missing = count

    def change(self, *, arrivals: int = 0, size_bytes: int = 0) -> None:
        self.missing -= arrivals
        self.size_bytes += size_bytes
        assert self.missing >= 0, f"{self.name}: more arrivals than it was made for"
        if self.missing == 0 and self.size_bytes == 0:
            self.phase, self.missing = self.phase + 1, self.count


class Tile:
    """Shared memory; undefined numbers until something is written."""

    def __init__(self, shape: Sequence[int], dtype: torch.dtype) -> None:
        self.data = torch.full(tuple(shape), torch.nan, dtype=dtype)
        self.dtype, self.unfenced = dtype, False

    def reinterpret(self, dtype: torch.dtype, shape: Sequence[int], layout: Any) -> "View":
        return View(self, tuple(shape))


@dataclass(frozen=True)
class View:
    """A tile as a matrix, perhaps transposed."""

    tile: Tile
    shape: tuple[int, ...]
    transposed: bool = False

    def permute(self, order: tuple[int, int]) -> "View":
        assert order == (1, 0)
        return View(self.tile, self.shape, not self.transposed)

    def read(self) -> Tensor:
        matrix = self.tile.data.reshape(self.shape).float()
        return matrix.T if self.transposed else matrix

    def store(self, value: Tensor) -> None:
        self.tile.data.copy_(value.reshape(self.tile.data.shape))
        self.tile.unfenced = True


class Memory(list):
    """An allocation of several tiles or barriers."""

    dtype: torch.dtype | None = None

    def index(self, i: Any) -> Any:  # type: ignore[override]
        assert 0 <= i < len(self)
        return self[int(i)]


@dataclass
class Product:
    """A product that is under way, or has ended."""

    result: Tensor | None = None


@dataclass(frozen=True)
class Pointer:
    """A pointer into global memory with offsets."""

    x: Tensor
    offsets: Any = 0

    def __add__(self, more: Any) -> "Pointer":
        return Pointer(self.x, self.offsets + more)


class Language:
    """What the kernels use of Gluon: one object stands for all of its modules."""

    int64, float32 = torch.int64, torch.float32
    NVMMASharedLayout = NVMMADistributedLayout = DotOperandLayout = SliceLayout = MBarrierLayout = staticmethod(lambda *_: None)
    static_range, exp2, log2, where, maximum = range, torch.exp2, torch.log2, torch.where, torch.maximum
    sum, max = staticmethod(lambda x, dim: x.sum(dim)), staticmethod(lambda x, dim: x.amax(dim))
    convert_layout = staticmethod(lambda x, layout: x)
    full = staticmethod(lambda shape, value, dtype, layout: torch.full(shape, value, dtype=dtype))
    arange = staticmethod(lambda start, end, layout: torch.arange(start, end))

    def __init__(self, machine: Machine, program: int) -> None:
        self.machine, self.program, self.tiles = machine, program, []

    def static_assert(self, condition: bool) -> None:
        assert condition

    def program_id(self, axis: int) -> Tensor:
        return torch.tensor(self.program)

    def allocate_shared_memory(self, dtype: torch.dtype, shape: Sequence[int], layout: Any) -> Memory:
        if dtype == torch.int64:
            return Memory(Barrier(f"barrier {len(self.tiles)}.{i}") for i in range(shape[0]))
        memory = Memory(Tile(shape[1:], dtype) for _ in range(shape[0]))
        memory.dtype = dtype
        self.tiles += memory
        return memory

    def warp_specialize(self, functions: Sequence[Any], warps: Sequence[int], registers: Sequence[int]) -> None:
        assert 4 * registers[0] * 2 + 4 * registers[1] <= 65536 // 32 and warps == [4, 1]
        self.machine.run(functions)

    def init(self, barrier: Barrier, *, count: int) -> None:
        barrier.init(count)

    def expect(self, barrier: Barrier, size_bytes: int) -> None:
        barrier.change(arrivals=1, size_bytes=size_bytes)

    def arrive(self, barrier: Barrier, *, count: int) -> None:
        self.machine.pause()
        barrier.change(arrivals=count)

    def wait(self, barrier: Barrier, phase: Any, pred: Any = True) -> None:
        if pred:
            self.machine.pause(lambda: barrier.phase % 2 != phase, f"phase {int(phase)} of {barrier.name}")

    def async_load(self, source: TensorDescriptor, where: Sequence[Any], barrier: Barrier, tile: Tile) -> None:
        def load() -> None:
            tile.data.zero_()
            found = _box(source, where)
            tile.data[tuple(slice(0, size) for size in found.shape)] = found
            barrier.change(size_bytes=-tile.data.nbytes)

        tile.data.fill_(torch.nan)
        self.machine.loads.append(load)
        self.machine.pause()

    def async_store(self, target: TensorDescriptor, where: Sequence[Any], tile: Tile) -> None:
        def store() -> None:
            box = _box(target, where)
            box.copy_(tile.data[tuple(slice(0, size) for size in box.shape)])

        assert not tile.unfenced, "a copy begins before the fence behind what was written"
        self.machine.running.stores.append(store)

    def store_wait(self, pendings: int) -> None:
        queue = self.machine.running.stores
        self.machine.pause(lambda: len(queue) <= pendings, "its stores")

    def fence_async_shared(self) -> None:
        for tile in self.tiles:
            tile.unfenced = False

    def warpgroup_mma(self, a: View | Tensor, b: View, acc: Tensor, *, use_acc: bool = True, is_async: bool) -> Product:
        product = Product()

        def multiply() -> None:
            left = a.read() if isinstance(a, View) else a.float()
            result = left @ b.read()
            product.result = result + acc if use_acc else result

        assert is_async
        self.machine.running.products.append(multiply)
        self.machine.pause()
        return product

    def warpgroup_mma_wait(self, num_outstanding: int, *, deps: Sequence[Product | Tensor]) -> Any:
        queue = self.machine.running.products
        self.machine.pause(lambda: len(queue) <= num_outstanding, "its products")
        values = tuple(dep.result if isinstance(dep, Product) else dep for dep in deps)
        assert all(value is not None for value in values), "the wait leaves a product under way that it gives out"
        return values if len(values) > 1 else values[0]

    def store(self, pointer: Pointer, value: Tensor, *, mask: Tensor) -> None:
        pointer.x.view(-1)[pointer.offsets[mask]] = value[mask]


def _box(descriptor: TensorDescriptor, where: Sequence[Any]) -> Tensor:
    """What there is of a box of global memory: rows beyond the end are cut off."""
    places = zip(where, descriptor.block_shape, strict=True)
    return descriptor.base[tuple(slice(int(start), int(start) + size) for start, size in places)]


def launch_on_model(
    kernel: JITFunction, grid: Sequence[int], *args: Any, on: Tensor, tuning: Any, seed: int = 0, **constants: Any
):
    """As `mpar.kernels._launch.launch`."""
    with torch.no_grad():
        for program in range(grid[0]):
            language = Language(Machine(seed + program), program)
            scope = dict(kernel.fn.__globals__)
            scope |= dict.fromkeys(("gl", "hopper", "mbarrier", "tma"), language)
            scope |= {"load_tile": language.async_load, "store_tile": language.async_store}
            for name, value in kernel.fn.__globals__.items():
                if isinstance(value, constexpr):
                    scope[name] = value.value
                elif isinstance(value, JITFunction):
                    scope[name] = types.FunctionType(value.fn.__code__, scope, name)
            ready = [_Source(x) if isinstance(x, TensorDescriptor) else Pointer(x) if isinstance(x, Tensor) else x for x in args]
            scope[kernel.fn.__name__](*ready, **constants, **tuning.blocks)


class _Source(TensorDescriptor):
    """A descriptor whose dtype is asked for, as in a kernel."""

    def __init__(self, descriptor: TensorDescriptor) -> None:
        vars(self).update(vars(descriptor))

    @property
    def dtype(self) -> torch.dtype:
        return self.base.dtype
