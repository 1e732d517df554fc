"""Mutation runs, on a package of a few lines."""

import ast
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.tools.conftest import SAMPLE, git
from tools.mutation import (
    Choice,
    Copy,
    CoverageMap,
    Mutant,
    Outcome,
    Report,
    Verdict,
    changes_meaning,
    draw,
    mutants_of,
    read_equivalents,
    read_report,
    try_mutants,
)

ROOT = Path(__file__).parents[2]
PATH = "sample/__init__.py"
CLAMP = tuple(f"tests/test_sample.py::test_clamp[{x}]" for x in (-4, 4, 40))


def changes(source: str) -> set[str]:
    """The mutants of a line or more, without the lines that stay."""
    return {mutant.after.strip() for mutant in mutants_of("a.py", source)}


def mutant(before: str, after: str) -> Mutant:
    """The mutant of the sample that turns one line into another."""
    return next(m for m in mutants_of(PATH, SAMPLE) if (m.before.strip(), m.after.strip()) == (before, after))


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("a < b", {"a <= b", "a >= b"}),
        ("a not in b", {"a in b"}),
        ("a is not b", {"a is b"}),
        ("(a) == (b)", {"(a) != (b)"}),
        ("kind == 'x'", {"kind != 'x'", "kind == 'x_'"}),
        ("a + b", {"a - b"}),
        ("a - 1", {"a + 1", "a - 2", "a - 0"}),
        ("a // b", {"(-(-a // b))"}),
        ("a and b", {"a or b"}),
        ("x = not a", {"x = (a)"}),
        ("x = b if a else c", {"x = b if (not a) else c"}),
        ("[a for a in b if c(a)]", {"[a for a in b if (not c(a))]"}),
        ("max(a, b)", {"min(a, b)"}),
        ("f(a, b)", {"f(b, a)"}),
        ("f(a, b.c)", set()),  # what looks otherwise is of another type, as a rule
        ("sorted(a, key=b)", {"list(a)"}),
        ("x = True", {"x = False"}),
        ("x = 0.5", {"x = 1.0"}),
        ("x = (a, b)", {"x = (a,)", "x = (b,)"}),
        ("x = [a, b, c]", {"x = [a, b]", "x = [b, c]"}),
        ("x -= y", {"x += y"}),
        ("é, y = x + 'é', a < b", {"é, y = x + 'é', a <= b", "é, y = x + 'é', a >= b"}),  # positions count bytes there
        ("x = (a <\n  b)", {"x = (a <=", "x = (a >="}),
        ("x = 10 +\\\n  a", {"x = 11 +\\", "x = 9 +\\", "x = 10 -\\"}),
    ],
)
def test_changes(source, expected):
    """Each line has these mutants, and no other."""
    assert changes(source) == expected


@pytest.mark.parametrize(
    "source",
    [
        '"""Docstring, 1 < 2."""',
        "def f(x: tuple[int, 3] = None) -> Literal[1]:\n    'a < 1'",
        "raise ValueError(1 + a)",
        "assert a < 1, 1",
        "x = f'{a + 1}'",
        "from a import b\nimport c",
        "Names = tuple[int, ...]",
        "x: dict[str, 1]",
        "__all__ = ['a', 'b']",
        "class A:\n    def __repr__(self):\n        return 1 + 2",
        "@triton.jit\ndef f(x):\n    return x + 1",
        "@functools.lru_cache(3)\ndef f(x):\n    return x",
        "if TYPE_CHECKING:\n    x = 1",
        "zip(a, b.c, strict=True)",
        "a, b = c, d",
    ],
)
def test_what_no_test_can_see_stays(source):
    """Docstrings, annotations, messages, assertions and code for other compilers have no mutants."""
    assert changes(source) == set()


def test_scopes():
    """A mutant knows the function that it is in, and whether its line waits for a call."""
    source = "A = 1\nclass B:\n    c = 2\n    def d(self, e=3):\n        return 4\n"
    found = {(m.line, m.scope, m.in_function) for m in mutants_of("a.py", source)}
    assert found == {(1, "", False), (3, "B", False), (4, "B.d", False), (5, "B.d", True)}


@pytest.mark.full("it draws mutants of all of mpar, which takes 14 s")
def test_drawn_mutants_are_valid_and_one_line(tmp_path):
    """Of real files: valid Python, another tree, exactly one other line; folders share them out, lines have one each."""
    sources = {str(p.relative_to(ROOT)): p.read_text(encoding="utf-8") for p in sorted((ROOT / "mpar").rglob("*.py"))}
    drawn = draw(sources, 100, seed=3)
    assert len(drawn) == len({(m.path, m.line) for m in drawn}) == 100
    for m in drawn:
        source = sources[m.path]
        spoiled = m.applied(source)
        ast.parse(spoiled)
        assert changes_meaning(m, source)
        pairs = zip(source.split("\n"), spoiled.split("\n"), strict=True)
        assert [number for number, (a, b) in enumerate(pairs, 1) if a != b] == [m.line]
    counts = [sum(m.path.rpartition("/")[0] == folder for m in drawn) for folder in {m.path.rpartition("/")[0] for m in drawn}]
    assert max(counts) - min(counts) <= 1 or min(counts) < 5  # a folder may have few lines
    assert drawn == draw(sources, 100, seed=3)
    assert drawn != draw(sources, 100, seed=4)


def test_invalid_python_is_not_drawn():
    """A change that leaves no Python, or the same, is passed over."""
    m = Mutant(PATH, 1, 0, "", "", "a = 1", "a = = 1", False)
    same = Mutant(PATH, 1, 0, "", "", "a = 1", "a = (1)", False)
    assert not changes_meaning(m, "a = 1")
    assert not changes_meaning(same, "a = 1")


def choice(*tests: str) -> Choice:
    return Choice(tests, 0.0, 0)


def test_verdicts(repository, tmp_path):
    """A test that fails kills; survivors pass all; what hangs is stopped in time; the tree is left alone, the copies whole."""
    killed = mutant("return max(low, min(x, high))", "return max(low, max(x, high))")
    survived = mutant("return x * 3", "return x * 4")
    unseen = mutant("return not sorted(xs)", "return not list(xs)")
    gone = mutant("return x * 3", "return x * 2")
    choices = {
        killed: choice(*CLAMP),
        survived: choice("tests/test_sample.py::test_weigh"),
        unseen: choice(),
        gone: choice("tests/test_sample.py::test_that_went"),
    }
    copies = [Copy(repository, tmp_path / name) for name in ("one", "two")]
    found = verdicts(copies, choices, 300.0)
    assert {m: outcome.verdict for m, outcome in found.items()} == {
        killed: Verdict.KILLED,
        survived: Verdict.SURVIVED,
        unseen: Verdict.UNCOVERED,
        gone: Verdict.UNCOVERED,
    }
    assert found[killed].because == CLAMP[0]
    for root in (repository, *(copy.root for copy in copies)):
        assert (root / PATH).read_text(encoding="utf-8") == SAMPLE


def test_a_mutant_that_hangs_is_stopped(repository, tmp_path):
    """The time limit holds, and leaves no process."""
    hangs = mutant("n -= 1", "n += 1")
    copy = Copy(repository, tmp_path / "copy")
    start = time.monotonic()
    found = verdicts([copy], {hangs: choice("tests/test_sample.py::test_count_down")}, 5.0)
    assert found[hangs].verdict == Verdict.TIMED_OUT
    assert time.monotonic() - start < 60
    commands = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()]
    assert not any(str(copy.folder).encode() in command for command in commands)


def test_mutants_of_the_same_size_are_told_apart(repository, tmp_path):
    """Compiled modules of one mutant are not taken for the next, though sources of the same length follow each other at once."""
    kept = mutant("return x * 3", "return x * 2")
    kills = mutant("return max(low, min(x, high))", "return min(low, min(x, high))")
    copy, one = Copy(repository, tmp_path / "copy"), choice(CLAMP[1])
    found = verdicts([copy], {kept: one, kills: one, mutant("return x * 3", "return x * 4"): one}, 300.0)
    assert [outcome.verdict for outcome in found.values()] == [Verdict.SURVIVED, Verdict.KILLED, Verdict.SURVIVED]


def verdicts(copies: list[Copy], choices: dict[Mutant, Choice], timeout_s: float) -> dict[Mutant, Outcome]:
    outcomes: list[Outcome] = []
    try_mutants(copies, choices, timeout_s, outcomes.append, threading.Event())
    return {outcome.mutant: outcome for outcome in outcomes}


def test_choice_of_tests():
    """Tests that run the line come first, the fastest of them first; then others of their files; all within the budget."""
    seconds = {"a.py::x": 3.0, "a.py::y": 1.0, "a.py::z": 0.5, "b.py::x": 9.0, "c.py::x": 0.1}
    lines = {PATH: {10: frozenset({"a.py::x", "a.py::y", "b.py::x"}), 15: frozenset({"c.py::x"})}}
    known = CoverageMap("key", seconds, lines)
    m = mutant("return max(low, min(x, high))", "return max(low, max(x, high))")
    assert m.line == 10
    assert known.choose(m, 100.0) == Choice(("a.py::y", "a.py::x", "b.py::x", "a.py::z"), 13.5, 0)
    assert known.choose(m, 4.6) == Choice(("a.py::y", "a.py::x", "a.py::z"), 4.5, 1)
    assert known.choose(m, 0.0) == Choice(("a.py::y",), 1.0, 2)  # one at least
    assert known.choose(mutant("return x * 3", "return x * 4"), 9.0) == Choice((), 0.0, 0)
    limits = next(m for m in mutants_of(PATH, SAMPLE) if m.line == 5)
    assert set(known.choose(limits, 0.2).tests) == {"c.py::x"}  # what runs on import is of every test of the file
    assert known.choose(limits, 99.0).tests[-1] == "a.py::z"


def test_lines_that_moved_are_followed():
    """A map of an older text is read by the lines that are still the same."""
    known = CoverageMap("key", {"a.py::x": 1.0}, {PATH: {10: frozenset({"a.py::x"})}})
    now = SAMPLE.replace('"""Arithmetic', '# new\n\n"""Arithmetic')
    known.follow(PATH, SAMPLE, now)
    found = {m.line for m in mutants_of(PATH, now) if m.in_function and known.tests_of(m)}
    assert found == {12}


def test_map_file(tmp_path):
    """A map is read as it was written."""
    known = CoverageMap("key", {"a": 1.0, "b": 2.0}, {PATH: {1: frozenset({"a", "b"}), 2: frozenset({"a"})}})
    known.save(tmp_path / "map.json.gz")
    assert CoverageMap.load(tmp_path / "map.json.gz") == known


def test_report_file(tmp_path):
    """A report is read as it was written."""
    m = mutant("return x * 3", "return x * 4")
    report = Report("key", 1, [Outcome(m, Verdict.KILLED, "a test", 1.5, 3, 2), Outcome(m, Verdict.SURVIVED)])
    report.save(tmp_path / "report.json")
    assert read_report(tmp_path / "report.json") == report


def test_equivalents_hold_when_code_moves(tmp_path):
    """They are known by function and line, wherever those are."""
    path = tmp_path / "equivalent.yaml"
    path.write_text("- {scope: weigh, before: return x * 3, after: return x * 4, reason: so it is}\n", encoding="utf-8")
    moved = mutants_of("elsewhere.py", "\n\n" + SAMPLE)
    assert [(m.after.strip(), reason) for m, reason in read_equivalents(path, moved).items()] == [("return x * 4", "so it is")]
    assert read_equivalents(tmp_path / "none.yaml", moved) == {}


def command(root: Path, *words: str) -> list[str]:
    return [sys.executable, "-m", "tools.mutation", "--root", str(root), "--files", "sample/**/*.py", "--jobs=1", *words]


def environment(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "tmp").mkdir(exist_ok=True)
    return os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path / "tmp"), "COLUMNS": "200"}


@pytest.mark.full("takes half a minute; its parts are in the broad tier")
def test_a_whole_run(repository, tmp_path):
    """From nothing: the map is made and kept, survivors are printed as diffs, reports can be resumed, the tree is unchanged."""
    words = command(repository, "--mutants=6", "--timeout=300", "--seed=21")  # none of these hangs
    env = environment(tmp_path)
    first = subprocess.run(words, env=env, capture_output=True, text=True)
    assert first.returncode == 0, first.stdout + first.stderr
    report = read_report(repository / ".mutation" / "report.json")
    assert {outcome.mutant.after.strip(): outcome.verdict for outcome in report.outcomes} == {
        "return x * 4": Verdict.SURVIVED,  # test_broken fails without mutants, too, and judges none
        "return not list(xs)": Verdict.UNCOVERED,
        "return max(low, max(x, high))": Verdict.KILLED,
        "while n > (-1):": Verdict.KILLED,
        "steps = (-1)": Verdict.KILLED,
        "steps -= 1": Verdict.KILLED,
    }
    assert "- return x * 3\n  + return x * 4\n" in first.stdout
    assert "- return not sorted(xs)\n  + return not list(xs)\n" in first.stdout
    kept = [path for path in (repository / ".mutation").iterdir() if path.name.startswith("map-")]
    assert len(kept) == 1
    shorter = Report(report.key, report.seed, report.outcomes[:4])
    shorter.save(repository / ".mutation" / "report.json")
    again = subprocess.run([*words, "--resume"], env=env, capture_output=True, text=True)
    assert again.returncode == 0, again.stdout + again.stderr
    assert "making the coverage map" not in again.stdout
    resumed = read_report(repository / ".mutation" / "report.json")
    assert resumed.outcomes[:4] == report.outcomes[:4]
    assert {o.mutant: o.verdict for o in resumed.outcomes} == {o.mutant: o.verdict for o in report.outcomes}
    status = subprocess.run(["git", "-C", str(repository), "status", "--porcelain"], capture_output=True, text=True, check=True)
    assert status.stdout == ""
    assert not list((tmp_path / "tmp").glob("mutation*"))


def test_interrupted_runs_print_what_they_know(repository, tmp_path):
    """Ctrl-C while a mutant is tried: the report of those before, no copies left, the tree as it was."""
    (repository / "tests" / "test_sample.py").write_text(
        "import sample\n\ndef test_slow():\n    sample.count_down(3)\n"
        "    assert sample.weigh(1) == 3 or sample.count_down(10**12)\n",
        encoding="utf-8",
    )
    git(repository, "commit", "--quiet", "--all", "--message", "slow")
    words = command(repository, "--mutants=6", "--timeout=300", "--seed=21")
    process = subprocess.Popen(words, env=environment(tmp_path), stdout=subprocess.PIPE, text=True)
    report = repository / ".mutation" / "report.json"
    deadline = time.monotonic() + 200
    while not report.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, output
    assert "interrupted" in output
    assert 0 < len(json.loads(report.read_text(encoding="utf-8"))["outcomes"]) < 6  # the fourth hangs
    assert (repository / PATH).read_text(encoding="utf-8") == SAMPLE
    assert not list((tmp_path / "tmp").glob("mutation*"))
