"""Padded experts and groups of tokens in whole steps, simulated: as exact as ragged rows, and static."""

from dataclasses import replace
from math import prod

import pytest
import torch

from mpar import Mesh, models, testing
from mpar.arrange import sequence_order
from mpar.program import Program
from mpar.runtime._device import asking_references
from mpar.strategy import Strategy
from tests.forecast.test_prediction import measured_peaks
from tests.program.oracle import DEEPSEEK, GPT_OSS, MOE, Problem
from tests.program.test_experts import FOLDS, MIXTRAL_HAS_NOT, SHAPE, compiled, spread

pytestmark = pytest.mark.cases(2)  # each compiles a program of its own
CAPACITY = {"capacity_factor": 0.7, "aux_loss": 0.1, "z_loss": 0.05}
ONE_LAYER = {"num_hidden_layers": 1, "first_k_dense_replace": 0}
MIXTRAL = {key: value for key, value in MOE.items() if key not in MIXTRAL_HAS_NOT}
CONFIGS = {
    "qwen3_moe": {**MOE, "num_hidden_layers": 1},
    "mixtral": {**MIXTRAL, "model_type": "mixtral", "num_local_experts": 8, "num_hidden_layers": 1},
    "deepseek_v3": {**DEEPSEEK, **ONE_LAYER},
    "gpt_oss": {**GPT_OSS, "num_hidden_layers": 1},
}


def contiguous(strategy: Strategy) -> Strategy:
    """Positions stay where they are: groups of positions are then the same on every mesh."""
    return replace(strategy, sequence="contiguous")


class Pairs:
    """Problems whose expected numbers are those of ragged rows, whose program has padded ones; made once."""

    def __init__(self) -> None:
        self.made: dict[tuple, Problem] = {}

    def __call__(self, name: str, groups: tuple[int, int], *, packed: bool = False, padded: bool = True) -> Problem:
        key = (name, groups, packed, padded)
        if key not in self.made:
            router = {**CAPACITY, "token_groups": groups}
            # this seed has no document that begins like another one at the edge of a capacity, where the last bit would decide
            problem = Problem(CONFIGS[name], SHAPE, router=router, packed=packed, seed=6)
            padding = {**router, "padded": padded}
            problem.model = models.from_config(CONFIGS[name], dtype=torch.float64, vocab_multiple=8, router=padding)
            self.made[key] = problem
        return self.made[key]


@pytest.fixture(scope="module")
def pairs() -> Pairs:
    return Pairs()


def messages(program: Program, way: str) -> list[tuple[str, tuple[str, ...], int]]:
    return [(use.op, use.axes, use.bytes) for use in program.kinds[f"layers {way}"].collectives]


MESHES = {
    "one": (Mesh(), spread(1)),
    "dp2": (Mesh(dp=2), spread(1)),
    "dp2, ep2": (Mesh(dp=2), spread(2)),
    "dp4, ep2": (Mesh(dp=4), spread(2)),
    "dp4, ep4": (Mesh(dp=4), spread(4)),
    "dp2 cp2, ep4": (Mesh(dp=2, cp=2), contiguous(spread(4))),
    "dp2 cp2, ep2": (Mesh(dp=2, cp=2), contiguous(spread(2))),
    "dp2 cp2, ep2 on dp": (Mesh(dp=2, cp=2), contiguous(spread(2, expert_axes=("dp",)))),
    "fsdp2 tp2, ep2": (Mesh(fsdp=2, tp=2), spread(2, "zero3_tp_sp")),
    "fsdp4 cp2, ep8": (Mesh(fsdp=4, cp=2), contiguous(spread(8, "zero3"))),
    "dp2, gathered": (Mesh(dp=2), spread(2, dispatcher="all_gather")),
}


@pytest.mark.parametrize("groups", [(1, 1), (4, 2)], ids=str)
@pytest.mark.parametrize("place", MESHES)
def test_padded_steps_are_exact(place, groups, pairs):
    """Loss, side losses, gradients and norm are those of ragged rows on one rank, whether groups fit the ranks or not."""
    mesh, strategy = MESHES[place]
    problem = pairs("qwen3_moe", groups, packed=mesh.size == 4)
    metrics = problem.check(compiled(problem, mesh, strategy))
    assert metrics["layers.0.dropped"] > 0


@pytest.mark.parametrize("fold", FOLDS)
def test_padded_experts_on_any_axes_are_exact(fold, pairs):
    """Over axes that shard tokens, over those that do not, over both; with tensor parallelism inside or without."""
    mesh, strategy = FOLDS[fold]
    problem = pairs("qwen3_moe", (2, 2))
    problem.check(compiled(problem, mesh, contiguous(strategy)))


@pytest.mark.parametrize(("name", "padded"), [*((name, True) for name in CONFIGS), ("deepseek_v3", False)])
def test_models_with_groups_are_exact(name, padded, pairs):
    """Other routers, a shared layer, biases; experts over all ranks and sharded inside; packed rows."""
    problem = pairs(name, (2, 2), packed=True, padded=padded)
    problem.check(compiled(problem, Mesh(dp=2, cp=2), contiguous(spread(4))))
    problem.check(compiled(problem, Mesh(dp=2, tp=2), spread(2, "tp_sp")))


@pytest.mark.parametrize("padded", [True, False], ids=["padded", "ragged"])
def test_groups_are_of_the_storage_order(padded):
    """In zigzag a group of positions is what lies together: of 2 ranks the first has parts 0 and 3, as the first group has."""
    config, router = CONFIGS["qwen3_moe"], {**CAPACITY, "token_groups": (2, 2)}
    problem, stored = (Problem(config, SHAPE, router={**router, "padded": padded}) for _ in range(2))
    order = sequence_order(SHAPE[1], 4)
    stored.batch = {key: x[:, order] for key, x in problem.batch.items()} | {"order": order}
    stored.differentiate()
    assert not torch.equal(stored.losses["aux_loss"], problem.losses["aux_loss"])
    program = compiled(problem, Mesh(dp=2, cp=2), spread(4, context_parallel="ring"))
    state, metrics = program.simulate(problem.state(), problem.batch)
    for loss, value in stored.losses.items():
        testing.assert_close(metrics[loss], value, name=loss)
    for path, grad in stored.grads.items():
        testing.assert_close(state.leaves[f"opt.g.{path}"], grad, name=path)


@pytest.mark.parametrize("options", [{"recompute": "full"}, {"recompute": "selective"}, {"num_microbatches": 2}], ids=str)
def test_options_change_nothing(options):
    """Recomputed slots are the same ones; a microbatch has groups of its own."""
    router = {**CAPACITY, "token_groups": (2, 1), "padded": True}
    problem = Problem(CONFIGS["qwen3_moe"], SHAPE, router=router, num_microbatches=options.get("num_microbatches", 1))
    problem.check(compiled(problem, Mesh(dp=2), spread(2), **options))


def test_stages_are_exact():
    """Padded experts on the stages of a pipeline."""
    router = {**CAPACITY, "token_groups": (2, 1), "padded": True}
    problem = Problem(MOE, SHAPE, router=router, num_microbatches=2)
    problem.check(compiled(problem, Mesh(pp=2, dp=2), spread(2), schedule="zb_h1"))


ROWS = 8 * 6 * 16 * 8  # bytes of an expert's 6 = ceil(0.7 * 32 * 2 / 8) rows for each of 8 experts, float64, of one group


@pytest.mark.parametrize(
    ("mesh", "strategy", "groups", "moves"),
    [
        (Mesh(dp=4), spread(4), (4, 1), [("dp",)]),
        (Mesh(dp=4), spread(2), (4, 1), [("dp_inner",)]),
        (Mesh(dp=2, cp=2), contiguous(spread(4)), (2, 2), [("dp",), ("cp",)]),
        (Mesh(dp=2, tp=2), spread(4, "tp_sp"), (2, 2), [("dp",), ("tp",)]),
    ],
    ids=str,
)
def test_rows_go_there_and_back_once_each_way(mesh, strategy, groups, moves, pairs):
    """One exchange of all rows for each axis of experts, forward and backward; no numbers, and no tokens are gathered."""
    program = compiled(pairs("qwen3_moe", groups), mesh, strategy)
    for way in ("forward", "backward"):
        found = [message for message in messages(program, way) if message[0] == "all_to_all"]
        assert sorted(found) == sorted(("all_to_all", axes, ROWS) for axes in [*moves, *moves])
        others = {op for op, axes, _ in messages(program, way) if axes != ("tp",)}
        assert others <= {"all_to_all", "shift", "all_gather"} and ("all_gather" not in others or "cp" in mesh.axes)


def test_experts_sharded_inside_send_parts_of_sums(pairs):
    """Rows go back before they are summed over tp: what is summed are tokens, and weights' gradients, not rows."""
    program = compiled(pairs("qwen3_moe", (2, 1)), Mesh(dp=2, tp=2), spread(2, "tp_sp"))
    tokens = prod(SHAPE) // 2 * 16 * 8
    for way in ("forward", "backward"):
        sums = [nbytes for op, _, nbytes in messages(program, way) if op in ("reduce_scatter", "all_reduce")]
        assert sums and max(sums) <= tokens + tokens // 8
        assert [nbytes for op, _, nbytes in messages(program, way) if op == "all_to_all"] == [2 * ROWS] * 2


def test_groups_that_ranks_share_gather_tokens(pairs):
    """One group on two ranks: the tokens come to all, whose experts give parts of sums."""
    program = compiled(pairs("qwen3_moe", (1, 1)), Mesh(dp=2), spread(2))
    kinds = {op for op, *_ in messages(program, "forward")}
    assert "all_gather" in kinds and "reduce_scatter" in kinds and "all_to_all" not in kinds


@pytest.mark.parametrize("padded", [True, False], ids=["padded", "ragged"])
def test_padded_programs_ask_the_device_nothing(padded, pairs):
    """What refuses a recording finds nothing in padded layers: no op looks at data on the host, no message waits for a number."""
    program = compiled(pairs("qwen3_moe", (2, 1), padded=padded), Mesh(dp=2), spread(2))
    sources = [program.kinds[f"layers {way}"].source for way in ("forward", "backward")]
    asking = [name for source in sources for name in asking_references(source)]
    assert (asking == []) == padded
    assert any("exchange_rows" in source for source in sources) != padded


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize(("mesh", "ep", "groups"), [(Mesh(dp=4), 4, (4, 1)), (Mesh(dp=2), 1, (2, 1))], ids=str)
def test_peak_is_exact(mesh, ep, groups, recompute, pairs):
    """No shape depends on data: the bytes that simulated ranks hold are those predicted, whatever the router does."""
    problem = pairs("qwen3_moe", groups)
    program = compiled(problem, mesh, spread(ep), recompute=recompute)
    assert measured_peaks(program, problem.state(), problem.batch) == [program.predict().peak_bytes] * mesh.size
    assert program.predict().bytes_if_rows_meet <= program.predict().need_bytes
