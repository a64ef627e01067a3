"""Small programs of many kinds, as people write them in JAX: mixtures of experts, reinforcement learning, contrastive
losses, samplers, decoding.

Sizes that mean different things differ, so that a size says which dimension is meant.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

Built = tuple[Callable[..., Any], tuple[Any, ...], tuple[int, ...]]  # function, abstract arguments, donated
BUILDERS: dict[str, Callable[[], Built]] = {}


def program(build: Callable[[], Built]) -> Callable[[], Built]:
    BUILDERS[build.__name__] = build
    return build


def text(name: str) -> str:
    """The program's StableHLO."""
    function, arguments, donated = BUILDERS[name]()
    lowered = jax.jit(function, donate_argnums=donated).lower(*arguments)
    return str(lowered.as_text(debug_info=True))


def f(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def i(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def key() -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((2,), jnp.uint32)


def trained(
    loss: Callable[..., jax.Array], params: Any, *data: Any, optimiser: Any = None, norms: bool = False
) -> Built:
    """A training step of optax around a loss."""
    chosen = optimiser or optax.adam(1e-3)
    state = jax.eval_shape(chosen.init, params)

    def step(params: Any, opt_state: Any, *data: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params, *data)
        updates, opt_state = chosen.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        metrics = {"loss": value}
        if norms:
            metrics |= {"param_norm": optax.global_norm(params), "grad_norm": optax.global_norm(grads)}
        return params, opt_state, metrics

    return step, (params, state, *data), (0, 1)


def mlp_params(*widths: int) -> list[dict[str, Any]]:
    return [{"w": f(a, b), "b": f(b)} for a, b in itertools.pairwise(widths)]


def mlp(params: Any, x: Any) -> Any:
    for layer in params[:-1]:
        x = jax.nn.relu(x @ layer["w"] + layer["b"])
    return x @ params[-1]["w"] + params[-1]["b"]


def norm(x: Any, scale: Any) -> Any:
    return x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale


def block_params(d: int = 256, h: int = 4, ff: int = 768, experts: int = 0) -> dict[str, Any]:
    return {
        "n1": f(d), "n2": f(d), "wq": f(d, h, d // h), "wk": f(d, h, d // h), "wv": f(d, h, d // h),
        "wo": f(h, d // h, d),
        **({"router": f(d, experts), "w1": f(experts, d, ff), "w2": f(experts, ff, d)} if experts
           else {"w1": f(d, ff), "w2": f(ff, d)}),
    }  # fmt: skip


def attention(p: Any, x: Any, causal: bool = True) -> Any:
    q, k, v = (jnp.einsum("bsd,dhk->bshk", x, p[n]) for n in ("wq", "wk", "wv"))
    scores = jnp.einsum("bshk,bthk->bhst", q, k) / 8.0
    if causal:
        scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -1e9)
    return jnp.einsum("bshk,hkd->bsd", jnp.einsum("bhst,bthk->bshk", jax.nn.softmax(scores), v), p["wo"])


def block(p: Any, x: Any, mlp: Any = None, causal: bool = True) -> Any:
    x = x + attention(p, norm(x, p["n1"]), causal)
    y = norm(x, p["n2"])
    return x + (mlp(p, y) if mlp else jax.nn.gelu(y @ p["w1"]) @ p["w2"])


def lm_params(layers: int = 2, **block: int) -> dict[str, Any]:
    return {"emb": f(4096, 256), "blocks": [block_params(**block) for _ in range(layers)], "head": f(256, 4096)}


def stacked(layers: int, tree: Any) -> Any:
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct((layers, *a.shape), a.dtype), tree)


def lm_logits(p: Any, tokens: Any, mlp: Any = None) -> Any:
    x = p["emb"][tokens]
    if isinstance(p["blocks"], dict):
        x, _ = lax.scan(lambda x, b: (block(b, x, mlp), None), x, p["blocks"])
    else:
        for b in p["blocks"]:
            x = block(b, x, mlp)
    return x @ p["head"]


def lm_loss(p: Any, tokens: Any, mlp: Any = None) -> Any:
    logits = lm_logits(p, tokens[:, :-1], mlp)
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


# ---------------------------------------------------------------- mixtures of experts


def switch_scatter(p: Any, x: Any) -> Any:
    """Top-1 routing; gates go to their experts through a scatter with counted indices."""
    b, s, _ = x.shape
    probs = jax.nn.softmax(x @ p["router"])
    gate, index = lax.top_k(probs, 2)
    gates = jnp.zeros_like(probs).at[jnp.arange(b)[:, None, None], jnp.arange(s)[None, :, None], index].set(gate)
    h = jax.nn.silu(jnp.einsum("bsd,edf->bsef", x, p["w1"]))
    return jnp.einsum("bsef,efd,bse->bsd", h, p["w2"], gates)


def gshard(p: Any, x: Any) -> Any:
    """Dispatch and combine masks with a capacity."""
    probs = jax.nn.softmax(x @ p["router"])
    index = jnp.argmax(probs, -1)
    hot = jax.nn.one_hot(index, probs.shape[-1])
    place = jnp.cumsum(hot, 1) * hot - 1
    mask = jax.nn.one_hot(place.astype(jnp.int32), 40) * hot[..., None]
    combine = mask * jnp.sum(probs * hot, -1)[..., None, None]
    inside = jnp.einsum("bsec,bsd->ebcd", mask, x)
    out = jnp.einsum("ebcf,efd->ebcd", jax.nn.gelu(jnp.einsum("ebcd,edf->ebcf", inside, p["w1"])), p["w2"])
    return jnp.einsum("bsec,ebcd->bsd", combine, out)


def expert_choice(p: Any, x: Any) -> Any:
    """Each expert takes its best tokens, and adds what it makes of them back."""
    b, s, d = x.shape
    flat = x.reshape(b * s, d)
    gate, index = lax.top_k(jax.nn.softmax(flat @ p["router"]).T, 320)
    inside = flat[index]
    h = jax.nn.gelu(jnp.einsum("ecd,edf->ecf", inside, p["w1"]))
    out = jnp.einsum("ecf,efd->ecd", h, p["w2"]) * gate[..., None]
    return jnp.zeros_like(flat).at[index.reshape(-1)].add(out.reshape(-1, d)).reshape(b, s, d)


def sorted_ragged(p: Any, x: Any) -> Any:
    """Tokens sorted by expert, and a ragged product."""
    b, s, d = x.shape
    flat = x.reshape(b * s, d)
    probs = jax.nn.softmax(flat @ p["router"])
    gate, expert = jnp.max(probs, -1), jnp.argmax(probs, -1)
    order = jnp.argsort(expert)
    sizes = jnp.bincount(expert, length=probs.shape[-1]).astype(jnp.int32)
    inside = flat[order]
    out = lax.ragged_dot(jax.nn.gelu(lax.ragged_dot(inside, p["w1"], sizes)), p["w2"], sizes)
    return (jnp.zeros_like(flat).at[order].set(out) * gate[:, None]).reshape(b, s, d)


def gathered(p: Any, x: Any) -> Any:
    """Each token takes the weights of its two experts: decoding."""
    gate, index = lax.top_k(jax.nn.softmax(x @ p["router"]), 2)
    h = jax.nn.gelu(jnp.einsum("...d,...kdf->...kf", x, p["w1"][index]))
    return jnp.einsum("...kf,...kfd,...k->...d", h, p["w2"][index], gate)


def _moe(layer: Any, scan: bool) -> Built:
    params = lm_params(experts=8)
    if scan:
        params["blocks"] = stacked(6, block_params(experts=8))
    return trained(lambda p, t: lm_loss(p, t, layer), params, i(32, 129))


@program
def moe_switch() -> Built:
    return _moe(switch_scatter, False)


@program
def moe_switch_scan() -> Built:
    return _moe(switch_scatter, True)


@program
def moe_gshard_scan() -> Built:
    return _moe(gshard, True)


@program
def moe_expert_choice() -> Built:
    return _moe(expert_choice, False)


@program
def moe_expert_choice_scan() -> Built:
    return _moe(expert_choice, True)


@program
def moe_sorted() -> Built:
    return _moe(sorted_ragged, False)


@program
def moe_sorted_scan() -> Built:
    return _moe(sorted_ragged, True)


# ---------------------------------------------------------------- decoding


def _cached(p: Any, x: Any, cache: Any, at: Any, layer: Any = None) -> Any:
    """One token for each sequence, x [batch, width]; cache [batch, positions, heads, head width]."""
    y = norm(x, p["n1"])
    q, k, v = (jnp.einsum("bd,dhk->bhk", y, p[n]) for n in ("wq", "wk", "wv"))
    ks = lax.dynamic_update_slice(cache["k"], k[:, None], (0, at, 0, 0))
    vs = lax.dynamic_update_slice(cache["v"], v[:, None], (0, at, 0, 0))
    scores = jnp.einsum("bhk,bthk->bht", q, ks)
    scores = jnp.where(jnp.arange(scores.shape[-1]) <= at, scores, -1e9)
    x = x + jnp.einsum("bhk,hkd->bd", jnp.einsum("bht,bthk->bhk", jax.nn.softmax(scores), vs), p["wo"])
    y = norm(x, p["n2"])
    return x + (layer(p, y) if layer else jax.nn.gelu(y @ p["w1"]) @ p["w2"]), {"k": ks, "v": vs}


def _decode(layer: Any, scan: bool, experts: int = 0) -> Built:
    params = lm_params(experts=experts)
    cache: Any = {"k": f(48, 512, 4, 64), "v": f(48, 512, 4, 64)}
    if scan:
        params["blocks"], caches = stacked(6, block_params(experts=experts)), stacked(6, cache)
    else:
        caches = [cache, cache]

    def step(params: Any, cache: Any, token: Any, position: Any) -> Any:
        x = params["emb"][token]
        if scan:
            x, cache = lax.scan(lambda x, pc: _cached(pc[0], x, pc[1], position, layer), x, (params["blocks"], cache))
        else:
            kept = []
            for p, c in zip(params["blocks"], cache, strict=True):
                x, c = _cached(p, x, c, position, layer)
                kept.append(c)
            cache = kept
        return cache, jnp.argmax(x @ params["head"], -1)

    return step, (params, caches, i(48), i()), (1,)


def dense_experts(p: Any, x: Any) -> Any:
    gate, index = lax.top_k(jax.nn.softmax(x @ p["router"]), 2)
    gates = jnp.sum(jax.nn.one_hot(index, p["router"].shape[-1]) * gate[..., None], -2)
    h = jax.nn.gelu(jnp.einsum("...d,edf->...ef", x, p["w1"]))
    return jnp.einsum("...ef,efd,...e->...d", h, p["w2"], gates)


@program
def decode() -> Built:
    return _decode(None, False)


@program
def decode_scan() -> Built:
    return _decode(None, True)


@program
def decode_moe_dense() -> Built:
    return _decode(dense_experts, False, 8)


@program
def decode_moe_dense_scan() -> Built:
    return _decode(dense_experts, True, 8)


@program
def decode_moe_gathered() -> Built:
    return _decode(gathered, False, 8)


@program
def prefill_moe_sorted() -> Built:
    return (
        lambda params, tokens: lm_logits(params, tokens, sorted_ragged)[:, -1],
        (lm_params(experts=8), i(32, 128)),
        (),
    )


@program
def prefill() -> Built:
    """Fills caches at the prompt's place and returns logits of each sequence's last token."""

    def step(params: Any, cache: Any, tokens: Any, lengths: Any) -> Any:
        x, kept = params["emb"][tokens], []
        for p, c in zip(params["blocks"], cache, strict=True):
            y = norm(x, p["n1"])
            new = {n: jnp.einsum("bsd,dhk->bshk", y, p["w" + n]) for n in "kv"}
            kept.append({n: lax.dynamic_update_slice(c[n], new[n], (0, 0, 0, 0)) for n in "kv"})
            x = block(p, x)
        return kept, x[jnp.arange(48), lengths - 1] @ params["head"]

    cache = {"k": f(48, 512, 4, 64), "v": f(48, 512, 4, 64)}
    return step, (lm_params(), [cache, cache], i(48, 128), i(48)), (1,)


@program
def decode_paged() -> Built:
    """Pages of keys and values, found through a table."""

    def step(params: Any, pages: Any, table: Any, token: Any, lengths: Any) -> Any:
        x, kept = params["emb"][token], []
        rows = jnp.arange(48)
        for p, c in zip(params["blocks"], pages, strict=True):
            y = norm(x, p["n1"])
            q, k, v = (jnp.einsum("bd,dhk->bhk", y, p[n]) for n in ("wq", "wk", "wv"))
            page = table[rows, lengths // 16]
            ks, vs = c["k"].at[page, lengths % 16].set(k), c["v"].at[page, lengths % 16].set(v)
            kept.append({"k": ks, "v": vs})
            kk, vv = (a[table].reshape(48, 512, 4, 64) for a in (ks, vs))
            scores = jnp.einsum("bhk,bthk->bht", q, kk)
            scores = jnp.where(jnp.arange(512)[None, None] <= lengths[:, None, None], scores, -1e9)
            x = x + jnp.einsum("bhk,hkd->bd", jnp.einsum("bht,bthk->bhk", jax.nn.softmax(scores), vv), p["wo"])
            x = x + jax.nn.gelu(norm(x, p["n2"]) @ p["w1"]) @ p["w2"]
        return kept, jnp.argmax(x @ params["head"], -1)

    page = {"k": f(2048, 16, 4, 64), "v": f(2048, 16, 4, 64)}
    return step, (lm_params(), [page, page], i(48, 32), i(48), i(48)), (1,)


@program
def decode_beams() -> Built:
    """One step of a beam search: 24 sequences, 4 beams each, caches reordered by beam."""

    def step(params: Any, cache: Any, scores: Any, token: Any, position: Any) -> Any:
        x, kept = params["emb"][token.reshape(-1)], []
        for p, c in zip(params["blocks"], cache, strict=True):
            x, c = _cached(p, x, c, position)
            kept.append(c)
        log = jax.nn.log_softmax(x @ params["head"]).reshape(24, 4, 4096) + scores[..., None]
        best, index = lax.top_k(log.reshape(24, -1), 4)
        beam, token = index // 4096, index % 4096
        order = (beam + 4 * jnp.arange(24)[:, None]).reshape(-1)
        return jax.tree.map(lambda c: c[order], kept), best, token

    cache = {"k": f(96, 512, 4, 64), "v": f(96, 512, 4, 64)}
    return step, (lm_params(), [cache, cache], f(24, 4), i(24, 4), i()), (1,)


# ---------------------------------------------------------------- recurrent networks


def lstm(p: Any, state: Any, x: Any) -> Any:
    h, c = state
    i_, f_, g, o = jnp.split(x @ p["wx"] + h @ p["wh"] + p["b"], 4, -1)
    c = jax.nn.sigmoid(f_) * c + jax.nn.sigmoid(i_) * jnp.tanh(g)
    h = jax.nn.sigmoid(o) * jnp.tanh(c)
    return (h, c), h


def lstm_params(inputs: int, hidden: int) -> dict[str, Any]:
    return {"wx": f(inputs, 4 * hidden), "wh": f(hidden, 4 * hidden), "b": f(4 * hidden)}


@program
def lstm_lm() -> Built:
    """A language model whose input product stands outside the loop, as XLA and cuDNN like it."""

    def loss(p: Any, tokens: Any) -> Any:
        x = p["emb"][tokens[:, :-1]].swapaxes(0, 1)
        zero = jnp.zeros((x.shape[1], 320))
        _, h = lax.scan(lambda s, x: lstm(p["cell"], s, x), (zero, zero), x)
        return optax.softmax_cross_entropy_with_integer_labels(h @ p["head"], tokens[:, 1:].swapaxes(0, 1)).mean()

    params = {"emb": f(4096, 256), "cell": lstm_params(256, 320), "head": f(320, 4096)}
    return trained(loss, params, i(64, 129))


@program
def linen_lstm_lm() -> Built:
    """`flax.linen.RNN`, which is given a batch-major sequence, and a gradient without an optimizer."""
    import flax.linen as nn

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            x = nn.Embed(4096, 256)(x)
            return nn.Dense(4096)(nn.RNN(nn.OptimizedLSTMCell(256))(x))

    model = Model()
    params = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((64, 96), jnp.int32))["params"]

    def loss(p: Any, x: Any, t: Any) -> Any:
        return optax.softmax_cross_entropy_with_integer_labels(model.apply({"params": p}, x), t).mean()

    return jax.grad(loss), (params, i(64, 96), i(64, 96)), ()


@program
def gru_time_major() -> Built:
    """Forecasts of many series, time first in the data."""

    def cell(p: Any, h: Any, x: Any) -> Any:
        r, z = jnp.split(jax.nn.sigmoid(x @ p["wx"] + h @ p["wh"]), 2, -1)
        n = jnp.tanh(x @ p["nx"] + r * (h @ p["nh"]))
        return z * h + (1 - z) * n, h

    def loss(p: Any, series: Any) -> Any:
        _, h = lax.scan(lambda h, x: cell(p, h, x), jnp.zeros((96, 256)), series[:-1])
        return jnp.mean((h @ p["out"] - series[1:]) ** 2)

    params = {"wx": f(24, 512), "wh": f(256, 512), "nx": f(24, 256), "nh": f(256, 256), "out": f(256, 24)}
    return trained(loss, params, f(129, 96, 24))


# ---------------------------------------------------------------- reinforcement learning


@program
def ppo() -> Built:
    """Epochs over minibatches of a permuted rollout."""
    params = {"pi": mlp_params(60, 256, 256, 12), "v": mlp_params(60, 256, 256, 1)}
    optimiser = optax.adam(3e-4)

    def loss(p: Any, batch: Any) -> Any:
        log = jax.nn.log_softmax(mlp(p["pi"], batch["obs"]))
        chosen = jnp.take_along_axis(log, batch["action"][:, None], -1)[:, 0]
        ratio = jnp.exp(chosen - batch["log"])
        actor = -jnp.minimum(ratio * batch["adv"], jnp.clip(ratio, 0.8, 1.2) * batch["adv"]).mean()
        return actor + jnp.mean((mlp(p["v"], batch["obs"])[:, 0] - batch["target"]) ** 2)

    def step(params: Any, opt_state: Any, rollout: Any, key: Any) -> Any:
        def minibatch(carry: Any, batch: Any) -> Any:
            params, state = carry
            value, grads = jax.value_and_grad(loss)(params, batch)
            updates, state = optimiser.update(grads, state)
            return (optax.apply_updates(params, updates), state), value

        def epoch(carry: Any, key: Any) -> Any:
            order = jax.random.permutation(key, 8192)
            parts = jax.tree.map(lambda a: a[order].reshape(8, 1024, *a.shape[1:]), rollout)
            return lax.scan(minibatch, carry, parts)

        (params, opt_state), losses = lax.scan(epoch, (params, opt_state), jax.random.split(key, 4))
        return params, opt_state, losses.mean()

    rollout = {"obs": f(8192, 60), "action": i(8192), "log": f(8192), "adv": f(8192), "target": f(8192)}
    return step, (params, jax.eval_shape(optimiser.init, params), rollout, key()), (0, 1)


@program
def ppo_continuous() -> Built:
    """One update with generalised advantages over 128 steps of 96 environments."""
    params = {"pi": mlp_params(60, 256, 256, 12), "std": f(12), "v": mlp_params(60, 256, 256, 1)}

    def loss(p: Any, obs: Any, action: Any, log: Any, reward: Any, done: Any) -> Any:
        value = mlp(p["v"], obs)[..., 0]
        delta = reward + 0.99 * value[1:] * (1 - done) - value[:-1]
        _, adv = lax.scan(lambda g, x: (x[0] + 0.95 * x[1] * g,) * 2, jnp.zeros(96), (delta, 1 - done), reverse=True)
        mean = mlp(p["pi"], obs[:-1])
        new = -jnp.sum((action - mean) ** 2 / jnp.exp(2 * p["std"]) + p["std"], -1)
        ratio = jnp.exp(new - log)
        fixed = lax.stop_gradient(adv)
        actor = jnp.minimum(ratio * fixed, jnp.clip(ratio, 0.8, 1.2) * fixed)
        return jnp.mean((value[:-1] - lax.stop_gradient(adv + value[:-1])) ** 2) - jnp.mean(actor)

    data = (f(129, 96, 60), f(128, 96, 12), f(128, 96), f(128, 96), f(128, 96))
    return trained(loss, params, *data)


@program
def dqn() -> Built:
    """A batch out of a replay buffer, with a target network that follows slowly."""
    params = mlp_params(60, 256, 256, 18)
    optimiser = optax.adam(1e-4)

    def step(params: Any, target: Any, opt_state: Any, buffer: Any, key: Any) -> Any:
        index = jax.random.randint(key, (512,), 0, 65536)
        batch = jax.tree.map(lambda a: a[index], buffer)

        def loss(p: Any) -> Any:
            q = jnp.take_along_axis(mlp(p, batch["obs"]), batch["action"][:, None], 1)[:, 0]
            best = jnp.max(mlp(target, batch["next"]), -1)
            return jnp.mean(optax.huber_loss(q, batch["reward"] + 0.99 * best))

        value, grads = jax.value_and_grad(loss)(params)
        updates, opt_state = optimiser.update(grads, opt_state)
        params = optax.apply_updates(params, updates)
        return params, optax.incremental_update(params, target, 0.005), opt_state, value

    buffer = {"obs": f(65536, 60), "next": f(65536, 60), "action": i(65536), "reward": f(65536)}
    return step, (params, params, jax.eval_shape(optimiser.init, params), buffer, key()), (0, 1, 2)


@program
def sac() -> Built:
    """Two critics stacked, their targets, and an actor."""
    actor, critic = mlp_params(60, 256, 256, 24), stacked(2, mlp_params(72, 256, 256, 1))
    params = {"actor": actor, "critic": critic}
    optimiser = optax.adam(3e-4)

    def q(c: Any, obs: Any, action: Any) -> Any:
        return jax.vmap(lambda p: mlp(p, jnp.concatenate([obs, action], -1))[:, 0])(c)

    def act(p: Any, obs: Any, key: Any) -> Any:
        mean, log = jnp.split(mlp(p, obs), 2, -1)
        return jnp.tanh(mean + jnp.exp(log) * jax.random.normal(key, mean.shape))

    def loss(p: Any, target: Any, b: Any, key: Any) -> Any:
        goal = b["reward"] + 0.99 * q(target, b["next"], act(p["actor"], b["next"], key)).min(0)
        critic = jnp.mean((q(p["critic"], b["obs"], b["action"]) - lax.stop_gradient(goal)) ** 2)
        fixed = lax.stop_gradient(p["critic"])
        return critic - jnp.mean(q(fixed, b["obs"], act(p["actor"], b["obs"], key)).min(0))

    def step(params: Any, target: Any, opt_state: Any, batch: Any, key: Any) -> Any:
        grads = jax.grad(loss)(params, target, batch, key)
        updates, opt_state = optimiser.update(grads, opt_state)
        params = optax.apply_updates(params, updates)
        return params, optax.incremental_update(params["critic"], target, 0.005), opt_state

    batch = {"obs": f(512, 60), "next": f(512, 60), "action": f(512, 12), "reward": f(512)}
    return step, (params, critic, jax.eval_shape(optimiser.init, params), batch, key()), (0, 1, 2)


def _torso(p: Any, frames: Any) -> Any:
    x = frames / 255.0
    for k in ("c0", "c1"):
        x = jax.nn.relu(lax.conv_general_dilated(x, p[k], (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")))
    return jax.nn.relu(x.reshape(x.shape[0], -1) @ p["flat"])


_TORSO = {"c0": f(8, 8, 4, 32), "c1": f(4, 4, 32, 64), "flat": f(21 * 21 * 64, 256)}


def vtrace_loss(p: Any, batch: Any) -> Any:
    obs = batch["obs"]
    t, b = obs.shape[:2]
    x = _torso(p["torso"], obs.reshape(t * b, *obs.shape[2:]).astype(jnp.float32)).reshape(t, b, -1)
    _, h = lax.scan(lambda s, x: lstm(p["cell"], s, x), (batch["h"], batch["c"]), x)
    logits, value = h @ p["pi"], (h @ p["v"])[..., 0]
    log = jax.nn.log_softmax(logits[:-1])
    chosen = jnp.take_along_axis(log, batch["action"][..., None], -1)[..., 0]
    rho = jnp.minimum(jnp.exp(chosen - batch["log"]), 1.0)
    delta = rho * (batch["reward"] + 0.99 * value[1:] - value[:-1])
    _, vs = lax.scan(lambda g, x: (x[0] + 0.99 * x[1] * g,) * 2, jnp.zeros_like(delta[0]), (delta, rho), reverse=True)
    adv = lax.stop_gradient(rho * vs)
    return -jnp.mean(chosen * adv) + jnp.mean((lax.stop_gradient(vs + value[:-1]) - value[:-1]) ** 2)


_IMPALA = {"torso": _TORSO, "cell": lstm_params(256, 320), "pi": f(320, 18), "v": f(320, 1)}


@program
def impala() -> Built:
    """Time-major unrolls of T + 1 steps of 96 actors."""
    frames = jax.ShapeDtypeStruct((33, 96, 84, 84, 4), jnp.uint8)
    batch = {
        "obs": frames,
        "action": i(32, 96),
        "log": f(32, 96),
        "reward": f(32, 96),
        "h": f(96, 320),
        "c": f(96, 320),
    }
    return trained(vtrace_loss, _IMPALA, batch, optimiser=optax.rmsprop(1e-3))


@program
def r2d2() -> Built:
    """Batch-major sequences out of replay, burnt in, with a target network that is copied now and then."""
    params = {"torso": mlp_params(60, 256, 256), "cell": lstm_params(256, 320), "q": f(320, 18)}
    optimiser = optax.adam(1e-4)

    def q(p: Any, obs: Any, state: Any) -> Any:
        x = jax.nn.relu(mlp(p["torso"], obs))
        _, h = lax.scan(lambda s, x: lstm(p["cell"], s, x), state, x.swapaxes(0, 1))
        return h.swapaxes(0, 1) @ p["q"]

    def step(params: Any, target: Any, opt_state: Any, count: Any, batch: Any) -> Any:
        def loss(p: Any) -> Any:
            state = batch["h"], batch["c"]
            online, fixed = q(p, batch["obs"], state), q(target, batch["obs"], state)
            chosen = jnp.take_along_axis(online[:, :-1], batch["action"][..., None], -1)[..., 0]
            best = jnp.take_along_axis(fixed[:, 1:], jnp.argmax(online[:, 1:], -1)[..., None], -1)[..., 0]
            error = chosen - lax.stop_gradient(batch["reward"] + 0.99 * best)
            return jnp.mean(error**2), jnp.abs(error).mean(1)

        grads, priorities = jax.grad(loss, has_aux=True)(params)
        updates, opt_state = optimiser.update(grads, opt_state)
        params = optax.apply_updates(params, updates)
        target = optax.periodic_update(params, target, count, 100)
        return params, target, opt_state, count + 1, priorities

    batch = {"obs": f(48, 81, 60), "action": i(48, 80), "reward": f(48, 80), "h": f(48, 320), "c": f(48, 320)}
    return step, (params, params, jax.eval_shape(optimiser.init, params), i(), batch), (0, 1, 2)


@program
def muzero() -> Built:
    """Five imagined steps with a model of the world."""
    params = {"repr": mlp_params(60, 256, 320), "dyn": mlp_params(338, 256, 320), "pred": mlp_params(320, 256, 19)}

    def loss(p: Any, obs: Any, actions: Any, policy: Any, value: Any) -> Any:
        h = mlp(p["repr"], obs)
        total = 0.0
        for k in range(5):
            out = mlp(p["pred"], h)
            total += optax.softmax_cross_entropy(out[:, :18], policy[:, k]).mean()
            total += jnp.mean((out[:, 18] - value[:, k]) ** 2)
            h = mlp(p["dyn"], jnp.concatenate([h, jax.nn.one_hot(actions[:, k], 18)], -1))
        return total

    return trained(loss, params, f(512, 60), i(512, 5), f(512, 5, 18), f(512, 5))


# ---------------------------------------------------------------- contrastive losses


def tower(p: Any, x: Any) -> Any:
    for b in p["blocks"]:
        x = block(b, x, causal=False)
    x = x.mean(1) @ p["proj"]
    return x / jnp.linalg.norm(x, axis=-1, keepdims=True)


def _two_towers() -> dict[str, Any]:
    return {
        "img": {"patch": f(768, 256), "blocks": [block_params() for _ in range(2)], "proj": f(256, 192)},
        "txt": {"emb": f(4096, 256), "blocks": [block_params() for _ in range(2)], "proj": f(256, 192)},
        "t": f(), "b": f(),
    }  # fmt: skip


def _embeddings(p: Any, img: Any, txt: Any) -> Any:
    return tower(p["img"], img @ p["img"]["patch"]), tower(p["txt"], p["txt"]["emb"][txt])


@program
def siglip() -> Built:
    def loss(p: Any, img: Any, txt: Any) -> Any:
        zi, zt = _embeddings(p, img, txt)
        logits = zi @ zt.T * jnp.exp(p["t"]) + p["b"]
        return -jax.nn.log_sigmoid(logits * (2 * jnp.eye(512) - 1)).sum() / 512

    return trained(loss, _two_towers(), f(512, 49, 768), i(512, 32))


@program
def clip_softmax() -> Built:
    def loss(p: Any, img: Any, txt: Any) -> Any:
        zi, zt = _embeddings(p, img, txt)
        logits = zi @ zt.T * jnp.exp(p["t"])
        labels = jnp.arange(512)
        one = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
        return one + optax.softmax_cross_entropy_with_integer_labels(logits.T, labels).mean()

    return trained(loss, _two_towers(), f(512, 49, 768), i(512, 32))


@program
def lit() -> Built:
    """The image tower is frozen."""

    def step(frozen: Any, params: Any, opt_state: Any, img: Any, txt: Any) -> Any:
        def loss(p: Any) -> Any:
            zi, zt = tower(frozen, img @ frozen["patch"]), tower(p, p["emb"][txt])
            logits = zi @ zt.T * 10.0
            labels = jnp.arange(512)
            one = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
            return one + optax.softmax_cross_entropy_with_integer_labels(logits.T, labels).mean()

        value, grads = jax.value_and_grad(loss)(params)
        updates, opt_state = optax.adam(1e-3).update(grads, opt_state)
        return optax.apply_updates(params, updates), opt_state, value

    towers = _two_towers()
    state = jax.eval_shape(optax.adam(1e-3).init, towers["txt"])
    return step, (towers["img"], towers["txt"], state, f(512, 49, 768), i(512, 32)), (1, 2)


@program
def simclr() -> Built:
    """Two views of each image; 1,024 rows of the similarity matrix."""
    params = {"net": mlp_params(768, 512, 512, 128)}

    def loss(p: Any, one: Any, two: Any) -> Any:
        z = mlp(p["net"], jnp.concatenate([one, two]))
        z = z / jnp.linalg.norm(z, axis=-1, keepdims=True)
        logits = z @ z.T / 0.1 - 1e9 * jnp.eye(1024)
        labels = jnp.concatenate([jnp.arange(512, 1024), jnp.arange(512)])
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    return trained(loss, params, f(512, 768), f(512, 768))


@program
def retrieval() -> Built:
    """Users and items, embedded from tables, with the batch's other items as negatives."""
    params = {"user": {"emb": f(100_000, 64), "net": mlp_params(64, 256, 128)},
              "item": {"emb": f(50_000, 64), "net": mlp_params(64, 256, 128)}}  # fmt: skip

    def loss(p: Any, user: Any, item: Any) -> Any:
        u = mlp(p["user"]["net"], p["user"]["emb"][user])
        v = mlp(p["item"]["net"], p["item"]["emb"][item])
        return optax.softmax_cross_entropy_with_integer_labels(u @ v.T, jnp.arange(2048)).mean()

    return trained(loss, params, i(2048), i(2048), optimiser=optax.adagrad(0.1))


@program
def byol() -> Built:
    """An online network predicts what its slow copy makes of another view."""
    params = {"net": mlp_params(768, 512, 128), "pred": mlp_params(128, 512, 128)}
    optimiser = optax.sgd(0.1, momentum=0.9)

    def step(params: Any, slow: Any, opt_state: Any, one: Any, two: Any) -> Any:
        def loss(p: Any) -> Any:
            return jnp.mean((mlp(p["pred"], mlp(p["net"], one)) - mlp(slow, two)) ** 2)

        value, grads = jax.value_and_grad(loss)(params)
        updates, opt_state = optimiser.update(grads, opt_state)
        params = optax.apply_updates(params, updates)
        slow = optax.incremental_update(params["net"], slow, 0.01)
        return params, slow, opt_state, {"loss": value, "drift": optax.global_norm(slow)}

    state = jax.eval_shape(optimiser.init, params)
    return step, (params, params["net"], state, f(512, 768), f(512, 768)), (0, 1, 2)


# ---------------------------------------------------------------- samplers, ensembles, other learners


def _log_density(position: Any, x: Any, y: Any) -> Any:
    return -jnp.sum(jnp.logaddexp(0.0, -y * (x @ position))) - 0.5 * jnp.sum(position**2)


@program
def hmc_chains() -> Built:
    """64 chains of a logistic regression with 100 features and 20,000 rows."""

    def chain(position: Any, key: Any, x: Any, y: Any) -> Any:
        gradient = jax.grad(_log_density)

        def leap(_: Any, state: Any) -> Any:
            q, p = state
            p = p + 0.005 * gradient(q, x, y)
            q = q + 0.01 * p
            return q, p + 0.005 * gradient(q, x, y)

        one, two = jax.random.split(key)
        p = jax.random.normal(one, position.shape)
        q, p2 = lax.fori_loop(0, 10, leap, (position, p))
        energy = _log_density(q, x, y) - _log_density(position, x, y) + 0.5 * jnp.sum(p**2 - p2**2)
        return jnp.where(jnp.log(jax.random.uniform(two)) < energy, q, position)

    def step(positions: Any, keys: Any, x: Any, y: Any) -> Any:
        return jax.vmap(chain, (0, 0, None, None))(positions, keys, x, y)

    return step, (f(64, 100), jax.ShapeDtypeStruct((64, 2), jnp.uint32), f(20_000, 100), f(20_000)), (0,)


@program
def langevin_chains() -> Built:
    """64 chains over weights of a small network each, many steps in a scan, kept draws returned."""

    def density(w: Any, x: Any, y: Any) -> Any:
        return -jnp.mean((jnp.tanh(x @ w["a"]) @ w["b"] - y) ** 2)

    def step(chains: Any, key: Any, x: Any, y: Any) -> Any:
        def one(chains: Any, key: Any) -> Any:
            grads = jax.vmap(jax.grad(density), (0, None, None))(chains, x, y)
            chains = jax.tree.map(lambda w, g: w + 1e-3 * g + 0.01 * jax.random.normal(key, w.shape), chains, grads)
            return chains, chains["b"]

        return lax.scan(one, chains, jax.random.split(key, 20))

    return step, ({"a": f(64, 24, 160), "b": f(64, 160)}, key(), f(4096, 24), f(4096)), (0,)


@program
def ising_chains() -> Built:
    """Replicas of a lattice at different temperatures: no weights at all."""

    def sweep(spins: Any, key: Any, beta: Any) -> Any:
        def half(k: int, s: Any) -> Any:
            around = sum(jnp.roll(s, d, a) for d in (1, -1) for a in (1, 2))
            chance = jax.nn.sigmoid(2 * beta[:, None, None] * around)
            fresh = jnp.where(jax.random.uniform(jax.random.fold_in(key, k), s.shape) < chance, 1.0, -1.0)
            mask = (jnp.arange(256)[:, None] + jnp.arange(320)[None]) % 2 == k
            return jnp.where(mask, fresh, s)

        return half(1, half(0, spins))

    return sweep, (f(48, 256, 320), key(), f(48)), (0,)


@program
def deep_ensemble() -> Built:
    """Eight members trained on the same batch."""

    def loss(p: Any, x: Any, y: Any) -> Any:
        return jax.vmap(lambda q: jnp.mean((mlp(q, x)[:, 0] - y) ** 2))(p).sum()

    return trained(loss, stacked(8, mlp_params(60, 256, 256, 1)), f(2048, 60), f(2048))


@program
def evolution() -> Built:
    """Evolution strategies: 256 perturbed copies of a policy on one batch."""
    shapes = mlp_params(60, 128, 12)

    def step(params: Any, key: Any, x: Any, y: Any) -> Any:
        keys = jax.random.split(key, 256)

        def score(key: Any) -> Any:
            noise = jax.tree.map(lambda w: jax.random.normal(key, w.shape), params)
            moved = jax.tree.map(lambda w, n: w + 0.1 * n, params, noise)
            return -jnp.mean((mlp(moved, x) - y) ** 2), noise

        scores, noise = jax.vmap(score)(keys)
        return jax.tree.map(lambda w, n: w + 0.01 * jnp.tensordot(scores, n, 1), params, noise), scores

    return step, (shapes, key(), f(1024, 60), f(1024, 12)), (0,)


# ---------------------------------------------------------------- optimizers and metrics that read new weights


def _regression(p: Any, x: Any, y: Any) -> Any:
    return jnp.mean((mlp(p, x) - y) ** 2)


_DATA = (f(2048, 60), f(2048, 12))


@program
def adam_param_norm() -> Built:
    return trained(_regression, mlp_params(60, 512, 512, 12), *_DATA, norms=True)


@program
def lamb_param_norm() -> Built:
    return trained(_regression, mlp_params(60, 512, 512, 12), *_DATA, optimiser=optax.lamb(1e-3), norms=True)


@program
def adamw_clipped_moments() -> Built:
    """Metrics read the moments too."""
    optimiser = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    params = mlp_params(60, 512, 512, 12)

    def step(params: Any, opt_state: Any, x: Any, y: Any) -> Any:
        value, grads = jax.value_and_grad(_regression)(params, x, y)
        updates, opt_state = optimiser.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        norms = [optax.global_norm(tree) for tree in (updates, params, opt_state[1][0].mu)]
        return params, opt_state, value, norms, jnp.max(jnp.abs(params[0]["w"]))

    return step, (params, jax.eval_shape(optimiser.init, params), *_DATA), (0, 1)


@program
def ema_evaluated() -> Built:
    """An average of the weights, whose loss is reported."""
    params = mlp_params(60, 512, 512, 12)
    optimiser = optax.adam(1e-3)

    def step(params: Any, opt_state: Any, ema: Any, x: Any, y: Any) -> Any:
        grads = jax.grad(_regression)(params, x, y)
        updates, opt_state = optimiser.update(grads, opt_state)
        params = optax.apply_updates(params, updates)
        ema = optax.incremental_update(params, ema, 0.001)
        return params, opt_state, ema, _regression(params, x, y), _regression(ema, x, y)

    return step, (params, jax.eval_shape(optimiser.init, params), params, *_DATA), (0, 1, 2)


@program
def undonated_param_norm() -> Built:
    step, arguments, _ = trained(_regression, mlp_params(60, 512, 512, 12), *_DATA, norms=True)
    return step, arguments, ()


@program
def adafactor_param_norm() -> Built:
    return trained(lm_loss, lm_params(), i(32, 129), optimiser=optax.adafactor(1e-3), norms=True)


@program
def lm_ema_param_norm() -> Built:
    """Mixed precision: 16-bit weights are made of 32-bit ones; the norm of the new ones is reported."""

    def loss(p: Any, t: Any) -> Any:
        return lm_loss(jax.tree.map(lambda w: w.astype(jnp.bfloat16), p), t)

    return trained(loss, lm_params(), i(32, 129), norms=True)


@program
def shampoo_like() -> Built:
    """Statistics are square matrices; the update multiplies by them."""
    params = mlp_params(60, 512, 512, 12)
    left = [f(a.shape[0], a.shape[0]) for a in (p["w"] for p in params)]

    def step(params: Any, stats: Any, x: Any, y: Any) -> Any:
        value, grads = jax.value_and_grad(_regression)(params, x, y)
        stats = [0.99 * s + g["w"] @ g["w"].T for s, g in zip(stats, grads, strict=True)]
        new = [
            {"w": p["w"] - 0.1 * s @ g["w"], "b": p["b"] - 0.1 * g["b"]}
            for p, g, s in zip(params, grads, stats, strict=True)
        ]
        return new, stats, value

    return step, (params, left, *_DATA), (0, 1)


@program
def muon() -> Built:
    """Momentum made orthogonal by Newton-Schulz steps."""
    params = mlp_params(60, 512, 384, 12)

    def orthogonal(g: Any) -> Any:
        x = g / (jnp.linalg.norm(g) + 1e-7)
        for _ in range(5):
            a = x @ x.T
            x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
        return x

    def step(params: Any, momentum: Any, x: Any, y: Any) -> Any:
        value, grads = jax.value_and_grad(_regression)(params, x, y)
        momentum = jax.tree.map(lambda m, g: 0.95 * m + g, momentum, grads)
        updates = jax.tree.map(lambda m: orthogonal(m) if m.ndim == 2 else m, momentum)
        params = jax.tree.map(lambda p, u: p - 0.02 * u, params, updates)
        return params, momentum, {"loss": value, "norm": optax.global_norm(params)}

    return step, (params, params, *_DATA), (0, 1)


@program
def lora() -> Built:
    """Adapters beside frozen weights."""
    base = mlp_params(60, 512, 512, 12)
    adapters = [{"a": f(p["w"].shape[0], 8), "b": f(8, p["w"].shape[1])} for p in base]
    optimiser = optax.adam(1e-3)

    def step(base: Any, adapters: Any, opt_state: Any, x: Any, y: Any) -> Any:
        def loss(ad: Any) -> Any:
            return _regression(
                [{"w": p["w"] + q["a"] @ q["b"], "b": p["b"]} for p, q in zip(base, ad, strict=True)], x, y
            )

        value, grads = jax.value_and_grad(loss)(adapters)
        updates, opt_state = optimiser.update(grads, opt_state)
        return optax.apply_updates(adapters, updates), opt_state, value

    return step, (base, adapters, jax.eval_shape(optimiser.init, adapters), *_DATA), (1, 2)


@program
def dpo() -> Built:
    """Preferences, with a frozen reference model."""
    optimiser = optax.adam(1e-6)

    def log(p: Any, tokens: Any) -> Any:
        logits = jax.nn.log_softmax(lm_logits(p, tokens[:, :-1]))
        return jnp.take_along_axis(logits, tokens[:, 1:, None], -1)[..., 0].sum(-1)

    def step(params: Any, reference: Any, opt_state: Any, chosen: Any, rejected: Any) -> Any:
        def loss(p: Any) -> Any:
            ratio = log(p, chosen) - log(reference, chosen) - log(p, rejected) + log(reference, rejected)
            return -jax.nn.log_sigmoid(0.1 * ratio).mean()

        value, grads = jax.value_and_grad(loss)(params)
        updates, opt_state = optimiser.update(grads, opt_state)
        return optax.apply_updates(params, updates), opt_state, value

    state = jax.eval_shape(optimiser.init, lm_params())
    return step, (lm_params(), lm_params(), state, i(32, 129), i(32, 129)), (0, 2)


@program
def reinforce_tokens() -> Built:
    """GRPO: 16 prompts with 4 completions each, advantages within each prompt."""

    def loss(p: Any, tokens: Any, reward: Any, old: Any) -> Any:
        flat = tokens.reshape(64, 129)
        logits = jax.nn.log_softmax(lm_logits(p, flat[:, :-1]))
        log = jnp.take_along_axis(logits, flat[:, 1:, None], -1)[..., 0]
        adv = ((reward - reward.mean(1, keepdims=True)) / (reward.std(1, keepdims=True) + 1e-4)).reshape(64, 1)
        ratio = jnp.exp(log - old.reshape(64, 128))
        return -jnp.minimum(ratio * adv, jnp.clip(ratio, 0.8, 1.2) * adv).mean()

    return trained(loss, lm_params(), i(16, 4, 129), f(16, 4), f(16, 4, 128))


# ---------------------------------------------------------------- others


@program
def folding() -> Built:
    """Pairs of 150 residues, triangle updates and triangle attention, 8 proteins."""
    d = 128
    params = {n: f(d, d) for n in ("a", "b", "g", "o", "q", "k", "v", "w")} | {"bias": f(d, 4), "out": f(d, 64)}

    def loss(p: Any, pair: Any, bins: Any) -> Any:
        x = pair
        x = x + jnp.einsum("bikd,bjkd->bijd", x @ p["a"], x @ p["b"]) * jax.nn.sigmoid(x @ p["g"]) @ p["o"]
        q, k, v = ((x @ p[n]).reshape(*x.shape[:-1], 4, 32) for n in "qkv")
        scores = jnp.einsum("bijhc,bikhc->bihjk", q, k) + jnp.einsum("bjkd,dh->bhjk", x, p["bias"])[:, None]
        x = x + jnp.einsum("bihjk,bikhc->bijhc", jax.nn.softmax(scores), v).reshape(x.shape) @ p["w"]
        return optax.softmax_cross_entropy_with_integer_labels(x @ p["out"], bins).mean()

    return trained(loss, params, f(8, 150, 150, d), i(8, 150, 150))


@program
def detection() -> Built:
    """100 learnt queries read an image's patches."""
    params = {"patch": f(768, 256), "query": f(100, 256), "enc": block_params(), "q": f(256, 4, 64), "k": f(256, 4, 64),
              "v": f(256, 4, 64), "o": f(4, 64, 256), "cls": f(256, 91), "box": f(256, 4)}  # fmt: skip

    def loss(p: Any, patches: Any, labels: Any, boxes: Any) -> Any:
        x = block(p["enc"], patches @ p["patch"], causal=False)
        y = jnp.broadcast_to(p["query"], (64, 100, 256))
        q, k, v = (jnp.einsum("bsd,dhk->bshk", a, p[n]) for a, n in ((y, "q"), (x, "k"), (x, "v")))
        scores = jax.nn.softmax(jnp.einsum("bshk,bthk->bhst", q, k))
        y = y + jnp.einsum("bshk,hkd->bsd", jnp.einsum("bhst,bthk->bshk", scores, v), p["o"])
        cost = optax.softmax_cross_entropy_with_integer_labels(y @ p["cls"], labels).mean()
        return cost + jnp.abs(y @ p["box"] - boxes).mean()

    return trained(loss, params, f(64, 196, 768), i(64, 100), f(64, 100, 4))


@program
def nerf() -> Built:
    """4,096 rays, 64 points on each."""

    def loss(p: Any, origin: Any, direction: Any, colour: Any) -> Any:
        depth = jnp.linspace(2.0, 6.0, 64)
        x = origin[:, None] + direction[:, None] * depth[None, :, None]
        x = jnp.concatenate([jnp.sin(x * 2.0**k) for k in range(10)], -1)
        out = mlp(p, x)
        alpha = 1 - jnp.exp(-jax.nn.relu(out[..., 3]))
        weight = alpha * jnp.cumprod(1 - alpha + 1e-10, -1)
        return jnp.mean((jnp.sum(weight[..., None] * jax.nn.sigmoid(out[..., :3]), 1) - colour) ** 2)

    return trained(loss, mlp_params(30, 256, 256, 4), f(4096, 3), f(4096, 3), f(4096, 3))


@program
def pinn() -> Built:
    """Second derivatives at 8,192 points of a domain, and values at 512 of its edge."""

    def loss(p: Any, inside: Any, edge: Any, value: Any) -> Any:
        def u(x: Any) -> Any:
            return jnp.tanh(jnp.tanh(x @ p["a"]) @ p["b"]) @ p["c"]

        laplacian = jax.vmap(lambda x: jnp.trace(jax.hessian(u)(x)))(inside)
        return jnp.mean(laplacian**2) + jnp.mean((jax.vmap(u)(edge) - value) ** 2)

    return trained(loss, {"a": f(3, 256), "b": f(256, 256), "c": f(256)}, f(8192, 3), f(512, 3), f(512))


@program
def dlrm() -> Built:
    """26 tables, dense features, pairwise interactions."""
    params = {"tables": f(26, 20_000, 64), "bottom": mlp_params(13, 512, 64), "top": mlp_params(64 + 351, 512, 1)}

    def loss(p: Any, dense: Any, sparse: Any, clicked: Any) -> Any:
        x = mlp(p["bottom"], dense)
        looked = jax.vmap(lambda t, k: t[k], (0, 1), 1)(p["tables"], sparse)
        all_of = jnp.concatenate([x[:, None], looked], 1)
        pairs = jnp.einsum("bnd,bmd->bnm", all_of, all_of)
        rows, columns = jnp.triu_indices(27, 1)
        out = mlp(p["top"], jnp.concatenate([x, pairs[:, rows, columns]], -1))[:, 0]
        return optax.sigmoid_binary_cross_entropy(out, clicked).mean()

    return trained(loss, params, f(4096, 13), i(4096, 26), f(4096), optimiser=optax.adagrad(0.01))


@program
def k_means() -> Built:
    """Centres of 64 clusters: no weights in the usual sense."""

    def step(centres: Any, points: Any) -> Any:
        distance = jnp.sum(points**2, 1)[:, None] - 2 * points @ centres.T + jnp.sum(centres**2, 1)
        hot = jax.nn.one_hot(jnp.argmin(distance, 1), 64)
        return (hot.T @ points) / (hot.sum(0)[:, None] + 1e-6)

    return step, (f(64, 100), f(100_000, 100)), (0,)


@program
def gan() -> Built:
    """Generator and discriminator, one step of each."""
    params = {"g": mlp_params(100, 512, 768), "d": mlp_params(768, 512, 1)}
    optimiser = optax.adam(2e-4)

    def step(params: Any, opt_state: Any, real: Any, key: Any) -> Any:
        noise = jax.random.normal(key, (1024, 100))

        def judge(d: Any) -> Any:
            fake = mlp(params["g"], noise)
            return jax.nn.softplus(mlp(d, fake)).mean() + jax.nn.softplus(-mlp(d, real)).mean()

        def make(g: Any) -> Any:
            return jax.nn.softplus(-mlp(params["d"], mlp(g, noise))).mean()

        grads = {"g": jax.grad(make)(params["g"]), "d": jax.grad(judge)(params["d"])}
        updates, opt_state = optimiser.update(grads, opt_state)
        return optax.apply_updates(params, updates), opt_state

    return step, (params, jax.eval_shape(optimiser.init, params), f(1024, 768), key()), (0, 1)


@program
def diffusion_sampling() -> Built:
    """50 steps of denoising from noise: the batch is in the results alone."""

    def sample(params: Any, key: Any) -> Any:
        def one(k: int, x: Any) -> Any:
            return x - 0.02 * mlp(params, x)

        return lax.fori_loop(0, 50, one, jax.random.normal(key, (1024, 768)))

    return sample, (mlp_params(768, 512, 768), key()), ()


@program
def accumulating_lm() -> Built:
    """Four microbatches, cut out of the batch in a scan."""
    optimiser = optax.adam(1e-3)

    def step(params: Any, opt_state: Any, tokens: Any) -> Any:
        parts = tokens.reshape(4, 32, 129)

        def one(total: Any, part: Any) -> Any:
            value, grads = jax.value_and_grad(lm_loss)(params, part)
            return jax.tree.map(jnp.add, total, grads), value

        grads, losses = lax.scan(one, jax.tree.map(jnp.zeros_like, params), parts)
        updates, opt_state = optimiser.update(grads, opt_state)
        params = optax.apply_updates(params, updates)
        return params, opt_state, losses.mean(), optax.global_norm(params)

    return step, (lm_params(), jax.eval_shape(optimiser.init, lm_params()), i(128, 129)), (0, 1)


@program
def multi_step() -> Built:
    """Many training steps in one program: a scan over batches."""
    optimiser = optax.adam(1e-3)
    params = mlp_params(60, 512, 512, 12)

    def step(params: Any, opt_state: Any, xs: Any, ys: Any) -> Any:
        def one(carry: Any, xy: Any) -> Any:
            params, state = carry
            value, grads = jax.value_and_grad(_regression)(params, *xy)
            updates, state = optimiser.update(grads, state)
            return (optax.apply_updates(params, updates), state), value

        (params, opt_state), losses = lax.scan(one, (params, opt_state), (xs, ys))
        return params, opt_state, losses

    return step, (params, jax.eval_shape(optimiser.init, params), f(10, 2048, 60), f(10, 2048, 12)), (0, 1)


@program
def graph_batch() -> Built:
    """Padded molecules: 512 graphs of 40 atoms with dense adjacency."""
    params = {"in": f(24, 256), "w": [f(256, 256) for _ in range(3)], "out": f(256, 1)}

    def loss(p: Any, atoms: Any, bonds: Any, energy: Any) -> Any:
        x = atoms @ p["in"]
        for w in p["w"]:
            x = jax.nn.relu(bonds @ x @ w) + x
        return jnp.mean((x.sum(1) @ p["out"] - energy) ** 2)

    return trained(loss, params, f(512, 40, 24), f(512, 40, 40), f(512, 1))


@program
def graph_edges() -> Built:
    """Messages along the edges of one large graph."""
    params = {"in": f(24, 256), "m": [f(512, 256) for _ in range(3)], "out": f(256, 7)}

    def loss(p: Any, nodes: Any, senders: Any, receivers: Any, labels: Any) -> Any:
        x = nodes @ p["in"]
        for w in p["m"]:
            message = jax.nn.relu(jnp.concatenate([x[senders], x[receivers]], -1) @ w)
            x = x + jax.ops.segment_sum(message, receivers, 20_000)
        return optax.softmax_cross_entropy_with_integer_labels(x @ p["out"], labels).mean()

    return trained(loss, params, f(20_000, 24), i(160_000), i(160_000), i(20_000))


@program
def ctc() -> Built:
    """Speech: convolutions over time and the CTC loss."""
    params = {"c": f(5, 80, 256), "w": mlp_params(256, 512, 32)}

    def loss(p: Any, audio: Any, padded: Any, labels: Any, label_padded: Any) -> Any:
        x = lax.conv_general_dilated(audio, p["c"], (2,), "SAME", dimension_numbers=("NHC", "HIO", "NHC"))
        return optax.ctc_loss(mlp(p["w"], jax.nn.relu(x)), padded, labels, label_padded).mean()

    return trained(loss, params, f(64, 400, 80), f(64, 200), i(64, 30), f(64, 30))
