"""Layers that several samples share; arrays are [batch, sequence, …] activations bfloat16 unless a line says so."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax


def rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    """Root-mean-square norm in float32, scaled by 1 + scale as Gemma does."""
    wide = x.astype(jnp.float32)
    inverse = lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + 1e-6)
    return (wide * inverse * (1 + scale.astype(jnp.float32))).astype(x.dtype)


def layer_norm(x: jax.Array, scale: jax.Array, bias: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    mean = jnp.mean(wide, axis=-1, keepdims=True)
    variance = jnp.mean((wide - mean) ** 2, axis=-1, keepdims=True)
    return ((wide - mean) * lax.rsqrt(variance + 1e-5) * scale + bias).astype(x.dtype)


def rope_tables(positions: jax.Array, head: int) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines of rotary embeddings, f32[…positions, 1, head/2]."""
    frequency = 10_000.0 ** (-2 * jnp.arange(head // 2, dtype=jnp.float32) / head)
    angle = positions.astype(jnp.float32)[..., None, None] * frequency
    return jnp.cos(angle), jnp.sin(angle)


def rope(x: jax.Array, tables: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotates [batch, sequence, heads, head] by position."""
    cosine, sine = tables
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cosine - second * sine, second * cosine + first * sine], axis=-1)
    return turned.astype(x.dtype)


def causal_mask(queries: int, keys: int) -> jax.Array:
    """bool[queries, keys], true where a query may look."""
    shape = (queries, keys)
    return lax.broadcasted_iota(jnp.int32, shape, 0) >= lax.broadcasted_iota(jnp.int32, shape, 1)


def attention(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array | None = None) -> jax.Array:
    """Softmax attention: q [b, s, heads, head], k and v [b, t, heads, head], mask bool[s, t] or bool[b, 1, s, t]."""
    scores = jnp.einsum("bshd,bthd->bhst", q, k, preferred_element_type=jnp.float32) * q.shape[-1] ** -0.5
    if mask is not None:
        scores = jnp.where(mask, scores, -1e30)
    return jnp.einsum("bhst,bthd->bshd", jax.nn.softmax(scores).astype(v.dtype), v)


def grouped_attention(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array) -> jax.Array:
    """Attention whose query heads share key/value heads: q [b, s, heads, head], k and v [b, t, groups, head]."""
    batch, seq, heads, head = q.shape
    grouped = q.reshape(batch, seq, k.shape[2], heads // k.shape[2], head)
    scores = jnp.einsum("bsgnd,btgd->bgnst", grouped, k, preferred_element_type=jnp.float32) * head**-0.5
    scores = jnp.where(mask, scores, -1e30)
    mixed = jnp.einsum("bgnst,btgd->bsgnd", jax.nn.softmax(scores).astype(v.dtype), v)
    return mixed.reshape(batch, seq, heads, head)


def one_hot_loss(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Mean cross entropy of f32 logits [..., classes], the targets picked with a one-hot product."""
    hot = jax.nn.one_hot(targets, logits.shape[-1], dtype=logits.dtype)
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - jnp.sum(logits * hot, axis=-1))


def gather_loss(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Mean cross entropy of f32 logits [..., classes], the targets picked with a gather."""
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], axis=-1)
    return -jnp.mean(picked)
