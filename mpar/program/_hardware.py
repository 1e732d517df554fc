"""Hardware profiles by name, from the configuration group `hardware`."""

import yaml

from mpar.conf_dir import conf_dir
from mpar.errors import UnknownNameError
from mpar.forecast._predict import Hardware

__all__ = ["hardware"]


def hardware(name: str) -> Hardware:
    """The profile `conf/hardware/<name>.yaml`. Raises UnknownNameError with the list of profiles."""
    files = {file.stem: file for file in sorted((conf_dir() / "hardware").glob("*.yaml"))}
    if name not in files:
        raise UnknownNameError(f"no hardware profile is called {name!r}; there are {', '.join(files)}")
    return Hardware(**yaml.safe_load(files[name].read_text()))
