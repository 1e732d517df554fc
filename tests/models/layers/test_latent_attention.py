"""Latent attention against the attention of DeepSeek-V2 and V3 in transformers, and against formulas in float64."""

import dataclasses

import pytest
import torch
from transformers.models.deepseek_v2 import modeling_deepseek_v2 as v2
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as v3

from mpar import testing
from mpar.errors import ConfigError
from mpar.models.layers import (
    LatentAttention,
    LatentAttentionConfig,
    decode_latent_attention,
    latent_attend,
    latent_attention_shapes,
)

SIZES = {"kv_lora_rank": 12, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5}
CONFIG = LatentAttentionConfig(num_heads=3, kv_rank=12, nope_size=6, rope_size=4, v_size=5, q_rank=10)
B, S, D = 2, 9, 24
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 4,
    "rope_theta": 100.0,
    "mscale": 0.7,
    "mscale_all_dim": 1.2,
}
CASES = {
    "v3": (v3, {"q_lora_rank": 10}),
    "v3_yarn": (v3, {"q_lora_rank": 10, "rope_parameters": YARN}),
    "v3_halves": (v3, {"q_lora_rank": 10, "rope_interleave": False}),
    "v3_biases": (v3, {"q_lora_rank": 10, "attention_bias": True}),
    "v3_no_q_latent": (v3, {"q_lora_rank": None}),
    "v2": (v2, {"q_lora_rank": 10}),
    "v2_no_q_latent": (v2, {"q_lora_rank": None, "rope_parameters": YARN}),
}


def normal(*shape, seed=0, dtype=torch.float64):
    """Normal numbers."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def reference_of(module, options):
    """(attention with drawn parameters, its RoPE) of transformers, in float32."""
    name = "DeepseekV2" if module is v2 else "DeepseekV3"
    config = getattr(module, f"{name}Config")(
        hidden_size=D, num_attention_heads=3, num_key_value_heads=3, max_position_embeddings=16, **SIZES, **options
    )
    config._attn_implementation = "eager"
    attention = getattr(module, f"{name}Attention")(config, 0).eval()
    with torch.no_grad():
        for seed, parameter in enumerate(attention.parameters()):
            parameter.copy_(0.4 * normal(*parameter.shape, seed=seed) + (parameter.ndim == 1))
    return attention, getattr(module, f"{name}RotaryEmbedding")(config)


def params_of(attention):
    """Our parameters with the values of a module of transformers."""
    state = dict(attention.named_parameters())
    with_latent = "q_a_proj.weight" in state

    def heads(name, size):
        weight = state.get(name)
        return None if weight is None else weight.detach().reshape(3, size, -1).permute(2, 0, 1).contiguous()

    return LatentAttention(
        kv_a_DC=state["kv_a_proj_with_mqa.weight"].detach().T,
        kv_a_norm_C=state["kv_a_layernorm.weight"].detach(),
        kv_b_CNH=heads("kv_b_proj.weight", 11),
        o_NHD=state["o_proj.weight"].detach().T.reshape(3, 5, D),
        q_DNH=heads("q_proj.weight", 10),
        q_a_DL=state["q_a_proj.weight"].detach().T if with_latent else None,
        q_a_norm_L=state["q_a_layernorm.weight"].detach() if with_latent else None,
        q_b_LNH=heads("q_b_proj.weight", 10),
        q_a_bias_L=state.get("q_a_proj.bias"),
        kv_a_bias_C=state.get("kv_a_proj_with_mqa.bias"),
        o_bias_D=state.get("o_proj.bias"),
    )


@pytest.mark.parametrize("case", CASES)
def test_equals_transformers(case):
    """The layer gives what DeepSeek's attention in transformers gives, with its tables of RoPE and its scale."""
    module, options = CASES[case]
    attention, rotary = reference_of(module, options)
    config = dataclasses.replace(
        CONFIG,
        q_rank=options["q_lora_rank"],
        scale=attention.scaling,
        interleaved=options.get("rope_interleave", True),
        bias=options.get("attention_bias", False),
    )
    x = normal(B, S, D, dtype=torch.float32)
    tables = rotary(x, torch.arange(S)[None])
    mask = torch.full((S, S), -torch.inf).triu(1).expand(B, 1, S, S)
    expected, _ = attention(x, position_embeddings=tables, attention_mask=mask)
    if module is v2:
        cos, sin = tables.real, tables.imag
    else:
        cos, sin = (table[..., :2] for table in tables)
    actual = latent_attend(params_of(attention), config, x, {"cos": cos, "sin": sin})
    testing.assert_close(actual, expected, rtol=1e-5)


def tables_of(positions):
    """cos and sin (1, S, 2) of two pairs."""
    angles = positions.double()[:, None] * torch.tensor([1.0, 0.1], dtype=torch.float64)
    return {"cos": angles.cos()[None], "sin": angles.sin()[None]}


def drawn(config):
    """Parameters in float64."""
    shapes = latent_attention_shapes(config, D)
    values = {
        name: None if shape is None else 0.4 * normal(*shape, seed=seed)
        for seed, (name, shape) in enumerate(vars(shapes).items())
    }
    return LatentAttention(**values)


def by_hand(params, x_SD, positions):
    """One row, head by head, with complex numbers for RoPE."""

    def norm(x, weight):
        return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight

    def turn(x):
        angles = positions.double()[:, None] * torch.tensor([1.0, 0.1], dtype=torch.float64)
        turned = torch.view_as_complex(x.reshape(S, 2, 2)) * torch.polar(torch.ones_like(angles), angles)
        return torch.view_as_real(turned).reshape(S, 4)

    queries = norm(x_SD @ params.q_a_DL, params.q_a_norm_L)
    down = x_SD @ params.kv_a_DC
    latent, k_rope = norm(down[:, :12], params.kv_a_norm_C), turn(down[:, 12:])
    out = torch.zeros(S, D, dtype=torch.float64)
    for n in range(3):
        q, kv = queries @ params.q_b_LNH[:, n], latent @ params.kv_b_CNH[:, n]
        logits = (q[:, :6] @ kv[:, :6].T + turn(q[:, 6:]) @ k_rope.T) / 10**0.5
        logits = logits.masked_fill(positions[:, None] < positions, -torch.inf)
        out += logits.softmax(-1) @ kv[:, 6:] @ params.o_NHD[n]
    return out


def test_equals_the_formula_in_float64():
    """The layer is what section 2.1 of the paper writes, to the precision of float64."""
    params, x = drawn(CONFIG), normal(1, S, D, seed=9)
    actual = latent_attend(params, CONFIG, x, tables_of(torch.arange(S)))
    testing.assert_close(actual[0], by_hand(params, x[0], torch.arange(S)))


def test_order_tells_what_a_token_sees():
    """Tokens that are stored in another order, with their places in `order`, give the same rows in that order."""
    params, x, order = drawn(CONFIG), normal(B, S, D, seed=9), torch.randperm(S, generator=torch.Generator().manual_seed(1))
    expected = latent_attend(params, CONFIG, x, tables_of(torch.arange(S)))
    actual = latent_attend(params, CONFIG, x[:, order], {**tables_of(order), "order": order})
    testing.assert_close(actual, expected[:, order])


def test_documents_see_themselves_only():
    """A token of another document changes nothing."""
    params, x = drawn(CONFIG), normal(1, S, D, seed=9)
    context = {**tables_of(torch.arange(S)), "documents": torch.tensor([[0] * 4 + [1] * 5])}
    changed = x.clone()
    changed[0, 1] += 1
    difference = (latent_attend(params, CONFIG, x, context) - latent_attend(params, CONFIG, changed, context)).abs().amax(-1)[0]
    assert (difference > 0).nonzero().flatten().tolist() == [1, 2, 3]


def test_steps_give_the_rows_of_the_whole_from_latents_alone():
    """Pieces of a row, each going on from the state before, give the whole; the state is a latent and a key part each."""
    params, x = drawn(CONFIG), normal(B, S, D, seed=9)
    expected, state, rows = latent_attend(params, CONFIG, x, tables_of(torch.arange(S))), None, []
    for piece in torch.arange(S).split([4, 1, 3, 1]):
        row, state = decode_latent_attention(params, CONFIG, x[:, piece], {**tables_of(piece), "order": piece}, state)
        rows.append(row)
    testing.assert_close(torch.cat(rows, 1), expected)
    assert (state.latent_BMC.shape, state.k_rope_BMH.shape) == ((B, S, 12), (B, S, 4))


def test_bad_sizes_are_all_listed():
    """Every size that cannot be is in one error."""
    with pytest.raises(ConfigError, match=r"(?s)kv_rank=0.*rope_size=3 is odd"):
        LatentAttentionConfig(num_heads=2, kv_rank=0, nope_size=4, rope_size=3, v_size=4)
