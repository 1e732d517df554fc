"""The entries of adapter_config.json: what PEFT and other readers of its folders need, and what they mean for `LoRA`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from mpar.adapters._lora import ALL_LINEAR, LoRA
from mpar.adapters._model import AdaptedModel
from mpar.errors import CheckpointError
from mpar.models import Matrix

__all__ = ["lora_of_config", "peft_config"]

_INITS = {"kaiming": True, "random": False}
_MUST_BE = {
    "peft_type": ("LORA",),
    "fan_in_fan_out": (False, True, None),
    "lora_bias": (False, None),
    "layer_replication": (None,),
    "use_qalora": (False, None),
    "trainable_token_indices": (None,),
}
"""Entries that change what an adapter computes, and those of their values that mpar has."""


def peft_config(model: AdaptedModel, name: str, base_name: str | None) -> dict[str, object]:
    """The entries of adapter_config.json for one adapter of a model."""
    lora = dict(model.adapters)[name]
    chosen = [adapted.matrix for adapted in model.adapted[name]]
    modules = [matrix for matrix in chosen if matrix.kind != "parameter"]
    parameters = [matrix for matrix in chosen if matrix.kind == "parameter"]
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_name,
        "inference_mode": True,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout,
        "use_rslora": lora.rslora,
        "use_dora": lora.dora,
        "bias": lora.bias,
        "lora_bias": False,
        "fan_in_fan_out": any(matrix.transposed for matrix in modules),
        "init_lora_weights": _INITS.get(lora.init, lora.init),
        "target_modules": _names(model, modules, lora) if modules else [],
        "target_parameters": _ends(model, parameters) if parameters else None,
        "exclude_modules": _plain(lora.exclude) or None,
        "layers_to_transform": None if lora.layers is None else list(lora.layers),
        "layers_pattern": None,
        "rank_pattern": dict(lora.rank_pattern),
        "alpha_pattern": dict(lora.alpha_pattern),
        "modules_to_save": list(lora.modules_to_save) or None,
    }


def lora_of_config(config: Mapping[str, object], folder: Path) -> LoRA:
    """What the adapter of a config is like. Raises CheckpointError for entries that mpar has no equal of."""
    wrong = [
        f"{key}={config[key]!r}: only {', '.join(map(repr, values))}"
        for key, values in _MUST_BE.items()
        if key in config and config[key] not in values
    ]
    init = config.get("init_lora_weights", True)
    inits: dict[object, str] = {True: "kaiming", False: "random", "gaussian": "gaussian", "pissa": "pissa", "olora": "olora"}
    if isinstance(init, list) or inits.get(init) is None:
        wrong.append(f"init_lora_weights={init!r}: only {', '.join(map(repr, inits))}")
    rank = config.get("r")
    if not isinstance(rank, int):
        wrong.append(f"r={rank!r}: must be a number")
    if wrong:
        raise CheckpointError(f"cannot read the adapter in {folder}:\n  " + "\n  ".join(wrong))
    given: Any = config
    modules, parameters = given.get("target_modules") or [], given.get("target_parameters") or []
    targets = modules if isinstance(modules, str) else tuple(sorted(modules)) + tuple(sorted(parameters))
    if isinstance(modules, str) and parameters:
        raise CheckpointError(
            f"cannot read the adapter in {folder}: target_modules is a pattern, and there are target_parameters"
        )
    layers = given.get("layers_to_transform")
    excluded = given.get("exclude_modules") or ()
    return LoRA(
        rank=cast(int, rank),
        alpha=given.get("lora_alpha", 8),
        dropout=given.get("lora_dropout", 0.0),
        rslora=bool(given.get("use_rslora")),
        dora=bool(given.get("use_dora")),
        init=cast(Any, inits[init]),
        targets=targets,
        exclude=excluded if isinstance(excluded, str) else tuple(excluded),
        layers=None if layers is None else (layers,) if isinstance(layers, int) else tuple(layers),
        rank_pattern=given.get("rank_pattern") or {},
        alpha_pattern=given.get("alpha_pattern") or {},
        modules_to_save=tuple(given.get("modules_to_save") or ()),
        bias=given.get("bias", "none"),
    )


def _names(model: AdaptedModel, modules: list[Matrix], lora: LoRA) -> str | list[str]:
    """Target modules as they were given; for all-linear, the ends of their names."""
    if isinstance(lora.targets, str) and lora.targets != ALL_LINEAR and lora.layers is None:
        return lora.targets
    return _ends(model, modules)


def _ends(model: AdaptedModel, chosen: list[Matrix]) -> list[str]:
    """The last words of the names, unless they are the ends of other names, too."""
    names = {matrix.name for matrix in chosen}
    words = [2 if name.endswith(".weight") else 1 for name in names]
    ends = {".".join(name.split(".")[-count:]) for name, count in zip(names, words, strict=True)}
    of_ends = {matrix.name for matrix in model.matrices if any(f".{matrix.name}".endswith(f".{end}") for end in ends)}
    return sorted(ends if of_ends == names else names)


def _plain(value: str | tuple[str, ...]) -> str | list[str]:
    return value if isinstance(value, str) else list(value)
