"""Where the configuration groups are: inside the package if it is installed, beside it in a checkout."""

from pathlib import Path

__all__ = ["conf_dir"]


def conf_dir() -> Path:
    """The folder with `train.yaml` and the groups model, mesh, strategy, hardware, ..."""
    package = Path(__file__).parent
    return next(path for path in (package / "conf", package.parent / "conf") if (path / "train.yaml").is_file())
