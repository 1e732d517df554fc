"""What data to train on, and how they become batches."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from mpar.data._answers import Answers
from mpar.data._token_weights import TokenWeights
from mpar.data._tokenizer import Tokenizer
from mpar.data.reading import SELF_COGNITION, is_indexed
from mpar.data.rows import COLUMNS, preprocess_plug_in
from mpar.errors import ConfigError

__all__ = ["DataConfig", "check_config"]

_CHOICES = {
    "kind": ("sft", "pt", "preference", "kto", "prm", "prompt"),
    "truncation": ("drop", "left", "right", "split", "error"),
    "stop": ("first", "all"),
}


@dataclass(frozen=True)
class DataConfig:
    """The data to train on, and the shape of their batches.

    kind: `sft` are conversations, with the loss on what the assistant wrote. `pt` is plain text, with the loss on every token;
        each text ends with the end-of-text token and is cut into documents of `seq_len` positions. `preference` are pairs of
        conversations, each of which is two documents, the preferred one first; `kto` are conversations with a label. `prompt` are
        questions, whose other columns travel with them.
    sources: files, folders, globs, addresses, data sets of the hub (`hf::NAME:SPLIT`), `self-cognition` or `python-stdlib`;
        `NAME#N` takes N rows of a source. Or pairs NAME.bin and NAME.idx of Megatron's indexed tokens.
    columns: for names of columns in the files, the names by which formats know them, such as {"ask": "query"}.
    preprocess: `module:function` of one's own, which is given the columns of each row, renamed, as a dict, and returns other
        ones; a list of rows in place of the row; or None to leave it out.
    weights: the share of each source; None: every row of every source. With stop=`first` there are as many rows as the first
        source has that is used up, with `all` as many as the last one, and rows of the others are repeated.
    batch_size, seq_len: rows and positions of the global batch. A document of S + 1 tokens fits into S positions, because its
        last token is only a label.
    seed: seed of the order. shuffle: use a new order in every epoch.
    packing: several documents share a sequence, without attending to each other. pad_to_multiple: each begins at a multiple of
        this many positions, with padding before it.
    truncation: what to do with longer conversations: `drop` them, keep what fits of the beginning (`right` cuts at the right)
        or of the end (`left`), `split` them into documents, or raise an `error`.
    token_weights: what a token of a conversation weighs in the loss: `default` (answers), `last_round` or `all`, and patterns of
        ms-swift's loss_scale, joined by +, as `TokenWeights.parse` reads them; never an answer with `"loss": false`.
    system: system message for conversations that have none.
    model_name, model_author: replace {{NAME}} and {{AUTHOR}}. Of a pair (Chinese, English), Chinese rows get the first.
    cache_dir: folder that keeps tokenised documents. Its entries are keyed by the files' content and by all that documents
        depend on.
    workers: processes that tokenise, of which this is one; with one or none, it does alone, on all cores. Of a stream: processes
        beside this one, or none.
    stream: rows are read as they are needed, over and over, in blocks of `shuffle_rows` rows. Documents are packed and shuffled
        within a block, and a few blocks are in memory.
    strict: a malformed row is an error.
    num_samples: of indexed tokens, how many samples the run reads, on which Megatron's order depends; None: those of one epoch.
    isolate: of indexed tokens, whether documents that share a sample do not attend to each other; without it, a sample is one
        document, as it is by Megatron's default.
    answers: what batches say of documents besides, for tasks that compare them.
    """

    kind: str
    sources: tuple[str, ...]
    batch_size: int
    seq_len: int
    columns: Mapping[str, str] = field(default_factory=dict)
    preprocess: str | None = None
    weights: tuple[float, ...] | None = None
    stop: str = "first"
    seed: int = 0
    packing: bool = True
    pad_to_multiple: int = 1
    shuffle: bool = True
    truncation: str = "drop"
    token_weights: str = "default"
    system: str | None = None
    model_name: str | tuple[str, str] | None = None
    model_author: str | tuple[str, str] | None = None
    cache_dir: str | None = None
    workers: int = 1
    stream: bool = False
    shuffle_rows: int = 10_000
    strict: bool = False
    num_samples: int | None = None
    isolate: bool = True
    answers: Answers | None = None


def check_config(config: DataConfig, tokenizer: Tokenizer) -> None:
    """Raise ConfigError listing every setting that does not hold."""
    faults = [
        f"{name}={getattr(config, name)!r} is none of {', '.join(known)}"
        for name, known in _CHOICES.items()
        if getattr(config, name) not in known
    ]
    faults += [
        f"{name}={getattr(config, name)} is below 1"
        for name in ("batch_size", "seq_len", "shuffle_rows", "pad_to_multiple")
        if getattr(config, name) < 1
    ]
    faults += [f"{name}={getattr(config, name)} is negative" for name in ("seed", "workers") if getattr(config, name) < 0]
    faults += [*_names(config), *_weights(config), *_token_weights(config)]
    unknown = sorted(set(config.columns.values()) - set(COLUMNS))
    if unknown:
        faults.append(f"columns maps to {', '.join(unknown)}, which no format has; formats have {', '.join(COLUMNS)}")
    if config.answers is not None and config.answers.count < 2 and config.kind in ("preference", "kto"):
        faults.append(f"a row that may hold {config.answers.count} answer has no room for two, which kind={config.kind!r} needs")
    if config.preprocess is not None:
        faults += preprocess_plug_in(config.preprocess).problems()
    if config.kind in ("preference", "kto", "prm") and config.truncation == "split":
        faults.append(f"truncation=split would divide the answers of kind={config.kind!r}, which are judged as they are")
    if config.kind == "prm" and config.truncation == "left":
        faults.append("truncation=left would take the question away from steps of kind='prm': use drop, right or error")
    if config.kind != "pt" and tokenizer.template is None:
        faults.append(f"kind={config.kind!r} needs a tokenizer with a chat template; put a chat_template.jinja into its folder")
    indexed = any(map(is_indexed, config.sources))
    faults += _pad_to_multiple(config, indexed)
    if config.kind == "pt" and tokenizer.eos_id is None and (config.isolate or not indexed):
        way_out = "or set isolate=false" if indexed else "name it as eos_token in its tokenizer_config.json"
        faults.append(f"kind='pt' needs a tokenizer with an end-of-text token; {way_out}")
    if faults:
        raise ConfigError("cannot load the data:\n" + "\n".join(faults))


def _names(config: DataConfig) -> list[str]:
    faults = []
    for name in ("model_name", "model_author"):
        value = getattr(config, name)
        texts = value if isinstance(value, tuple) else (value, value)
        if value is not None and (len(texts) != 2 or not all(isinstance(text, str) and text for text in texts)):
            faults.append(f"{name}={value!r} is neither a text nor a pair (Chinese, English) of texts")
        elif value is None and any(re.fullmatch(rf"{SELF_COGNITION}(#\d+)?", source) for source in config.sources):
            faults.append(f"{name} is missing, which the source {SELF_COGNITION} needs")
    return faults


def _pad_to_multiple(config: DataConfig, indexed: bool) -> list[str]:
    multiple = config.pad_to_multiple
    if multiple > 1 and indexed:
        return [f"pad_to_multiple={multiple} moves documents, and those of indexed tokens stay where Megatron has them"]
    if multiple > 1 and config.seq_len % multiple:
        return [f"pad_to_multiple={multiple} does not divide seq_len={config.seq_len}"]
    return []


def _token_weights(config: DataConfig) -> list[str]:
    try:
        weights = TokenWeights.parse(config.token_weights)
    except ConfigError as error:
        return [f"token_weights={error}"]
    plain = config.kind == "pt" and (weights.base == "last_round" or weights.patterns or weights.rows)
    return [f"token_weights={config.token_weights!r} is about conversations; of kind='pt' every token weighs 1"] if plain else []


def _weights(config: DataConfig) -> list[str]:
    weights = config.weights
    if weights is None:
        return []
    if len(weights) != len(config.sources):
        return [f"weights has {len(weights)} numbers for {len(config.sources)} sources"]
    finite = all(0 < weight < float("inf") for weight in weights)
    return [] if finite else [f"weights={list(weights)} are not all above 0; leave a source out instead of giving it nothing"]
