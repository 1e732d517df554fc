"""The job file: what a rank reads is what the launcher wrote, and nothing that another user could have written."""

import dataclasses
import os
from pathlib import Path

import pytest

from mpar.cli._compose import compose_config
from mpar.errors import ConfigError, PlainDataError
from mpar.train import Job, TrainConfig, read_job, write_job


@pytest.fixture
def folder(tmp_path):
    """A folder that only its owner can write, with a job in it."""
    private = tmp_path / "job"
    private.mkdir(mode=0o700)
    return private


def test_a_job_comes_back(folder, program):
    """Configuration with every sort of value, records, programs and checkpoint are equal, and another umask changes nothing."""
    overrides = ['data.model_name=["甲","A"]', "schedule.layout=[1,2,1]", "model.router={group: rank}", "time_limit=90"]
    config, resolved = compose_config("train", TrainConfig, overrides)
    job = Job(config, resolved, program, Path("a/b"), program)
    before = os.umask(0)
    try:
        write_job(folder, job)
    finally:
        os.umask(before)
    again = read_job(folder)
    assert (again.config, again.resolved, again.resume) == (config, resolved, Path("a/b"))
    assert dataclasses.asdict(again.config) == dataclasses.asdict(config)
    assert list(again.resolved) == list(resolved)
    assert again.evaluation is not None
    write_job(folder, again)
    assert read_job(folder).program.text() == program.text()


def test_a_job_of_others_is_refused(folder, program, config):
    """A file or a folder that others may write is not read; a damaged file is named as that."""
    write_job(folder, Job(config, {}, program))
    file = folder / "job.plain"
    for place, mode in ((file, 0o620), (file, 0o602), (folder, 0o770), (folder, 0o707)):
        before = place.stat().st_mode
        place.chmod(mode)
        with pytest.raises(ConfigError, match="another user may have written it"):
            read_job(folder)
        place.chmod(before)
    content = bytearray(file.read_bytes())
    content[-2] ^= 1
    file.write_bytes(content)
    with pytest.raises(PlainDataError, match="damaged"):
        read_job(folder)
