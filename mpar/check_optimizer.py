"""Whether an object has all that training and the compiler need from an optimizer."""

import inspect

from mpar.errors import ConfigError
from mpar.optimizer import Optimizer
from mpar.user_code import user_code

__all__ = ["check_optimizer"]

_METHODS = {
    "init": "init(params) -> the state before the first update, zeros",
    "update": "update(grads, state, params, *, scale) -> (new params, new state), for whole trees",
    "update_leaf": "update_leaf(param, grad, slots, lr, step, scale, *, decays) -> (new param, new slots), for one parameter",
    "decays": "decays(path, leaf) -> whether weight decay applies to a parameter",
    "rate": "rate(step) -> the learning rate of an update, counted from 1",
    "scale": "scale(norm) -> the factor for all gradients, given their global norm",
}
"""How each method of an Optimizer is called, for messages."""


def check_optimizer(optimizer: object) -> None:
    """Raise ConfigError, listing every member that is missing or wrong, unless `optimizer` is an Optimizer."""
    if isinstance(optimizer, type):
        problems = [f"it is a class; pass an optimizer, such as {optimizer.__name__}(...)"]
    else:
        problems = [*_slot_problems(optimizer), *(line for name in _METHODS for line in _method_problems(optimizer, name))]
        problems = problems or _rate_problems(optimizer)
    if problems:
        raise ConfigError(
            f"cannot compile a step with the optimizer {optimizer!r}:\n  "
            + "\n  ".join(problems)
            + "\nmpar.optim.Optimizer says what each must be; a subclass of it has init and update already."
        )


def _rate_problems(optimizer: object) -> list[str]:
    with user_code(f"rate of {type(optimizer).__name__}, for step 1,"):
        rate = optimizer.rate(1)  # type: ignore[attr-defined]
    is_number = isinstance(rate, (int, float)) and not isinstance(rate, bool)
    return [] if is_number else [f"its `rate(1)` is {rate!r}, which is not a number: {_METHODS['rate']}"]


_ABSENT = object()


def _slot_problems(optimizer: object) -> list[str]:
    slots = getattr(optimizer, "slots", _ABSENT)
    meaning = 'the names of the tensors that are kept for each parameter, such as ("m", "v"), or ()'
    if slots is _ABSENT:
        return [f"it lacks `slots`: {meaning}"]
    if not isinstance(slots, tuple) or not all(isinstance(name, str) and name and "." not in name for name in slots):
        return [f"its `slots` is {slots!r}, which is not a tuple of names without dots: {meaning}"]
    repeated = sorted({name for name in slots if slots.count(name) > 1})
    return [f"its `slots` has {repeated} more than once"] if repeated else []


def _method_problems(optimizer: object, name: str) -> list[str]:
    method = getattr(optimizer, name, _ABSENT)
    if method is _ABSENT:
        return [f"it lacks `{name}`: {_METHODS[name]}"]
    if not callable(method):
        return [f"its `{name}` is {method!r}, which cannot be called: {_METHODS[name]}"]
    try:
        signature, required = inspect.signature(method), inspect.signature(getattr(Optimizer, name))
    except ValueError:  # functions written in C may have no signature
        return []
    arguments = [parameter for parameter in required.parameters.values() if parameter.name not in ("self", "axes")]
    try:
        signature.bind(
            *(None for parameter in arguments if parameter.kind is not parameter.KEYWORD_ONLY),
            **{parameter.name: None for parameter in arguments if parameter.kind is parameter.KEYWORD_ONLY},
        )
    except TypeError as error:
        return [f"its `{name}{signature}` cannot be called as it is ({error}): {_METHODS[name]}"]
    return []
