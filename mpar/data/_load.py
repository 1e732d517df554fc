"""Makes batches from a data configuration: finds files, reads rows, tokenises them, and lays documents out in sequences."""

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path

from mpar.data._batches import Batches, BatchShape, DocumentBatches
from mpar.data._cache import Entry, cached, entry_folder
from mpar.data._collect import Progress, collect, refuse_malformed
from mpar.data._config import DataConfig, check_config
from mpar.data._documents import Documents, LoadReport
from mpar.data._made_ahead import MadeAhead
from mpar.data._stream_batches import StreamBatches
from mpar.data._stream_blocks import HereMade, Stream
from mpar.data._stream_window import Blocks
from mpar.data._tokenise import tokenise
from mpar.data._tokenizer import Tokenizer
from mpar.data._workers import Workers
from mpar.data.megatron import IndexedBatches, IndexedOptions, IndexedTokens
from mpar.data.reading import Source, file_digest, file_sample_digest, find_sources
from mpar.data.rows import preprocess_plug_in
from mpar.plug_ins import source_digests

__all__ = ["load_dataset"]

_CACHE_FORMAT = 5  # to be raised when a change of the code makes other documents of the same rows


def load_dataset(
    config: DataConfig, tokenizer: Tokenizer, *, vocab_size: int | None = None, progress: Progress | None = None
) -> Batches:
    """Read and tokenise the sources, and lay their documents out in batches. `Batches.report` says what became of the rows.
    Indexed tokens are mapped into memory, and read when a batch is asked for; with `config.stream`, so are rows.

    vocab_size: that of the model (default: of the tokenizer), against which all ids are checked. Rows that cannot be used are
    counted in the report, which describes the first ten thousand of them.

    An entry of the cache that is damaged, or that others than its owner could have written, is made anew, and the report says so.

    Raises ConfigError listing every setting that does not hold, DataError if a source has no file, no row is left, a row is
    too long under `truncation=error`, a row is malformed and `strict` is set, an id is outside the vocabulary, or the entry of
    the cache belongs to somebody else; TemplateError if the chat template cannot be used.
    """
    check_config(config, tokenizer)
    sources = find_sources(config.kind, config.sources)
    num_ids = tokenizer.vocab_size if vocab_size is None else vocab_size
    shape = BatchShape(config.batch_size, config.seq_len, config.packing, config.pad_to_multiple, config.answers)
    if sources[0].indexed:
        eod_id = tokenizer.eos_id if config.isolate else None
        options = IndexedOptions(num_ids, config.num_samples, config.weights, eod_id)
        files = [IndexedTokens.open(file) for source in sources for file in source.files]
        return IndexedBatches(files, shape, options, seed=config.seed)
    pad_id = next((known for known in (tokenizer.pad_id, tokenizer.eos_id) if known is not None), 0)
    if config.stream:
        return _stream_batches(config, tokenizer, sources, vocab_size=num_ids, pad_id=pad_id)
    documents, report = _documents(config, tokenizer, sources, progress)
    if config.strict and report.malformed:
        raise refuse_malformed(config, report)
    return DocumentBatches(
        documents,
        shape,
        vocab_size=num_ids,
        pad_id=pad_id,
        seed=config.seed,
        shuffle=config.shuffle,
        report=report,
    )


def _documents(
    config: DataConfig, tokenizer: Tokenizer, sources: Sequence[Source], progress: Progress | None
) -> tuple[Documents, LoadReport]:
    """The documents of all rows and what became of the rows, from the cache where they are in it."""

    def make() -> Entry:
        try:
            with Workers(tokenise, (config, tokenizer), config.workers) as workers:
                return Entry(*collect(config, sources, workers, progress))
        finally:
            tokenizer.close()

    if config.cache_dir is None:
        entry = make()
    else:
        key = _cache_key(config, tokenizer, sources)
        entry = cached(entry_folder(Path(config.cache_dir), key), key, make)
    return entry.documents, entry.report


def _stream_batches(
    config: DataConfig, tokenizer: Tokenizer, sources: Sequence[Source], *, vocab_size: int, pad_id: int
) -> StreamBatches:
    """Batches of rows that are read as they are needed. Of the files, samples of their content are read now."""
    facts = {source.name: _digest_of_source(source, file_sample_digest) for source in sources}
    digests = [facts[source.name] for source in sources]  # not their names: files may be moved while a run rests
    content = (_row_settings(config, tokenizer), config.shuffle_rows, config.packing, digests)
    stream = Stream(config, tokenizer, tuple(sources), hashlib.sha256(repr(content).encode()).hexdigest())
    return StreamBatches(stream, _blocks, vocab_size=vocab_size, pad_id=pad_id, facts=facts)


def _blocks(stream: Stream) -> Blocks:
    return MadeAhead(stream) if stream.config.workers else HereMade(stream)


def _cache_key(config: DataConfig, tokenizer: Tokenizer, sources: Sequence[Source]) -> str:
    """A hash of everything that the documents depend on. Batch size, seed and packing do not matter for them."""
    named = [(source.name, source.files, _digest_of_source(source, file_digest)) for source in sources]
    content = (_row_settings(config, tokenizer), config.stop, named)
    return hashlib.sha256(repr(content).encode()).hexdigest()


def _row_settings(config: DataConfig, tokenizer: Tokenizer) -> tuple[object, ...]:
    """All settings that the documents of rows depend on."""
    code = [] if config.preprocess is None else list(source_digests([preprocess_plug_in(config.preprocess)]))
    return (
        _CACHE_FORMAT, config.kind, config.seq_len, config.truncation, config.token_weights, config.system, dict(config.columns),
        config.preprocess, code, config.weights, config.model_name, config.model_author, tokenizer.fingerprint,
        *((config.pad_to_multiple,) if config.kind == "preference" else ()),
        *(() if config.answers is None else (config.answers,)),
    )  # fmt: skip


def _digest_of_source(source: Source, digest_of: Callable[[str], bytes]) -> str:
    """A hash of how many rows are taken of a source, and of what `digest_of` says of each of its files."""
    digest = hashlib.sha256(str(source.limit).encode())
    for file in source.files:
        digest.update(digest_of(file))
    return digest.hexdigest()
