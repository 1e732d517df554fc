"""Tokenizers in other files than tokenizer.json: models of sentencepiece, ranks of tiktoken, vocabularies with merges.

Each becomes a tokenizer of the library `tokenizers`, which knows the place of each token in the text. Where a folder says which
class of transformers its tokenizer is, transformers converts it. Else it is built here as its file says, and compared on a sample
of texts with the library that the file is for.
"""

import base64
import binascii
import importlib
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from mpar.errors import ConfigError, DataError, brief
from mpar.files import Unreadable, read_bytes

__all__ = ["BYTE_NAMES", "MAX_TOKENIZER_BYTES", "Found", "read_files"]

MAX_TOKENIZER_BYTES = 2**26
"""Of one file; twice the largest that is published."""

Found = tuple[tokenizers.Tokenizer, dict[str, str]]
"""A tokenizer, and its special tokens by their names in transformers."""

_GENERIC = ("PreTrainedTokenizerFast", "TokenizersBackend")  # classes that say nothing of how text is split
_RANK = re.compile(rb"[A-Za-z0-9+/]+={0,2} \d+")
_TIKTOKEN_PATTERN = (  # of cl100k_base and Llama 3, which transformers takes, too, where nothing else is said
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SAMPLE = (
    "the answer", " the", "  two  spaces ", "naïve café\n\nx", "你好，世界", "👩‍👩‍👧 \u2028 end", "ﬁ ² １２", "a\tb\r\n",
    "1234567 3.5e-2", "I'm (not) <b>!", "",
)  # fmt: skip
_CONTROL, _USER_DEFINED, _BPE, _UNIGRAM = 3, 4, 2, 1  # of sentencepiece's file
_CLASSES_OF_PIECES = ("bos", "eos", "pad", "unk")


def read_files(folder: Path, config: Mapping[str, object]) -> Found | None:
    """The tokenizer of a folder without tokenizer.json whose tokenizer_config.json is `config`, empty if there is none.

    Returns None if the folder has no file of a kind that is known. Raises DataError if its files cannot be read, or a tokenizer
    gives other ids than the library that they are for; ConfigError if a library is missing.
    """
    paths = {path.name: path for path in sorted(folder.iterdir()) if path.is_file()} if folder.is_dir() else {}
    of_pieces = next((path for name, path in paths.items() if name.endswith((".model", ".tiktoken"))), None)
    try:
        content = b"" if of_pieces is None else read_bytes(of_pieces, MAX_TOKENIZER_BYTES)
        if of_pieces is not None and _RANK.fullmatch(content.partition(b"\n")[0].strip()):
            return _of_ranks(of_pieces, content, config)
        if isinstance(config.get("tokenizer_class"), str) and config["tokenizer_class"] not in _GENERIC:
            return _by_transformers(folder, of_pieces, content)
        if of_pieces is not None:
            return _of_pieces(of_pieces, content)
        if "vocab.json" in paths and "merges.txt" in paths:
            return _of_merges(paths["vocab.json"], paths["merges.txt"])
    except Unreadable as error:
        raise DataError(f"cannot read the tokenizer {of_pieces or folder}: {error}.") from None
    return None


def _library(module: str, path: Path) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        raise ConfigError(
            f"cannot read the tokenizer {path}: it takes {module.partition('.')[0]}, which is not installed.\n"
            "pip install 'mpar[tokenizers]', or have a machine that has it write a tokenizer.json: "
            "AutoTokenizer.from_pretrained(folder).save_pretrained(folder)."
        ) from None


def _by_transformers(folder: Path, of_pieces: Path | None, content: bytes) -> Found:
    """The tokenizer of the class that the folder names, as transformers converts it. None of its code is run."""
    transformers = _library("transformers", folder)
    if of_pieces is not None:
        _read_pieces(of_pieces, content)  # transformers takes an empty vocabulary if it cannot
    try:
        made = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # of any type: each class of transformers raises what it likes
        raise DataError(
            f"cannot read the tokenizer {folder}: transformers: {str(error)[:300] or type(error).__name__}"
        ) from error
    backend = getattr(made, "backend_tokenizer", None)
    if backend is None:
        raise DataError(
            f"cannot use the tokenizer {folder}: {type(made).__name__} of transformers splits text in Python, and does not tell "
            "where in a text its tokens are, without which it is not known which of them are trained on."
        )
    if backend.get_vocab_size() <= len(backend.get_added_tokens_decoder()):
        raise DataError(f"cannot use the tokenizer {folder}: {type(made).__name__} of transformers finds no vocabulary there.")
    return backend, dict(made.special_tokens_map)


def _of_ranks(path: Path, content: bytes, config: Mapping[str, object]) -> Found:
    """Ranks of tiktoken. The config has the pattern that splits text (`pat_str`) and special tokens (`added_tokens_decoder`)."""
    tiktoken = _library("tiktoken", path)
    ranks = _read_ranks(content)
    pattern = config.get("pat_str", _TIKTOKEN_PATTERN)
    if not isinstance(pattern, str):
        raise Unreadable(f"pat_str in its tokenizer_config.json is {brief(pattern)}, not a text")
    text_of = {token: "".join(BYTE_NAMES[byte] for byte in token) for token in ranks}
    merges = [pair for token in sorted(ranks, key=ranks.__getitem__) for pair in _pairs(token, ranks)]
    named = [(text_of[a], text_of[b]) for a, b in merges]
    backend = tokenizers.Tokenizer(models.BPE({text_of[token]: rank for token, rank in ranks.items()}, named, ignore_merges=True))
    split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    backend.decoder = decoders.ByteLevel()
    encoding = tiktoken.Encoding(path.name, pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
    _compare(path, "tiktoken", backend, lambda text: list(encoding.encode_ordinary(text)))
    _add_tokens(backend, config)
    return backend, {}


def _read_ranks(content: bytes) -> dict[bytes, int]:
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(content.splitlines(), 1):
        token, _, rank = line.partition(b" ")
        try:
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error):
            raise Unreadable(f"line {number} is not a token in base64 and a rank") from None
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing:
        raise Unreadable(f"it has no token for {len(missing)} of the 256 bytes")
    return ranks


def _pairs(token: bytes, ranks: Mapping[bytes, int]) -> list[tuple[bytes, bytes]]:
    """The pairs of tokens that are merged into `token`, those of the lowest ranks first."""
    pairs = [(token[:i], token[i:]) for i in range(1, len(token)) if token[:i] in ranks and token[i:] in ranks]
    return sorted(pairs, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))


def _of_merges(vocab: Path, merges: Path) -> Found:
    """GPT-2's vocabulary and merges of bytes."""
    for path in (vocab, merges):
        read_bytes(path, MAX_TOKENIZER_BYTES)
    try:
        model = models.BPE.from_file(str(vocab), str(merges))
    except Exception as error:  # the Rust library raises bare Exception
        raise Unreadable(f"{vocab.name} and {merges.name}: {str(error)[:300]}") from error
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    end = "<|endoftext|>"
    if backend.token_to_id(end) is None:
        return backend, {}
    backend.add_special_tokens([end])
    return backend, {"eos_token": end}


def _of_pieces(path: Path, content: bytes) -> Found:
    """A model of sentencepiece, with the normalisation that it has."""
    proto, processor = _read_pieces(path, content)
    trainer = proto.trainer_spec
    if trainer.model_type not in (_BPE, _UNIGRAM) or trainer.treat_whitespace_as_suffix:
        raise Unreadable(
            "it is a model of sentencepiece for words or characters, or with spaces behind words, which are not read"
        )
    tokens = [
        AddedToken(piece.piece, normalized=False, special=piece.type == _CONTROL)
        for piece in proto.pieces
        if piece.type in (_CONTROL, _USER_DEFINED)
    ]
    backend = _of_proto(proto, [token for token in tokens if not token.special])
    _compare(path, "sentencepiece", backend, processor.encode)
    backend.add_special_tokens([token for token in tokens if token.special])  # which sentencepiece does not read in text
    numbers = {name: getattr(trainer, f"{name}_id") for name in _CLASSES_OF_PIECES}
    return backend, {f"{name}_token": proto.pieces[i].piece for name, i in numbers.items() if 0 <= i < len(proto.pieces)}


def _read_pieces(path: Path, content: bytes) -> tuple[Any, Any]:
    """The model of sentencepiece as a message of protobuf, and its processor. Raises Unreadable."""
    sentencepiece = _library("sentencepiece", path)
    _library("google.protobuf", path)
    proto = importlib.import_module("sentencepiece.sentencepiece_model_pb2").ModelProto()
    try:
        proto.ParseFromString(content)
        return proto, sentencepiece.SentencePieceProcessor(model_proto=content)
    except Exception as error:  # protobuf and sentencepiece have errors of their own
        raise Unreadable(f"it is neither a model of sentencepiece nor ranks of tiktoken ({str(error)[:100]})") from None


def _model_of_pieces(proto: Any) -> models.Model:
    trainer = proto.trainer_spec
    if trainer.model_type == _UNIGRAM:
        scored = [(piece.piece, piece.score) for piece in proto.pieces]
        return models.Unigram(scored, unk_id=trainer.unk_id, byte_fallback=trainer.byte_fallback)
    number = {piece.piece: i for i, piece in enumerate(proto.pieces)}
    score = {piece.piece: piece.score for piece in proto.pieces}
    pairs = [
        (score[piece], piece[:cut], piece[cut:])
        for piece in number
        for cut in range(1, len(piece))
        if piece[:cut] in number and piece[cut:] in number
    ]
    merges = [(a, b) for _, a, b in sorted(pairs, key=lambda pair: (-pair[0], number[pair[1]], number[pair[2]]))]
    unknown = proto.pieces[trainer.unk_id].piece
    return models.BPE(number, merges, unk_token=unknown, fuse_unk=True, byte_fallback=trainer.byte_fallback)


def _of_proto(proto: Any, tokens: Sequence[AddedToken]) -> tokenizers.Tokenizer:
    """A tokenizer with the pieces, the normalisation and the user-defined `tokens` of a model."""
    backend, spec = tokenizers.Tokenizer(_model_of_pieces(proto)), proto.normalizer_spec
    steps: list[normalizers.Normalizer] = []
    if spec.precompiled_charsmap:  # applied to both characters at once, it would make one space of them
        steps += [normalizers.Replace("\r\n", "\n\n")] if spec.name.startswith("nmt") else []
        steps.append(normalizers.Precompiled(spec.precompiled_charsmap))
    if spec.remove_extra_whitespaces:
        steps += [normalizers.Replace(Regex(" {2,}"), " "), normalizers.Replace(Regex("^ | $"), "")]
    steps.append(normalizers.Replace(" ", "▁"))
    steps += [normalizers.Prepend("▁")] if spec.add_dummy_prefix else []
    backend.normalizer = normalizers.Sequence(steps)
    fallback = [decoders.ByteFallback()] if proto.trainer_spec.byte_fallback else []
    begin = [decoders.Strip(" ", 1, 0)] if spec.add_dummy_prefix else []
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), *fallback, decoders.Fuse(), *begin])
    backend.add_tokens(list(tokens))
    return backend


def _add_tokens(backend: tokenizers.Tokenizer, config: Mapping[str, object]) -> None:
    """Add the tokens of `added_tokens_decoder`, which must have the ids that they say. Raises Unreadable."""
    listed = config.get("added_tokens_decoder", {})
    entries = sorted((int(number), entry) for number, entry in listed.items()) if isinstance(listed, Mapping) else []
    for number, entry in entries:
        text = entry.get("content") if isinstance(entry, Mapping) else None
        if not isinstance(text, str):
            raise Unreadable(f"added_tokens_decoder in its tokenizer_config.json has {brief(entry)} for {number}")
        backend.add_special_tokens([AddedToken(text, normalized=False, special=True)])
        if backend.token_to_id(text) != number:
            raise Unreadable(f"{brief(text)} is token {backend.token_to_id(text)}, and {number} in its tokenizer_config.json")


def _compare(path: Path, library: str, backend: tokenizers.Tokenizer, encode: Callable[[str], list[int]]) -> None:
    """Raise Unreadable if a tokenizer gives other ids than the library that its file is for."""
    for text in _SAMPLE:
        found, expected = backend.encode(text, add_special_tokens=False).ids, encode(text)
        if found != expected:
            raise Unreadable(
                f"{library} splits {text!r} into {expected[:12]}, and what is built of it here into {found[:12]}; have "
                "transformers write a tokenizer.json, which says how it is meant"
            )


def _byte_names() -> list[str]:
    """The character that byte-level tokenizers use for each byte: itself if it is visible in Latin-1, else one from U+0100 on."""
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [b for b in range(256) if b not in visible]
    return [chr(b) if b in visible else chr(256 + hidden.index(b)) for b in range(256)]


BYTE_NAMES = _byte_names()
