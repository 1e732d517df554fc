"""The choices of every group: files of `conf/`, names that are parsed, files of the user; and the messages that refuse others."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_type_hints

from mpar.cli._bind import nearest_value
from mpar.cli._named import NAMED, is_named
from mpar.cli._own_conf import own_choices, packaged_choices
from mpar.train import MESH_GRAMMAR, PLUGGABLE, mesh_problem, nearest_mesh_name

__all__ = ["Choices", "choices"]


@dataclass(frozen=True)
class Choices:
    """shown: the sorted choices of every group. For `mesh` these are the user's files and examples: other names are parsed."""

    shown: Mapping[str, Sequence[str]]

    def has(self, group: str, name: str) -> bool:
        """Whether `group=name` can be composed."""
        return name in self.shown[group] or is_named(group, name)

    def refusal(self, group: str, name: str) -> str:
        """Why `group=name` cannot be composed, and the ways out."""
        if group in PLUGGABLE and ":" in name:
            return f"{name!r} is no plug-in: write module:function, such as {group}=my_module:build"
        if group != "mesh":
            near = nearest_value(group, name, self.shown[group])
            return f"there is no {group} {name!r}; did you mean {group}={near}? ({', '.join(self.shown[group])})"
        near = nearest_value(group, name, [nearest_mesh_name(name), *self._mesh_files()])
        return f"there is no mesh {name!r}: {mesh_problem(name)}; did you mean mesh={near}? ({self.line('mesh')})"

    def line(self, group: str) -> str:
        """All choices of a group in one line: files, or how names are made, and whether a plug-in may be named."""
        if group == "mesh":
            return "; ".join([MESH_GRAMMAR, *self._mesh_files()])
        return " ".join([*self.shown[group], *(["or module:function"] if group in PLUGGABLE else [])])

    def of(self, cls: type) -> "Choices":
        """Those of the groups that are keys of the configuration `cls`; no group is one for which a word stands for a key."""
        hints = get_type_hints(cls).items()
        groups = {name for name, hint in hints if dataclasses.is_dataclass(hint) and not hasattr(hint, "key_of_word")}
        return Choices({group: names for group, names in self.shown.items() if group in groups})

    def _mesh_files(self) -> list[str]:
        return [name for name in self.shown["mesh"] if not is_named("mesh", name)]


def choices(user_dir: Path | None = None) -> Choices:
    """The choices of mpar and of the user's folder. Raises ConfigError if that folder cannot be used."""
    files_of_group = {group: [*files, *NAMED.get(group, ())] for group, files in packaged_choices().items()}
    for group, files in ({} if user_dir is None else own_choices(user_dir)).items():
        files_of_group[group] += files
    return Choices({group: sorted(names) for group, names in files_of_group.items()})
