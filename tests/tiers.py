"""A plugin of pytest: the broad tier (`--broad`) runs some cases of each test, which a seed picks; the quick tier, without an
option, leaves out most modules that take long; the wide tier (`--wide`) runs more cases, the full one (`--full`) all of them.

Tests that a person asks for by name (a file, a node id, `-k`, `--lf`) all run in any tier. Those that need a GPU all run with
`-m gpu`, and none of them without.
"""

import json
import os
import subprocess
from collections import Counter
from collections.abc import Generator, Iterable, Mapping
from pathlib import Path

import pytest
from hypothesis import settings
from xdist.workermanage import WorkerController

from tests.sampling import CASES, Case, quick_sample, sample

__all__ = ["COLLECTED", "examples", "values_asked_for"]

MAX_WORKERS = 8  # each of them holds a gigabyte
LONGEST = 30  # how many modules a long tier names at its end
SECONDS = Path(__file__).with_name("seconds.json")
LEAST_S = 3.0  # what takes less is in no table
COLLECTED = pytest.StashKey[tuple[Case, ...]]()
"""The tests that were collected and need no GPU, before -k, -m or the tier left any out."""


def examples(in_full_tier: int) -> int:
    """How many examples a property takes in this tier, where the full tier takes `in_full_tier`."""
    return max(1, in_full_tier * settings.default.max_examples // 100)


def values_asked_for(request: pytest.FixtureRequest, values: Iterable[str]) -> list[str]:
    """Those of `values` that a selected test of the fixture's module has as a parameter: fixtures need not compute others."""
    items = [item for item in request.session.items if item.path == request.path and isinstance(item, pytest.Function)]
    asked_for = {value for item in items if "[" in item.name for value in item.callspec.params.values() if isinstance(value, str)}
    return [value for value in values if value in asked_for]


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("tiers")
    group.addoption("--full", action="store_true", help="run all tests instead of the quick tier's sample")
    group.addoption("--broad", action="store_true", help="run some cases of each test, also of those that take long")
    measured = f"with --broad: write what each module took, if that is {LEAST_S:g} s or more, to {SECONDS.name}"
    group.addoption("--write-seconds", action="store_true", help=measured)
    wide = "run twice as many cases of a function, and some of those left to the full tier, with all examples of properties"
    group.addoption("--wide", action="store_true", help=wide)
    attacks = (
        "the full tier, with all attacks of tests/faults, 500 random programs over gloo and more mutants in place of samples"
    )
    group.addoption("--attack", action="store_true", help=attacks)
    drawn = "draw the quick tier's sample and the examples of hypothesis by the seed N instead of one that the commit gives"
    group.addoption("--sample-seed", type=int, metavar="N", help=drawn)


@pytest.hookimpl(tryfirst=True)  # the plugin of hypothesis reads its seed after this
def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "full(reason): only the full tier runs this test")
    config.addinivalue_line("markers", f"cases(n): the broad tier keeps n cases of this function; without the mark {CASES}")
    config.addinivalue_line("markers", "gpu: needs a CUDA device; runs where -m asks for it")
    option = config.option
    option.full = option.full or option.attack
    if option.write_seconds and _tier(config) != "broad":
        raise pytest.UsageError("--write-seconds needs --broad: the quick tier knows modules by what that tier takes")
    if hasattr(config, "workerinput"):
        option.sample_seed = config.workerinput["sample_seed"]
    elif option.sample_seed is None:
        option.sample_seed = _seed_of_commit(config.rootpath)
    if option.hypothesis_seed is None:
        option.hypothesis_seed = str(option.sample_seed)
    for tier, max_examples in (("quick", 20), ("full", 100)):
        settings.register_profile(tier, max_examples=max_examples, deadline=None, print_blob=True)  # the machine may be busy
    if option.hypothesis_profile is None:
        settings.load_profile("quick" if _tier(config) in ("quick", "broad") else "full")
    config.pluginmanager.register(_Ledger(config), "tiers_ledger")


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """One worker per core. None on a GPU, with `-s`, and for a single file, which is often done before workers have started."""
    single_file = len(config.args) == 1 and len(_named_files(config)) == 1
    alone = single_file or _wants_gpu(config) or config.option.capture == "no"
    return 0 if alone else min(len(os.sched_getaffinity(0)), MAX_WORKERS)


def pytest_configure_node(node: WorkerController) -> None:
    """Workers get the seed from here: the commit may change while they run."""
    node.workerinput["sample_seed"] = node.config.option.sample_seed


class _Ledger:
    """What was collected, what of it was selected, and how long the tests took."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.in_sample: dict[str, bool] = {}  # node id of each collected test -> whether the quick tier's sample has it
        self.num_selected = 0
        self.seconds: Counter[str] = Counter()

    @pytest.hookimpl(wrapper=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> Generator[None, None, None]:
        collected = [item for item in items if item.get_closest_marker("gpu") is None]
        config.stash[COLLECTED] = tuple(_case(item) for item in collected)
        yield  # -k and -m leave out theirs
        self._select(config, items)

    def _select(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        wants_gpu = _wants_gpu(config)
        runnable = [item for item in items if wants_gpu or item.get_closest_marker("gpu") is None]
        cases = tuple(_case(item) for item in runnable)
        if _tier(config) == "quick":
            sampled = quick_sample(cases, config.option.sample_seed, seconds_of_modules())
        else:
            sampled = sample(cases, config.option.sample_seed, wide=config.option.wide)
        self.in_sample = {item.nodeid: in_sample for item, in_sample in zip(runnable, sampled, strict=True)}
        everything = config.option.full or wants_gpu or bool(config.option.keyword) or bool(config.getoption("lf", False))
        named = _named_files(config)
        selected = {item for item in runnable if everything or self.in_sample[item.nodeid] or item.path in named}
        self.num_selected = len(selected)
        config.hook.pytest_deselected(items=[item for item in items if item not in selected])
        items[:] = [item for item in items if item in selected]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A failure is named at once: a run that is cut short does not get to its summary."""
        self.seconds[report.nodeid] += report.duration
        terminal = self.config.pluginmanager.get_plugin("terminalreporter")
        if report.failed and terminal is not None and terminal.verbosity == 0:
            terminal.write(f"\nFAILED {report.nodeid} ({report.when})\n", red=True)

    def pytest_sessionfinish(self) -> None:
        if hasattr(self.config, "workerinput"):
            self.config.workeroutput.update(in_sample=self.in_sample, num_selected=self.num_selected)
        elif self.config.option.write_seconds:
            _write_seconds(self.seconds)

    def pytest_testnodedown(self, node: WorkerController) -> None:
        if hasattr(node, "workeroutput"):  # a worker that crashed has none
            self.in_sample, self.num_selected = node.workeroutput["in_sample"], node.workeroutput["num_selected"]

    def pytest_report_header(self, config: pytest.Config) -> str:
        return f"tier: {_tier(config)}, --sample-seed {config.option.sample_seed}"

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
        ran = f"{self.num_selected:,} of {len(self.in_sample):,} tests in {self.seconds.total():,.0f} s of work"
        sample_s = sum(seconds for name, seconds in self.seconds.items() if self.in_sample.get(name))
        sampled = f"{sum(self.in_sample.values()):,} tests in {sample_s:,.0f} s"
        modules = Counter[str]()
        for name, seconds in self.seconds.items():
            modules[name.partition("::")[0]] += seconds
        if _tier(config) != "quick":
            longest = (f"{name} {seconds:,.0f} s" for name, seconds in modules.most_common(LONGEST))
            terminalreporter.write_line("the modules that took longest: " + ", ".join(longest))
        terminalreporter.write_line(f"{_tier(config)} tier: {ran}; the sample of seed {config.option.sample_seed}: {sampled}")


def seconds_of_modules() -> Mapping[str, float]:
    """What the modules that take long take in the broad tier, by their paths."""
    return json.loads(SECONDS.read_text()) if SECONDS.exists() else {}


def _write_seconds(seconds: Mapping[str, float]) -> None:
    taken = Counter[str]()
    for name, each in seconds.items():
        taken[name.partition("::")[0]] += each
    long = {name: round(each, 1) for name, each in sorted(taken.items()) if each >= LEAST_S}
    SECONDS.write_text(json.dumps(long, indent=0) + "\n")


def _wants_gpu(config: pytest.Config) -> bool:
    """Whether the expression of `-m` names `gpu`, and not in order to leave it out."""
    return "gpu" in config.option.markexpr.replace("not gpu", "")


def _tier(config: pytest.Config) -> str:
    return next((tier for tier in ("full", "wide", "broad") if config.getoption(tier)), "quick")


def _seed_of_commit(root: Path) -> int:
    """The first 32 bits of the commit's name; 0 outside of a repository."""
    found = subprocess.run(["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True, check=False)
    return int(found.stdout[:8], 16) if found.returncode == 0 else 0


def _named_files(config: pytest.Config) -> set[Path]:
    """The files that the command line names, alone or in a node id."""
    paths = (config.invocation_params.dir / arg.split("::")[0] for arg in config.args)
    return {path.resolve() for path in paths if path.is_file()}


def _case(item: pytest.Item) -> Case:
    """What the sample has to know of a test."""
    full, cases = item.get_closest_marker("full"), item.get_closest_marker("cases")
    if full is not None and not (full.args and isinstance(full.args[0], str)):
        raise pytest.UsageError(f"{item.nodeid}: the mark `full` needs a reason, as in full('trains for 30 s')")
    most = 0 if full is not None else CASES if cases is None else cases.args[0]
    name, _, label = item.name.partition("[")
    place = item.nodeid.removesuffix(item.name) + name
    values = item.callspec.indices if label else {}
    return Case(module=item.nodeid.split("::")[0], function=place, label=label, values=values, most=most)
