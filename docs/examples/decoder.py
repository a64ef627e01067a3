"""Writes a decoder with a symbolic batch: `python decoder.py train 8b train.jax_export`, or `decode 70b …`."""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
from jax import lax

# layers, width, heads, heads of keys and values, hidden width, vocabulary, length of a sequence
SIZES = {
    "8b": (32, 4096, 32, 8, 14336, 128256, 4096),
    "70b": (80, 8192, 64, 8, 28672, 128256, 4096),
    "tiny": (2, 512, 8, 8, 1024, 1024, 128),
}
task, size, path = sys.argv[1:]
LAYERS, WIDTH, HEADS, GROUPS, HIDDEN, WORDS, LENGTH = SIZES[size]
HEAD = WIDTH // HEADS


def array(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)


LAYER = {
    "q": array(WIDTH, GROUPS, HEADS // GROUPS, HEAD),
    "k": array(WIDTH, GROUPS, HEAD),
    "v": array(WIDTH, GROUPS, HEAD),
    "o": array(GROUPS, HEADS // GROUPS, HEAD, WIDTH),
    "gate": array(WIDTH, HIDDEN),
    "up": array(WIDTH, HIDDEN),
    "down": array(HIDDEN, WIDTH),
}


def norm(x):
    y = x.astype(jnp.float32)
    return (y * lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + 1e-5)).astype(x.dtype)


def feed_forward(x, w):
    h = norm(x)
    return x + (jax.nn.silu(h @ w["gate"]) * (h @ w["up"])) @ w["down"]


def attend(q, k, v, mask):
    scores = jnp.einsum("bqngk,bsnk->bngqs", q, k, preferred_element_type=jnp.float32) * HEAD**-0.5
    return jnp.einsum("bngqs,bsnk->bqngk", jax.nn.softmax(jnp.where(mask, scores, -1e30)).astype(v.dtype), v)


def projected(x, w):
    h = norm(x)
    return jnp.einsum("bsd,dngk->bsngk", h, w["q"]), *(jnp.einsum("bsd,dnk->bsnk", h, w[name]) for name in "kv")


def loss(params, tokens):
    def layer(x, w):
        x = x + jnp.einsum("bsngk,ngkd->bsd", attend(*projected(x, w), jnp.tri(LENGTH, dtype=bool)), w["o"])
        return feed_forward(x, w), None

    x, _ = lax.scan(jax.checkpoint(layer), params["embed"][tokens], params["layers"])
    logits = (norm(x) @ params["head"]).astype(jnp.float32)
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[..., None], -1))


def train(state, tokens):
    """A step of Adam, whose moments are f32; targets are not shifted, for short."""
    gradients = jax.grad(loss)(state["params"], tokens)
    first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state["first"], gradients)
    second = jax.tree.map(lambda m, g: 0.99 * m + 0.01 * g * g, state["second"], gradients)
    updates = jax.tree.map(lambda m, v: 1e-4 * m * lax.rsqrt(v + 1e-8), first, second)
    params = jax.tree.map(lambda p, u: p - u.astype(p.dtype), state["params"], updates)
    return {"params": params, "first": first, "second": second}


def decode(params, caches, tokens, position):
    """The next token of each sequence. Layers are unrolled, each with its own cache, which XLA updates where it is."""
    x, new = params["embed"][tokens][:, None], []
    for w, (keys, values) in zip(params["layers"], caches, strict=True):
        q, k, v = projected(x, w)
        keys, values = (lax.dynamic_update_slice(c, n, (0, position, 0, 0)) for c, n in ((keys, k), (values, v)))
        x = x + jnp.einsum("bsngk,ngkd->bsd", attend(q, keys, values, jnp.arange(LENGTH) <= position), w["o"])
        x = feed_forward(x, w)
        new.append((keys, values))
    return jnp.argmax(norm(x) @ params["head"], -1), new


(batch,) = jax.export.symbolic_shape("b")
tables = {"embed": array(WORDS, WIDTH), "head": array(WIDTH, WORDS)}
if task == "train":
    params = {**tables, "layers": {name: array(LAYERS, *w.shape) for name, w in LAYER.items()}}
    moments = jax.tree.map(lambda w: array(*w.shape, dtype=jnp.float32), params)
    state = {"params": params, "first": moments, "second": moments}
    step, arguments = jax.jit(train, donate_argnums=0), (state, array(batch, LENGTH, dtype=jnp.int32))
else:
    params, cache = {**tables, "layers": [LAYER] * LAYERS}, array(batch, LENGTH, GROUPS, HEAD)
    arguments = params, [(cache, cache)] * LAYERS, array(batch, dtype=jnp.int32), array(dtype=jnp.int32)
    step = jax.jit(decode, donate_argnums=1)
Path(path).write_bytes(jax.export.export(step, platforms=["tpu", "cuda"])(*arguments).serialize())
