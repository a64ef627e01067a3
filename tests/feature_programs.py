"""Tiny programs that use everything a plan can say; `test_features` splits them. All arrays are float32 or int32 where
nothing else is said.

Sizes differ from one another wherever they can, so that bytes tell arrays apart.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from programs import Case, arg, case_of

B, S, D, F = 8, 16, 32, 64  # batch, sequence, model, hidden
H, K = 4, 8  # heads, dimension of a head; H * K == D
V = 128  # vocabulary
E, C = 8, 8  # experts, tokens an expert takes of each sequence
RATE = 0.1


def trained(loss: Any, parameters: Any, inputs: Any) -> Case:
    """One step of gradient descent on a loss, parameters donated."""

    def step(p: Any, x: Any) -> Any:
        return jax.tree.map(lambda w, g: w - RATE * g, p, jax.grad(loss)(p, x))

    return case_of(step, parameters, inputs, donate=(0,))


# -- training steps of dense layers


def mlp() -> Case:
    def loss(p: Any, x: Any) -> Any:
        return jnp.sum((jax.nn.relu(x @ p["up"]) @ p["down"]) ** 2)

    return trained(loss, {"up": arg(D, F), "down": arg(F, D)}, arg(B, D))


def mlp_momentum() -> Case:
    def step(p: Any, m: Any, x: Any) -> Any:
        def loss(p: Any) -> Any:
            return jnp.sum((jax.nn.relu(x @ p["up"]) @ p["down"]) ** 2)

        m = jax.tree.map(lambda m, g: 0.9 * m + g, m, jax.grad(loss)(p))
        return jax.tree.map(lambda w, m: w - RATE * m, p, m), m

    weights = {"up": arg(D, F), "down": arg(F, D)}
    return case_of(step, weights, weights, arg(B, D), donate=(0, 1))


def normal(x: Any) -> Any:
    return x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)


def blocks() -> Case:
    """Two residual blocks on [batch, sequence, model] with a norm in front of each."""

    def loss(layers: Any, x: Any) -> Any:
        for p in layers:
            x = x + jax.nn.relu(normal(x) @ p["up"]) @ p["down"]
        return jnp.sum(x**2)

    return trained(loss, [{"up": arg(D, F), "down": arg(F, D)}] * 2, arg(B, S, D))


# -- attention


def attend(q: Any, k: Any, v: Any) -> Any:
    scores = jnp.einsum("bshk,bthk->bhst", q, k) / K**0.5
    return jnp.einsum("bhst,bthk->bshk", jax.nn.softmax(scores, axis=-1), v)


PROJECTIONS = {"q": arg(D, H, K), "k": arg(D, H, K), "v": arg(D, H, K), "o": arg(H, K, D)}


def attention_layer(p: Any, x: Any) -> Any:
    q, k, v = (jnp.einsum("bsd,dhk->bshk", x, p[name]) for name in "qkv")
    return jnp.einsum("bshk,hkd->bsd", attend(q, k, v), p["o"])


def attention() -> Case:
    return case_of(attention_layer, PROJECTIONS, arg(B, S, D))


def attention_blocks() -> Case:
    def loss(layers: Any, x: Any) -> Any:
        for p in layers:
            x = x + attention_layer(p, x)
        return jnp.sum(x**2)

    return trained(loss, [PROJECTIONS] * 2, arg(B, S, D))


def block() -> Case:
    """Gradients of a transformer block, with a norm in front of attention and one in front of the perceptron."""

    def loss(x: Any, p: Any) -> Any:
        x = x + attention_layer(p, normal(x))
        return jnp.sum((x + jax.nn.relu(normal(x) @ p["up"]) @ p["down"]) ** 2)

    weights = {**PROJECTIONS, "up": arg(D, F), "down": arg(F, D)}
    return case_of(jax.grad(loss, argnums=(0, 1)), arg(B, S, D), weights)


def merged_heads() -> Case:
    """Projections as matrices: heads and their dimension are one dimension of the weights, reshaped apart."""

    def layer(p: Any, x: Any) -> Any:
        q, k, v = ((x @ p[name]).reshape(B, S, H, K) for name in "qkv")
        return attend(q, k, v).reshape(B, S, D) @ p["o"]

    return case_of(layer, {name: arg(D, D) for name in "qkvo"}, arg(B, S, D))


def decode() -> Case:
    """One token against a cache of keys and values."""

    def step(p: Any, keys: Any, values: Any, x: Any, at: Any) -> Any:
        q, k, v = (jnp.einsum("bd,dhk->bhk", x, p[name]) for name in "qkv")
        zero = jnp.zeros((), jnp.int32)
        keys = lax.dynamic_update_slice(keys, k[:, None], (zero, at, zero, zero))
        values = lax.dynamic_update_slice(values, v[:, None], (zero, at, zero, zero))
        scores = jnp.einsum("bhk,bthk->bht", q, keys)
        scores = jnp.where(jnp.arange(S) <= at, scores, -1e9)
        mixed = jnp.einsum("bht,bthk->bhk", jax.nn.softmax(scores, axis=-1), values)
        return jnp.einsum("bhk,hkd->bd", mixed, p["o"]), keys, values

    cache = arg(B, S, H, K)
    return case_of(step, PROJECTIONS, cache, cache, arg(B, D), arg(dtype=jnp.int32), donate=(1, 2))


# -- experts, vocabulary, graphs, images, loops


def experts() -> Case:
    """Tokens go to the experts by a one-hot product and come back by another."""

    def layer(w: Any, x: Any, route: Any) -> Any:
        sent = jnp.einsum("bsec,bsd->becd", route, x)
        hidden = jax.nn.relu(jnp.einsum("becd,edf->becf", sent, w["up"]))
        done = jnp.einsum("becf,efd->becd", hidden, w["down"])
        return jnp.einsum("bsec,becd->bsd", route, done)

    return case_of(layer, {"up": arg(E, D, F), "down": arg(E, F, D)}, arg(B, S, D), arg(B, S, E, C))


def language_model() -> Case:
    """Look-up, product with the same table, softmax over the vocabulary: the loss, no gradient."""

    def loss(table: Any, tokens: Any, targets: Any) -> Any:
        logits = jnp.tanh(table[tokens]) @ table.T
        picked = jnp.sum(jnp.where(jnp.arange(V) == targets[..., None], logits, 0.0), -1)
        return jax.nn.logsumexp(logits, axis=-1) - picked

    return case_of(loss, arg(V, D), arg(B, S, dtype=jnp.int32), arg(B, S, dtype=jnp.int32))


NODES, EDGES = 16, 64


def messages() -> Case:
    """Edges read both their nodes, and nodes add up what their edges say."""

    def layer(w: Any, nodes: Any, senders: Any, receivers: Any) -> Any:
        said = jnp.tanh(nodes[senders] @ w["from"] + nodes[receivers] @ w["to"])
        return nodes + jax.ops.segment_sum(said, receivers, NODES)

    ends = arg(EDGES, dtype=jnp.int32)
    return case_of(layer, {"from": arg(D, D), "to": arg(D, D)}, arg(NODES, D), ends, ends)


ROWS, COLUMNS, CHANNELS = 16, 12, 6
KERNEL = 3


def convolution() -> Case:
    def layer(kernel: Any, image: Any) -> Any:
        return lax.conv_general_dilated(
            image, kernel, (1, 1), ((1, 1), (1, 1)), dimension_numbers=("NHWC", "HWIO", "NHWC")
        )

    return case_of(layer, arg(KERNEL, KERNEL, CHANNELS, CHANNELS), arg(B, ROWS, COLUMNS, CHANNELS))


STEPS = 5


def scanned() -> Case:
    """Layers of one shape, one after the other."""

    def run(ws: Any, x: Any) -> Any:
        return lax.scan(lambda carry, w: (jnp.tanh(carry @ w), None), x, ws)[0]

    return case_of(run, arg(STEPS, D, D), arg(B, D))


def repeated() -> Case:
    """A loop that multiplies by one matrix again and again."""

    def run(w: Any, x: Any) -> Any:
        return lax.fori_loop(0, STEPS, lambda _, x: jnp.tanh(x @ w), x)

    return case_of(run, arg(D, D), arg(B, D))


def recurrent() -> Case:
    """The same, trained: the matrix is read by the loop forward and by the one backward."""

    def loss(w: Any, x: Any) -> Any:
        return jnp.sum(lax.scan(lambda x, _: (jnp.tanh(x @ w), None), x, length=STEPS)[0] ** 2)

    return trained(loss, arg(D, D), arg(B, D))


def look_up() -> Case:
    """A table trained to be small where it is looked up."""
    return trained(lambda table, tokens: jnp.sum(table[tokens] ** 2), arg(V, D), arg(B, S, dtype=jnp.int32))


def unrolled() -> Case:
    """The same with the loop written out, as a training step: gradients of matrix and bias are sums over the steps."""

    def loss(p: Any, x: Any) -> Any:
        for _ in range(STEPS):
            x = jnp.tanh(x @ p["w"] + p["b"])
        return jnp.sum(x**2)

    return trained(loss, {"w": arg(D, D), "b": arg(D)}, arg(B, D))


def product() -> Case:
    return case_of(lambda w, x: x @ w, arg(D, F), arg(B, D))


def added_products() -> Case:
    """Three products added up, each a sum over another dimension."""

    def run(x: Any, y: Any, z: Any, u: Any, v: Any, w: Any) -> Any:
        return x @ u + y @ v + z @ w

    return case_of(run, arg(B, H * K), arg(B, K), arg(B, F), arg(H * K, D), arg(K, D), arg(F, D))


def product_in_heads() -> Case:
    """A product whose result is seen as heads and their elements."""
    return case_of(lambda x, w, c: (x @ w).reshape(B, H, K) * c, arg(B, F), arg(F, D), arg(B, H, K))


def multi_query() -> Case:
    """Gradient of attention in which all heads share keys and values."""

    def loss(x: Any, p: Any) -> Any:
        q = jnp.einsum("bsd,dhk->bshk", x, p["q"])
        k, v = x @ p["k"], x @ p["v"]
        scores = jax.nn.softmax(jnp.einsum("bshk,btk->bhst", q, k) / K**0.5, axis=-1)
        return jnp.sum(jnp.einsum("bhst,btk->bshk", scores, v) ** 2)

    return case_of(jax.grad(loss), arg(B, S, D), {"q": arg(D, H, K), "k": arg(D, K), "v": arg(D, K)})


def two_shardings() -> Case:
    """A kibibyte, and the same again made of it."""

    def run(x: Any) -> Any:
        once = jnp.tanh(x)
        return once, jnp.tanh(once)

    return case_of(run, arg(16, 16))


def either_branch() -> Case:
    """In each of four trips one of two branches multiplies by the same weights."""

    def run(x: Any, w: Any) -> Any:
        def trip(x: Any, i: Any) -> Any:
            return lax.cond(i < 2, lambda x: jnp.tanh(x @ w), lambda x: jnp.sin(x @ w), x), None

        return lax.scan(trip, x, jnp.arange(4))[0]

    return case_of(run, arg(B, D), arg(D, D))


def loop_in_a_loop() -> Case:
    """The inner loop reads weights that both only pass on."""

    def run(x: Any, w: Any) -> Any:
        def inner(x: Any, _: Any) -> Any:
            return jnp.tanh(x @ w), None

        def outer(x: Any, _: Any) -> Any:
            return jnp.sin(lax.scan(inner, x, None, length=3)[0]), None

        return lax.scan(outer, x, None, length=2)[0]

    return case_of(run, arg(B, D), arg(D, D))
