"""Three functions of each kind as people write them in JAX."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array

__all__ = ["TWINS"]


def causal_attention(q, k, v):
    scores = q @ k.swapaxes(-1, -2) / q.shape[-1] ** 0.5
    mask = jnp.triu(jnp.ones(scores.shape[-2:], bool), k=1)
    return jax.nn.softmax(jnp.where(mask, -jnp.inf, scores), axis=-1) @ v


def grouped_query_attention(q, k, v):
    groups = q.shape[1] // k.shape[1]
    return causal_attention(q, jnp.repeat(k, groups, axis=1), jnp.repeat(v, groups, axis=1))


def linear_attention(q, k, v):
    q, k = jax.nn.elu(q) + 1, jax.nn.elu(k) + 1
    state = jnp.einsum("bhkd,bhke->bhde", k, v)
    total = jnp.einsum("bhqd,bhd->bhq", q, k.sum(2))
    return jnp.einsum("bhqd,bhde->bhqe", q, state) / total[..., None]


def layer_norm_by_hand(x, gain, bias):
    mean = x.mean(-1, keepdims=True)
    variance = ((x - mean) ** 2).mean(-1, keepdims=True)
    return (x - mean) / jnp.sqrt(variance + 1e-5) * gain + bias


def batch_norm_by_hand(x, gain, bias):
    mean, variance = x.mean((0, 1)), x.var((0, 1))
    return (x - mean) * jax.lax.rsqrt(variance + 1e-5) * gain + bias, mean, variance


def weight_norm(x, weight, scale):
    unit = weight / (jnp.abs(weight) ** 3).sum(0, keepdims=True) ** (1 / 3)
    return x @ (unit * scale)


def cross_entropy(logits, labels):
    log_p = jax.nn.log_softmax(logits, axis=-1)
    picked = jnp.take_along_axis(log_p, labels[..., None], axis=-1)[..., 0]
    keep = labels != 0
    return -(jnp.where(keep, 0.9 * picked + 0.1 * log_p.mean(-1), 0.0)).sum() / keep.sum()


def info_nce(a, b):
    a = a / jnp.linalg.norm(a, axis=-1, keepdims=True)
    b = b / jnp.linalg.norm(b, axis=-1, keepdims=True)
    logits = a @ b.T / 0.07
    by_row, by_column = jax.nn.log_softmax(logits, axis=1), jax.nn.log_softmax(logits, axis=0)
    labels = jnp.arange(len(a))[:, None]
    picked = jnp.take_along_axis(by_row, labels, axis=1) + jnp.take_along_axis(by_column.T, labels, axis=1)
    return -picked.mean() / 2


def ppo_loss(logits, actions, old_log_p, advantage, keep):
    log_p = logits - jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    entropy = -(jnp.exp(log_p) * log_p).sum(-1)
    ratio = jnp.exp(jnp.take_along_axis(log_p, actions[..., None], axis=-1)[..., 0] - old_log_p)
    advantage = (advantage - advantage.mean()) / (advantage.std(ddof=1) + 1e-8)
    gain = jnp.minimum(ratio * advantage, jnp.clip(ratio, 0.8, 1.2) * advantage)
    return -((gain + 0.01 * entropy) * keep).sum() / keep.sum()


def topk_router(x, gate):
    weights, chosen = jax.lax.top_k(jax.nn.softmax(x @ gate, axis=-1), 2)
    return weights / weights.sum(-1, keepdims=True), chosen


def soft_moe(x, slots, up, down):
    logits = jnp.einsum("bsd,edp->bsep", x, slots)
    dispatch = jax.nn.softmax(logits, axis=1)
    combine = jax.nn.softmax(logits, axis=(2, 3))
    rows = jnp.einsum("bsep,bsd->bepd", dispatch, x)
    rows = jnp.einsum("bepo,eod->bepd", jax.nn.gelu(jnp.einsum("bepd,edo->bepo", rows, up), approximate=False), down)
    return jnp.einsum("bsep,bepd->bsd", combine, rows)


def sinkhorn_router(logits):
    for _ in range(3):
        logits = logits - jax.nn.logsumexp(logits, axis=1, keepdims=True)
        logits = logits - jax.nn.logsumexp(logits, axis=2, keepdims=True)
    return jnp.exp(logits)


def rope_by_halves(x):
    angles = _angles(x)
    cos, sin = jnp.cos(jnp.concatenate([angles, angles], -1)), jnp.sin(jnp.concatenate([angles, angles], -1))
    first, second = jnp.split(x, 2, axis=-1)
    return x * cos[:, None] + jnp.concatenate([-second, first], axis=-1) * sin[:, None]


def rope_interleaved(x):
    angles = _angles(x)[:, None]
    even, odd = x[..., 0::2], x[..., 1::2]
    turned = [even * jnp.cos(angles) - odd * jnp.sin(angles), even * jnp.sin(angles) + odd * jnp.cos(angles)]
    return jnp.stack(turned, axis=-1).reshape(x.shape)


def relative_bias(scores, table):
    query, key = jnp.arange(scores.shape[2]), jnp.arange(scores.shape[3])
    distance = jnp.maximum(query[:, None] - key[None, :], 0)
    large = 4 + (jnp.log(jnp.maximum(distance, 1) / 4) / jnp.log(4) * 4).astype(int)
    bucket = jnp.where(distance < 4, distance, jnp.minimum(large, table.shape[0] - 1))
    return jax.nn.softmax(scores + table[bucket].transpose(2, 0, 1), axis=-1)


def token_shift(x, mix):
    before = jnp.pad(x, ((0, 0), (1, 0), (0, 0)))[:, :-1]
    return x * mix + before * (1 - mix)


def chunked_linear_attention(q, k, v):
    shape = q.shape
    q, k, v = (x.reshape(*shape[:2], -1, 4, shape[-1]) for x in (q, k, v))
    state = jnp.einsum("bhncd,bhnce->bhnde", k, v)
    before = state.cumsum(2) - state
    pairs = jnp.tril(jnp.einsum("bhncd,bhnmd->bhncm", q, k))
    return (jnp.einsum("bhncm,bhnme->bhnce", pairs, v) + jnp.einsum("bhncd,bhnde->bhnce", q, before)).reshape(shape)


def gated_recurrence(x, gate):
    a = jax.nn.sigmoid(gate)
    log_decay = jnp.log(a).cumsum(1)
    return jnp.exp(log_decay) * ((1 - a) * x * jnp.exp(-log_decay)).cumsum(1)


def top_k_filter(logits):
    smallest = jax.lax.top_k(logits, 10)[0][..., -1:]
    return jax.nn.softmax(jnp.where(logits < smallest, -jnp.inf, logits), axis=-1)


def min_p_filter(logits):
    p = jax.nn.softmax(logits, axis=-1)
    p = jnp.where(p < 0.1 * p.max(-1, keepdims=True), 0.0, p)
    return p / p.sum(-1, keepdims=True)


def repetition_penalty(logits, history):
    score = jnp.take_along_axis(logits, history, axis=-1)
    return jnp.put_along_axis(logits, history, jnp.where(score < 0, score * 1.2, score / 1.2), axis=-1, inplace=False)


def padded_embedding(tokens, table):
    rows = table[tokens]
    return jnp.where((tokens == 0)[..., None], jax.lax.stop_gradient(rows), rows)


def tied_head(tokens, labels, table, weight):
    hidden = jnp.tanh(table[tokens] @ weight)
    log_p = jax.nn.log_softmax(hidden @ table.T, axis=-1)
    return -jnp.take_along_axis(log_p, labels[..., None], axis=-1).mean()


def segment_sum(x, segments):
    rows, index = x.reshape(-1, x.shape[-1]), segments.reshape(-1)
    total = jnp.zeros((6, x.shape[-1])).at[index].add(rows)
    count = jnp.zeros(6).at[index].add(1.0)
    return total / jnp.maximum(count, 1)[:, None]


def gradient_penalty(x, weight, out):
    slope = jax.grad(lambda x: (jnp.tanh(x @ weight) @ out).sum())(x)
    return ((jnp.linalg.norm(slope, axis=-1) - 1) ** 2).mean()


def hessian_vector_product(up, down, x, y, direction):
    return jax.jvp(jax.grad(lambda up: _regression(up, down, x, y)), (up,), (direction,))[1]


def maml_step(up, down, x, y):
    step = jax.grad(_regression, argnums=(0, 1))(up, down, x, y)
    return _regression(up - 0.1 * step[0], down - 0.1 * step[1], x, y)


def swiglu_mlp(x, gate, up, down):
    return (jax.nn.silu(x @ gate) * (x @ up)) @ down


def barlow_twins(a, b):
    a, b = (a - a.mean(0)) / a.std(0, ddof=1), (b - b.mean(0)) / b.std(0, ddof=1)
    correlation = a.T @ b / len(a)
    on_diagonal = jnp.diagonal(correlation)
    return ((on_diagonal - 1) ** 2).sum() + 0.005 * ((correlation**2).sum() - (on_diagonal**2).sum())


def feature_statistics(x):
    return {
        "std": x.std((0, 1), ddof=1),
        "variance": x.var((1, 2), ddof=1),
        "largest": jnp.abs(x).max(),
        "norm": jnp.linalg.norm(x, axis=-1).mean(),
        "kurtosis": (x**4).mean((0, 1)) / (x**2).mean((0, 1)) ** 2,
        "softened_maximum": jax.nn.logsumexp(x, axis=2),
    }


def _angles(x):
    rate = 10_000.0 ** (-jnp.arange(0, x.shape[-1], 2, dtype=x.dtype) / x.shape[-1])
    return jnp.outer(jnp.arange(x.shape[1], dtype=x.dtype), rate)


def _regression(up, down, x, y):
    return ((jnp.tanh(x @ up) @ down - y) ** 2).mean()


TWINS: dict[str, Callable[..., Array]] = {
    fn.__name__: fn
    for fn in (
        *(causal_attention, grouped_query_attention, linear_attention),
        *(layer_norm_by_hand, batch_norm_by_hand, weight_norm),
        *(cross_entropy, info_nce, ppo_loss),
        *(topk_router, soft_moe, sinkhorn_router),
        *(rope_by_halves, rope_interleaved, relative_bias),
        *(token_shift, chunked_linear_attention, gated_recurrence),
        *(top_k_filter, min_p_filter, repetition_penalty),
        *(padded_embedding, tied_head, segment_sum),
        *(gradient_penalty, hessian_vector_product, maml_step),
        *(swiglu_mlp, barlow_twins, feature_statistics),
    )
}
"""By the name of the function in torch. They take the same arguments and return the same results in the same structure."""
