"""Every private or unstable name of torch that mpar uses, in one place: to upgrade torch, edit this file.

Names that only the compiler needs are loaded when first used, so that a worker that runs a compiled program stays small.
"""

import contextlib
import ctypes
import functools
import importlib
import logging
import os
import struct
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import BuiltinFunctionType
from typing import Any, cast

import torch
from torch._ops import OpOverload
from torch.utils import _pytree as pytree

from mpar.errors import ConfigError

__all__ = [
    "OpOverload",
    "apart_from_the_trace",
    "checkpoint_disabled",
    "control_flow_called",
    "current_autograd_node",
    "data_checks",
    "defunctionalise",
    "flash_attention_cpu",
    "flash_attention_cpu_backward",
    "flex_attention_called",
    "functionalise",
    "functorch_transforms_active",
    "fused_adamw_",
    "grouped_mm",
    "has_cpp_compiler",
    "inductor_compile",
    "inductor_kernels_replaced",
    "is_amd",
    "is_functional",
    "last_autograd_node",
    "map_tensors",
    "no_torch_function",
    "onednn_has_bfloat16",
    "onednn_is_faster",
    "onednn_linear",
    "onednn_mm",
    "onednn_pack",
    "onednn_packs",
    "original_views",
    "outside_the_trace",
    "overload_of",
    "pytree",
    "quiet_errors",
    "split_graph",
    "storage_key",
    "traced_value",
    "unwrap_if_dead",
    "visible_keys",
    "was_written",
]

_NAMES = {"flex_attention_op": "flex_attention", "map_op": "map_impl", "no_score_change": "_identity"}
"""What torch calls a name, where this file calls it otherwise."""
_LAZY = {
    "DataDependentOutputException": "torch._subclasses.fake_tensor",
    "DynamicOutputShapeException": "torch._subclasses.fake_tensor",
    "FakeTensor": "torch._subclasses.fake_tensor",
    "FakeTensorMode": "torch._subclasses.fake_tensor",
    "FunctionalTensor": "torch._subclasses.functional_tensor",
    "FunctionalTensorMode": "torch._subclasses.functional_tensor",
    "TorchDispatchMode": "torch.utils._python_dispatch",
    "TorchFunctionMode": "torch.overrides",
    "UnsupportedFakeTensorException": "torch._subclasses.fake_tensor",
    "_core_aten_decompositions_post_autograd": "torch._decomp",
    "decomposition_table": "torch._decomp",
    "flex_attention_op": "torch._higher_order_ops.flex_attention",
    "cond_op": "torch._higher_order_ops.cond",
    "get_current_meta": "torch.fx.traceback",
    "get_proxy_mode": "torch.fx.experimental.proxy_tensor",
    "make_fx": "torch.fx.experimental.proxy_tensor",
    "map_op": "torch._higher_order_ops.map",
    "no_score_change": "torch.nn.attention.flex_attention",
    "preserve_node_meta": "torch.fx.traceback",
    "scan_op": "torch._higher_order_ops.scan",
    "while_loop_op": "torch._higher_order_ops.while_loop",
}

_COMPILER_LINES = 12  # the last ones that a compiler prints
data_checks = frozenset({torch.ops.aten._linalg_check_errors.default, torch.ops.aten._assert_async.msg})
"""Ops without a result, which raise an error for some data: compiled functions do without them."""
flash_attention_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
flash_attention_cpu_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
fused_adamw_ = torch._fused_adamw_
grouped_mm = torch._grouped_mm
map_tensors = pytree.tree_map
"""`map_tensors(fn, tree)`: the same tree with `fn` applied to what is at its leaves, which need not be tensors."""
no_torch_function: Any = torch._C._disabled_torch_function_impl
"""The `__torch_function__` of a class of tensors that only looks at ops."""
functorch_transforms_active = torch._C._are_functorch_transforms_active
unwrap_if_dead = torch._C._functorch.unwrap_if_dead
"""The tensor without the wrappers of transforms of `torch.func` that have ended."""


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), _NAMES.get(name, name))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@functools.cache
def onednn_is_faster() -> bool:
    """Whether oneDNN multiplies matrices of float32 faster on this CPU than MKL, which torch.mm calls: for a CPU of AMD, MKL does
    not take the kernels that it has for AVX-512."""
    if not (torch.backends.mkldnn.is_available() and torch.backends.mkl.is_available()):
        return False
    return torch.backends.cpu.get_cpu_capability() == "AVX512" and is_amd()


def is_amd() -> bool:
    """Whether this CPU is one of AMD, for which MKL does not take all kernels that it has."""
    try:
        return "AuthenticAMD" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False


def onednn_packs(dtype: torch.dtype) -> bool:
    """Whether products with a matrix in the blocks of oneDNN are faster on this machine: in bfloat16, if its CPU computes so."""
    return dtype == torch.bfloat16 and onednn_has_bfloat16()


@functools.cache
def onednn_has_bfloat16() -> bool:
    """Whether oneDNN multiplies matrices of bfloat16 on this CPU; where it does not, torch.mm takes several times as long as of
    float32."""
    return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def onednn_pack(matrix: torch.Tensor) -> torch.Tensor:
    """A matrix (columns, inner) in the blocks of oneDNN, which no other op reads."""
    return torch.ops.mkldnn._reorder_linear_weight(matrix.contiguous(), 1)  # 1: for so many rows, which changes nothing


def onednn_mm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """`torch.mm(a, b)` by oneDNN, which is fast if the elements of a row of `a` are neighbours. Inductor calls it as it is."""
    return _onednn_mm(a, b) if type(a) is torch.Tensor else torch.ops.mpar_products.onednn_mm(a, b)


def _onednn_mm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.ops.mkldnn._linear_pointwise.default(a, b.t(), None, "none", [], "")


_PRODUCTS = torch.library.Library("mpar_products", "DEF")
_PRODUCTS.define("onednn_mm(Tensor a, Tensor b) -> Tensor")
_PRODUCTS.impl("onednn_mm", _onednn_mm, "CPU")
torch.library.register_fake("mpar_products::onednn_mm", torch.mm, lib=_PRODUCTS)


def onednn_linear(rows: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    """The product of rows (R, inner) with a matrix that was packed, (R, columns)."""
    return torch.ops.mkldnn._linear_pointwise.default(rows, blocks, None, "none", [], "")


def has_cpp_compiler() -> bool:
    """Whether Inductor finds the C++ compiler that it needs for a CPU: the one that CXX names, or g++."""
    builder: Any = importlib.import_module("torch._inductor.cpp_builder")
    try:
        builder.get_cpp_compiler()
    except RuntimeError:
        return False
    return True


def inductor_compile(
    graph: torch.nn.Module, operands: Sequence[torch.Tensor], opaque: Mapping[OpOverload, Callable[..., object]], facts: str
) -> Callable[..., tuple[torch.Tensor, ...]]:
    """A graph of torch's ops as a function that Inductor has compiled for operands with the shapes, strides and dtypes of these.

    opaque: for ops that torch does not look into, what to call, which spares the time of torch's dispatcher.
    facts: what the code depends on besides these. torch keeps it for later processes, and takes it again only for the same facts.
    The graph may overwrite its operands. The function checks nothing of what it is given. Raises ConfigError with what the C++
    compiler says if that fails, as it does where the headers of Python are not installed.
    """
    compiler: Any = importlib.import_module("torch._inductor")
    config: Any = importlib.import_module("torch._inductor.config")
    keys: Any = importlib.import_module("torch.compiler.config")
    errors: Any = importlib.import_module("torch._inductor.exc")
    folder: Any = importlib.import_module("torch._inductor.runtime.cache_dir_utils")
    _remove_damaged_libraries(folder.cache_dir())
    for op, function in opaque.items():
        _call_directly(op, function)
    try:
        with config.patch(size_asserts=False, alignment_asserts=False), keys.patch(cache_key_tag=facts):
            return compiler.standalone_compile(graph, list(operands), dynamic_shapes="from_example_inputs")
    except errors.InductorError as error:
        failed = error.inner_exception
        if not isinstance(failed, errors.CppCompileError):
            raise
        said = "\n  ".join(failed.output.strip().splitlines()[-_COMPILER_LINES:])
        raise ConfigError(
            f"cannot compile with execution='inductor': the C++ compiler {failed.cmd[0]} has failed:\n  {said}\n"
            "Mend its installation, or name another one in the environment variable CXX, or use execution='eager'."
        ) from None


@functools.cache
def _remove_damaged_libraries(folder: str) -> None:
    """Remove from Inductor's folder what a compiler had not finished when it was killed. Inductor loads a library that is there
    without a look at it; the small one by which it finds out what the CPU has would make it write code that does not compile."""
    if sys.platform != "linux":  # libraries have another format there
        return
    locks: Any = importlib.import_module("torch.utils._filelock")
    for path in Path(folder).glob("*/*.so"):
        with contextlib.suppress(OSError):  # others remove files, too, and who holds the lock is just compiling this one
            if not _is_complete(path):
                with locks.FileLock(Path(folder, "locks", f"{path.name.split('.')[0]}.lock"), timeout=0):
                    if not _is_complete(path):
                        path.unlink()


def _is_complete(library: Path) -> bool:
    """Whether an ELF file reaches as far as its header says, where the table of its sections is the last."""
    with library.open("rb") as file:
        header, size = file.read(64), os.fstat(file.fileno()).st_size
    begin, (width, count) = int.from_bytes(header[40:48], "little"), struct.unpack("<HH", header[58:62].ljust(4, b"\0"))
    return header.startswith(b"\x7fELF") and 0 < begin <= size - width * count


@contextlib.contextmanager
def inductor_kernels_replaced(
    replacement: Callable[[Callable[..., None], int], Callable[..., None]],
) -> Iterator[Callable[[object], bool]]:
    """In this context, code of Inductor calls `replacement(kernel, address)` in place of each of its kernels in C++, the function
    of which is at `address`. It gets the kernel's operands: tensors and numbers. Gives whether a function is such a kernel."""
    codecache: Any = importlib.import_module("torch._inductor.codecache")
    libraries = codecache.CppPythonBindingsCodeCache._loaded_module_names
    code = {id(x): x for x in (*codecache.PyCodeCache.modules, *codecache.PyCodeCache.modules_no_attr.values())}

    def is_kernel(function: object) -> bool:
        return isinstance(function, BuiltinFunctionType) and getattr(function.__self__, "__name__", None) in libraries

    replaced = [(vars(x), name, kernel) for x in code.values() for name, kernel in vars(x).items() if is_kernel(kernel)]
    try:
        for names, name, kernel in replaced:
            names[name] = replacement(kernel, _address(kernel.__self__.__file__, kernel.__name__))
        yield is_kernel
    finally:
        for names, name, kernel in replaced:
            names[name] = kernel


@functools.cache
def _address(library: str, function: str) -> int:
    return cast(int, ctypes.cast(getattr(ctypes.CDLL(library), function), ctypes.c_void_p).value)


@functools.cache
def _call_directly(op: OpOverload, function: Callable[..., object]) -> None:
    """Let code of Inductor call `function` in place of `op`."""
    ir: Any = importlib.import_module("torch._inductor.ir")
    lowering: Any = importlib.import_module("torch._inductor.lowering")
    called: Any = importlib.import_module("torch._inductor.select_algorithm").extern_kernels
    name = op.name().replace("::", "_").replace(".", "_")
    setattr(called, name, function)

    class Call(ir.FallbackKernel):  # type: ignore[misc]
        def codegen(self, wrapper: object) -> None:
            self.python_kernel_name = f"extern_kernels.{name}"
            super().codegen(wrapper)

    def lower(*operands: object, **params: object) -> object:
        results = Call.create(op, *operands, **params)
        return pytree.tree_map(lambda x: x.wrap_for_lowering() if isinstance(x, ir.IRNode) else x, results)

    lowering.add_needs_realized_inputs(op)
    layout = lowering.tag_to_layout_constraint(lowering.get_layout_constraint_tag(op, with_default=True))
    if layout is not None:  # operands lie as they did in the trace
        lowering.add_layout_constraint(op, layout)
    lowering.register_lowering(op, type_promotion_kind=None)(lower)


def split_graph(graph: torch.nn.Module, part_of: Callable[[torch.fx.Node], int]) -> torch.nn.Module:
    """A graph that calls a graph `submod_N` for each number N that `part_of` gives to nodes; all of them return tuples."""
    split: Any = importlib.import_module("torch.fx.passes.split_module")
    return split.split_module(graph, None, part_of, keep_original_order=True, tuple_return=True)


def storage_key(x: torch.Tensor) -> int:
    """A number that identifies the storage of `x`: the same for all its views, and unique while one of them lives."""
    return x.untyped_storage()._cdata


def current_autograd_node() -> int | None:
    """The sequence number of the autograd node that is running backward in this thread, or None outside of backward."""
    node = torch._C._current_autograd_node()
    return None if node is None else node._sequence_nr()


def last_autograd_node() -> int:
    """The sequence number of the last autograd node that this thread has made."""
    return torch.autograd._get_sequence_nr() - 1


def original_views() -> contextlib.AbstractContextManager[None]:
    """In this context the gradient of a write into a view repeats the view; otherwise it would read memory by strides."""
    return torch.autograd._force_original_view_tracking(True)


@contextlib.contextmanager
def checkpoint_disabled() -> Iterator[None]:
    """In this context `torch.utils.checkpoint` calls the function. Its hooks do not work inside transforms of `torch.func`."""
    module: Any = importlib.import_module("torch.utils.checkpoint")
    saved = module._checkpoint_without_reentrant_generator, module.CheckpointFunction
    module._checkpoint_without_reentrant_generator, module.CheckpointFunction = _yield_once, _PlainCall
    try:
        yield
    finally:
        module._checkpoint_without_reentrant_generator, module.CheckpointFunction = saved


def _yield_once(*_: object, **__: object) -> Iterator[None]:
    yield


class _PlainCall:
    @staticmethod
    def apply(fn: Callable[..., object], preserve_rng_state: bool, *args: object) -> object:
        return fn(*args)


@contextlib.contextmanager
def quiet_errors() -> Iterator[None]:
    """In this context torch does not log errors of tensors without data, with tracebacks, beside raising them."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(before)


@contextlib.contextmanager
def flex_attention_called() -> Iterator[None]:
    """In this context torch's flex_attention calls its op with the functions that it was given, without compiling them.

    Nor does it refuse gradients of tensors that are on no GPU.
    """
    module: Any = importlib.import_module("torch.nn.attention.flex_attention")
    saved = module._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG, module._validate_device
    module._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG, module._validate_device = True, lambda *_: None
    try:
        yield
    finally:
        module._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG, module._validate_device = saved


@contextlib.contextmanager
def apart_from_the_trace() -> Iterator[None]:
    """In this context no trace, transform or mode around it is active, so that another function can be traced by itself."""
    overrides: Any = importlib.import_module("torch.overrides")
    with outside_the_trace():
        modes = [overrides._pop_mode() for _ in range(torch._C._len_torch_function_stack())]
        try:
            yield
        finally:
            for mode in reversed(modes):
                overrides._push_mode(mode)


@contextlib.contextmanager
def control_flow_called() -> Iterator[None]:
    """In this context torch's control flow calls its ops with the functions that it was given, without compiling them."""
    modules: list[Any] = [importlib.import_module(f"torch._higher_order_ops.{name}") for name in ("utils", "scan")]
    saved = modules[0]._hop_compile_and_call, modules[1]._maybe_compile_and_run_fn
    modules[0]._hop_compile_and_call = lambda fn, args, kwargs=None: fn(*args, **(kwargs or {}))
    modules[1]._maybe_compile_and_run_fn = lambda fn, *args: fn(*args)
    try:
        yield
    finally:
        modules[0]._hop_compile_and_call, modules[1]._maybe_compile_and_run_fn = saved


def traced_value(x: torch.Tensor) -> torch.Tensor:
    """The tensor that a trace knows, behind what transforms of `torch.func` and the replacement of writes make of it."""
    while torch._C._functorch.is_functorch_wrapped_tensor(x):
        x = torch._C._functorch.get_unwrapped(x)
    return torch._from_functional_tensor(x.elem) if is_functional(x) else x  # type: ignore[attr-defined]


@contextlib.contextmanager
def outside_the_trace() -> Iterator[None]:
    """In this context ops on tensors with data are computed and not traced, also inside transforms of `torch.func`."""
    functorch: Any = importlib.import_module("torch._functorch.pyfunctorch")
    dispatch: Any = importlib.import_module("torch.utils._python_dispatch")
    with functorch.temporarily_clear_interpreter_stack(), dispatch._disable_current_modes():
        yield


def visible_keys(mask_mod: Callable, *sizes: int) -> torch.Tensor | None:
    """The mask (batch, heads, queries, keys) of a function of indices; None if it reads tensors without data."""
    module: Any = importlib.import_module("torch.nn.attention.flex_attention")
    try:
        mask = module.create_mask(mask_mod, *sizes, device="cpu")
    except RuntimeError:
        return None
    return mask if type(mask) is torch.Tensor else None


def overload_of(op: Any) -> Any:
    """The overload behind what `torch.library.custom_op` returns; an overload is returned as it is."""
    return getattr(op, "_opoverload", op)


def functionalise(x: torch.Tensor) -> torch.Tensor:
    """`x` as a tensor for which torch replaces writes by ops that return their result; a `FunctionalTensorMode` is active."""
    return importlib.import_module(_LAZY["FunctionalTensor"]).FunctionalTensor.to_functional(x)


def defunctionalise(x: torch.Tensor) -> torch.Tensor:
    """The tensor behind a functional one, after all writes into it; other tensors are returned as they are."""
    if not is_functional(x):
        return x
    torch._sync(x)
    return importlib.import_module(_LAZY["FunctionalTensor"]).FunctionalTensor.from_functional(x)


def is_functional(x: torch.Tensor) -> bool:
    """Whether `x` is what `functionalise` returns, or computed from it while a `FunctionalTensorMode` was active."""
    return isinstance(x, importlib.import_module(_LAZY["FunctionalTensor"]).FunctionalTensor)


def was_written(x: torch.Tensor) -> bool:
    """Whether data, shape or strides of a functional tensor, or data of another one of the same storage, were changed in place.

    `x` may be wrapped by transforms of `torch.func`.
    """
    while torch._C._functorch.is_functorch_wrapped_tensor(x):
        x = torch._C._functorch.get_unwrapped(x)
    inner = getattr(x, "elem", None)
    if inner is None or not torch._is_functional_tensor(inner):
        return False
    in_data: Callable[[torch.Tensor], bool] = getattr(torch, "_functionalize_has_data_mutation")  # noqa: B009  torch's stubs lack it
    return in_data(inner) or torch._functionalize_has_metadata_mutation(inner)
