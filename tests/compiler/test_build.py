"""What a compiled step looks like: sizes that do not grow, passes, verification, the text."""

import dataclasses
import time

import pytest
import torch

from mpar import models
from mpar.compiler import RecomputePolicy
from mpar.compiler.build._order import hoist_gathers
from mpar.errors import ConfigError, ProgramError, ShapeError, ShardingError, UnknownNameError
from mpar.ir import Instruction, Value
from mpar.mesh import Mesh
from mpar.optim import AdamW
from mpar.precision import Precision
from mpar.program import State
from mpar.program.compile import compile_step
from mpar.spec import P
from mpar.strategy import preset

OPTIMIZER = AdamW(lr=1e-3)
LLAMA_405B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 16384,
    "intermediate_size": 53248,
    "num_attention_heads": 128,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
}


def llama_405b(num_layers, fsdp):
    """The program of Llama 3 405B with some layers on fsdp x 8 ranks, one sequence a data rank."""
    model = models.from_config({**LLAMA_405B, "num_hidden_layers": num_layers})
    return compile_step(
        model, OPTIMIZER, Mesh(fsdp=fsdp, tp=8), "zero3_tp", (fsdp, 8192), precision="bf16", recompute="selective"
    )


def nodes(program):
    """Nodes of each kind of segment."""
    return {name: kind.num_nodes for name, kind in program.kinds.items() if name != "all squares"}


def test_graphs_do_not_grow_with_the_mesh():
    """A rank's graphs have the same nodes on 16 and on 16,384 ranks."""
    assert nodes(llama_405b(2, 2)) == nodes(llama_405b(2, 2048))


def test_kinds_do_not_grow_with_depth():
    """126 layers are compiled once: the same kinds as 2 layers, and one instruction more per layer and role."""
    shallow, deep = llama_405b(2, 64), llama_405b(126, 64)
    assert nodes(shallow) == nodes(deep)
    per_layer = (len(deep.instructions) - len(shallow.instructions)) / 124
    assert per_layer == 7  # gather, forward, gather, backward, reduce, squares, update


def test_16384_ranks_on_a_laptop():
    """The program of 405B on 16,384 ranks is built and proved in seconds (bar: 20 s on 2 cores)."""
    start = time.monotonic()
    program = llama_405b(126, 2048)
    program.verify()
    assert program.mesh.size == 16384 and program.predict().peak_bytes > 0
    assert time.monotonic() - start < 20


@pytest.fixture
def program(make_model):
    """A step of two microbatches on fsdp x tp."""
    return compile_step(make_model(), OPTIMIZER, Mesh(fsdp=2, tp=2), "zero3_tp_sp", (8, 8), num_microbatches=2, bucket_bytes=0)


def test_prefetch_moves_gathers_only(make_model, make_state, batch, program):
    """Hoisted gathers keep their order and every bit of the result; the peak grows by at most what they make."""
    options = {"num_microbatches": 2, "bucket_bytes": 0, "prefetch_bytes": 2**20}
    early = compile_step(make_model(), OPTIMIZER, Mesh(fsdp=2, tp=2), "zero3_tp_sp", (8, 8), **options)
    order = [(s.op, s.segment, s.microbatch) for s in program.instructions]
    assert [(s.op, s.segment, s.microbatch) for s in early.instructions] != order
    assert [s.segment for s in early.instructions if s.op == "gather"] == [
        s.segment for s in program.instructions if s.op == "gather"
    ]
    state = make_state(make_model())
    (a, _), (b, _) = program.simulate(state, batch), early.simulate(state, batch)
    assert all(torch.equal(a.leaves[path], b.leaves[path]) for path in a.leaves)
    assert program.predict().peak_bytes <= early.predict().peak_bytes


def test_hoist_on_a_printed_program():
    """Each gather stands before the first reader of the one before it, if there is room on the lines that it passes."""
    value = [Value(f"v{i}", (1,), torch.float32, P(), i) for i in range(8)]

    def step(op, inputs, outputs):
        return Instruction(op, op, inputs, outputs)

    before = [step("gather", (0,), (3,)), step("forward", (3,), (4,)), step("gather", (1,), (5,)), step("forward", (5, 4), (6,))]
    assert [s.outputs[0] for s in hoist_gathers(before, value, [4] * 4)] == [3, 5, 4, 6]
    assert [s.outputs[0] for s in hoist_gathers(before, value, [4, 3, 4, 4])] == [3, 4, 5, 6]
    assert [s.outputs[0] for s in hoist_gathers(before, value, [3, 4, 3, 3])] == [3, 5, 4, 6]


def test_hoist_keeps_the_order_of_gathers():
    """Two gathers that one segment reads are issued early together if there is room for both, else the first of them alone."""
    value = [Value(f"v{i}", (1,), torch.float32, P(), i) for i in range(8)]
    before = [
        ("gather", (0,), (3,)),
        ("forward", (3,), (4,)),
        ("gather", (1,), (5,)),
        ("gather", (2,), (6,)),
        ("forward", (5, 6), (7,)),
    ]
    before = [Instruction(op, op, inputs, outputs) for op, inputs, outputs in before]
    assert [step.outputs[0] for step in hoist_gathers(before, value, [8] * 5)] == [3, 5, 6, 4, 7]
    assert [step.outputs[0] for step in hoist_gathers(before, value, [4] * 5)] == [3, 5, 4, 6, 7]


def test_parameters_are_cast_one_by_one(make_model, make_state, batch):
    """Two layers with the same dtypes in another order are gathered by code of their own, each parameter in its dtype."""
    model = make_model(torch.float32, model_type="qwen3", architectures=["Qwen3ForCausalLM"])
    wide = ("layers.0.attention.q_norm_H", "layers.1.attention.k_norm_H")
    table = Precision(torch.bfloat16, table=tuple((path, torch.float32) for path in wide))
    program = compile_step(model, OPTIMIZER, Mesh(fsdp=2), "zero3", (8, 8), precision=table, bucket_bytes=0)
    gathered = {program.values[v] for step in program.instructions if step.op == "gather" for v in step.outputs}
    assert {v.name for v in gathered if v.dtype == torch.float32} == {f"w {path}" for path in wide}
    assert program.simulate(make_state(model), batch)[1]["loss"].isfinite()


def test_what_does_not_fit_is_refused(make_model, make_state, batch, program):
    """A batch with a key too many, rows too many or another dtype, and a state of another model or of the past: an error each."""
    state = make_state(make_model())
    for wrong, what in [
        ({"documents": batch["tokens"]}, "'documents' is not read by the program"),
        ({"labels": batch["labels"].int()}, "'labels' is torch.int32"),
        ({key: value.repeat(2, 1) for key, value in batch.items()}, r"'tokens' is torch.int64 \(16, 8\)"),
    ]:
        with pytest.raises(ShapeError, match=what):
            program.simulate(state, batch | wrong)
    with pytest.raises(ShapeError, match=r"layers.1.mlp.up_DF' is torch.float32"):
        program.simulate(make_state(make_model(torch.float32)), batch)
    with pytest.raises(ShapeError, match="is missing"):
        program.simulate(make_state(make_model(num_hidden_layers=1)), batch)
    with pytest.raises(ShapeError, match="given to a step already"):
        program.simulate(State({}), batch)


def test_a_refused_step_leaves_the_state(make_model, make_state, batch):
    """After an error about the batch the state can be used; after a step it cannot."""
    run = compile_step(make_model(), OPTIMIZER, Mesh(dp=1), "ddp", (8, 8)).bind()
    state = make_state(make_model())
    with pytest.raises(ShapeError, match="'labels' is missing"):
        run(state, {"tokens": batch["tokens"]})
    run(state, batch)
    with pytest.raises(ShapeError, match="given to a step already"):
        run(state, batch)


def test_bind_refuses_unknown_words(make_model):
    """An order or a transport that does not exist, or that another argument rules out, is not passed over."""
    program = compile_step(make_model(), OPTIMIZER, Mesh(dp=1), "ddp", (8, 8))
    with pytest.raises(UnknownNameError, match="rank and library"):
        program.bind(order="ring")
    with pytest.raises(UnknownNameError, match="shared and backend"):
        program.bind(transport="shm")
    with pytest.raises(ConfigError, match="in rank order"):
        program.bind(order="library", transport="shared")


def with_instructions(program, steps):
    """A copy of a program of one part with other instructions."""
    return dataclasses.replace(program, parts=[dataclasses.replace(program.parts[0], instructions=steps)])


def mutate(program, line, **changes):
    """A copy of the program with one instruction changed."""
    steps = list(program.instructions)
    steps[line] = dataclasses.replace(steps[line], **changes)
    return with_instructions(program, steps)


def line_of(program, op, n=0):
    """The line of the n-th instruction of a kind."""
    return [i for i, s in enumerate(program.instructions) if s.op == op][n]


@pytest.mark.parametrize("op", ["forward", "backward", "gather", "reduce", "accumulate", "norm", "update", "finish", "context"])
def test_verifier_rejects_a_missing_instruction(op, program):
    """Without any one of its instructions a program reads what nothing makes, or leaks."""
    steps = list(program.instructions)
    del steps[line_of(program, op)]
    with pytest.raises(ProgramError):
        with_instructions(program, steps).verify()


def test_verifier_rejects_use_after_free(program):
    """A value freed too early is named with the line that reads it."""
    line = line_of(program, "forward", 1)
    early = mutate(program, line, frees=(*program.instructions[line].frees, program.batch[0].value))
    with pytest.raises(ProgramError, match=r"which was freed|are missing"):
        early.verify()


def test_verifier_rejects_a_leak(program):
    """A value that is not freed is named at the end."""
    line = line_of(program, "backward")
    with pytest.raises(ProgramError, match="never freed"):
        mutate(program, line, frees=program.instructions[line].frees[1:]).verify()


def test_verifier_rejects_a_gradient_counted_twice(program):
    """Adding a microbatch's gradient to itself passes lifetimes and shapes, not the count of contributions."""
    line = next(i for i, s in enumerate(program.instructions) if s.op == "accumulate" and "layers" in s.segment)
    step = program.instructions[line]
    half = len(step.inputs) // 2
    with pytest.raises(ProgramError, match="lacks the contributions"):
        mutate(program, line, inputs=step.inputs[half:] * 2, frees=(*step.frees,)).verify()


def test_verifier_rejects_swapped_operands(program):
    """Operands of other shapes than the segment was compiled for are named."""
    line = line_of(program, "forward", 1)
    with pytest.raises(ProgramError, match="its segment has"):
        mutate(program, line, inputs=program.instructions[line].inputs[::-1]).verify()


def test_text_shows_every_instruction(program):
    """One line each after the head, with rank, coordinates and the predicted peak."""
    lines = program.text(rank=3).splitlines()
    assert lines[0].startswith("rank 3 of 4 (fsdp=1 tp=1)   peak")
    assert len(lines) == 1 + len(program.instructions)
    assert "reduce_scatter fsdp" in program.text()


@pytest.mark.parametrize("reduce", ["each", "last"])
def test_gradients_are_added_up_in_the_wide_dtype(reduce, make_model):
    """Computing in bf16, gradients leave backward as pending sums in bf16; they are accumulated and reduced in float32."""
    strategy = dataclasses.replace(preset("zero2"), reduce=reduce)
    options = {"num_microbatches": 2, "precision": "bf16"}
    program = compile_step(make_model(torch.float32), OPTIMIZER, Mesh(fsdp=2), strategy, (8, 8), **options)
    given = [program.values[v] for v in program.parts[0].contributions]
    assert {value.dtype for value in given} == {torch.bfloat16}
    assert all("fsdp" in value.spec.partial for value in given)
    sums = [line.outputs for line in program.instructions if line.op == "accumulate" and "head" in line.segment]
    assert {program.values[v].dtype for outputs in sums for v in outputs} == {torch.float32}
    (use,) = next(k for name, k in program.kinds.items() if name.startswith("reduce")).collectives
    assert use.bytes == sum(value.bytes for value in given)  # of one microbatch of two, 4 bytes an element


def test_a_batch_in_which_nothing_counts(make_model, make_state, batch):
    """Loss and gradients are 0 and nothing becomes NaN, so that one bad batch costs a step and no run."""
    model = make_model()
    program = compile_step(model, OPTIMIZER, Mesh(dp=2), "ddp", (8, 8), num_microbatches=2)
    state, metrics = program.simulate(make_state(model), {**batch, "labels": torch.full((8, 8), -100)})
    assert metrics["loss"] == metrics["grad_norm"] == metrics["weight"] == 0
    assert all(x.isfinite().all() for x in state.leaves.values())


def test_profiles_have_names(program):
    """Every profile of conf/hardware predicts a time; a faster machine needs less; unknown ones are refused with the list."""
    times = {name: program.predict(name).step_s for name in ("cpu", "h100_dgx", "h200")}
    assert times["cpu"] > times["h100_dgx"] >= times["h200"] > 0
    assert "predicted on h200" in program.text(on="h200")
    with pytest.raises(UnknownNameError, match="cpu, h100_500w, h100_dgx, h200"):
        program.predict("h300")


def test_errors_say_what_disagrees(make_model):
    """Sizes, names and features that are not there: an error each, before anything is compiled."""
    model = make_model()
    with pytest.raises(ShapeError, match="into 3 equal microbatches"):
        compile_step(model, OPTIMIZER, Mesh(dp=1), "ddp", (8, 8), num_microbatches=3)
    for shape in ((), (8, 0), (8,)):
        with pytest.raises(ShapeError, match="must be"):
            compile_step(model, OPTIMIZER, Mesh(dp=1), "ddp", shape)
    with pytest.raises(UnknownNameError, match="zero3_tp_sp"):
        compile_step(model, OPTIMIZER, Mesh(dp=1), "zero5", (8, 8))
    with pytest.raises(UnknownNameError, match="none, full, selective, budget"):
        compile_step(model, OPTIMIZER, Mesh(dp=1), "ddp", (8, 8), recompute="some")
    names = frozenset({"mlp_act", "all_gather", "swiglu", "mlp_atc"})
    with pytest.raises(UnknownNameError, match=r"compute mlp_atc again(?s:.*)The labels of this model are .*mlp_act"):
        compile_step(model, OPTIMIZER, Mesh(dp=1), "ddp", (8, 8), recompute=RecomputePolicy("selective", names))
    with pytest.raises(ConfigError, match="2 layers for 8 stages"):
        compile_step(model, OPTIMIZER, Mesh(pp=8), "ddp", (8, 8))
    with pytest.raises(UnknownNameError, match="interleaved"):
        compile_step(model, OPTIMIZER, Mesh(pp=2), "ddp", (8, 8), schedule="interleave")
    with pytest.raises(ShardingError) as error:
        compile_step(model, OPTIMIZER, Mesh(dp=3, tp=5), "tp", (8, 8))
    assert "parameter layers.*.mlp.gate_DF" in str(error.value) and "batch 'tokens'" in str(error.value)
