"""One of four processes: runs a compiled function on DTensors and compares with the plain function.

usage: torchrun --nproc-per-node 4 jit_worker.py
"""

import torch
import torch.distributed as dist
from torch.distributed.tensor import distribute_tensor

import mpar
from mpar import Mesh, P, ops
from mpar.dtensor import from_placements, to_placements
from mpar.errors import ShardingError


def loss(params, x_BD):
    """Mean square of a two-layer network with dropout."""
    up_DF, down_FD = params
    hidden_BF = ops.dropout(torch.relu(x_BD @ up_DF), 0.25, (1, 2))
    return ((hidden_BF @ down_FD) ** 2).mean()


def main():
    """Values and gradients equal the plain function; results are DTensors; a wrong placement is an error on every rank."""
    dist.init_process_group("gloo")
    mesh = Mesh(fsdp=2, tp=2)
    device_mesh = mesh.bind()
    torch.manual_seed(0)
    up_DF, down_FD, x_BD = (torch.randn(8, 8, dtype=torch.float64) for _ in range(3))
    specs = ((P("fsdp", "tp"), P("tp", "fsdp")), P("fsdp"))
    step = mpar.jit(mpar.value_and_grad(loss), mesh=mesh, in_specs=specs, out_specs=(P(), specs[0]))

    def place(x, spec):
        return distribute_tensor(x, device_mesh, to_placements(spec, mesh))

    args = ((place(up_DF, specs[0][0]), place(down_FD, specs[0][1])), place(x_BD, specs[1]))
    for _ in range(2):  # the second call runs what the first compiled
        value, grads = step(*args)
    expected, expected_grads = mpar.value_and_grad(loss)((up_DF, down_FD), x_BD)
    torch.testing.assert_close(value.full_tensor(), expected)
    for grad, spec, plain in zip(grads, specs[0], expected_grads, strict=True):
        assert from_placements(grad.placements, mesh, 2) == spec
        torch.testing.assert_close(grad.full_tensor(), plain)
    try:
        step((args[0][1], args[0][0]), x_BD)
    except ShardingError as error:
        assert "argument 0.0 (8, 8) is placed by P('tp', 'fsdp'), P('fsdp', 'tp') was expected" in str(error), error
        assert "argument 1 (8, 8) is a plain tensor" in str(error), error
    else:
        raise AssertionError("a wrong placement was accepted")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
