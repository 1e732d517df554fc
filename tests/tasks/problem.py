"""Whole steps of a tiny model with a task: what they must give, by torch.autograd through the segments on one rank."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from mpar import models, testing, tree
from mpar.chain import HIGHEST, Segment
from mpar.models import Trainable
from mpar.program import Program, State
from mpar.tasks import MEAN, Task, TaskChain
from tests.program.oracle import BASE, VOCAB, Recorder

QWEN3 = {**BASE, "model_type": "qwen3"}
LENGTHS = ((5, 4, 3, 4), (4, 6), (5, 3, 4, 4), (7, 5))
"""By row, the positions of its answers with their prompts. A row has 16 positions and at most 4 answers."""


def answers_batch(lengths: Sequence[Sequence[int]] = LENGTHS, seq_len: int = 16, num_answers: int = 4) -> dict[str, Tensor]:
    """Rows of answers, two of which follow each other as a pair; the first two labels of each document are of its prompt."""
    generator = torch.Generator().manual_seed(3)
    shape = (len(lengths), seq_len)
    batch = {"tokens": torch.randint(0, VOCAB, shape, generator=generator)}
    batch |= {key: torch.full(shape, value) for key, value in (("labels", -100), ("positions", 0), ("documents", -1))}
    batch |= {"answers": torch.full(shape, -1), "indices": torch.full(shape, -1), "all_labels": torch.full(shape, -100)}
    batch["signs"] = torch.full((len(lengths), num_answers), -1)
    for row, of_row in enumerate(lengths):
        begin = 0
        for number, length in enumerate(of_row):
            place = slice(begin, begin + length)
            labels = torch.randint(0, VOCAB, (length,), generator=generator)
            batch["all_labels"][row, place] = labels
            batch["labels"][row, begin + 2 : begin + length] = labels[2:]
            batch["answers"][row, begin + 2 : begin + length] = number
            batch["indices"][row, begin + 2 : begin + length] = torch.arange(length - 2)
            batch["positions"][row, place] = torch.arange(length)
            batch["documents"][row, place] = number
            batch["signs"][row, number] = 1 - number % 2
            begin += length
    floats = torch.rand(2, *batch["signs"].shape, generator=generator, dtype=torch.float64)
    columns = {"beta": 0.05 + floats[0], "reference_logps": -6 * floats[1], "margin": floats[0] - 0.5}
    return {**batch, **{name: column.masked_fill(batch["signs"] == -1, 0.0) for name, column in columns.items()}}


class Problem:
    """A chain with a task, parameters, a batch, and loss, gradients and metrics on one rank, in equal microbatches.

    reference: whether the same model is the reference, with other parameters; or which model is. adapt: makes the policy of the
    model, which is then the reference without a copy. zeros: how the paths of parameters end that are zero.
    """

    def __init__(
        self,
        task: Task,
        *,
        config: Mapping[str, object] = QWEN3,
        reference: bool | Trainable = False,
        num_microbatches: int = 1,
        logits_chunk: int | None = None,
        batch: Mapping[str, Tensor] | None = None,
        adapt: Callable[[Trainable], Trainable] | None = None,
        zeros: str | None = None,
    ) -> None:
        self.model = models.from_config(config, dtype=torch.float64, vocab_multiple=8, logits_chunk=logits_chunk)
        if adapt is None:
            other = reference if isinstance(reference, Trainable) else self.model if reference else None
            self.chain = TaskChain(self.model, task, other)
        else:
            self.chain = TaskChain(adapt(self.model), task, self.model, shared=True)
        generator = torch.Generator().manual_seed(5)
        self.params = tree.map_leaves(
            lambda leaf: 0.3 * torch.randn(leaf.shape, generator=generator, dtype=torch.float64) + (leaf.ndim == 1),
            self.chain.abstract_params,
        )
        for path in tree.paths(self.params):
            if zeros is not None and path.endswith(zeros):
                self.params = tree.replace(self.params, path, torch.zeros_like(tree.get(self.params, path)))
        full = dict(batch or answers_batch())
        self.batch = {key: full[key] for key in full if key in self.chain.batch_axes}
        self.num_microbatches = num_microbatches
        self.losses, self.metrics, self.grads = self._differentiate()

    def _differentiate(self) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
        leaves, structure = tree.flatten(self.params)
        leaves = [leaf.clone().requires_grad_() for leaf in leaves]
        params = tree.unflatten(structure, leaves)
        losses: dict[str, Tensor] = {}
        metrics: dict[str, Tensor] = {}
        for m in range(self.num_microbatches):
            rows = {key: x.chunk(self.num_microbatches)[m] for key, x in self.batch.items()}
            x, context = None, self.chain.context(rows)
            for segment in self.chain.segments:
                reads = tuple(tree.get(params, path) for path in segment.paths)
                x, found, *more = segment.fn(reads, x, context, training=True)
                for name, value in found.items():
                    losses[name] = losses.get(name, 0.0) + value
                for name, value in (more[0] if more else {}).items():
                    key = f"{segment.name}.{name}"
                    joined = torch.maximum if key.endswith(HIGHEST) else torch.add
                    metrics[key] = joined(metrics[key], value) if key in metrics else value
        weight = self.chain.weight(self.batch)
        grads = torch.autograd.grad(sum(losses.values()) / weight, leaves, allow_unused=True)
        filled = [torch.zeros_like(leaf) if grad is None else grad for leaf, grad in zip(leaves, grads, strict=True)]
        means = {name: (value / weight).detach() for name, value in losses.items()}
        named = {path: grad for path, grad in zip(tree.paths(self.params), filled, strict=True) if path not in self.chain.frozen}
        return means, metrics, named

    def reads(self, segment: Segment) -> tuple:
        """The parameters that a segment is given."""
        return tuple(tree.get(self.params, path) for path in segment.paths)

    def state(self) -> State:
        """Global, before the first step."""
        leaves = dict(tree.leaves_with_path(self.params))
        zeros = {f"opt.g.{path}": torch.zeros_like(leaves[path]) for path in self.grads}
        return State({f"params.{path}": x for path, x in leaves.items()} | zeros)

    @property
    def shapes(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """What `compile_step` asks of the batch."""
        return {key: (tuple(x.shape), x.dtype) for key, x in self.batch.items()}

    def check(self, program: Program) -> None:
        """Assert that a simulated step has these losses, metrics and gradients."""
        assert program.facts.fallbacks == ()
        state, metrics = program.simulate(self.state(), self.batch)
        for name, loss in self.losses.items():
            testing.assert_close(metrics[name], loss, name=name)
        for name, value in self.metrics.items():
            if name.endswith((MEAN, HIGHEST)):
                testing.assert_close(metrics[name], value, name=name)
        for path, grad in self.grads.items():
            testing.assert_close(state.leaves[f"opt.g.{path}"], grad, name=f"gradient of {path}")


__all__ = ["LENGTHS", "QWEN3", "Problem", "Recorder", "answers_batch"]
