"""One of two processes: runs compiled functions with loops and branches on DTensors and compares with Python's.

usage: torchrun --nproc-per-node 2 control_worker.py
"""

import torch
import torch.distributed as dist
from torch.distributed.tensor import distribute_tensor

import mpar
from mpar import Mesh
from mpar.dtensor import to_placements
from tests.sharding.test_control import CASES, LOOPS, made


def main():
    """The values and gradients of a scan with messages in its steps, a choice, and a loop until convergence."""
    dist.init_process_group("gloo")
    mesh = Mesh(dp=1, tp=2)
    device_mesh = mesh.bind()

    def make_tensor(shape, dtype):
        return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=dtype)

    def place(args, specs):
        remaining = iter(specs)
        return mpar.tree.map_leaves(lambda x: distribute_tensor(x, device_mesh, to_placements(next(remaining), mesh)), args)

    for name in ("gru", "cond", "converged"):
        fn, reference, shapes, specs = {**CASES, **LOOPS}[name]
        if name in CASES:
            fn, reference = mpar.value_and_grad(fn), mpar.value_and_grad(reference)
        args = tuple(made(shape, make_tensor) for shape in shapes)
        step = mpar.jit(fn, mesh=mesh, in_specs=specs)
        placed = place(args, step.lower(*args).ranked.in_specs)
        found, expected = mpar.tree.leaves(step(*placed)), mpar.tree.leaves(reference(*args))
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a.full_tensor(), b)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
