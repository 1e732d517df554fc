"""Makes batches from a data configuration: finds files, reads rows, tokenises them, and lays documents out in sequences."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from mpar.data._batches import Batches, BatchShape, DocumentBatches
from mpar.data._cache import entry_folder, load_entry, save_entry
from mpar.data._collect import Collector, Progress, refuse_malformed
from mpar.data._config import DataConfig, check_config
from mpar.data._documents import Documents, LoadReport
from mpar.data._tokenizer import Tokenizer
from mpar.data.megatron import IndexedBatches, IndexedOptions, IndexedTokens
from mpar.data.reading import Source, file_digest, find_sources
from mpar.data.rows import preprocess_plug_in
from mpar.plug_ins import source_digests

__all__ = ["load_dataset"]

_CACHE_FORMAT = 4  # to be raised when a change of the code makes other documents of the same rows


def load_dataset(
    config: DataConfig, tokenizer: Tokenizer, *, vocab_size: int | None = None, progress: Progress | None = None
) -> Batches:
    """Read and tokenise the sources, and lay their documents out in batches. `Batches.report` says what became of the rows.
    Indexed tokens are mapped into memory, and read when a batch is asked for.

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
    shape = BatchShape(config.batch_size, config.seq_len, config.packing)
    if sources[0].indexed:
        eod_id = tokenizer.eos_id if config.isolate else None
        options = IndexedOptions(num_ids, config.num_samples, config.weights, eod_id)
        files = [IndexedTokens.open(file) for source in sources for file in source.files]
        return IndexedBatches(files, shape, options, seed=config.seed)
    documents, report = _documents(config, tokenizer, sources, progress)
    if config.strict and report.malformed:
        raise refuse_malformed(config, report)
    pad_id = tokenizer.pad_id if tokenizer.pad_id is not None else tokenizer.eos_id
    return DocumentBatches(
        documents,
        shape,
        vocab_size=num_ids,
        pad_id=0 if pad_id is None else pad_id,
        seed=config.seed,
        shuffle=config.shuffle,
        report=report,
    )


def _documents(
    config: DataConfig, tokenizer: Tokenizer, sources: Sequence[Source], progress: Progress | None
) -> tuple[Documents, LoadReport]:
    """The documents of all rows and what became of the rows, from the cache where they are in it."""
    if config.cache_dir is None:
        return Collector(config, tokenizer, progress).run(sources)
    key = _cache_key(config, tokenizer, sources)
    folder = entry_folder(Path(config.cache_dir), key)
    found = load_entry(folder, key)
    if not isinstance(found, str):
        return found
    documents, report = Collector(config, tokenizer, progress).run(sources)
    save_entry(folder, key, documents, report, replaced=bool(found))
    return documents, replace(report, notice=found)


def _cache_key(config: DataConfig, tokenizer: Tokenizer, sources: Sequence[Source]) -> str:
    """A hash of everything that the documents depend on. Batch size, seed and packing do not matter for them."""
    digest = hashlib.sha256()
    settings = (
        _CACHE_FORMAT, config.kind, config.seq_len, config.truncation, config.token_weights, config.system, dict(config.columns),
        config.preprocess,
        config.weights, config.stop, config.model_name, config.model_author, tokenizer.fingerprint,
    )  # fmt: skip
    digest.update(json.dumps(settings).encode())
    if config.preprocess is not None:
        digest.update("\n".join(source_digests([preprocess_plug_in(config.preprocess)])).encode())
    for source in sources:
        digest.update(json.dumps([source.name, source.limit, list(source.files)]).encode())
        for file in source.files:
            digest.update(file_digest(file))
    return digest.hexdigest()
