"""Grammar: which tokens may come next, so that an answer is JSON that a schema permits. The library llguidance tells, which is
the extra `grammar`.
"""

import functools
import importlib
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from mpar.data import Tokenizer
from mpar.errors import ConfigError

__all__ = ["Grammar", "Grammars"]

_SPACE = r"\n? {0,12}"  # between the tokens of JSON; without a bound a model could write spaces for ever
_WORD_BITS = 32


class Grammar:
    """What may come next in one answer."""

    def __init__(self, matcher: Any, num_words: int, vocab_size: int) -> None:
        self._matcher, self._num_words, self._vocab_size = matcher, num_words, vocab_size

    @property
    def is_complete(self) -> bool:
        """Whether nothing can follow."""
        return self._matcher.is_stopped()

    def allowed(self) -> Tensor:
        """For each token of the model, whether it may come next."""
        words = torch.zeros(-(-self._num_words // _WORD_BITS), dtype=torch.int32)
        self._matcher.unsafe_compute_mask_ptr(words.data_ptr(), words.numel() * words.element_size())
        bits = (words[:, None] >> torch.arange(_WORD_BITS, dtype=torch.int32)) & 1
        return bits.flatten()[: self._vocab_size].bool()

    def accept(self, token: int) -> None:
        """A token of the answer, which was allowed."""
        self._matcher.consume_token(token)


class Grammars:
    """Makes the grammars of the answers of one model, which end with one of `end_ids`."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, end_ids: Sequence[int]) -> None:
        self._tokenizer, self._end_ids = tokenizer, list(end_ids)
        self._vocab_size = vocab_size

    def begin(self, schema: str) -> Grammar:
        """The grammar of an answer that is JSON as the JSON Schema `schema` says. Raises ConfigError if that cannot be used, or
        if llguidance is missing."""
        library, words = _library(), self._words
        try:
            text = library.LLMatcher.grammar_from_json_schema(schema, defaults={"whitespace_pattern": _SPACE})
            problem = library.LLMatcher.validate_grammar(text, words)
        except ValueError as error:
            problem = str(error)
        if problem:
            first, *rest = problem.strip().splitlines()
            raise ConfigError(" ".join([f"cannot answer by this schema: {first}", *(line for line in rest if "error:" in line)]))
        grammar = Grammar(library.LLMatcher(words, text), words.vocab_size, self._vocab_size)
        grammar.allowed()  # the library stops where it finds that nothing may come
        if grammar.is_complete:
            raise ConfigError("cannot answer by this schema: no JSON fits it")
        return grammar

    @functools.cached_property
    def _words(self) -> Any:
        """The tokens, as the library knows them."""
        count = max(self._vocab_size, self._tokenizer.vocab_size)
        return _library().LLTokenizer(self._tokenizer.as_json, n_vocab=count, eos_token=self._end_ids or None)


def _library() -> ModuleType:
    try:
        return importlib.import_module("llguidance")
    except ModuleNotFoundError:
        raise ConfigError(
            "cannot answer by a schema: llguidance is missing. Install it where the model runs: pip install 'mpar[grammar]'."
        ) from None
