"""The keys of tasks that draw answers: how many, what rewards them, and how they are compared. This loads no torch."""

from dataclasses import dataclass
from typing import Any, Literal

from mpar.train._key import key

__all__ = ["RolloutKeys"]


@dataclass(frozen=True, kw_only=True)
class RolloutKeys:
    """What is learned from answers to prompts, how they are drawn, and what they are worth."""

    ratio: Literal["token", "sequence", "sequence_token", "sequence_sum"] | None = key(
        "grpo: of what probabilities are compared with those when an answer was drawn: each token, the answer by the mean "
        "(GSPO) or the sum of its tokens (RLOO), or the former with the gradient of tokens",
        default=None,
    )
    epsilon: float | None = key(
        "grpo, ppo: a ratio of probabilities counts from 1 - epsilon on; of ppo also up to 1 + epsilon", default=None, at_least=0
    )
    epsilon_high: float | None = key("grpo: and up to 1 + epsilon_high; of loss=cispo up to it", default=None, at_least=0)
    delta: float | None = key("grpo: the side that is not clipped counts up to this ratio", default=None, above=1)
    weigh_kl: bool | None = key("grpo: multiply the divergence from the reference model by the ratio", default=None)
    bar: float | None = key(
        "grpo, ppo: the largest difference between log-probabilities of sampler and trainer, else training stops",
        default=None,
        above=0,
    )

    value_clip: float | None = key("ppo: a value counts within this distance of the one before", default=None, at_least=0)
    value_weight: float | None = key("ppo: the weight of the loss of values", default=None, at_least=0)
    lam: float | None = key("ppo: how far advantages look ahead, 1: to the end", default=None, at_least=0, at_most=1)
    temperature: float | None = key("gkd: what logits are divided by", default=None, above=0)
    teacher: str | None = key(
        "gkd: the Hugging Face folder of the model that is learned from, or a run with one; it has the same vocabulary",
        default=None,
    )
    lmbda: float = key(
        "gkd: the share of answers that the model draws itself; the others are those of the data",
        default=0.5,
        at_least=0,
        at_most=1,
    )
    seq_kd: bool = key("gkd: the teacher draws the other answers", default=False)

    group_size: int = key("answers to each prompt, which are compared with each other", default=8, at_least=1)
    rewards: tuple[str, ...] = key(
        "what answers are worth: the folder of a run with task=reward, exact, format, length, overlong, cosine, repetition, "
        "code, module:function of your own",
        default=(),
    )
    reward_weights: tuple[float, ...] | None = key("what each reward is multiplied by; null: 1", default=None)
    reward_options: dict[str, Any] = key(
        "options of rewards, such as {format: {pattern: ...}, exact: {column: solution}}", default_factory=dict
    )
    reward_time_s: float = key(
        "seconds that a reward, or the environment, may take for all answers of a rank", default=300.0, above=0, at_most=1e7
    )
    environment: str | None = key(
        "grpo, ppo: module:function of your own that replies to what the policy writes, which then writes again: it is given the "
        "conversation, and returns a text, a message, a list of messages, or None to end it; null: each answer is one text",
        default=None,
    )
    environment_options: dict[str, Any] = key("what that function is called with by name", default_factory=dict)
    max_turns: int | None = key(
        "with an environment, how often the policy may write in a conversation; null: as long as max_new_tokens, which counts "
        "all tokens behind the prompt then, leaves room",
        default=None,
        at_least=1,
    )
    max_turn_tokens: int | None = key("with an environment, the most tokens of each time", default=None, at_least=1)
    max_prompt_tokens: int | None = key(
        "longer prompts are left out; null: what data.seq_len leaves beside task.max_new_tokens. Rows hold as many answers as "
        "always fit",
        default=None,
        at_least=2,
    )
    rollout_batches: int = key("the batches that are drawn at a time, with the same parameters", default=1, at_least=1)
    rollout_rounds: int = key("how often each of these batches is learned from", default=1, at_least=1)
    rollout_rows: int = key("the most answers that are made at the same time", default=64, at_least=1)
    scale_rewards: Literal["group", "batch", "none"] = key(
        "what differences of rewards are divided by: the standard deviation of the group, or of all answers, or nothing",
        default="group",
    )
    baseline: Literal["mean", "others"] = key(
        "what is subtracted from a reward: the mean of its group, or that of the others in it (RLOO)", default="mean"
    )
    max_redraws: int = key(
        "how often a group with equal rewards is replaced by one for another prompt (DAPO)", default=0, at_least=0
    )
    drop_truncated: bool = key("do not learn from answers that did not end by themselves", default=False)
