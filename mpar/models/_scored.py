"""ScoredDecoder: a decoder as a chain that gives the log-probabilities of the tokens of texts, and the likeliest tokens."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from mpar.chain import Axes, Chain, Segment
from mpar.models import decoder
from mpar.models._declared import DeclaredModel
from mpar.models._model import Trainable
from mpar.models.decoder import HeadSegment
from mpar.tree import Tree

__all__ = ["ScoredDecoder"]

_KEYS = ("tokens", "labels")


@dataclass(frozen=True)
class _ScoreSegment:
    """The function of the last segment, which gives log-probabilities in place of the loss."""

    head: HeadSegment
    num_likeliest: int

    def __call__(
        self, params: tuple, x: Tensor, context: Mapping[str, Tensor], *, training: bool
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        logits_BSV = self.head.logits(params, x)
        logits_BSV = logits_BSV.to(torch.promote_types(logits_BSV.dtype, torch.float32))
        is_padding_V = torch.arange(logits_BSV.shape[-1], device=logits_BSV.device) >= self.head.vocab_size
        logprobs_BSV = logits_BSV.masked_fill(is_padding_V, -torch.inf).log_softmax(-1)
        logprobs_BS = logprobs_BSV.gather(-1, context["labels"][..., None])[..., 0]
        values_BSK, ids_BSK = logprobs_BSV.topk(self.num_likeliest, -1)
        return {"logprobs": logprobs_BS, "likeliest_logprobs": values_BSK, "likeliest": ids_BSK}, {}


@dataclass(frozen=True)
class ScoredDecoder(Chain):
    """A decoder whose results are, for each of its tokens, the log-probability of its label, which comes behind it, and the
    `num_likeliest` likeliest tokens there with their log-probabilities. A batch has rows of `length` tokens, one for each group;
    labels of what does not count are any token. If the model has `adapter_names`, a batch says which adapter each token has.
    """

    model: Trainable
    length: int
    groups: int
    num_likeliest: int

    @functools.cached_property
    def segments(self) -> tuple[Segment, ...]:
        """Those of the model, whose last one gives log-probabilities."""
        plain = cast(DeclaredModel, self.model.plain)
        *body, last = plain.segments
        rows, likeliest = ("batch", "seq"), ("batch", "seq", None)
        axes = {"logprobs": rows, "likeliest_logprobs": likeliest, "likeliest": likeliest}
        head = _ScoreSegment(decoder.head_segment(plain.config), self.num_likeliest)
        return self.model.over((*body, Segment(last.name, head, last.paths, axes)))

    @property
    def abstract_params(self) -> Tree:
        """The parameter tree of the model."""
        return self.model.abstract_params

    @property
    def param_axes(self) -> Tree:
        """The logical axes of the parameters."""
        return self.model.param_axes

    @property
    def frozen(self) -> frozenset[str]:
        """What the model freezes, which is stored as training stores it."""
        return self.model.frozen

    @property
    def batch_axes(self) -> dict[str, Axes]:
        """Tokens and labels, and adapters."""
        return dict.fromkeys((*_KEYS, *(("adapters",) if self.model.adapter_names else ())), ("batch", "seq"))

    @property
    def batch_shape(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """The shape and dtype of each entry of a batch."""
        return dict.fromkeys(self.batch_axes, ((self.groups, self.length), torch.int64))

    def context(self, batch: dict[str, Tensor], row_length: int | None = None) -> Mapping[str, Tensor]:
        """What segments read: that of the model, with the labels."""
        context = {**self.model.plain.context({"tokens": batch["tokens"]}, row_length), "labels": batch["labels"]}
        return {**context, **self.model.gates(batch["adapters"], batch["adapters"])} if self.model.adapter_names else context

    def weight(self, batch: dict[str, Tensor]) -> Tensor:
        """One: there is no loss."""
        return torch.ones((), dtype=torch.float32)
