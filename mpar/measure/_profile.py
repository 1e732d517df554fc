"""Profile: measured rates as a hardware profile, and as the text of a file of the configuration group `hardware`."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import yaml

from mpar.hardware import Hardware

__all__ = ["profile_of", "profile_text"]


def profile_of(name: str, rates: Mapping[str, float], facts: Mapping[str, object], like: Hardware) -> Hardware:
    """A profile called `name`: `rates`, rounded, and `facts`, and all that they lack from `like`.

    rates: by name; `flops_per_s.float32` is an entry of `flops_per_s`.
    """
    values: dict[str, Any] = {**asdict(like), **facts, "name": name}
    values |= {table: {} for table in {path.partition(".")[0] for path in rates if "." in path}}
    for path, rate in rates.items():
        table, _, entry = path.partition(".")
        rounded = float(f"{rate:.3g}")
        if entry:
            values[table][entry] = rounded
        else:
            values[table] = rounded
    return Hardware(**values)


def profile_text(
    profile: Hardware, measured: Mapping[str, float], facts: Mapping[str, object], like: Hardware, origin: str
) -> str:
    """The text of a profile. origin: a line that says when and where it was measured; a second says what is from `like`."""
    own = {"name", *facts, *(path.partition(".")[0] for path in measured)}
    taken = ", ".join(key for key in asdict(profile) if key not in own)
    text = yaml.safe_dump(asdict(profile), sort_keys=False, default_flow_style=None, width=120)
    return f"# {origin}\n# Not measured, but taken from the profile {like.name}: {taken}.\n{text}"
