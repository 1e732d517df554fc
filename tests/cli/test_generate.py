"""`mpar generate`: prompts from the command line, from files and from the terminal."""

import io
import json
import shutil

import pytest
import torch

from mpar import adapters, models
from mpar.adapters import LoRA
from mpar.cli import _generate
from mpar.cli.main import main
from mpar.data import byte_tokenizer
from tests.infer.test_assistant import CONFIG


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A Hugging Face folder of a tiny model that answers with bytes."""
    folder = tmp_path_factory.mktemp("model") / "hf"
    model = models.build("qwen3", CONFIG)
    models.to_hf(model, model.init(0), folder)
    byte_tokenizer().save(folder)
    return folder


def ask(capsys, folder, *keys: str) -> tuple[int, str, str]:
    """The exit code, stdout and stderr of `mpar generate`."""
    code = main(["generate", f"path={folder}", "max_new_tokens=5", *keys])
    out = capsys.readouterr()
    return code, out.out, out.err


def test_a_file_of_prompts(capsys, folder, tmp_path):
    """Answers are in the order of the prompts, as many as asked for, with what else the lines have and log-probabilities."""
    lines = [{"prompt": "hello", "id": 7}, {"messages": [{"role": "user", "content": "hi"}]}, {"prompt": "third one"}]
    (tmp_path / "asked.jsonl").write_text("\n".join(json.dumps(line) for line in lines) + "\n\n")
    out = tmp_path / "answers.jsonl"
    keys = ["num_answers=2", "temperature=1", "logprobs=2", "rows=4"]
    code, said, noted = ask(capsys, folder, f"prompts={tmp_path}/asked.jsonl", f"out={out}", *keys)
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert (code, said, len(records)) == (0, "", 6)
    assert "6 answers" in noted and "tokens/s" in noted
    assert [record.get("id") for record in records] == [7, 7, None, None, None, None]
    assert [record.get("prompt") for record in records] == ["hello", "hello", None, None, "third one", "third one"]
    assert records[2]["messages"] == lines[1]["messages"]
    assert records[0]["answer"] != records[1]["answer"]
    assert all(token["logprob"] <= 0 and len(token["alternatives"]) == 2 for record in records for token in record["tokens"])


def test_answers_that_the_length_cuts_are_said(capsys, folder, tmp_path):
    """Fewer tokens than were asked for because no more fit in a row: of one answer, and of how many of a file."""
    long, short = "x" * 20, "y"
    keys = ["chat=false", "length=24", "max_new_tokens=9"]
    _, _, noted = ask(capsys, folder, f"prompt={long}", *keys)
    assert "the answer ended before max_new_tokens=9: prompt and answer fill the 24 tokens of a row (length=)" in noted
    assert "ended before" not in ask(capsys, folder, f"prompt={short}", *keys)[2]
    (tmp_path / "asked.txt").write_text(f"{long}\n{short}\n")
    assert "1 of 2 answers ended before max_new_tokens=9" in ask(capsys, folder, f"prompts={tmp_path}/asked.txt", *keys)[2]


def test_variables_of_the_chat_template(capsys, folder):
    """They reach the template; those that it does not read are refused, and all of them where no template is read."""
    reads = folder.parent / "reads"
    shutil.copytree(folder, reads, dirs_exist_ok=True)
    template = "{% for m in messages %}{{ m.content }}{% endfor %}{% if brief is defined and brief %}!{% endif %}"
    about = json.loads((reads / "tokenizer_config.json").read_text())
    (reads / "tokenizer_config.json").write_text(json.dumps({**about, "chat_template": template}))
    (reads / "chat_template.jinja").unlink(missing_ok=True)
    said = {value: ask(capsys, reads, "prompt=hi", f"chat_template_kwargs={{brief: {value}}}")[1] for value in ("true", "false")}
    assert said["true"] == ask(capsys, reads, "prompt=hi!")[1] != said["false"] == ask(capsys, reads, "prompt=hi")[1]
    code, _, noted = ask(capsys, reads, "prompt=hi", "chat_template_kwargs={m: 1}")
    assert code == 1 and "reads no m; its variables are brief" in noted
    code, _, noted = ask(capsys, folder, "prompt=hi", "chat_template_kwargs={brief: true}")
    assert code == 1 and "reads no brief" in noted
    code, _, noted = ask(capsys, reads, "prompt=hi", "chat=false", "chat_template_kwargs={brief: true}")
    assert code == 2 and "chat_template_kwargs need chat=true" in noted


@pytest.fixture(scope="module")
def adapter_folders(folder, tmp_path_factory):
    """Folders of two adapters of the tiny model, and by their names the folders of the model with each merged."""
    model, params = models.from_hf(folder)
    where, merged = tmp_path_factory.mktemp("adapters"), {}
    for seed, (name, targets) in enumerate({"french": "all-linear", "sql-v2": ("o_proj",)}.items(), 1):
        adapted = adapters.add(model, LoRA(rank=2 * seed, alpha=6, init="random", targets=targets))
        values = adapters.first_params(adapted, params, seed)
        adapters.write_peft(adapted, values, where / name)
        merged[name] = where / f"{name} merged"
        models.to_hf(model, adapters.merge(adapted, values), merged[name])
        byte_tokenizer().save(merged[name])
    return {name: where / name for name in merged}, merged


def chosen(folders) -> str:
    """The argument that offers adapters."""
    return "adapters={" + ",".join(f"{name}: '{path}'" for name, path in folders.items()) + "}"


def test_each_prompt_names_its_adapter(capsys, folder, adapter_folders, tmp_path):
    """The answers of one command are those of the models with each adapter merged; names that are not there are refused."""
    folders, merged = adapter_folders
    asked = [{"prompt": text, "adapter": name} for text in ("hello", "and you") for name in (None, *folders)]
    (tmp_path / "asked.jsonl").write_text("\n".join(map(json.dumps, asked)))
    keys = [f"prompts={tmp_path}/asked.jsonl", f"out={tmp_path}/answers.jsonl"]
    assert ask(capsys, folder, *keys, chosen(folders))[0] == 0
    records = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    assert [(record["prompt"], record["adapter"]) for record in records] == [(one["prompt"], one["adapter"]) for one in asked]
    for record in records:
        _, said, _ = ask(capsys, merged.get(record["adapter"], folder), f"prompt={record['prompt']}")
        assert said.strip() == record["answer"].strip()
    assert len({record["answer"] for record in records[:3]}) == 3
    (tmp_path / "asked.jsonl").write_text(json.dumps({"prompt": "hello", "adapter": "sql"}))
    code, _, noted = ask(capsys, folder, *keys, chosen(folders))
    assert code == 2 and "it names the adapters 'sql'; adapters= has french, sql-v2" in noted
    code, _, noted = ask(capsys, folder, *keys, chosen(folders), f"adapter={folders['french']}")
    assert code == 2 and "both adapter, for all answers, and adapters, for each" in noted


def test_lines_of_text_are_continued_verbatim(capsys, folder, tmp_path):
    """With chat=false nothing is put around a line, and answers go to the screen."""
    (tmp_path / "lines.txt").write_text("first\nsecond\n")
    code, said, _ = ask(capsys, folder, f"prompts={tmp_path}/lines.txt", "chat=false")
    model, params = models.from_hf(folder, dtype=torch.float32)
    tokenizer = byte_tokenizer()
    expected = []
    for text in ("first", "second"):
        tokens = tokenizer.encode(text)
        for _ in range(5):
            tokens.append(int(model.apply(params, torch.tensor([tokens]))[0, -1].argmax()))
        expected.append(tokenizer.decode([token for token in tokens[len(text) :] if token < 256]).strip())
    assert (code, said.splitlines()) == (0, expected)


def test_answers_by_a_schema(capsys, folder, tmp_path):
    """They are JSON as the file says; one that is no JSON, and one that cannot be used, are refused."""
    (tmp_path / "schema.json").write_text('{"enum": ["yes", "no"]}')
    code, said, _ = ask(capsys, folder, "prompt=hi", f"schema={tmp_path}/schema.json", "max_new_tokens=9")
    assert code == 0 and json.loads(said) in ("yes", "no")
    (tmp_path / "schema.json").write_text('{"type": "strange"}')
    code, _, noted = ask(capsys, folder, "prompt=hi", f"schema={tmp_path}/schema.json")
    assert code != 0 and "Invalid type: strange" in noted
    (tmp_path / "schema.json").write_text("{")
    code, _, noted = ask(capsys, folder, "prompt=hi", f"schema={tmp_path}/schema.json")
    assert code != 0 and f"cannot read the schema {tmp_path}/schema.json" in noted


def test_a_conversation_on_the_terminal(capsys, folder, monkeypatch):
    """The second question is asked after the first and its answer; after /new the first is asked as before."""
    monkeypatch.setattr("sys.stdin", io.StringIO("one\ntwo\n/new\none\n\nignored\n"))
    code, said, noted = ask(capsys, folder)
    first, second, again = said.split("\n")[:3]
    assert (code, first) == (0, again)
    assert "A new conversation." in noted
    tokenizer = byte_tokenizer()
    messages = [{"role": "user", "content": "one"}, {"role": "assistant", "content": first}, {"role": "user", "content": "two"}]
    model, params = models.from_hf(folder, dtype=torch.float32)
    tokens = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    assert second.encode()[:1] == bytes([int(model.apply(params, torch.tensor([tokens]))[0, -1].argmax())]) or not second


def test_generation_config_counts_and_is_named(capsys, folder, tmp_path):
    """Its values are said with the file; a key of the command line goes before it."""
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in folder.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    (copy / "generation_config.json").write_text(json.dumps({"do_sample": True, "temperature": 0.7, "top_p": 0.8}))
    assert f"temperature=0.7 top_p=0.8, as {copy / 'generation_config.json'} says" in ask(capsys, copy, "prompt=hi")[2]
    assert "says" not in ask(capsys, copy, "prompt=hi", "temperature=0")[2]


REFUSED = {
    "both": (["prompt=a", "prompts=b"], "both prompt and prompts"),
    "out alone": (["out=x.jsonl"], "out is for the answers"),
    "no folder": (["prompts=a", "out=/nowhere/x.jsonl"], "there is no folder /nowhere"),
    "resume": (["prompts=a", "resume=true"], "resume=true goes on with the file `out`"),
    "logprobs": (["prompt=a", "logprobs=2"], "logprobs are written into the file `out`"),
    "memory": (["prompts={tmp}/many.txt", "rows=10000000", "length=10000000"], "Choose smaller rows= or length="),
    "system": (["prompt=a", "chat=false", "system=b"], "a system message needs chat=true"),
    "dtype": (["prompt=a", "dtype=int8"], "choose float32, bfloat16 or float16"),
    "stop": (["prompt=a", "stop=['']"], "stop has an empty text"),
    "missing file": (["prompts=/nowhere.jsonl"], "cannot read prompts from /nowhere.jsonl"),
    "top_p": (["prompt=a", "top_p=0"], "above 0"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_keys_that_do_not_fit_are_refused(capsys, folder, tmp_path, case):
    """With what to do instead."""
    keys, message = REFUSED[case]
    (tmp_path / "many.txt").write_text("a\n" * 10_000)
    code, said, noted = ask(capsys, folder, *(key.format(tmp=tmp_path) for key in keys))
    assert code == 2 and said == ""
    assert message in noted


@pytest.mark.parametrize("command", ["generate", "serve", "eval"])
def test_a_folder_that_is_not_there_is_refused(capsys, tmp_path, command):
    """With the exit code of what was asked for and cannot be, and the two places where a model was looked for."""
    assert main([command, f"path={tmp_path}/nowhere", *(["sets=[x]"] if command == "eval" else [])]) == 2
    noted = capsys.readouterr().err
    assert f"{tmp_path}/nowhere: neither it nor {tmp_path}/nowhere/hf has a config.json" in noted


def test_a_length_beyond_that_of_the_model_is_said(capsys, folder):
    """In one line, and not where the length fits."""
    assert "warning" not in ask(capsys, folder, "prompt=hi")[2]
    assert ask(capsys, folder, "prompt=hi", "length=200")[2].count("warning: length=200: the config of this model says") == 1


def test_what_a_line_has_is_kept(capsys, folder, tmp_path):
    """Also where it has the names that results have."""
    (tmp_path / "asked.jsonl").write_text('{"prompt": "hello", "answer": "world", "id": 1}\n')
    ask(capsys, folder, f"prompts={tmp_path}/asked.jsonl", f"out={tmp_path}/out.jsonl")
    (record,) = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert record["given"] == {"answer": "world"} and record["id"] == 1 and record["answer"] != "world"


def test_tools_of_a_line_are_shown(capsys, folder, tmp_path):
    """Or refused, where the template shows none to the model."""
    lines = [{"prompt": "hello", "tools": 3}, {"prompt": "hello", "tools": [{"type": "function", "function": {"name": "add"}}]}]
    for line, problem in zip(lines, ("tools must be a list", "tools cannot be called"), strict=True):
        (tmp_path / "asked.jsonl").write_text(json.dumps(line))
        code, said, noted = ask(capsys, folder, f"prompts={tmp_path}/asked.jsonl")
        assert code != 0 and said == "" and "line 1: " in noted and problem in noted


def test_a_file_that_cannot_be_written_is_named(capsys, folder, tmp_path):
    """When it is opened, or later."""
    (tmp_path / "asked.txt").write_text("a\nb")
    for out, why in (("/dev/full", "No space left"), (str(tmp_path), "Is a directory")):
        code, _, noted = ask(capsys, folder, f"prompts={tmp_path}/asked.txt", f"out={out}")
        assert code != 0 and f"cannot write {out}: {why}" in noted


def test_prompts_are_not_overwritten(capsys, folder, tmp_path):
    """`out` must be another file than the prompts, whatever it is called."""
    asked, linked = tmp_path / "asked.jsonl", tmp_path / "linked.jsonl"
    asked.write_text('{"prompt": "hello"}\n')
    linked.symlink_to(asked)
    for out in (asked, linked, tmp_path / "." / "asked.jsonl"):
        code, _, noted = ask(capsys, folder, f"prompts={asked}", f"out={out}")
        assert code == 2 and "is the file of the prompts" in noted
    assert asked.read_text() == '{"prompt": "hello"}\n'


def test_prompts_that_do_not_fit_are_listed(capsys, folder, tmp_path):
    """All of them, by their lines, before any answer is made."""
    (tmp_path / "long.txt").write_text("\n".join(["ok", "a" * 900, "", "b" * 901]))
    code, _, noted = ask(capsys, folder, f"prompts={tmp_path}/long.txt", f"out={tmp_path}/out.jsonl", "chat=false")
    assert code != 0 and not (tmp_path / "out.jsonl").exists()
    assert "line 2: cannot answer a prompt of 900 tokens" in noted and "line 4: cannot answer a prompt of 901" in noted


def test_logits_that_are_no_numbers_are_an_error(capsys, folder, tmp_path):
    """A model whose weights are damaged gives no answer."""
    model, params = models.from_hf(folder)
    params.head.norm_D[3] = torch.nan
    models.to_hf(model, params, tmp_path / "hf")
    byte_tokenizer().save(tmp_path / "hf")
    for keys in (["prompt=hi"], ["prompt=hi", "temperature=1", "num_answers=2"]):
        code, said, noted = ask(capsys, tmp_path / "hf", *keys)
        assert code != 0 and not said.strip() and "no finite numbers" in noted


def test_an_interrupt_says_what_is_there(capsys, folder, tmp_path, monkeypatch):
    """How many answers the file has."""
    (tmp_path / "asked.txt").write_text("a\nb\nc")
    written, write = [], _generate._write

    def interrupted(*args):
        write(*args)
        written.append(args)
        if len(written) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(_generate, "_write", interrupted)
    with pytest.raises(KeyboardInterrupt):
        ask(capsys, folder, f"prompts={tmp_path}/asked.txt", f"out={tmp_path}/out.jsonl")
    assert "has the first 2 of 3 answers" in capsys.readouterr().err
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == 2


def test_a_file_of_answers_is_gone_on_with(capsys, folder, tmp_path, monkeypatch):
    """After an interrupt, in the middle of a line too, it becomes what it would have been without. Nothing in it is lost by
    mistake."""
    (tmp_path / "asked.txt").write_text("a\nb\nc\n")
    keys = [f"prompts={tmp_path}/asked.txt", "num_answers=2", "temperature=1", f"out={tmp_path}/out.jsonl"]
    assert ask(capsys, folder, *keys)[0] == 0
    whole = (tmp_path / "out.jsonl").read_bytes()
    ends = [index + 1 for index, byte in enumerate(whole) if byte == ord("\n")]
    for size in (0, ends[0], ends[2] + 9, ends[4] - 1):
        (tmp_path / "out.jsonl").write_bytes(whole[:size])
        assert ask(capsys, folder, *keys, "resume=true")[0] == 0
        assert (tmp_path / "out.jsonl").read_bytes() == whole
    assert "has all 6 answers" in ask(capsys, folder, *keys, "resume=true")[2]
    code, _, noted = ask(capsys, folder, *keys)
    assert code == 2 and "it has something already" in noted and "resume=true" in noted
    for asked, why in (("a\n", "6 lines, for 2 answers"), ("a\nc\nb\n", "line 3 is no answer to the prompt 'c'")):
        (tmp_path / "asked.txt").write_text(asked)
        code, _, noted = ask(capsys, folder, *keys, "resume=true")
        assert code == 1 and f"cannot go on with {tmp_path}/out.jsonl: " in noted and why in noted
    assert (tmp_path / "out.jsonl").read_bytes() == whole
    for text in ("a text of mine", '{"my": "results"}', '{"prompt": "a", "given": 3}\n', "[" * 10**5 + "\n"):
        (tmp_path / "out.jsonl").write_text(text)
        code, _, noted = ask(capsys, folder, *keys, "resume=true")
        assert code == 1 and "line 1 is no answer to the prompt 'a'" in noted and (tmp_path / "out.jsonl").read_text() == text


def test_one_prompt_may_be_answered_into_a_file(capsys, folder, tmp_path):
    """With what was asked."""
    _, said, _ = ask(capsys, folder, "prompt=hi")
    code, printed, noted = ask(capsys, folder, "prompt=hi", f"out={tmp_path}/out.jsonl")
    record = json.loads((tmp_path / "out.jsonl").read_text())
    assert (code, printed, record["prompt"], record["answer"].strip()) == (0, "", "hi", said.strip())
    assert "1 answer, " in noted


def test_what_utf_8_cannot_say_is_written_as_json_escapes_it(capsys, folder, tmp_path):
    """Half of a surrogate pair in what a line has besides its prompt."""
    (tmp_path / "asked.jsonl").write_text('{"prompt": "hi", "id": "\\ud800é"}\n{"prompt": "ho"}\n')
    assert ask(capsys, folder, f"prompts={tmp_path}/asked.jsonl", f"out={tmp_path}/out.jsonl")[0] == 0
    first, second = map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())
    assert (first["id"], second["prompt"]) == ("\ud800é", "ho")


def test_an_adapter_that_nobody_gave_is_refused(capsys, folder, tmp_path):
    """The model alone would answer otherwise."""
    (tmp_path / "asked.jsonl").write_text('{"prompt": "hi", "adapter": "french"}')
    code, _, noted = ask(capsys, folder, f"prompts={tmp_path}/asked.jsonl")
    assert code == 2 and "it names the adapters 'french'; adapters= has none" in noted


class Terminal(io.StringIO):
    """What is typed."""

    def isatty(self) -> bool:
        """It is one."""
        return True


def test_a_conversation_that_fills_the_row(capsys, folder, monkeypatch):
    """On a terminal the talk goes on, and the question is forgotten; otherwise it is an error. Both tell how to begin anew."""
    lines = "one\n" + "x" * 100 + "\n/new\none\n"
    monkeypatch.setattr("sys.stdin", Terminal(lines))
    code, said, noted = ask(capsys, folder, "length=90")
    assert code == 0 and said.split("\n")[0] == said.split("\n")[1]
    assert "cannot answer a prompt of" in noted and "/new begins another conversation." in noted
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    code, _, noted = ask(capsys, folder, "length=90")
    assert code == 2 and "/new begins another conversation." in noted


def test_bad_lines_of_a_file_are_counted(capsys, folder, tmp_path):
    """Each with its number and what is wrong with it; no answer is made."""
    lines = ["{", "3", "{}", '{"messages": []}', '{"messages": [{"role": "assistant", "content": "a"}]}', '{"prompt": 3}']
    (tmp_path / "bad.jsonl").write_text("\n".join(lines * 2))
    code, said, noted = ask(capsys, folder, f"prompts={tmp_path}/bad.jsonl")
    assert code != 0 and said == ""
    assert all(f"line {number}:" in noted for number in range(1, 9)) and "and 4 more lines" in noted
