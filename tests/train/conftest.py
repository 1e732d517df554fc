"""A small program, compiled once."""

import pytest

from mpar.cli._compose import compose_config
from mpar.program import Program
from mpar.train import TrainConfig, make_setup
from mpar.train.compile import compile_program

SMALL = [
    "model.config.num_hidden_layers=1",
    "model.config.hidden_size=16",
    "model.config.intermediate_size=32",
    "model.config.num_attention_heads=2",
    "model.config.num_key_value_heads=2",
    "model.config.head_dim=8",
    "data.seq_len=128",
    "data.batch_size=4",
    "schedule.num_microbatches=2",
]


@pytest.fixture(scope="session")
def config() -> TrainConfig:
    """ZeRO-3 with tensor and sequence parallelism on 4 ranks."""
    return compose_config("train", TrainConfig, [*SMALL, "strategy=zero3_tp_sp", "mesh=fsdp2_tp2", "steps=3"])[0]


@pytest.fixture(scope="session")
def program(config: TrainConfig) -> Program:
    """The program of `config`."""
    return compile_program(make_setup(config))
