"""Training data: tokenizers and chat templates, rows from files, and batches that depend only on the data and the step."""

from mpar.data._batches import Batches, BatchShape
from mpar.data._documents import Documents, LoadReport
from mpar.data._load import DataConfig, Progress, load_dataset
from mpar.data._template import ChatTemplate, Message, RenderError, TemplateError
from mpar.data._tokenizer import Tokenizer, byte_tokenizer

__all__ = [
    "BatchShape",
    "Batches",
    "ChatTemplate",
    "DataConfig",
    "Documents",
    "LoadReport",
    "Message",
    "Progress",
    "RenderError",
    "TemplateError",
    "Tokenizer",
    "byte_tokenizer",
    "load_dataset",
]
