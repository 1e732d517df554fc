"""Control flow in compiled functions, on simulated ranks in float64, against loops and branches of Python on plain tensors."""

import pathlib

import pytest
import torch
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop

from mpar import Mesh, P, jit, testing, tree, value_and_grad
from tests.processes import torchrun

MESHES = {"dp2 x tp2": Mesh(dp=2, tp=2), "tp4": Mesh(dp=1, tp=4), "dp4": Mesh(dp=4, tp=1)}


def gru_step(params, h_BH, x_BD):
    in_BG, gates_BG = x_BD @ params["in_DG"] + params["bias_G"], h_BH @ params["gates_HG"]
    (ir, iz, inew), (hr, hz, hnew) = in_BG.chunk(3, -1), gates_BG.chunk(3, -1)
    reset, keep = torch.sigmoid(ir + hr), torch.sigmoid(iz + hz)
    return (1 - keep) * torch.tanh(inew + reset * hnew) + keep * h_BH


def gru(params, x_SBD):
    def step(h_BH, x_BD):
        h_BH = gru_step(params, h_BH, x_BD)
        return h_BH, h_BH * 2

    last_BH, ys_SBH = scan(step, torch.zeros(x_SBD.shape[1], len(params["gates_HG"]), dtype=x_SBD.dtype), x_SBD)
    return last_BH.square().sum() + ys_SBH.sin().sum()


def gru_loop(params, x_SBD):
    h_BH, total = torch.zeros(x_SBD.shape[1], len(params["gates_HG"]), dtype=x_SBD.dtype), 0.0
    for x_BD in x_SBD:
        h_BH = gru_step(params, h_BH, x_BD)
        total = total + (h_BH * 2).sin().sum()
    return h_BH.square().sum() + total


def recurrence(decay_BSD, x_BSD):
    """A linear recurrence from the last position to the first, along dim 1."""

    def step(h_BD, given):
        h_BD = given[0] * h_BD + given[1]
        return h_BD, h_BD.clone()

    return scan(step, torch.zeros_like(x_BSD[:, 0]), (decay_BSD, x_BSD), dim=1, reverse=True)[1].square().sum()


def recurrence_loop(decay_BSD, x_BSD):
    h_BD, total = torch.zeros_like(x_BSD[:, 0]), 0.0
    for i in reversed(range(x_BSD.shape[1])):
        h_BD = decay_BSD[:, i] * h_BD + x_BSD[:, i]
        total = total + h_BD.square().sum()
    return total


def clipped(x_BD, w_DF):
    """A choice by a norm over all ranks, in which both branches read a tensor from outside."""
    return torch.cond(x_BD.norm() > 1, lambda x: (x / x.norm()) @ w_DF, lambda x: (x * 3) @ w_DF, (x_BD,)).sin().sum()


def clipped_branch(x_BD, w_DF):
    return ((x_BD / x_BD.norm() if x_BD.norm() > 1 else x_BD * 3) @ w_DF).sin().sum()


def power(a_DD, v_D):
    """Power iteration: products over a sharded dim, thus collectives, in every step."""

    def step(v_D, _):
        v_D = a_DD @ v_D
        return v_D / v_D.norm(), v_D.norm()

    v_D, norms_S = scan(step, v_D, torch.zeros(6, dtype=v_D.dtype))
    return v_D @ a_DD @ v_D + norms_S.sum()


def power_loop(a_DD, v_D):
    total = 0.0
    for _ in range(6):
        v_D = a_DD @ v_D
        total, v_D = total + v_D.norm(), v_D / v_D.norm()
    return v_D @ a_DD @ v_D + total


def inside(w_DD, x_SBD):
    """A choice in a scan in a scan, with a tensor from outside in the innermost."""

    def step(h_BD, x_BD):
        def again(h_BD, scale):
            grown = torch.cond(h_BD.sum() > 0, lambda h: h @ w_DD, lambda h: h - w_DD.sum(0), (h_BD,))
            return torch.tanh(grown * scale), grown.mean()

        h_BD, means_T = scan(again, h_BD + x_BD, torch.ones(3, dtype=x_BD.dtype))
        return h_BD, means_T

    h_BD, means_ST = scan(step, torch.zeros_like(x_SBD[0]), x_SBD)
    return h_BD.sum() + means_ST.square().sum()


def inside_loop(w_DD, x_SBD):
    h_BD, total = torch.zeros_like(x_SBD[0]), 0.0
    for x_BD in x_SBD:
        h_BD = h_BD + x_BD
        for _ in range(3):
            grown = h_BD @ w_DD if h_BD.sum() > 0 else h_BD - w_DD.sum(0)
            h_BD, total = torch.tanh(grown), total + grown.mean().square()
    return h_BD.sum() + total


GRU = {"in_DG": P(None, "tp"), "gates_HG": P(None, "tp"), "bias_G": P("tp")}
CASES = {
    "gru": (gru, gru_loop, ({"in_DG": (4, 24), "gates_HG": (8, 24), "bias_G": (24,)}, (5, 4, 4)), (GRU, P(None, "dp"))),
    "gru, steps sharded": (
        gru,
        gru_loop,
        ({"in_DG": (4, 24), "gates_HG": (8, 24), "bias_G": (24,)}, (8, 4, 4)),
        (P("tp"), P("dp")),
    ),
    "recurrence": (recurrence, recurrence_loop, ((4, 6, 8), (4, 6, 8)), (P("dp", None, "tp"), P("dp", None, "tp"))),
    "recurrence along tp": (recurrence, recurrence_loop, ((4, 8, 8), (4, 8, 8)), (P("dp", "tp"), P("dp", "tp"))),
    "cond": (clipped, clipped_branch, ((4, 4), (4, 8)), (P("dp", "tp"), P("tp"))),
    "power iteration": (power, power_loop, ((8, 8), (8,)), (P("tp", "dp"), P("tp"))),
    "nested": (inside, inside_loop, ((8, 8), (3, 4, 8)), (P(None, "tp"), P(None, "dp"))),
}


def made(shapes, make_tensor):
    if isinstance(shapes, dict):
        return {name: made(shape, make_tensor) for name, shape in shapes.items()}
    return make_tensor(shapes, torch.float64) * 0.5


@pytest.mark.parametrize("mesh", MESHES.values(), ids=MESHES)
@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients_are_those_of_python(case, mesh, make_tensor):
    """A compiled loop has the value and the gradients of the loop that Python runs, however its operands are sharded."""
    fn, reference, shapes, specs = CASES[case]
    args = tuple(made(shape, make_tensor) for shape in shapes)
    argnums = tuple(range(len(args)))
    lowered = jit(value_and_grad(fn, argnums=argnums), mesh=mesh, in_specs=specs).lower(*args)
    actual, expected = lowered.simulate(*args), value_and_grad(reference, argnums=argnums)(*args)
    for (path, a), (_, b) in zip(tree.leaves_with_path(actual), tree.leaves_with_path(expected), strict=True):
        testing.assert_close(a, b, name=path)


def newton(x_BD, scale_D):
    """Square roots by Newton's method, until the largest error over all ranks is small; the number of steps depends on data."""
    x_BD = (x_BD * scale_D).square() + 0.1

    def far(step, y_BD):
        return (step < 50) & ((y_BD * y_BD - x_BD).abs().max() > 1e-12)

    return while_loop(far, lambda step, y_BD: (step + 1, (y_BD + x_BD / y_BD) / 2), (torch.tensor(0), torch.ones_like(x_BD)))


def newton_loop(x_BD, scale_D):
    x_BD = (x_BD * scale_D).square() + 0.1
    step, y_BD = torch.tensor(0), torch.ones_like(x_BD)
    while (y_BD * y_BD - x_BD).abs().max() > 1e-12:
        step, y_BD = step + 1, (y_BD + x_BD / y_BD) / 2
    return step, y_BD


def converged(a_DD, v_D):
    """Power iteration until it converges: the test and the body sum over ranks in every step."""
    a_DD = a_DD @ a_DD.T

    def moving(v_D, last_D):
        return (v_D - last_D).norm() > 1e-3

    def step(v_D, last_D):
        w_D = a_DD @ v_D
        return w_D / w_D.norm(), v_D

    return while_loop(moving, step, (v_D / v_D.norm(), torch.zeros_like(v_D)))[0]


def converged_loop(a_DD, v_D):
    a_DD, v_D, last_D = a_DD @ a_DD.T, v_D / v_D.norm(), torch.zeros_like(v_D)
    while (v_D - last_D).norm() > 1e-3:
        w_D = a_DD @ v_D
        v_D, last_D = w_D / w_D.norm(), v_D
    return v_D


LOOPS = {
    "newton": (newton, newton_loop, ((4, 8), (8,)), (P("dp", "tp"), P("tp"))),
    "converged": (converged, converged_loop, ((8, 8), (8,)), (P("tp", "dp"), P("dp"))),
}


@pytest.mark.parametrize("mesh", MESHES.values(), ids=MESHES)
@pytest.mark.parametrize("case", LOOPS)
def test_a_while_loop_ends_after_the_same_steps(case, mesh, make_tensor):
    """A loop whose number of steps depends on data ends on all ranks at once, and has the tangents of the loop of Python."""
    fn, reference, shapes, specs = LOOPS[case]
    args = tuple(made(shape, make_tensor) for shape in shapes)

    def with_tangents(fn):
        return lambda *args: torch.func.jvp(fn, args, tuple(torch.ones_like(x) for x in args))

    actual = jit(with_tangents(fn), mesh=mesh, in_specs=specs).lower(*args).simulate(*args)
    for a, b in zip(tree.leaves(actual), tree.leaves(with_tangents(reference)(*args)), strict=True):
        testing.assert_close(a.double(), b.double(), name=case)


def scanned(w_DD, x_SD):
    return scan(lambda h, x: (torch.tanh(h @ w_DD + x), (h * x).sum()), x_SD[0], x_SD)[1].square().sum()


def chosen(w_DD, x_SD):
    return torch.cond(x_SD.sum() > 0, lambda x: (x @ w_DD).tanh(), lambda x: (x @ w_DD).sin(), (x_SD,)).sum()


def of_examples(fn):
    return lambda w_DD, x_SD: torch.func.vmap(fn, in_dims=(None, 0))(w_DD, torch.stack([x_SD, -x_SD, x_SD.square()])).sum()


def inner_gradient(w_DD, x_SD):
    """A body that takes a gradient itself, of a function that reads a tensor from outside."""

    def step(h_D, x_D):
        slope_D = torch.func.grad(lambda h_D: ((h_D @ w_DD).sin() * x_D).sum())(h_D)
        return h_D - 0.1 * slope_D, slope_D.sum()

    h_D, slopes_S = scan(step, x_SD[0], x_SD)
    return h_D.sum() + slopes_S.sum()


def doubled(w_DD, x_SD):
    """A loop whose number of turns differs from example to example; one example takes none."""
    return while_loop(lambda n, y: y.abs().sum() < 20, lambda n, y: (n + 1, (y * 2) @ w_DD), (torch.tensor(0), x_SD))[1].sum()


def python_scan(combine, init, xs):
    carry, ys = init, []
    for x in xs:
        carry, y = combine(carry, x)
        ys.append(y)
    return carry, torch.stack(ys)


def python_while(test, body, carries):
    """Without a choice by data, for batches: carries stay as they are once the test fails."""
    for _ in range(12):
        going = test(*carries)
        carries = tuple(torch.where(going, *pair) for pair in zip(body(*carries), carries, strict=True))
    return carries


def python_cond(predicate, if_true, if_false, operands):
    return torch.utils._pytree.tree_map(lambda a, b: torch.where(predicate, a, b), if_true(*operands), if_false(*operands))


TRANSFORMED = {
    "hessian of a scan": torch.func.hessian(scanned),
    "jacfwd of a scan": torch.func.jacfwd(scanned, argnums=1),
    "jacrev of a scan": torch.func.jacrev(scanned, argnums=1),
    "examples of a scan": of_examples(scanned),
    "gradients of examples of a scan": torch.func.grad(of_examples(scanned)),
    "hessian of a choice": torch.func.hessian(chosen),
    "examples of a choice": of_examples(chosen),
    "gradients of examples of a choice": torch.func.grad(of_examples(chosen)),
    "examples of a loop": of_examples(doubled),
    "tangents of examples of a loop": torch.func.jacfwd(of_examples(doubled)),
    "gradient in a body": torch.func.grad(inner_gradient),
}


@pytest.mark.parametrize("case", TRANSFORMED)
def test_transforms_see_through_control_flow(case, make_tensor, monkeypatch):
    """Second derivatives, Jacobians and batches of control flow are those of the same function with loops of Python."""
    fn, mesh = TRANSFORMED[case], Mesh(dp=2, tp=2)
    args = made((4, 4), make_tensor), made((6, 4), make_tensor)
    actual = jit(fn, mesh=mesh, in_specs=(P(None, "tp"), P("dp"))).lower(*args).simulate(*args)
    monkeypatch.setitem(globals(), "scan", python_scan)
    monkeypatch.setitem(globals(), "while_loop", python_while)
    monkeypatch.setattr(torch, "cond", python_cond)
    testing.assert_close(actual, fn(*args), name=case)


@pytest.mark.gloo
def test_two_ranks_run_control_flow():
    """Messages in steps and branches on two processes; the worker says what it compares."""
    done = torchrun(pathlib.Path(__file__).with_name("control_worker.py"), num_ranks=2)
    assert done.returncode == 0, done.stderr[-3000:]
