"""From a name and a dict, a config.json, or a folder of Hugging Face weights to a model."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import mpar
from mpar import tree
from mpar.arrange import arrange
from mpar.errors import ConfigError, ShardingError
from mpar.mesh import Mesh
from mpar.models._model import Model, make_model
from mpar.models.hf._weights import HfReader, load_params, read_json
from mpar.strategy import Strategy, preset

__all__ = ["build", "from_config", "from_hf", "storage_specs"]

Config = Mapping[str, Any] | str | os.PathLike[str]


def build(
    architecture: str,
    config: Mapping[str, Any],
    *,
    ignore: Sequence[str] = (),
    dtype: torch.dtype = torch.float32,
    vocab_multiple: int = 128,
    logits_chunk: int | None = None,
    mlp_chunk: int | None = None,
    router: Mapping[str, Any] | None = None,
    mtp_loss_weight: float | None = None,
) -> Model:
    """A model of `architecture`, a key of ARCHITECTURES, with a config in Hugging Face's words.

    `mtp_loss_weight` asks for multi-token prediction (DeepSeek-V3): a layer that learns the token after the next, its loss times
    this.
    `router` has options for the routers of experts, which no config.json has: see `with_router_options`. `logits_chunk` and
    `mlp_chunk` are tokens whose logits, and whose feed-forward layers, are computed at once; None is all.
    Raises UnknownNameError for an unknown architecture or option, ConfigError with everything that is wrong with `config`.
    """
    if config.get("model_type", architecture) != architecture:
        raise ConfigError(
            f"cannot build a {architecture} from a config of model_type={config['model_type']!r}; drop one of the two"
        )
    raw = {"model_type": architecture, **config}
    return make_model(
        raw,
        ignore=ignore,
        dtype=dtype,
        vocab_multiple=vocab_multiple,
        logits_chunk=logits_chunk,
        mlp_chunk=mlp_chunk,
        router=router,
        mtp_loss_weight=mtp_loss_weight,
    )


def from_config(
    config: Config,
    *,
    ignore: Sequence[str] = (),
    dtype: torch.dtype = torch.float32,
    vocab_multiple: int = 128,
    logits_chunk: int | None = None,
    mlp_chunk: int | None = None,
    router: Mapping[str, Any] | None = None,
    mtp_loss_weight: float | None = None,
) -> Model:
    """The model that a Hugging Face config describes: a dict, a config.json, or a folder with one.

    `ignore` names keys that are unknown here and known to change nothing; `router` is as in `build`.
    Raises as `build`, and CheckpointError for a bad file.
    """
    raw, generation = _read(config)
    return make_model(
        raw,
        ignore=ignore,
        dtype=dtype,
        vocab_multiple=vocab_multiple,
        logits_chunk=logits_chunk,
        mlp_chunk=mlp_chunk,
        router=router,
        mtp_loss_weight=mtp_loss_weight,
        generation=generation,
    )


def from_hf(
    path: str | os.PathLike[str],
    dtype: torch.dtype | None = None,
    mesh: Mesh | None = None,
    strategy: Strategy | str | None = None,
    *,
    rank: int | None = None,
    ignore: Sequence[str] = (),
    vocab_multiple: int = 128,
    logits_chunk: int | None = None,
    mlp_chunk: int | None = None,
    router: Mapping[str, Any] | None = None,
    mtp_loss_weight: float | None = None,
) -> tuple[Model, Any]:
    """`(model, params)` from a folder with config.json and safetensors; `dtype` is by default that of the stored tensors.

    With `mesh` and `strategy` a rank reads only the bytes of its shards, as the strategy stores them. In a job of
    torch.distributed the parameters are DTensors on the bound mesh; with `rank` they are that rank's local shards, and no
    process is needed.
    Raises CheckpointError, ConfigError, MeshError or ShardingError.
    """
    if (mesh is None) != (strategy is None):
        raise ShardingError("cannot load shards: mesh and strategy come together; pass both, or neither for whole parameters")
    model = from_config(
        path,
        ignore=ignore,
        vocab_multiple=vocab_multiple,
        logits_chunk=logits_chunk,
        mlp_chunk=mlp_chunk,
        router=router,
        mtp_loss_weight=mtp_loss_weight,
    )
    if dtype is None:
        with HfReader(model, path) as reader:
            dtype = reader.dtype
    model = model.with_dtype(dtype)
    if mesh is None or strategy is None:
        return model, load_params(model, path)
    specs, mesh = storage_specs(model, mesh, preset(strategy) if isinstance(strategy, str) else strategy)
    if rank is not None:
        return model, load_params(model, path, specs, mesh, rank)
    device_mesh = mesh.bind()  # mpar.dtensor is loaded here only: it brings DTensor and sympy along
    shards = load_params(model, path, specs, mesh, device_mesh.get_rank())
    return model, tree.map_leaves(lambda local, spec: mpar.dtensor.wrap(local, spec, mesh, device_mesh), shards, specs)


def storage_specs(model: Model, mesh: Mesh, strategy: Strategy) -> tuple[Any, Mesh]:
    """`(specs, mesh)`: the tree of P by which `strategy` stores the parameters; the mesh with the axes that it split."""
    shapes, axes = model.abstract_params, model.param_axes
    strategy, mesh = arrange(strategy, mesh, shapes, axes)
    paths, structure = tree.paths(shapes), tree.flatten(shapes)[1]
    return tree.unflatten(structure, [strategy.storage_spec(tree.get(axes, path), "param", mesh) for path in paths]), mesh


def _read(config: Config) -> tuple[dict[str, Any], dict[str, Any] | None]:
    if isinstance(config, Mapping):
        return dict(config), None
    path = Path(config)
    file = path / "config.json" if path.is_dir() else path
    generation = file.parent / "generation_config.json"
    return read_json(file), read_json(generation) if generation.is_file() else None
