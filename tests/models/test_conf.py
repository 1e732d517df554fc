"""The models of conf/model: every one can be built, and those with a published size have it."""

import pytest
import yaml

from mpar import models, tree
from mpar.conf_dir import conf_dir

FILES = {file.stem: file for file in (conf_dir() / "model").glob("*.yaml") if file.stem != "hf"}
MILLIONS = {
    "gemma2_2b": 2614.3,
    "gemma3_1b": 999.9,
    "gpt2": 124.4,
    "llama3_8b": 8030.3,
    "mistral_7b": 7241.7,
    "olmo2_7b": 7298.6,
    "phi3_mini_4k": 3821.1,
    "qwen3_0_6b": 596.0,
}
"""Parameters that the model cards give, in millions."""


@pytest.mark.parametrize("name", sorted(FILES))
def test_every_model_can_be_built(name):
    """No key is unknown, rows of seq_len fit the positions, and the parameters are as many as published."""
    conf = yaml.safe_load(FILES[name].read_text())
    model = models.from_config(conf["config"], vocab_multiple=1)
    assert conf["name"] == name
    assert conf["seq_len"] <= conf["config"].get("max_position_embeddings", conf["config"].get("n_positions", conf["seq_len"]))
    if name in MILLIONS:
        assert sum(leaf.numel() for leaf in tree.leaves(model.abstract_params)) / 1e6 == pytest.approx(MILLIONS[name], abs=0.06)
