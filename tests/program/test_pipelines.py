"""Pipelines in simulation: every schedule, mesh, layout and pass gives the bits of one stage, which are plain torch's too."""

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.distributed.pipelining import schedules as torch_schedules

from mpar import Mesh, models, testing, tree
from mpar.compiler import Schedule
from mpar.errors import ConfigError, ShardingError, UnknownNameError
from mpar.optim import AdamW
from mpar.program import Program
from mpar.program.compile import compile_eval, compile_step
from mpar.schedules import SCHEDULES, Action, actions, from_table
from mpar.strategy import preset
from tests.program.test_exactness import CONFIG, LEARNING_RATE, Recorder, V, layer, normalise

S, NUM_LAYERS, NUM_STEPS = 8, 8, 2
pytestmark = pytest.mark.cases(2)  # each compiles a program of its own
OPTIMIZER = AdamW(lr=0.02, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, decay="all", clip_norm=0.5)
ONE_CHUNK = [(name, s.chunks) for name, s in SCHEDULES.items() if not s.any_chunks and s.placement != "bidirectional"]
SEVERAL = [(name, chunks) for name, s in SCHEDULES.items() if s.any_chunks and name != "forward_only" for chunks in (1, 2)]
TRAINING = sorted(ONE_CHUNK + SEVERAL)
RECORDED = Recorder()


@dataclass(frozen=True)
class Result:
    """What two steps of training give."""

    metrics: list[dict[str, Tensor]]
    leaves: dict[str, Tensor]


@functools.cache
def make_model(tied: bool = False, num_layers: int = NUM_LAYERS) -> models.Model:
    """A narrow Llama in float64."""
    config = {**CONFIG, "num_hidden_layers": num_layers, "tie_word_embeddings": tied}
    return models.from_config(config, dtype=torch.float64)


@functools.cache
def make_params(tied: bool = False, num_layers: int = NUM_LAYERS):
    """Its parameters, large enough for every gradient to be far from zero."""
    generator = torch.Generator().manual_seed(5)
    return tree.map_leaves(
        lambda leaf: 0.3 * torch.randn(leaf.shape, generator=generator, dtype=torch.float64) + (leaf.ndim == 1),
        make_model(tied, num_layers).abstract_params,
    )


def make_batch(rows: int, seed: int = 0) -> dict[str, Tensor]:
    """Tokens and labels; every third label of the first half of the rows does not count, nor one more in every other row."""
    generator = torch.Generator().manual_seed(seed)
    batch = {key: torch.randint(0, V, (rows, S), generator=generator) for key in ("tokens", "labels")}
    batch["labels"][:, ::3] = -100
    batch["labels"][::2, 1] = -100
    return batch


def train(program: Program, params, rows: int) -> Result:
    """Two simulated steps."""
    state, metrics = program.init_state(params), []
    for seed in range(NUM_STEPS):
        state, found = program.simulate(state, make_batch(rows, seed))
        metrics.append(found)
    return Result(metrics, state.leaves)


def compiled(mesh: Mesh, strategy: str, rows: int, count: int, schedule=None, *, tied=False, layers=NUM_LAYERS, **options):
    return compile_step(
        make_model(tied, layers), OPTIMIZER, mesh, strategy, (rows, S), num_microbatches=count, schedule=schedule, **options
    )


@functools.cache
def unpipelined(
    sizes: tuple[tuple[str, int], ...] = (),
    strategy: str = "ddp",
    rows: int = 8,
    count: int = 8,
    tied: bool = False,
    layers: int = NUM_LAYERS,
) -> Result:
    """The same training on the mesh without pp."""
    program = compiled(Mesh(**dict(sizes)), strategy, rows, count, tied=tied, layers=layers)
    return train(program, make_params(tied, layers), rows)


@functools.cache
def reference(rows: int, tied: bool = False, layers: int = NUM_LAYERS) -> Result:
    """The same training by torch.autograd and torch.optim on plain torch formulas."""
    leaves, structure = tree.flatten(make_params(tied, layers))
    leaves = [leaf.clone().requires_grad_() for leaf in leaves]
    params, metrics = tree.unflatten(structure, leaves), []
    optimizer = torch.optim.AdamW(leaves, lr=0.02, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    for seed in range(NUM_STEPS):
        optimizer.zero_grad()
        loss = reference_loss(params, make_batch(rows, seed))
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(leaves, 0.5)
        optimizer.step()
        metrics.append({"loss": loss.detach(), "grad_norm": norm})
    found = {}
    for path, leaf in zip(tree.paths(make_model(tied, layers).abstract_params), leaves, strict=True):
        found[f"params.{path}"] = leaf.detach()
        found[f"opt.m.{path}"], found[f"opt.v.{path}"] = optimizer.state[leaf]["exp_avg"], optimizer.state[leaf]["exp_avg_sq"]
    return Result(metrics, found)


def reference_loss(params, batch: dict[str, Tensor]) -> Tensor:
    x_BSD = params.embed.table_VD[batch["tokens"]]
    for p in params.layers:
        x_BSD = layer(p, x_BSD)
    head_DV = params.embed.table_VD.T if params.head.head_DV is None else params.head.head_DV
    logp_BSV = (normalise(x_BSD, params.head.norm_D) @ head_DV)[..., :V].log_softmax(-1)
    counted_BS = batch["labels"] >= 0
    return -logp_BSV.gather(-1, batch["labels"].clamp(min=0)[..., None])[..., 0][counted_BS].sum() / counted_BS.sum()


def assert_same_bits(found: Result, expected: Result) -> None:
    for step, (a, b) in enumerate(zip(found.metrics, expected.metrics, strict=True)):
        for name in ("loss", "microbatch_losses", "weight", "grad_norm"):
            assert torch.equal(a[name], b[name]), f"{name} of step {step}: {a[name]}, expected {b[name]}"
    assert found.leaves.keys() == expected.leaves.keys()
    different = [path for path, leaf in expected.leaves.items() if not torch.equal(found.leaves[path], leaf)]
    assert not different, different


def assert_close(found: Result, expected: Result) -> None:
    for step, (a, b) in enumerate(zip(found.metrics, expected.metrics, strict=True)):
        for name in b:
            testing.assert_close(a[name], b[name], name=f"{name} of step {step}")
    assert found.leaves.keys() == expected.leaves.keys()
    for path, leaf in expected.leaves.items():
        testing.assert_close(found.leaves[path], leaf, name=path)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize(("name", "chunks"), TRAINING, ids=str)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_schedules_share_bits(ranks, name, chunks, tied):
    """Losses, norms, parameters and optimizer state after two clipped steps are the bits of one stage, and plain torch's."""
    program = compiled(Mesh(pp=ranks), "ddp", 8, 8, Schedule(name, chunks), tied=tied)
    found = train(program, make_params(tied), 8)
    assert_same_bits(found, unpipelined(tied=tied))
    assert_close(found, reference(8, tied))


def test_every_schedule_is_tried():
    """Those above, dual_pipe, auto and forward_only are all there are."""
    assert {name for name, _ in TRAINING} | {"dual_pipe", "forward_only"} == set(SCHEDULES)


@pytest.mark.parametrize(("chunks", "options"), [(1, {}), (2, {"placement": "v", "cap_bytes": 1 << 20})], ids=str)
def test_auto_shares_bits(chunks, options):
    """What the search finds gives the bits of one stage."""
    program = compiled(Mesh(pp=2), "ddp", 8, 4, Schedule("auto", chunks, options=options))
    assert_same_bits(train(program, make_params(), 8), unpipelined(count=4))


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_torch_order_of_looped_bfs_adds_from_the_other_end(tied):
    """order="torch" runs backwards from the last microbatch: plain torch's results to 1e-11, but not the others' bits."""
    schedule = Schedule("looped_bfs", options={"order": "torch"})
    found, expected = train(compiled(Mesh(pp=2), "ddp", 8, 8, schedule, tied=tied), make_params(tied), 8), unpipelined(tied=tied)
    assert_close(found, reference(8, tied))
    assert torch.equal(found.metrics[0]["loss"], expected.metrics[0]["loss"])
    moments = [path for path in expected.leaves if path.startswith("opt.m.")]
    assert not all(torch.equal(found.leaves[path], expected.leaves[path]) for path in moments)


def gradients(mesh: Mesh, batch: dict[str, Tensor], count: int, schedule: str | None, tied: bool) -> dict[str, Tensor]:
    rows = batch["tokens"].shape[0]
    program = compile_step(make_model(tied), RECORDED, mesh, "ddp", (rows, S), num_microbatches=count, schedule=schedule)
    state, _ = program.simulate(program.init_state(make_params(tied)), batch)
    return {path.removeprefix("opt.g."): leaf for path, leaf in state.leaves.items() if path.startswith("opt.g.")}


@pytest.mark.parametrize("ranks", [2, 4])
def test_dual_pipe_adds_its_two_directions(ranks):
    """Each gradient is, bit for bit, that of the first half of the microbatches plus that of the second, alone on one stage.

    Both halves have as many labels that count, so that the mean over both is exactly half of that over one.
    """
    batch = make_batch(8)
    halves = [{key: value[i : i + 4] for key, value in batch.items()} for i in (0, 4)]
    assert (halves[0]["labels"] >= 0).sum() == (halves[1]["labels"] >= 0).sum()
    found = gradients(Mesh(pp=ranks), batch, 8, "dual_pipe", False)
    first, second = (gradients(Mesh(), half, 4, None, False) for half in halves)
    for path, grad in found.items():
        assert torch.equal(grad, 0.5 * first[path] + 0.5 * second[path]), path


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_dual_pipe_is_exact(ranks, tied):
    """Two steps equal plain torch's; a tied table's gradient is (embed + embed') + head + head', which is no sum of halves."""
    found = train(compiled(Mesh(pp=ranks), "ddp", 8, 8, "dual_pipe", tied=tied), make_params(tied), 8)
    assert_close(found, reference(8, tied))


PASSES = [
    {"bucket_bytes": 0},
    {"bucket_bytes": 3000},
    {"prefetch_bytes": 1 << 20},
    {"bucket_bytes": 0, "prefetch_bytes": 6000},
    {"recompute": "full"},
    {"recompute": "selective", "bucket_bytes": 0},
]


@pytest.mark.parametrize("options", PASSES, ids=lambda options: "-".join(f"{k}={v}" for k, v in options.items()))
@pytest.mark.parametrize("name", ["one_f_one_b", "zb1p", "zbv"])
def test_passes_change_no_bit(name, options):
    """Joined or single gathers and reductions, early gathers, recomputation: the same bits as one stage without any of them."""
    program = compiled(Mesh(pp=2, fsdp=2), "zero3", 8, 4, name, tied=True, **options)
    found = train(program, make_params(True), 8)
    assert_same_bits(found, unpipelined((("fsdp", 2),), "zero3", 8, 4, True))


def split_backwards(table: Sequence[Sequence[Action]], late: bool) -> list[list[Action]]:
    """The table with every B as I and W: W at once, or all of them at the end."""
    out = []
    for own in table:
        new: list[Action] = []
        for action in own:
            halves = [Action(action.stage, "I", action.microbatch), Action(action.stage, "W", action.microbatch)]
            new += (halves[:1] if late else halves) if action.kind == "B" else [action]
        out.append(new + [Action(a.stage, "W", a.microbatch) for a in own if a.kind == "B"] if late else new)
    return out


@pytest.mark.parametrize("late", [False, True], ids=["fused", "split"])
def test_split_backwards_share_bits(late):
    """Halves of a backward that follow each other are run as one where nobody waits for the first; the bits are the same."""
    table = split_backwards(actions("one_f_one_b", num_ranks=4, num_microbatches=8), late)
    program = compiled(Mesh(pp=4), "ddp", 8, 8, Schedule(table=table))
    whole = sum(action.kind == "B" for own in program.schedule for action in own)
    assert (whole == 0) == late
    assert_same_bits(train(program, make_params(), 8), unpipelined())


def grid() -> list[tuple[dict[str, int], str, str]]:
    """Every (pp, dp, fsdp, tp) of 8 ranks with pp > 1, each ZeRO where fsdp shards something, SP where there is tp, and a
    schedule for each; pp = 8 has half of its stages empty."""
    out = []
    for pp, dp, fsdp in ((p, d, f) for p in (2, 4, 8) for d in (1, 2, 4) for f in (1, 2, 4) if 8 % (p * d * f) == 0):
        tp = 8 // (pp * dp * fsdp)
        for zero in ("ddp", "zero1", "zero2", "zero3") if fsdp > 1 else ("ddp", "zero2"):
            for stream in ("_tp", "_tp_sp") if tp > 1 else ("",):
                names = {2: ("interleaved", "zbv"), 4: ("one_f_one_b", "zb_h1"), 8: ("gpipe", "zb_h2")}[pp]
                sizes = {"pp": pp, "dp": dp, "fsdp": fsdp, "tp": tp}
                out += [(sizes, zero + stream, names[len(out) % 2])]
    return out


@pytest.mark.parametrize(
    ("sizes", "strategy", "name"), grid(), ids=lambda x: str(tuple(x.values())) if isinstance(x, dict) else x
)
def test_all_grids_of_eight_ranks(sizes, strategy, name):
    """On every mesh and ZeRO: the bits of the same mesh without pp, and plain torch's results, with 4 layers and a tied table."""
    schedule = Schedule(name, layout=(0, 1, 1, 0, 0, 1, 1, 0) if sizes["pp"] == 8 else None)
    program = compiled(Mesh(**sizes), strategy, 16, 4, schedule, tied=True, layers=4)
    assert program.facts.fallbacks == ()
    found = train(program, make_params(True, 4), 16)
    rest = tuple((axis, size) for axis, size in sizes.items() if axis != "pp")
    assert_same_bits(found, unpipelined(rest, strategy, 16, 4, True, 4))
    assert_close(found, reference(16, True, 4))


LAYOUTS = [
    (2, Schedule(layout="Ettttt|tttL")),
    (2, Schedule("zbv", layout="E|ttttt||tttL")),
    (4, Schedule(layout="E|t*4|t*4|L")),
    (4, Schedule(layout="Et*4||t*4|L")),
    (4, Schedule("zb_h1", layout=(0, 3, 0, 5))),
    (4, Schedule("zb_h1", layout=(3, 0, 5, 0))),
    (4, Schedule("gpipe", layout=(1, 2, 3, 2))),
    (4, Schedule("zbv", layout="E|(t|)*2|tt||tttt|L")),
    (2, Schedule("interleaved", layout="balance")),
    (4, Schedule("zb_h2", layout="balance")),
]


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize(
    ("ranks", "schedule"), LAYOUTS, ids=lambda x: f"{x.name}-{x.layout}" if isinstance(x, Schedule) else str(x)
)
def test_layouts_share_bits(ranks, schedule, tied):
    """Whichever layers a stage has, if any: the bits of one stage."""
    program = compiled(Mesh(pp=ranks), "ddp", 8, 8, schedule, tied=tied)
    assert_same_bits(train(program, make_params(tied), 8), unpipelined(tied=tied))


@pytest.mark.parametrize("name", ["one_f_one_b", "zb_h1", "dual_pipe"])
def test_stages_without_segments(name):
    """A stage in the middle that has nothing at all hands on what it gets."""
    program = compiled(Mesh(pp=4), "ddp", 8, 8, Schedule(name, layout=(4, 0, 0, 4)))
    assert all(step.op not in ("forward", "backward", "update") for step in program.parts[1].instructions) or name == "dual_pipe"
    found = train(program, make_params(), 8)
    assert_close(found, reference(8))
    if name != "dual_pipe":
        assert_same_bits(found, unpipelined())


class Stub:
    """What torch's schedules ask of a stage before they run it."""

    def __init__(self, ranks: int, stages: int):
        self.group_rank, self.group_size, self.num_stages, self.submod = 0, ranks, stages, None
        self.is_first, self.is_last, self.stage_index, self.has_backward = True, False, 0, True


def test_a_table_of_torch_runs(monkeypatch):
    """The computations of torch's own ZBV schedule, read from the CSV that it writes, give the bits of one stage."""
    monkeypatch.setattr(torch_schedules._PipelineScheduleRuntime, "_prepare_schedule_with_comms", lambda *_, **__: None)
    theirs = torch_schedules.ScheduleZBVZeroBubble([Stub(4, 8), Stub(4, 8)], 8)
    rows = [[action for action in theirs.pipeline_order[rank] if action is not None] for rank in range(4)]
    assert {action.computation_type.name for row in rows for action in row} >= {"FORWARD", "BACKWARD_INPUT", "BACKWARD_WEIGHT"}
    table = from_table("".join(",".join(map(str, row)) + "\n" for row in rows))
    program = compiled(Mesh(pp=4), "ddp", 8, 8, Schedule(table=table))
    assert_same_bits(train(program, make_params(), 8), unpipelined())


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize(("sizes", "strategy"), [({}, "ddp"), ({"fsdp": 2}, "zero3"), ({"tp": 2}, "tp_sp")], ids=str)
@pytest.mark.parametrize("name", ["one_f_one_b", "zbv", "interleaved", "dual_pipe", None])
def test_evaluation_is_the_first_loss_of_training(name, sizes, strategy, tied):
    """The loss of the forwards alone is that of the first training step, bit for bit, and the parameters stay as they are."""
    program = compile_eval(make_model(tied), Mesh(pp=2, **sizes), strategy, (8, S), num_microbatches=4, schedule=name)
    state, metrics = program.simulate(program.init_state(make_params(tied)), make_batch(8))
    expected = unpipelined(tuple(sizes.items()), strategy, 8, 4, tied).metrics[0]
    for key in ("loss", "microbatch_losses", "weight"):
        assert torch.equal(metrics[key], expected[key])
    for path, leaf in tree.leaves_with_path(make_params(tied)):
        assert torch.equal(state.leaves[f"params.{path}"], leaf)


def test_a_batch_where_nothing_counts():
    """Loss and gradients are 0, not NaN, on all ranks."""
    batch = make_batch(8) | {"labels": torch.full((8, S), -100)}
    program = compile_step(make_model(), RECORDED, Mesh(pp=4), "ddp", (8, S), num_microbatches=8, schedule="zb_h1")
    state, metrics = program.simulate(program.init_state(make_params()), batch)
    assert metrics["loss"] == 0 and metrics["grad_norm"] == 0
    assert all(not leaf.any() for path, leaf in state.leaves.items() if path.startswith("opt.g."))


def test_gradient_descent_is_exact():
    """With an optimizer that keeps the gradient: it and the step down are plain torch's, without a ratio of moments."""
    program = compile_step(make_model(True), RECORDED, Mesh(pp=4), "ddp", (8, S), num_microbatches=8, schedule="zbv")
    state, _ = program.simulate(program.init_state(make_params(True)), make_batch(8))
    leaves, structure = tree.flatten(make_params(True))
    leaves = [leaf.clone().requires_grad_() for leaf in leaves]
    grads = torch.autograd.grad(reference_loss(tree.unflatten(structure, leaves), make_batch(8)), leaves)
    for path, leaf, grad in zip(tree.paths(make_params(True)), leaves, grads, strict=True):
        testing.assert_close(state.leaves[f"opt.g.{path}"], grad, name=f"gradient of {path}")
        testing.assert_close(state.leaves[f"params.{path}"], leaf.detach() - LEARNING_RATE * grad, name=f"new {path}")


HALF_TABLE = actions("gpipe", num_ranks=2, num_microbatches=4)
ERRORS = [
    ({"pp": 4}, Schedule(layout=(2, 2, 2, 1)), ConfigError, ["8 layers", "7", "add 1"]),
    ({"pp": 4}, Schedule(layout=(4, 4)), ConfigError, ["4 stages", "2"]),
    ({"pp": 2}, Schedule(layout="Et*4|t*5L"), ConfigError, ["8 layers", "9", "remove 1"]),
    ({"pp": 2}, Schedule(layout="Et*4|t*4"), ConfigError, ["L"]),
    ({"pp": 4}, Schedule("dual_pipe"), ConfigError, ["4 microbatches", "2 * 4 ranks = 8"]),
    ({"pp": 4}, Schedule("dual_pipe_v"), ConfigError, ["4", "8"]),
    ({"pp": 4}, Schedule(table=HALF_TABLE), ConfigError, ["2 ranks", "pp=4"]),
    ({"pp": 2}, Schedule("gpipe", options={"extra_warmup": 1}), ConfigError, ["no option 'extra_warmup'", "none"]),
    ({"pp": 2}, Schedule("auto", options={"cap": 1}), ConfigError, ["cap", "cap_bytes"]),
    ({"pp": 2}, Schedule("interleaved", options={"group": 1}), ConfigError, ["no option 'group'", "group_size"]),
    ({"pp": 2}, Schedule("zbv", 3), ConfigError, ["3 chunks on 2 ranks are 6 stages", "4 in all"]),
    ({"pp": 2}, Schedule("1f1b"), UnknownNameError, ["'1f1b'", "one_f_one_b"]),
    ({"pp": 9}, Schedule(), ConfigError, ["8 layers", "9 stages", "1 empty"]),
    ({"pp": 2}, Schedule("auto", options={"placement": "spiral"}), ConfigError, ["loop or v", "spiral"]),
    ({"pp": 2}, Schedule("auto", 1, options={"placement": "v"}), ConfigError, ["a V needs two"]),
    ({"pp": 2}, Schedule("auto", 8), ConfigError, ["8 stages a rank", "8 layers for 16 stages"]),
    ({"pp": 2}, Schedule("forward_only"), ConfigError, ["forwards only", "compile_eval"]),
    ({"pp": 2}, Schedule(num_chunks=7, table=HALF_TABLE), ConfigError, ["num_chunks and options"]),
    ({"pp": 2}, Schedule("one_f_one_b", options={"extra_warmup": "x"}), ConfigError, ["extra_warmup='x'", "type"]),
    ({"pp": 2}, Schedule("interleaved", 2.0), ConfigError, ["num_chunks=2.0", "whole number"]),
]


@pytest.mark.parametrize(("sizes", "schedule", "error", "words"), ERRORS, ids=lambda x: str(x)[:60])
def test_mistakes_are_named(sizes, schedule, error, words):
    """What cannot be run is refused with the numbers that disagree."""
    with pytest.raises(error) as caught:
        compiled(Mesh(**sizes), "ddp", 4, 4, schedule)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_fewer_layers_than_stages_are_refused():
    """Two layers do not make three stages."""
    with pytest.raises(ConfigError, match=r"cannot spread 2 layers over 3 stages.*1 empty"):
        compiled(Mesh(pp=3), "ddp", 4, 4, layers=2)


def test_a_table_of_other_microbatches_is_refused():
    """A table of 4 microbatches does not train on 8: half of the batch would be left out."""
    with pytest.raises(ConfigError, match=r"4.*8|8.*4"):
        compiled(Mesh(pp=2), "ddp", 8, 8, Schedule(table=HALF_TABLE))


def test_rules_over_stages_are_refused():
    """No tensor is sharded by the axis that places stages; the rule is refused before anything is compiled."""
    wrong = dataclasses.replace(preset("ddp"), compute=preset("ddp").compute | {"batch": ("pp", "dp", "fsdp")})
    with pytest.raises(ShardingError, match="places stages"):
        compiled(Mesh(pp=2), wrong, 4, 2)
