"""Adapters by request: rows of unlike adapters in one step answer as the base with each merged, on every mesh."""

import dataclasses
from collections import Counter

import pytest
import torch

from mpar import Mesh, adapters, models, tree
from mpar.adapters import LoRA, bank_of
from mpar.errors import CheckpointError, ConfigError
from mpar.infer import Engine, RowRunner, Sampling, Sizes, Tables
from mpar.infer.compile import ProgramRunner, compile_decode
from mpar.models import CacheSizes
from mpar.quantised import quantise
from mpar.strategy import preset
from tests.infer.banks import LORAS, bank_params, merged_params
from tests.infer.simulated_runner import SimulatedRunner
from tests.models.variants import KINDS

SIZES = Sizes(rows=4, tokens=4, pages=40, page_size=4, length=40)
PROMPTS = [[1, 5, 2], [7, 9], [3, 9, 27, 11, 33, 29, 17, 51, 23, 8, 24, 2, 6, 18, 54, 39], [1, 5, 2], [1, 5, 2], [4] * 9]
EP, EP_BY_ROWS = (dataclasses.replace(preset(name), expert_parallel=2) for name in ("tp", "zero3"))
MESHES = {
    "tp": ({"tp": 2}, "tp", 1),
    "sp": ({"tp": 2}, "tp_sp", 1),
    "pp": ({"pp": 2}, "tp", 1),
    "cp": ({"cp": 2}, "ddp", 1),
    "dp": ({"dp": 2}, "ddp", 2),
    "zero3": ({"fsdp": 2, "tp": 2}, "zero3_tp", 2),
    "ep": ({"tp": 2}, EP, 1),
    "ep by rows": ({"fsdp": 2}, EP_BY_ROWS, 2),
}
ON_MESHES = [("llama", mesh) for mesh in MESHES if "ep" not in mesh] + [("qwen3_moe", "ep by rows"), ("deepseek_v3", "ep")]
ON_ONE = ["llama", "gpt2", "phi3", "gpt_oss", "mamba2"]


def make(kind, dtype=torch.float64, loras=LORAS):
    """A model, its parameters, and a bank with those adapters that fit it."""
    changes = {"initializer_range": 0.3, "tie_word_embeddings": False}
    model = models.build(kind, {**KINDS[kind].base, **changes}).with_dtype(dtype)
    fitting = {name: lora for name, lora in loras.items() if _fits(model, lora)}
    assert len(fitting) > 1
    return model, model.init(0), bank_of(model, fitting)


def _fits(model, lora):
    try:
        return bool(adapters.adapted_matrices(model, lora))
    except ConfigError:
        return False


def answers(runner, asked, count=5):
    """For each (prompt, adapter) the greedy answer, all at once, with the logits that chose it; and the engine."""
    step, logits = runner.step, {}

    def keep(tables):
        logits_RV = step(tables._replace(greedy_R=torch.zeros_like(tables.greedy_R)))  # all of them
        for request in engine.scheduler.running:
            if tables.last_R[request.row] >= 0:
                logits.setdefault(request, []).append(logits_RV[request.row])
        return logits_RV

    runner.step = keep
    engine = Engine(runner)
    requests = [engine.add(prompt, Sampling(max_tokens=count), adapter=adapter) for prompt, adapter in asked]
    list(engine.run())
    runner.step = step
    return [(request.answer, torch.stack(logits[request])) for request in requests], engine


def mixed(bank):
    """Each prompt with one of the adapters, or without."""
    names = [None, *bank.adapter_names]
    return [(prompt, names[index % len(names)]) for index, prompt in enumerate(PROMPTS)]


def compare(bank, params, runner, tolerance):
    """What the runner of the bank answers to all at once is what the whole forward of merged models gives in float64."""
    found, _ = answers(runner, mixed(bank))
    wide = tree.map_leaves(lambda leaf: leaf.double(), params)
    merged = {name: merged_params(bank, wide, name) for name in (None, *bank.adapter_names)}
    model = bank.base.with_dtype(torch.float64)
    for (prompt, name), (answer, logits_SV) in zip(mixed(bank), found, strict=True):
        expected_SV = model.apply(merged[name], torch.tensor([[*prompt, *answer[:-1]]]))[0, len(prompt) - 1 :]
        assert answer == expected_SV.argmax(-1).tolist(), f"{prompt} with {name}"
        at = torch.tensor(answer)[:, None]
        logprobs, expected = (x.log_softmax(-1).gather(1, at) for x in (logits_SV, expected_SV))
        assert (logprobs - expected).abs().max() < tolerance, f"{prompt} with {name}: {(logprobs - expected).abs().max():.1e}"
    assert len({tuple(answer) for answer, _ in found}) > 3


@pytest.mark.cases(2)
@pytest.mark.parametrize(("kind", "mesh"), ON_MESHES)
def test_a_mixed_batch_on_a_mesh(kind, mesh):
    """In float64, rows of several adapters in one step give the tokens of merged models, and log-probabilities to 1e-11."""
    _, params, bank = make(kind)
    axes, strategy, groups = MESHES[mesh]
    runner = SimulatedRunner(bank, bank_params(bank, params), dataclasses.replace(SIZES, groups=groups), Mesh(**axes), strategy)
    compare(bank, params, runner, 1e-11)


@pytest.mark.cases(2)
@pytest.mark.parametrize("kind", ON_ONE)
def test_a_mixed_batch_in_float32(kind):
    """On one rank, tokens of merged models and log-probabilities to 1e-5, whatever has adapters."""
    _, params, bank = make(kind, torch.float32)
    compare(bank, params, ProgramRunner(bank, bank_params(bank, params), SIZES), 1e-5)


def test_adapters_of_other_rows_add_nothing():
    """A row has the same bits whatever adapters others have and whatever these hold, and the same bits alone."""
    _, params, bank = make("llama", torch.float32)
    runner = ProgramRunner(bank, bank_params(bank, params), SIZES)
    pages, none = torch.arange(1, 37).view(4, 9).repeat(1, 2)[:, :10], torch.full((4,), -1)

    def step(adapters_R, tokens):
        last = none.clone()
        last[0] = 0
        rows = torch.arange(len(tokens))
        tables = Tables.of(torch.tensor(tokens), torch.zeros_like(rows), rows, pages, last)
        return runner.step(tables._replace(adapters_R=torch.tensor(adapters_R)))[0]

    for own in (0, 1, 3):
        mixed_V, other_V = step([own, 1, 2, 3], [5, 9, 9, 9]), step([own, 3, 1, 0], [5, 2, 3, 4])
        assert torch.equal(mixed_V, other_V)
        smallest = step([own, 0, 0, 0], [5])  # a program of another size
        assert (mixed_V - smallest).abs().max() < 1e-5
    plain = step([0, 1, 2, 3], [5, 9, 9, 9])
    assert not torch.equal(plain, mixed_V)
    held = {path.removeprefix("params."): x for path, x in runner.state.leaves.items() if path.startswith("params.")}
    runner.load({path: x * 3 if path in bank.leaves else x for path, x in held.items()})
    assert torch.equal(step([0, 1, 2, 3], [5, 9, 9, 9]), plain)
    assert not torch.equal(step([3, 1, 2, 3], [5, 9, 9, 9]), mixed_V)


def test_preemption_and_common_beginnings():
    """With too few pages for all, and with prompts that others have read, every request still has its own adapter."""
    _, params, bank = make("llama")
    runner = ProgramRunner(bank, bank_params(bank, params), dataclasses.replace(SIZES, pages=12))
    asked = [([4] * 9, name) for name in (None, *bank.adapter_names)] * 2
    found, engine = answers(runner, asked, count=9)
    assert engine.scheduler.num_preempted
    again = [engine.add(prompt, Sampling(max_tokens=1), adapter=name) for prompt, name in asked[:4]]
    list(engine.run())
    assert any(request.num_shared for request in again)
    alone = [answers(runner, [each], count=9)[0][0] for each in asked]
    for (answer, logits), (expected, expected_logits) in zip(found, alone, strict=True):
        assert answer == expected and (logits - expected_logits).abs().max() < 1e-11
    assert len({tuple(answer) for answer, _ in found}) == len(bank.adapter_names) + 1
    assert all(request.answer == expected[:1] for request, (expected, _) in zip(again, alone, strict=False))


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
def test_row_by_row(kind):
    """The runner without programs answers, and scores texts, with each adapter; so do programs score."""
    _, params, bank = make(kind)
    made = bank_params(bank, params)
    runner = RowRunner(bank, made, SIZES)
    compare(bank, params, runner, 1e-5)  # it gives logits in float32
    by_programs = ProgramRunner(bank, made, SIZES)
    text = torch.tensor(PROMPTS[2])
    for number, name in enumerate((None, *bank.adapter_names)):
        logits_SV = bank.base.apply(merged_params(bank, params, name), text[None, :-1])[0]
        expected_S = logits_SV.log_softmax(-1).gather(1, text[1:, None])[:, 0]
        for each in (runner, by_programs):
            (scores,) = each.scores([text], 1, number)
            assert (scores.logprobs_S - expected_S).abs().max() < 1e-5


def test_a_quantised_base():
    """Adapters are chosen beside a base of 8-bit codes, which programs and whole forwards dequantise alike."""
    _, params, bank = make("llama", torch.float32)
    model = quantise(bank, "int8")
    made = model.quantise_params(bank_params(bank, params))
    found, _ = answers(ProgramRunner(model, made, SIZES), mixed(bank))
    for (prompt, name), (answer, logits_SV) in zip(mixed(bank), found, strict=True):
        number = 0 if name is None else 1 + bank.adapter_names.index(name)
        tokens = torch.tensor([[*prompt, *answer[:-1]]])
        expected_SV = model.plain.apply(model.plain_params(made, number), tokens)[0, len(prompt) - 1 :]
        assert (logits_SV.log_softmax(-1) - expected_SV.log_softmax(-1)).abs().max() < 1e-4
        assert answer == expected_SV.argmax(-1).tolist()
    assert len({tuple(answer) for answer, _ in found}) > 3


def sent(model, axes, strategy, groups):
    """The messages of a decode step: the operation, its file and bytes."""
    program = compile_decode(model, Mesh(**axes), strategy, CacheSizes(8, 4, 4, 4, 16, groups))
    return Counter((use.op, use.line.partition(":")[0], use.bytes) for use in program.collectives(0) if "/" in use.line)


@pytest.mark.parametrize("strategy", ["tp", "tp_sp"])
def test_tensor_parallelism_sends_no_more(strategy):
    """No message of a layer is new or larger, whatever the number of adapters."""
    model, _, bank = make("llama", torch.float32)
    plain = sent(model, {"tp": 2}, strategy, 1)
    assert plain and sent(bank, {"tp": 2}, strategy, 1) == plain


def test_experts_on_other_ranks_are_sent_the_gates():
    """Beside the rows of tokens, those of their gates: as many bytes as the ranks of all adapters are of the hidden size."""
    model, _, _ = make("qwen3_moe", torch.float32)
    bank = bank_of(model, {"first": LoRA(rank=4), "second": LoRA(rank=2)})
    mesh = {"fsdp": 2}, EP_BY_ROWS, 2
    experts = [{key: n for key, n in sent(m, *mesh).items() if key[0] == "exchange_rows"} for m in (model, bank)]
    hidden, (size,) = KINDS["qwen3_moe"].base["hidden_size"], {key[2] for key in experts[0]}
    new = {key: n for key, n in experts[1].items() if key not in experts[0]}
    assert [key[2] for key in new] == [size * 6 // hidden] and len(experts[1]) == len(experts[0]) + 1


@pytest.mark.parametrize(
    ("lora", "why"),
    [
        (LoRA(dora=True), "has magnitudes"),
        (LoRA(modules_to_save=("lm_head",)), "trains lm_head in full"),
        (LoRA(bias="all"), "trains biases"),
        (LoRA(init="pissa"), "changes the weight where it begins"),
    ],
)
def test_what_cannot_be_chosen_is_refused(lora, why):
    """Whatever changes more than A and B give, with the adapter's name and the way out; and a bank without adapters."""
    model, _, _ = make("llama", torch.float32)
    with pytest.raises(ConfigError, match=rf"(?s)sql {why}.*Merge such an adapter") as error:
        bank_of(model, {"french": LoRA(), "sql": lora})
    assert "french" not in str(error.value)
    with pytest.raises(ConfigError, match="there is none"):
        bank_of(model, {})


def test_values_that_are_not_finite_are_refused(tmp_path):
    """Zero times infinity is no zero: the rows of others would not stay free of them. Both facts are in the message."""
    model, params, _ = make("llama", torch.float32)
    one = adapters.add(model, LoRA(init="random"))
    values = adapters.first_params(one, params, 1)
    path = "adapters.default.layers.1.attention.q_DNH.b"
    adapters.write_peft(one, values, tmp_path / "good")
    adapters.write_peft(one, tree.replace(values, path, torch.full_like(tree.get(values, path), torch.inf)), tmp_path / "bad")
    bank = bank_of(model, {"good": adapters.read_lora(tmp_path / "good"), "bad": adapters.read_lora(tmp_path / "bad")})
    with adapters.BankReader(bank, {"good": tmp_path / "good", "bad": tmp_path / "bad"}) as reader:
        joined = reader.read_leaf(path.replace("default", "bank").replace("layers.1", "layers.0"))
        once = tree.get(values, path.replace("layers.1", "layers.0"))
        assert torch.equal(joined, torch.cat([once, once], 0))
        with pytest.raises(ConfigError, match=f"adapter 'bad': {path} has values that are not finite"):
            reader.read_leaf(path.replace("default", "bank"))


def test_adapters_of_another_base_are_refused(tmp_path):
    """With what disagrees, before any value is read."""
    model, _, _ = make("llama", torch.float32)
    other = models.build("llama", {**KINDS["llama"].base, "hidden_size": 48})
    one = adapters.add(other, LoRA())
    adapters.write_peft(one, one.init(0), tmp_path / "other")
    bank = bank_of(model, {"other": adapters.read_lora(tmp_path / "other")})
    with pytest.raises(CheckpointError, match=r"(?s)other: it is not one of this llama model.*shape: "):
        adapters.BankReader(bank, {"other": tmp_path / "other"})
