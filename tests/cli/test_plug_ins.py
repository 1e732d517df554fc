"""Plug-ins: model, optimizer, task and schedule as functions of the user's own modules, named on the command line."""

import json
import math
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from mpar.cli._compose import check_overrides
from mpar.cli._run_problems import compose_run, plan_problems
from mpar.errors import ConfigError, UnknownNameError
from mpar.optim import Lion
from mpar.train import TrainConfig, find_kept_job, make_optimizer, make_setup, read_metrics
from mpar.train._program_cache import program_key
from tests.cli.conftest import run_mpar

OWN = '''
from dataclasses import dataclass, replace

from mpar import models, optim
from mpar.models import Model
from mpar.models.architectures import LLAMA
from mpar.schedules import Action, actions
from {name}_helper import HIDDEN


def build(layers: int, *, tied: bool = True) -> Model:
    return models.from_config({{
        "model_type": "own_llama", "hidden_size": HIDDEN, "intermediate_size": 64, "num_hidden_layers": layers,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 259, "max_position_embeddings": 128,
        "tie_word_embeddings": tied,
    }}, architectures={{"own_llama": replace(LLAMA, name="own_llama")}})


@dataclass(frozen=True)
class Mine(optim.Lion):
    """Lion under another name."""


def task(chain, loss_name: str = "loss"):
    assert loss_name == "loss"
    return chain


def order(num_ranks: int, num_microbatches: int, early: int = 0):
    return actions("gpipe" if early else "one_f_one_b", num_ranks=num_ranks, num_microbatches=num_microbatches)
'''
DATA = ["task=pt", "data=python_stdlib", "data.seq_len=32", "data.batch_size=4", "num_threads=1", "tensorboard=false"]


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """The name of a module in the current directory, which no other test imports."""
    name = f"own_{request.node.name}"
    (tmp_path / f"{name}.py").write_text(OWN.format(name=name), encoding="utf-8")
    (tmp_path / f"{name}_helper.py").write_text("HIDDEN = 32\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return name


def run_of(*overrides: str, user_dir: Path | None = None) -> TrainConfig:
    return compose_run([*DATA, *overrides], user_dir, plan_problems)[0]


def test_parameters_come_from_signatures(own):
    """Keys that mpar knows keep their meaning; all others are parameters, in the types that they are annotated with."""
    words = [f"model={own}:build", "model.layers=2", "model.tied=false", f"optimizer={own}:Mine", "optimizer.lr=1e-3"]
    config = run_of(*words, "optimizer.betas=[0.8,0.95]", "steps=10", f"schedule={own}:order", "schedule.early=1", "mesh=pp2")
    setup = make_setup(config)
    assert setup.model.hf_config["num_hidden_layers"] == 2 and setup.model.hf_config["tie_word_embeddings"] is False
    made, built_in = make_optimizer(config.optimizer, 10), run_of("optimizer=lion", "optimizer.lr=1e-3", "steps=10").optimizer
    expected = make_optimizer(built_in, 10)
    assert isinstance(made, Lion) and made.betas == (0.8, 0.95)
    assert [made.rate(step) for step in (1, 5, 10)] == [expected.rate(step) for step in (1, 5, 10)]
    assert config.schedule.options == {"early": 1} and config.schedule.num_microbatches is None


def test_files_may_name_them(own, tmp_path):
    """An experiment chooses a plug-in, and the command line gives its parameters."""
    file = tmp_path / "conf" / "experiment" / "mine.yaml"
    file.parent.mkdir(parents=True)
    text = f"# @package _global_\ndefaults: [override /optimizer: '{own}:Mine']\noptimizer: {{lr: 0.5, weight_decay: 0.3}}\n"
    file.write_text(text, encoding="utf-8")
    config = run_of("experiment=mine", "optimizer.clip_norm=2", user_dir=tmp_path / "conf")
    made = make_optimizer(config.optimizer, 10)
    assert isinstance(made, Lion) and (made.weight_decay, made.clip_norm) == (0.3, 2.0)


def test_caches_notice_changes(own, tmp_path):
    """Kept programs and jobs depend on the plug-in, on what it imports from its folder, and on its parameters."""
    words = [*DATA, f"model={own}:build", "model.layers=1", f"run_dir={tmp_path / 'run'}"]

    def keys(*more: str) -> tuple[str, str]:
        config, resolved = compose_run([*words, *more], None, plan_problems)
        kept = find_kept_job(tmp_path, config, resolved)
        assert kept is not None
        return program_key(make_setup(config), "training"), kept.key

    first = keys()
    assert keys() == first
    assert not set(keys("model.tied=false")) & set(first)
    (tmp_path / f"{own}_helper.py").write_text("HIDDEN = 32  # as before\n", encoding="utf-8")
    assert not set(keys()) & set(first)


@pytest.mark.gloo
def test_a_sweep_trains_and_goes_on(own, tmp_path):
    """Jobs of a sweep find the module, ranks too; a plug-in that is a built-in optimizer has its numbers; a run goes on, and its
    model, of a type that only the module declares, answers. Without the module that is refused.
    """
    words = [
        f"model={own}:build",
        "model.layers=1",
        f"optimizer={own}:Mine,lion",
        "optimizer.lr=1e-3",
        "optimizer.betas=[0.9,0.99]",
    ]
    words = [*words, f"task={own}:task", *DATA[1:], "mesh=tp2", "strategy=tp", "optimizer.weight_decay=1.0", "steps=3"]
    done = run_mpar(["train", "-m", *words, "run_dir=sweep"], tmp_path)
    assert done.returncode == 0, done.stderr
    mine, lion = ([record["loss"] for record in read_metrics(tmp_path / "sweep" / job / "metrics.jsonl")] for job in "01")
    assert mine == lion and all(math.isfinite(loss) for loss in mine)
    again = [word.replace(",lion", "") for word in words[:-1]]
    more = run_mpar(["train", *again, "steps=4", "run_dir=sweep/0"], tmp_path)
    assert more.returncode == 0 and "goes on from sweep/0/checkpoints/step_00000003" in more.stderr, more.stderr
    assert json.loads((tmp_path / "sweep" / "0" / "hf" / "config.json").read_text())["hidden_size"] == 32
    said = run_mpar(["generate", "path=sweep/0", "prompt=hello", "max_new_tokens=2"], tmp_path)
    assert said.returncode == 0, said.stderr
    (tmp_path / f"{own}.py").rename(tmp_path / "elsewhere.py")
    lost = run_mpar(["export", "run_dir=sweep/0", "out=exported"], tmp_path)
    assert lost.returncode != 0 and f"model={own}:build: there is no module '{own}'" in lost.stderr and len(lost.stderr) < 600


def test_a_sweep_may_mix_them(own):
    """Several choices of a group, with plug-ins among them, and several values of a parameter of one."""
    words = [f"optimizer={own}:Mine,lion", "optimizer.weight_decay=0.1,0.2"]
    assert check_overrides("train", TrainConfig, words, multirun=True) == [words[0], f"++{words[1]}"]


def test_configurations_without_them_are_strict():
    """Without a plug-in an unknown key is refused at once, as ever."""
    with pytest.raises(UnknownNameError, match=r"did you mean optimizer\.lr"):
        run_of("optimizer.learning_rate=1")
    assert asdict(run_of("optimizer=adamw").optimizer)["options"] == {}


def test_both_are_refused(own):
    """A kind and a plug-in cannot both be the optimizer."""
    with pytest.raises(ConfigError, match="are both given"):
        run_of(f"optimizer={own}:Mine", "optimizer.lr=1", "optimizer.kind=lion")
