"""How a strategy stores the parameters of a model."""

from typing import cast

from mpar import tree
from mpar.arrange import arrange
from mpar.mesh import Mesh
from mpar.models._model import Model
from mpar.models.decoder import DecoderParams
from mpar.spec import P
from mpar.strategy import Strategy

__all__ = ["storage_specs"]


def storage_specs(model: Model, mesh: Mesh, strategy: Strategy) -> tuple[DecoderParams[P], Mesh]:
    """`(specs, mesh)`: the specs by which `strategy` stores the parameters, and the mesh, whose axes it may have split."""
    shapes, axes = model.abstract_params, model.param_axes
    strategy, mesh = arrange(strategy, mesh, shapes, axes)
    paths, structure = tree.paths(shapes), tree.flatten(shapes)[1]
    specs = tree.unflatten(structure, [strategy.storage_spec(tree.get(axes, path), "param", mesh) for path in paths])
    return cast(DecoderParams[P], specs), mesh
