"""Run: the variants of each case, each in a process that may fail, take blocks of steps in turn while there is time."""

import math
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench._child import Child, ChildFailed
from bench._gpu import this_gpu_run
from bench._result import Origin, Result, append_results
from bench._timing import Times
from bench.step._case import CASES, PEAK_FLOPS_PER_S, VARIANTS, Case, Variant, main_peer
from bench.step._peer import missing
from bench.step._report import sentence, write_table
from bench.step._worker import serve
from mpar import models

__all__ = ["run"]

BUILD_S = 240.0
"""Seconds until the first steps of a variant must be done; torch.compile takes minutes."""
BLOCK_S, ROUNDS, ANSWER_S = 3.0, 3, 60.0
TURN_S, PROFILE_S = 5.0, 8.0
"""Seconds that are planned for a block, with the steps before it, and for a profile."""
SPARE_S = 12.0
"""Seconds that are kept for the end, with the last block."""
PARKED = 0.45
"""The share of a device's memory that waiting variants may hold while another one is built."""


def run(
    keys: Sequence[str], names: Sequence[str], *, tiny: bool, seconds: float, out: Path, commit: str, profile: bool
) -> list[Result]:
    """Measure cases, or with `tiny` toy sizes on the CPU. Files are written as rows are done. Returns a result for each row."""
    started = time.perf_counter()
    cases = [case for case in CASES if not keys or case.key in keys]
    variants = [variant for variant in VARIANTS if not names or variant.name in names]
    began = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime())
    origin = replace(Origin() if tiny else this_gpu_run(commit), run=began)
    share, given, results = sum(case.share for case in cases), 0.0, []
    for case in cases:
        given += case.share
        ends = started + (seconds - SPARE_S) * given / share
        one = _Case(case.shrunk() if tiny else case, origin, started, ends, out, "cpu" if tiny else "cuda", profile)
        results += one.run(variants)
    return results


class _Case:
    """The rows of one case."""

    def __init__(self, case: Case, origin: Origin, started: float, ends: float, out: Path, device: str, profile: bool) -> None:
        self.case, self.origin, self.out, self.device, self.profile = case, origin, out, device, profile
        self.started, self.ends, self.total_bytes = started, ends, 0
        self.alive: dict[str, Child] = {}
        self.lines: dict[str, dict[str, Any]] = {}
        self.times: dict[str, Times] = {}
        self.walls: dict[str, list[float]] = {}

    def run(self, variants: Sequence[Variant]) -> list[Result]:
        """Build each variant and time its first block; then time more blocks in turn; then, if asked for, profile each."""
        try:
            for variant in variants:
                self.lines[variant.name] = self._start(variant)
                self._write(variant.name)
            for _ in range(1, ROUNDS):
                for name in list(self.alive):
                    self._block(name)
            for name in self.times:
                self._write(name)
            if self.profile:
                self._profile()
        finally:
            for name in list(self.alive):
                self._close(name)
        return [self._result(name) for name in self.lines]

    def _result(self, name: str) -> Result:
        """The result of a variant, as far as it is known."""
        return Result.of({"case": self.case.key, "variant": name} | self.lines[name], self.origin)

    def _left(self) -> float:
        return self.ends - time.perf_counter()

    def _start(self, variant: Variant) -> dict[str, Any]:
        if why := missing(variant, cpu=self.device == "cpu"):
            return {"status": "missing", "error": why}
        self._make_room()
        answer = self._build(variant)
        if answer.get("status") == "out of memory" and self.alive:
            for name in list(self.alive):
                self._close(name)
            answer = self._build(variant)
        if "status" in answer:
            return answer
        self.times[variant.name], self.walls[variant.name] = Times(), []
        self.lines[variant.name] = answer | {"status": "not timed"}
        self._block(variant.name)
        return self.lines[variant.name]

    def _build(self, variant: Variant) -> dict[str, Any]:
        later = TURN_S * (ROUNDS - 1) + (PROFILE_S if self.profile else 0.0)  # what each variant still needs
        left = self._left() - TURN_S - later * (1 + len(self.alive))
        if left <= 0:
            return {"status": "not reached", "error": "time was over"}
        child = Child(serve, self.case, variant, self.device)
        try:
            answer = child.ask(("build",), min(left, BUILD_S))
        except ChildFailed as failure:
            over = left < BUILD_S and "no answer" in str(failure)
            answer = {"status": "not reached" if over else "failed", "error": f"while it was built: {failure}"}
        if "status" in answer:
            child.close()
        else:
            self.alive[variant.name] = child
            self.total_bytes = answer.get("total_bytes", 0)
        return answer

    def _block(self, name: str) -> None:
        if self._left() <= 0:
            return
        try:
            seconds = BLOCK_S if self.device == "cuda" else 0.0
            answer = self.alive[name].ask(("block", seconds), min(ANSWER_S, self._left() + SPARE_S / 2))
        except ChildFailed as failure:
            answer = {"status": "failed", "error": f"in a block of steps: {failure}"}
        if "status" in answer:
            self._close(name)
            words = f"{answer['status']} in round {len(self.walls[name]) + 1}: {answer['error']}"
            self.lines[name] |= {"cut": words} if self.walls[name] else answer
            return
        self.times[name].rounds.append(answer["times"])
        self.walls[name].append(answer["wall_ms"])
        held, last = answer["held_bytes"], answer["last_loss"]
        self.lines[name] |= self._figures(name) | {"status": "ok", "held_bytes": held, "last_loss": last}
        losses = [*self.lines[name]["losses"], last]
        if not all(math.isfinite(loss) for loss in losses):
            self.lines[name] |= {"status": "failed", "error": f"losses {losses}"}
            self._close(name)

    def _figures(self, name: str) -> dict[str, Any]:
        """Rates of the median step: tokens per second, and FLOP/s by both ways to count attention."""
        line, case = self.times[name].summary(), self.case
        line["wall_ms"] = min(self.walls[name])
        line["tokens_per_s"] = case.num_tokens / (1e-3 * line["ms"])
        model = models.from_config(case.config())
        for suffix, causal in (("", False), ("_causal", True)):
            rate = models.flops_per_token(model, case.seq_len, causal=causal) * line["tokens_per_s"]
            line |= {f"flops_per_s{suffix}": rate, f"mfu{suffix}": rate / PEAK_FLOPS_PER_S}
        return line

    def _make_room(self) -> None:
        """Close the waiting variants that hold most memory until the others hold little; the fastest of each side go last."""
        best = self._fastest()
        held = {name: self.lines[name].get("held_bytes", 0) for name in self.alive}
        for name in sorted(held, key=lambda name: (name in best, -held[name])):
            if sum(held[other] for other in self.alive) <= PARKED * self.total_bytes:
                return
            self._close(name)

    def _fastest(self) -> set[str]:
        """The names of our fastest variant, and of the fastest peer that ours are compared with by bars."""
        timed = {name: line["ms"] for name, line in self.lines.items() if line["status"] == "ok"}
        ours = [variant.name for variant in VARIANTS if variant.ours and variant.name in timed]
        sides = (ours, main_peer(list(timed)))
        return {min(side, key=timed.__getitem__) for side in sides if side}

    def _profile(self) -> None:
        best = self._fastest()
        for name in list(self.alive):
            if self._left() <= 0:
                return
            try:
                answer = self.alive[name].ask(("profile", str(self.out), name in best), min(ANSWER_S, self._left() + SPARE_S / 2))
            except ChildFailed as failure:
                answer = {"status": "failed", "error": str(failure)}
            text = answer.get("kernels") or f"## {self.case.key} {name}\n\nNo profile: {answer['error']}\n"
            self.out.mkdir(parents=True, exist_ok=True)
            with (self.out / "step_kernels.md").open("a", encoding="utf-8") as file:
                file.write(f"{text}\n")

    def _close(self, name: str) -> None:
        self.alive.pop(name).close()

    def _write(self, name: str) -> None:
        result = self._result(name)
        sys.stdout.write(f"[{time.perf_counter() - self.started:.0f} s] {sentence(result)}\n")
        sys.stdout.flush()
        if self.device == "cuda":
            append_results(self.out / "step.jsonl", [result])
            write_table(self.out)
