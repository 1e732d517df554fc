"""Kept jobs: the second start of a run loads no torch, is the same run, and is prepared again whenever anything is different."""

import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mpar import code_facts
from mpar.cli._compose import compose_config
from mpar.train import TrainConfig, _kept_job, find_kept_job, read_metrics
from tests.cli.conftest import SMALL, environment, run_mpar
from tests.tiers import examples

ROW = '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n'


@pytest.fixture
def rows(tmp_path) -> Path:
    """A file of data, in the working directory."""
    path = tmp_path / "rows.jsonl"
    path.write_text(ROW)
    return path


@pytest.fixture
def find(tmp_path, rows, monkeypatch):
    """`find("steps=9", ...)`: where the job of a small run with these changes is kept."""
    monkeypatch.chdir(tmp_path)

    def of(*overrides: str):
        config, resolved = compose_config("train", TrainConfig, [*SMALL, "data.sources=[rows.jsonl]", "run_dir=run", *overrides])
        return find_kept_job(tmp_path / "kept", config, resolved)

    return of


@pytest.fixture
def kept(find, tmp_path):
    """A kept job, whose files are not those of a real one."""
    folder = tmp_path / "job"
    (folder / "data" / "entry").mkdir(parents=True)
    for name in ("job.plain", "data/entry/tokens", "data/entry/entry.json"):
        (folder / name).write_bytes(name.encode() * 9)
    find().keep(folder, "what was printed\n")
    return find()


def copied(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_job_comes_back(kept, tmp_path):
    """All its files, each this user's alone, and what was printed; nothing else that was in the folder."""
    assert kept.restore(tmp_path / "again") == "what was printed\n"
    assert copied(tmp_path / "again") == copied(tmp_path / "job")
    assert all(path.stat().st_mode & 0o077 == 0 for path in (tmp_path / "again").rglob("*") if path.is_file())


def test_damage_is_noticed_wherever_it_is(kept, tmp_path):
    """A flipped bit, a cut end or appended bytes: nothing is copied. So with another job's entry, and with one of other users."""
    (path,) = kept.folder.iterdir()
    good, generator = path.read_bytes(), random.Random(0)
    for place in (0, 64, 65, len(good) - 1, *(generator.randrange(len(good)) for _ in range(examples(60)))):
        flipped = bytearray(good)
        flipped[place] ^= 1 << generator.randrange(8)
        for content in (bytes(flipped), good[:place], good + bytes(1)):
            path.write_bytes(content)
            assert kept.restore(tmp_path / "again") is None, place
    path.write_bytes(good)
    os.replace(path, path.with_name(f"{'0' * 64}.job"))
    assert _kept_job.KeptJob(kept.folder, "0" * 64).restore(tmp_path / "again") is None
    path.write_bytes(good)
    path.chmod(0o622)
    assert kept.restore(tmp_path / "again") is None
    assert not (tmp_path / "again").exists()


def test_a_full_disk_is_no_error(kept, tmp_path, monkeypatch):
    """Where a job cannot be copied to, it is prepared, which says what is wrong."""

    def full(path, content):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(_kept_job, "write_private", full)
    assert kept.restore(tmp_path / "again") is None


@pytest.mark.parametrize("name", ["../outside", "/tmp/outside", "data/../../outside"])
def test_no_file_is_written_elsewhere(kept, tmp_path, name):
    """An entry whose files lie outside of the folder is not used."""
    (path,) = kept.folder.iterdir()
    path.write_bytes(_kept_job._pack(kept.key, "", {name: b"x"}))
    assert kept.restore(tmp_path / "job") is None
    assert not (tmp_path / "outside").exists()


def test_the_key_is_of_all_that_preparing_depends_on(find, rows, tmp_path, monkeypatch):
    """Where the run writes is not part of it. All settings are, the content of data and tokenizer, source and packages."""
    key = find().key
    assert find("run_dir=elsewhere").key == key
    keys = [key, *(find(one).key for one in ("steps=3", "optimizer.lr=1e-4", "seed=1", "mesh=fsdp2", "timeout_s=77"))]
    rows.write_text(ROW + ROW)
    keys.append(find().key)
    (tmp_path / "held_out.jsonl").write_text(ROW)
    keys.append(find("evaluation.sources=[held_out.jsonl]").key)
    (tmp_path / "tokenizer").mkdir()
    for content in ("{}", "[]"):
        (tmp_path / "tokenizer" / "tokenizer.json").write_text(content)
        keys.append(find("data.tokenizer=tokenizer").key)
    for name in ("_source_hash", "_torch_build"):
        monkeypatch.setattr(code_facts, name, lambda: "another")
        keys.append(find().key)
    assert len(set(keys)) == len(keys)


def test_runs_that_begin_from_something_are_prepared(find, rows, tmp_path):
    """A checkpoint, other parameters, a GPU, data that are missing or a pipe: preparing looks at them, and says what is wrong."""
    for override in ("init_from=elsewhere", "resume=elsewhere", "resume=weights", "device=cuda"):
        assert find(override) is None, override
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    assert find() is None
    assert find("run_dir=other") is not None
    rows.unlink()
    assert find("run_dir=other") is None
    os.mkfifo(rows)
    assert find("run_dir=other") is None


def test_large_data_are_not_read_twice(find, kept, tmp_path, monkeypatch):
    """Jobs of large data, and large jobs, are not kept."""
    monkeypatch.setattr(_kept_job, "_MOST_JOB_BYTES", 10)
    find("steps=3").keep(tmp_path / "job", "")
    assert find("steps=3").restore(tmp_path / "again") is None
    monkeypatch.setattr(_kept_job, "_MOST_READ_BYTES", 10)
    assert find() is None


@pytest.mark.full("starts four runs")
def test_the_second_start_is_the_same_run_and_loads_no_torch(tmp_path, rows):
    """It says that all is from the cache, imports torch only after its ranks have trained, and gives the same losses; the
    learning rate needs another job but no other program; malformed rows are listed each time."""
    rows.write_text(ROW * 4)
    command = ["train", *SMALL, "data.sources=[rows.jsonl]", "steps=2", "compile_cache=kept"]
    said = {}
    for name, more in {"one": [], "two": [], "faster": ["optimizer.lr=0.5"]}.items():
        words = [sys.executable, "-X", "importtime", "-m", "mpar", *command, f"run_dir={name}", *more]
        done = subprocess.run(words, cwd=tmp_path, env=environment(), capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        said[name] = done.stderr.splitlines()
    at = {name: next(n for n, line in enumerate(lines) if line.startswith("prepared in")) for name, lines in said.items()}
    loads = {name: next(n for n, line in enumerate(lines) if re.search(r"\| +torch$", line)) for name, lines in said.items()}
    assert "program compiled in" in said["one"][at["one"]] and loads["one"] < at["one"]
    assert "all of it from the cache" in said["two"][at["two"]] and loads["two"] > at["two"]
    assert "program from the cache" in said["faster"][at["faster"]]
    shown = [[line for line in said[name] if line.startswith(("tiny_", "data:", "program:"))] for name in ("one", "two")]
    assert shown[0] == shown[1] and len(shown[0]) == 3
    records = [read_metrics(tmp_path / name / "metrics.jsonl") for name in ("one", "two")]
    one, two = ([(r["step"], r["loss"], r["grad_norm"]) for r in of_run] for of_run in records)
    assert one == two and len(one) == 2
    assert (tmp_path / "two" / "config.yaml").read_text() == (tmp_path / "one" / "config.yaml").read_text().replace(
        f"run_dir: {tmp_path}/one", f"run_dir: {tmp_path}/two"
    ).replace("run_dir: one", "run_dir: two")


@pytest.mark.full("starts two runs")
def test_malformed_rows_are_listed_each_time(tmp_path, rows):
    """A job with malformed rows is prepared each time, which lists them."""
    rows.write_text(ROW * 4 + "nonsense\n")
    for name in ("one", "two"):
        words = ["data.sources=[rows.jsonl]", "steps=1", "compile_cache=kept", f"run_dir={name}"]
        done = run_mpar(["train", *SMALL, *words], tmp_path)
        assert done.returncode == 0, done.stderr
        assert "nonsense" in (tmp_path / name / "malformed.jsonl").read_text()
