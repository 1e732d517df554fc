"""Hugging Face folders in both directions: bits, bytes read, shards, errors."""

import json
import math

import pytest
import safetensors.torch
import torch
import transformers

from mpar import models, testing, tree
from mpar.errors import CheckpointError, ShapeError, ShardingError
from mpar.mesh import Mesh
from mpar.models.hf import _folder
from mpar.spec import P
from mpar.strategy import preset
from tests.models.variants import KINDS, VARIANTS

TOKENS = torch.randint(61, (2, 9), generator=torch.Generator().manual_seed(0))


def stored(folder):
    """Every tensor of a folder by name."""
    return {name: value for file in folder.glob("*.safetensors") for name, value in safetensors.torch.load_file(file).items()}


# what has no part in shapes and names is left out: one variant of each architecture, and those with other tensors
STORED = [
    *(name for name in VARIANTS if name in KINDS),
    *("gemma3", "llama_biases", "llama_tied", "qwen3_head_dim", "starcoder2_untied", "starcoder2_no_biases"),
    *("gemma2_untied_biases", "gpt2_untied", "phi3_multi_head", "phi3_long", "olmo2_multi_head"),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("variant", STORED)
def test_import_then_export_is_bit_equal(variant, dtype, make_reference, tmp_path):
    """The exported folder has the tensors of the imported one, and transformers computes the same logits from it."""
    kind, config = VARIANTS[variant]
    make_reference(kind, **config).to(dtype).save_pretrained(tmp_path / "in")
    model, params = models.from_hf(tmp_path / "in")
    assert {leaf.dtype for leaf in tree.leaves(params)} == {model.dtype} == {dtype}
    models.to_hf(model, params, tmp_path / "out", max_file_bytes=9000)
    assert len(list((tmp_path / "out").glob("model-*.safetensors"))) > 2
    before, after = stored(tmp_path / "in"), stored(tmp_path / "out")
    assert set(before) == set(after)
    assert all(torch.equal(before[name], after[name]) and after[name].dtype == dtype for name in before)
    logits = [transformers.AutoModelForCausalLM.from_pretrained(tmp_path / f)(TOKENS).logits for f in ("in", "out")]
    testing.assert_close(*logits, rtol=None if dtype == torch.bfloat16 else 1e-6)  # experts may be summed in another order


def test_files_respect_their_bound(make_folder, tmp_path):
    """No file has more bytes of tensors than asked for, unless one tensor alone has; the index names every tensor once."""
    folder, _ = make_folder()
    model, params = models.from_hf(folder)
    models.to_hf(model, params, tmp_path / "out", max_file_bytes=12_000)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    sizes = {}
    for name, file in index["weight_map"].items():
        sizes[file] = sizes.get(file, 0) + stored(tmp_path / "out")[name].nbytes
    assert max(sizes.values()) <= 12_000
    assert sum(sizes.values()) == index["metadata"]["total_size"] == sum(t.nbytes for t in stored(folder).values())
    again, params_again = models.from_hf(tmp_path / "out")
    assert all(torch.equal(a, b) for a, b in zip(tree.leaves(params), tree.leaves(params_again), strict=True))
    assert again.config == model.config


def test_export_keeps_the_config_and_generation_config(make_folder, tmp_path):
    """All keys of config.json survive, ignored ones too; the dtype is that of the tensors; generation_config.json is the same."""
    folder, _ = make_folder("qwen3", eos_token_id=7, pad_token_id=3)
    model, params = models.from_hf(folder, dtype=torch.bfloat16)
    models.to_hf(model, params, tmp_path / "out")
    before, after = (json.loads((f / "config.json").read_text()) for f in (folder, tmp_path / "out"))
    assert before.pop("dtype") == "float32"
    assert after.pop("dtype") == "bfloat16"
    assert before == after
    assert len({(f / "generation_config.json").read_text().strip() for f in (folder, tmp_path / "out")}) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_a_built_model_exports_for_transformers(kind, tmp_path):
    """Transformers loads a model that never was a folder, with equal logits; what its config leaves out has equal defaults."""
    model = models.build(kind, KINDS[kind].base)
    params = model.init(1)
    models.to_hf(model, params, tmp_path / "out")
    reference = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    testing.assert_close(model.apply(params, TOKENS), reference(TOKENS).logits, rtol=1e-5)


@pytest.fixture
def read_bytes(monkeypatch):
    """A dict from tensor name to the bytes that were asked of safetensors."""
    counts = {}
    real_open = _folder.safe_open

    class Slice:
        def __init__(self, name, real):
            self.name, self.real = name, real

        def __getattr__(self, key):
            return getattr(self.real, key)

        def __getitem__(self, block):
            value = self.real[block]
            counts[self.name] = counts.get(self.name, 0) + value.nbytes
            return value

    class File:
        def __init__(self, *args, **options):
            self.real = real_open(*args, **options)

        def get_slice(self, name):
            return Slice(name, self.real.get_slice(name))

        def keys(self):
            return self.real.keys()

        def __enter__(self):
            return self

        def __exit__(self, *error):
            pass

    monkeypatch.setattr(_folder, "safe_open", File)
    return counts


def specs_of(model, table):
    """Storage specs: each dim by what `table` says of its logical axis."""
    axes = tree.flatten(model.param_axes, is_leaf=lambda x: isinstance(x, tuple) and isinstance(x[0], str))[0]
    like = tree.flatten(model.abstract_params)[1]
    return tree.unflatten(like, [P(*(table.get(name) for name in names)) for names in axes])


@pytest.mark.parametrize(
    "table", [{"embed": "fsdp"}, {"embed": "fsdp", "heads": "tp", "kv_heads": "tp", "mlp": "tp", "vocab": "tp"}]
)
def test_a_rank_reads_its_shard_and_no_other_byte(table, make_folder, read_bytes):
    """Shards put together are the whole parameters, and each rank asks for the bytes of its unpadded elements only."""
    folder, _ = make_folder("qwen2")
    mesh = Mesh(dp=2, fsdp=2, tp=2)
    model, whole = models.from_hf(folder)
    specs = specs_of(model, table)
    ones = tree.map_leaves(torch.ones_like, whole)
    ones.embed.table_VD[61:] = 0
    ones.head.head_DV[:, 61:] = 0
    for rank in range(mesh.size):
        read_bytes.clear()
        local = models.load_params(model, folder, specs, mesh, rank)
        coordinates, expected_bytes = mesh.coordinates(rank), 0
        for path, leaf in tree.leaves_with_path(whole):
            expected, counted = leaf, tree.get(ones, path)
            for dim, axes in enumerate(tree.get(specs, path).dims):
                for axis in axes:
                    expected, counted = (x.chunk(2, dim)[coordinates[axis]] for x in (expected, counted))
            assert torch.equal(tree.get(local, path), expected), path
            expected_bytes += int(counted.sum()) * 4
        assert sum(read_bytes.values()) == expected_bytes


def test_from_hf_places_by_the_strategy(make_folder):
    """With a mesh and a strategy each rank gets its part: embed over fsdp, heads over tp, 1 kv head on all of tp."""
    folder, _ = make_folder("qwen3", num_key_value_heads=1)
    _, whole = models.from_hf(folder)
    mesh = Mesh(fsdp=2, tp=2)
    for rank in range(4):
        _, local = models.from_hf(folder, mesh=mesh, strategy=preset("zero3_tp"), rank=rank)
        fsdp, tp = divmod(rank, 2)
        attention, expected = local.layers[1].attention, whole.layers[1].attention
        assert torch.equal(attention.q_DNH, expected.q_DNH.chunk(2, 0)[fsdp].chunk(2, 1)[tp])
        assert torch.equal(attention.k_DKH, expected.k_DKH.chunk(2, 0)[fsdp])
        assert torch.equal(local.embed.table_VD, whole.embed.table_VD.chunk(2, 0)[tp].chunk(2, 1)[fsdp])
    with pytest.raises(ShardingError, match="come together"):
        models.from_hf(folder, mesh=mesh)


def test_part_of_a_head_is_read_without_the_rest(make_folder, read_bytes):
    """A slice within merged dims, which lies in the file in many pieces, is read piece by piece."""
    folder, reference = make_folder("qwen3")
    model = models.from_config(folder)
    with models.HfReader(model, folder) as reader:
        part = reader.read_leaf("layers.1.attention.q_DNH", (slice(3, 9), slice(1, 3), slice(2, 5)))
    weight = reference.model.layers[1].self_attn.q_proj.weight.detach()
    assert torch.equal(part, weight.reshape(4, 8, 32).permute(2, 0, 1)[3:9, 1:3, 2:5])
    assert read_bytes == {"model.layers.1.self_attn.q_proj.weight": 6 * 2 * 3 * 4}


def test_opening_reads_no_tensor(make_folder, read_bytes):
    """Comparing names and shapes touches headers only."""
    folder, _ = make_folder()
    with models.HfReader(models.from_config(folder), folder):
        pass
    assert not read_bytes


def rewrite(folder, change):
    """Change the tensors of a folder."""
    tensors = stored(folder)
    change(tensors)
    safetensors.torch.save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_all_wrong_tensors_are_listed_at_once(make_folder):
    """Missing, unexpected, mis-shaped and integer tensors are one error that names them all."""
    folder, _ = make_folder()

    def change(tensors):
        del tensors["model.norm.weight"]
        tensors["model.layers.2.mlp.up_proj.weight"] = torch.zeros(2)
        tensors["lm_head.weight"] = torch.zeros(60, 32)
        tensors["model.layers.0.input_layernorm.weight"] = torch.zeros(32, dtype=torch.int8)

    rewrite(folder, change)
    with pytest.raises(CheckpointError) as error:
        models.from_hf(folder)
    for line in (
        "missing: model.norm.weight (32,)",
        "unexpected: model.layers.2.mlp.up_proj.weight",
        "shape: lm_head.weight is (60, 32), the config asks for (61, 32)",
        "dtype: model.layers.0.input_layernorm.weight is I8",
    ):
        assert line in str(error.value)


def test_a_tied_model_may_store_its_head(make_folder):
    """Old rotary buffers, and the head of a tied model, are passed over."""
    folder, _ = make_folder(tie_word_embeddings=True)
    extra = {"lm_head.weight": torch.zeros(61, 32), "model.layers.1.self_attn.rotary_emb.inv_freq": torch.zeros(4)}
    rewrite(folder, lambda tensors: tensors.update(extra))
    model, params = models.from_hf(folder)
    assert "lm_head.weight" not in models.hf_tensors(model, params)


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_a_checkpoint_of_the_bare_decoder_is_read(kind, make_folder):
    """Names may lack what those of the decoder begin with, as the published ones of GPT-2 do; old masks are passed over."""
    folder, _ = make_folder(kind, tie_word_embeddings=True)
    _, whole = models.from_hf(folder)
    base = {"gpt2": "transformer.", "llama": "model."}[kind]
    names = list(stored(folder))
    rewrite(folder, lambda tensors: [tensors.update({n.removeprefix(base): tensors.pop(n)}) for n in names] and None)
    if kind == "gpt2":
        rewrite(folder, lambda tensors: tensors.update({"h.0.attn.bias": torch.zeros(1, 1, 64, 64)}))
    assert not any(name.startswith(base) for name in stored(folder))
    _, params = models.from_hf(folder)
    assert all(torch.equal(a, b) for a, b in zip(tree.leaves(params), tree.leaves(whole), strict=True))


def test_shards_of_joined_projections_are_read_alone(make_folder, read_bytes):
    """Where queries, keys and values are one stored tensor, a shard of each asks for its own bytes in it."""
    folder, reference = make_folder("phi3")
    with models.HfReader(models.from_config(folder), folder) as reader:
        k = reader.read_leaf("layers.1.attention.k_DKH", (slice(3, 9), slice(1, 2), slice(0, 8)))
    weight = reference.model.layers[1].self_attn.qkv_proj.weight.detach()
    assert torch.equal(k, weight[32:48].reshape(2, 8, 32).permute(2, 0, 1)[3:9, 1:2])
    assert read_bytes == {"model.layers.1.self_attn.qkv_proj.weight": 6 * 8 * 4}


def test_mixed_dtypes_are_widened(make_folder):
    """Where tensors differ in dtype, all parameters get the one that holds them all."""
    folder, _ = make_folder()
    rewrite(folder, lambda tensors: tensors.update({"model.norm.weight": tensors["model.norm.weight"].bfloat16()}))
    model, params = models.from_hf(folder)
    assert {leaf.dtype for leaf in tree.leaves(params)} == {model.dtype} == {torch.float32}


def truncate(folder):
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[: len(data) // 2])


def index(weight_map):
    return lambda folder: (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (truncate, "model.safetensors"),
        (lambda folder: (folder / "model.safetensors").unlink(), "no model.safetensors"),
        (lambda folder: (folder / "config.json").unlink(), "config.json"),
        (lambda folder: (folder / "config.json").write_text("[1"), "config.json"),
        (lambda folder: (folder / "config.json").write_text("[1]"), "list"),
        (index({"model.norm.weight": "gone.safetensors"}), "gone.safetensors"),
        (index({"model.norm.weight": "../model.safetensors"}), "weight_map"),
        (index([1]), "weight_map"),
        (index({"lm_head.weigh": "model.safetensors", "model.norm.weight": "model.safetensors"}), "missing: lm_head.weight"),
    ],
)
def test_damaged_folders_are_refused(damage, text, make_folder):
    """A truncated, missing or inconsistent file raises CheckpointError that names it."""
    folder, _ = make_folder()
    damage(folder)
    with pytest.raises(CheckpointError, match=text):
        models.from_hf(folder)


def test_an_index_that_points_to_the_wrong_file_is_refused(make_folder):
    """A tensor that is not in the file that the index names is missing, and said to be."""
    folder, _ = make_folder()
    names = list(stored(folder))
    safetensors.torch.save_file({"other": torch.zeros(1)}, folder / "b.safetensors")
    index({name: "b.safetensors" if name == "model.norm.weight" else "model.safetensors" for name in names})(folder)
    with pytest.raises(CheckpointError, match=r"model.norm.weight is not in b.safetensors"):
        models.from_hf(folder)


def test_specs_that_do_not_fit_are_listed_at_once(make_folder):
    """Every leaf whose dim the mesh does not divide is in one ShardingError."""
    folder, _ = make_folder()
    model = models.from_config(folder)
    with pytest.raises(ShardingError) as error:
        models.load_params(model, folder, specs_of(model, {"embed": "fsdp"}), Mesh(fsdp=3))
    assert all(path in str(error.value) for path in tree.paths(model.abstract_params) if not path.endswith("_NH"))
    with pytest.raises(ShardingError, match="no mesh"):
        models.load_params(model, folder, specs_of(model, {}))


@pytest.mark.parametrize("part", [(slice(0, 2),), (slice(0, 4, 2), slice(None))])
def test_bad_slices_are_refused(part, make_folder):
    """The reader takes one slice per dim, without steps."""
    folder, _ = make_folder()
    with models.HfReader(models.from_config(folder), folder) as reader, pytest.raises(ShapeError, match="one slice"):
        reader.read_leaf("embed.table_VD", part)


def test_export_refuses_shards_and_folders_with_weights(make_folder, tmp_path):
    """Local shards cannot be written as a model, and a folder that has weights is not mixed with others."""
    folder, _ = make_folder()
    model, params = models.from_hf(folder)
    shard = tree.replace(params, "embed.table_VD", params.embed.table_VD[:64])
    with pytest.raises(ShapeError, match=r"embed.table_VD .*\(64, 32\)"):
        models.to_hf(model, shard, tmp_path / "out")
    with pytest.raises(CheckpointError, match="already holds weights"):
        models.to_hf(model, params, folder)


def test_loaded_parameters_outlive_the_files(make_folder):
    """Parameters are copies: overwriting the folder later does not change them."""
    folder, _ = make_folder()
    model, params = models.from_hf(folder)
    before = tree.map_leaves(torch.clone, params)
    file = folder / "model.safetensors"
    with file.open("r+b") as handle:
        handle.write(b"\0" * file.stat().st_size)
    assert all(torch.equal(a, b) for a, b in zip(tree.leaves(params), tree.leaves(before), strict=True))
    assert math.isfinite(float(model.apply(params, TOKENS).sum()))
