"""Tasks: what is learned, as pure losses over the log-probabilities of answers.

`TaskChain(model, task)` is a chain whose last segment ends with the loss of a `Task` in place of that of the next token. A loss
is given `Forwards`, and asks them for what it needs: log-probabilities of labels, logits, or features. The answers 2k and 2k + 1
of a row are the pair k, so no entry of the batch has to say which answers belong together.
"""

from mpar.tasks._answer_logps import AnswerLogps
from mpar.tasks._answers import members_of, per_answer, per_token
from mpar.tasks._chain import BESIDE_MODEL, MEAN, Measured, TaskChain, task_means
from mpar.tasks._cpo import Cpo
from mpar.tasks._dft import Dft
from mpar.tasks._dpo import DPO_LOSSES, Dpo
from mpar.tasks._gkd import Gkd, generalised_jsd
from mpar.tasks._grpo import Grpo, GrpoLoss, GrpoTokens, grpo_loss
from mpar.tasks._kto import MISMATCHED, Kto
from mpar.tasks._orpo import Orpo
from mpar.tasks._ppo import Ppo, PpoLoss, gae, ppo_loss, token_rewards, whitened
from mpar.tasks._reward import Prm, Reward
from mpar.tasks._task import BY_ANSWER, BY_TOKEN, Entry, Forward, Forwards, Means, Task

__all__ = [
    "BESIDE_MODEL",
    "BY_ANSWER",
    "BY_TOKEN",
    "DPO_LOSSES",
    "MEAN",
    "MISMATCHED",
    "AnswerLogps",
    "Cpo",
    "Dft",
    "Dpo",
    "Entry",
    "Forward",
    "Forwards",
    "Gkd",
    "Grpo",
    "GrpoLoss",
    "GrpoTokens",
    "Kto",
    "Means",
    "Measured",
    "Orpo",
    "Ppo",
    "PpoLoss",
    "Prm",
    "Reward",
    "Task",
    "TaskChain",
    "gae",
    "generalised_jsd",
    "grpo_loss",
    "members_of",
    "per_answer",
    "per_token",
    "ppo_loss",
    "task_means",
    "token_rewards",
    "whitened",
]
