"""AdamW: master weights and moments in float32; gradients, and the copies of weights that a step computes with, in bfloat16."""

import torch
from torch import Tensor

from bench.kernels._row import Built, Row, Setting, Variant, attempt, of_copy
from mpar.kernels import implementation
from tools.kernel_shapes import ADAMW

__all__ = ["ROWS"]

BETA1, BETA2, EPS, DECAY, LR = 0.9, 0.95, 1e-8, 0.1, 3e-4
CHECKED = 4096


def update(setting: Setting, *, elements: int, tensors: int) -> Built:
    """One update of all tensors, in place. Every call goes on from the last one, so only the first call is compared."""
    sizes = [elements // tensors] * tensors
    grads = [setting.normal(size) for size in sizes]
    params, ms = ([setting.normal(size, dtype=torch.float32) for size in sizes] for _ in range(2))
    vs = [setting.normal(size, dtype=torch.float32).square_() for size in sizes]
    lr, step, scale = (torch.tensor(x, device=setting.device) for x in (LR, 3.0, 0.5))
    params_ = {"beta1": BETA1, "beta2": BETA2, "eps": EPS, "weight_decay": DECAY}

    copies = [torch.empty(size, dtype=torch.bfloat16, device=setting.device) for size in sizes]

    def ours() -> list[Tensor]:
        operands = (params, grads, ms, vs, lr, step, scale, None, copies)
        new_params, _, _, new_copies = implementation("adamw_many", "triton")(*operands, **params_)
        return [new_params[0], new_copies[0]]

    first = [params[0], grads[0], ms[0], vs[0]]
    small = [x[:CHECKED].double() for x in first]  # copies: the first call overwrites the operands
    own = [x.clone() for x in params]
    peers: dict[str, Variant | str] = {
        "torch fused, float32 gradients": attempt(lambda: _torch_fused(own, grads, (ms, vs), setting))
    }
    moved = 2 * sum(x.nbytes for x in (*params, *ms, *vs)) + sum(x.nbytes for x in (*grads, *copies))

    def reference() -> list[Tensor]:
        new = _formula(*small)
        return [new, new]

    return Built(Variant(ours, _slices), peers, reference, moved)


def _torch_fused(params: list[Tensor], grads: list[Tensor], moments: tuple[list[Tensor], ...], setting: Setting) -> Variant:
    leaves = [torch.nn.Parameter(x) for x in params]
    for leaf, grad in zip(leaves, grads, strict=True):
        leaf.grad = grad.float().mul_(0.5)
    optimizer = torch.optim.AdamW(leaves, lr=LR, betas=(BETA1, BETA2), eps=EPS, weight_decay=DECAY, fused=True)
    for leaf, m, v in zip(leaves, *moments, strict=True):
        state = {"step": torch.tensor(2.0, device=setting.device), "exp_avg": m.clone(), "exp_avg_sq": v.clone()}
        optimizer.state[leaf] = state

    def run() -> list[Tensor]:
        optimizer.step()
        return [leaves[0].detach()]

    return Variant(run, _slices)


def _formula(param: Tensor, grad: Tensor, m: Tensor, v: Tensor) -> Tensor:
    grad = 0.5 * grad
    m, v = BETA1 * m + (1 - BETA1) * grad, BETA2 * v + (1 - BETA2) * grad**2
    update = (m / (1 - BETA1**3)) / ((v / (1 - BETA2**3)).sqrt() + EPS)
    return param * (1 - LR * DECAY) - LR * update


def _slices(tensors: list[Tensor]) -> list[Tensor]:
    return [x[:CHECKED].clone() for x in tensors]


ROWS = [
    Row(
        21,
        "adamw",
        update,
        ADAMW,
        [of_copy(0.90)],
        dtype="float32, bfloat16 gradients and copies",
    )
]
