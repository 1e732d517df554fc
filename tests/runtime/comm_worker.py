"""One of several processes: collectives of random tensors on both transports, against what `mpar.collectives` says they mean.

usage: torchrun --nproc-per-node N comm_worker.py [killed | apart]
"""

import itertools
import os
import random
import signal
import sys

import torch
import torch.distributed as dist

from mpar.collectives import combine
from mpar.errors import MeshError
from mpar.mesh import Mesh
from mpar.runtime import ProcessComm
from mpar.runtime.comm import _shared_memory as shared_memory

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


def call(comm, kind, xs, hows, n, **posted):
    """One message of the communicator, as generated code asks for it; with `posted=True` what `arrived` waits for."""
    x, how = (xs[0], hows[0]) if len(xs) == 1 else (xs, dict(hows[0]))
    if len(xs) > 1 and "dim" in how:
        how["dim"] = [h["dim"] for h in hows]
    out = getattr(comm, kind)(x, axes=AXES, size=n, **how, **posted)
    return [out] if len(xs) == 1 and not posted else out


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


def check_posted(comm, label):
    """Every case posted, up to four on their way at once, with collectives that are not posted and shifts between them."""
    n, rank, rng = dist.get_world_size(), dist.get_rank(), random.Random(11)
    under_way = []
    for number, (kind, parts, hows) in enumerate(cases(n)):
        mine, where = [column[rank] for column in parts], f"{label} posted {kind} {number}"
        expected = [combine(kind, column, **how)[rank] for column, how in zip(parts, hows, strict=True)]
        if number % 5 == 4:
            for y, want in zip(call(comm, kind, mine, hows, n), expected, strict=True):
                assert torch.equal(y, want), f"{where}, waited for at once"
        elif number % 7 == 6:
            columns = everybody((3, 2), torch.float32, n, number)
            posted = comm.shift([columns[rank]], axes=AXES, size=n)
            under_way.append((posted, [columns[rank]], [columns[rank - 1]], f"{label} shift {number}"))
        else:
            under_way.append((call(comm, kind, mine, hows, n, posted=True), mine, expected, where))
        while len(under_way) > number % 5:
            posted, sent, expected, where = under_way.pop(rng.randrange(len(under_way)))
            got = comm.arrived(posted, sent)
            assert all(map(torch.equal, got, expected)) and len(got) == len(expected), where


def posts(n, rng):
    """Messages to post, by turns along the ring and rows: (kind, parts by rank, how for each rank)."""
    for number in itertools.count():
        dtype = DTYPES[number % len(DTYPES)]
        if number % 2:
            shapes = [(3, 5), (7,), (2, 1, 4)][: 1 + number % 3]
            columns = [everybody(shape, dtype, n, 1000 * number + i) for i, shape in enumerate(shapes)]
            yield "shift", [list(xs) for xs in zip(*columns, strict=True)], [{}] * n
        else:
            sent = [[rng.randrange(4) for _ in range(n)] for _ in range(n)]  # by sender, then receiver; some are none
            received = [[row[i] for row in sent] for i in range(n)]
            num_rows = None if number % 4 else 4 * n
            parts = [[everybody((sum(row) + 1, 6), dtype, n, number)[i]] for i, row in enumerate(sent)]
            hows = [
                {"sent": torch.tensor(row), "received": torch.tensor(column), "num_rows": num_rows}
                for row, column in zip(sent, received, strict=True)
            ]
            yield "exchange_rows", parts, hows


def arriving(kind, parts, hows):
    """What each rank is to get."""
    n = len(parts)
    if kind == "shift":
        return [parts[i - 1] for i in range(n)]
    results = []
    for i in range(n):
        rows = []
        for (x,), how in zip(parts, hows, strict=True):
            first = int(how["sent"][:i].sum())
            rows.append(x[first : first + int(how["sent"][i])])
        rows = torch.cat(rows)
        missing = 0 if hows[i]["num_rows"] is None else hows[i]["num_rows"] - rows.shape[0]
        results.append([torch.cat([rows, rows.new_zeros(missing, rows.shape[1])])])
    return results


def check_posts(comm, label):
    """Up to six messages on their way at once, which arrive in any order: more than have room in shared memory."""
    n, rank, rng = dist.get_world_size(), dist.get_rank(), random.Random(7)
    under_way = []
    for number, (kind, parts, hows) in zip(range(60), posts(n, rng), strict=False):
        mine, how = parts[rank], dict(hows[rank])
        counts = [how.pop("sent"), how.pop("received")] if kind == "exchange_rows" else []
        if kind == "shift" and number % 3 == 0:
            mine = [x.T.contiguous().T if x.ndim == 2 else x for x in mine]
        posted = getattr(comm, kind)(mine, *counts, axes=AXES, size=n, **how)
        under_way.append((posted, mine, arriving(kind, parts, hows)[rank], f"{label} {kind} {number}"))
        while len(under_way) > (number * 5) % 7 % 6:
            posted, mine, expected, where = under_way.pop(rng.randrange(len(under_way)))
            for value, want in zip(comm.arrived(posted, mine), expected, strict=True):
                assert value.dtype == want.dtype and torch.equal(value, want), where
    for posted, mine, expected, where in under_way:
        for value, want in zip(comm.arrived(posted, mine), expected, strict=True):
            assert torch.equal(value, want), where


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
        assert "on other machines" in str(error)
    else:
        raise AssertionError("ranks of different machines cannot share memory")


def together():
    """Both transports; then buffers so small that most messages need several rounds."""
    mesh = Mesh(tp=dist.get_world_size())
    check(ProcessComm(mesh, [AXES], transport="backend"), "backend")
    check(ProcessComm(mesh, [AXES], transport="shared"), "shared")
    for transport in ("backend", "shared"):
        check_posted(ProcessComm(mesh, [AXES], transport=transport), transport)
    for transport, longest in (("backend", 0), ("shared", 0), ("shared", 2048)):
        check_posts(ProcessComm(mesh, [AXES], transport=transport, posted={AXES: longest}), f"posted {transport} {longest}")
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
