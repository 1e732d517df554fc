"""Kernels that are compiled without a GPU: as Triton's JIT would, and held to their bars."""

import concurrent.futures
import io
import json
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime import driver
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from mpar.kernels.offline import Launch, Tuning
from tests.processes import PATIENCE_S
from tests.tools import stuck
from tools.kernel_gate import _check, _compile, _ledger
from tools.kernel_gate._case import Case, all_cases
from tools.kernel_gate._checks import MORE_REGISTERS, failures, ledger_failures
from tools.kernel_gate._facts import Facts, read_ptxas, read_sass, read_ttgir, read_ttir
from tools.kernel_gate._unit import specialise, target


def kernel(a_ptr, b_ptr, tiles, rows, one, many, three, rate, none, BLOCK: tl.constexpr, WIDE: tl.constexpr):
    """Has every kind of argument."""
    tl.store(b_ptr, tl.load(a_ptr) * rate)


class Chip:
    """What Triton's JIT asks of a driver before it compiles."""

    def get_current_target(self) -> Any:
        return target("sm_90")

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return device


@pytest.fixture
def asked() -> Iterator[list[dict[str, Any]]]:
    """What the JIT would have compiled for sm_90; it does not."""
    found: list[dict[str, Any]] = []
    before = driver._active, triton.knobs.runtime.jit_cache_hook
    driver.set_active(Chip())
    triton.knobs.runtime.jit_cache_hook = lambda **asked: found.append(asked["compile"]) or True
    yield found
    driver._active, triton.knobs.runtime.jit_cache_hook = before


def launched(device: str) -> Launch:
    """Pointers that are aligned and not, a descriptor, integers of all kinds, a float, None, constants."""
    a, matrix = torch.empty(4096, dtype=torch.bfloat16, device=device), torch.empty(512, 64, dtype=torch.float16, device=device)
    tiles = TensorDescriptor(matrix, [512, 64], [64, 1], [128, 64])
    args = (a, a[1:], tiles, 32, 1, 2**40, 3, 0.5, None)
    return Launch(JITFunction(kernel), args, {"WIDE": True}, Tuning({"BLOCK": 64}, num_warps=8, num_stages=3))


def test_units_are_what_the_jit_compiles(asked):
    """Tensors without data give the signature, constants, attributes and options that the JIT makes of tensors with data."""
    launch, unit = launched("cpu"), specialise(launched("meta"), "sm_90", "case/kernel")
    keywords = {**launch.constants, **launch.tuning.blocks, "num_warps": 8, "num_stages": 3, "enable_fp_fusion": True}
    launch.kernel.run(*launch.args, **keywords, grid=(1,), warmup=True)
    (jit,) = asked
    assert unit.signature == jit["signature"]
    assert unit.constants == jit["constants"]
    assert [unit.attributes] == jit["configs"]
    assert unit.options == {name: jit[name] for name in ("num_warps", "num_stages", "enable_fp_fusion")}
    assert (
        unit.signature["one"] == "constexpr"
        and unit.signature["many"] == "i64"
        and unit.signature["tiles"].startswith("tensordesc")
    )


def test_hash_is_of_all_that_is_compiled():
    """Other blocks, warps, alignment or source are another unit; another name is not."""
    first = specialise(launched("meta"), "sm_90", "one")
    assert specialise(launched("meta"), "sm_90", "two").hash == first.hash
    launch = launched("meta")
    a = torch.empty(4096, dtype=torch.bfloat16, device="meta")
    others = [
        Launch(launch.kernel, launch.args, launch.constants, Tuning({"BLOCK": 128}, 8, 3)),
        Launch(launch.kernel, launch.args, launch.constants, Tuning({"BLOCK": 64}, 4, 3)),
        Launch(launch.kernel, (a, a, *launch.args[2:]), launch.constants, launch.tuning),
        Launch(JITFunction(calls_another), launch.args, launch.constants, launch.tuning),
    ]
    assert len({first.hash, *(specialise(other, "sm_90", "one").hash for other in others)}) == 5


def calls_another(a_ptr, b_ptr, tiles, rows, one, many, three, rate, none, BLOCK: tl.constexpr, WIDE: tl.constexpr):
    """Has the parameters of `kernel`."""
    tl.store(b_ptr, helper(tl.load(a_ptr)) * rate)


def helper(x):
    """What the kernel above calls."""
    return x + 1


def test_hash_follows_functions_that_are_called(monkeypatch):
    """A change of a function that a kernel calls is a change of the kernel."""

    def doubled(x):
        return x * 2

    before = launched("meta")
    before = Launch(JITFunction(calls_another), before.args, before.constants, before.tuning)
    monkeypatch.setitem(globals(), "helper", JITFunction(helper))
    first = specialise(before, "sm_90", "one").hash
    monkeypatch.setitem(globals(), "helper", JITFunction(doubled))
    assert specialise(before, "sm_90", "one").hash != first


def read(ptxas: str = "", sass: str = "", ttgir: str = "", ttir: str = "", num_warps: int = 4) -> Facts:
    """Facts of texts as the compiler writes them."""
    facts = Facts()
    read_ptxas(ptxas, facts)
    read_sass(sass, facts)
    read_ttgir(ttgir, num_warps, facts)
    read_ttir(ttir, facts)
    return facts


PTXAS = """ptxas info    : Compiling entry function '_k' for 'sm_90a'
ptxas info    : Function properties for _k
    24 bytes stack frame, 20 bytes spill stores, 32 bytes spill loads
ptxas info    : Used 168 registers, used 1 barriers
ptxas info    : (C7511) Potential Performance Loss: wgmma.mma_async instructions are serialized due to insufficient registers
"""
SASS = """
        /*0000*/                   LDC R1, c[0x0][0x28] ;                          /* 0x00000a00ff017b82 */
        /*0010*/              @!P0 LDG.E.128 R4, desc[UR4][R2.64] ;                /* 0x0000000402048981 */
        /*0020*/                   LDG.E.U16 R4, desc[UR4][R2.64] ;                /* 0x0000000402048981 */
        /*0030*/              @P1  STG.E desc[UR4][R2.64], R0 ;                    /* 0x0000000402048981 */
        /*0040*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR8] ;      /* 0x0000000402048981 */
        /*0050*/                   HMMA.16816.F32.BF16 R24, R4, R6, R24 ;          /* 0x0000000402048981 */
        /*0060*/                   UTMALDG.2D [UR8], [UR4] ;                       /* 0x0000000402048981 */
        /*0070*/                   STL [R1], R5 ;                                  /* 0x0000000402048981 */
        /*0080*/                   REDUX.SUM UR5, R4 ;                             /* 0x0000000402048981 */
        /*0090*/                   RED.E.ADD.F32.FTZ.RN [R2.64], R4 ;              /* 0x0000000402048981 */
"""
TTGIR = """
#linear = #ttg.linear<{register = [[0, 1]]}>
    %1 = tt.load %0 : !tt.ptr<i32>
    %3 = tt.load %2, %m : tensor<128x!tt.ptr<f32>, #blocked>
    %5 = tt.load %4, %m, %z : tensor<64x128x!tt.ptr<bf16>, #blocked1>
    tt.store %6, %5, %m : tensor<1024x!tt.ptr<bf16>, #blocked>
"""
TTIR = """
    %9 = tt.dot %7, %8, %a, inputPrecision = tf32 : tensor<64x64xbf16> * tensor<64x64xbf16> -> tensor<64x64xf32>
    %10 = tt.dot %7, %8, %a : tensor<64x64xf32> * tensor<64x64xf32> -> tensor<64x64xf32>
"""


def test_texts_of_the_compiler_are_read():
    """Registers, spills, warnings; instructions with and without predicates; accesses too small to be wide; kinds of dots."""
    facts = read(PTXAS, SASS, TTGIR, TTIR)
    assert (facts.registers, facts.spill_bytes, len(facts.serialized)) == (168, 32, 1)
    assert facts.matrix == {"HGMMA": 1, "HMMA": 1}
    assert facts.narrow == {"LDG.E.U16": 1, "STG.E": 1}
    assert (facts.local, facts.atomics, facts.tma_loads) == (1, 1, 1)
    assert (facts.scalars, facts.linear) == (2, 1)
    assert (facts.dots, facts.narrow_dots) == (2, 1)


CASE = Case("a case", (), lambda make: None)
MATRIX = {"registers": 200, "shared_bytes": 200_000, "matrix": {"HGMMA": 8}, "dots": 2, "narrow_dots": 2, "tma_loads": 2}


@pytest.mark.parametrize(
    ("arch", "facts", "words"),
    [
        ("sm_90", MATRIX, None),
        ("sm_80", {"shared_bytes": 166_913}, "166913 bytes of shared memory, limit 166912"),
        ("sm_90", MATRIX | {"spill_bytes": 4}, "spills 4 bytes, limit 0"),
        ("sm_90", {"local": 2}, "2 LDL/STL"),
        ("sm_90", {"atomics": 1}, "1 RED/ATOMG"),
        ("sm_90", MATRIX | {"matrix": {}}, "the matrix unit is not used"),
        ("sm_90", MATRIX | {"matrix": {"QGMMA": 4}}, None),
        ("sm_90", MATRIX | {"matrix": {}, "narrow_dots": 0}, None),
        ("sm_90", MATRIX | {"matrix": {"HGMMA": 8, "HMMA": 1}}, "1 HMMA, limit 0"),
        ("sm_80", MATRIX | {"matrix": {"HMMA": 8}, "shared_bytes": 0}, None),
        ("sm_90", MATRIX | {"descriptors": 2, "tma_loads": 0}, "0 UTMALDG"),
        ("sm_90", MATRIX | {"serialized": ["C7511"]}, "1 warnings of ptxas"),
        ("sm_90", MATRIX | {"linear": 1}, "1 #ttg.linear"),
        ("sm_100", MATRIX | {"linear": 1, "matrix": {"UTCHMMA": 2}}, None),
        ("sm_90", {"narrow": {"LDG.E.U16": 3}, "scalars": 2}, "3 accesses under 128 bits, limit 2"),
        ("sm_90", {"narrow": {"LDG.E.U16": 2}, "scalars": 2}, None),
    ],
)
def test_every_bar_is_held(arch, facts, words):
    """What is over a limit is said with its figure and the limit; what is not passes."""
    found = failures(Facts(**facts), CASE, arch, "3.9.0")
    assert found == [] if words is None else len(found) == 1 and words in found[0], found


def test_exceptions_are_of_one_chip_and_version():
    """A spill that a case owns up to on sm_90 with Triton 3.6 is none on other chips and versions."""
    case = Case("a case", (), lambda make: None, spill_bytes={"sm_90 3.6": 12})
    facts = Facts(spill_bytes=12, local=3)
    assert failures(facts, case, "sm_90", "3.6.0") == []
    assert failures(facts, case, "sm_90", "3.9.0") and failures(facts, case, "sm_100", "3.6.0")


def test_growth_of_registers_is_noticed():
    """One register less than the limit passes; what was not recorded has nothing to grow from."""
    assert ledger_failures(Facts(registers=100 + MORE_REGISTERS), {"registers": 100})
    assert not ledger_failures(Facts(registers=100 + MORE_REGISTERS - 1), {"registers": 100})
    assert not ledger_failures(Facts(registers=255), None)


def test_ledger_keeps_what_it_is_told_to(tmp_path):
    """New results go in, other versions stay, of this version only what is named stays."""
    facts = {"registers": 32, "spill_bytes": 0, "shared_bytes": 16, "scalars": 3}
    results = [{"arch": "sm_90", "key": key, "hash": "a", "facts": facts} for key in ("k1", "k2", "k3")]
    path = tmp_path / "registers.json"
    _ledger.write(path, "3.6.0", results, [])
    _ledger.write(path, "3.9.0", results, [])
    _ledger.write(path, "3.9.0", [results[0] | {"hash": "b"}], [("sm_90", "k2")])
    kept = _ledger.read(path, "3.9.0")["sm_90"]
    assert {key: entry["hash"] for key, entry in kept.items()} == {"k1": "b", "k2": "a"}
    assert len(_ledger.read(path, "3.6.0")["sm_90"]) == 3
    assert kept["k1"] == {"registers": 32, "spill_bytes": 0, "shared_bytes": 16, "hash": "b"}


def test_a_compiler_that_crashes_costs_its_kernel_alone(monkeypatch):
    """The other kernels are compiled, those of one hash together, and the line says what happened."""
    monkeypatch.setattr(_compile._worker, "compile_units", stuck.compiles_or_ends)
    names = {"a": "1", "crash": "2", "b": "3", "a again": "1"}
    units = [{"case": "c", "arch": "sm_90", "key": key, "hash": name} for key, name in names.items()]
    finished: list[str] = []
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        results = _compile._compile_side_by_side(pool, units, None, lambda result: finished.append(result["key"]))
    assert sorted(finished) == sorted(names) and finished.index("a again") == finished.index("a") + 1
    assert {result["key"]: bool(result["failures"]) for result in results} == {key: key == "crash" for key in names}


def test_what_passes_is_kept_at_once(tmp_path):
    """A run that is broken off has written what it had done, and not what failed."""
    facts = {"registers": 32, "spill_bytes": 0, "shared_bytes": 16}
    for key, found in (("k1", []), ("k2", ["spills"]), ("k3", [])):
        result = {"arch": "sm_90", "key": key, "hash": "a", "facts": facts, "failures": found}
        _compile._keep(tmp_path / "registers.json", "3.9.0", result)
    assert set(_ledger.read(tmp_path / "registers.json", "3.9.0")["sm_90"]) == {"k1", "k3"}


def compiled(*words: str) -> subprocess.CompletedProcess[str]:
    """`python -m tools.kernel_gate compile` of one kernel."""
    command = [
        sys.executable,
        "-m",
        "tools.kernel_gate",
        "compile",
        "--only",
        "swiglu_fwd bfloat16",
        "--arch",
        "sm_90",
        "--jobs",
        "1",
    ]
    return subprocess.run([*command, *words], capture_output=True, text=True, env=os.environ, timeout=PATIENCE_S)


@pytest.mark.full("the compilation takes 10 s; the other checks of the gate read what was compiled before")
def test_a_kernel_is_compiled_and_held_to_the_ledger(tmp_path):
    """The command compiles a kernel, records it, leaves out what is unchanged, and fails when the ledger had fewer registers."""
    path = tmp_path / "registers.json"
    first = compiled("--ledger", str(path), "--update", "--out", str(tmp_path / "texts"))
    assert first.returncode == 0, first.stdout + first.stderr
    assert "1 kernels compiled, 0 failures" in first.stdout
    assert sorted(file.suffix for file in (tmp_path / "texts").iterdir()) == [".ptx", ".ptxas", ".sass", ".ttgir", ".ttir"]
    ledger = json.loads(path.read_text())
    (entry,) = ledger[triton.__version__]["sm_90"].values()
    assert entry["registers"] > 0
    again = compiled("--ledger", str(path), "--changed")
    assert again.returncode == 0 and "0 kernels compiled" in again.stdout
    entry["registers"] -= MORE_REGISTERS
    path.write_text(json.dumps(ledger))
    grown = compiled("--ledger", str(path))
    assert grown.returncode == 1 and "FAILED swiglu_fwd bfloat16/_swiglu_fwd on sm_90: " in grown.stdout


def test_cases_have_names_of_their_own():
    """Every file of cases is read, and each case says which entries of the table it launches."""
    cases = all_cases()
    assert len({case.name for case in cases}) == len(cases) > 1
    assert all(case.kernels for case in cases)


def test_a_wrong_case_does_not_stop_the_others(monkeypatch):
    """What raises is counted, with its traceback, and the rest is checked."""

    def fail(make):
        raise AssertionError("other bits")

    cases = [Case("bad", ("swiglu_fwd",), fail), Case("good", ("swiglu_fwd",), lambda make: None)]
    monkeypatch.setattr(_check, "all_cases", lambda: cases)
    out = io.StringIO()
    assert _check.check_cases(out, "cpu") == 1
    assert "WRONG  bad" in out.getvalue()
    assert "other bits" in out.getvalue()
    assert "right  good" in out.getvalue()
    assert out.getvalue().endswith("1 of 2 cases are right\n")
