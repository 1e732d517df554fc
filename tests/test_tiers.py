"""The tiers: what the quick and the broad one keep, and that the full one runs everything."""

import os
import re
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest

from tests import tiers
from tests.processes import PATIENCE_S
from tests.sampling import BUDGET_S, CASES, WIDE, Case, quick_sample, sample
from tests.tiers import COLLECTED, seconds_of_modules

SEEDS = range(20)
MODULES = {
    "test_a.py": """
        import pytest

        @pytest.mark.parametrize("number", range(40))
        def test_many(number): pass

        @pytest.mark.full("it is slow")
        @pytest.mark.parametrize("number", range(3))
        def test_slow(number): pass

        @pytest.mark.gpu
        @pytest.mark.parametrize("number", range(6))
        def test_gpu(number): raise AssertionError("there is no GPU")
    """,
    "test_b.py": """
        import pytest
        from hypothesis import given, settings, strategies
        from tests.tiers import examples

        @pytest.mark.cases(1)
        @pytest.mark.parametrize("dtype", ["float", "double"])
        @pytest.mark.parametrize("size", range(5))
        def test_one(dtype, size): pass

        def test_plain(): pass

        def test_property():
            drawn = []

            @settings(max_examples=examples(200), database=None)
            @given(strategies.integers())
            def check(number):
                drawn.append(number)

            check()
            print(f"<{len(drawn)} examples, sum {sum(drawn)}>")
    """,
}
WHOLE = {"a": {"many": 40, "slow": 3}, "b": {"one": 10, "plain": 1, "property": 1}}


@pytest.fixture
def run_tiny(tmp_path):
    """`fn(*args)` runs pytest with these arguments in a folder of two small modules, and gives what it wrote."""
    for name, text in MODULES.items():
        (tmp_path / name).write_text("\n".join(line.removeprefix(" " * 8) for line in text.splitlines()))
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --strict-markers\n")

    def run(*args: str) -> str:
        root = str(Path(__file__).parents[1])
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")} | {"PYTHONPATH": root}
        command = [sys.executable, "-m", "pytest", "-p", "tests.tiers", "-p", "no:cacheprovider", *args]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=PATIENCE_S)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run


def collected(text: str) -> list[str]:
    """The node ids in what `--collect-only -q` writes."""
    return [line for line in text.splitlines() if "::" in line]


def count(names: list[str]) -> dict[str, dict[str, int]]:
    """How many tests each function of each module has."""
    counts: dict[str, dict[str, int]] = {}
    for name in names:
        module, _, test = name.partition("::")
        function = test.partition("[")[0].removeprefix("test_")
        counts.setdefault(module.removeprefix("test_").removesuffix(".py"), {}).setdefault(function, 0)
        counts[module.removeprefix("test_").removesuffix(".py")][function] += 1
    return counts


@pytest.mark.parametrize("tier", ["", "--broad"])
def test_short_tiers_keep_some_cases_of_each_function(tier, run_tiny):
    """Two, or as many as the mark says, or none of those that only the full tier runs; the same for the same seed."""
    how = ["--collect-only", "-q", *([tier] if tier else [])]
    first, again, other = (collected(run_tiny(*how, "--sample-seed", seed)) for seed in ("1", "1", "2"))
    assert count(first) == count(other) == {"a": {"many": CASES}, "b": {"one": 1, "plain": 1, "property": 1}}
    assert first == again != other


def test_full_tier_keeps_all(run_tiny):
    """All but those that need a GPU; the words at the end say so."""
    assert count(collected(run_tiny("--collect-only", "-q", "--full"))) == WHOLE
    text = run_tiny("--full", "-n", "2", "--sample-seed", "7")
    assert "tier: full, --sample-seed 7" in text
    assert re.search(rf"full tier: 55 of 55 tests in \d+ s of work; the sample of seed 7: {CASES + 3} tests in \d+ s", text), text


def test_wide_tier_keeps_more(run_tiny):
    """Twice as many cases as the broad tier, as many of the functions left to the full one as that keeps of others, and all
    examples of a property."""
    kept = count(collected(run_tiny("--collect-only", "-q", "--wide", "--sample-seed", "1")))
    expected = {"a": {"many": WIDE * CASES, "slow": CASES}, "b": {"one": WIDE, "plain": 1, "property": 1}}
    assert kept == expected
    assert "<200 examples" in run_tiny("-rP", "-n0", "--wide", "--sample-seed", "3", ".")


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["test_a.py"], {"a": WHOLE["a"]}),
        (["test_a.py", "."], {"a": WHOLE["a"], "b": {"one": 1, "plain": 1, "property": 1}}),
        (["test_b.py::test_one"], {"b": {"one": 10}}),
        (["-k", "slow"], {"a": {"slow": 3}}),
        (["-m", "gpu"], {"a": {"gpu": 6}}),
    ],
    ids=["file", "file and folder", "node id", "keyword", "gpu"],
)
@pytest.mark.cases(2)
def test_what_is_named_runs_whole(args, expected, run_tiny):
    """A file, a node id, a keyword or `-m gpu` gets all of its tests; a folder beside a file is sampled."""
    assert count(collected(run_tiny("--collect-only", "-q", *args))) == expected


def test_workers_run_the_sample_of_the_seed(run_tiny):
    """Two workers run what one process runs, and draw the same examples, of which the full tier has more."""
    alone = run_tiny("-v", "-rP", "-n0", "--sample-seed", "3")
    shared = run_tiny("-v", "-rP", "-n2", "--sample-seed", "3")
    ran = [{word for word in text.split() if word.startswith("test_") and "::" in word} for text in (alone, shared)]
    assert len(ran[0]) == CASES + 3 and ran[0] == ran[1]
    drawn = [next(line for line in text.splitlines() if line.startswith("<")) for text in (alone, shared)]
    assert drawn[0] == drawn[1] and drawn[0].startswith("<40 examples")
    assert "<200 examples" in run_tiny("-rP", "-n0", "--full", "--sample-seed", "3", "test_b.py::test_property")


def test_sample_prefers_new_values():
    """Five cases of a grid of 5 x 3 have every value of both parameters; a lone case is taken whatever the seed."""
    grid = [Case("m", "m::f", f"{a}-{b}", {"a": a, "b": b}, most=5) for a, b in product(range(5), range(3))]
    for seed in SEEDS:
        *kept, alone = sample([*grid, Case("m", "m::g")], seed)
        chosen = [case for case, keep in zip(grid, kept, strict=True) if keep]
        assert alone and len(chosen) == 5
        assert {case.values["a"] for case in chosen} == set(range(5)) and {case.values["b"] for case in chosen} == set(range(3))


def test_a_case_left_to_the_full_tier_leaves_the_others_of_its_function():
    """The broad tier keeps the other case of that function."""
    cases = [Case("m", "m::f", "small", {"size": 0}), Case("m", "m::f", "large", {"size": 1}, most=0)]
    assert all(sample(cases, seed) == [True, False] for seed in SEEDS)


def test_functions_of_a_module_share_their_cases():
    """Functions over the same cases keep the same ones; over the seeds, every case has its turn."""
    cases = [Case("m", function, str(i), {"i": i}, most=2) for function in ("m::f", "m::g") for i in range(6)]
    samples = [sample(cases, seed) for seed in SEEDS]
    assert all(kept[:6] == kept[6:] and sum(kept[:6]) == 2 for kept in samples)
    assert all(any(kept[i] for kept in samples) for i in range(6))


def test_the_quick_tier_spends_its_budget():
    """It keeps what takes little, in the cases of the broad tier, and of what takes long as much as there is time for."""
    cases = [Case(name, f"{name}::f", str(i), {"i": i}) for name in ("short", *(f"long{n}" for n in range(30))) for i in range(3)]
    seconds = {f"long{n}": BUDGET_S / 10 for n in range(30)} | {"of_another_tree": 1.0}
    found = []
    for seed in SEEDS:
        quick, broad = quick_sample(cases, seed, seconds), sample(cases, seed)
        chosen = {case.module for case, keep in zip(cases, quick, strict=True) if keep}
        assert [keep and case.module in chosen for case, keep in zip(cases, broad, strict=True)] == quick
        assert "short" in chosen and len(chosen) == 11
        found.append(chosen)
    assert set.union(*found) == {case.module for case in cases}
    assert sum(quick_sample(cases, 0, {"long0": 2 * BUDGET_S})) == sum(sample(cases, 0)) - CASES


def test_modules_that_take_long_are_known():
    """The table of what takes long names modules that there are, for many times the budget. A few may have gone."""
    known = seconds_of_modules()
    gone = [name for name in known if not (Path(__file__).parents[1] / name).exists()]
    assert len(gone) < 0.1 * len(known), gone
    assert sum(known.values()) > 3 * BUDGET_S


def test_seconds_are_those_of_modules(tmp_path, monkeypatch):
    """All cases of a module together, if they take long."""
    monkeypatch.setattr(tiers, "SECONDS", tmp_path / "seconds.json")
    tiers._write_seconds({"test_a.py::test_x[1]": 2.0, "test_a.py::test_y": 1.25, "test_b.py::test_x": 0.5})
    assert seconds_of_modules() == {"test_a.py": 3.2}


def test_every_module_has_a_test_in_the_broad_tier(request):
    """Whatever the seed, each module and each function that isn't marked `full` keeps a test, and full runs select everything."""
    cases = request.config.stash[COLLECTED]
    for seed in SEEDS:
        chosen = [case for case, keep in zip(cases, sample(cases, seed), strict=True) if keep]
        assert {case.module for case in chosen} == {case.module for case in cases}
        assert {case.function for case in chosen} == {case.function for case in cases if case.most > 0}
    if request.config.option.full:
        assert len(request.session.items) == len(cases)
