"""A runner whose programs are simulated: all ranks of a mesh in this process."""

from mpar.infer.compile import ProgramRunner

__all__ = ["SimulatedRunner"]


class SimulatedRunner(ProgramRunner):
    """The runner of all ranks together, whose state is global."""

    def _bound(self, program):
        return program.simulate

    def _first_state(self, program, params):
        return program.init_state(self._given(params))
