"""Models of transformers without a declaration: their layers are traced, and sharded by what the trace shows.

Names are imported when they are first used, so that a declared model loads neither transformers nor the tracer.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mpar.models.traced._imported import Imported, imported
    from mpar.models.traced._kept_checks import kept_check
    from mpar.models.traced._model import TracedModel
    from mpar.models.traced._module_model import ModuleModel, from_module
    from mpar.models.traced._self_check import check_traced, shrunken
    from mpar.models.traced._skeleton import is_causal_type, load_transformers, transformers_config

_HOME = {
    "Imported": "_imported",
    "ModuleModel": "_module_model",
    "TracedModel": "_model",
    "check_traced": "_self_check",
    "from_module": "_module_model",
    "imported": "_imported",
    "is_causal_type": "_skeleton",
    "kept_check": "_kept_checks",
    "load_transformers": "_skeleton",
    "shrunken": "_self_check",
    "transformers_config": "_skeleton",
}

__all__ = [
    "Imported",
    "ModuleModel",
    "TracedModel",
    "check_traced",
    "from_module",
    "imported",
    "is_causal_type",
    "kept_check",
    "load_transformers",
    "shrunken",
    "transformers_config",
]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    return value


def __dir__() -> list[str]:
    return __all__
