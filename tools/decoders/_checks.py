"""Checks: what a row of the table says of one type: against transformers' own model, in float64, on simulated ranks."""

import json
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

import mpar
from mpar import models, tree
from mpar.errors import MparError
from mpar.infer.compile import generate
from mpar.models.traced import TracedModel, load_transformers, transformers_config
from mpar.optim import SGD
from mpar.strategy import preset
from tools.decoders._configs import tiny_config

__all__ = ["Row", "survey"]

_ROWS, _LENGTH = 4, 12
_ALLOWED = 1e-4
"""How much a gradient may differ, as a share of the largest of its parameter."""
_LOSS = {torch.float64: 1e-6, torch.float32: 1e-5}
"""How much a loss may differ, as a share of it."""
_SPLIT = {"heads", "kv_heads", "mlp", "expert", "expert_mlp", "vocab"}


@dataclass(frozen=True)
class Row:
    """What one type does. A check gives "" where it passes, and else the reason; None where it was not tried.

    load:     it is read, and logits and gradients equal those of eager code, in float32.
    messages: collectives of the forward of a layer over tp=2, the most of all layers.
    split:    which share of the elements of the layers' matrices tp=2 divides.
    """

    load: str
    fsdp_tp: str | None = None
    pp: str | None = None
    messages: int | None = None
    split: float | None = None
    cp: str | None = None
    slices: str | None = None
    cache: str | None = None
    experts: str | None = None
    export: str | None = None

    @property
    def trains(self) -> bool:
        """Whether it loads, trains on all meshes that are asked of every type, and comes back bit by bit."""
        return not self.load and self.fsdp_tp == self.pp == self.export == ""

    @property
    def minimal(self) -> bool:
        """Whether a layer over tp=2 has no more messages than Megatron's, and divides nearly all of its matrices."""
        return self.messages is not None and self.messages <= 2 and (self.split or 0.0) >= 0.9


@dataclass
class Subject:
    """The model of a type, and transformers' own in the same dtype, with the loss and the gradients that are expected."""

    model: TracedModel
    eager: Any
    batch: dict[str, Tensor]
    params: Any = None
    loss: float = 0.0
    gradients: dict[str, Tensor] = field(default_factory=dict)


def survey(model_type: str, told: Callable[[dict[str, object]], None]) -> None:
    """Do all checks of a type, one after the other; `told` gets the row after each of them."""
    raw = tiny_config(model_type)
    row = Row(load="")
    try:
        model = models.from_config(raw, dtype=torch.float64)
    except MparError as error:
        told(asdict(Row(load=str(error))))
        return
    assert isinstance(model, TracedModel)
    told(asdict(row))
    try:
        subject = _subject(raw, model)
    except RuntimeError:  # code of transformers that writes the least float64 number into a tensor of float32
        subject = _subject(raw, model.with_dtype(torch.float32))
        model = subject.model
    checks: dict[str, Callable[[], str]] = {
        "fsdp_tp": lambda: _step(subject, mpar.Mesh(fsdp=2, tp=2), "zero3_tp_sp"),
        "pp": lambda: _step(subject, mpar.Mesh(pp=2), "ddp"),
        "cp": lambda: _step(subject, mpar.Mesh(cp=2), "ddp"),
        "slices": lambda: _step(subject, mpar.Mesh(), "ddp", num_slices=2),
        "cache": lambda: _cache(subject),
        "export": lambda: _export(subject),
    }
    row = replace(row, **_messages(subject))
    for name, check in checks.items():
        row = replace(row, **{name: _said(check)})
        told(asdict(row))
    if any("expert" in axes for _, axes in _axes(model).items()):
        row = replace(row, experts=_said(lambda: _step(subject, mpar.Mesh(fsdp=2), "zero3", expert_parallel=2)))
    told(asdict(row))


def _said(check: Callable[[], str]) -> str:
    try:
        return check()
    except MparError as error:
        return str(error)


def _subject(raw: Mapping[str, object], model: TracedModel) -> Subject:
    transformers = load_transformers()
    torch.manual_seed(0)
    config = transformers_config(json.dumps(raw))
    eager = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", experts_implementation="eager", dtype=torch.float32
    )
    for parameter in eager.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    eager = eager.eval().to(model.dtype)
    generator = torch.Generator().manual_seed(1)
    tokens, labels = torch.randint(3, min(model.vocab_size, 128), (2, _ROWS, _LENGTH), generator=generator)
    subject = Subject(model, eager, {"tokens": tokens, "labels": labels})
    stored = {name: x for name, x in eager.state_dict(keep_vars=True).items() if name in model.imported.skeleton.parameters}
    subject.params = model.leaves({name: x.detach() for name, x in stored.items()})
    logits = eager(tokens, use_cache=False).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    loss.backward()
    zeros = {name: torch.zeros_like(x) if x.grad is None else x.grad for name, x in stored.items()}
    subject.gradients = dict(tree.leaves_with_path(model.leaves(zeros)))
    subject.loss = float(loss.detach())
    return subject


def _step(subject: Subject, mesh: mpar.Mesh, strategy: str, *, num_slices: int = 1, expert_parallel: int = 1) -> str:
    """A step of plain gradient descent: what differs from the gradients of transformers."""
    optimizer = SGD(lr=1.0, momentum=0.0, weight_decay=0.0, clip_norm=1e9)
    rows = replace(preset(strategy), expert_parallel=expert_parallel)
    model = subject.model
    program = mpar.compile_step(model, optimizer, mesh, rows, (_ROWS, _LENGTH), num_slices=num_slices)
    after, metrics = program.simulate(program.init_state(subject.params), subject.batch)
    if not abs(float(metrics["loss"]) - subject.loss) <= _LOSS[subject.model.dtype] * max(1.0, abs(subject.loss)):
        return f"the loss is {float(metrics['loss']):.6f}, that of transformers {subject.loss:.6f}"
    new = dict(tree.leaves_with_path(after.params(model.abstract_params)))
    largest = max(float(x.abs().max()) for x in subject.gradients.values())
    for path, old in tree.leaves_with_path(subject.params):
        wanted = subject.gradients[path]
        difference = float((old - new[path] - wanted).abs().max()) / max(float(wanted.abs().max()), 1e-3 * largest)
        if not difference <= _ALLOWED:
            return f"the gradient of {path} differs by {difference:.1e}"
    return ""


def _axes(model: TracedModel) -> dict[str, tuple]:
    return dict(tree.leaves_with_path(model.param_axes, is_leaf=lambda x: isinstance(x, tuple)))


def _messages(subject: Subject) -> dict[str, Any]:
    model, matrices = subject.model, 0
    axes = _axes(model)
    divided = 0
    inside = tuple(f"{name}." for name in model.imported.skeleton.names)
    for path, leaf in tree.leaves_with_path(model.abstract_params):
        if path.startswith(inside) and leaf.ndim > 1 and bool(subject.gradients[path].any()):  # some layers do not read all
            matrices += leaf.numel()
            divided += leaf.numel() * bool(_SPLIT & set(axes[path]))
    try:
        program = mpar.compile_step(model, SGD(lr=1.0), mpar.Mesh(tp=2), "tp", (_ROWS, _LENGTH))
    except MparError:
        return {"split": divided / max(1, matrices)}
    counts = [len(found.collectives) for name, found in program.kinds.items() if "layers" in name and "forward" in name]
    return {"messages": max(counts, default=0), "split": divided / max(1, matrices)}


def _cache(subject: Subject) -> str:
    """Greedy tokens through a cache are those of transformers without one."""
    model = subject.model
    if not model.can_decode:
        return "it generates without a cache: " + (model.forbids_slices or "")
    prompt = subject.batch["tokens"][:2, :5]
    ours, theirs = generate(model, subject.params, prompt, 5), prompt
    with torch.no_grad():
        for _ in range(5):
            theirs = torch.cat([theirs, subject.eager(theirs, use_cache=False).logits[:, -1:].argmax(-1)], 1)
    return "" if torch.equal(ours, theirs) else "other tokens than those of transformers"


def _export(subject: Subject) -> str:
    """A folder of transformers, read and written, has the same tensors, and gives transformers the model that the first gives."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        subject.eager.float().save_pretrained(root / "in")
        model, params = models.from_hf(root / "in")
        models.to_hf(model, params, root / "out")
        for read in (_tensors, _state):
            expected, given = read(root / "in"), read(root / "out")
            if set(expected) != set(given):
                return f"other tensors: {sorted(set(expected) ^ set(given))[:3]}"
            wrong = [name for name, x in expected.items() if not torch.equal(x, given[name])]
            if wrong:
                return f"{wrong[0]} has other bits"
    return ""


def _tensors(folder: Path) -> dict[str, Tensor]:
    return {name: x for file in folder.glob("*.safetensors") for name, x in load_file(file).items()}


def _state(folder: Path) -> dict[str, Tensor]:
    return load_transformers().AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
