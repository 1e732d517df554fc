"""How long a test waits for the processes that it starts."""

__all__ = ["PATIENCE_S"]

PATIENCE_S = 480.0  # for two cores that other work keeps busy; less than faulthandler_timeout in pyproject.toml
