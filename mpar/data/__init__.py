"""Training data: tokenizers and chat templates, rows from files, and batches that depend only on the data and the step.

Names are imported when they are first used, so that files that are missing are found before torch is loaded.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mpar.data._answers import Answers
    from mpar.data._batches import Batches, BatchShape, DocumentBatches
    from mpar.data._collect import Progress
    from mpar.data._config import DataConfig
    from mpar.data._cursor import stream_report
    from mpar.data._documents import Documents, LoadReport
    from mpar.data._load import load_dataset
    from mpar.data._malformed import MalformedFile, write_malformed
    from mpar.data._preprocess import PreprocessConfig, preprocess
    from mpar.data._random import random_order
    from mpar.data._stats import DataStats, data_stats
    from mpar.data._stream_batches import StreamBatches
    from mpar.data._template import ChatTemplate, Message, RenderError, TemplateError
    from mpar.data._token_weights import TokenWeights
    from mpar.data._tokenizer import Tokenizer, byte_tokenizer
    from mpar.data.reading import find_sources
    from mpar.data.rows import MESSAGES, BadRow, conversation

_HOME = {
    "Answers": "_answers",
    "Batches": "_batches",
    "BatchShape": "_batches",
    "DocumentBatches": "_batches",
    "Documents": "_documents",
    "LoadReport": "_documents",
    "DataConfig": "_config",
    "Progress": "_collect",
    "load_dataset": "_load",
    "PreprocessConfig": "_preprocess",
    "preprocess": "_preprocess",
    "random_order": "_random",
    "DataStats": "_stats",
    "data_stats": "_stats",
    "MalformedFile": "_malformed",
    "write_malformed": "_malformed",
    "MESSAGES": "rows",
    "BadRow": "rows",
    "conversation": "rows",
    "find_sources": "reading",
    "stream_report": "_cursor",
    "StreamBatches": "_stream_batches",
    "ChatTemplate": "_template",
    "Message": "_template",
    "RenderError": "_template",
    "TemplateError": "_template",
    "TokenWeights": "_token_weights",
    "Tokenizer": "_tokenizer",
    "byte_tokenizer": "_tokenizer",
}

__all__ = [
    "MESSAGES",
    "Answers",
    "BadRow",
    "BatchShape",
    "Batches",
    "ChatTemplate",
    "DataConfig",
    "DataStats",
    "DocumentBatches",
    "Documents",
    "LoadReport",
    "MalformedFile",
    "Message",
    "PreprocessConfig",
    "Progress",
    "RenderError",
    "StreamBatches",
    "TemplateError",
    "TokenWeights",
    "Tokenizer",
    "byte_tokenizer",
    "conversation",
    "data_stats",
    "find_sources",
    "load_dataset",
    "preprocess",
    "random_order",
    "stream_report",
    "write_malformed",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'mpar.data' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f"mpar.data.{_HOME[name]}"), name)
    return value


def __dir__() -> list[str]:
    return __all__
