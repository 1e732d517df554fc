"""ModuleModel: a module of a user's own as a chain of segments, after it was compared with what the module computes."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from mpar import tree
from mpar.errors import ConfigError
from mpar.models.traced._chain import TracedChain
from mpar.models.traced._comparison import compared
from mpar.models.traced._modules import ModuleSource, module_source
from mpar.models.traced._runs import logits_of
from mpar.models.traced._traits import Traits
from mpar.tree import Tree
from mpar.user_code import user_code

__all__ = ["ModuleModel", "from_module"]

_SHORTEST = 8
"""How many positions the check needs: it cuts rows into parts."""


@dataclass(frozen=True)
class ModuleModel(TracedChain):
    """A module of a user's own, traced. Its parameters have the names of the module; a path joins them with dots."""

    module: ModuleSource
    dtype: torch.dtype = torch.float32
    traits: Traits = Traits()  # noqa: RUF009 (it is frozen)

    @property
    def source(self) -> ModuleSource:
        """What it is made from."""
        return self.module

    @property
    def name(self) -> str:
        """The module's class."""
        return type(self.module.found.module).__name__

    def with_traits(self, traits: Traits) -> "ModuleModel":
        """The same model with other traits."""
        return replace(self, traits=traits)

    def state_dict(self, params: Tree) -> dict[str, Tensor]:
        """The parameters as the module has them, by name: `module.load_state_dict(model.state_dict(params), strict=False)`."""
        leaves = {path: leaf.detach() for path, leaf in tree.leaves_with_path(params)}
        layouts = self.imported.layouts
        return {name: layout.join([leaves[path] for path in layout.paths(name)]) for name, layout in layouts.items()}

    @property
    def settings(self) -> object:
        """All that says what it computes, as far as its modules show it."""
        return str(self.module.found.module)


def from_module(module: nn.Module, example: Tensor) -> tuple[ModuleModel, Tree]:
    """`(model, params)`, as `mpar.models.from_module` says. Raises ConfigError."""
    _check_arguments(module, example)
    dtypes = {x.dtype for x in module.parameters()}
    model = ModuleModel(module_source(module), next(iter(dtypes)))
    _check_calls(model, module, example)
    params = model.leaves({name: x.detach().clone() for name, x in module.named_parameters()})
    return replace(model, traits=_checked(model, module, example)), params


def _list_name(model: ModuleModel) -> str:
    return model.module.found.names[0].rpartition(".")[0]


def _check_arguments(module: nn.Module, example: Tensor) -> None:
    problems = []
    if example.ndim != 2 or example.is_floating_point() or example.shape[1] < _SHORTEST:
        problems.append(f"example is {tuple(example.shape)} of {example.dtype}: give tokens (B, S), S at least {_SHORTEST}")
    dtypes = sorted({str(x.dtype) for x in module.parameters()})
    if len(dtypes) != 1:
        problems.append(f"its parameters have the dtypes {', '.join(dtypes) or 'of none'}: give them one, by module.to(dtype)")
    unread = [name for name, x in module.named_parameters() if x.is_meta]
    if unread:
        problems.append(f"{', '.join(unread[:3])} have no values: they are on meta")
    if problems:
        raise ConfigError(f"cannot make a model of {type(module).__name__}:\n" + "\n".join(f"  {line}" for line in problems))


def _check_calls(model: ModuleModel, module: nn.Module, example: Tensor) -> None:
    """Raises ConfigError unless the module calls each of its blocks once, in order, with x (B, S, features) first."""
    names, calls = model.module.found.names, []

    def note(name: str, args: tuple[object, ...]) -> None:
        calls.append((name, tuple(args[0].shape) if args and isinstance(args[0], Tensor) else None))

    hooks = [module.get_submodule(name).register_forward_pre_hook(lambda _, args, name=name: note(name, args)) for name in names]
    try:
        with torch.no_grad(), user_code(f"{model.name}(example)"):
            logits = logits_of(module(example))
    finally:
        for hook in hooks:
            hook.remove()
    shapes, rows = {shape for _, shape in calls}, ", ".join(map(str, example.shape))
    fits = len(shapes) == 1 and all(shape is not None and len(shape) == 3 and shape[:2] == example.shape for shape in shapes)
    if not fits or [name for name, _ in calls] != list(names):
        lines = [f"{name} with {'no tensor first' if shape is None else f'x {shape}'}" for name, shape in calls]
        raise ConfigError(
            f"cannot make a model of {model.name}: it must call each of {names[0]} to {names[-1]} once, in order, with x of one "
            f"shape ({rows}, features) as the first argument, but it calls\n  " + "\n  ".join(lines[:20])
        )
    if logits.shape[:-1] != example.shape:
        raise ConfigError(
            f"cannot make a model of {model.name}: for tokens ({rows}) it gives {tuple(logits.shape)}, "
            f"not logits ({rows}, vocabulary)"
        )


def _checked(model: ModuleModel, module: nn.Module, example: Tensor) -> Traits:
    """What rows of the model allow. Raises ConfigError if it does not compute what the module computes."""
    given = copy.deepcopy(module).float().eval()

    stored: Mapping[str, Tensor] = dict(given.named_parameters())
    try:
        problems, traits = compared(replace(model, dtype=torch.float32), stored, lambda tokens: logits_of(given(tokens)), example)
    except (RuntimeError, TypeError, ValueError, IndexError, KeyError, AttributeError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"cannot trace {model.name}: {type(error).__name__}: {error}") from error
    if problems:
        raise ConfigError(
            f"cannot use {model.name} by tracing: its {_list_name(model)}, one after the other, do not compute what the module "
            "computes; does something besides x pass from block to block, or around them?\n  " + "\n  ".join(problems[:6])
        )
    return traits
