"""Configurations of the user's own, in a folder beside mpar's: `--config-dir DIR`."""

import csv
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from mpar.cli import main as command_line
from mpar.cli._choices import choices
from mpar.cli._compose import compose_config
from mpar.errors import ConfigError, UnknownNameError
from mpar.train import TrainConfig, read_metrics
from tests.cli.conftest import SMALL, environment
from tests.processes import PATIENCE_S

EXPERIMENT = """# @package _global_
defaults:
  - override /model: mine
  - override /mesh: fsdp2
  - override /strategy: zero3
steps: 2
"""
SHORT = [word for word in SMALL if not word.startswith("model.")]


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A folder, with a space and a quote in its name, that has a model and an experiment with it, hardware, mesh and strategy."""
    folder = tmp_path / "it's mine"
    model = {"model_type": "qwen3", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 259}
    model |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128}
    files = {
        "experiment/mine.yaml": EXPERIMENT,
        "model/mine.yaml": yaml.safe_dump({"name": "my_model", "seq_len": 64, "config": model}),
        "mesh/my_pair.yaml": "{tp: 2}",
        "strategy/my_zero.yaml": "{name: zero3, reduce: last}",
        "hardware/my_box.yaml": "defaults: [cpu]\nname: my_box\nmemory_bytes: 2000000000\n",
    }
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    return folder


def composed(own: Path, *overrides: str) -> TrainConfig:
    return compose_config("train", TrainConfig, overrides, own)[0]


def test_own_files_are_choices(own):
    """Every group takes files of the folder, also from within an experiment; mpar's own choices stay."""
    config = composed(own, "experiment=mine")
    assert (config.model.name, config.mesh.fsdp, config.mesh.tp, config.strategy.name) == ("my_model", 2, 1, "zero3")
    assert composed(own, "mesh=my_pair").mesh.tp == 2
    assert composed(own, "strategy=my_zero").strategy.reduce == "last"
    assert composed(own, "hardware=my_box").hardware.memory_bytes == 2_000_000_000
    assert composed(own, "model=mine", "mesh=dp2_tp2", "strategy=tp").mesh.dp == 2
    assert composed(own, "model=tiny_llama", "experiment=mine").model.name == "tiny_llama"


def test_own_files_are_suggested(own):
    """A misspelt name finds a file of the folder, which is nobody's without the folder."""
    for override, words in (("model=mien", "model=mine?"), ("experiment=nine", "experiment=mine?"), ("mesh=my_par", "my_pair?")):
        with pytest.raises(UnknownNameError, match=r"did you mean") as caught:
            composed(own, override)
        assert words in str(caught.value)
    with pytest.raises(UnknownNameError, match="there is no experiment 'mine'"):
        compose_config("train", TrainConfig, ["experiment=mine"])
    assert "mine" not in choices().shown["model"]


@pytest.mark.parametrize(("group", "name", "near"), [("mesh", "ffsdp2", "fsdp2"), ("model", "mien", "mine")])
def test_what_an_experiment_names_in_vain(own, group, name, near):
    """A choice that a file makes is refused like one of the command line."""
    text = f"# @package _global_\ndefaults: [override /{group}: {name}]\n"
    (own / "experiment" / "bad.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(UnknownNameError) as caught:
        composed(own, "experiment=bad")
    assert f"a file that was chosen asks for {group}={name}; there is no {group} '{name}'" in str(caught.value)
    assert f"did you mean {group}={near}?" in str(caught.value)


@pytest.mark.parametrize("text", ["- 1\n- 2\n", "only words", "3", "a: [", "a: 1\na: 2\n"], ids=repr)
def test_a_file_that_is_no_mapping(own, text):
    """Lists, words and what is no YAML are refused with the path, when they are asked for and only then."""
    (own / "experiment" / "bad.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"cannot (use|read) .*experiment/bad\.yaml: "):
        composed(own, "experiment=bad")
    assert composed(own, "experiment=mine").model.name == "my_model"


def test_an_empty_file_changes_nothing(own):
    """An experiment without differences is the default run."""
    (own / "experiment" / "none.yaml").write_text("# @package _global_\n", encoding="utf-8")
    assert composed(own, "experiment=none").model == composed(own).model


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--config-dir", "missing"], "there is no such folder"),
        (["--config-dir=a.yaml"], "it is a file"),
        (["--config-dir", "empty"], "no folder with the name of a group"),
        (["--config-dir", "hides"], "same name as mesh/dp2.yaml, model/gpt2.yaml, strategy/zero3_tp.yaml, train.yaml"),
        (["--config-dir"], "must be followed by a folder"),
        (["--config-dir", "steps=3"], "must be followed by a folder"),
        (["--config-dir", "empty", "--config-dir=empty"], "was given 2 times"),
    ],
    ids=str,
)
@pytest.mark.parametrize("command", ["train", "plan", "generate", "export"])
def test_a_folder_that_cannot_be_read(command, args, words, tmp_path, monkeypatch, capsys):
    """Every command says what is wrong with the folder, and how it must be."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    for name in ("a.yaml", "hides/mesh/dp2.yaml", "hides/model/gpt2.yaml", "hides/strategy/zero3_tp.yaml", "hides/train.yaml"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert command_line.main([command, *args]) == 2
    text = capsys.readouterr().err
    assert words in text
    assert "Traceback" not in text


def test_help_lists_own_files(own, capsys):
    """They stand among the choices of their groups."""
    assert command_line.main(["train", "--help", "--config-dir", str(own)]) == 0
    groups = capsys.readouterr().out.partition("schedules of a pipeline")[0]
    for name in ("llama3_8b_1m long_64k_cpu mine", "my_box", "my_pair", "my_zero", "mistral_7b"):
        assert name in " ".join(groups.split())


def test_plan(own, capsys, monkeypatch):
    """The folder is read from where the command stands: its hardware is in the table, its experiment in what `diff` compares."""
    monkeypatch.chdir(own.parent)
    how = ["plan", f"--config-dir={own.name}", "lines=2", "experiment=mine", "profiles=[my_box]"]
    assert command_line.main(how) == 0
    text = capsys.readouterr().out
    assert "model       my_model" in text
    assert "fsdp=2" in text
    assert "│ my_box   │" in text
    assert command_line.main([*how, "diff=[mesh=my_pair,strategy=tp]"]) == 0
    assert capsys.readouterr().out.startswith("with mesh=my_pair strategy=tp\ninstructions ")


@pytest.mark.full("its runs take 24 s; a sweep over groups of one's own trains in the broad tier too")
@pytest.mark.gloo
def test_train_records_what_was_composed(own, mpar, tmp_path):
    """The run's config.yaml has the values, not the folder; exporting needs no folder; torchrun gives the same numbers."""
    how = ["--config-dir", str(own), *SHORT, "experiment=mine", "data.seq_len=64"]
    done = mpar("train", *how, "run_dir=ours")
    assert done.returncode == 0, done.stderr
    saved = yaml.safe_load((tmp_path / "ours" / "config.yaml").read_text(encoding="utf-8"))
    assert saved["model"]["name"] == "my_model"
    assert saved["mesh"] == {"pp": 1, "dp": 1, "fsdp": 2, "cp": 1, "tp": 1}
    exported = mpar("export", "run_dir=ours", "out=hf")
    assert exported.returncode == 0, exported.stderr
    launcher = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "mpar")
    torchrun = mpar("train", *how, "run_dir=theirs", launcher=launcher)
    assert torchrun.returncode == 0, torchrun.stderr
    losses = [[record["loss"] for record in read_metrics(tmp_path / name / "metrics.jsonl")] for name in ("ours", "theirs")]
    assert losses[0] == losses[1]


LAUNCHER = '''
"""A launcher that hands every job, pickled, to a fresh process, as those for clusters do."""

import pickle
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from hydra.core.config_store import ConfigStore
from hydra.core.singleton import Singleton
from hydra.core.utils import run_job, setup_globals
from hydra.plugins.launcher import Launcher


@dataclass
class Elsewhere:
    _target_: str = "hydra_plugins.elsewhere.ElsewhereLauncher"


ConfigStore.instance().store(group="hydra/launcher", name="elsewhere", node=Elsewhere, provider="test")


class ElsewhereLauncher(Launcher):
    def setup(self, *, hydra_context, task_function, config):
        self.context, self.task, self.config = hydra_context, task_function, config

    def launch(self, job_overrides, initial_job_idx):
        Path(self.config.hydra.sweep.dir).mkdir(parents=True, exist_ok=True)
        return [self.run(number, list(overrides)) for number, overrides in enumerate(job_overrides, initial_job_idx)]

    def run(self, number, overrides):
        work = pickle.dumps((Singleton.get_state()["instances"], self.context, self.config, self.task, number, overrides))
        code = "import sys; from hydra_plugins.elsewhere import work; work(sys.stdin.buffer, sys.stdout.buffer)"
        done = subprocess.run([sys.executable, "-c", code], input=work, stdout=subprocess.PIPE, check=True)
        return pickle.loads(done.stdout.partition(b"RESULT")[2])


def work(given, out):
    instances, context, config, task, number, overrides = pickle.loads(given.read())
    setup_globals()
    Singleton.set_state(Singleton.get_state() | {"instances": instances})
    sweep = context.config_loader.load_sweep_config(config, overrides)
    sweep.hydra.job.id, sweep.hydra.job.num = str(number), number
    keys = {"job_dir_key": "hydra.sweep.dir", "job_subdir_key": "hydra.sweep.subdir"}
    done = run_job(hydra_context=context, task_function=task, config=sweep, **keys)
    out.write(b"RESULT" + pickle.dumps(done))
'''


@pytest.mark.full("trains four times; a sweep of the own configurations of mpar is in the broad tier")
@pytest.mark.gloo
@pytest.mark.parametrize("launcher", ["basic", "elsewhere"])
def test_a_sweep(launcher, own, tmp_path):
    """Every job composes with the folder and with parsed names, whatever process it is in; one that fails stops no other."""
    (tmp_path / "plugins" / "hydra_plugins").mkdir(parents=True)
    (tmp_path / "plugins" / "hydra_plugins" / "elsewhere.py").write_text(LAUNCHER, encoding="utf-8")
    variables = environment()
    variables["PYTHONPATH"] = f"{variables['PYTHONPATH']}:{tmp_path / 'plugins'}"
    command = [sys.executable, "-m", "mpar", "train", "-m", "--config-dir", own.name, *SHORT, "data.seq_len=64"]
    command += ["experiment=mine", "strategy=ddp", "mesh=dp2,one,my_pair", "data.batch_size=3", f"hydra/launcher={launcher}"]
    done = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 1, done.stderr
    assert "jobs that failed: 0, 2\n" in done.stderr
    assert "batch 'tokens'" in done.stderr  # 3 rows on 2 ranks
    assert "mesh axes ['tp'] are used by no row" in done.stderr
    assert "Traceback" not in done.stderr
    (finished,) = tmp_path.glob("runs/*/*/hf")
    assert finished.parent.name == "1"
    saved = yaml.safe_load((finished.parent / "config.yaml").read_text(encoding="utf-8"))
    assert (saved["model"]["name"], saved["mesh"]["dp"]) == ("my_model", 1)
    with next(tmp_path.glob("runs/*/sweep.csv")).open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [(row["job"], row["mesh"], row["status"]) for row in rows] == [
        ("0", "dp2", "failed"), ("1", "one", "best"), ("2", "my_pair", "failed"),
    ]  # fmt: skip


@pytest.mark.parametrize("override", ["mesh=dp2,ffsdp2", "experiment=mine,nine", "hydra/launcher=nobody"])
def test_a_sweep_that_cannot_be_composed(override, own, capsys):
    """It is refused before a job begins."""
    assert command_line.main(["train", "-m", "--config-dir", str(own), override]) == 2
    text = capsys.readouterr().err
    assert "--- job" not in text
    assert "Traceback" not in text
    assert override.rpartition(",")[2].rpartition("=")[2] in text
