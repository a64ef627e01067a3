"""GNS: a graph network simulator (Sanchez-Gonzalez et al. 2020): encode, pass messages along edges, decode; float32."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from sample_models.common import Sample, Tree, dense, main, ones, training_sample, zeros
from sample_models.layers import layer_norm


@dataclass(frozen=True)
class Config:
    nodes: int
    edges: int
    node_features: int
    edge_features: int
    outputs: int
    latent: int
    hidden: int
    steps: int  # of message passing, each with weights of its own


def mlp_weights(inputs: int, hidden: int, outputs: int, *, norm: bool = True) -> Tree:
    sizes = [(inputs, hidden), (hidden, hidden), (hidden, outputs)]
    layers = [{"w": dense(n, m), "b": zeros(m)} for n, m in sizes]
    return {"layers": layers, "scale": ones(outputs), "bias": zeros(outputs)} if norm else {"layers": layers}


def weights(config: Config) -> Tree:
    latent, hidden = config.latent, config.hidden
    return {
        "encode_nodes": mlp_weights(config.node_features, hidden, latent),
        "encode_edges": mlp_weights(config.edge_features, hidden, latent),
        "process": [
            {"edge": mlp_weights(3 * latent, hidden, latent), "node": mlp_weights(2 * latent, hidden, latent)}
            for _ in range(config.steps)
        ],
        "decode": mlp_weights(latent, hidden, config.outputs, norm=False),
    }


def mlp(params: Tree, x: jax.Array) -> jax.Array:
    *hidden, last = params["layers"]
    for layer in hidden:
        x = jax.nn.relu(x @ layer["w"] + layer["b"])
    x = x @ last["w"] + last["b"]
    return layer_norm(x, params["scale"], params["bias"]) if "scale" in params else x


def pass_messages(params: Tree, nodes: jax.Array, edges: jax.Array, graph: Tree) -> tuple[jax.Array, jax.Array]:
    """One step: every edge reads its two nodes, every node sums its incoming edges; both residual."""
    senders, receivers = graph["senders"], graph["receivers"]
    message = mlp(params["edge"], jnp.concatenate([edges, nodes[senders], nodes[receivers]], axis=-1))
    arriving = jax.ops.segment_sum(message, receivers, num_segments=nodes.shape[0])
    return nodes + mlp(params["node"], jnp.concatenate([nodes, arriving], axis=-1)), edges + message


def simulate(params: Tree, graph: Tree) -> jax.Array:
    """Predicted accelerations, f32[nodes, outputs]."""
    with jax.named_scope("encode"):
        nodes, edges = mlp(params["encode_nodes"], graph["nodes"]), mlp(params["encode_edges"], graph["edges"])
    for number, step in enumerate(params["process"]):
        with jax.named_scope(f"message_{number}"):
            nodes, edges = pass_messages(step, nodes, edges, graph)
    with jax.named_scope("decode"):
        return mlp(params["decode"], nodes)


def training(name: str, about: str, config: Config) -> Sample:
    def simulator_loss(params: Tree, batch: Tree) -> jax.Array:
        return jnp.mean((simulate(params, batch) - batch["acceleration"]) ** 2)

    def batch(key: jax.Array) -> Tree:
        node, edge, target, sender, receiver = jax.random.split(key, 5)
        return {
            "nodes": jax.random.normal(node, (config.nodes, config.node_features)),
            "edges": jax.random.normal(edge, (config.edges, config.edge_features)),
            "acceleration": jax.random.normal(target, (config.nodes, config.outputs)),
            "senders": jax.random.randint(sender, (config.edges,), 0, config.nodes, jnp.int32),
            "receivers": jax.random.randint(receiver, (config.edges,), 0, config.nodes, jnp.int32),
        }

    return training_sample(name, about, simulator_loss, weights(config), batch, rate=1e-4)


GNS = Config(
    nodes=16384, edges=163840, node_features=30, edge_features=4, outputs=3, latent=512, hidden=640, steps=10
)  # fmt: skip
TINY = Config(nodes=112, edges=1120, node_features=30, edge_features=4, outputs=3, latent=32, hidden=48, steps=2)

SAMPLES = (
    training("gns_train", "graph network simulator, 10 message passing steps over 163,840 edges: training step", GNS),
    training("gns_tiny", "its twin of 2 steps over 1,120 edges", TINY),
)

if __name__ == "__main__":
    main(SAMPLES)
