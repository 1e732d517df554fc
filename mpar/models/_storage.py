"""How a strategy stores the parameters of a model, and parameters that are read so: each rank reads its shards."""

import mpar
from mpar import tree
from mpar.arrange import arrange
from mpar.mesh import Mesh
from mpar.models._model import Read, Trainable
from mpar.models.hf import shard_slices
from mpar.strategy import Strategy, preset
from mpar.tree import Tree

__all__ = ["read_params", "storage_specs"]


def storage_specs(model: Trainable, mesh: Mesh, strategy: Strategy) -> tuple[Tree, Mesh]:
    """`(specs, mesh)`: the specs by which `strategy` stores the parameters, and the mesh, whose axes it may have split."""
    shapes, axes = model.abstract_params, model.param_axes
    strategy, mesh = arrange(strategy, mesh, shapes, axes)
    paths, structure = tree.paths(shapes), tree.flatten(shapes)[1]
    specs = tree.unflatten(structure, [strategy.storage_spec(tree.get(axes, path), "param", mesh) for path in paths])
    return specs, mesh


def read_params(model: Trainable, read: Read, mesh: Mesh | None = None, strategy: Strategy | str | None = None) -> Tree:
    """The parameters of `model` that `read` gives, in its dtypes.

    With `mesh` and `strategy` this must run in a job of torch.distributed: the mesh is bound, each process reads its shards as
    the strategy stores them, and the parameters are DTensors.
    """
    named, structure = tree.leaves_with_path(model.abstract_params), tree.flatten(model.abstract_params)[1]
    if mesh is None or strategy is None:
        return tree.unflatten(structure, [read(path, None).to(leaf.dtype) for path, leaf in named])
    specs, mesh = storage_specs(model, mesh, preset(strategy) if isinstance(strategy, str) else strategy)
    device_mesh, leaves = mesh.bind(), []  # only this case loads mpar.dtensor, which imports DTensor and sympy
    for path, leaf in named:
        spec = tree.get(specs, path)
        shard = read(path, shard_slices(leaf.shape, spec, mesh, device_mesh.get_rank())).to(leaf.dtype)
        leaves.append(mpar.dtensor.wrap(shard, spec, mesh, device_mesh))
    return tree.unflatten(structure, leaves)
