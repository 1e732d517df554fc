"""The benchmark of inference: every variant answers, ratios and bars stand on the lines that they belong to."""

import pytest
import torch

from bench.decode import _llama_cpp
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


def test_llama_cpp_is_told_where_it_is(tmp_path):
    """A folder without it is refused with what to do."""
    with pytest.raises(FileNotFoundError, match="npm install node-llama-cpp"):
        measure("tiny", SHAPES["tiny"].shrunk(), {}, ["llama_cpp"], 1, llama_cpp=tmp_path)


def test_queries_of_llama_cpp_lie_in_pairs():
    """What RoPE rotates together, the first and the second half of a head, alternates; other matrices stay as they are."""
    config = type("Config", (), {"num_attention_heads": 2, "num_key_value_heads": 1})
    x = torch.arange(8.0)[:, None]
    assert _llama_cpp._in_pairs(x, "model.layers.0.self_attn.q_proj.weight", config)[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
    assert _llama_cpp._in_pairs(x, "model.layers.0.self_attn.k_proj.weight", config)[:, 0].tolist() == [0, 4, 1, 5, 2, 6, 3, 7]
    assert _llama_cpp._in_pairs(x, "model.layers.0.self_attn.v_proj.weight", config) is x
