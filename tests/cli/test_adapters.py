"""`mpar train adapter=lora` on real processes: what is trained and written, going on to the bit, and what other commands read."""

from pathlib import Path

import pytest
import torch

from mpar import adapters, checkpoint, models, tree
from mpar.cli import main as command_line
from mpar.train import read_metrics
from tests.cli.conftest import SMALL, run_mpar

FIXED = ["optimizer.lr_decay=constant", "optimizer.warmup_ratio=null", "optimizer.min_ratio=null", "optimizer.lr=1e-2"]
LORA = ["train", *SMALL, *FIXED, "adapter=lora", "adapter.dropout=0.1", "adapter.b_rate=4", "mesh=fsdp2", "strategy=zero3"]
LORA += ["data.seq_len=96", "checkpoint={every: 2, keep: null}"]


def tensors(path: Path) -> dict[str, torch.Tensor]:
    with checkpoint.Reader(path) as reader:
        return {name: reader.read(name) for name in reader.tensors}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of all weights on one rank, and a run of an adapter that starts from it, on two."""
    folder = tmp_path_factory.mktemp("lora")
    done = run_mpar(["train", *SMALL, "steps=2", "mesh=one", "strategy=ddp", "run_dir=base"], folder)
    assert done.returncode == 0, done.stderr
    done = run_mpar([*LORA, "init_from=base", "steps=4", "run_dir=lora"], folder)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.gloo
def test_only_the_adapter_changes(runs):
    """The weights are those of the first run, to the bit, and only the adapter has state of the optimizer; the loss falls."""
    base = tensors(runs / "base" / "checkpoints" / "step_00000002")
    last = tensors(runs / "lora" / "checkpoints" / "step_00000004")
    for name, x in base.items():
        assert not name.startswith("params.") or torch.equal(last[name], x), name
    state = {name.split(".", 2)[2] for name in last if name.startswith("opt.")}
    assert state == {name.removeprefix("params.") for name in last if name.startswith("params.adapters.")}
    losses = [record["loss"] for record in read_metrics(runs / "lora" / "metrics.jsonl")]
    assert losses[-1] < losses[0]


@pytest.mark.gloo
def test_a_run_goes_on_to_the_bit(runs, capsys):
    """With dropout, two steps and two more are four steps; other adapters are refused."""
    assert run_mpar([*LORA, "init_from=base", "steps=2", "run_dir=parts"], runs).returncode == 0
    assert command_line.main([*LORA, "steps=4", f"run_dir={runs / 'parts'}", "adapter.rank=4"]) != 0
    assert "the model would compute another function" in capsys.readouterr().err
    assert run_mpar([*LORA, "init_from=base", "steps=4", "run_dir=parts"], runs).returncode == 0
    whole, parts = (tensors(runs / name / "checkpoints" / "step_00000004") for name in ("lora", "parts"))
    assert all(torch.equal(parts[name], x) for name, x in whole.items())


@pytest.mark.gloo
def test_folders_are_read(runs, capsys):
    """The base with the adapter's folder answers as the exported sum does; an adapter of another base is refused."""
    model, params = models.from_hf(runs / "base" / "hf")
    adapted = adapters.add(model, adapters.read_lora(runs / "lora" / "adapter"))
    merged = adapters.merge(adapted, adapters.read_peft(adapted, runs / "lora" / "adapter", params))
    _, exported = models.from_hf(runs / "lora" / "hf")
    tokens = torch.arange(24).reshape(2, 12)
    torch.testing.assert_close(model.apply(merged, tokens), model.apply(exported, tokens), rtol=0, atol=1e-6)
    asked = ["prompt=Who are you?", "max_new_tokens=6"]
    answers = []
    for where in (["path=" + str(runs / "base"), f"adapter={runs / 'lora' / 'adapter'}"], ["path=" + str(runs / "lora")]):
        assert command_line.main(["generate", *where, *asked]) == 0
        answers.append(capsys.readouterr().out)
    assert answers[0] == answers[1]
    assert command_line.main(["export", f"run_dir={runs / 'lora'}", "format=peft", f"out={runs / 'again'}"]) == 0
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        assert (runs / "again" / name).read_bytes() == (runs / "lora" / "adapter" / name).read_bytes()
    assert command_line.main(["export", f"run_dir={runs / 'base'}", "format=peft", f"out={runs / 'none'}"]) != 0
    assert "the run trained all weights" in capsys.readouterr().err


BEGUN = {
    "fewer matrices": (["adapter=lora", "adapter.targets=[q_proj,v_proj]"], "an adapter of other matrices", ("k_DKH", "o_NHD")),
    "fewer layers": (["adapter=lora", "adapter.layers=[1]"], "an adapter of other matrices", ("layers.0",)),
    "quantised weights": (["model.quantise=int8"], "quantised weights, to which they cannot be added", ("q_DNH", "k_DKH")),
}


@pytest.mark.gloo
@pytest.mark.parametrize("case", BEGUN)
def test_a_run_does_not_begin_without_some_of_the_adapters(case, runs, tmp_path, capsys):
    """Before anything is compiled, the checkpoint, the adapters that would be left out, and the ways out are said."""
    overrides, has, named = BEGUN[case]
    layers = ["model.config.num_hidden_layers=2"] if case == "fewer layers" else []
    how = ["mesh=one", "strategy=ddp", f"init_from={runs / 'lora'}", "steps=1", f"run_dir={tmp_path / 'run'}", *layers]
    assert command_line.main(["train", *SMALL, *overrides, *how]) != 0
    said = capsys.readouterr().err
    assert f"step_00000004: it has adapters that this run would leave out, which has {has}:" in said
    assert all(f".{name}" in said for name in named)
    assert ".q_DNH" not in said or case != "fewer matrices"
    assert "config.yaml has the group `adapter`" in said
    assert "init_from= the folder hf" in said
    assert not (tmp_path / "run" / "checkpoints").exists()


@pytest.mark.gloo
def test_another_run_begins_from_the_sum(runs):
    """A run without adapters that begins from a run of one has its weights with the adapter added, and so has its reference."""
    asked = ["train", *SMALL, "task=dpo", "data=preferences", "data.seq_len=96", "data.truncation=right", "steps=1"]
    done = run_mpar([*asked, "optimizer.lr=0", "mesh=one", "strategy=ddp", "init_from=lora", "run_dir=sum"], runs)
    assert done.returncode == 0, done.stderr
    begun = tensors(runs / "sum" / "checkpoints" / "step_00000001")
    _, exported = models.from_hf(runs / "lora" / "hf")
    for path, x in tree.leaves_with_path(exported):
        for found in (begun[f"params.{path}"], begun[f"params.reference.{path}"]):
            torch.testing.assert_close(found[: len(x)], x, rtol=0, atol=0)
