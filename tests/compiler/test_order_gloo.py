"""Order on real processes: over gloo random programs have the bits of the simulation, as they are written and when ordered.

The full tier takes a few programs, `--attack` takes 500.
"""

import pathlib
import pickle

import pytest
import torch

from mpar.program import Program
from mpar.shards import shard
from tests.compiler.order_worker import Key, Results, Tensors, stacked
from tests.compiler.random_programs import MODEL, random_pair
from tests.gloo_training import random_batches
from tests.processes import torchrun

NUM_PROGRAMS, BLOCK, IN_FULL_TIER = 500, 25, 6
BATCHES = random_batches(2, (8, 8), vocab_size=96)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """The seeds come in blocks, so that an attack shows how far it is."""
    if "seeds" not in metafunc.fixturenames:
        return
    ends = range(BLOCK, NUM_PROGRAMS + 1, BLOCK) if metafunc.config.option.attack else [IN_FULL_TIER]
    blocks = [range(max(0, end - BLOCK), end) for end in ends]
    metafunc.parametrize("seeds", blocks, ids=[f"{seeds[0]}-{seeds[-1]}" for seeds in blocks])


def simulate(program: Program) -> tuple[Tensors, Tensors]:
    """The metrics of all steps, and the global state behind the last."""
    state, metrics = program.init_state(MODEL.init(0)), []
    for batch in BATCHES:
        state, found = program.simulate(state, batch)
        metrics.append(found)
    return stacked(metrics), state.leaves


def run_on_processes(folder: pathlib.Path, programs: dict[Key, Program], num_ranks: int) -> list[Results]:
    """What each rank found for each program, from one launch."""
    folder.mkdir()
    (folder / "programs.pickle").write_bytes(pickle.dumps((programs, BATCHES)))
    done = torchrun(pathlib.Path(__file__).with_name("order_worker.py"), str(folder), num_ranks=num_ranks)
    assert done.returncode == 0, done.stderr[-3000:]
    return [torch.load(folder / f"{rank}.pt") for rank in range(num_ranks)]


def assert_equal(found: Tensors, expected: Tensors, where: str) -> None:
    """Both have the same names and the same bits."""
    assert found.keys() == expected.keys(), where
    unequal = [name for name in expected if not torch.equal(found[name], expected[name])]
    assert not unequal, f"{where}: {unequal}"


@pytest.mark.gloo
@pytest.mark.full("launches two and four processes; test_order.py has programs in simulation")
def test_random_programs_keep_their_bits(seeds, tmp_path):
    """Every ordered program is valid, no longer and within memory. Simulated and on processes, where queues are threads, it has
    the bits of the simulated program as it is written; on processes that one has them too."""
    programs, expected = {}, {}
    for seed in seeds:
        pair = random_pair(seed)
        pair.check_order()
        expected[seed] = simulate(pair.as_written)
        for found, wanted in zip(simulate(pair.ordered), expected[seed], strict=True):
            assert_equal(found, wanted, f"seed {seed}, simulated")
        programs |= {(seed, "as written"): pair.as_written, (seed, "ordered"): pair.ordered}
    for num_ranks in (2, 4):
        launched = {key: program for key, program in programs.items() if program.mesh.size == num_ranks}
        ranks = run_on_processes(tmp_path / str(num_ranks), launched, num_ranks)
        for (seed, form), program in launched.items():
            metrics, leaves = expected[seed]
            for rank, results in enumerate(ranks):
                stored = program.part(rank).state_out
                local = {leaf.path: shard(leaves[leaf.path], leaf.spec, program.mesh, rank) for leaf in stored}
                for found, wanted in zip(results[seed, form], (metrics, local), strict=True):
                    assert_equal(found, wanted, f"seed {seed} {form}, rank {rank}")


def test_a_seed_is_one_pair_of_programs():
    """Processes may make the same programs from a seed as their parent did."""
    first, again = random_pair(5), random_pair(5)
    assert (first.as_written.text(), first.ordered.text()) == (again.as_written.text(), again.ordered.text())
    assert first.hardware == again.hardware
