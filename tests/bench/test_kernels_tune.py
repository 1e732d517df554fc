"""The tuner: what it tries, what it throws out, what it writes."""

import types

import pytest
import torch

from bench.kernels import _tune
from bench.kernels._tune import candidates, rewritten
from mpar.kernels import implementation
from mpar.kernels.offline import Tuning, replaced, tuning
from tools.kernel_gate import Case, all_cases, calling

TABLE = """# a head
first:
  any: {BLOCK: 1024, num_warps: 4}  # why
second:  # words
  sm_80 64: {M: 64, N: 64, num_warps: 4, num_stages: 2}
  sm_90 64: {M: 128, N: 64, num_warps: 8, num_stages: 3}
"""


def test_candidates_are_around_the_entry():
    """The entry first and once; halves and doubles of blocks, not of what is no block; stages from two on."""
    entry = Tuning({"BLOCK": 128, "GROUP": 8}, 4, 2)
    found = list(candidates(entry))
    assert found[0] is entry
    keys = [(tuple(other.blocks.items()), other.num_warps, other.num_stages) for other in found]
    assert len(set(keys)) == len(keys) == 3 * 3 * 2
    assert {other.blocks["BLOCK"] for other in found} == {64, 128, 256} and {other.blocks["GROUP"] for other in found} == {8}
    assert {other.num_stages for other in found} == {2, 3}
    assert {other.num_stages for other in candidates(Tuning({"BLOCK": 128}, 4))} == {1}


@pytest.mark.parametrize(
    ("kernel", "key", "entry", "before", "after"),
    [
        (
            "second",
            "sm_90 64",
            Tuning({"M": 64, "N": 128}, 4, 2),
            "  sm_90 64: {M: 128, N: 64, num_warps: 8, num_stages: 3}\n",
            "  sm_90 64: {M: 64, N: 128, num_warps: 4, num_stages: 2}\n",
        ),
        (
            "first",
            "any",
            Tuning({"BLOCK": 512}, 8),
            "{BLOCK: 1024, num_warps: 4}  # why",
            "{BLOCK: 512, num_warps: 8}  # why",
        ),
        ("first", "sm_90", Tuning({"BLOCK": 512}, 8), "first:\n", "first:\n  sm_90: {BLOCK: 512, num_warps: 8}\n"),
    ],
    ids=["line", "comment", "new"],
)
def test_one_line_is_written(kernel, key, entry, before, after):
    """The line of one chip and class, with its comment; one that was not there comes after the kernel's name."""
    assert rewritten(TABLE, kernel, key, entry) == TABLE.replace(before, after, 1)


def test_an_entry_is_replaced_for_a_while():
    """Launches get the other entry, the more special one first, and the table's again afterwards."""
    before, other = tuning("swiglu_fwd", "sm_90"), Tuning({"BLOCK": 256}, 2)
    with replaced("swiglu_fwd", "sm_90", other):
        assert tuning("swiglu_fwd", "sm_90") is other
        assert tuning("swiglu_fwd", "sm_80") is before
    assert tuning("swiglu_fwd", "sm_90") is before


def test_cases_can_be_made_to_call_something_else():
    """And call the kernels again afterwards."""
    case = next(case for case in all_cases() if case.name == "swiglu_fwd bfloat16")
    seen = []
    with calling(lambda primitive, name: lambda *operands, **params: seen.append((primitive, name, len(operands)))):
        case.run(lambda shape, dtype: None)
    assert seen == [("swiglu", "triton", 2)]
    with pytest.raises(AttributeError):
        case.run(lambda shape, dtype: None)


def test_the_fastest_right_candidate_wins(monkeypatch, capsys):
    """What does not compile cleanly and what gives other numbers is left out, however fast."""
    case = Case("small", ("swiglu_fwd",), lambda make: implementation("swiglu", "triton")(make((3, 40)), make((3, 40))))
    few = [Tuning({"BLOCK": n}, 4) for n in (16, 32, 64, 128)]
    monkeypatch.setattr(_tune, "candidates", lambda entry: few)
    current: list[int] = []

    def problem(case, arch):
        current.append(tuning("swiglu_fwd", "sm_90").blocks["BLOCK"])
        return "spills" if current[-1] == 16 else ""

    def calls(case, device):
        def run():
            block = tuning("swiglu_fwd", "sm_90").blocks["BLOCK"]
            return [torch.full((3,), 9.0 if block == 32 else 1.0)]

        return run

    monkeypatch.setattr(_tune, "_problem", problem)
    monkeypatch.setattr(_tune, "_calls", calls)
    speed = {64: 3.0, 128: 2.0}

    def timed(runs, share):
        return {"": types.SimpleNamespace(rounds=[[speed[current[-1]]]])}

    monkeypatch.setattr(_tune._timing, "time_in_turn", timed)
    ranking = _tune._rank(case, "swiglu_fwd", "sm_90", None, "cpu")
    assert [(ms, entry.blocks["BLOCK"]) for ms, entry in ranking] == [(2.0, 128), (3.0, 64)]
    assert "spills" in capsys.readouterr().out


def test_operands_are_made_once():
    """The calls of a case are repeated with the same operands, on the CPU in the interpreter as on a GPU."""
    case = next(case for case in all_cases() if case.name == "swiglu_fwd bfloat16")
    small = Case("small", case.kernels, lambda make: case.run(lambda shape, dtype: make((2, *shape[1:]), dtype)))
    calls = _tune._calls(small, "cpu")
    (first,), (second,) = calls(), calls()
    assert first.shape[0] == 2 and torch.equal(first, second)
