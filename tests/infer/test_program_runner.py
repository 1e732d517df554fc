"""The runner by programs: greedy answers of transformers, many requests at once as each alone, and two real processes."""

import dataclasses
import json
import pathlib

import pytest
import torch
import transformers

from mpar import Mesh, models, tree
from mpar.chain import is_axes
from mpar.errors import ConfigError
from mpar.infer import Chosen, Engine, Sampling, Sizes, Tables, _packed_params
from mpar.infer.compile import ProgramRunner, divisible_pages
from mpar.ops import PackedMatrix
from mpar.strategy import preset
from mpar.testing import assert_close
from mpar.torch_private import onednn_packs
from tests.infer.runner_worker import MESHES, found_on
from tests.infer.simulated_runner import SimulatedRunner
from tests.kernels_in_cpp import needs_kernels
from tests.models.variants import KINDS, VARIANTS
from tests.processes import torchrun

SIZES = Sizes(rows=4, tokens=12, pages=40, page_size=4, length=48)
PROMPTS = [[1, 5, 2], [7], [3, 9, 27, 11, 33, 29, 17, 51, 23, 8, 24, 2, 6, 18, 54, 39], [4] * 9, [1, 5, 2, 44, 12], [60, 0]]
PROMPTS += [[8, 1, 30, 22, 59, 6, 6], [13, 40, 2, 35]]
COUNT = 10
PARALLEL = {
    "tp": ({"tp": 2}, "tp"),
    "pp": ({"pp": 2}, "tp"),
    "cp": ({"cp": 2}, "ddp"),
    "ep": ({"tp": 2}, dataclasses.replace(preset("tp"), expert_parallel=2)),
}
VARIANTS_RUN = [*KINDS, "gemma2_caps"]


def _model(variant: str) -> models.Model:
    kind, changes = VARIANTS.get(variant, (variant, {}))
    return models.build(kind, {**KINDS[kind].base, **changes, "initializer_range": 0.3, "tie_word_embeddings": False})


def _answers(runner: ProgramRunner, prompts: list[list[int]], count: int) -> list[list[Chosen]]:
    """Greedy answers to all prompts at once, with log-probabilities."""
    engine = Engine(runner)
    requests = [engine.add(prompt, Sampling(max_tokens=count, num_alternatives=0)) for prompt in prompts]
    for _ in engine.run():
        pass
    return [request.chosen for request in requests]


@pytest.mark.cases(1)
@pytest.mark.parametrize("variant", VARIANTS_RUN)
def test_greedy_equals_transformers(variant, tmp_path):
    """Eight prompts of unlike lengths at once in four slots, one of them read in two chunks: the tokens of each one alone, with
    log-probabilities in float32 to 1e-5 of those in float64, on one rank and on two of tp, pp, cp and of experts."""
    model = _model(variant)
    params = model.init(0)
    models.to_hf(model, params, tmp_path / "out")
    reference = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", experts_implementation="eager").double()
    expected = [_alone(reference, prompt) for prompt in PROMPTS]
    runners = {"one": ProgramRunner(model, params, SIZES)}
    meshes = {name: mesh for name, mesh in PARALLEL.items() if name != "ep" or _has_experts(model)}
    for name, (axes, strategy) in meshes.items():
        runners[name] = SimulatedRunner(model, params, SIZES, Mesh(**axes), strategy)
    for name, runner in runners.items():
        for prompt, answer, (tokens, logprobs) in zip(PROMPTS, _answers(runner, PROMPTS, COUNT), expected, strict=True):
            assert [chosen.token for chosen in answer] == tokens, f"{prompt} on {name}"
            differences = [abs(chosen.logprob - logprob) for chosen, logprob in zip(answer, logprobs, strict=True)]
            assert max(differences) < 1e-5, f"{prompt} on {name}: {max(differences):.1e}"
    assert len({token for tokens, _ in expected for token in tokens}) > 8


@pytest.mark.cases(1)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, when it loads its compiler
@pytest.mark.parametrize("variant", VARIANTS_RUN)
def test_inductor_gives_the_same_answers(variant):
    """Programs that Inductor compiled: the tokens of those that run as they are, with log-probabilities to 1e-5; the cache is
    still the memory that it was."""
    model = _model(variant)
    params, sizes = model.init(0), dataclasses.replace(SIZES, rows=2, tokens=4)
    runner = ProgramRunner(model, params, sizes, execution="inductor")
    cache = {path: leaf.data_ptr() for path, leaf in runner.state.leaves.items()}
    expected = _answers(ProgramRunner(model, params, sizes), PROMPTS[:4], 6)
    for prompt, answer, plain in zip(PROMPTS, _answers(runner, PROMPTS[:4], 6), expected, strict=False):
        assert [chosen.token for chosen in answer] == [chosen.token for chosen in plain], prompt
        assert max(abs(a.logprob - b.logprob) for a, b in zip(answer, plain, strict=True)) < 1e-5, prompt
    assert {path: leaf.data_ptr() for path, leaf in runner.state.leaves.items()} == cache


def _has_experts(model: models.Model) -> bool:
    axes = [names for _, names in tree.leaves_with_path(model.param_axes, is_leaf=is_axes)]
    return any("expert" in names for names in axes)


def _alone(reference: transformers.PreTrainedModel, prompt: list[int]) -> tuple[list[int], list[float]]:
    """The greedy answer of transformers to one prompt, and its log-probabilities."""
    tokens = torch.tensor([prompt])
    how = {"max_new_tokens": COUNT, "min_new_tokens": COUNT, "do_sample": False, "output_logits": True}
    given = reference.generate(tokens, attention_mask=torch.ones_like(tokens), return_dict_in_generate=True, **how)
    answer = given.sequences[0, len(prompt) :].tolist()
    return answer, [float(x[0].log_softmax(-1)[token]) for x, token in zip(given.logits, answer, strict=True)]


def test_logits_alone_and_beside_others():
    """A row beside others: the bits of the row alone in float32 at one compiled size; in other sizes to 1e-5."""
    model = _model("llama")
    params = model.init(0)
    pages = torch.arange(1, 37).view(4, 9).repeat(1, 2)[:, :12]
    row = torch.tensor((PROMPTS[4] * 2)[:9])
    last = torch.full((4,), -1)

    def step(runner: ProgramRunner, beside: bool) -> torch.Tensor:
        others = torch.tensor(PROMPTS[3][:3]) if beside else torch.empty(0, dtype=torch.int64)
        tokens, order = torch.cat([others, row]), torch.cat([torch.arange(len(others)), torch.arange(len(row))])
        rows, places = torch.tensor([1] * len(others) + [2] * len(row)), last.clone()
        places[2] = len(tokens) - 1
        return runner.step(Tables.of(tokens, order, rows, pages, places))[2].log_softmax(-1)

    runner = ProgramRunner(model, params, SIZES)
    alone, beside = step(runner, beside=False), step(runner, beside=True)
    assert torch.equal(alone, beside) and list(runner.programs) == [1, 12]
    smaller = step(ProgramRunner(model, params, dataclasses.replace(SIZES, tokens=10)), beside=False)
    assert (smaller - alone).abs().max() < 1e-5


@pytest.mark.parametrize("variant", ["qwen2", "deepseek_v3", "mamba2"])
def test_weights_in_bfloat16(variant):
    """However the runner packs weights, logits are those of the whole forward, but for the rounding of sums."""
    model = _model(variant).with_dtype(torch.bfloat16)
    params = model.init(0)
    runner, row = ProgramRunner(model, params, SIZES), torch.tensor(PROMPTS[4])
    pages, last = torch.arange(1, 13).expand(4, 12), torch.tensor([len(row) - 1, -1, -1, -1])
    given = runner.step(Tables.of(row, torch.arange(len(row)), torch.zeros_like(row), pages, last))[0]
    expected = model.apply(params, row[None])[0, -1]
    assert float((given.double() - expected.double()).norm() / expected.double().norm()) < 0.02


def test_what_is_refused():
    """Rows longer than the learned positions, also when they are padded for ranks that divide them."""
    model = _model("gpt2")
    with pytest.raises(ConfigError, match=r"up to 64 tokens among 3 ranks: the model has learned 64(.|\n)*Use length=63"):
        ProgramRunner(model, model.init(0), Sizes(rows=2, tokens=4, pages=42, page_size=4, length=64), Mesh(cp=3), "ddp")
    with pytest.raises(ConfigError, match="with up to 65 tokens in a row: this model has learned 64 positions"):
        ProgramRunner(model, model.init(0), Sizes(rows=2, tokens=4, pages=40, page_size=4, length=65))


@pytest.mark.parametrize(("axes", "expected"), [({"tp": 2}, 33), ({"cp": 2}, 34), ({"cp": 3, "tp": 2}, 33), ({"cp": 8}, 40)])
def test_pages_are_divided_evenly(axes, expected):
    """As few more pages as the ranks of cp need."""
    assert divisible_pages(33, Mesh(**axes), "ddp" if "tp" not in axes else "tp") == expected


@pytest.mark.gloo
def test_two_processes_give_the_same_answers(tmp_path):
    """Two ranks of tp, pp, fsdp and cp, each with an engine of its own: both have the answers and the scores of one process."""
    done = torchrun(pathlib.Path(__file__).with_name("runner_worker.py"), str(tmp_path), num_ranks=2)
    assert done.returncode == 0, done.stderr[-3000:]
    answers, logprobs = found_on()
    for name in MESHES:
        for rank in range(2):
            found = json.loads((tmp_path / f"{name}{rank}.json").read_text())
            assert found[0] == answers
            for one, expected in zip(found[1], logprobs, strict=True):
                assert_close(torch.tensor(one), torch.tensor(expected), name=f"{name}{rank}")


@pytest.mark.parametrize("variant", ["deepseek_v3", "gpt2", "mamba2", "mixtral", "qwen2"])
def test_steps_read_packed_matrices_only_by_products(variant, monkeypatch):
    """In bfloat16, without kernels in C++, the matrices are packed; no step puts one together again, and other parameters are
    packed when they come."""
    if not onednn_packs(torch.bfloat16):
        return  # this machine keeps plain weights, which test_greedy_equals_transformers covers
    monkeypatch.setattr(_packed_params, "few_rows_read_columns", lambda dtype: False)
    model = _model(variant).with_dtype(torch.bfloat16)
    runner = ProgramRunner(model, model.init(0), SIZES)
    others = {path: leaf for path, leaf in tree.leaves_with_path(dataclasses.replace(model.init(1), mtp=None))}
    fresh = [chosen.token for chosen in _answers(ProgramRunner(model, model.init(1), SIZES), PROMPTS[:1], 4)[0]]
    count = sum(isinstance(leaf, PackedMatrix) for leaf in runner.state.leaves.values())
    assert count >= 2 * len([segment for segment in model.segments if segment.name.startswith("layers")])
    monkeypatch.setattr(PackedMatrix, "blocks_as_plain", lambda self: pytest.fail("a step put a matrix together"))
    runner.load(others)
    assert sum(isinstance(leaf, PackedMatrix) for leaf in runner.state.leaves.values()) == count
    assert [chosen.token for chosen in _answers(runner, PROMPTS[:1], 4)[0]] == fresh


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("variant", ["deepseek_v3", "gpt2", "mamba2", "mixtral", "qwen2"])
def test_matrices_lie_by_columns(variant, dtype):
    """The first ones and those of bfloat16 that come later, as plain tensors with the same values; others stay where they are."""
    model = _model(variant).with_dtype(dtype)
    runner = ProgramRunner(model, model.init(0), SIZES)
    others = {path: leaf for path, leaf in tree.leaves_with_path(dataclasses.replace(model.init(1), mtp=None))}
    fresh = [chosen.token for chosen in _answers(ProgramRunner(model, model.init(1), SIZES), PROMPTS[:1], 4)[0]]
    laid = {path for path, leaf in runner.state.leaves.items() if path.startswith("params.") and not leaf.is_contiguous()}
    assert len(laid) >= 2 * len([segment for segment in model.segments if segment.name.startswith("layers")])
    runner.load(others)
    laid_anew = {path for path in laid if not runner.state.leaves[path].is_contiguous()}
    assert laid_anew == (laid if dtype == torch.bfloat16 else set())
    assert all(type(leaf) is torch.Tensor for leaf in runner.state.leaves.values())
    assert all(torch.equal(runner.state.leaves[f"params.{path}"], leaf) for path, leaf in others.items())
    assert [chosen.token for chosen in _answers(runner, PROMPTS[:1], 4)[0]] == fresh
