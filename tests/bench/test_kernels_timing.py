"""Timing, on a clock of its own: rounds in turn, medians, graphs, memory, ceilings; and a whole run of the table."""

import json

import pytest

from bench import _timing
from bench._timing import Times, ceilings, graph_ms, peak_bytes, time_in_turn
from bench.kernels import _run
from bench.kernels._measure import measure
from bench.kernels._run import run


def test_variants_are_timed_in_turn(gpu):
    """Two rounds of each, A B A B; a call of 20 ms is repeated five times a round, one of 1 ms a hundred times."""
    order = []

    def logged(name, ms):
        call = gpu.takes(ms)

        def run():
            if not order or order[-1] != name:
                order.append(name)
            call()

        return run

    times = time_in_turn({"slow": logged("slow", 20.0), "fast": logged("fast", 1.0)})
    assert order == ["slow", "fast", "slow", "fast"]
    assert [len(round_) for round_ in times["slow"].rounds] == [5, 5] and [len(x) for x in times["fast"].rounds] == [100, 100]
    assert times["slow"].summary()["ms"] == pytest.approx(20.0) and times["fast"].summary()["ms"] == pytest.approx(1.0)


def test_share_shortens_rounds(gpu):
    """A quarter of the time has a quarter of the calls."""
    assert [len(x) for x in time_in_turn({"": gpu.takes(1.0)}, share=0.25)[""].rounds] == [25, 25]


def test_summary_is_of_all_rounds():
    """The median and quantiles of all calls, and what each round says for itself."""
    summary = Times([[1.0, 2.0, 3.0, 4.0, 5.0], [6.0, 7.0, 8.0, 9.0, 10.0, 11.0]]).summary()
    assert (summary["ms"], summary["q20"], summary["q80"], summary["calls"]) == (6.0, 3.0, 9.0, 11)
    assert summary["rounds"] == [3.0, 8.5]


def test_a_graph_counts_its_calls(gpu):
    """Twenty calls are captured; one of them is reported."""
    assert graph_ms(gpu.takes(0.01)) == pytest.approx(0.01)


def test_peak_is_beyond_what_was_there(gpu):
    """What operands hold does not count."""
    gpu.allocated = 1000

    def run():
        gpu.peak = 1234

    assert peak_bytes(run) == 234


def test_ceilings_are_rates(gpu, monkeypatch):
    """A copy reads and writes; a product does two operations for each of its N^3 steps."""
    monkeypatch.setattr(
        _timing, "time_in_turn", lambda runs: {name: Times([[2.0] for _ in [run()]]) for name, run in runs.items()}
    )
    found = ceilings(size=16, copy_bytes=4096)
    assert found["copy_bytes_per_s"] == pytest.approx(2 * 2048 / 2e-3) and found["flops_per_s"] == pytest.approx(2 * 16**3 / 2e-3)


class Servant:
    """Measures in this process."""

    def __init__(self, device: str) -> None:
        assert device == "cuda"

    def ceilings(self, timeout_s: float) -> dict[str, float]:
        return {"copy_bytes_per_s": 1e12, "flops_per_s": 1e14}

    def measure(self, row, ceilings, share, timeout_s):
        line = measure(row, "cpu", None, share)
        if row.number == 23:
            return line | {"status": "failed", "error": "no answer in 120 s"}
        for cell in line["variants"].values():
            cell |= {"ms": 2.0, "q20": 1.9, "q80": 2.1, "rounds": [2.0, 2.0], "calls": 10, "peak_bytes": 1000}
        figures = {"floor_ms": 1.0, "rate": "1 GB/s", "of_ceiling": 0.5, "best_peer": "eager", "over_best_peer": 1.0}
        return line | figures | {"bars": {text: "missed (0.5)" for text in line["bars"]}}

    def close(self) -> None:
        pass


def test_a_run_leaves_lines_and_a_table(gpu, monkeypatch, tmp_path, capsys):
    """Each row is written when it is done, with what the numbers need to be reproduced; one that fails stops no other."""
    monkeypatch.setattr(_run, "Server", Servant)
    wrong = run([8, 12, 23], tiny=False, seconds=100.0, out=tmp_path, commit="abc", share=1.0)
    lines = [json.loads(line) for line in (tmp_path / "kernels.jsonl").read_text().splitlines()]
    assert [line["number"] for line in lines] == [12, 12, 23, 23, 8] and wrong == 2
    facts = {"commit": "abc", "copy": "1000 GB/s", "product": "100 TFLOP/s", "gpu": "a chip"}
    assert all(
        line | facts == line and {"date", "command", "torch", "triton", "driver", "clocks"} <= line.keys() for line in lines
    )
    text = (tmp_path / "kernels.md").read_text()
    assert text.count("2 (1.9 to 2.1)") == 3 and text.count("failed: no answer in 120 s") == 2
    assert "commit abc" in text and "**missed (0.5)**" in text and "not yet measured" in text
    assert "FAILED: no answer in 120 s" in capsys.readouterr().out
