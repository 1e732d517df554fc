"""FLOPs of a step with frozen weights: each is multiplied once forward and once backward; only what is trained has gradients.

The products are counted in the program, instruction by instruction, and compared with the sizes of the matrices.
"""

import math

import pytest
import torch

from mpar import Mesh, adapters, models, tree
from mpar.adapters import LoRA
from mpar.models import flops_per_token
from mpar.optim import AdamW
from mpar.program.compile import compile_step
from mpar.quantised import quantise
from tests.program.oracle import BASE

SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
LLAMA = {**BASE, **SIZES, "model_type": "llama", "num_hidden_layers": 2, "vocab_size": 64, "tie_word_embeddings": False}
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
FIRST = ("q_DNH", "k_DKH", "v_DKH")
SHAPE, RANK = (2, 8), 4
TOKENS = math.prod(SHAPE)


def plain(**options):
    """Two layers and a head, whose matrices are multiples of 64, so that codes of 4 bits have whole blocks."""
    return models.from_config(LLAMA, vocab_multiple=8, **options)


def products(model) -> int:
    """FLOPs of all products of matrices in a step; not of attention."""
    shapes = {key: (SHAPE, torch.int64) for key in ("tokens", "labels")}
    program = compile_step(model, AdamW(lr=1e-3), Mesh(), "ddp", shapes)
    kinds = [program.kinds[instruction.kind] for instruction in program.instructions if instruction.kind in program.kinds]
    return sum(use.calls * use.flops for kind in kinds for use in kind.ops if use.matmul is not None)


def numbers_in(*begins: str, ends: tuple[str, ...] = ("",)) -> int:
    """How many numbers the matrices have whose paths begin and end so."""
    leaves = tree.leaves_with_path(plain().abstract_params)
    return sum(leaf.numel() for path, leaf in leaves if leaf.ndim > 1 and path.startswith(begins) and path.endswith(ends))


def low_rank(*ends: str) -> tuple[int, int]:
    """How many numbers A and B have for the matrices of a layer whose paths end so."""
    leaves = dict(tree.leaves_with_path(plain().abstract_params))
    shapes = {path: leaf.shape for path, leaf in leaves.items() if path.startswith("layers.0.") and path.endswith(ends)}
    inputs = {path: math.prod(shape[:-1]) if path.endswith("o_NHD") else shape[0] for path, shape in shapes.items()}
    return RANK * sum(inputs.values()), RANK * sum(math.prod(shape) // inputs[path] for path, shape in shapes.items())


@pytest.mark.parametrize("case", ["attention", "tiled", "all", "nf4"])
def test_lora_multiplies_frozen_weights_twice(case):
    """Once forward, once for the gradient of tokens, which the inputs of the first layer do not have; A and B also once for their
    own gradients. Tiles of a frozen feed-forward layer compute hidden values again, and have no gradients of weights."""
    targets = {"attention": ATTENTION, "tiled": ATTENTION}.get(case, "all-linear")
    model = adapters.add(plain(mlp_chunk=4 if case == "tiled" else None), LoRA(rank=RANK, targets=targets))
    if case == "nf4":
        model = quantise(model)
    adapted = (*FIRST, "o_NHD") if targets == ATTENTION else (*FIRST, "o_NHD", "gate_DF", "up_DF", "down_FD")
    (a, b), (first_a, _) = low_rank(*adapted), low_rank(*FIRST)
    unneeded = 2 * (numbers_in("layers.0.", ends=FIRST) + first_a)
    expected = 4 * numbers_in("layers.", "head.") + 6 * 2 * (a + b) - unneeded
    again = 2 * numbers_in("layers.", ends=("gate_DF", "up_DF")) if case == "tiled" else 0
    assert products(model) == TOKENS * (expected + again)
    assert flops_per_token(model, 0, causal=False) == expected + unneeded


def test_frozen_layers_have_a_forward_only():
    """Below the first layer that is trained there is no backward. Its own norm is trained, so its first products have one."""
    model = models.freeze(plain(), segments=("embed", "layers.0"))
    expected = 2 * numbers_in("layers.0.") + 6 * numbers_in("layers.1.", "head.")
    assert products(model) == TOKENS * expected
    assert flops_per_token(model, 0, causal=False) == expected


def test_all_that_is_trained_costs_three_products():
    """Without anything frozen: forward, the gradient of tokens and that of weights."""
    assert products(plain()) == TOKENS * 6 * numbers_in("layers.", "head.")
