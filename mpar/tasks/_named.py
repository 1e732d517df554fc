"""The tasks that the command line names: functions from a model to the chain that is trained."""

from mpar.models import Trainable
from mpar.tasks._chain import TaskChain
from mpar.tasks._grpo import Grpo, GrpoLoss, Ratio, Reduction

__all__ = ["grpo"]


def grpo(
    model: Trainable,
    *,
    loss_type: Reduction = "dapo",
    ratio: Ratio = "token",
    epsilon: float = 0.2,
    epsilon_high: float | None = None,
    delta: float | None = None,
    beta: float = 0.0,
    weigh_kl: bool = False,
    dr_tokens: int | None = None,
    bar: float = 0.01,
) -> TaskChain:
    """`model`, trained by GRPO on answers that it draws itself; `GrpoLoss` and `Grpo` say what the options mean. With `beta`, it
    stays near the model of the beginning. dr_tokens: the most tokens of an answer, for loss_type=dr_grpo.
    """
    options = GrpoLoss(
        loss_type=loss_type,
        ratio=ratio,
        epsilon=epsilon,
        epsilon_high=epsilon_high,
        delta=delta,
        beta=beta,
        weigh_kl=weigh_kl,
        max_tokens=dr_tokens,
    )
    return TaskChain(model, Grpo(options=options, bar=bar), model if beta else None)
