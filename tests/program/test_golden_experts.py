"""A golden program with a shared sequence and spread experts; see test_golden.py.

After a change that is meant, write it again with `python -m tests.program.test_golden_experts` and read the diff.
"""

from dataclasses import replace

from mpar import models
from mpar.mesh import Mesh
from mpar.optim import AdamW
from mpar.program.compile import compile_step
from mpar.strategy import preset
from tests.program.oracle import MOE
from tests.program.test_golden import HERE, PROFILE

FILE = HERE / "ddp_dp2_cp2_ep2.txt"


def printed() -> str:
    """The program, then the code of its layer, forward and backward."""
    strategy = replace(preset("ddp"), context_parallel="ring", expert_parallel=2, expert_axes=("cp",))
    model = models.from_config(MOE, vocab_multiple=8)
    program = compile_step(model, AdamW(lr=1e-3), Mesh(dp=2, cp=2), strategy, (4, 16))
    codes = [program.kinds[f"layers {way}"].source for way in ("forward", "backward")]
    return "\n\n".join([program.text(0, PROFILE), *codes])


def test_program_is_as_it_was():
    """Instructions, messages, bytes, bounds, predicted times and generated code have not changed unnoticed."""
    assert printed() == FILE.read_text()


if __name__ == "__main__":
    FILE.write_text(printed())
