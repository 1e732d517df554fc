"""Tasks of lm-evaluation-harness, scored by an assistant. Needs the package lm_eval, the extra `harness`."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from lm_eval import simple_evaluate, utils
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.tasks import TaskManager

from mpar.errors import ConfigError
from mpar.infer._assistant import Assistant
from mpar.infer._sampling import Sampling
from mpar.infer._tasks import Score

__all__ = ["HarnessModel", "score_harness"]

_MAX_TOKENS = 256  # of an answer whose task does not say it
_SAMPLED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


class HarnessModel(TemplateLM):
    """An assistant as a model of lm-evaluation-harness: it encodes, cuts and scores texts as the backend `hf` of that does."""

    def __init__(self, assistant: Assistant) -> None:
        super().__init__()
        self.assistant = assistant
        ids = (assistant.tokenizer.bos_id, assistant.tokenizer.eos_id)
        first = next((token for token in ids if token is not None), None)
        if first is None:
            raise ConfigError("cannot run the harness: the tokenizer has no token that begins or ends a text.")
        self._prefix = first

    @property
    def max_length(self) -> int:
        """The most tokens of a text."""
        return self.assistant.engine.runner.sizes.length

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text."""
        return self._prefix if self.assistant.tokenizer.eos_id is None else self.assistant.tokenizer.eos_id

    @property
    def prefix_token_id(self) -> int:
        """The token before a text that has no context."""
        return self._prefix

    @property
    def tokenizer_name(self) -> str:
        """What cached requests are kept under."""
        return self.assistant.tokenizer.fingerprint

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: object) -> list[int]:
        """The tokens of a text; unless told otherwise with special ones, if the text does not begin with the first of these."""
        tokenizer = self.assistant.tokenizer
        if add_special_tokens is None:
            add_special_tokens = not string.startswith(tokenizer.decode([self._prefix]))
        return tokenizer.encode(string, add_special_tokens=add_special_tokens)

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The text of a conversation."""
        return self.assistant.tokenizer.render_chat(chat_history, add_generation_prompt=add_generation_prompt)

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """An empty text: the template is the tokenizer's own."""
        return ""

    def loglikelihood_rolling(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[float]:
        """The log-probability of each text; long ones are cut into windows, whose tokens are each predicted once."""
        found = []
        for (text,) in (request.args for request in requests):
            windows = utils.get_rolling_token_windows(self.tok_encode(text), self._prefix, self.max_length, context_len=1)
            pairs = [utils.make_disjoint_window(window) for window in windows]
            found.append(sum(logprob for logprob, _ in self._loglikelihood_tokens([(("", ""), *pair) for pair in pairs])))
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), found[-1])
        return found

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        """The answers to all requests, which are made at the same time."""
        answers = []
        for context, settings in (request.args for request in requests):
            sampling = _sampling(settings)
            room = self.max_length - (sampling.max_tokens or _MAX_TOKENS)
            if room < 1:
                raise ConfigError(f"cannot answer with {sampling.max_tokens} tokens: there is room for {self.max_length}.")
            tokens = self.tok_encode(context)[-room:] or [self._prefix]
            answers.append(self.assistant.continue_tokens(tokens, sampling))
        for _ in self.assistant.run():
            pass
        for request, answer in zip(requests, answers, strict=True):
            self.cache_hook.add_partial("generate_until", request.args, answer.text)
        return [answer.text for answer in answers]

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[tuple[str, str], list[int], list[int]]], **kwargs: object
    ) -> list[tuple[float, bool]]:
        """For each (texts, context, tokens behind it) the log-probability of these tokens, and whether all are likeliest."""
        runner, found = self.assistant.engine.runner, []
        wholes = [torch.tensor([*context, *continuation][-self.max_length - 1 :]) for _, context, continuation in requests]
        for begin in range(0, len(wholes), runner.sizes.groups):
            together = wholes[begin : begin + runner.sizes.groups]
            for whole, scores, request in zip(together, runner.scores(together, 1), requests[begin:], strict=False):
                count = len(request[2])
                is_greedy = bool((scores.likeliest_SK[-count:, 0] == whole[-count:]).all())
                found.append((float(scores.logprobs_S[-count:].sum()), is_greedy))
                if request[0] != ("", ""):
                    self.cache_hook.add_partial("loglikelihood", request[0], found[-1])
        return found


def score_harness(
    assistant: Assistant, tasks: Sequence[str], *, num_fewshot: int | None = None, limit: int | None = None, chat: bool = False
) -> dict[str, list[Score]]:
    """The scores in tasks of lm-evaluation-harness: names of its own, or paths of YAML files that describe one.

    num_fewshot: examples before each question; None: as the task says. limit: only so many questions of each task.
    chat: questions are asked in the model's chat template. Raises ConfigError for a task that there is not.
    """
    files = [Path(task) for task in tasks if task.endswith((".yaml", ".yml"))]
    missing = [str(file) for file in files if not file.is_file()]
    named = [task for task in tasks if not task.endswith((".yaml", ".yml"))]
    manager = TaskManager(include_path=sorted({str(file.parent) for file in files}) or None, include_defaults=bool(named))
    missing += sorted(set(named) - set(manager.all_tasks))
    if missing:
        raise ConfigError(f"cannot run the harness: it has no tasks {', '.join(missing)}.")
    results = simple_evaluate(
        HarnessModel(assistant),
        tasks=[*named, *map(str, files)],
        num_fewshot=num_fewshot,
        limit=limit,
        apply_chat_template=chat,
        task_manager=manager,
        log_samples=False,
        bootstrap_iters=1000,
    )
    counts = results["n-samples"]
    return {task: _scores(found, counts.get(task, {}).get("effective", 0)) for task, found in results["results"].items()}


def _sampling(settings: Mapping[str, object]) -> Sampling:
    """How a request asks for tokens to be chosen."""
    until = settings.get("until") or ()
    stop = (until,) if isinstance(until, str) else tuple(until)  # type: ignore[arg-type]
    count = next((settings[name] for name in ("max_gen_toks", "max_tokens", "max_new_tokens") if name in settings), _MAX_TOKENS)
    draws = settings.get("do_sample", settings.get("temperature", 0) != 0)
    chosen = {name: settings[name] for name in _SAMPLED if settings.get(name) is not None} if draws else {}
    if draws:
        chosen.setdefault("temperature", 1.0)
    return Sampling(max_tokens=int(count), stop=tuple(text for text in stop if text), **chosen)  # type: ignore[arg-type,call-overload]


def _scores(found: Mapping[str, object], count: int) -> list[Score]:
    """The measures of one task; a filter that is not the usual one is part of the name."""
    scores = []
    for name, value in found.items():
        measure, _, chosen_by = name.partition(",")
        if measure.endswith("_stderr") or not isinstance(value, (int, float)) or not chosen_by:
            continue
        error = found.get(f"{measure}_stderr,{chosen_by}")
        label = measure if chosen_by == "none" else f"{measure} ({chosen_by})"
        scores.append(Score(label, float(value), count, float(error) if isinstance(error, (int, float)) else None))
    return scores
