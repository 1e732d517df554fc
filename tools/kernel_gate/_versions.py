"""Versions: kernels compiled and tested with every version of Triton that mpar supports, each installed in its own folder."""

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["CACHE", "VERSIONS", "all_versions"]

ROOT = Path(__file__).resolve().parents[2]
VERSIONS = {"3.6.0": ("numpy<2.4",), "3.9.0": ()}
"""Versions of Triton with what else they need: the interpreter of 3.6 uses arrays as indices in a way that numpy 2.4 refuses."""
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "mpar" / "triton"


@dataclass(frozen=True)
class Step:
    """A command that was run with one version of Triton, and how it ended."""

    version: str
    name: str
    code: int
    seconds: float


def all_versions(versions: Sequence[str], *, cache: Path, jobs: int, compile_words: Sequence[str]) -> int:
    """Install, compile and test each version, and print a summary. Returns how many of these commands failed."""
    steps: list[Step] = []
    for version in versions:
        folder = cache / version
        if not _installed(folder):
            steps.append(_step(version, "install", _install(version, folder), dict(os.environ)))
            if steps[-1].code:
                continue
            (folder / "complete").touch()
        environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        paths = [str(folder), str(ROOT), *environment.get("PYTHONPATH", "").split(os.pathsep)]
        environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
        compiling = [sys.executable, "-m", "tools.kernel_gate", "compile", "--jobs", str(jobs), *compile_words]
        testing = [sys.executable, "-m", "pytest", "-q", "--full", "-n", str(jobs), "tests/kernels"]
        steps += [_step(version, name, words, environment) for name, words in (("compile", compiling), ("test", testing))]
    for step in steps:
        verdict = "ok" if step.code == 0 else f"FAILED with code {step.code}"
        sys.stdout.write(f"Triton {step.version}  {step.name:8} {step.seconds:6.0f} s  {verdict}\n")
    return sum(step.code != 0 for step in steps)


def _installed(folder: Path) -> bool:
    return (folder / "complete").exists()


def _install(version: str, folder: Path) -> list[str]:
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--upgrade", "--no-deps", "--target", str(folder)]
    return [*pip, f"triton=={version}", *VERSIONS.get(version, ())]


def _step(version: str, name: str, command: Sequence[str], environment: dict[str, str]) -> Step:
    sys.stdout.write(f"=== Triton {version}: {name}\n")
    sys.stdout.flush()
    started = time.perf_counter()
    code = subprocess.run(command, cwd=ROOT, env=environment).returncode
    return Step(version, name, code, time.perf_counter() - started)
