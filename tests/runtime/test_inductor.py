"""Code that Inductor compiled: messages, control flow and writes are what they are in code that runs as it is."""

import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from filelock import FileLock

from mpar import torch_private
from mpar.ops import PackedMatrix, _packed_matrix, pack_matrix
from mpar.runtime import _inductor, load

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, when it loads its compiler

SOURCE = """
f0 = PRIMITIVES['rms_norm']
f1 = PRIMITIVES['overwrite']
f2 = torch.ops.aten.zeros.default
f3 = torch.ops.aten.add_.Tensor
f4 = torch.ops.aten.mul.Tensor

def bigger(args, comm):
    v0, = args
    args.clear()
    return (f4(comm.all_reduce(v0), 3.0),)

def same(args, comm):
    v0, = args
    args.clear()
    return (v0,)

def run(args, comm):
    v0, v1, v2, = args
    args.clear()
    v3 = f0(v0, v1, eps=1e-06); del v0, v1
    v4 = comm.all_reduce(v3); del v3
    v5 = f2([4])
    v6 = f3(v5, v4); del v5
    v7 = v4.sum() > CONSTANTS['least']
    v7 = CONTROL['cond']((v7, v6,), if_true=lambda args: bigger(args, comm), if_false=lambda args: same(args, comm))
    v8 = f4(v7[0], v4.narrow(0, comm.index(('tp',)), 1)); del v4, v7
    v9 = f1(v2, v8); del v2
    return (v8, v9,)
"""


class _Doubled:
    """Communication whose sums are twice the value; it counts them."""

    def __init__(self) -> None:
        self.sums = 0

    def index(self, axes):
        return 1

    def all_reduce(self, x):
        self.sums += 1
        return x * 2


@pytest.mark.parametrize(("scale", "sums"), [(1.0, 2), (-1.0, 1)], ids=["one way", "the other way"])
def test_code_with_messages_and_branches(scale, sums):
    """Results, the operand that is overwritten, and the messages are those of the plain code, in every call."""
    constants = {"least": torch.tensor(0.0)}
    plain, compiled = (load("s", SOURCE, constants, torch.device("cpu"), inductor=inductor) for inductor in (False, True))
    comm, expected_comm = _Doubled(), _Doubled()
    for turn in range(2):
        x, weight = torch.tensor([1.0, 2.0, -1.0, 3.0]) + turn, torch.full((4,), scale)
        old, expected_old = torch.ones(4), torch.ones(4)
        expected = plain([x, weight, expected_old], expected_comm)
        given = compiled(args := [x, weight, old], comm)
        assert not args and comm.sums == expected_comm.sums == sums * (turn + 1)
        assert all(torch.allclose(a, b) for a, b in zip((*given, old), (*expected, expected_old), strict=True))
        assert given[1].data_ptr() == old.data_ptr()


def test_operands_that_lie_otherwise_in_memory():
    """Code is compiled again for other strides, and not used for them."""
    source = "f0 = PRIMITIVES['swiglu']\n\ndef run(args, comm):\n    a, b, = args\n    args.clear()\n    return (f0(a, b),)\n"
    compiled = load("s", source, {}, torch.device("cpu"), inductor=True)
    gate, up = torch.randn(3, 5), torch.randn(3, 5)
    for given in (gate, gate.T.contiguous().T):
        (y,) = compiled([given, up], _Doubled())
        assert torch.allclose(y, torch.nn.functional.silu(gate) * up)


PACKED = """
f0 = PRIMITIVES['einsum']
f1 = torch.ops.aten.mul.Tensor
f2 = torch.ops.aten.neg.default

def run(args, comm):
    v0, v1, = args
    args.clear()
    v2 = f1(f0(f2(v0), v1, equation='bd,df->bf'), 2.0)
    return (f1(v2, f2(v1).narrow(0, 0, 1)), v1.sum(0), v2,)
"""


def test_operands_that_are_more_than_tensors(monkeypatch):
    """What reads a packed matrix is called as it is, by its function or method, and einsum multiplies with its blocks; the parts
    between are compiled, here as recorded, and get plain tensors alone. Plain weights of the same strides have other code."""
    parts = []

    def recorded(graph, operands, *_):
        assert all(type(operand) is torch.Tensor for operand in operands)
        parts.append([node.target for node in graph.graph.nodes if node.op == "call_function"])
        return graph

    monkeypatch.setattr(_inductor, "inductor_compile", recorded)
    monkeypatch.setattr(_packed_matrix, "onednn_packs", lambda dtype: True)
    x, weight = torch.randn(3, 8), torch.randn(8, 16)
    packed = pack_matrix(weight, (0,))
    multiplied = []
    einsum = PackedMatrix.einsum
    monkeypatch.setattr(PackedMatrix, "einsum", lambda *given: multiplied.append(given) or einsum(*given))
    compiled, comm = load("s", PACKED, {}, torch.device("cpu"), inductor=True), _Doubled()
    for given, count in ((packed, 1), (weight, 1), (packed, 2)):
        first, sums, product = compiled([x, given], comm)
        assert torch.allclose(product, -2 * x @ weight, atol=1e-5) and torch.allclose(first, -product * weight[:1], atol=1e-5)
        assert torch.allclose(sums, weight.sum(0), atol=1e-5) and len(multiplied) == count
    assert parts[0] == [torch.ops.aten.neg.default] and len(parts) == 4  # between what is apart, and all of the plain code


COMPILES = """
import sys, torch
from mpar.runtime import _inductor
from added import add
op = _inductor._define("added", "(Tensor x) -> Tensor", add, "CompositeImplicitAutograd")
graph = torch.fx.Graph()
graph.output((graph.call_function(op, (graph.placeholder("x"),)),))
print(_inductor._by_inductor(torch.fx.GraphModule({}, graph), [torch.zeros(2)])(torch.zeros(2))[0].tolist())
"""


def run_in_process(folder: Path) -> str:
    """What COMPILES prints, in a process that keeps compiled code in `folder`."""
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(folder / "kept"), "PYTHONDONTWRITEBYTECODE": "1"}
    path = os.pathsep.join([str(folder), str(Path(__file__).parents[2])])
    done = subprocess.run(
        [sys.executable, "-c", COMPILES], env=environment | {"PYTHONPATH": path}, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_kept_code_is_of_the_functions_of_this_process(tmp_path):
    """torch keeps what it has compiled for the next process, where an op of the same name may compute something else. Libraries
    that were cut short when their process was killed are compiled again."""
    for number in (1, 2):
        (tmp_path / "added.py").write_text(f"def add(x):\n    return x + {number}\n")
        assert run_in_process(tmp_path) == f"[{number}.0, {number}.0]"
        for library in (tmp_path / "kept").glob("*/*.so"):
            os.truncate(library, 1000)
    assert run_in_process(tmp_path) == "[2.0, 2.0]"


def test_damaged_libraries_are_removed(tmp_path):
    """But those that are just being written are left, and so are complete ones."""
    complete = b"\x7fELF".ljust(40, b"\1") + struct.pack("<Q10xHHxx", 100, 64, 2) + bytes(100 + 2 * 64 - 64)
    (tmp_path / "ab").mkdir()
    contents = {"cut": complete[:-1], "empty": b"", "no_library": bytes(300), "held.main": b"", "complete": complete}
    for name, content in contents.items():
        (tmp_path / "ab" / f"{name}.so").write_bytes(content)
    (tmp_path / "locks").mkdir()
    with FileLock(tmp_path / "locks" / "held.lock"):
        torch_private._remove_damaged_libraries(str(tmp_path))
    assert {path.name for path in (tmp_path / "ab").iterdir()} == {"held.main.so", "complete.so"}
