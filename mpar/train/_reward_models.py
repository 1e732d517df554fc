"""Reward models that judge answers: runs with task=reward, whose scores are rewards of other runs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from mpar.checkpoint import read_extras
from mpar.errors import ConfigError
from mpar.models import Trainable
from mpar.program import Program, State
from mpar.rollouts import Reward, Rollout
from mpar.train._changes import model_then
from mpar.train._config import TaskConfig
from mpar.train._measure import Measuring
from mpar.train._setup import reward_specs
from mpar.train._state import Progress, checkpoint_in, load_state

__all__ = ["RewardModel", "find_reward_model", "model_rewards", "reward_folders"]


@dataclass(frozen=True)
class RewardModel:
    """A model of rewards and the checkpoint that has its parameters."""

    model: Trainable
    checkpoint: Path


def reward_folders(task: TaskConfig) -> list[str]:
    """The rewards that are folders of runs."""
    return [spec.name for spec in reward_specs(task) if spec.is_folder] if task.draws else []


def find_reward_model(folder: str, policy: Trainable) -> RewardModel:
    """The newest reward model of the run in `folder`. Raises ConfigError if it is none, or has another vocabulary."""
    path = checkpoint_in(Path(folder))
    if path is None:
        raise ConfigError(f"cannot reward answers with {folder}: it is neither a checkpoint nor the run_dir of a run with one.")
    extras = read_extras(path)
    plain, recorded = extras.get("config"), Progress.from_extras(extras, path).hf_config
    task = plain.get("task") if isinstance(plain, Mapping) else None
    learned = task.get("learn") if isinstance(task, Mapping) else None
    if learned != "reward":
        raise ConfigError(
            f"cannot reward answers with {path}: it was trained with task.learn={learned}, which gives no scores of answers.\n"
            "Name a run with task=reward."
        )
    assert isinstance(plain, Mapping)
    model = model_then(plain, recorded)
    if model is None or model.vocab_size != policy.vocab_size:
        size = "an unknown number of" if model is None else model.vocab_size
        raise ConfigError(
            f"cannot reward answers with {path}: its model has {size} tokens, and the model that is trained {policy.vocab_size}. "
            "It reads the tokens of the answers, so both need the same tokenizer."
        )
    return RewardModel(model, path)


def model_rewards(
    task: TaskConfig, policy: Trainable, programs: Mapping[str, Program], rank: int, device: torch.device, shape: "RowShape"
) -> list[Reward]:
    """The rewards that are models. All ranks call each of them together, for the same rollouts."""
    weights = {spec.name: spec.weight for spec in reward_specs(task)}
    return [
        Reward(folder, weights[folder], _scorer(find_reward_model(folder, policy), programs[folder], rank, device, shape))
        for folder in reward_folders(task)
    ]


@dataclass(frozen=True)
class RowShape:
    """Rows in which answers are scored: how many of them a program reads at a time, the positions of a row, and the most tokens
    of a prompt with its answer."""

    num_rows: int
    seq_len: int
    answer_room: int
    timeout_s: float

    @property
    def per_row(self) -> int:
        """How many answers always fit into a row. Raises ConfigError if none does."""
        if self.answer_room > self.seq_len:
            raise ConfigError(
                f"cannot score answers in rows of data.seq_len={self.seq_len}: a prompt and its answer may have "
                f"{self.answer_room} tokens, and a score is read at the last one. Raise data.seq_len, or lower "
                "task.max_prompt_tokens."
            )
        return self.seq_len // self.answer_room


def _scorer(
    of: RewardModel, program: Program, rank: int, device: torch.device, shape: RowShape
) -> Callable[[Sequence[Rollout]], list[float]]:
    measuring, per_row = Measuring.of(program, rank, device, shape.timeout_s), shape.per_row
    state: State = load_state(program, of.checkpoint, rank, device, params_only=True)[0]

    def score(rollouts: Sequence[Rollout]) -> list[float]:
        ids = [(*rollout.prompt_ids, *rollout.answer_ids) for rollout in rollouts]
        num_rows = -(-len(ids) // per_row)
        size = (-(-num_rows // shape.num_rows) * shape.num_rows, shape.seq_len)
        batch = {
            key: torch.full(size, fill) for key, fill in (("tokens", 0), ("labels", -100), ("positions", 0), ("documents", -1))
        }
        ends: list[tuple[int, int]] = []
        for number, tokens in enumerate(ids):
            row, index = divmod(number, per_row)
            begin = 0 if index == 0 else ends[-1][1] + 1
            place = slice(begin, begin + len(tokens))
            batch["tokens"][row, place] = torch.tensor(tokens)
            batch["positions"][row, place] = torch.arange(len(tokens))
            batch["documents"][row, place] = index
            ends.append((row, place.stop - 1))
        scores_BS = measuring(state.leaves, batch)["scores"]
        return [float(scores_BS[place]) for place in ends]

    return score
