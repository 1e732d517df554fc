"""mpar: training large language models through a compiler. Names are loaded when first used, so that a worker that only runs
a compiled program never loads the compiler."""

import importlib
from typing import Any

_HOME = {
    "Mesh": "mpar.mesh",
    "P": "mpar.spec",
    "Precision": "mpar.precision",
    "State": "mpar.program",
    "Strategy": "mpar.strategy",
    "check": "mpar.sharding",
    "compile_decode": "mpar.infer.compile",
    "compile_eval": "mpar.program.compile",
    "compile_forward": "mpar.program.compile",
    "compile_step": "mpar.program.compile",
    "generate": "mpar.infer.compile",
    "jit": "mpar.program.jit",
    "value_and_grad": "mpar.program.jit",
}
_NAMES = {"check": "check_primitive"}
_PACKAGES = ("checkpoint", "data", "dtensor", "infer", "models", "ops", "optim", "program", "sharding", "tree")

__all__ = [
    "Mesh",
    "P",
    "Precision",
    "State",
    "Strategy",
    "check",
    "checkpoint",
    "compile_decode",
    "compile_eval",
    "compile_forward",
    "compile_step",
    "data",
    "dtensor",
    "generate",
    "infer",
    "jit",
    "models",
    "ops",
    "optim",
    "program",
    "sharding",
    "tree",
    "value_and_grad",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), _NAMES.get(name, name))
    if name in _PACKAGES:
        return importlib.import_module(f"mpar.{name}")
    if name == "__version__":
        return _version()
    raise AttributeError(f"module 'mpar' has no attribute {name!r}")


def _version() -> str:
    """The version of the package, or words that say that it is not installed."""
    metadata = importlib.import_module("importlib.metadata")  # it takes as long as all else here together
    try:
        return str(metadata.version("mpar"))
    except metadata.PackageNotFoundError:
        return "(not installed)"


def __dir__() -> list[str]:
    return __all__
