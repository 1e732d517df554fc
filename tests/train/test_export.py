"""A checkpoint as a Hugging Face folder: bits, dtypes, files, memory, and folders that are gone."""

import dataclasses
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mpar import checkpoint, models, tree
from mpar.cli._compose import compose_config
from mpar.cli._paths import with_absolute_paths
from mpar.data import byte_tokenizer
from mpar.errors import CheckpointError
from mpar.mesh import Mesh
from mpar.spec import P
from mpar.train import Progress, TrainConfig, load_params, make_setup
from mpar.train.export import ExportOptions, export_hf
from tests.train.conftest import SMALL

ROOT = Path(__file__).parents[2]


def write(folder, config, plain, params):
    """A checkpoint of parameters."""
    tensors = {f"params.{path}": leaf for path, leaf in tree.leaves_with_path(params)}
    reached = Progress(1, hf_config=json.loads(make_setup(config).model.hf_config_json))
    shapes = {name: tuple(x.shape) for name, x in tensors.items()}
    return checkpoint.save(folder, 1, tensors, dict.fromkeys(tensors, P()), Mesh(), 0, shapes, reached.as_extras(plain))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """`(config, model, its parameters, checkpoint)`."""
    config, plain = compose_config("train", TrainConfig, [*SMALL, "mesh=one", "strategy=ddp"])
    model = make_setup(config).model
    params = model.init(3)
    return config, model, params, write(tmp_path_factory.mktemp("run"), config, plain, params)


def tensors_in(folder):
    return {name: x for file in sorted(folder.glob("*.safetensors")) for name, x in load_file(file).items()}


def test_every_bit_and_the_files(run, tmp_path):
    """Whatever the size of files, the folder has the bits of `hf_tensors`; a folder that was there is replaced as a whole."""
    config, model, params, path = run
    expected = models.hf_tensors(model, params)
    seen = []
    for max_file_bytes, count in ((10**9, 1), (5000, 4)):
        out = export_hf(config, byte_tokenizer(), path, tmp_path / "hf", ExportOptions(max_file_bytes=max_file_bytes))
        found = tensors_in(out)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], value) for name, value in expected.items())
        assert len(list(out.glob("*.safetensors"))) >= count
        assert sorted(file.name for file in tmp_path.iterdir()) == ["hf"]
    export_hf(config, byte_tokenizer(), path, tmp_path / "hf", on_bytes=lambda done, total: seen.append((done, total)))
    assert seen[-1][0] == seen[-1][1] == 2 * sum(leaf.nbytes for leaf in tree.leaves(params))


def test_a_folder_of_others_is_not_replaced(run, tmp_path):
    """A folder that appears while the export runs is kept, and so are its neighbours; nothing of the export stays."""
    config, _, _, path = run

    def appear(done: int, total: int) -> None:
        (tmp_path / "out").mkdir(exist_ok=True)
        (tmp_path / "out" / "thesis.txt").write_text("mine")

    with pytest.raises(CheckpointError, match="made meanwhile"):
        export_hf(config, byte_tokenizer(), path, tmp_path / "out", ExportOptions(replaces=False), appear)
    assert [str(file.relative_to(tmp_path)) for file in tmp_path.rglob("*")] == ["out", "out/thesis.txt"]


def test_dtypes(run, tmp_path):
    """The dtype that is asked for; by default that of each tensor in the folder that training started from, else float32."""
    config, model, params, path = run
    half = export_hf(config, byte_tokenizer(), path, tmp_path / "half", ExportOptions("bfloat16"))
    assert {x.dtype for x in tensors_in(half).values()} == {torch.bfloat16}
    assert json.loads((half / "config.json").read_text(encoding="utf-8"))["torch_dtype"] == "bfloat16"
    file = half / "model.safetensors"
    mixed = tensors_in(half)
    mixed["model.norm.weight"] = mixed["model.norm.weight"].float()
    shutil.copytree(half, tmp_path / "mixed")
    save_file(mixed, tmp_path / "mixed" / file.name)
    for key in ("path", "init_from"):
        if key == "path":
            source = dataclasses.replace(
                config, model=dataclasses.replace(config.model, config=None, path=str(tmp_path / "mixed"))
            )
        else:
            source = dataclasses.replace(config, init_from=str(tmp_path / "mixed"))
        found = tensors_in(export_hf(source, byte_tokenizer(), path, tmp_path / key))
        assert {name for name, x in found.items() if x.dtype == torch.float32} == {"model.norm.weight"}
        expected = models.hf_tensors(model, params)
        assert all(torch.equal(x, expected[name].to(x.dtype)) for name, x in found.items())
    assert {x.dtype for x in tensors_in(export_hf(config, byte_tokenizer(), path, tmp_path / "plain")).values()} == {
        torch.float32
    }


def test_a_model_folder_that_is_gone(run, tmp_path):
    """The checkpoint records config.json, so the folder is not needed; one that has changed is refused."""
    config, _, _, path = run
    gone = dataclasses.replace(config, model=dataclasses.replace(config.model, config=None, path=str(tmp_path / "gone")))
    export_hf(gone, byte_tokenizer(), path, tmp_path / "out")
    other = dict(config.model.config) | {"rope_theta": 3.0}
    changed = dataclasses.replace(config, model=dataclasses.replace(config.model, config=other))
    with pytest.raises(
        CheckpointError, match=r"another model than the one that was trained.*\n  ropes\.main\.theta: 10000\.0 -> 3\.0"
    ):
        export_hf(changed, byte_tokenizer(), path, tmp_path / "out")
    assert (tmp_path / "out" / "config.json").is_file()


def test_a_wrong_export_is_found(run, tmp_path, monkeypatch):
    """If one bit of what was written is wrong, no folder appears; unchecked it does. A value that overflows is an error."""
    config, _, params, path = run
    write_hf = models.write_hf

    def wrong(model, leaves, folder, *more):
        write_hf(model, leaves, folder, *more)
        file = folder / "model.safetensors"
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)

    monkeypatch.setattr(models, "write_hf", wrong)
    with pytest.raises(CheckpointError, match="does not have the values that were trained"):
        export_hf(config, byte_tokenizer(), path, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    export_hf(config, byte_tokenizer(), path, tmp_path / "out", ExportOptions(check=False))
    monkeypatch.undo()
    plain = checkpoint.read_extras(path)["config"]
    large = write(tmp_path, config, plain, tree.map_leaves(lambda x: x + 1e5, params))
    with pytest.raises(CheckpointError, match=r"float16 cannot hold all values"):
        export_hf(config, byte_tokenizer(), large, tmp_path / "large", ExportOptions("float16"))


def test_parameters_of_another_model_are_refused(run):
    """Names that are missing or unexpected are listed before anything is read."""
    config, _, _, path = run
    deeper = dataclasses.replace(config.model, config=dict(config.model.config) | {"num_hidden_layers": 2})
    with pytest.raises(CheckpointError, match=r"missing: params\.layers\.1\."):
        load_params(make_setup(dataclasses.replace(config, model=deeper)).model, path)


def test_recorded_paths_are_absolute(tmp_path):
    """Relative paths get the folder in which they were given; words, and globs with a count, stay what they are."""
    (tmp_path / "hf").mkdir()
    plain = {
        "model": {"path": "hf", "config": None},
        "data": {"tokenizer": "bytes", "sources": ["self-cognition#3", "a/*.jsonl#2", "/b.jsonl"]},
        "evaluation": {"sources": None},
        "resume": {"path": "auto"},
        "init_from": "org/name",
    }
    found = with_absolute_paths(plain, tmp_path)
    assert found["model"] == {"path": f"{tmp_path}/hf", "config": None}
    assert found["data"] == {"tokenizer": "bytes", "sources": ["self-cognition#3", f"{tmp_path}/a/*.jsonl#2", "/b.jsonl"]}
    assert (found["evaluation"], found["resume"], found["init_from"]) == ({"sources": None}, {"path": "auto"}, "org/name")


@pytest.mark.full("writes 400 MB; the bits of an export are compared in the broad tier")
def test_memory(tmp_path):
    """Exporting 370 MB takes less anonymous memory than the largest tensor and 150 MB; bfloat16 in, bfloat16 out."""
    command = [sys.executable, "-m", "bench.export_memory", str(tmp_path / "made")]
    sizes = ["--layers", "6", "--hidden", "1024", "--vocab", "8192"]
    done = subprocess.run([*command, *sizes], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for line in map(json.loads, done.stdout.splitlines()):
        assert line["dtype"] == "bfloat16"
        assert line["written_bytes"] > 170e6
        assert line["over_bytes"] < line["largest_tensor_bytes"] + 150e6
