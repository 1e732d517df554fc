"""Inference by compiled programs. Importing this loads the compiler, which importing `mpar.infer.run` does not."""

from collections.abc import Sequence

from torch import Tensor

from mpar.errors import ConfigError
from mpar.infer._compile_decode import compile_decode
from mpar.infer._generate import continued
from mpar.infer._sampling import Sampling
from mpar.infer.run import Leader, ProgramRunner, divisible_pages, follow, make_runner, num_groups
from mpar.models import Model
from mpar.tree import Tree

__all__ = ["Leader", "ProgramRunner", "compile_decode", "divisible_pages", "follow", "generate", "make_runner", "num_groups"]


def generate(
    model: Model,
    params: Tree,
    tokens_BS: Tensor,
    max_new_tokens: int,
    *,
    temperature: float = 0.0,
    seed: int = 0,
    eos_ids: Sequence[int] = (),
) -> Tensor:
    """The prompts `tokens_BS`, all of one length, each followed by up to `max_new_tokens` new ids: (B, S + new).

    An `Engine` answers them, with the runner that `make_runner` gives; it is made anew in each call, so prompts of unlike lengths
    and many calls are for an engine of one's own. At temperature 0 the most likely token is taken; otherwise one is drawn from
    softmax(logits / temperature). Draws depend only on `seed`, the row, and the place of the new token. After a row has got one
    of `eos_ids`, it is filled with this id, and generation stops when this holds of every row.
    Raises ConfigError or DataError for arguments that cannot be used.
    """
    if max_new_tokens < 0 or not temperature >= 0:
        raise ConfigError(
            f"cannot generate with max_new_tokens={max_new_tokens}, temperature={temperature}: neither may be negative"
        )
    if max_new_tokens == 0:
        return tokens_BS
    sampling = Sampling(max_tokens=max_new_tokens, temperature=temperature, seed=seed)
    return continued(
        model, lambda sizes: make_runner(model, params, sizes, device=tokens_BS.device), tokens_BS, sampling, eos_ids
    )
