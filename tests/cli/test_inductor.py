"""`execution=inductor` of the commands that let a model answer: they find what `eager` finds, and say what takes long."""

import json
import re

import openai
import pytest
import torch
from torch._inductor.exc import CppCompileError, InductorError

from mpar import models
from mpar.cli.main import main
from mpar.errors import ConfigError
from mpar.infer import Sizes
from mpar.infer.compile import make_runner
from mpar.runtime import _inductor
from mpar.torch_private import inductor_compile
from tests.cli.conftest import run_mpar
from tests.cli.test_generate import adapter_folders, chosen, folder
from tests.cli.test_serve import serving
from tests.models.variants import KINDS

__all__ = ["adapter_folders", "folder"]

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, when it loads its compiler
TASK = [{"prompt": "The sky is", "choices": [" blue", " red"], "answer": 0}, {"prompt": "x", "answer": "y", "max_tokens": 2}]


def ask_files(folders, tmp_path) -> tuple[list[str], list[str]]:
    """Arguments of `mpar generate` with adapters and a file of prompts, and of `mpar eval`, whose files are written here."""
    lines = [{"prompt": text, "adapter": name} for text in ("hello", "and you") for name in (None, *folders)]
    (tmp_path / "asked.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (tmp_path / "task.jsonl").write_text("\n".join(map(json.dumps, TASK)))
    (tmp_path / "held.txt").write_text("a text of its own\nand another one\n")
    generate = [f"prompts={tmp_path}/asked.jsonl", f"out={tmp_path}/said.jsonl", "max_new_tokens=5", chosen(folders)]
    evaluate = ["kind=pt", f"sets=[{tmp_path}/held.txt]", f"tasks=[{tmp_path}/task.jsonl]", f"out={tmp_path}/found.json"]
    return generate, evaluate


def results(tmp_path) -> tuple[list[dict], dict, dict]:
    """What the commands wrote: answers, whose file is then removed, losses by set, scores by task."""
    found = json.loads((tmp_path / "found.json").read_text())
    (losses,) = found["sets"].values()
    answers = [json.loads(line) for line in (tmp_path / "said.jsonl").read_text().splitlines()]
    (tmp_path / "said.jsonl").unlink()
    return answers, losses, found["tasks"]


def compare(found, expected) -> None:
    """Answers and scores are equal, losses up to rounding."""
    assert (found[0], found[2]) == (expected[0], expected[2])
    assert len({line["answer"] for line in found[0][:3]}) == 3
    assert found[1] == pytest.approx(expected[1], rel=1e-5)


def test_commands_find_what_they_find_without(capsys, monkeypatch, folder, adapter_folders, tmp_path):
    """Answers with adapters by request, losses and scores. The graphs run as they were recorded, without a C++ compiler. A line
    says before a program is compiled for which steps or texts it is, and one behind, how long that took."""
    graphs = []
    monkeypatch.setattr(_inductor, "inductor_compile", lambda graph, *_: graphs.append(graph) or graph)
    generate, evaluate = ask_files(adapter_folders[0], tmp_path)
    found = []
    for execution in ("eager", "inductor"):
        how = [f"path={folder}", f"execution={execution}"]
        assert main(["generate", *how, *generate]) == 0
        said = capsys.readouterr().err
        assert main(["eval", *how, *evaluate]) == 0
        scored = capsys.readouterr().err
        found.append((results(tmp_path), said, scored, len(graphs)))
    (expected, quiet, _, none), (compiled, said, scored, count) = found
    compare(compiled, expected)
    assert none == 0 and count > 8
    assert "compiling for steps" not in quiet
    assert re.search(r"compiling for steps of up to 1 token \.\.\.\ncompiled for steps of up to 1 token in \d+\.\d s\n", said)
    assert re.search(r"6 answers, 30 tokens in \d+\.\d s: [\d,]+ tokens/s, and \d+\.\d s for compiling\n$", said)
    assert "compiling for texts of up to 64 tokens ..." in scored


@pytest.mark.gloo
@pytest.mark.full("compiles C++ for minutes, in processes that load torch")
@pytest.mark.parametrize("mesh", ["tp2", "pp2"])
def test_compiled_code_on_ranks(folder, adapter_folders, tmp_path, mesh):
    """Processes of two ranks whose code a C++ compiler has compiled find what one rank finds without."""
    generate, evaluate = ask_files(adapter_folders[0], tmp_path)
    found = []
    for how in (["execution=eager"], ["execution=inductor", f"mesh={mesh}"]):
        for command in (["generate", *generate], ["eval", *evaluate]):
            done = run_mpar([*command, f"path={folder}", *how], tmp_path)
            assert done.returncode == 0, done.stderr
        found.append(results(tmp_path))
    compare(found[1], found[0])
    assert "compiled for texts of up to 64 tokens in" in done.stderr


@pytest.mark.full("compiles C++ for a minute, in processes that load torch")
def test_a_server_of_compiled_code(folder, adapter_folders):
    """OpenAI's client streams from each model what a server without Inductor says."""
    said = []
    for execution in ("eager", "inductor"):
        with (
            serving(folder, "name=base", f"execution={execution}", chosen(adapter_folders[0])) as (_, address),
            openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client,
        ):
            names = [model.id for model in client.models.list().data]
            how = {"max_tokens": 9, "temperature": 0, "stream": True, "messages": [{"role": "user", "content": "hello"}]}
            chunks = [client.chat.completions.create(model=name, **how) for name in names]
            said.append(["".join(chunk.choices[0].delta.content or "" for chunk in each) for each in chunks])
    assert said[0] == said[1] and len(set(said[0])) == 3


def test_no_compiler_is_said_before_weights_are_read(capsys, folder, tmp_path):
    """With what to do; the folder has no weights here."""
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    with torch._inductor.config.patch({"cpp.cxx": ("no-such-compiler",)}):
        assert main(["generate", f"path={tmp_path}", "prompt=hi", "execution=inductor"]) == 2
    assert re.search(r"there is no C\+\+ compiler.*Install g\+\+.*execution='eager'", capsys.readouterr().err)


def test_no_compiler_is_said_before_data_are_read(capsys, tmp_path):
    """What is wrong with a row of them is found later."""
    (tmp_path / "bad.jsonl").write_text("no json\n")
    keys = [f"run_dir={tmp_path / 'run'}", "data=jsonl", f"data.sources=[{tmp_path / 'bad.jsonl'}]", "progress=false"]
    with torch._inductor.config.patch({"cpp.cxx": ("no-such-compiler",)}):
        assert main(["train", *keys, "execution=inductor"]) == 2
    assert re.search(r"there is no C\+\+ compiler.*Install g\+\+", capsys.readouterr().err)


def test_what_the_compiler_says_is_shown(monkeypatch):
    """Its last lines, in place of a traceback of torch; other errors of Inductor are bugs."""
    errors = [CppCompileError(["g++", "-O3"], "cc1plus: 1\nfatal error: Python.h: No such file"), RuntimeError("a bug")]

    def fail(*args: object, **how: object) -> None:
        raise InductorError(errors.pop(0), None)

    monkeypatch.setattr(torch._inductor, "standalone_compile", fail)
    with pytest.raises(ConfigError, match=r"(?s)C\+\+ compiler g\+\+ has failed:\n  cc1plus: 1\n  fatal error: Python.h.*CXX"):
        inductor_compile(torch.nn.Module(), [], {}, "")
    with pytest.raises(InductorError, match="a bug"):
        inductor_compile(torch.nn.Module(), [], {}, "")


def test_scores_are_compiled(monkeypatch):
    """Programs that score texts run by the same execution as steps."""
    graphs = []
    monkeypatch.setattr(_inductor, "inductor_compile", lambda graph, *_: graphs.append(graph) or graph)
    model = models.build("llama", KINDS["llama"].base)
    runner = make_runner(model, model.init(0), Sizes(rows=1, tokens=4, pages=9, page_size=4, length=16), execution="inductor")
    graphs.clear()
    runner.scores([torch.tensor([1, 5, 2])], 1)
    assert graphs


def test_models_without_programs_cannot_be_compiled():
    """A model that is read row by row would run as without, so it is refused, with why."""
    model = models.build("llama", {**KINDS["llama"].base, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}})
    sizes = Sizes(rows=1, tokens=4, pages=9, page_size=4, length=16)
    with pytest.raises(ConfigError, match=r"(?s)execution='inductor': .*RoPE turns earlier tokens anew.*Use execution=eager"):
        make_runner(model, model.init(0), sizes, execution="inductor")
