"""What users get wrong: one screen of text before any rank starts, and an exit code that is not 0."""

import json
import os

import pytest
import torch

from mpar.cli import main as command_line
from tests.cli.conftest import SMALL


def refused(capsys: pytest.CaptureFixture, *args: str, code: int = 2) -> str:
    """What the command said on refusing, in this process."""
    assert command_line.main(args) == code
    text = capsys.readouterr().err
    assert "Traceback" not in text
    assert text.startswith("mpar: ")
    assert len(text.splitlines()) < 25
    return text


def test_unknown_command(capsys):
    """The nearest command is named."""
    assert "did you mean 'train'" in refused(capsys, "trian")


def test_no_command_is_help(capsys):
    """Without arguments the commands are listed."""
    assert command_line.main([]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in command_line.COMMANDS)


def test_unknown_key(capsys):
    """A misspelt key stops the run."""
    assert "did you mean optimizer.lr?" in refused(capsys, "train", "learning_rat=1")


def test_sizes_that_do_not_divide(capsys, tmp_path):
    """Every tensor that cannot be placed is named at once."""
    text = refused(
        capsys, "train", *SMALL, "mesh.tp=3", "data.batch_size=5", "mesh.dp=2", "strategy=ddp_tp", f"run_dir={tmp_path}/r"
    )
    assert "batch 'tokens'" in text
    assert "attention.q_DNH" in text
    assert "mlp.gate_DF" in text or "gate" in text


def test_axis_without_use(capsys):
    """A mesh axis that the strategy does not use is refused."""
    assert "mesh axes ['tp']" in refused(capsys, "plan", *SMALL, "strategy=zero3", "mesh=tp2")


def test_world_size_differs_from_the_mesh(capsys, monkeypatch):
    """Under torchrun with another number of processes, each leaves before it connects to anybody; rank 0 says why."""
    world = {"TORCHELASTIC_RUN_ID": "x", "RANK": "0", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "3", "WORLD_SIZE": "3"}
    for name, value in world.items():
        monkeypatch.setitem(os.environ, name, value)
    text = refused(capsys, "train", *SMALL)
    assert "2 ranks: torchrun started 3 processes" in text


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["device=cuda"], "2 ranks run on this machine, and torch finds 0 CUDA devices"),
        (["execution=cuda_graph"], "recorded on one GPU"),
        (["execution=graphs"], "execution"),
        (["kernels=triton"], "kernels=triton was asked for on a CPU"),
        (["kernels=fast"], "kernels"),
    ],
    ids=lambda value: value if isinstance(value, str) else value[0],
)
def test_device_that_is_not_there(capsys, tmp_path, monkeypatch, words, told):
    """What needs a GPU, or names nothing, is refused before a rank starts."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert told in refused(capsys, "train", *SMALL, *words, f"run_dir={tmp_path}/r")


def test_kernels_that_do_not_fit(capsys):
    """A plan with Triton's kernels alone says which op they cannot do, and why."""
    text = refused(capsys, "plan", *SMALL, "hardware=h200", "precision=bf16", "kernels=triton")
    assert "kernels=triton cannot carry out attention on sm_90" in text
    assert "head sizes" in text


def test_label_outside_the_vocabulary(capsys, tmp_path):
    """A tokenizer that does not fit the model is found before a rank starts, with the row."""
    text = refused(capsys, "train", *SMALL, "model.config.vocab_size=258", f"run_dir={tmp_path}/r", code=1)
    assert "outside the model's vocabulary of 258" in text
    assert "self_cognition.jsonl:" in text


def test_no_row_left(capsys, tmp_path):
    """Rows that are all malformed are counted, and the first is shown."""
    (tmp_path / "bad.jsonl").write_text('{"messages": 3}\nnot json\n', encoding="utf-8")
    how = ["data=jsonl", f"data.sources=[{tmp_path}/bad.jsonl]", f"run_dir={tmp_path}/r"]
    text = refused(capsys, "train", *SMALL, *how, code=1)
    assert "2 malformed" in text
    assert "bad.jsonl:1" in text


def test_missing_model_folder(capsys, tmp_path):
    """A folder without weights is named."""
    assert str(tmp_path) in refused(capsys, "train", "model=hf", f"model.path={tmp_path}", "data.tokenizer=bytes")


def test_generate_from_nothing(capsys, tmp_path):
    """A folder that is no model is refused."""
    assert "has a config.json" in refused(capsys, "generate", f"path={tmp_path}", "prompt=hi")


@pytest.mark.gloo
def test_malformed_rows_do_not_stop_a_run(mpar, tmp_path):
    """They are counted, the first is shown, and training goes on with the rest."""
    good = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    (tmp_path / "some.jsonl").write_text("not json\n" + f"{json.dumps(good)}\n" * 4, encoding="utf-8")
    done = mpar("train", *SMALL, "mesh=one", "strategy=ddp", "data=jsonl", "data.sources=[some.jsonl]", "steps=2", "run_dir=r")
    assert done.returncode == 0, done.stderr
    assert "1 malformed" in done.stderr
    assert "first malformed row: some.jsonl:1" in done.stderr
