"""What loops hold while they run is known to the byte: an independent count of storages beside the forecast of a rank graph."""

import pytest
import torch
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop

from mpar import Mesh, jit
from mpar.compiler import generate
from mpar.compiler.segment._memory import measure
from mpar.ir import sweep
from mpar.runtime import ALONE, load
from mpar.sharding import copy_bodies, workspace_of
from tests.forecast.storage_tracker import StorageTracker


def recurrent(w_DD, x_SBD):
    return scan(lambda h, x: ((h @ w_DD + x).tanh(), h * 2), torch.zeros_like(x_SBD[0]), x_SBD)[1]


def wide(w_DD, x_SBD):
    """A turn whose intermediates are larger than what it returns, and that reads what it carries to the end."""
    return scan(lambda h, x: (h + torch.cat([h, x, h]).sin().sum(0), None), x_SBD[0], x_SBD)[0]


CASES = {
    "scan": recurrent,
    "wide": wide,
    "gradient": lambda w, x: torch.func.grad(lambda w, x: recurrent(w, x).square().sum(), argnums=(0, 1))(w, x),
    "cond": lambda w, x: torch.cond(x.sum() > 0, lambda x: ((x @ w).sin() * 2) @ w, lambda x: x @ w, (x,)),
    "while": lambda w, x: while_loop(lambda x: (x @ w).norm() > 1e-3, lambda x: (((x @ w).sin() / 2) @ w / 64,), (x,)),
}


@pytest.mark.parametrize("case", CASES)
def test_peak_of_control_flow_is_exact(case, make_tensor):
    """The bytes at the fullest moment of a run are those that the graph is measured to hold."""
    args = [make_tensor((16, 16), torch.float64), make_tensor((5, 4, 16), torch.float64)]
    ranked = jit(CASES[case], mesh=Mesh(dp=1)).lower(*args).ranked
    copy_bodies(ranked.graph)
    run = load(case, generate(ranked.graph), ranked.logical.constants, torch.device("cpu"))
    tracker = StorageTracker()
    given = [x.clone() for x in args]
    tracker.add(given)
    memory = measure(ranked.graph, workspace_of)
    before = sum(x.nbytes for x in args)
    del args
    with tracker, torch.no_grad():
        run(given, ALONE)
    assert tracker.peak == before + sweep(memory, frozenset(memory.inputs))
