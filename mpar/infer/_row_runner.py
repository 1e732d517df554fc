"""Row runner: computes each row of a step by itself, with the state that the model keeps, or by reading the whole row again."""

from collections.abc import Mapping, Sequence
from typing import cast

import torch
from torch import Tensor

from mpar import tree
from mpar.errors import ConfigError
from mpar.infer._check_params import check_params
from mpar.infer._scheduler import Sizes
from mpar.infer._scores import Scores, scores_of_logits
from mpar.infer._tables import Tables
from mpar.models import Model, Trainable
from mpar.tree import Tree

__all__ = ["RowRunner"]


class RowRunner:
    """A runner for every model, in one process. Rows have no pages in common, so no prompt finds what another one computed.

    model: a language model, which may have adapters or quantised weights.
    """

    shares_pages = False

    def __init__(self, model: Trainable, params: Tree, sizes: Sizes) -> None:
        self.model, self.params, self.sizes, self.vocab_size = model, params, sizes, model.vocab_size
        self._plain = cast(Model, model.plain)
        self.adapters: Sequence[str] = model.adapter_names
        self._params = self._all_plain()
        self._states: list[object] = [None] * sizes.rows

    def _all_plain(self) -> list[Tree]:
        """The parameters of the plain model without an adapter, and with each of those that rows choose from."""
        return [self.model.plain_params(self.params, adapter) for adapter in range(1 + len(self.adapters))]

    def step(self, tables: Tables) -> Tensor:
        """See `Runner`."""
        logits_RV = torch.zeros(self.sizes.rows, self.model.vocab_size)
        for row in tables.rows_T.unique().tolist():
            here = tables.rows_T == row
            params = self._params[int(tables.adapters_R[row])]
            logits_RV[row] = self._read(params, row, tables.tokens_T[here], first=int(tables.order_T[here][0]) == 0)
        return logits_RV

    def prepare_next(self) -> bool:
        """See `Runner`; there is nothing to do."""
        return False

    def load(self, params: Mapping[str, Tensor]) -> None:
        """See `Runner`."""
        named, structure = tree.leaves_with_path(self.params), tree.flatten(self.params)[1]
        check_params(dict(named), params)
        self.params = tree.unflatten(structure, [params[path].detach() for path, _ in named])
        self._params = self._all_plain()

    def scores(self, texts: Sequence[Tensor], num_likeliest: int, adapter: int = 0) -> list[Scores]:
        """See `Runner`."""
        scores = []
        for text in texts:
            if len(text) > self.sizes.length + 1:
                raise ConfigError(f"cannot score a text of {len(text)} tokens: at most {self.sizes.length + 1} fit here.")
            with torch.no_grad():
                logits_SV = self._plain.apply(self._params[adapter], text[None, :-1])[0]
            scores.append(scores_of_logits(logits_SV, text, num_likeliest))
        return scores

    def _read(self, params: Tree, row: int, tokens_N: Tensor, *, first: bool) -> Tensor:
        """The logits (V,) behind these tokens, which follow those that the row has read; `first`: it has read none."""
        state = None if first else self._states[row]
        with torch.no_grad():
            if self._plain.can_decode:
                logits_BSV, self._states[row] = self._plain.decode(params, tokens_N[None], state)
            else:
                read = tokens_N if first else torch.cat([state, tokens_N])  # type: ignore[list-item]
                logits_BSV, self._states[row] = self._plain.apply(params, read[None]), read
        return logits_BSV[0, -1]
