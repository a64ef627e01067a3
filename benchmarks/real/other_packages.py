"""Models made of Flax Linen, Flax NNX, Equinox, Haiku and jraph, as their documentation puts them together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.real.steps import STYLES, Lowerable, cross_entropy


def tokens(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def floats(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


# -- Flax Linen -------------------------------------------------------------------------------------------------------


def linen_recurrent(cell: str, style: str = "train state", optimiser: str = "adam") -> Lowerable:
    """A language model of two recurrent layers, with `flax.linen.RNN`."""
    from flax import linen as nn

    class Model(nn.Module):  # type: ignore[misc]
        @nn.compact  # type: ignore[untyped-decorator]
        def __call__(self, ids: Any) -> Any:
            x = nn.Embed(32_000, 1024)(ids)
            for _ in range(2):
                x = nn.RNN(getattr(nn, cell)(1024))(x)
            return nn.Dense(32_000)(x)

    model, batch = Model(), {"ids": tokens(64, 128)}
    params = jax.eval_shape(model.init, jax.random.PRNGKey(0), batch["ids"])["params"]

    def loss(params: Any, batch: Any, key: Any) -> Any:
        return cross_entropy(model.apply({"params": params}, batch["ids"])[:, :-1], batch["ids"][:, 1:])

    return STYLES[style](loss, params, batch, optimiser)


def linen_mixer(style: str = "train state", optimiser: str = "adamw") -> Lowerable:
    """An MLP-Mixer of twelve blocks."""
    from flax import linen as nn

    class Block(nn.Module):  # type: ignore[misc]
        @nn.compact  # type: ignore[untyped-decorator]
        def __call__(self, x: Any) -> Any:
            y = jnp.swapaxes(nn.LayerNorm()(x), 1, 2)
            y = nn.Dense(y.shape[-1])(nn.gelu(nn.Dense(384)(y)))
            x = x + jnp.swapaxes(y, 1, 2)
            y = nn.LayerNorm()(x)
            return x + nn.Dense(x.shape[-1])(nn.gelu(nn.Dense(3072)(y)))

    class Model(nn.Module):  # type: ignore[misc]
        @nn.compact  # type: ignore[untyped-decorator]
        def __call__(self, x: Any) -> Any:
            x = nn.Conv(768, (16, 16), strides=(16, 16))(x)
            x = x.reshape(x.shape[0], -1, x.shape[-1])
            for _ in range(12):
                x = Block()(x)
            return nn.Dense(1000)(nn.LayerNorm()(x).mean(axis=1))

    return linen_images(Model(), style, optimiser)


def linen_wavenet(style: str = "one state", optimiser: str = "adam") -> Lowerable:
    """Dilated causal convolutions over sequences of samples."""
    from flax import linen as nn

    class Model(nn.Module):  # type: ignore[misc]
        @nn.compact  # type: ignore[untyped-decorator]
        def __call__(self, ids: Any) -> Any:
            x, skips = nn.Embed(256, 256)(ids), 0.0
            for layer in range(20):
                gate = nn.Conv(512, (2,), kernel_dilation=(2 ** (layer % 10),), padding="CAUSAL")(x)
                a, b = jnp.split(gate, 2, axis=-1)
                y = jnp.tanh(a) * nn.sigmoid(b)
                x, skips = x + nn.Dense(256)(y), skips + nn.Dense(512)(y)
            return nn.Dense(256)(nn.relu(nn.Dense(512)(nn.relu(skips))))

    model, batch = Model(), {"ids": tokens(32, 4096)}
    params = jax.eval_shape(model.init, jax.random.PRNGKey(0), batch["ids"])["params"]

    def loss(params: Any, batch: Any, key: Any) -> Any:
        return cross_entropy(model.apply({"params": params}, batch["ids"])[:, :-1], batch["ids"][:, 1:])

    return STYLES[style](loss, params, batch, optimiser)


def linen_autoencoder(style: str = "separate", optimiser: str = "adam") -> Lowerable:
    """A convolutional variational autoencoder: strides down, transposed convolutions up, random normals between."""
    from flax import linen as nn

    class Model(nn.Module):  # type: ignore[misc]
        @nn.compact  # type: ignore[untyped-decorator]
        def __call__(self, x: Any, key: Any) -> Any:
            for width in (128, 256, 512):
                x = nn.gelu(nn.GroupNorm(8)(nn.Conv(width, (3, 3), strides=(2, 2))(x)))
            mean, spread = jnp.split(nn.Conv(128, (1, 1))(x), 2, axis=-1)
            x = mean + jnp.exp(0.5 * spread) * jax.random.normal(key, mean.shape)
            for width in (512, 256, 128):
                x = nn.gelu(nn.GroupNorm(8)(nn.ConvTranspose(width, (3, 3), strides=(2, 2))(x)))
            return nn.Conv(3, (3, 3))(x), mean, spread

    model, batch = Model(), {"image": floats(64, 128, 128, 3)}
    params = jax.eval_shape(model.init, jax.random.PRNGKey(0), batch["image"], jax.random.PRNGKey(0))["params"]

    def loss(params: Any, batch: Any, key: Any) -> Any:
        out, mean, spread = model.apply({"params": params}, batch["image"], key)
        divergence = -0.5 * jnp.mean(1 + spread - mean**2 - jnp.exp(spread))
        return jnp.mean((out - batch["image"]) ** 2) + divergence

    return STYLES[style](loss, params, batch, optimiser)


def linen_images(model: Any, style: str, optimiser: str, batch: int = 128) -> Lowerable:
    data = {"image": floats(batch, 224, 224, 3), "label": tokens(batch)}
    params = jax.eval_shape(model.init, jax.random.PRNGKey(0), data["image"])["params"]

    def loss(params: Any, batch: Any, key: Any) -> Any:
        return cross_entropy(model.apply({"params": params}, batch["image"]), batch["label"])

    return STYLES[style](loss, params, data, optimiser)


# -- Flax NNX ---------------------------------------------------------------------------------------------------------


def nnx_decoder(style: str = "one state", optimiser: str = "adamw") -> Lowerable:
    """A decoder with `nnx.MultiHeadAttention`, its state split off from the graph."""
    from flax import nnx

    class Block(nnx.Module):  # type: ignore[misc]
        def __init__(self, width: int, rngs: Any) -> None:
            self.first, self.second = nnx.LayerNorm(width, rngs=rngs), nnx.LayerNorm(width, rngs=rngs)
            self.attention = nnx.MultiHeadAttention(12, width, decode=False, rngs=rngs)
            self.up, self.down = nnx.Linear(width, 4 * width, rngs=rngs), nnx.Linear(4 * width, width, rngs=rngs)

        def __call__(self, x: Any, mask: Any) -> Any:
            x = x + self.attention(self.first(x), mask=mask)
            return x + self.down(nnx.gelu(self.up(self.second(x))))

    class Model(nnx.Module):  # type: ignore[misc]
        def __init__(self, rngs: Any) -> None:
            self.tokens, self.places = nnx.Embed(50_257, 768, rngs=rngs), nnx.Embed(512, 768, rngs=rngs)
            self.blocks = nnx.List([Block(768, rngs) for _ in range(6)])
            self.norm = nnx.LayerNorm(768, rngs=rngs)

        def __call__(self, ids: Any) -> Any:
            x = self.tokens(ids) + self.places(jnp.arange(ids.shape[1]))
            mask = nnx.make_causal_mask(ids)
            for block in self.blocks:
                x = block(x, mask)
            return self.tokens.attend(self.norm(x))

    graph, params = nnx.split(nnx.eval_shape(lambda: Model(nnx.Rngs(0))))

    def loss(params: Any, batch: Any, key: Any) -> Any:
        return cross_entropy(nnx.merge(graph, params)(batch["ids"])[:, :-1], batch["ids"][:, 1:])

    return STYLES[style](loss, params, {"ids": tokens(64, 512)}, optimiser)


# -- Equinox ----------------------------------------------------------------------------------------------------------


def equinox_step(make: Callable[[Any], Any], loss: Any, batch: Any, optimiser: str = "adamw") -> Lowerable:
    """A module is the tree of its own weights; one argument each for the module, the optimiser's state, the batch."""
    import equinox as eqx

    model = eqx.filter_eval_shape(make, jax.random.PRNGKey(0))
    params, static = eqx.partition(model, lambda x: isinstance(x, jax.ShapeDtypeStruct))

    def of_params(params: Any, batch: Any, key: Any) -> Any:
        return loss(eqx.combine(params, static), batch, key)

    return STYLES["separate"](of_params, params, batch, optimiser)


def equinox_vit(optimiser: str = "adamw") -> Lowerable:
    """A vision transformer over patches, one image at a time under `vmap`."""
    import equinox as eqx

    class Block(eqx.Module):  # type: ignore[misc]
        attention: Any
        up: Any
        down: Any
        norms: Sequence[Any]

        def __init__(self, key: Any) -> None:
            a, b, c = jax.random.split(key, 3)
            self.attention = eqx.nn.MultiheadAttention(12, 768, key=a)
            self.up, self.down = eqx.nn.Linear(768, 3072, key=b), eqx.nn.Linear(3072, 768, key=c)
            self.norms = [eqx.nn.LayerNorm(768), eqx.nn.LayerNorm(768)]

        def __call__(self, x: Any) -> Any:
            y = jax.vmap(self.norms[0])(x)
            x = x + self.attention(y, y, y)
            return x + jax.vmap(lambda v: self.down(jax.nn.gelu(self.up(self.norms[1](v)))))(x)

    class Model(eqx.Module):  # type: ignore[misc]
        patches: Any
        blocks: Sequence[Any]
        head: Any

        def __init__(self, key: Any) -> None:
            keys = jax.random.split(key, 10)
            self.patches = eqx.nn.Conv2d(3, 768, 16, stride=16, key=keys[0])
            self.blocks = [Block(k) for k in keys[1:9]]
            self.head = eqx.nn.Linear(768, 1000, key=keys[9])

        def __call__(self, image: Any) -> Any:
            x = self.patches(image).reshape(768, -1).T
            for block in self.blocks:
                x = block(x)
            return self.head(x.mean(axis=0))

    def loss(model: Any, batch: Any, key: Any) -> Any:
        return cross_entropy(jax.vmap(model)(batch["image"]), batch["label"])

    return equinox_step(Model, loss, {"image": floats(128, 3, 224, 224), "label": tokens(128)}, optimiser)


def equinox_gru(optimiser: str = "adam") -> Lowerable:
    """A sequence classifier around `equinox.nn.GRUCell` in a scan."""
    import equinox as eqx

    class Model(eqx.Module):  # type: ignore[misc]
        cell: Any
        head: Any

        def __init__(self, key: Any) -> None:
            a, b = jax.random.split(key)
            self.cell, self.head = eqx.nn.GRUCell(512, 2048, key=a), eqx.nn.Linear(2048, 1000, key=b)

        def __call__(self, xs: Any) -> Any:
            last, _ = jax.lax.scan(lambda h, x: (self.cell(x, h), None), jnp.zeros(2048), xs)
            return self.head(last)

    def loss(model: Any, batch: Any, key: Any) -> Any:
        return cross_entropy(jax.vmap(model)(batch["x"]), batch["label"])

    return equinox_step(Model, loss, {"x": floats(256, 128, 512), "label": tokens(256)}, optimiser)


# -- Haiku ------------------------------------------------------------------------------------------------------------


def haiku_resnet(optimiser: str = "momentum") -> Lowerable:
    """`hk.nets.ResNet50` with its state of moving averages as an argument and a result of its own."""
    import haiku as hk
    import optax

    net = hk.transform_with_state(lambda x: hk.nets.ResNet50(1000)(x, is_training=True))
    batch = {"image": floats(128, 224, 224, 3), "label": tokens(128)}
    params, state = jax.eval_shape(net.init, jax.random.PRNGKey(0), batch["image"])
    tx = optax.sgd(0.1, momentum=0.9)

    def step(params: Any, state: Any, opt_state: Any, batch: Any) -> Any:
        def loss(params: Any) -> Any:
            logits, changed = net.apply(params, state, None, batch["image"])
            return cross_entropy(logits, batch["label"]), changed

        (value, changed), grads = jax.value_and_grad(loss, has_aux=True)(params)
        updates, opt = tx.update(grads, opt_state)
        return optax.apply_updates(params, updates), changed, opt, value

    return Lowerable(step, (params, state, jax.eval_shape(tx.init, params), batch), (0, 1, 2))


def haiku_decoder(style: str = "separate", optimiser: str = "adam") -> Lowerable:
    """A decoder with `hk.MultiHeadAttention`."""
    import haiku as hk

    def forward(ids: Any) -> Any:
        x = hk.Embed(32_000, 1024)(ids)
        mask = jnp.tril(jnp.ones((1, 1, ids.shape[1], ids.shape[1])))
        start = hk.initializers.VarianceScaling(0.1)
        for _ in range(6):
            y = hk.LayerNorm(-1, True, True)(x)
            x = x + hk.MultiHeadAttention(16, 64, w_init=start)(y, y, y, mask=mask)
            y = hk.LayerNorm(-1, True, True)(x)
            x = x + hk.Linear(1024)(jax.nn.gelu(hk.Linear(4096)(y)))
        return hk.Linear(32_000)(hk.LayerNorm(-1, True, True)(x))

    net, batch = hk.without_apply_rng(hk.transform(forward)), {"ids": tokens(64, 512)}
    params = jax.eval_shape(net.init, jax.random.PRNGKey(0), batch["ids"])

    def loss(params: Any, batch: Any, key: Any) -> Any:
        return cross_entropy(net.apply(params, batch["ids"])[:, :-1], batch["ids"][:, 1:])

    return STYLES[style](loss, params, batch, optimiser)


def haiku_lstm(optimiser: str = "adam") -> Lowerable:
    """A character model around `hk.LSTM` under `hk.dynamic_unroll`."""
    import haiku as hk

    def forward(ids: Any) -> Any:
        core = hk.DeepRNN([hk.LSTM(1024), hk.LSTM(1024)])
        x = hk.Embed(256, 512)(ids.T)
        out, _ = hk.dynamic_unroll(core, x, core.initial_state(ids.shape[0]))
        return hk.BatchApply(hk.Linear(256))(out)

    net, batch = hk.without_apply_rng(hk.transform(forward)), {"ids": tokens(128, 256)}
    params = jax.eval_shape(net.init, jax.random.PRNGKey(0), batch["ids"])

    def loss(params: Any, batch: Any, key: Any) -> Any:
        return cross_entropy(net.apply(params, batch["ids"])[:-1], batch["ids"].T[1:])

    return STYLES["separate"](loss, params, batch, optimiser)


# -- jraph ------------------------------------------------------------------------------------------------------------


def jraph_network(kind: str, optimiser: str = "adam") -> Lowerable:
    """Message passing with jraph: `network` (edges, nodes and globals), `convolution` or `attention`, weights by
    Haiku."""
    import haiku as hk
    import jraph

    nodes, edges, width = 65_536, 262_144, 256

    def mlp(*parts: Any) -> Any:
        return hk.nets.MLP([width, width], activate_final=True)(jnp.concatenate(parts, axis=-1))

    def forward(graph: Any) -> Any:
        x = graph._replace(nodes=hk.Linear(width)(graph.nodes), edges=hk.Linear(width)(graph.edges))
        for _ in range(4):
            if kind == "network":
                x = jraph.GraphNetwork(
                    update_edge_fn=lambda e, s, r, g: mlp(e, s, r), update_node_fn=lambda n, s, r, g: mlp(n, r)
                )(x)
            elif kind == "convolution":
                x = jraph.GraphConvolution(hk.Linear(width), add_self_edges=True)(x)
                x = x._replace(nodes=jax.nn.relu(x.nodes))
            else:
                x = jraph.GAT(
                    attention_query_fn=hk.Linear(width),
                    attention_logit_fn=lambda q, k, e: hk.Linear(1)(jax.nn.leaky_relu(jnp.concatenate([q, k], -1))),
                    node_update_fn=jax.nn.elu,
                )(x)
        return hk.Linear(16)(x.nodes)

    net = hk.without_apply_rng(hk.transform(forward))
    graph = jraph.GraphsTuple(
        nodes=floats(nodes, 64), edges=floats(edges, 16), senders=tokens(edges), receivers=tokens(edges), globals=None,
        n_node=tokens(1), n_edge=tokens(1),
    )  # fmt: skip
    params = jax.eval_shape(net.init, jax.random.PRNGKey(0), graph)

    def loss(params: Any, batch: Any, key: Any) -> Any:
        return cross_entropy(net.apply(params, batch["graph"]), batch["labels"])

    return STYLES["separate"](loss, params, {"graph": graph, "labels": tokens(nodes)}, optimiser)
