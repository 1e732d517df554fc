"""Chains and optimizers that are wrong are refused when a step is compiled, by segment, leaf and member."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest
import torch

from mpar import Mesh, compile_step, models, ops
from mpar.chain import Chain, Segment
from mpar.errors import ConfigError
from mpar.optim import AdamW
from mpar.sharding import ReplicatedFallback

B, S, V, D = 2, 4, 11, 8


def embed(params, x, context, *, training):
    (table_VD,) = params
    return ops.embedding(context["tokens"], table_VD), {}


def head(params, x, context, *, training):
    (head_DV,) = params
    loss, _ = ops.cross_entropy(ops.einsum("bsd,dv->bsv", x, head_DV), context["labels"])
    return None, {"loss": loss}


def meta(*shape: int) -> torch.Tensor:
    return torch.empty(shape, device="meta")


@dataclass(frozen=True)
class Parts:
    """What a chain is made of."""

    segments: tuple[Segment, ...] = (
        Segment("embed", embed, ("embed",), out_axes=("batch", "seq", "embed")),
        Segment("head", head, ("head",)),
    )
    params: dict = field(default_factory=lambda: {"embed": meta(V, D), "head": meta(D, V)})
    param_axes: dict = field(default_factory=lambda: {"embed": ("vocab", "embed"), "head": ("embed", "vocab")})
    batch_axes: dict = field(default_factory=lambda: dict.fromkeys(("tokens", "labels"), ("batch", "seq")))
    frozen: frozenset[str] = frozenset()


class Bigram(Chain):
    """A table of vectors for tokens, and a matrix that gives logits."""

    segments = property(lambda self: self.parts.segments)
    abstract_params = property(lambda self: self.parts.params)
    param_axes = property(lambda self: self.parts.param_axes)
    batch_axes = property(lambda self: self.parts.batch_axes)
    frozen = property(lambda self: self.parts.frozen)

    def __init__(self, parts: Parts) -> None:
        self.parts = parts

    def context(self, batch, row_length=None):
        return batch

    def weight(self, batch):
        return torch.ones_like(batch["labels"], dtype=torch.float32).sum()


def with_segment(index: int, **changes: object) -> Callable[[Parts], Parts]:
    def change(chain: Parts) -> Parts:
        segments = list(chain.segments)
        segments[index] = replace(segments[index], **changes)
        return replace(chain, segments=tuple(segments))

    return change


def no_loss(params, x, context, *, training):
    return None, {"perplexity": head(params, x, context, training=training)[1]["loss"]}


WRONG: dict[str, tuple[Callable[[Parts], Parts], str]] = {
    "axes of another rank": (
        lambda chain: replace(chain, param_axes=chain.param_axes | {"head": ("embed",)}),
        r"parameter head \(8, 11\) has 2 dims, but its axes \('embed',\) name 1",
    ),
    "a misspelt path": (
        with_segment(0, paths=("embedd",)),
        "segment 'embed' reads 'embedd', where there is no parameter; did you mean 'embed'",
    ),
    "no loss": (with_segment(1, fn=no_loss), r"segment 'head'(?s:.*)returns the losses \['perplexity'\], no 'loss'"),
    "a batch key without axes": (
        lambda chain: replace(chain, batch_axes={"tokens": ("batch", "seq")}),
        r"batch keys \['labels'\] are not read by the model, which knows \['tokens'\]",
    ),
    "out_axes of another rank": (
        with_segment(0, out_axes=("batch", "embed")),
        r"segment 'embed'(?s:.*)leaf 0 of the x that it returns \(2, 4, 8\) has 3 dims, its out_axes .* are 2",
    ),
    "out_axes for more leaves": (
        with_segment(0, out_axes=(("batch", "seq", "embed"), ("batch",))),
        "segment 'embed'(?s:.*)it returns 1 leaves of x, its out_axes .* describe 2",
    ),
    "a parameter that nobody reads": (
        lambda chain: replace(chain, params=chain.params | {"idle": meta(3)}, param_axes=chain.param_axes | {"idle": (None,)}),
        "no segment reads the parameter idle",
    ),
    "two segments of one name": (with_segment(1, name="embed"), "several segments are called 'embed'"),
    "axes of no parameter": (
        lambda chain: replace(chain, param_axes=chain.param_axes | {"haed": (None,)}),
        "param_axes has haed, which is no parameter; did you mean 'head'",
    ),
    "no parameter that is frozen": (
        lambda chain: replace(chain, frozen=frozenset({"haed"})),
        "frozen has 'haed', which is no parameter; did you mean 'head'",
    ),
    "frozen paths in a list": (lambda chain: replace(chain, frozen=["head"]), "`frozen` is .* it must be a frozenset of paths"),
    "nothing to train": (
        lambda chain: replace(chain, frozen=frozenset(chain.params)),
        "all of its 2 parameters are frozen, so that there is nothing to train",
    ),
    "integers to train": (
        lambda chain: replace(chain, params=chain.params | {"head": meta(D, V).long()}),
        r"parameter head holds torch.int64, which has no gradient: it must be in frozen, or in updates",
    ),
}


def test_the_chain_is_right():
    """What the wrong ones are made of compiles, with no member that a chain need not have."""
    program = compile_step(Bigram(Parts()), AdamW(1e-3), Mesh(dp=2), "ddp", (B, S))
    assert {leaf.path for leaf in program.state_in if leaf.path.startswith("params.")} == {"params.embed", "params.head"}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_chain_is_refused(name):
    """Before anything runs, and in words that name the segment or leaf."""
    change, words = WRONG[name]
    with pytest.raises(ConfigError, match=words):
        compile_step(Bigram(change(Parts())), AdamW(1e-3), Mesh(dp=2), "ddp", (B, S))


def test_an_object_that_is_no_chain_names_what_it_lacks():
    """All members that are missing, each with what it must be."""
    with pytest.raises(ConfigError, match=r"it lacks `segments`: The functions of the chain(?s:.*)it lacks `forbids_slices`"):
        compile_step(object(), AdamW(1e-3), Mesh(dp=2), "ddp", (B, S))


@pytest.mark.parametrize("name", ["scale", "rate"])
def test_wrong_optimizer_is_refused(name):
    """An optimizer without a member that only runs would miss is refused when a step is compiled."""

    class Lacking:
        """AdamW without one of its members."""

        def __getattr__(self, member: str) -> object:
            if member == name:
                raise AttributeError(member)
            return getattr(AdamW(1e-3), member)

    model = models.from_config(SMALL)
    with pytest.raises(ConfigError, match=f"it lacks `{name}`"):
        compile_step(model, Lacking(), Mesh(dp=1), "ddp", (B, S))


SMALL = {
    "model_type": "llama",
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 16,
    "max_position_embeddings": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e4,
}


def test_ops_without_a_rule_in_a_head_are_facts_of_the_program():
    """The last segment's forward and backward are one code: what every rank computes as a whole there is told as elsewhere."""

    def scattering_head(params, x, context, *, training):
        return head(params, x.masked_scatter(x > 1, x), context, training=training)

    chain = Bigram(with_segment(1, fn=scattering_head)(Parts()))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ReplicatedFallback)
        program = compile_step(chain, AdamW(lr=1e-3), Mesh(dp=2), "ddp", (B, S))
    assert "aten.masked_scatter.default" in program.facts.fallbacks
