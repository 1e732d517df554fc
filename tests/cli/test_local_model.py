"""Models of the hub: from its local cache, and in no other way."""

import json
from pathlib import Path

import huggingface_hub
import pytest

from mpar.cli._local_model import local_folder
from mpar.cli._run_problems import compose_run, plan_problems

CONFIG = {"model_type": "llama", "hidden_size": 8}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch) -> Path:
    """A cache of the hub that has the model Some/Model-1, and no network."""
    place = tmp_path / "cache" / "models--Some--Model-1"
    snapshot = place / "snapshots" / "abc123"
    snapshot.mkdir(parents=True)
    (place / "refs").mkdir()
    (place / "refs" / "main").write_text("abc123", encoding="utf-8")
    (snapshot / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    here = huggingface_hub.snapshot_download
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, **how: here(name, cache_dir=tmp_path / "cache", **how))
    return snapshot


def test_a_model_in_the_cache(cache):
    """Its name stands for its folder, which is what the run records."""
    assert local_folder("Some/Model-1") == str(cache)
    config, plain = compose_run(["model=hf", "model.path=Some/Model-1", "data.tokenizer=Some/Model-1"], None, plan_problems)
    assert (config.model.path, config.data.tokenizer) == (str(cache), str(cache))
    assert isinstance(plain["model"], dict) and plain["model"]["path"] == str(cache)


def test_a_model_that_is_not_there(cache):
    """Names that the cache does not have, and what is no name of a model, stay as they are."""
    assert local_folder("Some/Model-2") == "Some/Model-2"
    assert local_folder("/nowhere/at/all") == "/nowhere/at/all"


def test_a_folder_goes_first(cache, tmp_path, monkeypatch):
    """A folder that is called like a model of the hub is the folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "Some" / "Model-1").mkdir(parents=True)
    assert local_folder("Some/Model-1") == "Some/Model-1"
