"""`mpar checkpoint`: what it prints, and its exit codes."""

import shutil

import pytest

from mpar.cli.main import main
from tests.checkpoint.ranks import save_all
from tests.checkpoint.test_golden import EXTRAS, GOLDEN, MESH, golden_state

SOUND = GOLDEN / "version2"


@pytest.fixture
def run_dir(tmp_path):
    """A run with checkpoints of steps 20 and 30: another learning rate, another value of one tensor, and one tensor less."""
    state = golden_state()
    save_all(tmp_path / "checkpoints", 20, state, MESH, extras=EXTRAS)
    table, spec = state.pop("params.embed.table_VD")
    changed = table.clone()
    changed[7, 5] += 0.5
    del state["mask"]
    extras = {**EXTRAS, "config": {**EXTRAS["config"], "lr": 0.002}}
    save_all(tmp_path / "checkpoints", 30, {"params.embed.table_VD": (changed, spec), **state}, MESH, extras=extras)
    return tmp_path


def test_show(capsys):
    """Step, mesh, and a row for each tensor with shape, dtype, shards and norm."""
    assert main(["checkpoint", "show", str(SOUND)]) == 0
    out = capsys.readouterr().out
    table = golden_state()["params.embed.table_VD"][0]
    assert "step 20, saved from Mesh(fsdp=2, tp=2), format 2" in out and "configuration: 2 keys" in out
    rows = [line.split() for line in out.splitlines()]
    assert ["params.embed.table_VD", "[8,", "6]", "float32", "2", f"{table.double().norm():.6g}"] in rows
    assert ["params.layers.0.up_DF", "[6,", "10]", "bfloat16", "4", "8.62056"] in rows
    assert "6 tensors, 160 values, 515 bytes" in out
    assert main(["checkpoint", "show", "--no-norms", str(GOLDEN / "version1")]) == 0
    assert "6.69818" not in capsys.readouterr().out


def test_verify_looks_at_all(run_dir, capsys):
    """Of a run the newest is verified. A damaged one among sound ones makes the exit code 1, and all are named."""
    file = run_dir / "checkpoints" / "step_00000030" / "rank-00001.safetensors"
    assert main(["checkpoint", "verify", str(run_dir), str(SOUND)]) == 0
    assert "step_00000030: sound, step 30, 5 tensors" in capsys.readouterr().out
    content = bytearray(file.read_bytes())
    content[-30] ^= 1
    file.write_bytes(content)
    assert main(["checkpoint", "verify", str(run_dir), str(SOUND)]) == 1
    out = capsys.readouterr().out
    assert "step_00000030: not sound" in out and f"{file}: the bytes of" in out and "version2: sound" in out


def test_diff(run_dir, capsys):
    """Changed values of the configuration and of tensors, and missing tensors, with figures; equal ones are counted."""
    old, new = (str(run_dir / "checkpoints" / f"step_000000{step}") for step in (20, 30))
    assert main(["checkpoint", "diff", old, new]) == 1
    out = capsys.readouterr().out
    norm = golden_state()["params.embed.table_VD"][0].double().norm()
    assert "config.lr: 0.001 -> 0.002" in out and "step: 20 -> 30" in out and f"mask: only in {old}" in out
    assert f"params.embed.table_VD: largest difference 0.5, relative norm {0.5 / norm:.4g}" in out
    assert "4 of 5 tensors that both have are equal in every bit" in out
    assert main(["checkpoint", "diff", str(GOLDEN / "version1"), str(SOUND)]) == 0


def test_conversions(run_dir, tmp_path, capsys):
    """To DCP and back nothing differs."""
    assert main(["checkpoint", "to-dcp", str(run_dir), str(tmp_path / "dcp")]) == 0
    assert main(["checkpoint", "from-dcp", str(tmp_path / "dcp"), str(tmp_path / "back")]) == 0
    assert main(["checkpoint", "diff", str(run_dir), str(tmp_path / "back")]) == 0
    shutil.rmtree(tmp_path / "dcp")
    assert main(["checkpoint", "from-dcp", str(tmp_path / "dcp"), str(tmp_path / "back2")]) != 0
    assert "dcp" in capsys.readouterr().err


@pytest.mark.parametrize("args", [["verfy", "x"], ["diff", "x"], ["show"], ["from-dcp", "a", "b", "--step", "x"]])
def test_what_is_not_understood(args, capsys):
    """Wrong words get the help, and no traceback."""
    assert main(["checkpoint", *args]) != 0
    err = capsys.readouterr().err
    assert "ConfigError" in err and "usage: mpar checkpoint" in err and "Traceback" not in err
