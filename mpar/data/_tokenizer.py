"""Tokenizers: Hugging Face's Rust library `tokenizers` with a chat template, read from and written to Hugging Face folders."""

import datetime
import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import Literal

import numpy as np
import tokenizers
from numpy.typing import NDArray
from tokenizers import decoders, models, pre_tokenizers

from mpar.data._fast_encoder import FastEncoder, fast_encoder
from mpar.data._template import ChatTemplate, Conversation, Message, RenderError, TemplateError
from mpar.data._token_weights import Piece, TokenWeights
from mpar.data._tokenizer_files import BYTE_NAMES, MAX_TOKENIZER_BYTES, Found, read_files
from mpar.errors import DataError, brief
from mpar.files import MAX_JSON_BYTES, Unreadable, read_bytes, read_json, read_text

__all__ = ["Tokenizer", "byte_tokenizer"]

_SPECIAL_NAMES = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token")
_ANSWERS = TokenWeights()
_MAX_TOKENIZER_COMMAS = 2**22  # the library keeps a hundred bytes for every value, also for those that it does not use
_BROKEN = "\N{REPLACEMENT CHARACTER}"
_BYTE_PIECE = re.compile("<0x[0-9A-F]{2}>")  # how sentencepiece names a byte
_LONG = 2**15  # characters of a text that takes more than some milliseconds
_SAID = "an answer \u2058 behind which a conversation goes on"  # a text that no message has


class Tokenizer:
    """Turns text into ids and back, and conversations into ids with marks on what the assistant wrote.

    `backend` splits text into tokens; `special` maps the names of Hugging Face (`bos_token`, `eos_token`, `pad_token`, ...) to
    the text of tokens; `chat_template` is a jinja2 program. A tokenizer does not change after its construction.

    A template runs in a process of its own (`ChatTemplate`), which `close` ends; the next conversation would start another.
    `template_name` says in errors which template it is.

    Raises DataError if a special token is not in the vocabulary, TemplateError if the template does not compile.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special: Mapping[str, str],
        chat_template: str | None = None,
        date: datetime.date | None = None,
        template_name: str = "the chat template",
    ):
        backend = tokenizers.Tokenizer.from_str(backend.to_str())  # a copy: the next lines must not change the caller's object
        backend.no_truncation()
        backend.no_padding()
        unknown = [f"{name}={brief(token)}" for name, token in special.items() if backend.token_to_id(token) is None]
        if unknown:
            names = ", ".join(unknown)
            raise DataError(f"cannot build the tokenizer: special tokens {names} are not in its vocabulary. Add or omit them.")
        self._backend = backend
        self._fast: FastEncoder | Literal[False] | None = None  # None: not tried yet
        self.special = dict(special)
        self.template: ChatTemplate | None = None
        if chat_template is not None:
            tokens = self.special_tokens
            self.template = ChatTemplate(chat_template, special, special_tokens=tokens, date=date, name=template_name)

    @classmethod
    def from_folder(cls, folder: str | Path, *, date: datetime.date | None = None) -> "Tokenizer":
        """Read `tokenizer.json`, or else the files of sentencepiece, tiktoken, or vocab.json and merges.txt; with them
        `tokenizer_config.json` and `chat_template.jinja` (or the template in the config).

        Raises DataError if a file is missing or cannot be read, ConfigError if a library that it takes is not installed.
        """
        folder = Path(folder)
        config = _read_object(folder / "tokenizer_config.json")
        older = _read_object(folder / "special_tokens_map.json")
        path = folder / "tokenizer.json"
        backend, special = (_read_backend(path), {}) if os.path.exists(path) else _other_files(folder, config)
        special |= {name: text for name in _SPECIAL_NAMES if (text := _token_text(config.get(name, older.get(name))))}
        name, template = _read_template(folder, config)
        return cls(backend, special=special, chat_template=template, date=date, template_name=f"the chat template {name}")

    def __getstate__(self) -> dict[str, object]:
        """Another process finds out by itself which libraries it has."""
        return {**vars(self), "_fast": None}

    def close(self) -> None:
        """End the process of the chat template, if there is one."""
        if self.template is not None:
            self.template.close()

    def save(self, folder: str | Path) -> None:
        """Write the files that `from_folder` and transformers' `AutoTokenizer.from_pretrained` read. Makes the folder."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        self._backend.save(str(folder / "tokenizer.json"))
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **self.special}
        (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        template = folder / "chat_template.jinja"
        if self.template is None:
            template.unlink(missing_ok=True)
        else:
            template.write_bytes(self.template.source.encode())

    @property
    def as_json(self) -> str:
        """What the library tokenizers reads: the content of a tokenizer.json, without chat template."""
        return self._backend.to_str()

    @cached_property
    def vocab_size(self) -> int:
        """One more than the largest id, special tokens included."""
        return max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @cached_property
    def special_tokens(self) -> tuple[str, ...]:
        """The text of all tokens that are special: the named ones, and those that the tokenizer file marks as special."""
        added = self._backend.get_added_tokens_decoder().values()
        return tuple(sorted({token.content for token in added if token.special} | set(self.special.values())))

    @cached_property
    def fingerprint(self) -> str:
        """A hash of everything that the ids of a text or a conversation depend on."""
        template = None if self.template is None else self.template.source
        content = json.dumps([self._backend.to_str(), sorted(self.special.items()), template])
        return hashlib.sha256(content.encode()).hexdigest()

    @cached_property
    def text_fingerprint(self) -> str:
        """A hash of everything that the ids of a text depend on, without the chat template."""
        return hashlib.sha256(json.dumps([self._backend.to_str(), sorted(self.special.items())]).encode()).hexdigest()

    @property
    def bos_id(self) -> int | None:
        """The id of `bos_token`, if there is one."""
        return self._id("bos_token")

    @property
    def eos_id(self) -> int | None:
        """The id of `eos_token`, if there is one. It ends an answer, and a text of `kind=pt`."""
        return self._id("eos_token")

    @property
    def pad_id(self) -> int | None:
        """The id of `pad_token`, if there is one."""
        return self._id("pad_token")

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """The ids of `text`. Special tokens written in it are recognised. Raises DataError if `text` has lone surrogates."""
        _check_text(text)
        if len(text) > _LONG:  # other threads may run meanwhile, which they may not in `encode`
            return self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        return self._backend.encode(text, add_special_tokens=add_special_tokens).ids

    def encode_batch(self, texts: Sequence[str], *, add_special_tokens: bool = False) -> list[list[int]]:
        """`encode` of each text, in parallel."""
        for text in texts:
            _check_text(text)
        return [e.ids for e in self._backend.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)]

    def encode_texts(self, texts: Sequence[str]) -> list[NDArray[np.int32]]:
        """`encode` of each text with its special tokens, as fast as the libraries that are installed can: by gigatoken, if it
        gives the same ids for a sample of the first texts."""
        encoded = [_utf8(text) for text in texts]
        if self._fast is None and texts:
            self._fast = fast_encoder(self._backend, texts, self.special_tokens) or False
        if self._fast:
            return self._fast(encoded)
        return [np.array(e.ids, np.int32) for e in self._backend.encode_batch_fast(list(texts), add_special_tokens=True)]

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """The text of `ids`; bytes that are no UTF-8 become U+FFFD. Raises DataError on an id outside the vocabulary."""
        outside = [int(i) for i in ids if not 0 <= i < self.vocab_size]
        if outside:
            raise DataError(f"cannot decode ids {outside[:8]}: the vocabulary has {self.vocab_size} ids, from 0 on.")
        return self._backend.decode([int(i) for i in ids], skip_special_tokens=skip_special_tokens)

    def bytes_of(self, token: int) -> bytes:
        """The bytes of the text of one token, which may be a part of a character. Raises DataError as `decode`."""
        text, piece = self.decode([token]), self._backend.id_to_token(token) or ""
        if _BROKEN not in text:
            return text.encode()
        if _BYTE_PIECE.fullmatch(piece):
            return bytes([int(piece[3:5], 16)])
        return bytes(map(BYTE_NAMES.index, piece)) if set(piece) <= set(BYTE_NAMES) else text.encode()

    def render_chat(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = False,
        tools: Sequence[object] | None = None,
        variables: Mapping[str, object] | None = None,
    ) -> str:
        """The text of a conversation; variables: see `ChatTemplate.render`. Raises TemplateError without a chat template,
        RenderError if it refuses the messages."""
        template = self._require_template()
        return template.render(messages, add_generation_prompt=add_generation_prompt, tools=tools, variables=variables)

    def apply_chat_template(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = False,
        tools: Sequence[object] | None = None,
        variables: Mapping[str, object] | None = None,
    ) -> list[int]:
        """The ids of the text that `render_chat` gives. No special tokens are added."""
        text = self.render_chat(messages, add_generation_prompt=add_generation_prompt, tools=tools, variables=variables)
        return self.encode(text)

    def encode_reply(self, messages: Sequence[Message], end_id: int) -> list[int]:
        """The ids behind an answer, which the token `end_id` has ended, if the conversation goes on with `messages`: up to where
        the next answer begins. They do not depend on what was said before.

        Raises TemplateError without a chat template, RenderError if it refuses these messages, or shows only the last answer.
        """
        said = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _SAID}, *messages]
        _, found, behind = self.render_chat(said, add_generation_prompt=True).partition(_SAID)
        if not found:
            raise RenderError("the chat template leaves out an answer behind which the conversation goes on")
        end = self.decode([end_id]) if end_id < self.vocab_size else ""
        closed = behind.lstrip()
        return self.encode(closed.removeprefix(end) if end and closed.startswith(end) else behind)

    def encode_chat(
        self, messages: Sequence[Message], *, weights: TokenWeights = _ANSWERS, tools: Sequence[object] | None = None
    ) -> tuple[list[int], list[float]]:
        """The ids of a conversation, and how much each weighs in the loss: by default 1 if the assistant wrote it, else 0.

        The token that ends an answer counts, too. A token that is in several parts of the text weighs as the heaviest of them.
        Raises TemplateError or RenderError as `ChatTemplate.weighed` says.
        """
        encoded = next(self.encode_chats([(messages, tools)], weights=weights))
        if isinstance(encoded, DataError):
            raise encoded
        return encoded

    def encode_chats(
        self, conversations: Sequence[Conversation], *, weights: TokenWeights = _ANSWERS
    ) -> Iterator[tuple[list[int], list[float]] | DataError]:
        """`encode_chat` of each conversation, in order, in parallel; where it cannot be encoded, the reason.

        Raises TemplateError in place of the first conversation with which the template shows that it cannot be used.
        """
        found: list[tuple[str, list[Piece]] | DataError] = []
        try:
            for rendered in self._require_template().weighed(conversations, weights):
                found.append(rendered if isinstance(rendered, RenderError) else _checked(*rendered))
        except TemplateError as error:
            unusable: TemplateError | None = error
        else:
            unusable = None
        texts = [entry[0] for entry in found if not isinstance(entry, DataError)]
        encodings = iter(self._backend.encode_batch(texts, add_special_tokens=False))
        for entry in found:
            if isinstance(entry, DataError):
                yield entry
            else:
                encoding = next(encodings)
                yield encoding.ids, _weights_of_tokens(encoding.offsets, entry[1])
        if unusable is not None:
            raise unusable

    def _id(self, name: str) -> int | None:
        return self._backend.token_to_id(self.special[name]) if name in self.special else None

    def _require_template(self) -> ChatTemplate:
        if self.template is None:
            raise TemplateError(
                "cannot encode a conversation: the tokenizer has no chat template. Put a chat_template.jinja into its folder "
                "(conversations), or use plain texts: kind=pt for data, chat=false in mpar generate, /v1/completions."
            )
        return self.template


def byte_tokenizer() -> Tokenizer:
    """The tokenizer that needs no file: ids 0..255 are the bytes of UTF-8, then 256 <|pad|>, 257 <|im_start|>, 258 <|im_end|>.

    The vocabulary has 259 ids; <|im_end|> is also the end-of-text token; the chat template is ChatML with generation markers.
    """
    backend = tokenizers.Tokenizer(models.BPE(vocab={name: byte for byte, name in enumerate(BYTE_NAMES)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|pad|>", "<|im_start|>", "<|im_end|>"])
    template = resources.files("mpar.data").joinpath("chatml.jinja").read_text(encoding="utf-8")
    return Tokenizer(backend, special={"eos_token": "<|im_end|>", "pad_token": "<|pad|>"}, chat_template=template)


def _weights_of_tokens(offsets: Sequence[tuple[int, int]], pieces: Sequence[Piece]) -> list[float]:
    """How much each token weighs: as the heaviest piece of text that it overlaps. The offsets of a token may leave out white
    space: a token of nothing else has an empty range at its end, and is taken for the character before that.
    """
    weights = np.zeros(len(offsets))
    if pieces and len(offsets):
        starts, ends = np.asarray(offsets, dtype=np.int64).T
        starts = np.minimum(starts, ends - 1)
        for low, high, weight in pieces:
            inside = (starts < high) & (ends > low)
            weights[inside] = np.maximum(weights[inside], weight)
    return weights.tolist()


def _check_text(text: str) -> None:
    _utf8(text)


def _utf8(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"cannot encode a text of {len(text)} characters: {error.reason} at character {error.start}.") from error


def _checked(text: str, pieces: list[Piece]) -> tuple[str, list[Piece]] | DataError:
    """A rendered conversation, or why its text cannot be encoded."""
    try:
        _check_text(text)
    except DataError as error:
        return error
    return text, pieces


def _read_backend(path: Path) -> tokenizers.Tokenizer:
    """The tokenizer in a tokenizer.json. Raises DataError."""
    try:
        content = read_bytes(path, MAX_TOKENIZER_BYTES)
        if content.count(b",") > _MAX_TOKENIZER_COMMAS:
            raise Unreadable(f"it has more than {_MAX_TOKENIZER_COMMAS:,} values")
        return tokenizers.Tokenizer.from_buffer(content)
    except Exception as error:  # the Rust library raises bare Exception
        raise DataError(f"cannot read the tokenizer {path}: {str(error)[:300]}") from error


def _other_files(folder: Path, config: Mapping[str, object]) -> Found:
    """The tokenizer in other files than tokenizer.json. Raises DataError if there is none."""
    found = read_files(folder, config)
    if found is None:
        contents = sorted(p.name for p in folder.iterdir())[:8] if folder.is_dir() else "no such folder"
        raise DataError(
            f"cannot read a tokenizer from {folder}: there is no tokenizer.json ({contents}), no .model of sentencepiece, no "
            ".tiktoken, and no vocab.json with merges.txt. A tokenizer_class in a tokenizer_config.json makes other files known."
        )
    return found


def _read_object(path: Path) -> dict[str, object]:
    if not os.path.exists(path):
        return {}
    try:
        return read_json(path)
    except Unreadable as error:
        raise DataError(f"cannot read {path}: {error}.") from None


def _token_text(value: object) -> str | None:
    """The text of a special token, which is written either as this text or as an object with the text under `content`."""
    content = value.get("content") if isinstance(value, Mapping) else value
    return content if isinstance(content, str) else None


def _read_template(folder: Path, config: Mapping[str, object]) -> tuple[Path, str | None]:
    """The file that has the chat template, and the template. Raises TemplateError if the file cannot be read."""
    path, with_tools = folder / "chat_template.jinja", folder / "additional_chat_templates" / "tool_use.jinja"
    if os.path.exists(path):
        return path, _one_template(_read_source(path), _read_source(with_tools) if os.path.exists(with_tools) else None)
    template = config.get("chat_template")
    if isinstance(template, list):  # several named ones
        named = {str(entry.get("name")): entry.get("template") for entry in template if isinstance(entry, Mapping)}
        default, tool_use = named.get("default"), named.get("tool_use")
        template = default
        if isinstance(default, str) and isinstance(tool_use, str):
            template = _one_template(default, tool_use)
    return folder / "tokenizer_config.json", template if isinstance(template, str) else None


def _read_source(path: Path) -> str:
    try:
        return read_text(path, MAX_JSON_BYTES)
    except Unreadable as error:
        raise TemplateError(f"cannot read the chat template {path}: {error}.") from None


def _one_template(default: str, tool_use: str | None) -> str:
    """The template of a tokenizer that has another one for conversations with tools. An empty expression at either end of each
    keeps the line breaks there, which jinja2 takes away next to a block.
    """
    if tool_use is None:
        return default
    with_tools, without = (f"{{{{ '' }}}}{source.removesuffix(chr(10))}{{{{ '' }}}}" for source in (tool_use, default))
    return f"{{% if tools is not none %}}{with_tools}{{% else %}}{without}{{% endif %}}"
