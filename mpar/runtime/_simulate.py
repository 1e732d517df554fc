"""Simulate a program: every rank runs its compiled code in a thread of this process."""

from collections.abc import Mapping

import torch
from torch import Tensor

from mpar.errors import ProgramError
from mpar.ir import ProgramData
from mpar.mesh import Mesh
from mpar.runtime._batch import batch_rows
from mpar.runtime._rank_run import RankRun
from mpar.runtime._state import NO_LIMITS, Limits, State
from mpar.runtime.comm import Comm, run_ranks
from mpar.shards import assemble, shard

__all__ = ["simulate"]


def simulate(
    program: ProgramData, state: State, batch: Mapping[str, Tensor], limits: Limits = NO_LIMITS
) -> tuple[State, dict[str, Tensor]]:
    """Run one step of all ranks in this process, on a global state and a global batch. `state` is not changed.

    Raises ShapeError, listing all problems, if they do not fit the program.
    """
    mesh = program.mesh
    state.check({leaf.path: (leaf.dtype, leaf.shape) for leaf in program.state_in})

    def work(rank: int, comm: Comm) -> tuple[State, dict[str, Tensor]]:
        stored = program.part(rank).state_in
        local = {leaf.path: shard(state.leaves[leaf.path], leaf.spec, mesh, rank) for leaf in stored}
        return RankRun(program, comm)(State(local, state.step, state.skipped), batch_rows(program, batch, rank), limits)

    results = run_ranks(mesh, work)
    stage_mesh = Mesh(**{axis: size for axis, size in mesh.sizes.items() if axis != "pp"})
    leaves: dict[str, Tensor] = {}
    for position, part in enumerate(program.parts):
        ranks = program.ranks_at(position)
        for leaf in part.state_out:
            global_leaf = assemble([results[rank][0].leaves[leaf.path] for rank in ranks], leaf.spec, stage_mesh)
            if leaf.path in leaves and not torch.equal(leaves[leaf.path], global_leaf):
                raise ProgramError(f"{leaf.path} is not the same on all positions along pp that hold it")
            leaves.setdefault(leaf.path, global_leaf)
    first, metrics = results[0]
    return State({leaf.path: leaves[leaf.path] for leaf in program.state_out}, first.step, first.skipped), metrics
