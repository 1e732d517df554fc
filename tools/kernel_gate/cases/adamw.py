"""AdamW over the parameters of two Llama blocks: with gradients of each dtype, a step that may be skipped, and copies."""

import torch

from mpar.kernels import implementation
from tools.kernel_gate._case import Case, Make
from tools.kernel_shapes import ADAMW_TENSORS

SCALARS = "a program looks up its tensors' addresses, 8 bytes each, and the scalars of the step"


def _update(make: Make, grad: torch.dtype, copy: torch.dtype | None, skips: bool) -> None:
    params, ms, vs = ([make(shape, torch.float32) for shape in ADAMW_TENSORS] for _ in range(3))
    grads = [make(shape, grad) for shape in ADAMW_TENSORS]
    copies = [] if copy is None else [make(shape, copy) for shape in ADAMW_TENSORS]
    one = make((), torch.float64).abs() + 1
    skip = one < 0 if skips else None
    hyper = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}
    moments = [v.abs() for v in vs]
    implementation("adamw_many", "triton")(params, grads, ms, moments, one * 1e-3, one, one, skip, copies, **hyper)


def _case(name: str, grad: torch.dtype, copy: torch.dtype | None = None, skips: bool = False) -> Case:
    return Case(f"adamw {name}", ("adamw",), lambda make: _update(make, grad, copy, skips), scalar_loads=SCALARS)


CASES = [
    _case("gradients float32", torch.float32),
    _case("gradients bfloat16", torch.bfloat16),
    _case("gradients bfloat16, copies bfloat16, skip", torch.bfloat16, torch.bfloat16, skips=True),
    _case("gradients float32, copies bfloat16, skip", torch.float32, torch.bfloat16, skips=True),
]
