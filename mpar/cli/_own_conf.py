"""The user's own files of `--config-dir DIR`, which add to mpar's groups: `experiment=mine` reads `DIR/experiment/mine.yaml`."""

from pathlib import Path

import yaml
from hydra.core.object_type import ObjectType
from hydra.plugins.config_source import ConfigResult, ConfigSource
from omegaconf import OmegaConf

from mpar.cli._named import NAMED, is_named
from mpar.conf_dir import conf_dir
from mpar.errors import ConfigError
from mpar.files import Unreadable, read_text

__all__ = ["OwnSource", "own_choices", "packaged_choices"]

_MAX_BYTES = 2**16  # of one file
_MAX_NODES = 10_000


def packaged_choices() -> dict[str, list[str]]:
    """Every group of `conf/` with its files, sorted; groups whose names are parsed have no files."""
    folders = [path for path in conf_dir().iterdir() if path.is_dir() and not path.name.startswith((".", "_"))]
    groups = {folder.name: _files(folder) for folder in folders} | {group: [] for group in NAMED}
    return dict(sorted(groups.items()))


def own_choices(folder: Path) -> dict[str, list[str]]:
    """The groups that are in the user's `folder`, each with its files.

    Raises ConfigError if the folder does not exist or has no group, or if one of its files has a name that mpar uses already: the
    records of a run would not tell which of the two was meant.
    """
    if not folder.is_dir():
        problem = "it is a file" if folder.exists() else "there is no such folder"
        raise ConfigError(f"cannot read configurations from --config-dir {folder}: {problem}.")
    packaged = packaged_choices()
    user_choices = {group: _files(folder / group) for group in packaged if (folder / group).is_dir()}
    if not user_choices:
        raise ConfigError(
            f"cannot read configurations from --config-dir {folder}: it has no folder with the name of a group "
            f"({', '.join(packaged)}).\n"
            f"Put differences from mpar's configurations into {folder / 'experiment' / 'NAME.yaml'}, for experiment=NAME."
        )
    taken = [f"{group}/{name}.yaml" for group in user_choices for name in user_choices[group] if _is_taken(group, name, packaged)]
    taken += [path.name for path in sorted(folder.glob("*.yaml")) if (conf_dir() / path.name).exists()]
    if taken:
        raise ConfigError(
            f"cannot read configurations from --config-dir {folder}: mpar has a configuration of the same name as "
            f"{', '.join(taken)}.\n"
            "Give your file another name. To change a few keys of mpar's configuration, write a file in experiment/."
        )
    return user_choices


def _files(folder: Path) -> list[str]:
    return sorted(file.stem for file in folder.glob("*.yaml"))


def _is_taken(group: str, name: str, packaged: dict[str, list[str]]) -> bool:
    return name in packaged[group] or is_named(group, name)


def _num_nodes(node: yaml.Node, known: dict[int, int]) -> int:
    """How many values a node has with its aliases written out. `known` has those that were counted; nothing is counted twice."""
    if id(node) not in known:
        known[id(node)] = _MAX_NODES + 1  # if the node contains itself
        if isinstance(node, yaml.MappingNode):
            inner = [part for pair in node.value for part in pair]
        else:
            inner = node.value if isinstance(node, yaml.SequenceNode) else []
        known[id(node)] = 1 + sum(_num_nodes(part, known) for part in inner)
    return known[id(node)]


class OwnSource(ConfigSource):
    """Hydra's view of the user's folder."""

    @staticmethod
    def scheme() -> str:
        """The scheme of this place in Hydra's search path."""
        return "mpar-own"

    def available(self) -> bool:
        """Always: `own_choices` has checked the folder already."""
        return True

    def is_group(self, config_path: str) -> bool:
        """Whether the folder has a folder for this group."""
        return (Path(self.path) / config_path).is_dir()

    def is_config(self, config_path: str) -> bool:
        """Whether there is such a file in a group; files outside of groups do not count."""
        return "/" in config_path and self._file(config_path).exists()

    def load_config(self, config_path: str) -> ConfigResult:
        """The content of the file. Raises ConfigError if it is not keys with values."""
        file = self._file(config_path)
        try:
            text = read_text(file, _MAX_BYTES)
            node = yaml.compose(text, Loader=yaml.SafeLoader)
            if node is not None and not isinstance(node, yaml.MappingNode):
                raise ConfigError(f"cannot use {file}: it must be keys with values (`key: value` lines), as files in conf/ are.")
            if node is not None and _num_nodes(node, {}) > _MAX_NODES:
                raise ConfigError(f"cannot use {file}: with its aliases (`*name`) written out it has over {_MAX_NODES:,} values.")
            values = OmegaConf.create(text)
        except (Unreadable, yaml.YAMLError, ValueError, RecursionError) as error:
            raise ConfigError(f"cannot read {file}: {error}") from None
        header = self._get_header_dict(text)
        return ConfigResult(provider=self.provider, path=self.full_path(), config=values, header=header)

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        """The groups, or the files of one group."""
        folder = Path(self.path) / config_path
        groups = [path.name for path in folder.iterdir() if path.is_dir()] if results_filter != ObjectType.CONFIG else []
        files = _files(folder) if results_filter != ObjectType.GROUP and config_path else []
        return sorted({*groups, *files})

    def _file(self, config_path: str) -> Path:
        return Path(self.path) / f"{config_path.removesuffix('.yaml')}.yaml"
