"""Triton's interpreter, corrected to the arithmetic of a GPU. Uncorrected, its results in bfloat16 and float8 are silently wrong.

It keeps a bfloat16 number as its bits, in a uint16. Products of matrices then multiply bits, additions add bits, and a cast from
float32 cuts off instead of rounding to nearest even. With the corrections products widen their operands, casts round, and other
arithmetic on narrow floats is refused, since kernels widen first. Tensors on the CPU are used in place; uncorrected, the
interpreter copies whole storages onto themselves.
"""

from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

__all__ = ["install"]

NARROW = {tl.bfloat16: torch.bfloat16, tl.float8e4nv: torch.float8_e4m3fn, tl.float8e5: torch.float8_e5m2}
BITS = {torch.bfloat16: np.uint16, torch.float8_e4m3fn: np.uint8, torch.float8_e5m2: np.uint8}
WIDE = (tl.float32, tl.float16)
Handle, Builder = interpreter.TensorHandle, interpreter.InterpreterBuilder


def install() -> None:
    """Correct the interpreter of this process. Calling it again does no harm."""
    if getattr(Builder, "corrected", False):
        return
    Builder.corrected = True
    np.seterr(all="ignore")  # as on a GPU, no warnings of overflow: tests look at the results of infinities
    cast, dot, binary, constant = Builder.cast_impl, Builder.create_dot, Builder.binary_op, Builder.get_fp32

    def cast_impl(self: Any, source: Any, target: Any) -> Any:
        before, after = source.dtype.scalar, target.scalar
        if before in NARROW and after in WIDE:
            return Handle(widen(source).astype(np.float16 if after == tl.float16 else np.float32), after)
        if after in NARROW and before in WIDE:
            return Handle(narrow(source.data, NARROW[after]), after)
        if before in NARROW or after in NARROW:
            raise TypeError(f"cast from {before} to {after}: go through float32")
        return cast(self, source, target)

    def create_fp_to_fp(self: Any, source: Any, target: Any, rounding_mode: Any) -> Any:
        return cast_impl(self, source, target)

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        wide = [Handle(widen(x), tl.float32) if x.dtype.scalar in NARROW else x for x in (a, b)]
        return dot(self, *wide, *rest)

    def binary_op(self: Any, left: Any, right: Any, op: Any) -> Any:
        if left.dtype.scalar in NARROW:
            raise TypeError(f"arithmetic on {left.dtype.scalar}: widen to float32 first")
        return binary(self, left, right, op)

    def get_bf16(self: Any, value: float) -> Any:
        return cast_impl(self, constant(self, value), tl.bfloat16)

    Builder.cast_impl, Builder.create_dot, Builder.binary_op, Builder.get_bf16 = cast_impl, create_dot, binary_op, get_bf16
    Builder.create_fp_to_fp = create_fp_to_fp
    patch_tensor = interpreter._patch_lang_tensor

    def patch_lang_tensor(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        tensor.__index__ = lambda x: int(x.handle.data.item())  # for bounds of loops; NumPy warns of how Triton does it

    interpreter._patch_lang_tensor = patch_lang_tensor
    interpreter.GridExecutor._restore_args_dev = lambda self, *_: None  # the kernel wrote into the tensors themselves


def widen(handle: Any) -> np.ndarray:
    """The numbers behind the bits of a narrow float, in float32."""
    dtype = NARROW[handle.dtype.scalar]
    bits = np.ascontiguousarray(handle.data).view(np.int16 if BITS[dtype] is np.uint16 else np.uint8)
    return torch.from_numpy(bits).view(dtype).float().numpy().reshape(np.shape(handle.data))


def narrow(data: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """The bits of `data`, rounded to nearest even."""
    wide = torch.from_numpy(np.array(data, dtype=np.float32, ndmin=1)).to(dtype)
    return wide.view(torch.int16 if BITS[dtype] is np.uint16 else torch.uint8).numpy().view(BITS[dtype]).reshape(np.shape(data))
