"""Attacks on the kept programs: whatever stands in an entry, a run gets the right program, and no error that is not ours."""

import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

from mpar import code_facts, kept_files, plain
from mpar.cli._compose import compose_config
from mpar.errors import MparError
from mpar.optim import CLASSES
from mpar.program import Program
from mpar.train import TrainConfig, _program_cache, make_setup
from mpar.train._program_cache import ProgramCache, program_key
from mpar.train.compile import compile_evaluation, compile_program
from mpar.train.prepare import prepare
from tests.cli.conftest import SMALL, environment
from tests.tiers import examples

TINY = [*SMALL, "mesh=one", "strategy=ddp", "steps=3"]
KEY = "0123456789abcdef" * 4


def setup_of(*overrides: str):
    """The setup of a small run, with these changes."""
    return make_setup(compose_config("train", TrainConfig, [*TINY, *overrides])[0])


@pytest.fixture(scope="module")
def compiled() -> Program:
    """A small program."""
    return compile_program(setup_of())


@pytest.fixture
def cache(tmp_path, compiled) -> ProgramCache:
    """A cache that keeps the program."""
    cache = ProgramCache(tmp_path / "programs")
    assert re.fullmatch(r"program compiled in [\d.]+ s", cache.get(KEY, lambda: compiled)[1])
    return cache


def entry(cache: ProgramCache) -> Path:
    """The file of the only entry."""
    (path,) = cache.folder.iterdir()
    return path


def not_again() -> Program:
    raise AssertionError("the program was compiled again")


def refused(cache: ProgramCache, compiled: Program) -> str:
    """Check that the entry is not used, that the line says why, and that a good one replaces it; returns the line."""
    another = replace(compiled, num_microbatches=compiled.num_microbatches)
    program, line = cache.get(KEY, lambda: another)
    assert program is another
    assert "was not used" in line and "\n" not in line, line
    return line


def test_a_kept_program_is_not_compiled_again(cache, compiled):
    """The second time, the program is read; but for the optimizer it is equal, and the file is this user's alone."""
    program, line = cache.get(KEY, not_again)
    assert program.to_plain() == compiled.with_optimizer(None).to_plain()
    assert line.startswith("program from the cache")
    assert (entry(cache).stat().st_mode & 0o777, cache.folder.stat().st_mode & 0o777) == (0o600, 0o700)


def test_damage_is_noticed_wherever_it_is(cache, compiled):
    """Flipped bits, cut ends, appended bytes, holes of zeros: the program is compiled again, and then kept."""
    path, generator = entry(cache), random.Random(0)
    good = path.read_bytes()
    places = [*range(0, 120, 7), *(generator.randrange(len(good)) for _ in range(examples(60))), len(good) - 1]
    damaged = []
    for place in places:
        flipped = bytearray(good)
        flipped[place] ^= 1 << generator.randrange(8)
        damaged += [bytes(flipped), good[:place], good[:place] + bytes(len(good) - place)]
    for content in (*damaged, b"", good + b"\0", good + good, b"\n" * 100, os.urandom(1000)):
        path.write_bytes(content)
        refused(cache, compiled)
        assert path.read_bytes() == good
    assert cache.get(KEY, not_again)


def test_other_versions_are_compiled_again(cache, compiled):
    """An entry with other definitions, and the entry of another configuration under this name, do not count."""
    path = entry(cache)
    good = path.read_bytes()
    words = good.split(b" ", 3)
    path.write_bytes(b" ".join([*words[:2], b"0" * 16, words[3]]))
    assert "another version" in refused(cache, compiled)
    cache.get("f" * 64, lambda: compiled)
    os.replace(cache.folder / f"{'f' * 64}.program", path)
    assert "another configuration" in refused(cache, compiled)
    path.write_bytes(plain.to_text(Program, compiled, CLASSES))
    assert "it holds a 'Program'" in refused(cache, compiled)


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666], ids=oct)
def test_what_others_may_write_is_not_read(cache, compiled, mode):
    """An entry that a group or everybody may write is replaced; in a folder of that kind nothing is read or kept."""
    entry(cache).chmod(mode)
    assert "another user may have written it" in refused(cache, compiled)
    assert cache.get(KEY, not_again)
    cache.folder.chmod(0o700 | mode)
    line = refused(cache, compiled)
    assert "others than you may write" in line and "not kept" in line


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_what_belongs_to_others_is_not_read(cache, compiled):
    """An entry or a folder of another user does not count, even if nobody else may write it."""
    os.chown(entry(cache), 12345, 12345)
    assert "another user may have written it" in refused(cache, compiled)
    os.chown(cache.folder, 12345, 12345)
    assert "not kept" in refused(cache, compiled)


@pytest.mark.cases(6)
@pytest.mark.parametrize("kind", ["fifo", "folder", "full folder", "link", "device", "loop"])
def test_what_is_no_file_is_not_read(cache, compiled, kind, tmp_path):
    """Pipes, folders, devices and links in the place of an entry end in a compilation, without waiting."""
    path = entry(cache)
    path.rename(tmp_path / "good")
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "link":
        path.symlink_to(tmp_path / "good")
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "loop":
        path.symlink_to(path)
    else:
        path.mkdir()
        (path / "file").write_bytes(b"") if kind == "full folder" else None
    began = time.perf_counter()
    refused(cache, compiled)
    assert time.perf_counter() - began < 5
    if "folder" not in kind:
        assert cache.get(KEY, not_again)


@pytest.mark.parametrize("where", ["file", "missing parent", "/dev/null", "/proc/none"])
def test_a_folder_that_cannot_be_used_costs_only_a_line(tmp_path, compiled, where):
    """Without a place for entries, programs are compiled and not kept."""
    (tmp_path / "file").write_bytes(b"")
    folder = {"file": tmp_path / "file", "missing parent": tmp_path / "file" / "programs"}.get(where, Path(where))
    program, line = ProgramCache(folder).get(KEY, lambda: compiled)
    assert program is compiled
    assert "not kept" in line and "\n" not in line


def test_the_cache_is_bounded(tmp_path, compiled, monkeypatch):
    """The entries that were used last stay, up to a number and a size; other files in the folder are not touched."""
    cache, keys = ProgramCache(tmp_path / "programs"), [f"{n:064x}" for n in range(5)]
    monkeypatch.setattr(_program_cache, "_MOST_ENTRIES", 3)
    for n, key in enumerate(keys):
        cache.get(key, lambda: compiled)
        os.utime(cache.folder / f"{key}.program", (n, n))
        (cache.folder / "notes.program").write_text("mine")
        if n == 2:
            cache.get(keys[0], not_again)  # used again, just now
    names = {path.name for path in cache.folder.iterdir()}
    assert names == {"notes.program", *(f"{key}.program" for key in (keys[0], keys[3], keys[4]))}
    draft = cache.folder / ".draft-1"
    draft.write_bytes(b"left by a process that was killed")
    os.utime(draft, (1, 1))
    monkeypatch.setattr(_program_cache, "_MOST_BYTES", 1)
    cache.get("e" * 64, lambda: compiled)
    assert {path.name for path in cache.folder.iterdir()} == {"notes.program"}


def test_a_full_disk_costs_only_a_line(tmp_path, compiled, monkeypatch):
    """A write that fails leaves no draft, and the run goes on."""

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    cache = ProgramCache(tmp_path / "programs")
    monkeypatch.setattr(kept_files.os, "replace", full)
    assert cache.get(KEY, lambda: compiled)[1].endswith("it is not kept: No space left on device")
    assert not list(cache.folder.iterdir())


RACER = """
import sys
from pathlib import Path
from mpar.program import Program
from mpar.train import _program_cache
_program_cache._MOST_ENTRIES = 3
text = Path(sys.argv[2]).read_bytes()
cache = _program_cache.ProgramCache(Path(sys.argv[1]))
for n in range(40):
    key = f"{n % 5:064x}"
    program, line = cache.get(key, lambda: Program.from_plain(text))
    assert program.to_plain() == text
    assert "not" not in line, line
"""


@pytest.mark.full("three processes that load torch")
def test_processes_share_the_cache(tmp_path, compiled):
    """Three processes that read, write and delete the same few entries all the time get right programs only."""
    (tmp_path / "program").write_bytes(compiled.with_optimizer(None).to_plain())
    command = [sys.executable, "-c", RACER, str(tmp_path / "programs"), str(tmp_path / "program")]
    racers = [subprocess.Popen(command, stderr=subprocess.PIPE, env=environment(), text=True) for _ in range(3)]
    for racer in racers:
        assert (racer.communicate()[1], racer.returncode) == ("", 0)


SAME = ["seed=7", "run_dir=x", "steps=9", "optimizer.lr=1e-4", "optimizer.lr_decay=constant optimizer.min_ratio=null",
        "checkpoint.every=7", "data.shuffle=false", "timeout_s=9", "task.chat=[]", "plan.lines=3"]  # fmt: skip
OTHER = ["data.batch_size=8", "data.seq_len=64", "optimizer.betas=[0.8,0.9]", "optimizer.clip_norm=null", "optimizer=sgd",
         "optimizer.weight_decay=0.2", "precision=bf16", "recompute=full", "model.config.rope_theta=5000",
         "schedule.num_microbatches=2", "mesh=fsdp2", "strategy=zero1", "schedule.num_slices=2", "hardware=h100_dgx",
         "model.vocab_multiple=64", "kernels=torch", "data.token_weights=react"]  # fmt: skip


def changed_values(config: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """This group with one value changed, for every number, truth and choice in it, and the name of that value."""
    hints = get_type_hints(type(config))
    for described in fields(config):
        value, name = getattr(config, described.name), prefix + described.name
        if is_dataclass(value):
            for inner, group in changed_values(value, f"{name}."):
                yield inner, replace(config, **{described.name: group})
            continue
        choices = [choice for part in (hints[described.name], *get_args(hints[described.name])) for choice in get_args(part)]
        others: list[Any] = [choice for choice in choices if isinstance(choice, str) and choice != value]
        if isinstance(value, bool):
            others = [not value]
        elif isinstance(value, (int, float)):
            others = [value * 2 + (1 if isinstance(value, int) else 0.1)]
        for other in others[:3]:
            yield f"{name}={other}", replace(config, **{described.name: other})


@pytest.mark.full("compiles a program for each value that is no part of the key")
def test_what_is_no_part_of_the_key_changes_no_program(compiled):
    """Whichever value of the configuration is changed: either the key changes, or the program has the same bytes."""
    setup, without_key = setup_of(), []
    key, expected = program_key(setup, "training"), compiled.with_optimizer(None).to_plain()
    for name, config in changed_values(setup.config):
        try:
            other = make_setup(config)
            if program_key(other, "training") != key:
                continue
            program = compile_program(other)
        except MparError:
            continue  # a run with this value is refused
        assert program.with_optimizer(None).to_plain() == expected, name
        without_key.append(name)
    assert len(without_key) > 30 and "seed=1" in without_key


@pytest.mark.full("makes thirty setups")
def test_the_key_is_of_what_the_program_depends_on(monkeypatch):
    """It stays with what no code depends on, and changes with all else: role, source, packages, files that are named."""
    key = program_key(setup_of(), "training")
    assert key == program_key(setup_of(), "training")
    for overrides in SAME:
        assert program_key(setup_of(*overrides.split()), "training") == key, overrides
    keys = [key, program_key(setup_of(), "evaluation"), *(program_key(setup_of(one), "training") for one in OTHER)]
    monkeypatch.setattr(code_facts, "_source_hash", lambda: "another source")
    keys.append(program_key(setup_of(), "training"))
    monkeypatch.setattr(code_facts, "_version", lambda package: "another version")
    keys.append(program_key(setup_of(), "training"))
    assert len(set(keys)) == len(keys)


def test_a_table_of_actions_counts_by_its_content(tmp_path):
    """Another table in the same file is another program; a table that is missing is the compiler's to refuse."""
    table = tmp_path / "table.csv"
    keys = [program_key(setup_of(f"schedule.table={table}"), "training")]
    for content in ("0F0,0B0", "0F0,0F1,0B0,0B1"):
        table.write_text(content)
        keys.append(program_key(setup_of(f"schedule.table={table}"), "training"))
    assert len(set(keys)) == 3


@pytest.mark.full("two more programs, to show that the learning rate is no part of the code")
def test_a_kept_program_gets_the_learning_rate_of_the_run(tmp_path):
    """The program that another learning rate and number of steps finds is the one that it would compile, in every byte."""
    faster = setup_of("optimizer.lr=0.5", "steps=40", "evaluation.fraction=0.2")
    kept = tmp_path / "programs"
    first = prepare(setup_of("evaluation.fraction=0.2", f"run_dir={tmp_path}"), {}, _folder(tmp_path, "1"), kept)
    second = prepare(replace(faster, config=replace(faster.config, run_dir=str(tmp_path))), {}, _folder(tmp_path, "2"), kept)
    assert first.compiled.startswith("program compiled in ") and second.compiled.startswith("program from the cache")
    fresh = compile_program(faster)
    assert second.job.program.to_plain(CLASSES) == fresh.to_plain(CLASSES) != first.job.program.to_plain(CLASSES)
    assert second.job.evaluation.to_plain(CLASSES) == compile_evaluation(faster, fresh).to_plain(CLASSES)
    assert len(list(kept.iterdir())) == 2


def _folder(parent: Path, name: str) -> Path:
    (parent / name).mkdir(mode=0o700)
    return parent / name
