"""The same functions in JAX, partitioned by XLA for the same meshes and specs: what each device sends."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from torch import Tensor

from bench._result import Json
from bench.functions._case import MESHES, Function
from bench.functions._hlo import sent_by
from bench.functions._run import Part, parts_of
from bench.functions._twins import TWINS
from mpar import Mesh, P, testing, tree
from mpar.tree import Tree

__all__ = ["TWINS", "DiffersFromTorch", "check_twin", "start_devices", "traffic"]


class DiffersFromTorch(Exception):
    """A function in JAX does not compute what its twin in torch does, so that their bytes cannot be compared."""


def start_devices() -> None:
    """Give this process four devices and float64. Nothing may have run on a device before."""
    jax.config.update("jax_num_cpu_devices", 4)
    jax.config.update("jax_enable_x64", True)


def traffic(function: Function, mesh: str) -> dict[str, dict[str, Json]]:
    """For each part of a function: the bytes that each device sends, and how many values each kind of collective carries."""
    return {part.name: _traffic(function, part, MESHES[mesh][0]) for part in parts_of(function, mesh)}


def check_twin(function: Function) -> None:
    """Raises DiffersFromTorch unless both compute the same value and gradient."""
    for part in parts_of(function, "dp4"):
        actual = jax.jit(_in_jax(function, part))(*_map(_as_array, part.args))
        expected = part.reference(*part.args)
        have = [torch.from_numpy(np.array(x)) for x in jax.tree.leaves(actual)]
        want = tree.leaves(expected)
        if isinstance(expected, dict):  # JAX sorts the keys of a dict
            want = [expected[key] for key in sorted(expected)]
        for x, y in zip(have, want, strict=True):
            try:
                testing.assert_close(x.double(), y.double(), name=f"{part.name} of {function.name}")
            except AssertionError as error:
                raise DiffersFromTorch(str(error)) from error


def _traffic(function: Function, part: Part, mesh: Mesh) -> dict[str, Json]:
    sizes = tuple(mesh.sizes.values())
    devices = jax.make_mesh(sizes, mesh.axes, axis_types=(AxisType.Auto,) * len(sizes))

    def placed(spec: P) -> NamedSharding:
        return NamedSharding(devices, PartitionSpec(*(dim or None for dim in spec.dims)))

    compiled = (
        jax.jit(
            _in_jax(function, part),
            in_shardings=_map(placed, part.in_specs),
            out_shardings=None if part.out_specs is None else _map(placed, part.out_specs),
        )
        .lower(*_map(lambda x: jax.ShapeDtypeStruct(x.shape, _as_array(x).dtype), part.args))
        .compile()
    )
    sent = sent_by(compiled.as_text())
    return {"sent": round(sum(each.bytes for each in sent)), "collectives": dict(Counter(each.op for each in sent))}


def _in_jax(function: Function, part: Part) -> Callable[..., Any]:
    twin = TWINS[function.name]
    if part.name == "forward":
        return twin
    varies = [arg.varies for arg in function.args]

    def scalar(varying: Any, others: Any) -> Any:
        sources = {True: iter(varying), False: iter(others)}
        result = twin(*(next(sources[each]) for each in varies))
        return sum(jnp.sin(x).sum() for x in jax.tree.leaves(result) if jnp.issubdtype(x.dtype, jnp.floating))

    return jax.value_and_grad(scalar)


def _as_array(x: Tensor) -> np.ndarray:
    return x.numpy()


def _map(fn: Callable[[Any], Any], values: Tree) -> Any:
    """`fn` of every leaf of nested tuples; specs are leaves."""
    return tuple(_map(fn, value) for value in values) if isinstance(values, tuple) else fn(values)
