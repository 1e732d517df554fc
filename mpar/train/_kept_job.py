"""Jobs that are kept from run to run: with one, a launcher starts the ranks of a fresh run without loading torch.

An entry is the folder of a prepared job as one file: a line with the checksum of the rest, a line of JSON (the key, what was
printed, the names and sizes of the files), then the files one after the other. It is found by a hash of all that preparing
depends on: the configuration, the content of the data and of the files that it names, the source of mpar and of plug-ins, and the
versions of packages. Whatever is wrong with an entry, the job is prepared again.
"""

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from mpar.code_facts import code_facts, digest_of
from mpar.data import find_sources
from mpar.errors import MparError
from mpar.files import Unreadable, open_regular
from mpar.kept_files import KeptFiles, NotUsableError
from mpar.plug_ins import source_digests
from mpar.train._config import PlainConfig, TrainConfig
from mpar.train._job_folder import DATA_FOLDER, JOB_FILE, write_private
from mpar.train._plug_ins import plug_ins

__all__ = ["KeptJob", "find_kept_job"]

_SUFFIX = ".job"
_MOST_ENTRIES, _MOST_BYTES = 64, 2 * 2**30
_MOST_JOB_BYTES = 2**28  # a larger one would take longer to copy than to prepare
_MOST_READ_BYTES = 2**30  # of the files that a job depends on
_MOST_WEIGHTS_BYTES = 2**26  # of a larger file in a model's folder, which ranks read themselves, the times of changes count
_PACKAGES = ("triton", "numpy", "networkx", "tokenizers", "jinja2")


class _NotKeptError(Exception):
    """Why jobs of a configuration are not kept."""


@dataclass(frozen=True)
class KeptJob:
    """The place of one job among those that `folder` keeps."""

    folder: Path
    key: str

    def restore(self, job_folder: Path) -> str | None:
        """Copy the job into `job_folder` and return what preparing it has printed; None if it is not there, or not sound."""
        try:
            content = self._files().read(self.key)
            summary, files = _unpack(content, self.key)
            for name, data in files.items():
                path = job_folder / name
                path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                write_private(path, data)
        except (OSError, NotUsableError):
            return None
        return summary

    def keep(self, job_folder: Path, summary: str) -> None:
        """Keep the job in `job_folder`. That it cannot be kept is no error: the next run prepares it again."""
        paths = [job_folder / JOB_FILE, *sorted(path for path in (job_folder / DATA_FOLDER).rglob("*") if path.is_file())]
        if sum(path.stat().st_size for path in paths) > _MOST_JOB_BYTES:
            return
        files = {str(path.relative_to(job_folder)): path.read_bytes() for path in paths}
        with suppress(OSError, NotUsableError):
            self._files().write(self.key, _pack(self.key, summary, files))

    def _files(self) -> KeptFiles:
        return KeptFiles(self.folder, _SUFFIX, _MOST_ENTRIES, _MOST_BYTES)


def find_kept_job(folder: Path, config: TrainConfig, resolved: PlainConfig) -> KeptJob | None:
    """Where `folder` keeps the job of a configuration; None for runs whose jobs are not kept, as they depend on more than files:
    those on GPUs, those that begin from a checkpoint or other parameters, and those that read a teacher or a reward model.
    """
    run_dir = Path(str(config.run_dir))
    if config.task.teacher is not None or any(Path(name).is_dir() for name in config.task.rewards):
        return None
    if config.device != "cpu" or config.init_from is not None or (run_dir / "checkpoints").exists():
        return None
    if config.resume.path not in ("auto", "never") or config.resume.state != "all":
        return None
    try:
        contents, sources = list(_contents(config)), source_digests(plug_ins(config))
    except (OSError, Unreadable, MparError, _NotKeptError):  # preparing the job says what is wrong
        return None
    code = [*code_facts(_PACKAGES), *sources]
    facts = [asdict(config) | {"run_dir": None}, resolved | {"run_dir": None}, str(Path.cwd()), *code]
    text = json.dumps(facts, sort_keys=True, default=repr).encode()
    return KeptJob(folder, digest_of([("configuration", text), *contents]))


def _contents(config: TrainConfig) -> Iterator[tuple[str, bytes]]:
    """The names of all files that the job of `config` depends on, and hashes of their contents."""
    total_bytes = 0
    for path, in_model_folder in _files(config):
        with open_regular(path) as file:
            found = os.fstat(file.fileno())
            if in_model_folder and found.st_size > _MOST_WEIGHTS_BYTES:
                yield str(path), f"{found.st_size} {found.st_mtime_ns} {found.st_ctime_ns} {found.st_ino}".encode()
                continue
            total_bytes += found.st_size
            if total_bytes > _MOST_READ_BYTES:
                raise _NotKeptError
            yield str(path), hashlib.file_digest(file, "sha256").digest()


def _files(config: TrainConfig) -> Iterator[tuple[Path, bool]]:
    """Each file, and whether it is of a model's folder."""
    yield from ((path, False) for path in _data_files(config))
    for folder in (config.model.path, config.data.tokenizer):
        if folder is not None and folder != "bytes":
            yield from ((path, True) for path in sorted(Path(folder).iterdir()) if path.is_file())


def _data_files(config: TrainConfig) -> Iterator[Path]:
    for names in (config.data.sources, *config.evaluation.sets.values()):
        for source in find_sources(config.task.kind, names) if names else ():
            if source.remote:
                raise _NotKeptError
            yield from source.paths
    if config.schedule.table is not None:
        yield Path(config.schedule.table)


def _pack(key: str, summary: str, files: dict[str, bytes]) -> bytes:
    sizes = {name: len(data) for name, data in files.items()}
    body = b"".join([json.dumps({"key": key, "summary": summary, "sizes": sizes}).encode(), b"\n", *files.values()])
    return hashlib.sha256(body).hexdigest().encode() + b"\n" + body


def _unpack(content: bytes, key: str) -> tuple[str, dict[str, bytes]]:
    """What was printed, and the files. Raises NotUsableError if the content is damaged or is of another job."""
    checksum, _, body = content.partition(b"\n")
    if hashlib.sha256(body).hexdigest().encode() != checksum:
        raise NotUsableError("it does not have the checksum that was written with it")
    head, _, data = body.partition(b"\n")
    described = json.loads(head)
    if described["key"] != key:
        raise NotUsableError("it is of another configuration")
    files, start = {}, 0
    for name, size in described["sizes"].items():
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise NotUsableError(f"{name} lies elsewhere")
        files[name] = data[start : start + size]
        start += size
    return described["summary"], files
