"""The benchmark of inference: every variant answers, ratios and bars stand on the lines that they belong to."""

import pytest

from bench.decode._case import SHAPES, WORKLOADS, Workload
from bench.decode._run import measure, table

NAMES = ("mpar", "hf_dynamic", "hf_static")


def test_every_variant_is_measured():
    """At a tiny size answers agree in float32, and the bar stands with the fastest peer alone."""
    workloads = {"one": Workload(5, (4,)), "many": Workload(5, (2, 6, 1)), "prefill": Workload(9, (1,))}
    lines = measure("tiny", SHAPES["tiny"].shrunk(), workloads, NAMES, passes=2)
    assert [(line.text("case"), line.text("variant")) for line in lines] == [(c, n) for c in workloads for n in NAMES]
    assert all(line.number("equal_tokens") == 1 for line in lines)
    for first in range(0, len(lines), len(NAMES)):
        ours, *peers = lines[first : first + len(NAMES)]
        fastest = max(peers, key=lambda line: line.number("tokens_per_s"))
        assert [line for line in lines[first : first + len(NAMES)] if line.has("bar")] == [fastest]
        assert all(len(line.numbers("mpar_speed_over_this_wall")) == 3 for line in peers)
        assert not ours.has("mpar_speed_over_this_wall")
    assert len(table(lines).splitlines()) == 2 + len(lines)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, when it loads its compiler
def test_peers_are_compared_with_the_faster_execution():
    """Both executions of mpar answer alike, and what is done is said; a ratio stands with the peer alone."""
    said: list[str] = []
    names = ("mpar", "mpar_inductor", "hf_dynamic")
    *ours, peer = measure("tiny", SHAPES["tiny"].shrunk(), {"one": Workload(1, (3,))}, names, 3, said.append)
    assert all(line.number("equal_tokens") == 1 for line in (*ours, peer))
    assert peer.has("mpar_speed_over_this_wall") and peer.has("bar")
    assert not any(line.has("mpar_speed_over_this_wall") or line.has("bar") for line in ours)
    assert [text.split()[0] for text in said] == ["loading", *["one:"] * (len(names) + 1)]


def test_lengths_of_answers():
    """They are the same in every run, some are much longer than others, and rows hold them."""
    for name, shape in SHAPES.items():
        lengths = WORKLOADS[name]["many"].answers
        assert len(lengths) == 16 and max(lengths) > 3 * sum(lengths) / 16
        assert max(lengths) + WORKLOADS[name]["many"].prompt < shape.length
