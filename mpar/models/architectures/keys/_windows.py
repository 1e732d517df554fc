"""The keys of sliding windows, and the window of each layer."""

from collections.abc import Sequence

from mpar.errors import ConfigError
from mpar.models.architectures.keys._key import Key, Values, refusal

__all__ = ["WINDOW_KEYS", "read_windows", "windows_of"]

WINDOW_KEYS = {
    "use_sliding_window": Key((bool,), False),
    "sliding_window": Key((int,), 4096, nullable=True, positive=True),
    "max_window_layers": Key((int,), 28),
    "layer_types": Key((list,), None, nullable=True),
}


def read_windows(title: str, values: Values) -> tuple[int | None, ...]:
    """The sliding window of each layer, or None. layer_types says which layers have one; without it, those from
    max_window_layers on.

    Raises ConfigError if layer_types does not fit the number of layers, or has a type that is not implemented.
    """
    window = values["sliding_window"] if values["use_sliding_window"] else None
    if values["layer_types"] is None:
        return tuple(window if i >= values["max_window_layers"] else None for i in range(values["num_hidden_layers"]))
    return windows_of(title, values, values["layer_types"])


def windows_of(title: str, values: Values, kinds: Sequence[str]) -> tuple[int | None, ...]:
    """The sliding window of each layer, or None; `kinds` has the type of each layer. Raises ConfigError like `read_windows`."""
    num_layers, window = values["num_hidden_layers"], values["sliding_window"]
    used = values.get("use_sliding_window", True)
    problems = []
    if len(kinds) != num_layers:
        problems.append(f"layer_types has {len(kinds)} entries, num_hidden_layers is {num_layers}")
    strange = sorted({repr(kind) for kind in kinds if kind not in ("full_attention", "sliding_attention")})
    if strange:
        problems.append(f"layer_types has {', '.join(strange)}: only 'full_attention' and 'sliding_attention' are implemented")
    if "sliding_attention" in kinds and (window is None or not used):
        switch = f"use_sliding_window={used}, " if "use_sliding_window" in values else ""
        problems.append(f"layer_types has sliding layers, but {switch}sliding_window={window}")
    if problems:
        raise ConfigError(refusal(title, problems))
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)
