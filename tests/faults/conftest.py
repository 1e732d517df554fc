"""Attacks: each test carries out a sample of them, in each tier another number; `--attack` carries out all."""

import random
from collections.abc import Callable

import pytest

from tests.faults.runs import EVEN, FaultRun, numbers


@pytest.fixture
def extent(request: pytest.FixtureRequest) -> Callable[[int, int, int], int]:
    """`extent(quick, full, everything)`: the number of attacks for the tier that runs."""

    def choose(quick: int, full: int, everything: int) -> int:
        option = request.config.option
        return everything if option.attack else full if option.full else quick

    return choose


@pytest.fixture
def some(request: pytest.FixtureRequest, extent: Callable[[int, int, int], int]) -> Callable[[list[str]], list[str]]:
    """`some(names)`: one of them in the broad tier, two in the full one, else all; the seed of the tiers picks them."""

    def choose(names: list[str]) -> list[str]:
        draw = random.Random(f"{request.config.option.sample_seed} {request.node.name}")
        return draw.sample(names, extent(1, 2, len(names)))

    return choose


@pytest.fixture
def start(tmp_path):
    """`start("steps=5", ...)`: a run of `mpar train`, killed when the test ends. Runs of the same `name` share a folder."""
    runs: list[FaultRun] = []

    def launch(*args: str, name: str = "only") -> FaultRun:
        (tmp_path / name).mkdir(exist_ok=True)
        runs.append(FaultRun(tmp_path / name, args))
        return runs[-1]

    yield launch
    for run in runs:
        run.kill()


@pytest.fixture
def undisturbed(start, tmp_path) -> Callable[[int], list[tuple]]:
    """`undisturbed(steps)`: the numbers of a run of so many steps, with an even learning rate, that nothing disturbs."""

    def train(steps: int) -> list[tuple]:
        run = start(*EVEN, f"steps={steps}", name=f"undisturbed-{len(list(tmp_path.iterdir()))}")
        assert run.end() == 0, run.printed
        return numbers(run.run_dir)

    return train
