"""Factors: how much longer ops other than products and attention take than their FLOPs and bytes say, and their fixed times."""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from mpar.hardware import Hardware
from mpar.ir import OpUse, op_time
from mpar.kernels import implementation
from mpar.measure._timing import in_turn
from mpar.ops import PRIMITIVES

__all__ = ["measure_factors"]

_HEADS = 8
_LEAST_FACTOR = 0.01  # of an op whose work is not seen beside its fixed time


@dataclass(frozen=True)
class _Sizes:
    """Those of the operands that ops are measured with."""

    rows: int
    length: int
    width: int
    vocabulary: int


_SMALL = _Sizes(1, 2, 32, 16)
_USUAL = {"cpu": _Sizes(4, 256, 256, 2048), "cuda": _Sizes(4, 256, 4096, 2048)}


def measure_factors(
    device: torch.device, rates: Hardware, seconds: Callable[[Callable[[], object]], float]
) -> Iterator[tuple[str, float]]:
    """(entry of a table of the profile, its value): `op_launch_s.rope` is the time of a call that has hardly any work;
    `op_factors.rope` is that of the work of a usual call over what `rates` predict, on activations of a small model; on a GPU, of
    a large one."""
    work = replace(rates, launch_s=0.0)
    for name, (operands, params) in _calls(device, _SMALL).items():
        launch_s = seconds(_call(name, operands, params))
        yield f"op_launch_s.{name}", launch_s
        operands, params = _calls(device, _USUAL[device.type])[name]
        primitive = PRIMITIVES[name]
        assert primitive.cost is not None
        cost = primitive.cost(*operands, **params)
        use = OpUse(cost.flops, cost.bytes, "float32", transcendentals=cost.transcendentals)
        usual_s = seconds(in_turn(functools.partial(_fresh_call, name, device), device))
        yield f"op_factors.{name}", max((usual_s - launch_s) / op_time(use, work), _LEAST_FACTOR)


def _call(name: str, operands: Sequence[Any], params: dict[str, Any]) -> Callable[[], object]:
    run = implementation(name)  # as compiled code calls it
    return lambda: run(*operands, **params)


def _fresh_call(name: str, device: torch.device) -> Callable[[], object]:
    return _call(name, *_calls(device, _USUAL[device.type])[name])


def _calls(device: torch.device, sizes: _Sizes) -> dict[str, tuple[Sequence[Any], dict[str, Any]]]:
    """The operands and parameters of one call of each op that is measured, by its name."""

    def make(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device)

    tokens, width, vocabulary = (sizes.rows, sizes.length), sizes.width, sizes.vocabulary
    x, y, z, weight, bias = *(make(*tokens, width) for _ in range(3)), make(width), make(width)
    heads, angles = x.view(*tokens, _HEADS, -1), make(1, sizes.length, width // _HEADS // 2)
    table, logits, loss = make(vocabulary, width), make(*tokens, vocabulary), make(*tokens)
    labels = torch.randint(vocabulary, tokens, device=device)
    eps, tanh, start = {"eps": 1e-5}, {"approximate": "tanh"}, {"start": 0}
    loss_params = {"ignore_index": -100, "vocab_size": vocabulary, "start": 0, "label_smoothing": 0.0}
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
        "embedding_bwd": ((labels, x), {**start, "num_rows": vocabulary}),
        "sum_squares": ((table,), {}),
        "adamw_many": (
            (*states, rate, step, scale, None, []),
            {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1},
        ),
    }
