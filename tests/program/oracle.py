"""What a step must give: the model on one rank, differentiated by torch.autograd; and an optimizer that shows gradients."""

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from mpar import models, testing, tree
from mpar.chain import context_of
from mpar.models import Model
from mpar.program import Program, State
from tests.program.test_exactness import Recorder

VOCAB = 61
BASE = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 4,
    "vocab_size": VOCAB,
    "max_position_embeddings": 64,
}
MOE = {**BASE, "model_type": "qwen3_moe", "moe_intermediate_size": 8, "num_experts": 8, "num_experts_per_tok": 2}
MOE |= {"norm_topk_prob": True, "router_aux_loss_coef": 0.0}
DEEPSEEK = {
    **{key: value for key, value in BASE.items() if key not in ("head_dim", "num_key_value_heads")},
    "model_type": "deepseek_v3",
    "num_key_value_heads": 8,
    "q_lora_rank": 12,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 4,
    "topk_group": 2,
    "moe_intermediate_size": 8,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 0,
}

GPT_OSS = {**BASE, "model_type": "gpt_oss", "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 5}


class Problem:
    """A model, parameters and a batch, and loss, gradients and their norm on one rank. `router`: options of its routers.
    `adapt` makes the model that is trained of the one of the config."""

    def __init__(
        self,
        config: Mapping[str, Any],
        shape: tuple[int, int],
        *,
        packed: bool = False,
        router: Mapping[str, Any] | None = None,
        num_microbatches: int = 1,
        seed: int = 5,
        mtp_loss_weight: float | None = None,
        dropout: float | None = None,
        logits_chunk: int | None = None,
        adapt: Callable[[Model], Any] = lambda model: model,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        options = {"router": router, "mtp_loss_weight": mtp_loss_weight, "dropout": dropout, "logits_chunk": logits_chunk}
        self.model = adapt(models.from_config(config, dtype=torch.float64, vocab_multiple=8, **options))
        self.params = tree.map_leaves(
            lambda leaf: 0.3 * torch.randn(leaf.shape, generator=generator, dtype=torch.float64) + (leaf.ndim == 1),
            self.model.abstract_params,
        )
        self.batch = random_batch(shape, generator, packed=packed)
        if mtp_loss_weight is not None:
            self.batch = models.with_next_tokens(self.batch)
        if models.DRAW in self.model.batch_axes:
            self.batch = models.with_draws(self.batch, seed=seed, step=3, rows=range(shape[0]), num_rows=shape[0])
        self.num_microbatches = num_microbatches
        self.differentiate()

    @property
    def chain(self) -> Any:
        """What is compiled: the model."""
        return self.model

    @property
    def trained(self) -> list[str]:
        """The paths of the parameters that an optimizer updates."""
        return [path for path in tree.paths(self.params) if path not in self.model.frozen and path not in self.model.updates]

    def freeze(self, **how: Any) -> "Problem":
        """The same problem with parameters frozen (`models.freeze`)."""
        frozen = copy.copy(self)
        frozen.model = models.freeze(self.model, **how)
        frozen.differentiate()
        return frozen

    def differentiate(self) -> None:
        """Compute what is expected, again after a change of the parameters."""
        self.losses, self.grads = self._differentiate()
        self.loss = self.losses["loss"]
        self.norm = torch.sqrt(sum(grad.pow(2).sum() for grad in self.grads.values()))

    def _differentiate(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Mean losses by name, and the gradient of their sum by path; zero where nothing depends on a parameter, and none for
        what is frozen."""
        named, structure = tree.leaves_with_path(self.params), tree.flatten(self.params)[1]
        frozen = self.model.frozen
        leaves = {path: leaf.clone().requires_grad_(path not in frozen) for path, leaf in named}
        params = tree.unflatten(structure, list(leaves.values()))
        leaves = {path: leaf for path, leaf in leaves.items() if path not in frozen}
        totals: dict[str, Tensor] = {}
        for m in range(self.num_microbatches):
            rows = {key: x.chunk(self.num_microbatches)[m] for key, x in self.batch.items()}
            x, context = None, self.model.context(rows)
            for segment in self.model.segments:
                read = context_of(segment.name, context)
                x, losses, *_ = segment.fn(tuple(tree.get(params, path) for path in segment.paths), x, read, training=True)
                for name, value in losses.items():
                    totals[name] = totals.get(name, 0.0) + value
        weight = self.model.weight(self.batch)
        grads = torch.autograd.grad(sum(totals.values()) / weight, list(leaves.values()), allow_unused=True)
        pairs = zip(leaves.items(), grads, strict=True)
        means = {name: (value / weight).detach() for name, value in totals.items()}
        return means, {path: torch.zeros_like(leaf) if grad is None else grad for (path, leaf), grad in pairs}

    def state(self) -> State:
        """Global, before the first step."""
        leaves = dict(tree.leaves_with_path(self.params))
        zeros = {f"opt.g.{path}": torch.zeros_like(leaves[path]) for path in self.trained}
        return State({f"params.{path}": x for path, x in leaves.items()} | zeros)

    @property
    def shapes(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """What `compile_step` asks of the batch."""
        return {key: (tuple(x.shape), x.dtype) for key, x in self.batch.items()}

    def check(self, program: Program) -> dict[str, Tensor]:
        """Assert that a simulated step has these losses, gradients and norm, and keeps what is frozen to the bit; its metrics."""
        assert program.facts.fallbacks == ()
        state, metrics = program.simulate(self.state(), self.batch)
        for name, loss in self.losses.items():
            testing.assert_close(metrics[name], loss, name=name)
        testing.assert_close(metrics["grad_norm"], self.norm, name="gradient norm")
        for path in self.trained:
            if path in self.grads:
                testing.assert_close(state.leaves[f"opt.g.{path}"], self.grads[path], name=f"gradient of {path}")
        for path, leaf in tree.leaves_with_path(self.params):
            assert path not in self.model.frozen or torch.equal(state.leaves[f"params.{path}"], leaf), path
        return metrics


def random_batch(shape: tuple[int, int], generator: torch.Generator, *, packed: bool = False) -> dict[str, Tensor]:
    """Tokens and labels, a third of which do not count; packed: documents with padding behind them, positions within them."""
    batch = {key: torch.randint(0, VOCAB, shape, generator=generator) for key in ("tokens", "labels")}
    batch["labels"][torch.rand(shape, generator=generator) < 0.3] = -100
    if packed:
        documents = torch.randint(0, 5, shape, generator=generator).sort(1).values
        starts = (documents[:, :, None] == documents[:, None, :]).int().argmax(-1)
        batch["positions"] = torch.arange(shape[1]) - starts
        documents[-1, -3:] = -1
        batch["documents"] = documents
        batch["labels"][documents == -1] = -100
    return batch


__all__ = ["BASE", "DEEPSEEK", "GPT_OSS", "MOE", "Problem", "Recorder", "random_batch"]
