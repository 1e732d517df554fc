"""Experts in whole steps: loss, side losses, gradients and memory, simulated, wherever experts are."""

import random
from dataclasses import replace
from math import prod

import pytest
import torch

from mpar import Mesh, models
from mpar.arrange import DISPATCHERS
from mpar.errors import ConfigError
from mpar.program import Program
from mpar.program.compile import compile_step
from mpar.strategy import Strategy, preset
from tests.forecast.test_prediction import measured_peaks
from tests.program.oracle import DEEPSEEK, GPT_OSS, MOE, Problem, Recorder

pytestmark = pytest.mark.cases(2)  # each compiles a program of its own
SHAPE = (8, 16)
GATED = {**MOE, "model_type": "qwen2_moe", "shared_expert_intermediate_size": 12, "norm_topk_prob": False}
SIDE = {"aux_loss": 0.1, "seq_aux_loss": 0.2, "global_aux_loss": 0.3, "z_loss": 0.05}
ROUTERS = {
    "softmax": (MOE, {}),
    "softmax of the chosen": ({**MOE, "model_type": "mixtral", "num_local_experts": 8}, {}),
    "not normalised, shared gate": (GATED, {}),
    "sigmoid, groups, bias": (DEEPSEEK, {"bias_rate": 0.01}),
    "side losses": (MOE, SIDE),
    "side losses of sigmoid": (DEEPSEEK, SIDE),
    "sinkhorn": (MOE, {"kind": "sinkhorn"}),
    "balanced": (MOE, {"kind": "balanced"}),
    "capacity": (MOE, {"capacity_factor": 0.7, "aux_loss": 0.1}),
    "capacity of sigmoid": (DEEPSEEK, {"capacity_factor": 1.0, "z_loss": 0.1}),
    "biases": (GPT_OSS, {}),
}
MIXTRAL_HAS_NOT = ("moe_intermediate_size", "num_experts", "norm_topk_prob")


def config_of(name: str) -> dict:
    """One layer, with experts."""
    config = {**ROUTERS[name][0], "num_hidden_layers": 1}
    if config["model_type"] == "mixtral":
        return {key: value for key, value in config.items() if key not in MIXTRAL_HAS_NOT}
    return {**config, "first_k_dense_replace": 0} if config["model_type"] == "deepseek_v3" else config


@pytest.fixture(scope="module")
def problems():
    """Problems by name of the router, packed or not, made once."""
    made: dict[tuple, Problem] = {}

    def get(name: str, **options) -> Problem:
        key = (name, *sorted(options.items()))
        if key not in made:
            made[key] = Problem(config_of(name), SHAPE, router=ROUTERS[name][1], **options)
        return made[key]

    return get


@pytest.fixture(scope="module")
def dense_first():
    """Two layers of DeepSeek-V3, the first without experts; packed rows, two microbatches."""
    return Problem(DEEPSEEK, SHAPE, router={"bias_rate": 0.01}, packed=True, num_microbatches=2)


def spread(ep: int, base: str = "ddp", **options) -> Strategy:
    return replace(preset(base), expert_parallel=ep, **options)


def compiled(problem: Problem, mesh: Mesh, strategy: Strategy | str, **options) -> Program:
    options = {"num_microbatches": problem.num_microbatches, **options}
    return compile_step(problem.model, Recorder(), mesh, strategy, problem.shapes, **options)


@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize("dispatcher", DISPATCHERS)
@pytest.mark.parametrize("ep", [2, 4, 8])
def test_step_is_exact(ep, dispatcher, router, problems):
    """Loss, side losses, gradients and norm are one rank's, with every dispatcher and router; padding goes to no expert."""
    problem = problems(router, packed=ep == 4)
    mesh = Mesh(dp=ep) if ep < 8 else Mesh(dp=4, cp=2)
    metrics = problem.check(compiled(problem, mesh, spread(ep, dispatcher=dispatcher, context_parallel="ring")))
    num_tokens = (problem.batch.get("documents", torch.zeros(SHAPE)) != -1).sum()
    assert metrics["layers.0.expert_counts"].sum() == 2 * num_tokens


FOLDS = {
    "tp": (Mesh(dp=2, tp=2), spread(2, "tp", expert_axes=("tp",))),
    "tp of a shared stream": (Mesh(dp=2, tp=2), spread(2, "tp_sp", expert_axes=("tp",))),
    "dp, tp": (Mesh(dp=2, tp=2), spread(4, "tp")),
    "dp, tp of a shared stream": (Mesh(dp=2, tp=2), spread(4, "tp_sp")),
    "cp, tp": (Mesh(dp=2, cp=2, tp=2), spread(4, "tp_sp", expert_axes=("cp", "tp"))),
    "half of cp": (Mesh(cp=4), spread(2)),
    "more than dp": (Mesh(dp=2, cp=2, tp=2), spread(8, "tp_sp")),
    "sharded inside": (Mesh(dp=2, tp=2), spread(2, "tp_sp")),
    "sharded inside, zero3": (Mesh(fsdp=4, tp=2), spread(4, "zero3_tp")),
    "whole inside": (Mesh(fsdp=2, tp=2), spread(2, "zero3_tp_sp", expert_tensor_parallel=False)),
    "none": (Mesh(dp=2, tp=2), spread(1, "tp_sp")),
}


@pytest.mark.parametrize("router", ["side losses of sigmoid", "capacity"])
@pytest.mark.parametrize("fold", FOLDS)
def test_experts_on_any_axes_are_exact(fold, router, problems):
    """Experts over axes that shard tokens, over those that do not, over both; with tensor parallelism inside or without."""
    mesh, strategy = FOLDS[fold]
    problems(router).check(compiled(problems(router), mesh, strategy))


def grids(num_ranks: int, count: int, *, pp: int = 1, seed: int = 3) -> list[tuple]:
    """Some (mesh, expert_parallel, preset, dispatcher, method) with cp, tp and fsdp of all ranks."""
    choose, found = random.Random(seed), []
    while len(found) < count:
        sizes = {axis: choose.choice([1, 2, 4]) for axis in ("fsdp", "cp", "tp")}
        if prod(sizes.values()) * pp != num_ranks:
            continue
        ep = choose.choice([n for n in (2, 4, 8) if n * pp <= num_ranks])
        how = choose.choice(["zero3_tp", "zero3_tp_sp"]), choose.choice(DISPATCHERS), choose.choice(["ring", "all_to_all"])
        if how[2] == "all_to_all" and sizes["cp"] * sizes["tp"] > 8:
            continue
        found.append((Mesh(**({"pp": pp} if pp > 1 else {}), **sizes), ep, *how))
    return found


@pytest.mark.parametrize(("mesh", "ep", "base", "dispatcher", "method"), [*grids(16, 5), *grids(16, 3, pp=2)], ids=str)
def test_grid_of_16_is_exact(mesh, ep, base, dispatcher, method, dense_first):
    """Sampled from cp x ep x tp x fsdp, with stages and without; the first layer has no experts."""
    dense_first.check(compiled(dense_first, mesh, spread(ep, base, dispatcher=dispatcher, context_parallel=method)))


@pytest.mark.parametrize("schedule", ["one_f_one_b", "zb_h1"])
def test_stages_without_experts_are_exact(schedule):
    """Dense layers among those with experts, so that one stage of the pipeline has none."""
    config = {**MOE, "num_hidden_layers": 4, "mlp_only_layers": [0, 1], "router_aux_loss_coef": 0.1}
    problem = Problem(config, SHAPE, num_microbatches=2)
    problem.check(compiled(problem, Mesh(pp=2, dp=2, cp=2), spread(4), schedule=schedule))


@pytest.mark.parametrize("dispatcher", DISPATCHERS)
@pytest.mark.parametrize("expert", [0, 7])
def test_all_tokens_to_the_experts_of_one_rank(expert, dispatcher):
    """A bias of the router that decides alone: most ranks get no row; they finish, and gradients are right."""
    problem = Problem(GPT_OSS, SHAPE)
    for layer in problem.params.layers:
        layer.mlp.router_bias_E.zero_()[[expert, expert ^ 1]] = 100.0
    problem.differentiate()
    metrics = problem.check(compiled(problem, Mesh(dp=4), spread(4, dispatcher=dispatcher)))
    counts = metrics["layers.0.expert_counts"]
    assert counts[[expert, expert ^ 1]].tolist() == [prod(SHAPE)] * 2 and counts.sum() == 2 * prod(SHAPE)


def test_dropped_slots_are_counted(problems):
    """A capacity below what the batch has drops the same slots wherever experts are, and says how many."""
    problem = problems("capacity")
    found = [problem.check(compiled(problem, Mesh(dp=n), spread(n)))["layers.0.dropped"].item() for n in (1, 2, 4)]
    assert found[0] > 0 and found == [found[0]] * 3


def test_equal_weights_are_dropped_by_their_place():
    """A router that knows no difference: of tokens with equal weight the first stay, by their index before any permutation."""
    problem = Problem(config_of("capacity"), SHAPE, router={"capacity_factor": 0.7})  # 23 slots: a row and a half
    problem.params.layers[0].mlp.router_DE.zero_()
    problem.differentiate()
    metrics = problem.check(compiled(problem, Mesh(dp=2, cp=2), spread(4, context_parallel="ring")))
    assert metrics["layers.0.dropped"] == 2 * (prod(SHAPE) - 23)


@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_recomputing_is_exact(recompute, problems):
    """Rows that are dispatched again in the backward are the same ones."""
    problem = problems("side losses")
    problem.check(compiled(problem, Mesh(dp=2, cp=2), spread(4), recompute=recompute))


def test_rows_are_exchanged_twice_each_way(problems):
    """Of each layer: rows to their experts and back, forward and backward; their numbers once, in the forward."""
    program = compiled(problems("softmax"), Mesh(dp=4), spread(4))
    rows, experts = prod(SHAPE) // 4 * 2, 8
    for name, numbers in (("forward", [experts * 4]), ("backward", [])):
        uses = program.kinds[f"layers {name}"].collectives
        assert [use.bytes for use in uses if use.op == "exchange_rows"] == [rows * 16 * 8] * 2
        assert [use.bytes for use in uses if use.op == "all_to_all"] == numbers
        assert {use.op for use in uses} <= {"exchange_rows", "all_to_all", "all_reduce"}


def test_gradients_of_experts_are_reduced_over_the_other_axes_once(problems):
    """On dp=4 with two groups of two, an expert's gradient is a sum over the two ranks that hold it; all others are over four."""
    program = compiled(problems("softmax"), Mesh(dp=4), spread(2))
    assert program.mesh == Mesh(dp_outer=2, dp_inner=2)
    uses = [use for name, kind in program.kinds.items() if name.startswith("reduce") for use in kind.collectives]
    total = sum(grad.nbytes for grad in problems("softmax").grads.values())
    names = ("gate_EDF", "up_EDF", "down_EFD")
    experts = sum(grad.nbytes for path, grad in problems("softmax").grads.items() if path.endswith(names))
    by_axes: dict[tuple, int] = {}
    for use in uses:
        by_axes[use.axes] = by_axes.get(use.axes, 0) + use.bytes
    assert by_axes == {("dp_outer",): experts // 2, ("dp_outer", "dp_inner"): total - experts}


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize(("mesh", "ep"), [(Mesh(dp=4), 4), (Mesh(dp=4), 2), (Mesh(dp=2, cp=2), 4)], ids=str)
def test_peak_is_exact_when_loads_are_even(mesh, ep, recompute, problems):
    """With balanced routing, rows are as many as predicted: so are the bytes that simulated ranks hold."""
    problem = problems("balanced")
    program = compiled(problem, mesh, spread(ep), recompute=recompute)
    assert measured_peaks(program, problem.state(), problem.batch) == [program.predict().peak_bytes] * mesh.size


BAD = {
    "experts": (Mesh(dp=4), spread(3), "8 experts cannot be spread evenly over expert_parallel=3.*divisor of 8"),
    "ranks": (Mesh(dp=2), spread(4), "cannot hold expert_parallel=4.*factor of 2"),
    "axes": (Mesh(dp=4, cp=2), spread(4, expert_axes=("cp",)), r"axes \['cp'\] leave a factor of 2"),
    "dispatcher": (Mesh(dp=4), spread(4, dispatcher="all"), "dispatcher is 'all'; there are all_to_all, all_gather"),
    "no ranks": (Mesh(dp=4), spread(0), "expert_parallel=0"),
    "unknown axis": (Mesh(dp=4), spread(4, expert_axes=("ep",)), r"\['ep'\]; each of \['cp', 'dp'"),
    "stages": (Mesh(pp=2, dp=2), spread(2, expert_axes=("pp",)), r"are \['pp'\]; each of .* can be named once"),
    "axes of no ranks": (Mesh(dp=4), spread(1, expert_axes=("dp",)), r"\['dp'\] say where .* expert_parallel=1 .* divisor of 8"),
    "an axis twice": (Mesh(dp=4, cp=2), spread(8, expert_axes=("dp", "dp")), r"\['dp', 'dp'\]; each of .* once"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused(case):
    """With the facts that disagree and the ways out, before anything runs."""
    mesh, strategy, message = BAD[case]
    model = models.from_config(MOE, dtype=torch.float64, vocab_multiple=8)
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        compile_step(model, Recorder(), mesh, strategy, SHAPE)
