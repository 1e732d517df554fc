"""Generate: continues prompts of one length by an engine, and gives the tokens as one tensor."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from mpar.errors import ConfigError, DataError
from mpar.infer._engine import Engine, Runner
from mpar.infer._sampling import Sampling
from mpar.infer._scheduler import Sizes
from mpar.models import Model

__all__ = ["continued"]

_PAGE_SIZE = 16
_MOST_ROWS, _STEP_TOKENS = 64, 2048


def continued(
    model: Model, make_runner: Callable[[Sizes], Runner], tokens_BS: Tensor, sampling: Sampling, eos_ids: Sequence[int]
) -> Tensor:
    """The prompts and their answers, with the runner that is made for the sizes they need; see `mpar.generate`."""
    assert sampling.max_tokens is not None
    _check(model, tokens_BS, sampling.max_tokens)
    if not len(tokens_BS):
        return tokens_BS
    rows, length = min(len(tokens_BS), _MOST_ROWS), tokens_BS.shape[1] + sampling.max_tokens
    pages = 1 + rows * -(-length // _PAGE_SIZE)
    step_tokens = max(rows, min(tokens_BS.numel(), _STEP_TOKENS))
    runner = make_runner(Sizes(rows=rows, tokens=step_tokens, pages=pages, page_size=_PAGE_SIZE, length=length))
    engine = Engine(runner, eos_ids=eos_ids)
    requests = [engine.add(prompt, sampling, choice) for choice, prompt in enumerate(tokens_BS.tolist())]
    for _ in engine.run():
        pass
    longest = max(len(request.answer) for request in requests)
    rows_of_ids = [[*request.answer, *request.answer[-1:] * (longest - len(request.answer))] for request in requests]
    return torch.cat([tokens_BS, torch.tensor(rows_of_ids, dtype=tokens_BS.dtype, device=tokens_BS.device)], dim=1)


def _check(model: Model, tokens_BS: Tensor, max_new_tokens: int) -> None:
    if tokens_BS.ndim != 2 or not tokens_BS.shape[1] or tokens_BS.is_floating_point():
        raise DataError(
            f"cannot generate from tokens {tuple(tokens_BS.shape)} of {tokens_BS.dtype}: need integers (B, S) with S > 0"
        )
    outside = tokens_BS[(tokens_BS < 0) | (tokens_BS >= model.vocab_size)].unique().tolist()
    if outside:
        raise DataError(f"cannot generate: the prompt has ids {outside[:8]}, the vocabulary {model.vocab_size} tokens")
    if model.max_positions is not None and tokens_BS.shape[1] + max_new_tokens > model.max_positions:
        raise ConfigError(
            f"cannot generate {max_new_tokens} tokens after {tokens_BS.shape[1]}: this model has learned only "
            f"{model.max_positions} positions"
        )
