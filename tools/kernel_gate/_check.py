"""Check: run every case that is for this machine's GPU on it, against float64 and against a second run of itself."""

import traceback
from typing import TextIO

from mpar.kernels import kernels_for
from tools.checked_kernels import checked, make_on
from tools.kernel_gate._case import all_cases, calling

__all__ = ["check_cases"]


def check_cases(out: TextIO, device: str = "cuda") -> int:
    """Write a line for each case that is for this chip, and a traceback for each that fails. Returns how many fail."""
    arch, num_wrong = kernels_for("auto", device).arch, 0
    cases = [case for case in all_cases() if not case.archs or arch in case.archs]
    cases.sort(key=lambda case: "gluon" in case.name)  # last, since kernels in Gluon wait at barriers of their own and can hang
    for case in cases:
        try:
            with calling(checked):
                case.run(make_on(device))
            out.write(f"right  {case.name}\n")
        except Exception:  # whatever the error is, the other cases are still checked
            num_wrong += 1
            out.write(f"WRONG  {case.name}\n{traceback.format_exc()}\n")
        out.flush()
    out.write(f"{len(cases) - num_wrong} of {len(cases)} cases are right\n")
    return num_wrong
