"""Choices without a file: names such as `mesh=pp2_fsdp2_tp2`, `strategy=zero3_tp_sp`, and plug-ins, `model=my_module:build`.

They are parsed, and Hydra gets their values from here.
"""

from dataclasses import asdict

from hydra.core.object_type import ObjectType
from hydra.plugins.config_source import ConfigResult, ConfigSource
from omegaconf import OmegaConf

from mpar.errors import UnknownNameError
from mpar.plain_value import PlainValue
from mpar.plug_ins import is_reference
from mpar.preset_names import PRESET_NAMES
from mpar.train import MESH_EXAMPLES, PLUGGABLE, mesh_by_name, values_of_reference

__all__ = ["NAMED", "NameSource", "is_named", "values_of_name"]

NAMED = {"mesh": MESH_EXAMPLES, "strategy": PRESET_NAMES}
"""The groups whose choices are parsed, each with the names to show in help texts: examples of meshes, all presets."""


def values_of_name(group: str, name: str) -> dict[str, PlainValue]:
    """The keys and values that `name` stands for in `group`, one of NAMED or PLUGGABLE. Raises UnknownNameError for none."""
    if group in PLUGGABLE:
        return values_of_reference(group, name)
    if group == "mesh":
        return asdict(mesh_by_name(name))
    if name not in PRESET_NAMES:
        raise UnknownNameError(f"no strategy is called {name!r}; there are {', '.join(PRESET_NAMES)}")
    return {"name": name}


def is_named(group: str, name: str) -> bool:
    """Whether `name` stands for values in `group`: in one of NAMED; in one of PLUGGABLE, if it is `module:function`."""
    if group not in NAMED:
        return group in PLUGGABLE and is_reference(name)
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
        """Whether `config_path` is one of the groups whose names are parsed, or the root above them."""
        return config_path in ("", *NAMED, *PLUGGABLE)

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
            return [] if results_filter == ObjectType.CONFIG else sorted({*NAMED, *PLUGGABLE})
        return [] if results_filter == ObjectType.GROUP else sorted(NAMED.get(config_path, ()))
