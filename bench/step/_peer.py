"""The peer: transformers with torch.compile, fused AdamW, and Liger where it is installed and has something for the model."""

import contextlib
import importlib
import importlib.util
from typing import Any, ClassVar

import torch
from torch import Tensor

from bench._liger import liger
from bench.step._case import Case, Variant
from bench.step._data import first_weights, token_batches
from bench.step._ours import CLIP_NORM, OPTIMIZER

__all__ = ["Peer", "missing"]

CLASSES = {"llama": "Llama", "starcoder2": "Starcoder2"}


def missing(variant: Variant, *, cpu: bool) -> str:
    """Why a variant cannot run here; "" if it can."""
    if variant.ours:
        return "needs a GPU" if cpu and variant.execution == "cuda_graph" else ""
    if importlib.util.find_spec("transformers") is None:
        return "transformers: not installed"
    if variant.liger and importlib.util.find_spec("liger_kernel") is None:
        return "liger: not installed"
    return "liger: needs a GPU" if variant.liger and cpu else ""


class Peer:
    """Steps of transformers, in bfloat16: under autocast with float32 parameters, or with bfloat16 parameters only."""

    predicted: ClassVar[dict[str, Any]] = {}

    def __init__(self, case: Case, variant: Variant, device: torch.device) -> None:
        self._device = device
        config = case.config()
        self._autocast = variant.weights == "float32"
        patched = _patch(config["model_type"]) if variant.liger else []
        self._model = model = _model(config, device)
        if variant.liger:
            patched += _replace_layer_norms(model)
        deviation = model.config.initializer_range
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(first_weights(name, parameter.shape, deviation, device))
        if not self._autocast:
            for parameter in model.parameters():  # only these: tables of RoPE stay float32, as when transformers loads weights
                parameter.data = parameter.data.to(torch.bfloat16)
        loss = self._fused_loss() if variant.liger else self._loss
        cuda = device.type == "cuda"
        self._compiled = torch.compile(loss, dynamic=False) if cuda else loss
        self._optimizer = torch.optim.AdamW(model.parameters(), fused=cuda, **OPTIMIZER)
        self._batches = token_batches(case, device)
        self._steps = 0
        words = [f"{variant.weights} parameters", "autocast" if self._autocast else "no autocast", "sdpa"]
        words += ["torch.compile", "fused AdamW"] if cuda else []
        self.about = ", ".join([*words, *(f"Liger's {part}" for part in patched)])

    def step(self) -> Tensor:
        """One step; its loss, on the device."""
        batch = self._batches[self._steps % len(self._batches)]
        self._steps += 1
        cast = torch.autocast(self._device.type, torch.bfloat16) if self._autocast else contextlib.nullcontext()
        with cast:
            loss = self._compiled(batch["tokens"], batch["labels"])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), CLIP_NORM)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def _loss(self, tokens: Tensor, labels: Tensor) -> Tensor:
        return self._model(tokens, labels=labels, shift_labels=labels, use_cache=False).loss

    def _fused_loss(self) -> Any:
        fused = _of_liger("transformers", "LigerFusedLinearCrossEntropyLoss")()
        model = self._model

        def loss(tokens: Tensor, labels: Tensor) -> Tensor:
            hidden = model.model(tokens, use_cache=False).last_hidden_state
            return fused(model.lm_head.weight, hidden.flatten(0, 1), labels.flatten())

        return loss


def _model(config: dict[str, Any], device: torch.device) -> Any:
    transformers = importlib.import_module("transformers")
    name = CLASSES[config["model_type"]]
    settings = getattr(transformers, f"{name}Config")(**{key: value for key, value in config.items() if key != "model_type"})
    settings._attn_implementation = "sdpa"
    with device:
        return getattr(transformers, f"{name}ForCausalLM")(settings).train()


def _patch(kind: str) -> list[str]:
    """Put Liger's parts into transformers before a model is made. Returns the names of these parts."""
    if kind != "llama":
        return ["fused loss"]
    _of_liger("transformers", "apply_liger_kernel_to_llama")(fused_linear_cross_entropy=False)
    return ["RoPE", "RMSNorm", "SwiGLU", "fused loss"]


def _replace_layer_norms(model: torch.nn.Module) -> list[str]:
    """Replace layer norms by Liger's, by hand: Liger has no function that patches Starcoder2."""
    found = [(parent, name, child) for parent in model.modules() for name, child in parent.named_children()]
    norms = [(parent, name, child) for parent, name, child in found if isinstance(child, torch.nn.LayerNorm)]
    for parent, name, child in norms:
        new = _of_liger("transformers", "LigerLayerNorm")(child.normalized_shape[0], eps=child.eps, bias=True)
        setattr(parent, name, new.to(child.weight.device))
    return ["LayerNorm"] if norms else []


def _of_liger(module: str, name: str) -> Any:
    found = liger(module, name)
    if found is None:
        raise RuntimeError(f"liger_kernel.{module} has no {name}")
    return found
