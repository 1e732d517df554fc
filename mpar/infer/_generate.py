"""Plain generation: for each new token the model reads all tokens again, or, if it can decode, only the new one and a state."""

from collections.abc import Sequence

import torch
from torch import Tensor

from mpar import ops
from mpar.errors import ConfigError, DataError
from mpar.models import DecoderParams, Model

__all__ = ["generate"]


def generate(
    model: Model,
    params: DecoderParams,
    tokens_BS: Tensor,
    max_new_tokens: int,
    *,
    temperature: float = 0.0,
    seed: int = 0,
    eos_ids: Sequence[int] = (),
) -> Tensor:
    """The prompts `tokens_BS`, all of one length, each followed by up to `max_new_tokens` new ids: (B, S + new).

    At temperature 0 the most likely token is taken; otherwise one is drawn from softmax(logits / temperature). Draws depend only
    on `seed`, the row, and the number of the new token. After a row has got one of `eos_ids`, it is filled with this id, and
    generation stops when this holds of every row. Raises ConfigError or DataError for arguments that cannot be used.
    """
    if max_new_tokens < 0 or not temperature >= 0:
        raise ConfigError(
            f"cannot generate with max_new_tokens={max_new_tokens}, temperature={temperature}: neither may be negative"
        )
    if tokens_BS.ndim != 2 or not tokens_BS.shape[1] or tokens_BS.is_floating_point():
        raise DataError(
            f"cannot generate from tokens {tuple(tokens_BS.shape)} of {tokens_BS.dtype}: need integers (B, S) with S > 0"
        )
    outside = tokens_BS[(tokens_BS < 0) | (tokens_BS >= model.vocab_size)].unique().tolist()
    if outside:
        raise DataError(f"cannot generate: the prompt has ids {outside[:8]}, the vocabulary {model.vocab_size} tokens")
    if model.max_positions is not None and tokens_BS.shape[1] + max_new_tokens - 1 > model.max_positions:
        raise ConfigError(
            f"cannot generate {max_new_tokens} tokens after {tokens_BS.shape[1]}: this model has learned only "
            f"{model.max_positions} positions"
        )
    done_B = torch.zeros(tokens_BS.shape[0], dtype=torch.bool, device=tokens_BS.device)
    eos = torch.tensor(list(eos_ids), dtype=tokens_BS.dtype, device=tokens_BS.device)
    state, decodes, unread_BS = None, model.can_decode, tokens_BS
    with torch.no_grad():
        for index in range(max_new_tokens):
            if decodes:
                logits_BSV, state = model.decode(params, unread_BS, state)
            else:
                logits_BSV = model.apply(params, tokens_BS)
            logits_BV = logits_BSV[:, -1]
            chosen_B = _choose(logits_BV, temperature, seed, index).to(tokens_BS.dtype)
            chosen_B = torch.where(done_B, tokens_BS[:, -1], chosen_B)
            unread_BS = chosen_B[:, None]
            tokens_BS = torch.cat([tokens_BS, unread_BS], dim=1)
            done_B = done_B | torch.isin(chosen_B, eos)
            if bool(done_B.all()):
                break
    return tokens_BS


def _choose(logits_BV: Tensor, temperature: float, seed: int, index: int) -> Tensor:
    """The token of the largest logit; with a temperature, of the largest after Gumbel noise, which draws from the softmax."""
    if temperature == 0:
        return logits_BV.argmax(-1)
    uniform_BV = ops.random_uniform(ops.fold_key(seed, "generate", index), tuple(logits_BV.shape)).to(logits_BV.device)
    return (logits_BV.to(torch.float32) / temperature - (-uniform_BV.log()).log()).argmax(-1)
