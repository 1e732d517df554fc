"""One of four processes: runs a compiled function on DTensors and compares with the plain function.

usage: torchrun --nproc-per-node 4 jit_worker.py
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor import distribute_tensor

import mpar
from mpar import Mesh, P, ops
from mpar.dtensor import from_placements, to_placements
from mpar.errors import ShardingError
from mpar.sharding import collectives_of


def loss(params, x_BD):
    """Mean square of a two-layer network with dropout."""
    up_DF, down_FD = params
    hidden_BF = ops.dropout(torch.relu(x_BD @ up_DF), 0.25, (1, 2))
    return ((hidden_BF @ down_FD) ** 2).mean()


def scaled(scales, x_BD):
    """A function of small parameters, each of which has a gradient that is a sum over the batch."""
    return ((x_BD * scales[0] + scales[1]).tanh() * scales[2]).sum()


def crosses(x_BD):
    """Ops along sharded dims, whose local programs reduce, gather, and know which rank they are on."""
    shifted = F.pad(x_BD, (0, 0, 1, 0))[:-1] + x_BD.roll(-1, 1)
    found = x_BD.argmax(0).double() + (x_BD > 0).any(0) + x_BD[3] + x_BD.gather(0, x_BD.argmax(0, keepdim=True))[0]
    return x_BD.softmax(0).cumsum(1) + x_BD.std(1, keepdim=True) + found + shifted + x_BD.prod(0)


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
    crossing = mpar.jit(mpar.value_and_grad(lambda x: crosses(x).sin().sum()), mesh=mesh, in_specs=P("fsdp", "tp"))
    value, grad = crossing(place(x_BD, P("fsdp", "tp")))
    expected, expected_grad = mpar.value_and_grad(lambda x: crosses(x).sin().sum())(x_BD)
    torch.testing.assert_close(value.full_tensor(), expected)
    torch.testing.assert_close(grad.full_tensor(), expected_grad)
    scales = [torch.randn(8, dtype=torch.float64) for _ in range(3)]
    small = mpar.jit(mpar.value_and_grad(scaled), mesh=mesh, in_specs=(P(), P("fsdp")))
    value, grads = small([place(x, P()) for x in scales], args[1])
    expected, expected_grads = mpar.value_and_grad(scaled)(scales, x_BD)
    for found, plain in zip((value, *grads), (expected, *expected_grads), strict=True):
        torch.testing.assert_close(found.full_tensor(), plain)
    (executable,) = small._ready.values()
    assert [found.op for found in collectives_of(executable.ranked)] == ["all_reduce"], "sums of gradients are one message"
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
