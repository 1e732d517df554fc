"""Making a model from a name and a dict, from a config.json, or from a folder of Hugging Face weights."""

import json
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Unpack, cast

import torch
from torch import Tensor, nn

from mpar.errors import ConfigError, ShardingError
from mpar.mesh import Mesh
from mpar.models import traced
from mpar.models._declared import DeclaredModel
from mpar.models._model import Model
from mpar.models._options import ModelOptions, OptionWords, with_options
from mpar.models._storage import read_params, storage_specs
from mpar.models.architectures import ARCHITECTURES, Architecture, find_architecture, read_decoder
from mpar.models.decoder import DecoderParams
from mpar.models.hf import HfReader, load_params, read_json
from mpar.spec import P
from mpar.strategy import Strategy, preset
from mpar.tree import Tree

__all__ = ["build", "from_config", "from_hf", "from_module"]

_MAX_CONFIG_BYTES = 2**21  # of a config.json; those of the hub have some kilobytes


def build(
    architecture: str,
    config: Mapping[str, object],
    options: ModelOptions | None = None,
    *,
    architectures: Mapping[str, Architecture] = ARCHITECTURES,
    **words: Unpack[OptionWords],
) -> Model:
    """A model of `architecture`, a key of `architectures`; `config` has the keys of a Hugging Face config.

    `words` are fields of ModelOptions, such as dtype=torch.bfloat16; they replace those of `options`.
    Raises UnknownNameError for an unknown architecture or option, ConfigError with everything that is wrong with `config`.
    """
    if config.get("model_type", architecture) != architecture:
        raise ConfigError(
            f"cannot build a {architecture} from a config of model_type={config['model_type']!r}; drop one of the two"
        )
    return _make_model({"model_type": architecture, **config}, None, _options(options, words), architectures)


def from_config(
    config: Mapping[str, object] | str | os.PathLike[str],
    options: ModelOptions | None = None,
    *,
    architectures: Mapping[str, Architecture] = ARCHITECTURES,
    **words: Unpack[OptionWords],
) -> Model:
    """The model that a Hugging Face config describes. `config` is a dict, a config.json, or a folder with one.

    Its model_type is looked up in `architectures`. To add one of your own, pass a table that holds it, {"ours": OURS}; see
    `mpar.models.architectures`. `options` and `words` are as in `build`.
    Raises what `build` raises, and CheckpointError for a bad file.
    """
    raw, generation = _read(config)
    try:
        return _make_model(raw, generation, _options(options, words), architectures)
    except ConfigError as error:
        if isinstance(config, Mapping):
            raise
        raise type(error)(f"{_config_file(config)}: {error}") from None


def from_hf(
    path: str | os.PathLike[str],
    options: ModelOptions | None = None,
    *,
    mesh: Mesh | None = None,
    strategy: Strategy | str | None = None,
    rank: int | None = None,
    architectures: Mapping[str, Architecture] = ARCHITECTURES,
    **words: Unpack[OptionWords],
) -> tuple[Model, DecoderParams[Tensor]]:
    """`(model, params)` from a folder with config.json and safetensors; the dtype is by default that of the stored tensors.

    With `mesh` and `strategy` only the bytes of one rank's shards are read, sharded as the strategy stores parameters. Without
    `rank` this must run in a job of torch.distributed: the mesh is bound, and the parameters are DTensors on it. With `rank` the
    parameters are the local shards of that rank, and no other process is needed.
    `options`, `words` and `architectures` are as in `from_config`.
    Raises CheckpointError, ConfigError, MeshError or ShardingError.
    """
    if (mesh is None) != (strategy is None):
        raise ShardingError("cannot load shards: mesh and strategy come together; pass both, or neither for whole parameters")
    chosen = _options(options, words)
    model = from_config(path, chosen, architectures=architectures)
    if chosen.dtype is None:
        with HfReader(model, path) as reader:
            model = model.with_dtype(reader.dtype)
    if rank is not None and mesh is not None and strategy is not None:
        specs, mesh = storage_specs(model, mesh, preset(strategy) if isinstance(strategy, str) else strategy)
        return model, load_params(model, path, cast(DecoderParams[P], specs), mesh, rank)
    with HfReader(model, path) as reader:
        return model, cast(DecoderParams[Tensor], read_params(model, reader.read_leaf, mesh, strategy))


def from_module(module: nn.Module, example: Tensor) -> tuple["traced.ModuleModel", Tree]:
    """`(model, params)` of a causal language model of your own, any `torch.nn.Module` with a list of blocks.

    The params are copies of the module's; `model.state_dict(params)` gives them back by its names.

    module:  its forward takes tokens (B, S) and gives logits (B, S, vocabulary), alone or first in a tuple. It calls the
             modules of one ModuleList or Sequential one after the other, each with x (B, S, features) first. With an argument
             `position_ids` or `positions` it is given positions (1 or B, S).
    example: tokens (B, S), for which logits and the gradient of every parameter are compared with the module's, in float32.
    Raises ConfigError for a module that cannot be traced, with the reason, and where the model differs, with what differs.
    """
    return traced.from_module(module, example)


def _options(options: ModelOptions | None, words: OptionWords) -> ModelOptions:
    return replace(options or ModelOptions(), **words)


def _make_model(
    raw: Mapping[str, object],
    generation: Mapping[str, object] | None,
    options: ModelOptions,
    architectures: Mapping[str, Architecture],
) -> Model:
    """The model that the Hugging Face config `raw` describes; `generation` is the content of generation_config.json, if any."""
    if architectures is ARCHITECTURES and (found := _traced(raw, generation, options)) is not None:
        return found
    architecture = find_architecture(raw, architectures)
    config = with_options(read_decoder(raw, architecture, options.ignore), options, architecture, architectures)
    return DeclaredModel(
        config=config,
        dtype=options.dtype or torch.float32,
        architecture=architecture,
        hf_config_json=json.dumps(raw),
        hf_generation_json=None if generation is None else json.dumps(generation),
    )


def _traced(raw: Mapping[str, object], generation: Mapping[str, object] | None, options: ModelOptions) -> Model | None:
    """The model that transformers has, for a config without a declaration; None if it has none, too. Raises ConfigError."""
    model_type = raw.get("model_type")
    if not isinstance(model_type, str) or model_type in ARCHITECTURES or not traced.is_causal_type(model_type):
        return None
    words = ("logits_chunk", "mlp_chunk", "router", "mtp_loss_weight", "dropout")
    asked = [f"{word}={value!r}" for word in words if (value := getattr(options, word)) is not None]
    if asked:
        raise ConfigError(
            f"cannot make a {raw['model_type']} with {', '.join(asked)}: it is traced, and has only what transformers has"
        )
    traits = traced.kept_check(json.dumps(raw))
    generation_json = None if generation is None else json.dumps(generation)
    return traced.TracedModel(json.dumps(raw), options.dtype or torch.float32, generation_json, traits)


def _read(
    config: Mapping[str, object] | str | os.PathLike[str],
) -> tuple[dict[str, object], dict[str, object] | None]:
    """The config, and the content of the generation_config.json beside it; None if there is no such file."""
    if isinstance(config, Mapping):
        return dict(config), None
    file = _config_file(config)
    generation = file.parent / "generation_config.json"
    found = read_json(generation, _MAX_CONFIG_BYTES) if os.path.exists(generation) else None
    return read_json(file, _MAX_CONFIG_BYTES), found


def _config_file(path: str | os.PathLike[str]) -> Path:
    return Path(path) / "config.json" if os.path.isdir(path) else Path(path)
