"""Folders of Hugging Face that other programs load: every architecture's export is one, and each planted mistake is found."""

import json
import shutil

import pytest
from safetensors.torch import load_file, save_file

from mpar import models
from mpar.cli.main import main
from mpar.data import byte_tokenizer
from mpar.models import folder_problems
from tests.models.variants import KINDS


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """An export of a llama in two files, with a tokenizer."""
    folder = tmp_path_factory.mktemp("sound") / "hf"
    model = models.build("llama", {**KINDS["llama"].base, "vocab_size": 259, "tie_word_embeddings": False})
    models.to_hf(model, model.init(0), folder, max_file_bytes=20_000)
    byte_tokenizer().save(folder)
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_exports_are_sound(kind, tmp_path):
    """Those of every architecture, without a tokenizer but for the line that says so."""
    model = models.build(kind, KINDS[kind].base)
    models.to_hf(model, model.init(0), tmp_path / "hf")
    problems = folder_problems(tmp_path / "hf")
    assert [p for p in problems if "tokenizer.json is missing" not in p and "what ends an answer" not in p] == []


def change(folder, file: str, **values: object) -> None:
    """Change keys of a JSON file; None removes a key."""
    content = json.loads((folder / file).read_text()) if (folder / file).exists() else {}
    content = {key: value for key, value in {**content, **values}.items() if value is not None}
    (folder / file).write_text(json.dumps(content))


def change_tensors(folder, fn) -> None:
    """Write the first file of weights with other tensors."""
    path = sorted(folder.glob("*.safetensors"))[0]
    tensors = load_file(path)
    save_file(fn(tensors), path)


def without_first(tensors: dict) -> dict:
    return dict(list(tensors.items())[1:])


INDEX = "model.safetensors.index.json"
MISTAKES = {
    "no architectures": (lambda f: change(f, "config.json", architectures=None), "architectures is None"),
    "two architectures": (lambda f: change(f, "config.json", architectures=["A", "B"]), "architectures is ['A', 'B']"),
    "no model_type": (lambda f: change(f, "config.json", model_type=None), "model_type is missing"),
    "no dtype": (lambda f: change(f, "config.json", torch_dtype=None, dtype=None), "neither dtype nor torch_dtype"),
    "another dtype": (lambda f: change(f, "config.json", torch_dtype="bfloat16"), "config.json says bfloat16"),
    "tied with a head": (lambda f: change(f, "config.json", tie_word_embeddings=True), "tie_word_embeddings is true"),
    "padded rows": (lambda f: change(f, "config.json", vocab_size=250), "has 259 rows, vocab_size is 250"),
    "an old file": (lambda f: shutil.copy(sorted(f.glob("*.safetensors"))[0], f / "old.safetensors"), "no index names"),
    "a pickle": (lambda f: (f / "optimizer.bin").write_bytes(b"x"), "optimizer.bin: pickled"),
    "a lost tensor": (lambda f: change_tensors(f, without_first), "which no file has"),
    "a renamed tensor": (
        lambda f: change_tensors(f, lambda t: {("x." if i == 0 else "") + k: v for i, (k, v) in enumerate(t.items())}),
        "which the files have; they are not read",
    ),
    "a wrong size": (lambda f: change(f, INDEX, metadata={"total_size": 1}), "total_size is 1"),
    "no file": (lambda f: sorted(f.glob("*.safetensors"))[0].unlink(), "No such file"),
    "no tokenizer": (lambda f: (f / "tokenizer.json").unlink(), "tokenizer.json is missing"),
    "no special tokens": (lambda f: (f / "tokenizer_config.json").unlink(), "tokenizer_config.json is missing"),
    "an unknown token": (lambda f: change(f, "tokenizer_config.json", eos_token="<none>"), "eos_token is '<none>'"),
    "an end outside": (lambda f: change(f, "generation_config.json", eos_token_id=[3, 999]), "eos_token_id is [3, 999]"),
    "no end": (lambda f: change(f, "tokenizer_config.json", eos_token=None), "nothing says what ends an answer"),
    "a shape of another size": (lambda f: change(f, "config.json", intermediate_size=999), "are not those of this llama"),
    "a broken config": (lambda f: (f / "config.json").write_text("{"), "config.json"),
}


def test_the_sound_folder_has_no_problem(sound, capsys):
    """Neither for the function nor for the command."""
    assert folder_problems(sound) == []
    assert main(["checkpoint", "verify", str(sound)]) == 0
    assert "sound, a folder of Hugging Face" in capsys.readouterr().out


@pytest.mark.cases(20)
@pytest.mark.parametrize("mistake", MISTAKES)
def test_planted_mistakes_are_found(sound, mistake, tmp_path, capsys):
    """Each by a sentence of its own."""
    folder = tmp_path / "hf"
    shutil.copytree(sound, folder)
    plant, sentence = MISTAKES[mistake]
    plant(folder)
    problems = folder_problems(folder)
    assert any(sentence in problem for problem in problems), problems
    assert main(["checkpoint", "verify", str(folder)]) == 1
    assert "not sound" in capsys.readouterr().out
