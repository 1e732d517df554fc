"""AdamW: master weights and moments in float32, gradients in bfloat16."""

import torch
from torch import Tensor

from bench.kernels._row import Built, Row, Setting, Variant, of_copy
from mpar.kernels import implementation

__all__ = ["ROWS"]

BETA1, BETA2, EPS, DECAY, LR = 0.9, 0.95, 1e-8, 0.1, 3e-4
CHECKED = 4096


def update(setting: Setting, *, elements: int, tensors: int) -> Built:
    """One update of all tensors, which are overwritten: every call moves on, so the first one is what is compared."""
    sizes = [elements // tensors] * tensors
    grads = [setting.normal(size) for size in sizes]
    params, ms = ([setting.normal(size, dtype=torch.float32) for size in sizes] for _ in range(2))
    vs = [setting.normal(size, dtype=torch.float32).square_() for size in sizes]
    lr, step, scale = (torch.tensor(x, device=setting.device) for x in (LR, 3.0, 0.5))
    params_ = {"beta1": BETA1, "beta2": BETA2, "eps": EPS, "weight_decay": DECAY}

    def ours() -> list[Tensor]:
        return implementation("adamw_many", "triton")(params, grads, ms, vs, lr, step, scale, **params_)[0]

    first = [params[0], grads[0], ms[0], vs[0]]
    small = [x[:CHECKED].double() for x in first]  # copies: the first call overwrites the operands
    own = [x.clone() for x in params]
    peers: dict[str, Variant | str] = {"torch fused, float32 gradients": _torch_fused(own, grads, (ms, vs), setting)}
    moved = sum(2 * p.nbytes + 2 * m.nbytes + 2 * v.nbytes + g.nbytes for p, m, v, g in zip(params, ms, vs, grads, strict=True))
    return Built(Variant(ours, _slices), peers, lambda: [_formula(*small)], moved)


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
        return [leaf.detach() for leaf in leaves]

    return Variant(run, _slices)


def _formula(param: Tensor, grad: Tensor, m: Tensor, v: Tensor) -> Tensor:
    grad = 0.5 * grad
    m, v = BETA1 * m + (1 - BETA1) * grad, BETA2 * v + (1 - BETA2) * grad**2
    update = (m / (1 - BETA1**3)) / ((v / (1 - BETA2**3)).sqrt() + EPS)
    return param * (1 - LR * DECAY) - LR * update


def _slices(params: list[Tensor]) -> list[Tensor]:
    return [params[0][:CHECKED].clone()]


ROWS = [
    Row(
        21,
        "adamw",
        update,
        {"elements": 1_000_000_000, "tensors": 4},
        {"elements": 96, "tensors": 2},
        [of_copy(0.90)],
        dtype="float32 with bfloat16 gradients",
    )
]
