"""Kernels of one's own: declared for a primitive, chosen like mpar's, and compared with the primitive's meaning."""

import inspect
from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from mpar.errors import KernelError
from mpar.kernels._arch import ARCHITECTURES
from mpar.kernels._catalogue import CATALOGUE, Implementation, Supports, floating, no_workspace
from mpar.kernels._eager import eager
from mpar.ops import Primitive
from mpar.testing import TOLERANCES, relative_error

__all__ = ["check_kernels", "def_kernel"]


def def_kernel(
    primitive: Primitive,
    module: str,
    function: str | None = None,
    *,
    supports: Supports = floating,
    workspace: Callable[..., int] = no_workspace,
) -> None:
    """Declare that `function` of `module`, by default the one called like the primitive, carries out a primitive on a GPU.

    It has the operands, parameters and results of the primitive's `def_impl`. The module is imported only where the kernel runs,
    so that a machine without Triton can compile programs that use it. Calls that nothing declared supports take the reference.

    supports:  `supports(arch, *operands, **params)`: why the kernel cannot carry out a call on the chip `arch`, such as
               "sm_90"; None if it can. Operands need no data. By default it takes float32, float16 and bfloat16.
    workspace: `workspace(*operands, **params)`: bytes that the function allocates and frees within a call.

    Raises KernelError if the primitive has a kernel already, or if `supports` cannot be called like that.
    """
    if not isinstance(primitive, Primitive):
        raise KernelError(f"def_kernel: {primitive!r} is not a primitive; pass the object that Primitive(...) made")
    name = primitive.name
    if name in CATALOGUE:
        raise KernelError(f"primitive {name} has a kernel already, {CATALOGUE[name][0].function} of {CATALOGUE[name][0].module}")
    for label, rule, first in (("supports", supports, ["sm_90"]), ("workspace", workspace, [])):
        try:
            inspect.signature(rule).bind(*first, *primitive.operands, **dict.fromkeys(primitive.params))
        except TypeError as error:
            words = ", ".join([*(["arch"] if first else []), *primitive.operands, *(f"{key}=" for key in primitive.params)])
            raise KernelError(f"the `{label}` of a kernel for {name} cannot be called as {label}({words}): {error}") from None
    CATALOGUE[name] = (Implementation("triton", module, function or name, supports, workspace),)
    primitive.def_impl_on("CUDA", eager(name))


def check_kernels(
    primitive: Primitive, operands: Sequence[object], params: Mapping[str, object] | None = None, *, rtol: float | None = None
) -> tuple[str, ...]:
    """Compare every kernel of a primitive with its meaning in float64, on these operands. Returns the names of the kernels.

    It runs on the device of the operands: a GPU, or the CPU where TRITON_INTERPRET=1 was set before Triton was imported.
    rtol: the largest relative error (Frobenius) of each result; None: by the dtype of the result.

    Raises KernelError, with every difference, and for a primitive without a kernel.
    """
    params = dict(params or {})
    if primitive.name not in CATALOGUE:
        raise KernelError(f"primitive {primitive.name} has no kernel; mpar.kernels.def_kernel declares one")
    expected = _results(primitive.meaning(*map(_wide, operands), **params))
    problems = []
    for kernel in CATALOGUE[primitive.name]:
        refused = {reason for arch in ARCHITECTURES if (reason := kernel.supports(arch, *operands, **params)) is not None}
        problems += [f"{kernel.name}: it does not support this call: {reason}" for reason in sorted(refused)]
        problems += [] if refused else _differences(primitive, kernel, operands, params, expected, rtol)
    if problems:
        raise KernelError(f"kernels of {primitive.name} do not reproduce its meaning:\n  " + "\n  ".join(problems))
    return tuple(kernel.name for kernel in CATALOGUE[primitive.name])


def _differences(
    primitive: Primitive,
    kernel: Implementation,
    operands: Sequence[object],
    params: dict,
    expected: tuple[Tensor, ...],
    rtol: float | None,
) -> list[str]:
    """A line for each result in which the kernel differs from the meaning."""
    like = _results(primitive.abstract(*operands, **params)) if primitive.abstract else expected
    try:
        actual = _results(kernel.load()(*operands, **params))
    except Exception as error:  # of the user's code
        return [f"{kernel.name}: {kernel.function} of {kernel.module} raised {type(error).__name__}: {str(error)[:300]}"]
    if len(actual) != len(expected):
        return [f"{kernel.name}: it returns {len(actual)} results, the primitive has {len(expected)}"]
    lines = []
    for name, x, meant, shape in zip(primitive.results, actual, expected, like, strict=True):
        if x.shape != shape.shape or x.dtype != shape.dtype:
            lines.append(f"{kernel.name}: {name} is {x.dtype} {tuple(x.shape)}, and must be {shape.dtype} {tuple(shape.shape)}")
            continue
        difference, bound = relative_error(x, meant), TOLERANCES[x.dtype] if rtol is None else rtol
        if not difference <= bound:
            lines.append(f"{kernel.name}: {name} {tuple(x.shape)} has a relative error of {difference:.2e}, above {bound:.1e}")
    return lines


def _results(results: object) -> tuple[Tensor, ...]:
    return tuple(results) if isinstance(results, (list, tuple)) else (results,)  # type: ignore[return-value]


def _wide(x: object) -> object:
    """An operand in float64, if it is floating point."""
    if isinstance(x, (list, tuple)):
        return [_wide(item) for item in x]
    return x.double() if isinstance(x, Tensor) and x.is_floating_point() else x
