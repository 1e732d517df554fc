"""Command lines that cannot be: each is refused on one screen, with exit code 2, before torch is loaded and anything is read."""

import json
import os
import resource
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from mpar.cli import main as command_line
from mpar.cli._compose import compose_config
from mpar.cli._generate import GenerateConfig
from mpar.train import TrainConfig, make_optimizer, value_problems
from tests.processes import PATIENCE_S
from tests.tiers import examples

SCREEN = 24  # lines
ROOT = Path(__file__).parents[2]

BAD = [  # a command line, in which FOLDER is a folder with bad files, and words of the message, separated by `|`
    ("train steps=0", "steps=0: must be at least 1"),
    ("train steps=-5", "steps=-5: must be at least 1"),
    ("train steps=1.5", "steps=1.5: must be a whole number"),
    ("train steps=many", "steps='many': must be a whole number"),
    ("train steps=nan", "steps=nan: must be a whole number"),
    ("train checkpoint.every=0", "checkpoint.every=0: must be at least 1"),
    ("train checkpoint.keep=0", "checkpoint.keep=0: must be at least 1"),
    ("train checkpoint.keep_best=2", "checkpoint.keep_best=2 has no loss to go by: give evaluation.fraction"),
    ("train checkpoint.keep=all", "checkpoint.keep='all': must be a whole number or null"),
    ("train spike.z=0 spike.max_skips=-1", "spike.z=0: must be above 0|spike.max_skips=-1: must be at least 0"),
    ("train spike.window=3 on_spike=jump", "spike.window=3: must be at least 16|on_spike"),
    ("train optimizer.lr=nan", "optimizer.lr=nan: must be a finite number"),
    ("train optimizer.lr=inf", "optimizer.lr=inf: must be a finite number"),
    ("train optimizer.lr=-1", "optimizer.lr=-1: must be at least 0"),
    ("train optimizer.lr=fast", "optimizer.lr='fast': must be a number"),
    ("train optimizer.betas=[0.9,1.0]", "optimizer.betas=[0.9, 1.0]: must be at least 0, below 1"),
    ("train optimizer.betas=[0.9]", "optimizer.betas=[0.9]: must be [a number, a number]"),
    ("train optimizer.eps=0", "optimizer.eps=0: must be above 0"),
    ("train optimizer.weight_decay=-0.1", "optimizer.weight_decay=-0.1: must be at least 0"),
    ("train optimizer.clip_norm=0", "optimizer.clip_norm=0: must be above 0"),
    ("train optimizer.lr_decay=cosine_with_warmup", "must be constant or linear or cosine or wsd; did you mean cosine?"),
    ("train optimizer.warmup_steps=500", "warm-up takes 500 steps, more than total_steps=200"),
    ("train optimizer.min_lr=1", "min_lr must be between 0 and lr=0.003"),
    ("train optimizer.decay_ratio=0.5", "optimizer.decay_ratio belongs to lr_decay=wsd"),
    ("train timeout_s=-1", "timeout_s=-1: must be above 0"),
    ("train time_limit=soon", "time_limit: cannot read the duration 'soon'"),
    ("train restarts=-1", "restarts=-1: must be at least 0"),
    ("train restarts=1 checkpoint.optimizer_state=false", "which would lack the state of the optimizer"),
    ("train init_from=FOLDER/hf run_dir=FOLDER", "the run would replace this folder by its own model when it ends"),
    ("train data.tokenizer=FOLDER/hf run_dir=FOLDER/empty/..", "the run would replace this folder by its own model when it ends"),
    ("train timeout_s=1e18", "timeout_s=1e+18: must be above 0, at most 1e+07"),
    ("train num_threads=-1", "num_threads=-1: must be at least 1"),
    ("train seed=-1", "seed=-1: must be at least 0"),
    ("train data.batch_size=0", "data.batch_size=0: must be at least 1"),
    ("train data.batch_size=1000000000", "GiB for the tokens of a batch|GiB of memory; use a smaller batch"),
    ("train data.seq_len=0", "data.seq_len=0: must be at least 1"),
    ("train model.seq_len=-8", "model.seq_len=-8: must be at least 1"),
    ("train mesh.tp=0", "mesh.tp=0: must be at least 1"),
    ("train mesh.dp=1000000", "ranks on this machine need at least"),
    ("train task.max_new_tokens=0", "task.max_new_tokens=0: must be at least 1"),
    ("train evaluation.every=5", "evaluation.every=5 has no data"),
    ("train evaluation.fraction=1.5", "evaluation.fraction=1.5: must be above 0, below 1"),
    ("train evaluation.batches=0 evaluation.fraction=0.1", "evaluation.batches=0: must be at least 1"),
    ("train evaluation.sources=[FOLDER/no.jsonl]", "evaluation.sources=|no such file"),
    ("train run_dir=FOLDER/file", "run_dir=|is a file, not a folder"),
    ("train run_dir=FOLDER/file/below", "run_dir=|is a file, not a folder"),
    ("train data=jsonl data.sources=[FOLDER/no.jsonl]", "data.sources=|no such file"),
    ("train data.sources=[self-cognition] task=pt", "it holds conversations, kind is pt"),
    ("train data=jsonl", "data.sources is missing"),
    ("train data.tokenizer=FOLDER/nowhere", "data.tokenizer=|there is no such folder"),
    ("train resume=yes", "resume=yes: there is no such folder; it is auto, never"),
    ("train schedule.table=FOLDER/no.csv", "there is no such file"),
    ("train model=hf", "model.path is missing: a Hugging Face folder"),
    ("train model=hf model.path=FOLDER/empty", "the folder has no config.json"),
    ("train model=hf model.path=FOLDER/truncated", "model.safetensors of|is damaged or cut off"),
    ("train model=hf model.path=FOLDER/no_weights", "model.safetensors is missing"),
    ("train model=hf model.path=FOLDER/no_shard", "model-00002-of-00002.safetensors is missing"),
    ("train model=hf model.path=Nobody/no-such-model", "mpar downloads nothing|hf download Nobody/no-such-model"),
    ("train schedule=1f1b", "did you mean schedule=one_f_one_b?"),
    ("train schedule.name=dualpipe", "did you mean dual_pipe?"),
    ("train strategy=zero-3", "did you mean strategy=zero3?"),
    ("train strategy=fsdp", "did you mean strategy=zero3?"),
    ("train precision=bfloat16", "did you mean precision=bf16?"),
    ("train learning_rate=1e-3", "did you mean optimizer.lr?"),
    ("train bs=8", "did you mean data.batch_size?"),
    ("train global_batch_size=8", "did you mean data.batch_size?"),
    ("train tp=2", "did you mean mesh.tp?"),
    ("train max_steps=10", "did you mean steps?"),
    ("train gradient_accumulation_steps=4", "did you mean schedule.num_microbatches?"),
    ("train lora_rank=8", "did you mean adapter.rank?"),
    ("train --lr 3", "write optimizer.lr=3"),
    ("train -lr 3", "write optimizer.lr=3"),
    ("train --steps=20", "write steps=20"),
    ("train --resume", "goes on from its newest checkpoint by itself"),
    ("train steps 20", "write steps=20"),
    ("train optimizer.lr=1e-3,3e-3", "several values are a sweep; write mpar train -m"),
    ("train 'data.sources=[a'", "cannot be read"),
    ("train --cfg hydra", "only `--cfg job` is there"),
    ("train -m mesh=dp2,ffsdp2", "did you mean mesh=fsdp2?"),
    ("plan --multirun steps=1,2", "cannot plan a sweep"),
    ("plan optimizer.lr=nan", "must be a finite number"),
    ("generate path=x max_new_tokens=0", "max_new_tokens=0: must be at least 1"),
    ("generate path=x temperature=-1", "temperature=-1: must be at least 0"),
    ("generate prompt=hi", "path is missing: an HF folder"),
    ("export", "run_dir is missing: the folder of a run"),
    ("trian steps=3", "did you mean 'train'?"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file where a folder should be, and folders of models that lack something."""
    place = tmp_path_factory.mktemp("bad")
    (place / "file").write_text("a file", encoding="utf-8")
    for name in ("empty", "hf", "truncated", "no_weights", "no_shard"):
        (place / name).mkdir()
        if name not in ("empty", "hf"):
            (place / name / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_size": 8}), encoding="utf-8")
    whole = place / "truncated" / "model.safetensors"
    save_file({"weight": np.zeros((64, 64), dtype=np.float32)}, whole)
    whole.write_bytes(whole.read_bytes()[:-100])
    weight_map = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (place / "no_shard" / "model.safetensors.index.json").write_text(json.dumps(weight_map), encoding="utf-8")
    save_file({"a": np.zeros(2, dtype=np.float32)}, place / "no_shard" / "model-00001-of-00002.safetensors")
    return place


@pytest.mark.cases(8)
@pytest.mark.parametrize(("line", "words"), BAD, ids=[line for line, _ in BAD])
def test_is_refused(line, words, folder, capsys, monkeypatch, tmp_path):
    """One screen that names the argument and the way out, exit code 2, and nothing written."""
    monkeypatch.chdir(tmp_path)
    assert command_line.main(shlex.split(line.replace("FOLDER", str(folder)))) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert all(word in shown.err for word in words.split("|")), shown.err
    assert "Traceback" not in shown.err
    assert len(shown.err.splitlines()) <= SCREEN
    assert not list(tmp_path.iterdir())


def test_all_problems_in_one_list(folder, capsys):
    """Values out of bounds, values that disagree, folders and data are named together."""
    args = ["checkpoint.keep=0", "optimizer.lr=nan", "evaluation.every=2", "timeout_s=-1", f"run_dir={folder}/file", "mesh.tp=0"]
    assert command_line.main(["train", *args, "data.sources=[no.jsonl]"]) == 2
    shown = capsys.readouterr().err
    for key in ("checkpoint.keep", "optimizer.lr", "evaluation.every", "timeout_s", "run_dir", "mesh.tp", "data.sources"):
        assert f"\n  {key}=" in shown, key


def test_no_refusal_is_longer_than_a_screen(capsys):
    """Of forty problems the first are shown, and how many more there are."""
    assert command_line.main(["train", *(f"nothing_{i}=1" for i in range(40))]) == 2
    shown = capsys.readouterr().err
    assert "and 22 more" in shown
    assert len(shown.splitlines()) <= SCREEN


def test_a_folder_that_cannot_be_written(capsys, monkeypatch):
    """It is found before the run begins. Root may write everywhere, so the answer of the system is replaced."""
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert command_line.main(["train", "run_dir=/opt/runs/a"]) == 2
    assert "run_dir=/opt/runs/a: cannot write into /opt" in capsys.readouterr().err


@pytest.mark.cases(1)
@pytest.mark.parametrize("line", ["train optimizer.lr=nan mesh.tp=0 data.sources=[no.jsonl]", "train --lr 3", "--info"])
def test_torch_is_not_loaded(line, tmp_path):
    """Refusing takes no longer than Python and Hydra take to start."""
    code = "import sys; from mpar.cli.main import main; main(sys.argv[1:]); sys.exit('torch' in sys.modules)"
    command = [sys.executable, "-c", code, *shlex.split(line)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stderr


TEXTS = [
    'Hello, "world" a=b {x}', "it's", "a\\", "\\'", "${oc.env:HOME}", "\\${x}", "[a]", "{a: 1}", "null ",
    "1e3", "true", "a\nb", "你好，世界",
]  # fmt: skip


@pytest.mark.cases(4)
@pytest.mark.parametrize("text", TEXTS)
def test_texts_are_taken_as_they_are(text):
    """No character of a prompt or a system message has a meaning."""
    assert compose_config("generate", GenerateConfig, ["path=x", f"prompt={text}"])[0].prompt == text
    assert compose_config("train", TrainConfig, [f"data.system={text}"])[0].data.system == text


@settings(max_examples=examples(100))
@given(st.text(st.characters(exclude_categories=["Cs", "Cc"]) | st.sampled_from("'\"\\${}[],= \n\t"), max_size=12))
def test_any_text_is_taken_as_it_is(text):
    """The same of texts that nobody thought of. `null`, `???` and texts in quotes mean something else."""
    quoted = len(text) > 1 and text[0] == text[-1] and text[0] in "'\""
    if text not in ("null", "???") and not quoted:
        assert compose_config("generate", GenerateConfig, ["path=x", f"prompt={text}"])[0].prompt == text


def test_quotes_of_hydra_are_left_out():
    """A text that is in quotes already is what is between them; `null` is no text."""
    written = ("'null'", "null", '"a, b"')
    said = [compose_config("generate", GenerateConfig, ["path=x", f"prompt={text}"])[0].prompt for text in written]
    assert said == ["null", None, "a, b"]


def test_items_of_lists_are_taken_as_they_are():
    """Names of sources have characters that Hydra does not read; quotes and commas between items mean what they do in Hydra."""
    given = "[self-cognition#10, it's here/**/*.jsonl,'a,b.jsonl',\"c\"]"
    sources = compose_config("train", TrainConfig, [f"data.sources={given}"])[0].data.sources
    assert sources == ("self-cognition#10", "it's here/**/*.jsonl", "a,b.jsonl", "c")
    assert compose_config("train", TrainConfig, ["task.chat=[]"])[0].task.chat == ()


def test_paths_may_name_other_values():
    """`${key}` stands for a value in what is no prose."""
    config = compose_config("train", TrainConfig, ["run_dir=runs/${model.name}, it's", "seed=3"])[0]
    assert config.run_dir == "runs/tiny_qwen3, it's"


def test_lists_may_be_texts():
    """A key that takes a text or a list takes both; a layout has commas and brackets."""
    names = [["Xiao, Pa", "Parry"], "Parry, the first"]
    for name, written in zip(names, ["['Xiao, Pa',Parry]", "Parry, the first"], strict=True):
        got = compose_config("train", TrainConfig, [f"data.model_name={written}"])[0].data.model_name
        assert got == (tuple(name) if isinstance(name, list) else name)
    assert compose_config("train", TrainConfig, ["schedule.layout=Et*3|(tt|)*29,m|L"])[0].schedule.layout == "Et*3|(tt|)*29,m|L"


@pytest.mark.parametrize(
    ("overrides", "first", "last"),
    [
        (["optimizer.lr_decay=constant"], 0.1, 1.0),
        (["optimizer.min_lr=1.5e-3"], 0.1, 0.5),
        (["optimizer.warmup_steps=2"], 0.5, 0.1),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_a_key_of_ones_own_replaces_the_default(overrides, first, last):
    """Warm-up and minimum of the default configuration are not in the way of steps, of a rate, or of no decay."""
    config = compose_config("train", TrainConfig, ["optimizer.lr=3e-3", *overrides], check=value_problems)[0]
    rate = make_optimizer(config.optimizer, config.steps).rate
    assert (rate(1) / 3e-3, rate(config.steps) / 3e-3) == pytest.approx((first, last))


@pytest.mark.full("starts processes one after the other, and is about their time")
def test_time_of_a_refusal(folder, tmp_path):
    """As a process, every eighth of the table takes less than 3 s of a core; other work of the machine does not count."""
    for line, _ in BAD[::8]:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        command = [sys.executable, "-m", "mpar", *shlex.split(line.replace("FOLDER", str(folder)))]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, timeout=PATIENCE_S, check=False)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert done.returncode == 2, done.stderr
        assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 3.0, line
