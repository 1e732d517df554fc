"""The run of functions that researchers write: what it calls wrong, refused or a crash is, and the functions are exact."""

import itertools
import subprocess
import sys

import pytest
import torch

from bench._result import RESULTS, Origin, read_results
from bench.functions._all import FUNCTIONS, KINDS
from bench.functions._case import MESHES, Function, real
from bench.functions._hlo import HloError, Sent, sent_by
from bench.functions._run import run
from bench.functions._table import outcomes_of, page, ratio, result_lines, table, totals
from tests.processes import PATIENCE_S

X = (real("batch hidden"),)


def verdicts(function, mesh="dp4"):
    """What becomes of the parts of a function."""
    return [outcome.verdict for outcome in run(function, mesh)]


def test_a_function_whose_results_differ_is_wrong():
    """A function that counts its calls is not what was traced, neither its value nor its gradient."""
    calls = itertools.count(1)
    outcomes = run(Function(lambda x: x * next(calls), X), "dp4")
    assert [outcome.verdict for outcome in outcomes] == ["wrong", "wrong"]
    assert all("relative error" in outcome.message for outcome in outcomes)


def test_the_dtype_of_a_result_counts():
    """A function whose first call returns float64 and whose second returns float32 is wrong."""
    dtypes = itertools.cycle([torch.float64, torch.float32])
    assert verdicts(Function(lambda x: x.to(next(dtypes)), X))[0] == "wrong"


def test_an_error_of_mpar_is_a_refusal_and_any_other_a_crash():
    """Random numbers are refused; an error of Python that leaves the compiler is a crash, and its name is in the message."""
    assert verdicts(Function(lambda x: x * torch.rand(()), X)) == ["refused", "refused"]
    later = itertools.count()

    def fails_when_compiled(x):
        if next(later) % 2:
            raise KeyError("planted")
        return x

    outcomes = run(Function(fails_when_compiled, X), "dp4")
    assert [outcome.verdict for outcome in outcomes] == ["crash", "crash"]
    assert all("KeyError: 'planted'" in outcome.message for outcome in outcomes)


def test_gathers_are_needless_unless_the_table_names_what_has_to_be_gathered():
    """A product of all pairs of a split batch needs one operand whole."""

    def pairs(x):
        return x @ x.T

    for gathers, needless in (({}, 1), ({"dp": ("x",)}, 0), ({"tp": ("x",)}, 1)):
        forward, _ = run(Function(pairs, X, gathers), "dp4")
        assert forward.needless == needless


@pytest.mark.parametrize("name", ["rope_by_halves", "newton_schulz", "rms_norm_by_hand"])
def test_functions_are_exact(name):
    """Value and gradient agree with torch, and nothing is gathered that need not be."""
    for outcome in run(FUNCTIONS[name], "dp2_sp2"):
        assert (outcome.verdict, outcome.needless) == ("exact", 0), outcome


def test_every_function_has_a_kind_and_every_mesh_splits_something():
    """Names are not used twice, and no mesh leaves most functions on every rank whole."""
    assert len(FUNCTIONS) == sum(map(len, KINDS.values())) == 80
    for mesh in MESHES:
        split = [name for name, each in FUNCTIONS.items() if any(arg.spec(mesh).axes for arg in each.args)]
        assert len(split) > 65, (mesh, FUNCTIONS.keys() - split)


@pytest.mark.full("compiles and simulates 628 programs, half a minute")
@pytest.mark.parametrize("mesh", MESHES)
def test_nothing_is_worse_than_committed(mesh):
    """Every function is exact, or refused as the committed results say, with no more gathers and bytes than there."""
    lines = [line for line in read_results(RESULTS / "functions.jsonl") if line.text("bench") == "functions"]
    committed = {line.text("name"): line.table(mesh) for line in lines}
    assert committed.keys() == FUNCTIONS.keys()
    worse = []
    for name, function in FUNCTIONS.items():
        for outcome in run(function, mesh):
            before = committed[name][outcome.part]
            same = outcome.verdict == "exact" or outcome.verdict == before["verdict"] == "refused"
            if not same or outcome.needless > before.get("needless", 0) or outcome.sent > before.get("sent", 0):
                worse.append(f"{outcome}\n  committed: {before}")
    assert not worse, "\n".join(worse)


def test_tables_show_both_compilers():
    """The row of a program has the bytes of both, and the total is their ratio."""
    outcomes = run(FUNCTIONS["swiglu_mlp"], "tp4")
    theirs = {("swiglu_mlp", "tp4", "forward"): 2.0 * outcomes[0].sent}
    assert f"| {outcomes[0].sent:,} | {2 * outcomes[0].sent:,} |" in table(outcomes, theirs)
    assert "= 0.500\nswiglu_mlp 0.50" in ratio(outcomes, theirs)
    assert "1 functions: 1 exact, 0 wrong, 0 refused, 0 crash" in totals(outcomes, theirs)


def test_the_page_is_what_the_lines_say():
    """The committed page is made of the committed lines, which give back what a run found."""
    results = read_results(RESULTS / "functions.jsonl")
    assert (RESULTS / "functions.md").read_text() == page(results)
    outcomes = run(FUNCTIONS["swiglu_mlp"], "tp4")
    assert outcomes_of(result_lines(outcomes, Origin())) == outcomes


MODULE = """\
HloModule jit_f

%sliced (param_0: f64[8,4], param_1: s32[]) -> f64[4,4] {
  %param_0 = f64[8,4]{1,0} parameter(0)
  %param_1 = s32[] parameter(1)
  %bitcast.1 = f64[8,4]{1,0} bitcast(%param_0)
  ROOT %dynamic-slice.1 = f64[4,4]{1,0} dynamic-slice(%bitcast.1, %param_1, %param_1), dynamic_slice_sizes={4,4}
}

ENTRY %main (x: f64[4,4]) -> (f64[16,4], f64[4,4], f64[8,4]) {
  %x = f64[4,4]{1,0} parameter(0)
  %place = s32[] constant(0)
  %all-gather = f64[16,4]{1,0} all-gather(%x), channel_id=1, replica_groups=[1,4]<=[4], dimensions={0}, metadata={a="b(c)"}
  %all-reduce.4 = (f64[8,4]{1,0}, f32[2]{0}) all-reduce(%y, %z), replica_groups=mesh['a'=2,'b'=2] {'b'}, to_apply=%add
  %get-tuple-element.4 = f64[8,4]{1,0} get-tuple-element(%all-reduce.4), index=0
  %get-tuple-element.5 = f32[2]{0} get-tuple-element(%all-reduce.4), index=1
  %slice = f64[4,4]{1,0} fusion(%get-tuple-element.4, %place), kind=kLoop, calls=%sliced
  %all-reduce.5 = f64[8,4]{1,0} all-reduce(%y), channel_id=3, replica_groups={{0,1},{2,3}}, to_apply=%add
  %collective-permute = f64[4,4]{1,0} collective-permute(%x), channel_id=4, source_target_pairs={{0,1},{2,3}}
  ROOT %tuple = (f64[16,4]{1,0}, f64[4,4]{1,0}, f64[8,4]{1,0}) tuple(%all-gather, %slice, %all-reduce.5)
}
"""


def test_collectives_of_xla_are_counted_as_those_of_mpar():
    """By hand: (n - 1) shards for a gather, 2 (n - 1) / n for an all_reduce, half of that if a device only uses its slice."""
    assert sent_by(MODULE) == [
        Sent("all_gather", 3 * 128),
        Sent("reduce_scatter", 256 / 2),
        Sent("all_reduce", 2 * 8 / 2),
        Sent("all_reduce", 2 * 256 / 2),
        Sent("shift", 128),
    ]


def test_an_all_reduce_that_is_used_whole_stays_one():
    """A second user that takes no slice makes a reduce_scatter impossible."""
    whole = MODULE.replace("  ROOT %tuple", "  %also = f64[8,4]{1,0} add(%get-tuple-element.4, %all-reduce.5)\n  ROOT %tuple")
    assert sent_by(whole)[1] == Sent("all_reduce", 2 * 256 / 2)


@pytest.mark.parametrize("change", [("ENTRY %main", "%body"), (" all-gather(", " all-gather-start(")])
def test_collectives_that_cannot_be_counted_are_refused(change):
    """One in a loop runs any number of times, and one that is split into start and end has other shapes."""
    with pytest.raises(HloError, match="all-gather"):
        sent_by(MODULE.replace(*change))


TWIN = """
from bench.functions import _gspmd
from bench.functions._all import FUNCTIONS

_gspmd.start_devices()
_gspmd.check_twin(FUNCTIONS["swiglu_mlp"])
found = _gspmd.traffic(FUNCTIONS["swiglu_mlp"], "tp4")
assert found["forward"] == {"sent": 8 * 16 * 32 * 8 * 3 // 4 * 2, "collectives": {"all_reduce": 1}}, found
_gspmd.TWINS["swiglu_mlp"] = lambda x, gate, up, down: x @ up @ down
try:
    _gspmd.check_twin(FUNCTIONS["swiglu_mlp"])
except _gspmd.DiffersFromTorch as error:
    print(error)
"""


def test_functions_in_jax_are_those_in_torch():
    """The twin of a function computes its value and gradient, and what XLA makes of it for a mesh is counted. In a process of its
    own: the threads of JAX must not be in one that forks."""
    done = subprocess.run([sys.executable, "-c", TWIN], capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stderr
    assert "forward of swiglu_mlp" in done.stdout
