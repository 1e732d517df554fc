"""The table of kernels: rows are checked before they are timed, what fails stops nothing else, bars are read off the figures."""

import json
import os
import re
import shutil
import subprocess
import sys

import pytest
import torch

from bench._result import RESULTS, Origin, Result
from bench.kernels import _measure
from bench.kernels._measure import measure
from bench.kernels._report import markdown, sentence
from bench.kernels._row import (
    Built,
    Measured,
    Row,
    Variant,
    at_most_ms,
    either,
    extra_memory,
    of_copy,
    of_floor,
    tflops,
    times,
)
from bench.kernels._run import run, write_table
from bench.kernels._server import Server
from bench.kernels.rows import all_rows, long_rows
from tests.bench import stuck
from tests.processes import PATIENCE_S
from tools import kernel_shapes, triton_interpreter
from tools.kernel_shapes import Shape

NOT_BUILT = {22}
"""Rows whose kernels do not exist yet."""


def test_every_row_runs():
    """All rows, at tiny sizes in the interpreter, agree with float64; peers that work on a CPU do too."""
    command = [sys.executable, "-m", "bench.kernels", "run", "--tiny"]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = re.findall(r"^\[\d+ s\] (\d+) .*?: (NOT BUILT)?", done.stdout, re.MULTILINE)
    assert len(lines) == len({(row.name, row.dtype, *row.shape.tiny.items()) for row in all_rows()}) >= 24
    assert {int(number) for number, missing in lines if missing} == NOT_BUILT


def test_the_long_form_runs():
    """Its rows have names of their own, and float16 agrees with float64 in the interpreter."""
    assert len({row.key for row in (*all_rows(), *long_rows())}) == len(all_rows()) + len(long_rows())
    halves = {row.name: row for row in long_rows() if row.dtype == "float16"}
    assert set(halves) == {"attention fwd", "attention bwd"}
    triton_interpreter.install()
    assert [measure(row, "cpu", None, 1.0).get("error") for row in halves.values()] == [None, None]


def test_the_table_is_whole():
    """There is a row for each of the 24 lines of the table, all of other names."""
    rows = all_rows()
    assert {row.number for row in rows} == set(range(1, 25))
    assert len({row.key for row in rows}) == len(rows)
    assert all(row.bars for row in rows if row.build is not None)


def test_rows_have_their_shapes_from_the_table():
    """Every shape that has tiny sizes is a row's, and no row has a shape of its own."""
    named = [value for name, value in vars(kernel_shapes).items() if not name.startswith("_")]
    declared = [
        x
        for value in named
        for x in (value.values() if isinstance(value, dict) else value if isinstance(value, tuple) else [value])
    ]
    timed = {id(x) for x in declared if isinstance(x, Shape) and x.tiny}
    assert timed == {id(row.shape) for row in (*all_rows(), *long_rows()) if row.build is not None}


def row(ours, peers=None, reference=None) -> Row:
    """A row whose results should be 1, 2, 3."""
    expected = reference or (lambda: [torch.tensor([1.0, 2.0, 3.0])])
    return Row(
        12, "a kernel", lambda setting: Built(Variant(ours), peers or {}, expected, 12), Shape({}), [of_copy(0.9)], "float32"
    )


def good() -> list[torch.Tensor]:
    """What they should be."""
    return [torch.tensor([1.0, 2.0, 3.0])]


def test_right_numbers_pass():
    """Its error is in the line, and there is nothing to be said of bars."""
    line = measure(row(good), "cpu", None, 1.0)
    assert (line["status"], line["variants"]["ours"], line["bars"]) == ("ok", {"error": 0.0}, {">= 0.90 of copy": "not measured"})


@pytest.mark.parametrize(
    ("ours", "words"),
    [
        (lambda: [torch.tensor([1.0, 2.0, 3.001])], "relative error"),
        (lambda: [torch.tensor([1.0, 2.0, float("nan")])], "relative error nan"),
        (lambda: [torch.tensor([1.0, 2.0])], "shape"),
        (lambda: [], "zip"),
        (lambda: [torch.empty(3)], "relative error nan"),
    ],
    ids=["far", "nan", "short", "none", "unwritten"],
)
def test_wrong_numbers_fail(ours, words):
    """Far off, no numbers, too few, or memory that nothing was written to."""
    line = measure(row(ours), "cpu", None, 1.0)
    assert line["status"] == "failed" and words in line["error"]


def test_a_peer_that_fails_stops_nothing():
    """Its words are in the line, which is good."""

    def broken():
        raise torch.OutOfMemoryError("a lot of words")

    peers = {"eager": Variant(broken), "liger": "not installed", "wrong": Variant(lambda: [torch.zeros(3)])}
    line = measure(row(good, peers), "cpu", None, 1.0)
    assert line["status"] == "ok"
    cells = {name: cell for name, cell in line["variants"].items() if name != "ours"}
    assert cells["eager"] == {"failed": "OOM"} and cells["liger"] == {"missing": "not installed"}
    assert "relative error 1.00e+00" in cells["wrong"]["failed"]


def test_poison_ends_with_the_check():
    """Torch is as it was before."""
    measure(row(good), "cpu", None, 1.0)
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize(
    ("target", "words"), [(stuck.hangs, "no answer"), (stuck.ends, "died with code 9")], ids=["hangs", "ends"]
)
def test_a_row_that_hangs_or_kills_costs_itself_alone(target, words):
    """It is a failed line, and the next question is answered by another process."""
    server = Server("cpu", target)
    try:
        line = server.measure(row(good), None, 1.0, 20.0 if target is stuck.ends else 0.5)
        assert line["status"] == "failed" and words in line["error"]
        server.target = stuck.answers
        assert server.measure(row(good), None, 1.0, 60.0)["status"] == "ok"
    finally:
        server.close()


@pytest.mark.full("it waits for a hang; a row that hangs is in the broad tier")
def test_what_was_measured_before_a_hang_is_kept():
    """A peer that takes for ever does not cost our own figures."""
    server = Server("cpu", stuck.starts)
    try:
        line = server.measure(row(good), None, 1.0, 8.0)
        assert line["status"] == "ok" and line["variants"]["ours"]["ms"] == 1.0 and line["cut"] == "no answer in 8 s"
    finally:
        server.close()


def test_ours_is_reported_before_peers_run(monkeypatch):
    """The first line has our times and no peer's."""
    seen = []
    timed(monkeypatch, 1.25, seen.append)
    assert [set(line["variants"]) for line in seen] == [{"ours"}] and seen[0]["bars"] == {">= 0.90 of copy": "missed (0.8)"}


@pytest.mark.parametrize(("target", "same"), [(stuck.answers, True), (stuck.sticks, False)], ids=["answers", "sticks"])
def test_a_process_is_kept_unless_its_gpu_is_lost(target, same):
    """After an illegal access nothing more can be done in a process."""
    server = Server("cpu", target)
    try:
        first, second = (server.measure(row(good), None, 1.0, 60.0)["pid"] for _ in range(2))
        assert (first == second) is same
    finally:
        server.close()


def test_time_that_is_over_leaves_rows_out(tmp_path, capsys):
    """Rows that were not reached are said, and count as wrong."""
    assert run([22, 12], tiny=True, seconds=0.0, out=tmp_path, commit="", share=1.0) == 3
    assert capsys.readouterr().out.count("NOT REACHED: time was over") == 3


MEASURED = Measured(
    ms={"ours": 2.0, "eager": 5.0, "sdpa cudnn": 1.5, "sdpa flash": 2.5},
    graph_ms={"ours": 0.015},
    peak_bytes={"ours": 100, "eager": 1000},
    bytes=6_000_000_000,
    flops=1_000_000_000_000,
    copy_bytes_per_s=4e12,
    flops_per_s=8e14,
)


@pytest.mark.parametrize(
    ("bar", "verdict"),
    [
        (times("eager", 2.5), "met (2.5)"),
        (times("sdpa", 0.80), "missed (0.75)"),
        (times("sdpa flash", 1.15), "met (1.25)"),
        (times("liger", 1.0), "not measured"),
        (of_copy(0.75), "met (0.75)"),
        (of_floor(0.80), "missed (0.75)"),
        (tflops(400), "met (500)"),
        (tflops(501), "missed (500)"),
        (at_most_ms(0.02), "met (0.015)"),
        (extra_memory("eager", 0.05), "missed (0.1)"),
        (extra_memory("liger", 0.05), "not measured"),
        (either(times("liger", 1.0), tflops(400)), "met (500)"),
        (either(times("liger", 1.0), tflops(600)), "missed (500)"),
        (either(times("liger", 1.0)), "not measured"),
    ],
    ids=lambda value: getattr(value, "text", None),
)
def test_bars_are_read_off_the_figures(bar, verdict):
    """Ratios to peers, shares of ceilings, rates, memory: met, missed with the figure, or not measured."""
    assert bar.verdict(MEASURED) == verdict


def test_floor_is_the_slower_of_memory_and_arithmetic():
    """6 GB at 4 TB/s last longer than 1 TFLOP at 800 TFLOP/s."""
    assert MEASURED.floor_ms == pytest.approx(1.5)


def timed(monkeypatch, ours_ms: float, partial=lambda line: None) -> dict:
    """A line whose times are given instead of taken."""

    def summary(name: str) -> dict:
        ms = {"ours": ours_ms, "eager": 3.0}[name]
        return {"ms": ms, "q20": ms, "q80": ms, "rounds": [ms, ms], "calls": 9}

    class Times:
        def __init__(self, name: str) -> None:
            self.summary = lambda: summary(name)

    monkeypatch.setattr(_measure._timing, "time_in_turn", lambda runs, *, share: {name: Times(name) for name in runs})
    monkeypatch.setattr(_measure._timing, "peak_bytes", lambda run: 2_000_000)
    monkeypatch.setattr(_measure._timing, "graph_ms", lambda run: 0.5 * ours_ms)
    ceilings = {"copy_bytes_per_s": 12e3, "flops_per_s": 1e15}  # 12 bytes: 1 ms
    peers = {"eager": Variant(good), "liger": "not installed"}
    return measure(row(good, peers), "cpu", ceilings, 1.0, lambda line: partial(json.loads(json.dumps(line))))


def test_a_line_has_what_the_table_shows(monkeypatch):
    """Share of the ceiling, ratio to the best peer, memory, verdicts; and the same in the table and on the screen."""
    line = json.loads(json.dumps(timed(monkeypatch, 1.25)))
    result = Result.of(line, Origin(gpu="a chip", commit="abc"))
    assert line["of_ceiling"] == pytest.approx(0.8) and line["over_best_peer"] == pytest.approx(2.4)
    assert line["bars"] == {">= 0.90 of copy": "missed (0.8)"} and "graph_ms" not in line["variants"]["ours"]
    text = markdown([row(good)], [result])
    (cells,) = [entry.split(" | ") for entry in text.splitlines() if entry.startswith("| 12 | a kernel")]
    assert cells[3:6] == ["1", "1.25 (1.25 to 1.25)", "3"] and cells[7:12] == ["3 (eager)", "0 GB/s", "80 %", "2.40", "2, 2"]
    assert cells[-1] == ">= 0.90 of copy: **missed (0.8)** |"
    assert "gpu a chip" in text and "commit abc" in text and "liger: not installed" in text
    assert "80 % of ceiling" in sentence(result)


def test_short_calls_are_timed_in_a_graph(monkeypatch):
    """Below 0.1 ms what a launch costs would be all that is seen."""
    line = timed(monkeypatch, 0.05)
    assert line["variants"]["ours"]["graph_ms"] == pytest.approx(0.025)


def test_what_was_not_measured_is_said(tmp_path):
    """Without results every row of the table says so, and that nothing was measured."""
    write_table(tmp_path)
    text = (tmp_path / "kernels.md").read_text()
    assert "Nothing here has been measured on a GPU yet." in text
    assert text.count("not yet measured") == sum(row.build is not None for row in all_rows())
    assert ": met" not in text and ": missed" not in text


def test_results_are_what_was_measured(tmp_path):
    """The table among the results is made of the lines beside it; `python -m bench.kernels table` does it."""
    lines = RESULTS / "kernels.jsonl"
    if lines.exists():
        shutil.copy(lines, tmp_path)
    write_table(tmp_path)
    assert (RESULTS / "kernels.md").read_text() == (tmp_path / "kernels.md").read_text()


WITHOUT = """
import sys

class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"hydra", "omegaconf", "rich", "safetensors", "transformers", "networkx", "tokenizers"}:
            raise ImportError(f"{name} is not there")

sys.meta_path.insert(0, Block())
import mpar.kernels, mpar.ops, bench.kernels._server
from mpar.kernels import CATALOGUE
for implementations in CATALOGUE.values():
    for implementation in implementations:
        implementation.load()
"""


def test_kernels_need_little():
    """Ops, kernels and rows are imported with torch, Triton, numpy and PyYAML alone."""
    done = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
