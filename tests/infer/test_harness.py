"""lm-evaluation-harness on tasks of its own format: mpar, mpar's server and the harness's backend `hf` find the same numbers."""

import json

import pytest
import torch
from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager

from mpar import models
from mpar.data import Tokenizer
from mpar.errors import ConfigError
from mpar.infer import Assistant, Sizes
from mpar.infer.compile import make_runner
from mpar.infer.harness import HarnessModel, score_harness
from tests.cli.test_generate import folder
from tests.serve.conftest import serving

__all__ = ["folder"]

TASKS = {
    "choices": """
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: answer
metric_list: [{metric: acc}, {metric: acc_norm}]
""",
    "texts": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{question}}"
metric_list: [{metric: word_perplexity}, {metric: bits_per_byte}]
""",
    "answers": """
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{written}}"
generation_kwargs: {until: ["\\n", "."], max_gen_toks: 12, do_sample: false}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
""",
}


@pytest.fixture(scope="module")
def assistant(folder):
    """The model in the folder, with texts of up to 128 tokens."""
    model, params = models.from_hf(folder, dtype=torch.float32)
    sizes = Sizes(rows=8, tokens=128, length=128, pages=65, page_size=16)
    return Assistant(make_runner(model, params, sizes), Tokenizer.from_folder(folder))


@pytest.fixture(scope="module")
def tasks(assistant, tmp_path_factory):
    """The files of three tasks. Of the eight questions of one, three have the answer that the model writes."""
    place = tmp_path_factory.mktemp("tasks")
    rows = []
    for n in range(8):
        question = f"Question number {n} is about {'trees ' * (n % 3)}{'and clouds' * (n % 2)}:" + " x" * (40 if n == 7 else 0)
        rows.append({"question": question, "choices": [" yes", " no", " maybe so"], "answer": n % 3})
    request = {"until": ["\n", "."], "max_gen_toks": 12}
    instances = [type("Asked", (), {"args": (row["question"], request)}) for row in rows]
    for n, text in enumerate(HarnessModel(assistant).generate_until(instances)):
        rows[n]["written"] = text if n < 3 else "other"
    (place / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    head = f"dataset_path: json\ndataset_kwargs: {{data_files: {{test: {place}/rows.jsonl}}}}\ntest_split: test\n"
    for name, body in TASKS.items():
        (place / f"{name}.yaml").write_text(f"task: {name}\n{head}{body}")
    return [str(place / f"{name}.yaml") for name in TASKS]


def measured(results: dict) -> dict[tuple[str, str], float]:
    """The numbers of a result of the harness."""
    return {
        (task, name.partition(",")[0]): value
        for task, found in results["results"].items()
        for name, value in found.items()
        if isinstance(value, float) and "stderr" not in name and "," in name
    }


@pytest.mark.full("a model is loaded by transformers, and a server is asked")
@pytest.mark.filterwarnings("ignore")  # those of the harness and of what it imports
def test_three_ways_find_the_same_numbers(folder, assistant, tasks):
    """Scores of choices, texts and answers: directly, over HTTP with the prompt's log-probabilities, and by transformers."""
    scores = score_harness(assistant, tasks)
    ours = {(task, score.name): score.value for task, found in scores.items() for score in found}
    assert ours["answers", "exact_match"] >= 3 / 8 and 0 < ours["choices", "acc"] < 1
    manager = TaskManager(include_path=str(tasks[0]).rpartition("/")[0], include_defaults=False)
    how = {"tasks": tasks, "task_manager": manager, "log_samples": False, "bootstrap_iters": 2}
    by_hf = simple_evaluate(
        "hf", {"pretrained": str(folder), "dtype": "float32", "max_length": 128, "backend": "causal"}, device="cpu", **how
    )
    with serving(assistant.engine.runner) as (address, _):
        arguments = {
            "model": "tiny",
            "base_url": f"{address}/v1/completions",
            "tokenizer": str(folder),
            "tokenizer_backend": "huggingface",
            "max_length": 128,
        }
        by_server = simple_evaluate("local-completions", arguments, **how)
    for others in (measured(by_hf), measured(by_server)):
        assert others.keys() == ours.keys()
        for name, value in others.items():
            assert value == pytest.approx(ours[name], rel=1e-5), name


def test_windows_predict_each_token_once(folder, assistant):
    """A text longer than twice what the model reads: the sum over its windows is that of its tokens behind what they may see."""
    model, params = models.from_hf(folder, dtype=torch.float32)
    text = "".join(chr(97 + n % 26) for n in range(300))
    (found,) = HarnessModel(assistant).loglikelihood_rolling([type("Asked", (), {"args": (text,)})])
    tokens = torch.tensor([HarnessModel(assistant).prefix_token_id, *text.encode()])
    expected, length = 0.0, 128
    for begin in (0, length, len(tokens) - 1 - length):
        window = tokens[begin : begin + length + 1]
        logprobs_SV = model.apply(params, window[None, :-1])[0].log_softmax(-1)
        logprobs_S = logprobs_SV.gather(1, window[1:, None])[:, 0]
        done = 2 * length - begin if begin not in (0, length) else 0
        expected += float(logprobs_S[done:].sum())
    assert found == pytest.approx(expected, rel=1e-5)


def test_unknown_tasks_are_refused(assistant):
    """Files that are not there, by their names."""
    with pytest.raises(ConfigError, match="it has no tasks /nowhere"):
        score_harness(assistant, ["/nowhere.yaml"])
