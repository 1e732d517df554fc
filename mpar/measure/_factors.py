"""Factors: by how much ops other than products and attention take longer than their FLOPs and bytes say."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from mpar.hardware import Hardware
from mpar.ir import OpUse, op_time
from mpar.kernels import implementation
from mpar.measure._timing import in_turn
from mpar.ops import PRIMITIVES

__all__ = ["measure_factors"]

_ROWS, _LENGTH, _WIDTH, _HEADS, _VOCABULARY = 4, 256, 256, 8, 2048


def measure_factors(
    device: torch.device, rates: Hardware, seconds: Callable[[Callable[[], object]], float]
) -> Iterator[tuple[str, float]]:
    """(name of an op, its seconds over those that `rates` predict), on activations of a small model; on a GPU, of a large one."""
    for name, (operands, params) in _calls(device).items():
        primitive = PRIMITIVES[name]
        assert primitive.cost is not None
        cost = primitive.cost(*operands, **params)
        use = OpUse(cost.flops, cost.bytes, "float32", transcendentals=cost.transcendentals)

        def make(name: str = name) -> Callable[[], object]:
            operands, params = _calls(device)[name]
            run = implementation(name)  # as compiled code calls it
            return lambda: run(*operands, **params)

        yield name, seconds(in_turn(make, device)) / op_time(use, rates)


def _calls(device: torch.device) -> dict[str, tuple[Sequence[Any], dict[str, Any]]]:
    """The operands and parameters of one call of each op that is measured, by its name."""
    width = _WIDTH if device.type == "cpu" else 16 * _WIDTH

    def make(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device)

    x, y, z, weight, bias = *(make(_ROWS, _LENGTH, width) for _ in range(3)), make(width), make(width)
    heads, angles = x.view(_ROWS, _LENGTH, _HEADS, -1), make(1, _LENGTH, width // _HEADS // 2)
    table, logits, loss = make(_VOCABULARY, width), make(_ROWS, _LENGTH, _VOCABULARY), make(_ROWS, _LENGTH)
    labels = torch.randint(_VOCABULARY, (_ROWS, _LENGTH), device=device)
    eps, tanh, start = {"eps": 1e-5}, {"approximate": "tanh"}, {"start": 0}
    loss_params = {"ignore_index": -100, "vocab_size": _VOCABULARY, "start": 0, "label_smoothing": 0.0}
    states = [[torch.rand_like(table)] for _ in range(4)]
    rate, step, scale = (torch.tensor(value, device=device) for value in (1e-4, 1, 1.0))
    return {
        "rms_norm": ((x, weight), eps),
        "rms_norm_bwd": ((x, weight, y), eps),
        "add_rms_norm": ((x, y, weight), eps),
        "add_rms_norm_bwd": ((x, weight, y, z), eps),
        "layer_norm": ((x, weight, bias), eps),
        "layer_norm_bwd": ((x, weight, bias, y), eps),
        "swiglu": ((x, y), {}),
        "swiglu_bwd": ((x, y, z), {}),
        "geglu": ((x, y), tanh),
        "geglu_bwd": ((x, y, z), tanh),
        "rope": ((heads, angles, angles), {"interleaved": False}),
        "cross_entropy": ((logits, labels), loss_params),
        "cross_entropy_bwd": ((logits, labels, loss, loss, None), loss_params),
        "embedding": ((labels, table), start),
        "embedding_bwd": ((labels, x), {**start, "num_rows": _VOCABULARY}),
        "sum_squares": ((table,), {}),
        "adamw_many": (
            (*states, rate, step, scale, None, []),
            {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1},
        ),
    }
