"""Skeleton: a causal model of transformers without weights, and where in it are the layers that follow one another.

It is built on the meta device, so that a model of any size takes no memory; only buffers, such as frequencies of a rotation, have
values.
"""

import functools
import importlib.util
import inspect
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from mpar.errors import ConfigError
from mpar.models.traced._attention import ATTENTION, register_attention
from mpar.models.traced._experts import EXPERTS, register_experts
from mpar.models.traced._norms import replace_norms
from mpar.models.traced._rotations import replace_rotations

__all__ = [
    "Skeleton",
    "Source",
    "is_causal_type",
    "load_conversions",
    "load_transformers",
    "skeleton",
    "tied_names",
    "transformers_config",
]


@dataclass(frozen=True)
class Source:
    """What a traced model is made from: its config, and the name of the attention that transformers calls, which is mpar's or
    "eager": torch ops with a mask."""

    config_json: str
    attention: str = ATTENTION

    def skeleton(self) -> "Skeleton":
        """The model without weights."""
        return skeleton(self)

    def label(self, found: "Skeleton") -> str:
        """What messages call it."""
        return f"{type(found.module).__name__} of transformers"


@dataclass(frozen=True)
class Skeleton:
    """A causal model without weights.

    module:  the whole model, with its parameters on meta.
    layers:  the layers, in order, and `names`, their names in the module.
    tied:    for the name of a parameter that is another one too, the name of that one.
    saved:   for the name of a tied parameter the name under which folders have it.
    buffers: the names of parameters that are buffers in transformers: they are read from checkpoints, and have no gradient.
    masked:  whether its attention is its own, which reads a mask.
    options: with what the whole model is called besides tokens.
    positions: by which name it is given positions; None: it makes them itself.
    vocab_size: the number of tokens; None: as many as there are logits.
    width, behind: filled by a run: the size of x, and how many items a layer returns behind x; None: it returns x, in no tuple.
    """

    module: nn.Module
    layers: tuple[nn.Module, ...]
    names: tuple[str, ...]
    tied: dict[str, str]
    saved: dict[str, str]
    buffers: frozenset[str]
    masked: bool
    options: Mapping[str, object]
    positions: str | None
    vocab_size: int | None
    width: int = 0
    behind: int | None = None

    @property
    def parameters(self) -> dict[str, Tensor]:
        """Every stored parameter by its name; they are on meta."""
        return dict(self.module.named_parameters())

    @contextmanager
    def forwards(self, replaced: Sequence[Callable[..., object]]) -> Iterator[None]:
        """While this is open, the layers call these functions in the place of their own."""
        for layer, forward in zip(self.layers, replaced, strict=True):
            layer.forward = forward
        try:
            yield
        finally:
            for layer in self.layers:
                del layer.forward


def load_transformers() -> ModuleType:
    """The module; raises ConfigError where it is not installed."""
    try:
        transformers = importlib.import_module("transformers")
    except ImportError:
        raise ConfigError(
            "models that mpar has no declaration of are read through transformers, which is not installed.\n"
            "Install it: pip install 'mpar[hf]'"
        ) from None
    logging.getLogger("transformers").setLevel(logging.ERROR)
    return transformers


def load_conversions() -> tuple[ModuleType, ModuleType]:
    """The modules of transformers that say how checkpoints are converted, and that convert them."""
    names = ("transformers.conversion_mapping", "transformers.core_model_loading")
    mapping, loading = map(importlib.import_module, names)
    return mapping, loading


def is_causal_type(model_type: object) -> bool:
    """Whether transformers, if it is installed, has a causal model of this type."""
    if importlib.util.find_spec("transformers") is None:
        return False
    auto = importlib.import_module("transformers.models.auto.modeling_auto")
    return model_type in auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES


def transformers_config(config_json: str) -> Any:
    """transformers' own config, a new one for each call: `from_config` writes into what it is given.

    Raises ConfigError for whatever transformers finds wrong with it.
    """
    raw = json.loads(config_json, object_hook=_decoded)
    model_type, transformers = raw.pop("model_type"), load_transformers()
    try:
        return transformers.AutoConfig.for_model(model_type, **raw)
    except Exception as error:  # whatever a class of transformers raises
        raise ConfigError(
            f"transformers {transformers.__version__} refuses this config of model_type={model_type!r}: "
            f"{type(error).__name__}: {str(error)[:300]}"
        ) from error


def _decoded(found: dict[str, object]) -> object:
    """Numbers that JSON has not are written by transformers as {"__float__": "Infinity"}."""
    return float(str(found["__float__"])) if set(found) == {"__float__"} else found


@functools.lru_cache(maxsize=16)
def skeleton(source: Source) -> Skeleton:
    """The model that a Hugging Face config describes. Raises ConfigError if transformers has no causal model for it, or if its
    layers cannot be found.
    """
    transformers = load_transformers()
    model_type = json.loads(source.config_json).get("model_type")
    try:
        config = transformers_config(source.config_json)
        register_attention(transformers)
        register_experts(transformers)
        with torch.device("meta"):
            module = transformers.AutoModelForCausalLM.from_config(
                config, attn_implementation=source.attention, experts_implementation=EXPERTS, dtype=torch.float32
            )
    except Exception as error:  # whatever a class of transformers raises
        raise ConfigError(
            f"cannot read a model of model_type={model_type!r} through transformers {transformers.__version__}: "
            f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        ) from error
    module.eval()
    buffers = _fill_buffers(module)
    replace_norms(module)
    replace_rotations(module)
    names, layers = _layers(module, config)
    saved = dict(getattr(module, "all_tied_weights_keys", None) or {})
    known = inspect.signature(module.forward).parameters
    options = {"return_dict": True} | ({"use_cache": False} if "use_cache" in known else {})
    return Skeleton(
        module=module,
        layers=layers,
        names=names,
        tied=tied_names(module),
        saved=saved,
        buffers=buffers,
        masked=source.attention != ATTENTION and "attention_mask" in known,
        options=options,
        positions="position_ids" if "position_ids" in known else None,
        vocab_size=module.config.get_text_config().vocab_size,  # type: ignore[union-attr, operator]
    )


def _fill_buffers(module: nn.Module) -> frozenset[str]:
    """Give buffers their values, as transformers does when it reads weights into a model that was built on meta.

    A buffer that checkpoints have, such as a bias of a router, becomes a parameter, whose values are not known before they are
    read. Returns the names of these.
    """
    read = set()
    for prefix, part in module.named_modules():
        buffers = {name: buffer for name, buffer in part.named_buffers(recurse=False) if buffer.is_meta}
        for name, buffer in buffers.items():
            part._buffers[name] = torch.zeros(buffer.shape, dtype=buffer.dtype)
        if buffers:
            module._init_weights(part)  # type: ignore[operator]
        for name, buffer in buffers.items():
            if name not in part._non_persistent_buffers_set and buffer.is_floating_point():
                del part._buffers[name]
                part.register_parameter(name, nn.Parameter(buffer))
                read.add(f"{prefix}.{name}".lstrip("."))
    return frozenset(read)


def _layers(module: nn.Module, config: Any) -> tuple[tuple[str, ...], tuple[nn.Module, ...]]:
    """The list of layers: of all lists, if possible those with as many modules as the config has layers, the one with the most
    parameters."""
    count = getattr(config.get_text_config(), "num_hidden_layers", None)
    lists = [(name, part) for name, part in module.named_modules() if isinstance(part, nn.ModuleList) and len(part)]
    lists = [(name, part) for name, part in lists if len(part) == count] or lists  # a decoder may have another count
    if not lists:
        raise ConfigError(f"cannot find the layers of {type(module).__name__}: it has no list of modules")
    name, found = max(lists, key=lambda item: sum(p.numel() for p in item[1].parameters()))
    return tuple(f"{name}.{i}" for i in range(len(found))), tuple(found)


def tied_names(module: nn.Module) -> dict[str, str]:
    """For the name of a parameter that is another one too, the name of that one."""
    first: dict[int, str] = {}
    tied = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        stored = first.setdefault(id(parameter), name)
        if stored != name:
            tied[name] = stored
    return tied
