"""ITX: an inference transformer, Llama-like with grouped-query attention; prefill, and a greedy loop with a KV cache.

Weights, cache and activations are bfloat16; norms, softmax and logits float32. The cache is donated.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from sample_models.common import Sample, Tree, Weight, dense, initialise, main, tokens, zeros
from sample_models.layers import causal_mask, grouped_attention, rms_norm, rope, rope_tables


@dataclass(frozen=True)
class Config:
    layers: int
    model: int
    heads: int
    kv_heads: int
    head: int
    ff: int
    vocab: int
    batch: int
    cache: int  # positions the cache has room for
    prompt: int  # tokens per sequence that prefill reads
    new_tokens: int  # iterations of the decode loop


def weights(config: Config) -> Tree:
    d, inner, shared = config.model, config.heads * config.head, config.kv_heads * config.head
    return {
        "embed": Weight((config.vocab, d), fan_in=1),
        "layers": [
            {
                "attention_norm": zeros(d),
                "wq": dense(d, inner),
                "wk": dense(d, shared),
                "wv": dense(d, shared),
                "wo": dense(inner, d),
                "mlp_norm": zeros(d),
                "gate": dense(d, config.ff),
                "up": dense(d, config.ff),
                "down": dense(config.ff, d),
            }
            for _ in range(config.layers)
        ],
        "final_norm": zeros(d),
        "head": dense(d, config.vocab),
    }


def empty_cache(config: Config) -> Tree:
    shape = (config.batch, config.cache, config.kv_heads, config.head)
    return [{"k": jnp.zeros(shape, jnp.bfloat16), "v": jnp.zeros(shape, jnp.bfloat16)} for _ in range(config.layers)]


def project(config: Config, layer: Tree, x: jax.Array, positions: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Queries, keys and values of the normed activations, heads split off and rotated."""
    batch, seq, _ = x.shape
    x, tables = rms_norm(x, layer["attention_norm"]), rope_tables(positions, config.head)
    q = (x @ layer["wq"]).reshape(batch, seq, config.heads, config.head)
    k = (x @ layer["wk"]).reshape(batch, seq, config.kv_heads, config.head)
    v = (x @ layer["wv"]).reshape(batch, seq, config.kv_heads, config.head)
    return rope(q, tables), rope(k, tables), v


def finish(layer: Tree, x: jax.Array, mixed: jax.Array) -> jax.Array:
    """The attention's output projection and the feed-forward part, both residual."""
    x = x + mixed.reshape(*x.shape[:2], -1) @ layer["wo"]
    normed = rms_norm(x, layer["mlp_norm"])
    return x + (jax.nn.silu(normed @ layer["gate"]) * (normed @ layer["up"])) @ layer["down"]


def logits_of(params: Tree, x: jax.Array) -> jax.Array:
    return jnp.dot(rms_norm(x, params["final_norm"]), params["head"], preferred_element_type=jnp.float32)


def prefill_sample(name: str, about: str, config: Config) -> Sample:
    def prefill(params: Tree, cache: Tree, tokens: jax.Array) -> tuple[Tree, jax.Array]:
        """Fills the cache from the prompt; returns it and the logits after the last token, f32[batch, vocab]."""
        x, filled = params["embed"][tokens], []
        mask = causal_mask(config.prompt, config.prompt)
        for number, (layer, old) in enumerate(zip(params["layers"], cache, strict=True)):
            with jax.named_scope(f"layer_{number}"):
                q, k, v = project(config, layer, x, jnp.arange(config.prompt))
                new = {"k": k, "v": v}
                filled.append({n: lax.dynamic_update_slice(old[n], new[n], (0, 0, 0, 0)) for n in new})
                x = finish(layer, x, grouped_attention(q, k, v, mask))
        return filled, logits_of(params, x[:, -1])

    def init(key: jax.Array) -> tuple[Tree, ...]:
        first, second = jax.random.split(key)
        params = initialise(first, weights(config), jnp.bfloat16)
        return params, empty_cache(config), tokens(second, config.vocab, config.batch, config.prompt)

    return Sample(name, about, prefill, init, donate=(1,))


def decode_sample(name: str, about: str, config: Config, form: str = "bytecode") -> Sample:
    def next_token(params: Tree, cache: Tree, token: jax.Array, position: jax.Array) -> tuple[Tree, jax.Array]:
        """One token for every sequence: the cache with this position filled, and the greedy next token, i32[batch]."""
        x, filled = params["embed"][token][:, None, :], []
        visible = lax.iota(jnp.int32, config.cache) <= position
        for number, (layer, old) in enumerate(zip(params["layers"], cache, strict=True)):
            with jax.named_scope(f"layer_{number}"):
                q, k, v = project(config, layer, x, position[None])
                k = lax.dynamic_update_slice(old["k"], k, (0, position, 0, 0))
                v = lax.dynamic_update_slice(old["v"], v, (0, position, 0, 0))
                filled.append({"k": k, "v": v})
                x = finish(layer, x, grouped_attention(q, k, v, visible))
        return filled, jnp.argmax(logits_of(params, x[:, 0]), axis=-1).astype(jnp.int32)

    def decode(params: Tree, cache: Tree, token: jax.Array, start: jax.Array) -> tuple[Tree, jax.Array]:
        """Decodes greedily from position `start`; returns the cache and the new tokens, i32[batch, new_tokens]."""

        def body(step: jax.Array, state: tuple[Tree, jax.Array, jax.Array]) -> tuple[Tree, jax.Array, jax.Array]:
            cache, token, written = state
            cache, token = next_token(params, cache, token, start + step)
            return cache, token, lax.dynamic_update_slice(written, token[:, None], (0, step))

        written = jnp.zeros((config.batch, config.new_tokens), jnp.int32)
        cache, _, written = lax.fori_loop(0, config.new_tokens, body, (cache, token, written))
        return cache, written

    def init(key: jax.Array) -> tuple[Tree, ...]:
        first, second = jax.random.split(key)
        params = initialise(first, weights(config), jnp.bfloat16)
        return params, empty_cache(config), tokens(second, config.vocab, config.batch), jnp.int32(config.prompt)

    return Sample(name, about, decode, init, donate=(1,), form=form)


ITX = Config(
    layers=32, model=4096, heads=32, kv_heads=8, head=128, ff=14336, vocab=128256, batch=64, cache=2048, prompt=1024,
    new_tokens=256,
)  # fmt: skip
TINY = Config(
    layers=2, model=64, heads=16, kv_heads=8, head=24, ff=160, vocab=256, batch=32, cache=48, prompt=40, new_tokens=4
)

SAMPLES = (
    prefill_sample(
        "itx_prefill", "32-layer inference transformer, batch 64: prefill of 1024 tokens into the cache", ITX
    ),
    prefill_sample("itx_prefill_tiny", "its twin of 2 layers", TINY),
    decode_sample("itx_decode", "the same transformer: a loop of 256 greedy tokens over a donated KV cache", ITX),
    decode_sample("itx_decode_tiny", "its twin of 2 layers and 4 tokens", TINY, form="text"),
)

if __name__ == "__main__":
    main(SAMPLES)
