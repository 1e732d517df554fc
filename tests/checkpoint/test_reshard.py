import itertools
import math
import random
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from mpar import checkpoint
from mpar.checkpoint import SaveOptions
from mpar.checkpoint._open import open_shards, read_index
from mpar.errors import CheckpointError
from mpar.mesh import Mesh
from mpar.spec import P
from tests.checkpoint.ranks import cut, on_all_ranks, same_bits, save_all, wanted_of
from tests.tiers import examples

MESHES = [Mesh(dp=1), Mesh(dp=2, tp=2), Mesh(fsdp=4), Mesh(fsdp=3, tp=2), Mesh(dp=2, fsdp=2, tp=2), Mesh(tp=6)]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool]


def bits(shape, dtype, seed=0):
    """A tensor of random bits, NaNs among them."""
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.randint(2, shape, generator=generator).bool()
    raw = torch.randint(256, (math.prod(shape) * dtype.itemsize,), generator=generator, dtype=torch.uint8)
    return raw.view(dtype).reshape(shape)


def specs_that_fit(shape, mesh):
    """Every spec whose axes divide `shape`."""
    choices = [axes for n in range(len(mesh.axes) + 1) for axes in itertools.combinations(mesh.axes, n)]
    for dims in itertools.product(choices, repeat=len(shape)):
        used = [axis for axes in dims for axis in axes]
        if len(used) == len(set(used)) and all(n % mesh.axis_size(axes) == 0 for n, axes in zip(shape, dims, strict=True)):
            yield P(*dims)


@st.composite
def cases(draw):
    """A source mesh, a target mesh, and tensors with a spec on each."""
    source, target = draw(st.sampled_from(MESHES)), draw(st.sampled_from(MESHES))
    shapes = draw(st.lists(st.lists(st.sampled_from([1, 2, 6, 12]), max_size=3).map(tuple), min_size=1, max_size=3))
    tensors = [bits(shape, draw(st.sampled_from(DTYPES)), i) for i, shape in enumerate(shapes)]
    pick = [[draw(st.sampled_from(list(specs_that_fit(shape, mesh)))) for shape in shapes] for mesh in (source, target)]
    return source, target, tensors, *pick


@settings(max_examples=examples(60), deadline=None)
@given(cases())
def test_any_mesh_reads_any_checkpoint(case):
    """Saved from one mesh and specs, loaded on another: every rank's shards are equal in every bit."""
    source, target, tensors, source_specs, target_specs = case
    names = [f"layers.{i}.w" for i in range(len(tensors))]
    with tempfile.TemporaryDirectory() as folder:
        state = {name: (x, spec) for name, x, spec in zip(names, tensors, source_specs, strict=True)}
        paths = save_all(Path(folder), 3, state, source)
        assert paths == [Path(folder) / "step_00000003"] * source.size
        wanted = {name: (tuple(x.shape), spec, x.dtype) for name, x, spec in zip(names, tensors, target_specs, strict=True)}
        for rank in range(target.size):
            loaded = checkpoint.load(paths[0], wanted, target, rank)
            assert list(loaded) == names
            for name, x, spec in zip(names, tensors, target_specs, strict=True):
                assert same_bits(loaded[name], cut(x, spec, target, rank)), (name, rank)
        checkpoint.verify(paths[0])


@pytest.mark.parametrize("source", [Mesh(fsdp=3, tp=2), Mesh(fsdp=2, tp=3)], ids=repr)
def test_every_spec_to_every_spec(source, tmp_path):
    """All pairs of specs of one tensor on two meshes, those with two axes on one dim among them."""
    x = bits((12, 6), torch.float32)
    for step, spec in enumerate(specs_that_fit(x.shape, source)):
        path = save_all(tmp_path, step, {"x": (x, spec)}, source)[0]
        target = Mesh(fsdp=2, tp=3)
        for wanted in specs_that_fit(x.shape, target):
            for rank in range(target.size):
                loaded = checkpoint.load(path, {"x": ((12, 6), wanted, x.dtype)}, target, rank)
                assert same_bits(loaded["x"], cut(x, wanted, target, rank)), (spec, wanted, rank)


@pytest.mark.parametrize("shape", [(), (0,), (0, 4), (4, 0)], ids=str)
def test_scalars_and_empty_tensors(shape, tmp_path):
    """A 0-d tensor and tensors without elements come back with their shape and dtype."""
    mesh = Mesh(dp=2, tp=2)
    state = {"x": (torch.full(shape, 7, dtype=torch.int64), P("tp") if shape else P())}
    path = save_all(tmp_path, 0, state, mesh)[0]
    for rank in range(mesh.size):
        assert same_bits(checkpoint.load(path, wanted_of(state), mesh, rank)["x"], cut(*state["x"], mesh, rank))


def test_tensors_that_share_memory_or_are_not_contiguous(tmp_path):
    """A transposed tensor and two names of one storage are saved like any other."""
    x = bits((4, 6), torch.float32)
    state = {"a": (x, P()), "b": (x, P()), "c": (x.T, P()), "d": (x[:2], P())}
    path = save_all(tmp_path, 1, state, Mesh())[0]
    loaded = checkpoint.load(path, wanted_of(state), Mesh(), 0)
    assert all(same_bits(loaded[name], value) for name, (value, _) in state.items())


def test_a_replicated_shard_is_written_once_by_the_first_of_its_ranks(tmp_path):
    """On dp 2 x tp 2, rank 0 and 1 write the two halves of a tp-sharded tensor, rank 0 the replicated one, others no file."""
    mesh = Mesh(dp=2, tp=2)
    state = {"w": (bits((4, 6), torch.float32), P(None, "tp")), "b": (bits((5,), torch.float32), P())}
    path = save_all(tmp_path, 1, state, mesh)[0]
    held = {}
    for file in sorted(path.glob("*.safetensors")):
        with safe_open(file, "pt") as source:
            held[file.name] = {key: tuple(source.get_slice(key).get_shape()) for key in source.keys()}  # noqa: SIM118
    assert held == {
        "rank-00000.safetensors": {"w": (4, 3), "b": (5,), "__checksums__": (2, 8)},
        "rank-00001.safetensors": {"w": (4, 3), "__checksums__": (1, 8)},
    }
    assert {file.name for file in path.iterdir()} == {*held, "index.json", "state.json"}


def save_stages(folder, values_on_stage_1):
    """Two stages of two ranks: each has a tensor of its own and a copy of `shared`."""
    mesh = Mesh(pp=2, tp=2)
    weights = [bits((4, 2), torch.float32, seed) for seed in (1, 2)]
    shared = [torch.arange(6.0), values_on_stage_1]

    def save(rank, run):
        stage = mesh.coordinates(rank)["pp"]
        tensors = {f"layers.{stage}": cut(weights[stage], P("tp"), mesh, rank), "shared": cut(shared[stage], P("tp"), mesh, rank)}
        specs, shapes = dict.fromkeys(tensors, P("tp")), {f"layers.{stage}": (4, 2), "shared": (6,)}
        return checkpoint.save(folder, 5, tensors, specs, mesh, rank, shapes, {}, SaveOptions(run))

    return on_all_ranks(mesh.size, save), weights


def test_stages_hold_different_tensors(tmp_path):
    """Each pipeline stage writes its own tensors; what both hold is in the index once; a mesh without pp reads it all."""
    (path, *_), weights = save_stages(tmp_path, torch.arange(6.0))
    f32 = torch.float32
    wanted = {"layers.0": ((4, 2), P(), f32), "layers.1": ((4, 2), P(), f32), "shared": ((6,), P(), f32)}
    loaded = checkpoint.load(path, wanted, Mesh(), 0)
    assert [same_bits(loaded[f"layers.{i}"], weights[i]) for i in (0, 1)] == [True, True]
    assert same_bits(loaded["shared"], torch.arange(6.0))


def test_stages_that_disagree_about_a_shared_tensor(tmp_path):
    """Two stages with different values of one tensor are refused on every rank, and nothing is left under the final name."""
    errors, _ = save_stages(tmp_path, torch.arange(6.0) + 1)
    assert all(isinstance(error, CheckpointError) for error in errors)
    assert "shared" in str(errors[0]) and "different values" in str(errors[0])
    assert checkpoint.latest(tmp_path) is None


def test_a_stage_loads_its_part_by_naming_the_rest(tmp_path):
    """`elsewhere` lists what other stages load: the rest still counts as unexpected; None allows all."""
    state = {name: (bits((4,), torch.float32), P()) for name in ("a", "b", "c")}
    path = save_all(tmp_path, 1, state, Mesh())[0]
    wanted = {"a": wanted_of(state)["a"]}
    assert list(checkpoint.load(path, wanted, Mesh(), 0, elsewhere=["b", "c"])) == ["a"]
    assert list(checkpoint.load(path, wanted, Mesh(), 0, elsewhere=None)) == ["a"]
    with pytest.raises(CheckpointError, match=r"unexpected: c \(4,\)") as caught:
        checkpoint.load(path, wanted, Mesh(), 0, elsewhere=["b"])
    assert "unexpected: b" not in str(caught.value)


def characters_read():
    """Bytes that this process has asked the kernel to read, through any call but page faults."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["rchar"])


@pytest.mark.parametrize(("spec", "quarters"), [(P("tp"), 1), (P(None, "tp"), 1), (P(None, None, "tp"), 4)], ids=str)
def test_only_the_needed_bytes_are_read(spec, quarters, tmp_path):
    """One of four ranks reads the blocks that hold its part of a tensor that one rank wrote, each once, as the kernel counts:
    a quarter where the wanted runs are long, all of it where every block holds a part of each rank.
    """
    mesh = Mesh(tp=4)
    state = {"x": (bits((4, 1024, 256), torch.float32), P()), "y": (bits((1024, 1024), torch.uint8), P())}
    path = save_all(tmp_path, 1, state, Mesh())[0]
    index_bytes = sum((path / name).stat().st_size for name in ("index.json", "state.json"))
    before = characters_read()
    loaded = checkpoint.load(path, {"x": ((4, 1024, 256), spec, torch.float32)}, mesh, 2, elsewhere=["y"])
    read = characters_read() - before
    assert same_bits(loaded["x"], cut(state["x"][0], spec, mesh, 2))
    wanted = quarters * 4 * 1024 * 256 * 4 // 4
    assert wanted <= read <= wanted + index_bytes + 4096  # 4096: the header of the file, and the counter's own file


@pytest.mark.parametrize("shape", [(40_001,), (5, 40_001), (3, 70, 500), (2, 3, 33_000), (700, 300)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8], ids=str)
def test_shards_of_several_blocks(shape, dtype, tmp_path):
    """Any box of a tensor of several blocks of 128 KiB comes back in every bit, and no block is read twice."""
    x = bits(shape, dtype)
    path = save_all(tmp_path, 1, {"x": (x, P())}, Mesh())[0]
    index = read_index(path)
    draw = random.Random(str(shape))
    for _ in range(examples(20)):
        box = tuple((first := draw.randrange(size), draw.randint(1, size - first)) for size in shape)
        target = torch.empty([size for _, size in box], dtype=dtype)
        with open_shards(path, index, 0) as file:
            before = characters_read()
            file.read("x", box, target)
            read = characters_read() - before
        assert same_bits(target, x[tuple(slice(first, first + size) for first, size in box)])
        assert read <= x.nbytes + 8 * (x.nbytes // 2**17 + 1) + 1024  # 1024: the counter's own file
