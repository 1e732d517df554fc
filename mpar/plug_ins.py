"""Plug-ins: functions and classes in modules of the user's own, named `module:attribute`. Naming one loads no torch."""

import difflib
import hashlib
import importlib
import inspect
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from mpar.errors import ConfigError, MparError, brief
from mpar.typed_values import converted, describe

__all__ = ["PlugIn", "is_reference", "source_digests"]

_REFERENCE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_INSTALLED = ("site-packages", "dist-packages")


def is_reference(text: str) -> bool:
    """Whether `text` has the form `module:attribute`, each with dots or without."""
    return _REFERENCE.fullmatch(text) is not None


@dataclass(frozen=True)
class PlugIn:
    """A function or class of the user's own.

    group:      what it makes, such as `optimizer`, for messages.
    reference:  `module:attribute`. The module is looked for in the current directory, then where Python looks.
    options:    what it is called with by name, besides what mpar gives it.
    given:      the names under which mpar gives it something; `optional` are those that it need not take.
    positional: how many of its first parameters mpar gives it, whatever they are called.
    option_keys: the key that the options are in, if it is not the group.
    """

    group: str
    reference: str
    options: Mapping[str, object] = field(default_factory=dict)
    given: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    positional: int = 0
    option_keys: str = ""

    @property
    def label(self) -> str:
        """How it is written on the command line."""
        return f"{self.group}={self.reference}"

    def function(self) -> Callable[..., object]:
        """The function or class, imported. Raises ConfigError, with what is wrong and where, if that is not possible."""
        if not is_reference(self.reference):
            raise ConfigError(f"{self.label}: a plug-in is module:function, such as my_module:build; {self.reference!r} is not")
        name, _, attribute = self.reference.partition(":")
        found: object = _imported(self.label, name)
        for part in attribute.split("."):
            if not hasattr(found, part):
                public = [key for key, item in vars(found).items() if callable(item) and not key.startswith("_")]
                raise ConfigError(f"{self.label}: {name} ({_file_of(name)}) has no {part!r}{_near(part, public)}")
            found = getattr(found, part)
        if not callable(found):
            raise ConfigError(f"{self.label}: {attribute} in {name} is a {type(found).__name__}, not a function or a class")
        return found

    def problems(self) -> list[str]:
        """A line for everything that keeps it from being called: that it cannot be imported, options that it does not have,
        that are missing, or that are of another type than it says."""
        try:
            function = self.function()
        except ConfigError as error:
            return [" ".join(str(error).split("\n"))]
        return [f"{self.label}: {line}" for line in self._of_options(_parameters(function))]

    def _of_options(self, parameters: Mapping[str, inspect.Parameter]) -> Iterator[str]:
        named, keys = list(parameters.values()), self.option_keys or self.group
        takes_any = any(item.kind == item.VAR_KEYWORD for item in named)
        if sum(item.kind in (*_POSITIONAL, item.VAR_POSITIONAL) for item in named) < self.positional:
            yield f"it takes nothing, and is given the {self.group if self.group != 'task' else 'model'}"
            return
        options = {item.name: item for item in named[self.positional :] if item.kind in (_POSITIONAL[1], item.KEYWORD_ONLY)}
        missing = [name for name in self.given if name not in options and not takes_any]
        if missing:
            yield f"it has no parameter {', '.join(missing)}, which mpar gives it; it has {', '.join(options) or 'none'}"
        free = [name for name in options if name not in (*self.given, *self.optional)]
        for name, value in self.options.items():
            if name not in free and not takes_any:
                yield f"there is no {keys}.{name}{_near(name, free)}; it has {', '.join(free) or 'no parameters'}"
            elif name in options and not _fits(options[name], value)[0]:
                yield f"{keys}.{name}={brief(value)}: must be {describe(options[name].annotation)}"
        for name in free:
            if options[name].default is inspect.Parameter.empty and name not in self.options:
                yield f"{keys}.{name} is missing: it has no default"

    def call(self, *first: object, **given: object) -> object:
        """What it returns for the options and what mpar gives it. Raises ConfigError if it cannot be called, or raises."""
        problems = self.problems()
        if problems:
            raise ConfigError("\n".join(problems))
        function = self.function()
        parameters = _parameters(function)
        takes_any = any(item.kind == item.VAR_KEYWORD for item in parameters.values())
        options = {
            name: _fits(parameters[name], value)[1] if name in parameters else value for name, value in self.options.items()
        }
        options |= {name: value for name, value in given.items() if name in self.given or name in parameters or takes_any}
        try:
            return function(*first, **options)
        except MparError:
            raise
        except (Exception, SystemExit) as error:
            raise ConfigError(f"{self.label} raised {_described(error)}") from error


def source_digests(plug_ins: Iterable[PlugIn]) -> list[str]:
    """A line for each file whose code the plug-ins consist of: their modules, and what was imported from the same folder.

    Of a package that is installed, its own files count. Raises ConfigError if a module cannot be imported.
    """
    files: set[Path] = set()
    for plug_in in plug_ins:
        name = plug_in.reference.partition(":")[0]
        _imported(plug_in.label, name)
        top = sys.modules[name.partition(".")[0]]
        if top.__file__ is None:
            continue
        file = Path(top.__file__)
        folder = file.parent.parent if hasattr(top, "__path__") else file.parent
        if folder.name in _INSTALLED:
            files |= set(file.parent.rglob("*.py")) if hasattr(top, "__path__") else {file}
            continue
        loaded = (getattr(module, "__file__", None) for module in tuple(sys.modules.values()))
        below = {Path(path) for path in loaded if path is not None and folder in Path(path).parents}
        files |= {path for path in below if not set(_INSTALLED) & set(path.parts)}
    return [f"{path} {hashlib.sha256(path.read_bytes()).hexdigest()}" for path in sorted(files) if path.is_file()]


def _imported(label: str, name: str) -> object:
    here = os.getcwd()
    if here not in sys.path and "" not in sys.path:
        sys.path.insert(0, here)  # as `python -m` has it; the processes of the ranks are started in the same directory
    importlib.invalidate_caches()
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise ConfigError(f"{label}: importing {name} raised {_described(error)}") from error
        known = [path.stem for path in Path(here).glob("*.py")]
        raise ConfigError(
            f"{label}: there is no module {error.name!r}{_near(error.name, known) or '.'} It is looked for in {here}, then "
            "where Python looks (PYTHONPATH, installed packages)"
        ) from None
    except (Exception, SystemExit) as error:  # a script without `if __name__ == "__main__"` often ends so
        raise ConfigError(f"{label}: importing {name} raised {_described(error)}") from error


def _parameters(function: Callable[..., object]) -> dict[str, inspect.Parameter]:
    """The parameters of a function or class, with the types that they are annotated with where these are known."""
    try:
        signature = inspect.signature(function, eval_str=True)
    except NameError:  # a name that only type checkers import
        signature = inspect.signature(function)
    return dict(signature.parameters)


def _fits(parameter: inspect.Parameter, value: object) -> tuple[bool, object]:
    """Whether a value is of the type of a parameter, and the value in that type."""
    hint = parameter.annotation
    if hint is inspect.Parameter.empty or isinstance(hint, str):
        return True, tuple(value) if isinstance(parameter.default, tuple) and isinstance(value, list) else value
    return converted(hint, value)


def _file_of(name: str) -> str:
    return str(getattr(sys.modules[name], "__file__", None) or "without a file")


def _described(error: BaseException) -> str:
    """An exception of the user's code in one line: its class, what it says, and the line that raised it."""
    if isinstance(error, SyntaxError):
        return f"SyntaxError: {error.msg} ({error.filename}:{error.lineno})"
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {brief(str(error))[1:-1]}{where}"


def _near(name: str, known: Iterable[str]) -> str:
    matches = difflib.get_close_matches(name, list(known), n=1, cutoff=0.0)
    return f"; did you mean {matches[0]!r}?" if matches else ""
