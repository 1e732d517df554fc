"""`mpar measure`: what it finds is a profile that can be read; wrong wishes are refused before anything is measured."""

from dataclasses import asdict, fields

import pytest
import torch
import yaml

from mpar.cli.main import main
from mpar.errors import MeshError
from mpar.hardware import Hardware, hardware
from mpar.measure import Machine, facts_of, measure_machine, profile_of, profile_text

RATES = {"flops_per_s.float32": 123456.0, "launch_s": 2.0, "op_factors.rope": 3.21987}


def test_a_profile_has_what_was_measured_and_the_rest_of_another():
    like = hardware("cpu")
    profile = profile_of("mine", RATES, {"ranks_per_node": 3}, like)
    assert profile.flops_per_s == {"float32": 123000.0}
    assert (profile.name, profile.launch_s, profile.ranks_per_node, profile.op_factors) == ("mine", 2.0, 3, {"rope": 3.22})
    assert profile.cross_bytes_per_s == like.cross_bytes_per_s


def test_the_text_of_a_profile_is_that_profile_and_names_what_was_not_measured():
    profile = profile_of("mine", RATES, {"ranks_per_node": 3}, hardware("cpu"))
    text = profile_text(profile, RATES, {"ranks_per_node": 3}, hardware("cpu"), "Measured here.")
    assert Hardware(**yaml.safe_load(text)) == profile
    first, second = text.splitlines()[:2]
    assert first == "# Measured here."
    named = set(second.removesuffix(".").partition("cpu: ")[2].split(", "))
    measured = {"name", "flops_per_s", "launch_s", "op_factors", "ranks_per_node"}
    assert named == {field.name for field in fields(Hardware)} - measured


def test_two_ranks_measure_every_rate():
    """Each rate is told once, and is that of both ranks; the profile of them predicts."""
    told = {}
    found = measure_machine(Machine(2, "cpu", 1, seconds_each=0.002), lambda name, rate: told.setdefault(name, rate))
    assert told == found
    assert all(rate > 0 for rate in found.values())
    own = {"name", *(path.partition(".")[0] for path in found), *facts_of(Machine(2, "cpu", 1))}
    missing = set(asdict(hardware("cpu"))) - own
    assert missing == {
        *("cross_bytes_per_s", "cross_latency_s", "peak_flops_per_s", "host_bytes_per_s", "hop_s", "contention", "wave_s")
    }


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without GPUs")
def test_gpus_that_are_not_there():
    with pytest.raises(MeshError, match="this machine has 0"):
        measure_machine(Machine(2, "cuda", 1), lambda name, rate: None)


def test_a_profile_is_not_overwritten(tmp_path, capsys):
    there = tmp_path / "there.yaml"
    there.write_text("mine")
    assert main(["measure", f"out={there}"]) == 2
    assert "it exists" in capsys.readouterr().err
    assert there.read_text() == "mine"


def test_a_folder_that_cannot_be_made(tmp_path, capsys):
    """Refused before anything is measured."""
    (tmp_path / "file").write_text("")
    assert main(["measure", f"out={tmp_path / 'file' / 'x.yaml'}"]) == 1
    captured = capsys.readouterr()
    assert "file" in captured.err
    assert "measuring" not in captured.err


def test_the_profile_to_start_from_must_exist(tmp_path, capsys):
    assert main(["measure", "like=h300", f"out={tmp_path / 'x.yaml'}"]) != 0
    assert "h100_dgx" in capsys.readouterr().err
