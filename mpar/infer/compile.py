"""Inference by compiled programs. Importing this loads the compiler, which importing `mpar.infer` does not."""

from mpar.infer._compile_decode import compile_decode
from mpar.infer._program_runner import ProgramRunner

__all__ = ["ProgramRunner", "compile_decode"]
