"""Golden programs: the printed programs of a few strategies are in the repository: a change of the compiler shows as a diff.

After a change that is meant, write them again with `python -m tests.program.test_golden` and read the diff.
"""

import pathlib

import pytest

from mpar import models
from mpar.mesh import Mesh
from mpar.optim import AdamW
from mpar.program import Hardware
from mpar.program.compile import compile_step
from tests.small_llama import CONFIG

HERE = pathlib.Path(__file__).with_name("golden")
CASES = {
    "ddp_dp2": (Mesh(dp=2), "ddp", {}),
    "zero3_fsdp2": (Mesh(fsdp=2), "zero3", {"num_microbatches": 2, "bucket_bytes": 0}),
    "zero3_tp_sp_fsdp2_tp2": (Mesh(fsdp=2, tp=2), "zero3_tp_sp", {"recompute": "selective"}),
}
PROFILE = Hardware("round numbers", {"float32": 1e12}, 1e11, 2**34, 1e10, 1e-5, 1e9, 1e-4, 8, 1e-6)


def printed(case: str) -> str:
    """The program of a case, then the code of its layer's forward."""
    mesh, strategy, options = CASES[case]
    program = compile_step(models.from_config(CONFIG), AdamW(lr=1e-3), mesh, strategy, (8, 16), **options)
    return f"{program.text(0, PROFILE)}\n\n{program.kinds['layers forward'].source}"


@pytest.mark.parametrize("case", CASES)
def test_program_is_as_it_was(case):
    """Instructions, operands, collectives, bytes, predicted times and generated code have not changed unnoticed."""
    assert printed(case) == (HERE / f"{case}.txt").read_text()


if __name__ == "__main__":
    for name in CASES:
        (HERE / f"{name}.txt").write_text(printed(name))
