"""Ranks behind slow links: what is measured, and what lines are made of it."""

import json
import os
import shutil
import time

import pytest

from bench.slow_links._links import LinkError, Links, bits_per_s
from bench.slow_links._measured import _line, compile_options, of_variant
from bench.slow_links._ranks import run_ranks

NEEDS = "network namespaces need root and iproute2"


def test_rates():
    """A number and a unit, or no limit."""
    assert bits_per_s("50mbit") == 50e6 and bits_per_s("1.5gbit") == 1.5e9 and bits_per_s("unlimited") == float("inf")
    for wrong in ("50", "fast", "-1mbit", "0kbit", "mbit"):
        with pytest.raises(LinkError, match="is no rate"):
            bits_per_s(wrong)


def test_the_share_that_is_hidden():
    """Of the shorter of computing and communicating, in the median pass; the ratio is by turns."""
    free = {"mpar": [0.3, 1e6, 1.0], "torch": [0.3, 1e6, 1.0]}
    half = {"mpar": [0.6, 50e6 / 8, 1.0], "torch": [0.8, 50e6 / 8, 1.0]}
    passes = [{"rates": {"unlimited": [free, free], "100mbit": [half, half]}}] * 3
    lines = [_line(passes, "100mbit", name, ["mpar", "torch"], 1.0) for name in ("mpar", "torch")]
    assert [line["overlap"][0] for line in lines] == [pytest.approx(0.2 / 0.3, abs=1e-3), 0.0]
    assert (lines[0]["step_ms"], lines[0]["compute_ms"], lines[0]["communication_ms"]) == (600.0, 300.0, 500.0)
    assert lines[1]["mpar_over_this_wall"][0] == 0.75


def test_pairs_are_compiled_for_the_links():
    """Two microbatches at a time, on hardware whose links have the rate; without pairs mpar is told no hardware."""
    told = compile_options({"bucket_bytes": 7, "paired": True}, "200mbit")
    assert (told["bucket_bytes"], told["num_microbatches"], told["schedule"].paired) == (7, 2, True)
    assert told["hardware"].overlaps and told["hardware"].link_bytes_per_s == 25e6
    assert compile_options({"bucket_bytes": 7}, "200mbit") == {"bucket_bytes": 7}


def test_variants_of_mpar():
    """Another strategy or another schedule, which is compiled for the links; `mpar` alone has neither."""
    assert of_variant("mpar", 8, "50mbit") == {} and of_variant("mpar:zero1", 8, "50mbit") == {"strategy": "zero1"}
    told = of_variant("mpar:zbv", 8, "200mbit")
    assert (told["schedule"], told["num_microbatches"], told["hardware"].link_bytes_per_s) == ("zbv", 8, 25e6)


@pytest.mark.gloo
@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("tc") is None, reason=NEEDS)
def test_links_are_as_slow_as_they_should_be():
    """An exchange of bytes of one second takes about one second, and nothing is left of the links."""
    before = set(os.listdir("/sys/class/net"))
    with Links(2, "unlimited") as links:
        began = time.monotonic()
        printed = run_ranks(links, "bench.slow_links._wire", ["20mbit", "100000", "1"])
        assert time.monotonic() - began < 300
    ((seconds, moved),) = json.loads(printed)["shift"]
    assert 0.8 < seconds * 20e6 / (8 * moved) < 3
    assert set(os.listdir("/sys/class/net")) == before
