"""Worker: one variant in a process of its own. It builds, takes blocks of steps when asked, and gives back memory in between."""

import gc
import importlib.metadata
import itertools
import time
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from bench.step._case import Case, Variant
from bench.step._ours import Ours
from bench.step._peer import Peer
from bench.step._profile import profile_step

__all__ = ["serve"]

WARM_STEPS = 5
"""Steps before any figure: the first loads kernels and compiles, the second is recorded as a graph."""
AGAIN_STEPS = 2
"""Steps before each block, in which memory is allocated again."""
FEWEST, MOST = 4, 200


def serve(connection: Connection, case: Case, variant: Variant, device: str) -> None:
    """Answer ("build",), ("block", seconds) and ("profile", folder, trace) until nobody asks. Failures have a "status"."""
    worker = _Worker(case, variant, torch.device(device))
    while True:
        try:
            question, *rest = connection.recv()
        except EOFError:
            return
        try:
            answer = getattr(worker, question)(*rest)
        except torch.OutOfMemoryError as error:
            answer = {"status": "out of memory", "error": str(error).splitlines()[0]}
        except Exception as error:  # whatever the error is, it is reported, and other variants go on
            where = traceback.extract_tb(error.__traceback__)[-1]
            words = (str(error).splitlines() or [""])[0][:300]
            answer = {
                "status": "failed",
                "error": f"{type(error).__name__}: {words} ({Path(where.filename).name}:{where.lineno})",
            }
        connection.send((True, answer))


class _Worker:
    """The variant that one process trains."""

    def __init__(self, case: Case, variant: Variant, device: torch.device) -> None:
        self.case, self.variant, self.device = case, variant, device
        self.cuda = device.type == "cuda"
        self.trainer: Any = None

    def build(self) -> dict[str, Any]:
        """Make the variant and take the first steps. Returns their losses and seconds, the peak memory and the prediction."""
        started = time.perf_counter()
        self.trainer = (Ours if self.variant.ours else Peer)(self.case, self.variant, self.device)
        recorded = self.variant.execution == "cuda_graph"
        if recorded:  # replays allocate nothing: what they need was allocated by the step that was recorded
            self._forget_peak()
        losses = [float(self.trainer.step())]
        self._park()  # a recorded graph has memory of its own
        losses += [float(self.trainer.step()) for _ in range(WARM_STEPS - 1)]
        built_s = time.perf_counter() - started
        self._park()
        if not recorded:
            self._forget_peak()
        losses += [float(self.trainer.step()) for _ in range(AGAIN_STEPS)]
        answer = {"about": self.trainer.about, "losses": losses, "built_s": built_s, "torch": torch.__version__}
        if not self.variant.ours:
            answer["transformers"] = importlib.metadata.version("transformers")
        if predicted := self.trainer.predicted:
            answer |= {"predicted": predicted, "predicted_bytes": predicted["need_bytes"]}
        if self.cuda:
            answer |= {"peak_bytes": torch.cuda.max_memory_allocated(), "reserved_bytes": torch.cuda.max_memory_reserved()}
            answer["total_bytes"] = torch.cuda.get_device_properties(self.device).total_memory
        return answer

    def block(self, seconds: float) -> dict[str, Any]:
        """Milliseconds of each of some steps, and the mean by the wall clock. Then memory that is not needed is given back."""
        estimate = self._timed(AGAIN_STEPS)[-1] / 1e3
        count = max(FEWEST, min(MOST, int(seconds / max(estimate, 1e-6))))
        started = time.perf_counter()
        times = self._timed(count)
        wall_ms = 1e3 * (time.perf_counter() - started) / count
        last = float(self.trainer.step())
        self._park()
        held = torch.cuda.memory_reserved() if self.cuda else 0
        return {"times": times, "wall_ms": wall_ms, "last_loss": last, "held_bytes": held}

    def profile(self, folder: str, trace: bool) -> dict[str, Any]:
        """The kernels of one step; with `trace` a file in `folder` too, which has all that happens in the step."""
        self._timed(AGAIN_STEPS)
        name = f"{self.case.key}_{self.variant.name.replace(' ', '_')}"
        return {"kernels": profile_step(self.trainer.step, Path(folder), name, trace=trace and self.variant.ours, cuda=self.cuda)}

    def _timed(self, count: int) -> list[float]:
        """Milliseconds from the beginning of each step to that of the next; nothing waits between steps."""
        if not self.cuda:
            times = []
            for _ in range(count):
                started = time.perf_counter()
                self.trainer.step()
                times.append(1e3 * (time.perf_counter() - started))
            return times
        events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
        torch.cuda.synchronize()
        events[0].record()
        for event in events[1:]:
            self.trainer.step()
            event.record()
        torch.cuda.synchronize()
        return [start.elapsed_time(end) for start, end in itertools.pairwise(events)]

    def _forget_peak(self) -> None:
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()

    def _park(self) -> None:
        gc.collect()
        if self.cuda:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
