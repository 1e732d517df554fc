"""Sizes that follow from a configuration where it leaves them open: the batch, its microbatches, its sequences."""

from mpar.train._config import TrainConfig

__all__ = ["batch_size", "num_microbatches", "seq_len"]

_DEFAULT_BATCH_SIZE = 8


def seq_len(config: TrainConfig) -> int:
    """Positions of a sequence."""
    return config.data.seq_len if config.data.seq_len is not None else config.model.seq_len


def batch_size(config: TrainConfig) -> int:
    """Sequences of a global batch: as configured, or 8 rounded up to a multiple of data parallel ranks times microbatches."""
    if config.data.batch_size is not None:
        return config.data.batch_size
    unit = config.mesh.dp * config.mesh.fsdp * max(1, num_microbatches(config))
    return -(-_DEFAULT_BATCH_SIZE // unit) * unit


def num_microbatches(config: TrainConfig) -> int:
    """Microbatches of a step: as configured, or 1 without a pipeline and two for each position with one; if paired, as many
    pairs."""
    if config.schedule.num_microbatches is not None:
        return config.schedule.num_microbatches
    return (1 if config.mesh.pp == 1 else 2 * config.mesh.pp) * (2 if config.schedule.paired else 1)
