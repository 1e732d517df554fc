"""The cache of tokenised data: what is damaged, of other data, or of somebody else is never trained on."""

import hashlib
import json
import os
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from mpar.data import DataConfig, Documents, LoadReport, load_dataset
from mpar.data._cache import Entry, cached, entry_folder, load_entry, save_entry
from mpar.errors import DataError

ROWS = [{"text": 10 * letter} for letter in "abc"]
FILES = ("tokens", "trained", "starts", "lengths", "rows", "sources", "entry.json")


@pytest.fixture
def settings(write_rows, tmp_path):
    return DataConfig(
        kind="pt", sources=(write_rows(*ROWS, b"{\n"),), batch_size=2, seq_len=64, cache_dir=str(tmp_path / "cache")
    )


@pytest.fixture
def entry(settings, byte_tokenizer):
    """The folder of the one entry, and the fingerprint of the documents that are in it."""
    fingerprint = load_dataset(settings, byte_tokenizer).documents.fingerprint
    (folder,) = Path(settings.cache_dir).iterdir()
    return folder, fingerprint


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def forge(file: Path) -> None:
    """Other values with a new checksum of their description: only the checksum of the arrays tells."""
    if file.name == "entry.json":
        content = json.loads(file.read_bytes().partition(b"\n")[2])
        text = json.dumps({**content, "names": content["names"][::-1], "key": "0" * 64}).encode()
        file.write_bytes(hashlib.sha256(text).hexdigest().encode() + b"\n" + text)
    else:
        flip(file)


def pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def link(file: Path) -> None:
    file.rename(file.parent.parent / "elsewhere")
    file.symlink_to(file.parent.parent / "elsewhere")


DAMAGES = {
    "flipped bit": flip,
    "forged": forge,
    "cut": lambda file: file.write_bytes(file.read_bytes()[:-1]),
    "longer": lambda file: file.write_bytes(file.read_bytes() + b"\0"),
    "empty": lambda file: file.write_bytes(b""),
    "missing": Path.unlink,
    "a pickle": lambda file: file.write_bytes(pickle.dumps({})),
    "a pipe": pipe,
    "a link": link,
    "writable by others": lambda file: file.chmod(0o666),
}


@pytest.mark.cases(8)
@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_named_and_made_anew(settings, entry, byte_tokenizer, name, damage):
    """Whatever happened to a file, the documents are those of the source, the report says so once, and the next load is fine."""
    folder, fingerprint = entry
    DAMAGES[damage](folder / name)
    again = load_dataset(settings, byte_tokenizer)
    assert again.documents.fingerprint == fingerprint and not again.report.cached
    assert f"the cached data in {folder} were not used, but made anew" in str(again.report)
    after = load_dataset(settings, byte_tokenizer).report
    assert after.cached and not after.notice and after.malformed == again.report.malformed


def test_folder_that_others_can_write_into(settings, entry, byte_tokenizer):
    """It is replaced by one that they cannot write into."""
    entry[0].chmod(0o777)
    assert "others than you could have written the folder" in load_dataset(settings, byte_tokenizer).report.notice
    assert load_dataset(settings, byte_tokenizer).report.cached
    assert entry[0].stat().st_mode & 0o777 == 0o700
    assert {file.stat().st_mode & 0o777 for file in entry[0].iterdir()} == {0o600}


@pytest.mark.parametrize("kind", ["another user", "a link", "a file", "a pipe"])
def test_what_is_no_entry_of_this_user_is_refused(settings, entry, byte_tokenizer, monkeypatch, tmp_path, kind):
    """Nothing is read from it, and nothing is deleted."""
    folder, _ = entry
    if kind == "another user":
        other = os.geteuid() + 1
        monkeypatch.setattr(os, "geteuid", lambda: other)
        folder = folder.rename(entry_folder(folder.parent, folder.name.partition("-")[0]))
    else:
        folder.rename(tmp_path / "elsewhere")
        {"a link": lambda path: path.symlink_to(tmp_path / "elsewhere"), "a file": Path.touch, "a pipe": os.mkfifo}[kind](folder)
    with pytest.raises(DataError, match="cannot use the cached data in") as caught:
        load_dataset(settings, byte_tokenizer)
    assert str(folder) in str(caught.value) and os.path.lexists(folder)


def test_entry_of_other_data_is_not_used(entry):
    """An entry that was renamed to the name of another is told apart by the whole key in it."""
    folder, _ = entry
    found = load_entry(folder, "0" * 64)
    assert isinstance(found, str) and "they are of other data or settings" in found


def test_two_writers_of_one_entry(settings, entry, byte_tokenizer):
    """The slower one leaves the faster one's files alone, and no draft behind."""
    folder, _ = entry
    batches = load_dataset(settings, byte_tokenizer)
    written = (folder / "tokens").stat().st_mtime_ns
    save_entry(folder, "key", Entry(batches.documents, batches.report), replaced=False)
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]
    assert (folder / "tokens").stat().st_mtime_ns == written


def test_folder_that_cannot_be_written(settings, byte_tokenizer, tmp_path):
    """The key that chooses another is named."""
    (tmp_path / "cache").touch()
    with pytest.raises(DataError, match=r"data\.cache_dir"):
        load_dataset(settings, byte_tokenizer)


def test_only_one_of_several_makes_an_entry(tmp_path):
    """The others wait until it is there, and nothing but the entry stays behind."""
    made, began = [], threading.Barrier(4)
    documents = Documents.from_ids([([1, 2, 3], [True] * 3)])

    def make():
        made.append(threading.get_ident())
        return Entry(documents, LoadReport(num_rows=1))

    def take(_):
        began.wait()
        return cached(tmp_path / "entry", "key", make).documents.fingerprint

    with ThreadPoolExecutor(4) as threads:
        assert set(threads.map(take, range(4))) == {documents.fingerprint}
    assert len(made) == 1 and [path.name for path in tmp_path.iterdir()] == ["entry"]


def test_who_is_interrupted_leaves_nothing(tmp_path):
    """Ctrl-C while an entry is made: no draft and no lock, and the next one makes it."""

    def interrupted():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cached(tmp_path / "entry", "key", interrupted)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", ["pt", "sft"])
def test_workers_make_the_same_documents(byte_tokenizer, write_rows, kind):
    """Of texts and of conversations; what cannot be used is counted alike, in the same order."""
    rows = [
        {"text": "t" * n, "query": "q", "response": "r" * n} if n % 7 else {"text": "", "query": "q", "response": 1}
        for n in range(1, 600)
    ]
    wanted = DataConfig(kind=kind, sources=(write_rows(*rows),), batch_size=2, seq_len=300)
    alone, two = (load_dataset(replace(wanted, workers=workers), byte_tokenizer) for workers in (1, 2))
    assert alone.documents.fingerprint == two.documents.fingerprint and alone.report == two.report
    assert alone.report.num_used > 200 and alone.report.num_malformed + alone.report.num_empty == 85
