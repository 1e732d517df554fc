"""Programs of inference that are kept from run to run: none is compiled again, and whatever lies in their folder does no harm."""

import subprocess
import sys

import pytest

from mpar import adapters, models
from mpar.adapters import LoRA
from mpar.data import byte_tokenizer
from mpar.infer import Sampling, _compile_decode
from mpar.train.answers import load_assistant
from tests.cli.conftest import environment
from tests.infer.test_assistant import CONFIG

LENGTH = 64


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A Hugging Face folder of a tiny model that answers with bytes."""
    folder = tmp_path_factory.mktemp("model") / "hf"
    model = models.build("qwen3", CONFIG)
    models.to_hf(model, model.init(0), folder)
    byte_tokenizer().save(folder)
    return folder


@pytest.fixture
def compiled(monkeypatch):
    """The names of the functions of the compiler that were called, in their order."""
    called = []
    for name in ("compile_decode", "compile_scores"):
        monkeypatch.setattr(_compile_decode, name, _noting(called, name, getattr(_compile_decode, name)))
    return called


def _noting(called, name, function):
    return lambda *args, **how: called.append(name) or function(*args, **how)


def found(folder, kept, **how):
    """An answer and a score, and what was warned of; the programs are kept in a folder."""
    warned = []
    _, assistant = load_assistant(folder, length=LENGTH, kept_programs=kept, warn=warned.append, **how)
    answer = assistant.continue_text("hello", Sampling(max_tokens=6))
    list(assistant.run())
    scores = [chosen.logprob for chosen in assistant.score(list(b"hello"))]
    assistant.tokenizer.close()
    return answer.text, scores, warned


def test_the_second_time_nothing_is_compiled(folder, compiled, tmp_path):
    """Answers and scores have the same bits; other sizes, dtypes and adapters have programs of their own."""
    first = found(folder, tmp_path / "kept")
    assert compiled == ["compile_decode", "compile_decode", "compile_scores"] and not first[2]
    assert len(list((tmp_path / "kept").iterdir())) == 3
    assert found(folder, tmp_path / "kept") == first and len(compiled) == 3
    assert found(folder, tmp_path / "kept", rows=2)[:2] == first[:2] and len(compiled) == 5  # scores depend on no rows
    model, params = models.from_hf(folder)
    for name, rank in (("small", 2), ("large", 3)):
        one = adapters.add(model, LoRA(rank=rank, init="random"))
        adapters.write_peft(one, adapters.first_params(one, params, rank), tmp_path / name)
    small, large = str(tmp_path / "small"), str(tmp_path / "large")
    found(folder, tmp_path / "kept", by_name={"a": small, "b": large})
    found(folder, tmp_path / "kept", by_name={"a": large, "b": small})  # the same sum of ranks, cut at another place
    found(folder, tmp_path / "kept", adapter=small)
    assert len(compiled) == 14


def test_nothing_is_kept_unless_a_folder_is_named(folder, compiled):
    """Without one the compiler is asked each time."""
    assert found(folder, None) == found(folder, None) and len(compiled) == 6


@pytest.mark.parametrize("damage", ["cut", "foreign", "of others", "no folder"])
def test_what_cannot_be_used_is_compiled_again(folder, compiled, tmp_path, damage):
    """Damaged entries, those of other configurations and those that others may write are said and replaced; where nothing can be
    kept, answers come all the same."""
    kept = tmp_path / "kept"
    if damage == "no folder":
        kept.write_text("a file")
        first = found(folder, None)
    else:
        first = found(folder, kept)
        entries = sorted(kept.iterdir())
        contents = [path.read_bytes() for path in entries]
        for number, path in enumerate(entries):
            if damage == "cut":
                path.write_bytes(contents[number][:-40])
            elif damage == "foreign":
                path.write_bytes(contents[number - 1])
            else:
                path.chmod(0o666)
    again = found(folder, kept)
    assert again[:2] == first[:2] and len(compiled) == 6
    words = {"cut": "was not used", "foreign": "another configuration", "of others": "another user may have written it"}
    assert len(again[2]) == 1 and words.get(damage, "it is not kept") in again[2][0]  # once, not for each of three programs
    if damage != "no folder":
        assert not found(folder, kept)[2] and len(compiled) == 6


START = """
import sys
from mpar.cli.main import main
assert main(sys.argv[1:]) == 0
print("mpar.compiler" in sys.modules)
"""


def test_a_command_whose_programs_are_kept_loads_no_compiler(folder, tmp_path):
    """The first `mpar generate` compiles, the second has the same answer without; `compile_cache` names the folder."""
    words = ["generate", f"path={folder}", "prompt=hello", "max_new_tokens=5", f"compile_cache={tmp_path}/kept", "length=64"]
    said = []
    for _ in range(2):
        command = [sys.executable, "-c", START, *words]
        done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False, timeout=300)
        assert done.returncode == 0, done.stderr
        said.append(done.stdout.splitlines())
    assert (said[0][-1], said[1][-1]) == ("True", "False")
    assert said[0][:-1] == said[1][:-1]
