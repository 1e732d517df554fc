"""Choices without a file: `mesh=pp2_fsdp2_tp2` and `strategy=zero3_tp_sp` are parsed, and Hydra gets their values from here."""

from dataclasses import asdict

from hydra.core.object_type import ObjectType
from hydra.plugins.config_source import ConfigResult, ConfigSource
from omegaconf import OmegaConf

from mpar.errors import UnknownNameError
from mpar.preset_names import PRESET_NAMES
from mpar.train import MESH_EXAMPLES, mesh_by_name

__all__ = ["NAMED", "NameSource", "is_named", "values_of_name"]

NAMED = {"mesh": MESH_EXAMPLES, "strategy": PRESET_NAMES}
"""The groups whose choices are parsed, each with the names to show in help texts: examples of meshes, all presets."""


def values_of_name(group: str, name: str) -> dict[str, int] | dict[str, str]:
    """The keys and values that `name` stands for in `group`, one of NAMED. Raises UnknownNameError if it stands for none."""
    if group == "mesh":
        return asdict(mesh_by_name(name))
    if name not in PRESET_NAMES:
        raise UnknownNameError(f"no strategy is called {name!r}; there are {', '.join(PRESET_NAMES)}")
    return {"name": name}


def is_named(group: str, name: str) -> bool:
    """Whether `group` is one of NAMED and `name` stands for values in it."""
    if group not in NAMED:
        return False
    try:
        values_of_name(group, name)
    except UnknownNameError:
        return False
    return True


class NameSource(ConfigSource):
    """Hydra's view of NAMED: a place in the search path where every valid name is a file."""

    URL = "mpar-names://"

    @staticmethod
    def scheme() -> str:
        """The scheme of this place in Hydra's search path."""
        return "mpar-names"

    def available(self) -> bool:
        """Always: there is nothing on a disk to look for."""
        return True

    def is_group(self, config_path: str) -> bool:
        """Whether `config_path` is one of NAMED, or the root above them."""
        return config_path in ("", *NAMED)

    def is_config(self, config_path: str) -> bool:
        """Whether `config_path`, such as `mesh/dp2`, is a valid name."""
        group, _, name = config_path.removesuffix(".yaml").rpartition("/")
        return is_named(group, name)

    def load_config(self, config_path: str) -> ConfigResult:
        """The values that the name in `config_path` stands for."""
        group, _, name = config_path.removesuffix(".yaml").rpartition("/")
        values = OmegaConf.create(dict(values_of_name(group, name)))
        return ConfigResult(provider=self.provider, path=self.full_path(), config=values, header={"package": None})

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        """The groups, or the names to show of one group."""
        if config_path == "":
            return [] if results_filter == ObjectType.CONFIG else sorted(NAMED)
        return [] if results_filter == ObjectType.GROUP else sorted(NAMED.get(config_path, ()))
