"""The Mamba-2 mixer against that of transformers, against the recurrence in float64, and by its states."""

import dataclasses

import pytest
import torch
from transformers.models.mamba2 import modeling_mamba2 as hf

from mpar import ops, testing
from mpar.errors import ConfigError
from mpar.models.layers.mamba import MAMBA_AXES, Mamba, MambaConfig, decode_mamba, init_mamba_leaf, mamba, mamba_shapes

D, B, S = 12, 2, 11
CONFIG = MambaConfig(num_heads=4, head_size=6, num_groups=2, state_size=5, chunk=4)
CASES = {
    "groups": {},
    "one group": {"n_groups": 1},
    "a group each": {"n_groups": 4},
    "biases": {"use_bias": True},
    "no convolution bias": {"use_conv_bias": False},
    "limits": {"time_step_limit": (0.3, 1.0)},
    "width": {"conv_kernel": 3},
    "one chunk": {"chunk_size": 256},
    "eps": {"layer_norm_epsilon": 0.5},
}


def normal(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def reference_of(options):
    """(a mixer of transformers in float32 with drawn parameters, its config)."""
    settings = {"num_heads": 4, "head_dim": 6, "hidden_size": D, "expand": 2, "state_size": 5, "n_groups": 2, "chunk_size": 4}
    config = hf.Mamba2Config(**{**settings, **options})
    mixer = hf.Mamba2Mixer(config, 0).eval()
    with torch.no_grad():
        for seed, parameter in enumerate(mixer.parameters()):
            parameter.copy_(0.5 * normal(*parameter.shape, seed=seed) + (parameter.ndim == 1))
    return mixer, config


def ours_of(mixer, config):
    """Our configuration and parameters with the values of a mixer of transformers."""
    N, H, G, K = config.num_heads, config.head_dim, config.n_groups, config.state_size
    low, high = config.time_step_limit
    ours = MambaConfig(
        num_heads=N,
        head_size=H,
        num_groups=G,
        state_size=K,
        conv_width=config.conv_kernel,
        chunk=config.chunk_size,
        dt_limits=(low or None, None if high == float("inf") else high),
        bias=config.use_bias,
        conv_bias=config.use_conv_bias,
        norm_eps=config.layer_norm_epsilon,
    )
    state = {name: parameter.detach() for name, parameter in mixer.named_parameters()}

    def cut(name, parts, column=False):
        """The pieces of a stored tensor, of all or of the convolved parts."""
        if name not in state:
            return [None] * len(parts)
        sizes = [torch.Size(shape).numel() for shape in parts]
        pieces = state[name].split(sizes)
        shaped = [piece.reshape(*shape, *piece.shape[1:]) for piece, shape in zip(pieces, parts, strict=True)]
        return [piece.movedim(-1, 0) if column else piece for piece in shaped]

    all_parts, mixed = [(N, H), (N, H), (G, K), (G, K), (N,)], [(N, H), (G, K), (G, K)]
    weights, biases = cut("in_proj.weight", all_parts, column=True), cut("in_proj.bias", all_parts)
    taps, tap_biases = [w.squeeze(-2) for w in cut("conv1d.weight", mixed)], cut("conv1d.bias", mixed)
    params = Mamba(
        *weights,
        *taps,
        state["dt_bias"],
        state["A_log"],
        state["D"],
        state["norm.weight"],
        state["out_proj.weight"].T.reshape(N, H, D),
        *tap_biases,
        *biases,
        state.get("out_proj.bias"),
    )
    return ours, params


def drawn(config, dtype=torch.float64):
    """Parameters whose every leaf matters."""
    leaves = vars(mamba_shapes(config, D))
    values = {
        name: None if shape is None else 0.5 * normal(*shape, seed=i, dtype=dtype) + (len(shape) == 1)
        for i, (name, shape) in enumerate(leaves.items())
    }
    return Mamba(**values)


@pytest.mark.parametrize("case", CASES)
def test_equals_transformers(case):
    """Output, gradient of the input and of every parameter, in float32."""
    mixer, config = reference_of(CASES[case])
    ours, params = ours_of(mixer, config)
    names = [name for name, value in vars(params).items() if value is not None]
    params = dataclasses.replace(params, **{name: getattr(params, name).clone().requires_grad_() for name in names})
    x, dy = normal(B, S, D, dtype=torch.float32), normal(B, S, D, seed=9, dtype=torch.float32)
    x1, x2 = x.clone().requires_grad_(), x.clone().requires_grad_()
    expected, actual = mixer(x1), mamba(params, ours, x2, {})
    testing.assert_close(actual, expected, name="output", rtol=1e-5)
    expected.backward(dy)
    actual.backward(dy)
    testing.assert_close(x2.grad, x1.grad, name="gradient of x", rtol=1e-4)
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter.copy_(parameter.grad)
    _, wanted = ours_of(mixer, config)
    for name in names:
        testing.assert_close(getattr(params, name).grad, getattr(wanted, name), name=f"gradient of {name}", rtol=1e-4)


def test_float64_is_the_formula():
    """In float64 it is the formulas, token by token, where those of transformers are float32."""
    params, x = drawn(CONFIG), normal(1, S, D)
    z, inner, b, c, dt = (
        torch.tensordot(x[0], w, 1) for w in (params.z_DNH, params.x_DNH, params.b_DGK, params.c_DGK, params.dt_DN)
    )

    def taps(u, weight, bias):
        padded = torch.cat([torch.zeros(3, *u.shape[1:], dtype=u.dtype), u])
        y = sum(padded[w : w + S] * weight[..., w] for w in range(4)) + bias
        return y / (1 + torch.exp(-y))

    inner = taps(inner, params.conv_x_NHW, params.conv_x_bias_NH)
    b, c = taps(b, params.conv_b_GKW, params.conv_b_bias_GK), taps(c, params.conv_c_GKW, params.conv_c_bias_GK)
    dt = torch.log1p(torch.exp(dt + params.dt_bias_N))
    state, rows = torch.zeros(4, 6, 5, dtype=x.dtype), []
    for t in range(S):
        for n in range(4):
            decay = torch.exp(-dt[t, n] * torch.exp(params.a_log_N[n]))
            state[n] = decay * state[n] + dt[t, n] * torch.outer(inner[t, n], b[t, n // 2])
        y = torch.stack([state[n] @ c[t, n // 2] + params.skip_N[n] * inner[t, n] for n in range(4)])
        gated = y * z[t] / (1 + torch.exp(-z[t]))
        halves = [half / (half.pow(2).mean() + CONFIG.norm_eps).sqrt() for half in (gated[:2], gated[2:])]
        rows.append(torch.tensordot(torch.cat(halves) * params.norm_C.view(4, 6), params.out_NHD, 2))
    testing.assert_close(mamba(params, CONFIG, x, {}), torch.stack(rows)[None])


def test_a_document_sees_itself_alone():
    """Packed documents give what each gives alone, though the convolution and the scan run over both."""
    params, x = drawn(CONFIG), normal(1, S, D)
    for cut in (1, 2, 7):
        documents = torch.tensor([[0] * cut + [1] * (S - cut)])
        alone = torch.cat([mamba(params, CONFIG, part, {}) for part in (x[:, :cut], x[:, cut:])], 1)
        testing.assert_close(mamba(params, CONFIG, x, {"documents": documents}), alone)


@pytest.mark.parametrize("cuts", [(1,) * S, (4, 7), (2, 1, 8), (S,)], ids=str)
def test_steps_are_the_whole(cuts):
    """Token by token or in pieces, each from the state that the last one left, outputs are those of the whole."""
    params, x = drawn(CONFIG), normal(B, S, D)
    state, parts = None, []
    for part in x.split(cuts, 1):
        out, state = decode_mamba(params, CONFIG, part, state)
        parts.append(out)
    testing.assert_close(torch.cat(parts, 1), mamba(params, CONFIG, x, {}))
    assert [tuple(leaf.shape) for leaf in vars(state).values()] == [(B, 3, 4, 6), (B, 3, 2, 5), (B, 3, 2, 5), (B, 4, 6, 5)]


def test_permuted_tokens_are_refused():
    """A layout in which tokens are not in their own order raises, with the way out."""
    with pytest.raises(ConfigError, match=r"strategy\.sequence=contiguous"):
        mamba(drawn(CONFIG), CONFIG, normal(1, 4, D), {"order": torch.tensor([0, 3, 1, 2])})


def test_axes_fit_the_shapes():
    """Every leaf has one logical axis or None for each of its dims."""
    shapes = vars(mamba_shapes(dataclasses.replace(CONFIG, bias=True), D))
    assert {name: len(shape) for name, shape in shapes.items()} == {name: len(axes) for name, axes in vars(MAMBA_AXES).items()}


def test_fresh_leaves_in_parts():
    """Parts of a fresh leaf are those of the whole, and steps and decays begin where they should."""
    config = MambaConfig(num_heads=64, head_size=4, num_groups=1, state_size=8, dt_floor=0.002)
    shapes, key = vars(mamba_shapes(config, D)), ops.fold_key(0, "layers.0")
    for field in ("a_log_N", "skip_N", "dt_bias_N", "conv_x_NHW", "out_NHD"):
        bounds = [range(size) for size in shapes[field]]
        whole = init_mamba_leaf(config, field, key, bounds, torch.float64)
        part = init_mamba_leaf(
            config, field, key, [range(0, 4)[1:3] if i == 0 else b for i, b in enumerate(bounds)], torch.float64
        )
        assert torch.equal(part, whole[1:3])
        if field == "a_log_N":
            testing.assert_close(whole.exp(), torch.arange(1, 65).double())
        if field == "dt_bias_N":
            steps = torch.nn.functional.softplus(whole)
            assert 0.002 * (1 - 1e-9) <= steps.min() < 0.003 and 0.05 < steps.max() <= 0.1
        if field == "out_NHD":
            assert 0.9 / 16 < whole.abs().max() <= 1 / 16
        if field == "conv_x_NHW":
            assert 0.45 < whole.abs().max() <= 0.5
    assert init_mamba_leaf(config, "z_DNH", key, [range(2)] * 3, torch.float64) is None


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"num_groups": 3}, "num_groups=3 does not divide"),
        ({"state_size": 0, "chunk": -1}, "state_size=0: .*\n.*chunk=-1"),
        ({"dt_limits": (2.0, 1.0)}, "dt_limits"),
        ({"dt_floor": 0.0}, "dt_floor"),
    ],
    ids=str,
)
def test_sizes_that_cannot_be_are_refused(change, match):
    """All problems are named at once."""
    with pytest.raises(ConfigError, match=match):
        dataclasses.replace(CONFIG, **change)
