"""One of several processes: collectives of random tensors on both transports, against what `mpar.collectives` says they mean.

usage: torchrun --nproc-per-node N comm_worker.py [killed | apart]
"""

import itertools
import os
import pathlib
import signal
import sys

import torch
import torch.distributed as dist

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

from mpar.collectives import combine
from mpar.errors import MeshError
from mpar.mesh import Mesh
from mpar.program import _shared_memory as shared_memory
from mpar.program._comm import ProcessComm

AXES = ("tp",)
DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64)


def everybody(shape, dtype, n, seed):
    """What each rank holds: known to all, since all draw from one seed."""
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randn(shape, generator=generator) * 100).to(dtype) for _ in range(n)]


def cases(n):
    """(kind, [parts by rank, for each tensor of the message], how for each tensor)."""
    shapes = [(n, 3 * n, 5), (2 * n, n, 7 * n), (4 * n, n, 1)]
    seeds = itertools.count()
    for dtype in DTYPES:
        for kind, key in (("all_gather", "dim"), ("reduce_scatter", "dim")):
            for dims in ((0,), (1,), (0, 1, 0), (1, 0, 1)):
                parts = [everybody(shape, dtype, n, next(seeds)) for shape, _ in zip(shapes, dims, strict=False)]
                yield kind, parts, [{key: dim} for dim in dims]
        for op in ("sum", "max"):
            for sizes in (((),), ((1,),), ((n + 1, 3),), ((5,), (), (3, 7)), ((40, 1001),)):
                yield "all_reduce", [everybody(shape, dtype, n, next(seeds)) for shape in sizes], [{"op": op}] * len(sizes)
        for src, dst in ((0, 1), (1, 0), (2, 0), (1, 2)):
            yield "all_to_all", [everybody((n, 2 * n, 3 * n), dtype, n, next(seeds))], [{"src": src, "dst": dst}]


def call(comm, kind, xs, hows, n):
    """One message of the communicator, as generated code asks for it."""
    x, how = (xs[0], hows[0]) if len(xs) == 1 else (xs, dict(hows[0]))
    if len(xs) > 1 and "dim" in how:
        how["dim"] = [h["dim"] for h in hows]
    out = getattr(comm, kind)(x, axes=AXES, size=n, **how)
    return [out] if len(xs) == 1 else out


def check(comm, label):
    """Every case, contiguous and not; operands stay as they were, results own their storage."""
    n, rank = dist.get_world_size(), dist.get_rank()
    for number, (kind, parts, hows) in enumerate(cases(n)):
        mine = [column[rank] for column in parts]
        if number % 2:
            mine = [x.transpose(0, -1).contiguous().transpose(0, -1) if x.ndim > 1 else x for x in mine]
        before = [x.clone() for x in mine]
        got = call(comm, kind, mine, hows, n)
        for x, old, y, column, how in zip(mine, before, got, parts, hows, strict=True):
            expected = combine(kind, column, **how)[rank]
            where = f"{label} {kind} {how} {tuple(x.shape)} {x.dtype} on {n} ranks"
            assert y.dtype == expected.dtype and y.shape == expected.shape, where
            assert torch.equal(y, expected), where
            assert y.is_contiguous(), where
            assert torch.equal(x, old), f"{where}: the operand was changed"
            assert y.untyped_storage().data_ptr() != x.untyped_storage().data_ptr(), f"{where}: the result is the operand"
            held = y.untyped_storage().nbytes()
            own = sum(z.nbytes for z in got) if kind == "all_reduce" else y.nbytes
            assert held == own, f"{where}: the result holds {held} bytes for {own}"


def killed():
    """Rank 1 is killed while the others wait for it; rank 0 says what it was told, and its own error ends the launch."""
    mesh = Mesh(tp=dist.get_world_size())
    comm = ProcessComm(mesh, [AXES], transport="shared")
    comm.all_reduce(torch.ones(3), axes=AXES, op="sum", size=mesh.size)
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the launcher ends the others at once, but they are to find out themselves
    comm.all_reduce(torch.ones(3), axes=AXES, op="sum", size=mesh.size)


def apart():
    """Every rank is on a machine of its own: by default torch.distributed carries everything, asking for memory is an error."""
    rank, mesh = dist.get_rank(), Mesh(tp=dist.get_world_size())
    shared_memory.socket.gethostname = lambda: f"machine{rank}"
    check(ProcessComm(mesh, [AXES]), "apart")
    try:
        ProcessComm(mesh, [AXES], transport="shared")
    except MeshError as error:
        assert "reach other machines" in str(error)
    else:
        raise AssertionError("ranks of different machines cannot share memory")


def together():
    """Both transports; then buffers so small that most messages need several rounds."""
    mesh = Mesh(tp=dist.get_world_size())
    check(ProcessComm(mesh, [AXES], transport="backend"), "backend")
    check(ProcessComm(mesh, [AXES], transport="shared"), "shared")
    shared_memory.CAPACITY, shared_memory.DIRECT_BYTES = 512, 128
    check(ProcessComm(mesh, [AXES], transport="shared"), "shared in rounds")


def main():
    """Join the others, do what the argument says, leave together: a rank that leaves alone aborts in gloo's threads."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    if sys.argv[1:] == ["killed"]:
        killed()
    if sys.argv[1:] == ["apart"]:
        apart()
    else:
        together()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
