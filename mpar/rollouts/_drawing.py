"""What answers are drawn with, and what is asked."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from mpar.data import Message
from mpar.ops import fold_key
from mpar.rollouts._environment import Environment
from mpar.rollouts._plan import RolloutPlan
from mpar.rollouts._prompts import Prompt, Prompts
from mpar.rollouts._sampler import Sampler
from mpar.rollouts.rewards import Reward

__all__ = ["Drawing", "Exchange", "Measure", "Question", "ReplyIds", "draw_seed"]

Exchange = Callable[[object], list[object]]
"""A function that gives every rank what each rank has, in the order of ranks; all ranks call it together."""


Measure = Callable[[Mapping[str, Tensor], Mapping[str, Tensor]], Mapping[str, Tensor]]
"""A function of the parameters, as this rank has them by path, and of a global batch, that gives numbers of its positions,
(B, S). All ranks call it together."""


ReplyIds = Callable[[Sequence[Message], int], Sequence[int]]
"""A function of messages, and of the token that ended the answer before them, that gives the tokens from there up to where the
next answer begins."""


@dataclass(frozen=True)
class Drawing:
    """What answers are drawn with.

    rewards: functions, which each rank calls for its own answers; `models` are called by all ranks together, for all answers.
    decode:  the text of tokens, without special ones. exchange, rank, size: how ranks share the work: each draws every `size`-th
             group, and rewards it.
    measure: gives what the task measures of answers. teacher: draws those answers that the plan leaves to the teacher.
    time_s:  how long one reward, or the environment, may take for the answers of a rank; None: as long as it wants to.
    environment: replies to the policy, so that an answer has several turns; None: each has one. reply_ids: the tokens of replies.
    """

    plan: RolloutPlan
    prompts: Prompts
    sampler: Sampler
    rewards: Sequence[Reward]
    decode: Callable[[Sequence[int]], str]
    seed: int
    exchange: Exchange
    rank: int = 0
    size: int = 1
    models: Sequence[Reward] = ()
    measure: Measure | None = None
    teacher: Sampler | None = None
    time_s: float | None = None
    environment: Environment | None = None
    reply_ids: ReplyIds | None = None


@dataclass(frozen=True)
class Question:
    """A prompt that a group of answers is drawn for. group: its number in the run. seed: of the draws. writer: who answers."""

    prompt: Prompt
    group: int
    seed: int
    writer: str = "policy"


def draw_seed(seed: int, *purpose: int | str) -> int:
    """The seed of the draws for a question, of that of the run and of what the draws are for."""
    low, high = fold_key(seed, *purpose)
    return low | (high & 0x7FFFFFFF) << 32
