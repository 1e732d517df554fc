"""Attention in Gluon: its tiles, its source on a model of the machine, what it refuses and compiles to; on a GPU, its numbers."""

import functools
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mpar import testing
from mpar.errors import KernelError
from mpar.kernels import ARCHITECTURES, Kernels, _attention_gluon, choose, implementation
from mpar.kernels._attention_gluon import key_tile
from mpar.kernels._catalogue import CATALOGUE
from mpar.kernels.offline import Tuning
from tests.kernels.gluon_model import Deadlock, launch_on_model
from tests.kernels.test_attention import reference

KERNEL = implementation("attention", "gluon")
NO_MASKS = (None,) * 5
LENGTHS = [(1, 1), (5, 40), (40, 5), (16, 16), (33, 47), (50, 50)]
TILES = [(16, 16, 2), (16, 16, 3), (16, 32, 2)]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("blocks", [(16, 16), (16, 32), (128, 128)], ids=str)
def test_tiles_cover_what_is_seen(blocks, causal):
    """A tile of queries works on each tile of keys it sees any of, once; all but the first are seen wholly."""
    rows, keys = blocks
    for S in range(1, 4 * rows, rows // 2 + 1):
        for M in range(1, 4 * keys, keys // 2 + 1):
            seen = torch.ones(-(-S // rows) * rows, -(-M // keys) * keys, dtype=torch.bool)
            seen[:, M:] = False
            seen = seen.tril() if causal else seen
            for tile in range(-(-S // rows)):
                found = [key_tile.fn(i, tile, M, causal, rows, keys) for i in range(10)]
                worked, after = found[: found.index(-1)], found[found.index(-1) :]
                by_tile = seen[tile * rows : (tile + 1) * rows].unflatten(1, (-1, keys))
                assert sorted(worked) == by_tile.any(0).any(1).nonzero().flatten().tolist()
                assert all(by_tile[:, j].all() for j in worked[1:]), "a tile without a mask is not seen wholly"
                assert by_tile[:, worked[0]].any(1).all(), "a query sees nothing of its first tile"
                assert set(after) == {-1}


def on_model(monkeypatch, q, k, v, *, causal, blocks=None, seed=0):
    """The kernel's own source, with small tiles."""
    monkeypatch.setattr(_attention_gluon, "launch", functools.partial(launch_on_model, seed=seed))
    if blocks is not None:
        entry = Tuning(dict(zip(("BLOCK_M", "BLOCK_N", "STAGES"), blocks, strict=True)), 4)
        monkeypatch.setattr(_attention_gluon, "tuned", lambda *_: entry)
    return KERNEL(q, k, v, *NO_MASKS, causal=causal, window=None, scale=q.shape[3] ** -0.5, soft_cap=None)


def check(found, q, k, v, causal):
    out, lse = found
    expected_out, expected_lse = reference(q.double(), k.double(), v.double(), causal=causal)
    testing.assert_close(out, expected_out, name="out")
    testing.assert_close(lse, expected_lse, name="lse")
    assert out.is_contiguous() and out.dtype == q.dtype and lse.dtype == torch.float32


def slices(make_tensor, B, S, M, N, K, H, dtype):
    """q, k and v as parts of larger tensors."""
    wide, pair = make_tensor((B, S, N + 2, H), dtype), make_tensor((B, M, 2 * K, H), dtype)
    return wide[:, :, 1 : N + 1], pair[:, :, :K], pair[:, :, K:]


cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="the model computes with tensors of the CPU")


@cpu
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("tiles", TILES, ids=str)
def test_source_on_model(tiles, lengths, causal, make_tensor, monkeypatch):
    """In any order of events: no deadlock, no tile that is overwritten or read too early, the numbers of float64."""
    S, M = lengths
    q, k, v = slices(make_tensor, 2, S, M, 2, 1, 64, torch.float16)
    for seed in range(2):
        check(on_model(monkeypatch, q, k, v, causal=causal, blocks=tiles, seed=1000 * seed), q, k, v, causal)


@cpu
@pytest.mark.parametrize("H", [64, 128])
def test_shipped_tiles_on_model(H, make_tensor, monkeypatch):
    """The same with the tiles of table.yaml."""
    q, k, v = slices(make_tensor, 1, 300, 300, 1, 1, H, torch.bfloat16)
    check(on_model(monkeypatch, q, k, v, causal=True), q, k, v, True)


NEXT_KEYS = "mbarrier.wait(k_full.index((i + 1) % STAGES), ((i + 1) // STAGES) & 1, pred=i < first)"
FREE_KEYS, FREE_VALUES = "mbarrier.arrive(k_free.index(slot), count=1)", "mbarrier.arrive(v_free.index(before), count=1)"
MUTANTS = {
    "keys are loaded before they are free": ("mbarrier.wait(k_free.index(slot), before)", "pass"),
    "values are loaded before they are free": ("mbarrier.wait(v_free.index(slot), before)", "pass"),
    "keys are read before they are there": (NEXT_KEYS, "pass"),
    "values are read before they are there": ("mbarrier.wait(v_full.index(before), ((i - 1) // STAGES) & 1)", "pass"),
    "the last values are read before they are there": ("mbarrier.wait(v_full.index(before), (first // STAGES) & 1)", "pass"),
    "queries are read before they are there": ("mbarrier.wait(q_full.index(GROUP), 0)", "pass"),
    "values are freed before they are read": (FREE_KEYS, FREE_VALUES),
    "both groups wait for the first turn": ("(i + GROUP) & 1", "(i + 1) & 1"),
    "a phase is wrong": ("((i + 1) // STAGES) & 1, pred", "(i // STAGES) & 1, pred"),
    "no fence": ("hopper.fence_async_shared()\n    store_tile", "store_tile"),
    "no rescaling": ("acc = acc * gl.convert_layout(decay, OUT_ROWS)[:, None]", "pass"),
    "the tail is not masked": ("seen = (keys < num_keys)[None, :]", "seen = (keys < num_keys + 99)[None, :]"),
    "the diagonal is off": ("keys[None, :] <= rows[:, None]", "keys[None, :] < rows[:, None] + 2"),
}  # fmt: skip


@cpu
@pytest.mark.parametrize("mutant", MUTANTS.values(), ids=MUTANTS.keys())
def test_model_sees_mistakes(mutant, make_tensor, monkeypatch):
    """The model fails for a kernel that is wrong, in one of a few orders of events."""
    source = Path(_attention_gluon.__file__).read_text(encoding="utf-8")
    assert source.count(mutant[0]) == 1
    scope: dict[str, object] = {}
    for name in ("_load", "_compute"):
        text = source[source.index(f"def {name}(") :].split("\n\n\n")[0].replace(*mutant)
        exec(compile("from __future__ import annotations\n" + text, name, "exec"), scope)
        monkeypatch.setattr(getattr(_attention_gluon, name), "fn", scope[name])
    q, k, v = slices(make_tensor, 1, 70, 70, 1, 1, 64, torch.float16)
    with pytest.raises((AssertionError, Deadlock)):
        for seed in range(20):
            causal = seed % 2 == 0  # the diagonal hides a tail that is not masked
            check(on_model(monkeypatch, q, k, v, causal=causal, blocks=(16, 16, 2), seed=1000 * seed), q, k, v, causal)


def meta(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="meta")


REFUSED = {
    "chip": ({"arch": "sm_100"}, "chip sm_100"),
    "dtype": ({"dtype": torch.float32}, "float32"),
    "head": ({"H": 256}, "head sizes 256 of q and 256 of v"),
    "orders": ({"q_order": meta(64)}, "it knows no orders"),
    "documents": ({"q_documents": meta(2, 64), "k_documents": meta(2, 64)}, "documents, documents of keys"),
    "sinks": ({"sinks": meta(4)}, "sinks"),
    "window": ({"window": 8}, "a window"),
    "soft cap": ({"soft_cap": 5.0}, "a soft cap"),
    "scale": ({"scale": -1.0}, "scale -1.0"),
}


def support(arch="sm_90", dtype=torch.bfloat16, H=128, causal=True, window=None, scale=0.1, soft_cap=None, **masks):
    q, k, v = meta(2, 64, 4, H, dtype=dtype), meta(2, 64, 2, H, dtype=dtype), meta(2, 64, 2, H, dtype=dtype)
    operands = [masks.get(name) for name in ("q_order", "k_order", "q_documents", "k_documents", "sinks")]
    params = {"causal": causal, "window": window, "scale": scale, "soft_cap": soft_cap}
    return (q, k, v, *operands), params, CATALOGUE["attention"][1].supports(arch, q, k, v, *operands, **params)


@pytest.mark.parametrize("how", REFUSED.values(), ids=REFUSED.keys())
def test_refuses_in_words(how):
    """What it cannot do it says; what it can it does not refuse."""
    changed, words = how
    assert support()[2] is None
    assert words in support(**changed)[2]


def test_triton_comes_first():
    """`auto` takes Triton's kernel also where this one would do: this one has not been measured."""
    operands, params, reason = support()
    assert reason is None
    assert choose(Kernels("auto", "sm_90"), "attention", operands, params) == ("triton", "")
    assert choose(Kernels("torch", "sm_90"), "attention", operands, params) == ("reference", "")  # nor is it torch's


def test_refuses_when_called(make_tensor):
    """A call that it does not support raises before anything is launched."""
    q = make_tensor((1, 8, 1, 32), torch.bfloat16)
    with pytest.raises(KernelError, match=r"q \(1, 8, 1, 32\).*head sizes 32"):
        KERNEL(q, q, q, *NO_MASKS, causal=True, window=None, scale=1.0, soft_cap=None)


def test_compiles_as_meant(tmp_path):
    """For sm_90: the bars of `tools.kernel_gate compile`; warps give registers away; exponentials run beside products."""
    command = [sys.executable, "-m", "tools.kernel_gate", "compile", "--arch", "sm_90", "--jobs", "1", "--out", str(tmp_path)]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    ran = subprocess.run(
        [*command, "--only", "attention gluon 128 causal bfloat16"],
        env=environment,
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert list(tmp_path.glob("*.sass"))
    for path in tmp_path.glob("*.sass"):
        sass = path.read_text(encoding="utf-8")
        registers = {int(count, 16) for count in re.findall(r"USETMAXREG\S*\s+(?:\w+, )?(0x[0-9a-f]+)", sass)}
        assert {24, 240} <= registers, path.name
        loops = re.findall(r"DEPBAR\.LE gsb0, 0x1 ;(.*?)DEPBAR\.LE gsb0, 0x0 ;", sass, re.DOTALL)
        assert len(loops) == 2, f"{path.name}: a loop for each group"
        assert all(len(re.findall(r"MUFU\.EX2", loop)) >= 64 for loop in loops), f"{path.name}: exponentials after their products"
        assert ARCHITECTURES["sm_90"].matrix in sass


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("heads", [(4, 4), (8, 2), (8, 1)], ids=str)
@pytest.mark.parametrize("lengths", [(1, 1), (60, 60), (1000, 1000), (333, 2049), (2049, 333), (4096, 4096)], ids=str)
@pytest.mark.parametrize("H, dtype", [(128, torch.bfloat16), (128, torch.float16), (64, torch.bfloat16)], ids=str)
def test_matches_float64_on_gpu(H, dtype, lengths, heads, causal, make_tensor):
    """Values and lse, of parts of larger tensors; the same bits when it is run again. On another GPU it is refused."""
    q, k, v = slices(make_tensor, 2, *lengths, *heads, H, dtype)
    call = functools.partial(KERNEL, q, k, v, *NO_MASKS, causal=causal, window=None, scale=H**-0.5, soft_cap=None)
    if support()[2] is not None or torch.cuda.get_device_capability() != (9, 0):
        with pytest.raises(KernelError):
            call()
        return
    found = call()
    check(found, q, k, v, causal)
    for _ in range(5):
        assert all(torch.equal(first, again) for first, again in zip(found, call(), strict=True))
