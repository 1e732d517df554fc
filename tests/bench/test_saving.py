"""The lines that the benchmark of saving makes of what its ranks measured."""

from bench.saving.__main__ import summarise


def measured(stall_s, total_s, busy_step_s):
    figures = {"stall_s": stall_s, "stall_cpu_s": stall_s, "total_s": total_s, "cpu_s": total_s}
    return {**figures, "step_s": [[0.1, 0.1]], "busy_step_s": [busy_step_s], "memory": [[1.01]]}


def test_the_slowest_rank_counts():
    """A save lasts as long as on its slowest rank, CPU seconds are summed, and the faster peer is compared with."""
    one = {
        "mpar": measured([[1.0, 2.0]], [[4.0, 4.0]], [0.2]),
        "torch_cached": measured([[2.0, 4.0]], [[9.0, 9.0]], [0.3]),
        "torch": measured([[9.0, 9.0]], [[8.0, 8.0]], [0.3]),
    }
    other = {
        "mpar": measured([[1.5, 1.0]], [[3.0, 3.0]], [0.1]),
        "torch_cached": measured([[3.0, 1.0]], [[1.0, 1.0]], []),
        "torch": measured([[9.0, 9.0]], [[1.0, 1.0]], []),
    }
    lines = [result.values() for result in summarise([one, other], ("mpar", "torch_cached", "torch"), {"bench": "saving"})]
    ours = lines[0]
    assert [line["variant"] for line in lines] == ["mpar", "torch_cached", "torch"]
    assert (ours["stall_s"], ours["total_s"], ours["cpu_s"]) == (1.75, 4.0, 7.0)
    assert (ours["stall_s_peer"], ours["stall_s_ratio"][0]) == ("torch_cached", 0.5)
    assert (ours["total_s_peer"], ours["total_s_ratio"][0], ours["total_s_verdict"]) == ("torch", 0.5, "met")
    assert ours["steps_meanwhile"] == 1.5 and lines[1]["steps_meanwhile"] == 3.0
