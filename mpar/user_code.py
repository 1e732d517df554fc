"""Calls of functions that users wrote: what they raise becomes an error of mpar that says what was called and where it failed."""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from mpar.errors import MparError, TraceError
from mpar.torch_private import DataDependentOutputException, DynamicOutputShapeException, UnsupportedFakeTensorException

__all__ = ["place_of", "user_code"]

_LIBRARIES = (str(Path(str(torch.__file__)).parent), str(Path(__file__).parent))
_UNTRACEABLE = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedFakeTensorException)  # the trace explains
_LONGEST = 400


@contextmanager
def user_code(call: str) -> Iterator[None]:
    """Raise TraceError if the body, which is `call`, raises what is no error of mpar."""
    try:
        yield
    except (MparError, *_UNTRACEABLE):
        raise
    except Exception as error:
        text = " ".join(str(error).split())
        shown = text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."
        raise TraceError(f"{call} raised {type(error).__name__}{place_of(error)}: {shown}") from error


def place_of(error: Exception) -> str:
    """` at file:line`, of the innermost code that is neither mpar's nor torch's."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(_LIBRARIES)]
    return f" at {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
