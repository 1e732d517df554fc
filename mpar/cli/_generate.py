"""`mpar generate`: answers a prompt, a file of prompts, or the questions that are typed on the terminal."""

import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, cast

from mpar.cli._answering import ChoiceKeys, answer_problems, answering
from mpar.cli._answers_file import RESULTS, head_of, kept_answers, open_answers, write_answer
from mpar.cli._arguments import SWITCHES_HELP, read_arguments
from mpar.cli._compose import compose_config
from mpar.cli._later import later
from mpar.cli._local_model import local_folder
from mpar.cli._model_folder import model_folder
from mpar.cli._prompts import Prompt, read_prompts
from mpar.cli._screen import AnswerProgress, CompileNotes, say, say_aside
from mpar.cli._switches import answer_switches
from mpar.errors import ConfigError, DataError, UnknownNameError, brief, first_lines
from mpar.files import MAX_JSON_BYTES, Unreadable, read_json
from mpar.train import key

if TYPE_CHECKING:
    from mpar.infer import Answer, Assistant, Sampling  # which load torch
    from mpar.models import Model

__all__ = ["GenerateConfig", "chosen_sampling", "main"]

_HELP = f"""usage: mpar generate path=RUN_OR_HF_FOLDER [prompt='Who are you?'] [key=value] ...
       mpar generate path=RUN_OR_HF_FOLDER prompts=questions.jsonl out=answers.jsonl [resume=true]

Without a prompt it talks on the terminal: the model sees the whole conversation; /new begins another one; an empty line or the
end of input stops. A file of prompts has one in each line, or is .jsonl with objects that have a "prompt" or "messages", and an
"adapter", one of the names in adapters='{{french: FOLDER, sql: FOLDER}}'.

{SWITCHES_HELP}"""
_SHORTEST_S = 0.05  # a shorter time would be printed as 0.0 s
_FROM_FILE = "null: as generation_config.json of the model says, else "


@dataclass(frozen=True, kw_only=True)
class GenerateConfig(ChoiceKeys):
    """The keys of `mpar generate`."""

    path: str = key("an HF folder, or the run_dir of a run")
    prompt: str | None = key("the question, with any characters; null: ask on the terminal", default=None, prose=True)
    prompts: str | None = key("a file of prompts: .jsonl with `prompt` or `messages`, else one in each line", default=None)
    out: str | None = key("the file for the answers, .jsonl; null: they are printed", default=None)
    resume: bool = key("`out` may have answers, those to the first prompts: go on behind them", default=False)
    chat: bool = key("prompts are questions in the model's chat template; false: texts that it continues", default=True)
    system: str | None = key("the system message of each conversation", default=None, prose=True)
    chat_template_kwargs: dict[str, Any] = key(  # noqa: RUF009 (a field)
        "what the chat template reads besides the messages, such as {enable_thinking: false}", default_factory=dict
    )
    max_new_tokens: int = key("the most tokens of an answer", default=128, at_least=1)
    temperature: float | None = key(f"0 always takes the most likely token. {_FROM_FILE}0", default=None, at_least=0)
    top_k: int | None = key(f"only the k most likely tokens; 0: all. {_FROM_FILE}0", default=None, at_least=0)
    top_p: float | None = key(
        f"only the fewest tokens with this probability in total. {_FROM_FILE}1", default=None, above=0, at_most=1
    )
    min_p: float | None = key(
        f"only tokens with this share of the likeliest one's probability. {_FROM_FILE}0", default=None, at_least=0, at_most=1
    )
    repetition_penalty: float | None = key(f"divides the logits of tokens that came before. {_FROM_FILE}1", default=None, above=0)
    presence_penalty: float = key("is subtracted from logits of tokens in the answer", default=0.0, at_least=-2, at_most=2)
    frequency_penalty: float = key("the same, as often as they occur there", default=0.0, at_least=-2, at_most=2)
    schema: str | None = key("a file with a JSON Schema: answers are JSON as it says (the extra `grammar`)", default=None)
    stop: tuple[str, ...] = key("texts that end the answer", default=())
    num_answers: int = key("answers to each prompt, with draws of their own", default=1, at_least=1)
    logprobs: int | None = key(
        "write log-probabilities, and those of so many likeliest tokens, into `out`", default=None, at_least=0, at_most=20
    )
    seed: int = key("seed of the random draws of tokens", default=0, at_least=0, at_most=2**63 - 1)


def main(args: Sequence[str]) -> int:
    """Answer; returns the exit code."""
    arguments = read_arguments(args)
    if answer_switches(arguments, _HELP, "generate", GenerateConfig):
        return 0
    config, _ = compose_config("generate", GenerateConfig, arguments.overrides, arguments.user_dir)
    _check(config)
    folder = model_folder(Path(local_folder(config.path)))
    prompts = _prompts(config)
    count = len(prompts or [0]) * config.num_answers
    asked = [prompt for prompt in prompts or () for _ in range(config.num_answers)]
    num_done = 0 if config.out is None else kept_answers(Path(config.out), asked, resume=config.resume)
    if num_done == count:
        say_aside(f"{config.out} has all {count:,} answers")
        return 0
    notes = CompileNotes(shown=config.execution == "inductor")
    with answering(replace(config, rows=min(config.rows, count)), folder, notes) as (model, assistant):
        sampling = _sampling(config, model, folder)
        if prompts is None:
            _talk(config, assistant, sampling)
        elif config.prompts is None and config.num_answers == 1 and config.out is None:
            _stream(_begin(config, assistant, prompts[0], sampling), config, assistant)
        else:
            _answer_all(config, assistant, asked, num_done, sampling, notes)
    return 0


def _check(config: GenerateConfig) -> None:
    """Raise ConfigError for keys that do not go together, before anything is read."""
    problems = answer_problems(config)
    if config.prompt is not None and config.prompts is not None:
        problems.append("both prompt and prompts are given: leave one of them out")
    if config.out is not None and config.prompts is None and config.prompt is None:
        problems.append("out is for the answers to prompt or prompts: give one of them")
    if config.resume and config.out is None:
        problems.append("resume=true goes on with the file `out`: give it")
    if config.logprobs is not None and config.out is None:
        problems.append("logprobs are written into the file `out`: give it")
    if config.out is not None and not Path(config.out).absolute().parent.is_dir():
        problems.append(f"out={config.out}: there is no folder {Path(config.out).absolute().parent}")
    if config.out is not None and config.prompts is not None and _are_one_file(Path(config.out), Path(config.prompts)):
        problems.append(f"out={config.out} is the file of the prompts, which the answers would replace: give another name")
    if config.system is not None and not config.chat:
        problems.append("a system message needs chat=true")
    if config.chat_template_kwargs and not config.chat:
        problems.append("chat_template_kwargs need chat=true")
    if config.schema is not None:
        _read_schema(Path(config.schema))
    if "" in config.stop:
        problems.append("stop has an empty text, which would end every answer")
    if problems:
        raise ConfigError("cannot generate:\n  " + "\n  ".join(problems))


def _are_one_file(a: Path, b: Path) -> bool:
    return a.exists() and b.exists() and a.samefile(b)


def _prompts(config: GenerateConfig) -> list[Prompt] | None:
    """What is to be answered; None: what is typed on the terminal."""
    system = [] if config.system is None else [{"role": "system", "content": config.system}]
    if config.prompts is not None:
        prompts = read_prompts(Path(config.prompts), system, chat=config.chat)
        unknown = {brief(name) for prompt in prompts if (name := prompt.others.get("adapter")) not in (None, *config.adapters)}
        if unknown:
            raise UnknownNameError(
                f"cannot answer {config.prompts}: it names the adapters {', '.join(sorted(unknown))}; adapters= has "
                f"{', '.join(config.adapters) or 'none'}"
            )
        return prompts
    if config.prompt is None:
        return None
    return [Prompt(config.prompt, [*system, {"role": "user", "content": config.prompt}] if config.chat else None)]


def chosen_sampling(model: "Model", folder: Path, base: "Sampling", given: Mapping[str, float | None]) -> "Sampling":
    """`base` with the values that are given, else those of generation_config.json, which are said."""
    sampling, stated = later("mpar.infer").with_defaults(model, base, given)
    if stated:
        values = " ".join(f"{name}={value:g}" for name, value in stated.items())
        say_aside(f"{values}, as {folder / 'generation_config.json'} says")
    return sampling


def _read_schema(path: Path) -> str:
    """The JSON Schema in a file. Raises ConfigError if there is none."""
    try:
        return json.dumps(read_json(path, MAX_JSON_BYTES))
    except Unreadable as error:
        raise ConfigError(f"cannot read the schema {path}: {error}.") from None


def _sampling(config: GenerateConfig, model: "Model", folder: Path) -> "Sampling":
    """How tokens are chosen: by the keys of the command, else as the model's files say."""
    base = later("mpar.infer").Sampling(
        max_tokens=config.max_new_tokens,
        presence_penalty=config.presence_penalty,
        frequency_penalty=config.frequency_penalty,
        stop=config.stop,
        schema=None if config.schema is None else _read_schema(Path(config.schema)),
        seed=config.seed,
        num_alternatives=config.logprobs,
    )
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    return chosen_sampling(model, folder, base, {name: getattr(config, name) for name in names})


def _begin(
    config: GenerateConfig,
    assistant: "Assistant",
    prompt: Prompt,
    sampling: "Sampling",
    choice: int = 0,
    adapter: str | None = None,
) -> "Answer":
    if prompt.messages is None:
        return assistant.continue_text(prompt.text, sampling, choice, adapter)
    return assistant.reply(prompt.messages, sampling, choice, prompt.tools, adapter, config.chat_template_kwargs)


def _stream(answer: "Answer", config: GenerateConfig, assistant: "Assistant") -> str:
    """Print an answer; on a terminal, while it comes. Returns its text without white space around it."""
    shown = ""
    for _ in assistant.run():
        new = answer.take()
        if sys.stdout.isatty():
            new = new if shown else new.lstrip()
            print(new, end="", flush=True)
            shown += new
    say("" if sys.stdout.isatty() else answer.text.strip())
    _say_cut([answer], config, assistant)
    return answer.text.strip()


def _talk(config: GenerateConfig, assistant: "Assistant", sampling: "Sampling") -> None:
    """Answer what is typed, line by line. With chat=false each line is a text of its own."""
    sees = "The model sees the conversation; /new begins another." if config.chat else "Each line is continued by itself."
    say_aside(f"Type a question; an empty line or the end of input stops. {sees}")
    system = [] if config.system is None else [{"role": "system", "content": config.system}]
    messages = list(system)
    for line in sys.stdin:
        text = line.strip()
        if not text:
            break
        if text == "/new":
            messages = list(system)
            say_aside("A new conversation.")
            continue
        if config.chat:
            messages.append({"role": "user", "content": text})
        prompt = Prompt(text, messages if config.chat else None)
        try:
            answer = _begin(config, assistant, prompt, sampling)
        except (ConfigError, DataError) as error:
            again = " /new begins another conversation." if config.chat and len(messages) > len(system) + 1 else ""
            if not sys.stdin.isatty():
                raise type(error)(f"{error}{again}") from None
            say_aside(f"{error}{again}")
            messages = messages[:-1] if config.chat else messages
            continue
        said = _stream(answer, config, assistant)
        messages.append({"role": "assistant", "content": said})


def _answer_all(
    config: GenerateConfig,
    assistant: "Assistant",
    asked: Sequence[Prompt],
    num_done: int,
    sampling: "Sampling",
    notes: CompileNotes,
) -> None:
    """Give all answers but the first `num_done`, in their order; one is written once those before it are. asked: the prompt of
    each answer. The time that programs took to compile is said, and does not count as time of answers."""
    answers = _begin_all(config, assistant, asked, num_done, sampling)
    began, num_tokens, compiled_s = time.monotonic(), 0, notes.total_s
    waiting = list(zip(asked[num_done:], answers, strict=True))
    out = None if config.out is None else Path(config.out)
    with open_answers(out) as file, AnswerProgress(len(asked), shown=out is not None) as progress:
        try:
            for _ in assistant.run():
                num_tokens += 1
                while waiting and waiting[0][1].request.finish is not None:
                    _write(config, file, *waiting[0])
                    del waiting[0]
                progress(len(asked) - len(waiting), num_tokens)
        except BaseException:  # a signal, too
            if out is not None and out.is_file():
                count = out.read_bytes().count(b"\n")
                say_aside(f"{out} has the first {count:,} of {len(asked):,} answers; resume=true goes on with it")
            raise
    compiled_s = notes.total_s - compiled_s
    elapsed_s = time.monotonic() - began - compiled_s
    noun = "answer" if len(answers) == 1 else "answers"
    counted = f"{len(answers):,} {noun}, {num_tokens:,} tokens in {elapsed_s:.1f} s: {num_tokens / elapsed_s:,.0f} tokens/s"
    say_aside(counted + (f", and {compiled_s:.1f} s for compiling" if compiled_s >= _SHORTEST_S else ""))
    _say_cut(answers, config, assistant)


def _say_cut(answers: Sequence["Answer"], config: GenerateConfig, assistant: "Assistant") -> None:
    """Say how many answers have fewer tokens than were asked for because no more fit."""
    ended = [len(answer.request.answer) for answer in answers if answer.request.finish == "length"]
    cut, length = sum(count < config.max_new_tokens for count in ended), assistant.engine.runner.sizes.length
    if cut:
        which = "the answer" if len(answers) == 1 else f"{cut:,} of {len(answers):,} answers"
        say_aside(
            f"{which} ended before max_new_tokens={config.max_new_tokens:,}: prompt and answer fill the {length:,} tokens of a "
            "row (length=)"
        )


def _begin_all(
    config: GenerateConfig, assistant: "Assistant", asked: Sequence[Prompt], num_done: int, sampling: "Sampling"
) -> list["Answer"]:
    """The answers to all prompts but the first `num_done`, in their order. Raises DataError with the lines that cannot be
    answered."""
    answers: list[Answer] = []
    problems: dict[int, str] = {}
    for index, prompt in enumerate(asked[num_done:], num_done):
        adapter = cast("str | None", prompt.others.get("adapter"))  # `_prompts` has checked it
        try:
            answers.append(_begin(config, assistant, prompt, sampling, index % config.num_answers, adapter))
        except (ConfigError, DataError) as error:
            if config.prompts is None:
                raise
            problems[prompt.line] = f"line {prompt.line}: {error}"
    if problems:
        raise DataError(f"cannot answer {config.prompts}:\n  " + first_lines(list(problems.values())))
    return answers


def _write(config: GenerateConfig, file: BinaryIO | None, prompt: Prompt, answer: "Answer") -> None:
    """Write one answer: as a line of the file, or on the screen."""
    if file is None:
        say(answer.text.strip())
        return
    made: dict[str, object] = {"answer": answer.text, "finish": answer.request.finish}
    if config.logprobs is not None:
        made["tokens"] = [asdict(chosen) for chosen in answer.request.chosen]
    given = {name: value for name, value in prompt.others.items() if name in RESULTS}
    write_answer(file, {**head_of(prompt), **({"given": given} if given else {}), **made})
