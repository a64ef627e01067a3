"""A new user's walk: models of several frameworks, lowered, partitioned with the command, and run on 8 virtual devices
in every way there is.

    XLA_FLAGS=--xla_force_host_platform_device_count=8 JAX_PLATFORMS=cpu python walk.py TOAST plain flax equinox
    dm-haiku

TOAST is the command. Each model trains three steps with its whole state in one argument; the losses are those of one
device, the dimensions that matter are found, and what is split is split. Ends with the exit code 1 where something
differs.
"""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import toast_partitioner as toast

STEPS = 3
SHAPE = "data=4,model=2"
# Small enough that no plan which leaves the weights whole everywhere fits.
SHARE_OF_WEIGHTS = 0.6
PLANS = 500  # that a search looks at: how good the best is matters little here
# Runs a script with such searches.
BRIEFLY = f"""
import functools, runpy, sys, toast_cli
toast_cli.jit = functools.partial(toast_cli.jit, iterations={PLANS})
toast_cli.partition = functools.partial(toast_cli.partition, iterations={PLANS})
runpy.run_path(sys.argv[1], run_name="__main__")
"""
WIDTH, BATCH = 256, 64


@dataclass(frozen=True)
class Model:
    """A training step `(state, batch) -> (state, loss)` with arguments to begin with."""

    name: str
    step: Callable[[Any, Any], Any]
    state: Any
    batch: Any


def plain() -> list[Model]:
    """JAX alone, with momentum."""

    def step(state: Any, batch: Any) -> Any:
        def loss(p: Any) -> Any:
            return jnp.mean((jnp.tanh(batch["x"] @ p["up"]) @ p["down"] - batch["y"]) ** 2)

        value, gradients = jax.value_and_grad(loss)(state["params"])
        momentum = jax.tree.map(lambda m, g: 0.9 * m + g, state["momentum"], gradients)
        params = jax.tree.map(lambda p, m: p - 0.05 * m, state["params"], momentum)
        return {"params": params, "momentum": momentum}, value

    up, down = jax.random.split(jax.random.key(0))
    params = {
        "up": jax.random.normal(up, (WIDTH, 4 * WIDTH)) * 0.05,
        "down": jax.random.normal(down, (4 * WIDTH, WIDTH)) * 0.05,
    }
    return [Model("plain", step, {"params": params, "momentum": jax.tree.map(jnp.zeros_like, params)}, regression())]


def flax() -> list[Model]:
    """Linen in a TrainState, with Adam; NNX with its parameters and the optimizer's state in one dictionary."""
    import flax.linen as linen
    import optax
    from flax import nnx
    from flax.training.train_state import TrainState

    class Perceptron(linen.Module):
        @linen.compact
        def __call__(self, x: Any) -> Any:
            for _ in range(2):
                x = linen.relu(linen.Dense(4 * WIDTH)(x))
            return linen.Dense(WIDTH)(x)

    model = Perceptron()
    batch = regression()
    start = TrainState.create(
        apply_fn=model.apply, params=model.init(jax.random.key(0), batch["x"])["params"], tx=optax.adam(1e-3)
    )

    def linen_step(state: Any, batch: Any) -> Any:
        value, gradients = jax.value_and_grad(
            lambda p: jnp.mean((state.apply_fn({"params": p}, batch["x"]) - batch["y"]) ** 2)
        )(state.params)
        return state.apply_gradients(grads=gradients), value

    class Block(nnx.Module):
        def __init__(self, rngs: Any) -> None:
            self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
            self.attention = nnx.MultiHeadAttention(8, WIDTH, decode=False, rngs=rngs)
            self.up, self.down = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs), nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

        def __call__(self, x: Any) -> Any:
            x = x + self.attention(self.norm(x))
            return x + self.down(nnx.gelu(self.up(x)))

    class Decoder(nnx.Module):
        def __init__(self, rngs: Any) -> None:
            self.embed = nnx.Embed(512, WIDTH, rngs=rngs)
            self.blocks = nnx.List([Block(rngs) for _ in range(2)])
            self.head = nnx.Linear(WIDTH, 512, rngs=rngs)

        def __call__(self, tokens: Any) -> Any:
            x = self.embed(tokens)
            for block in self.blocks:
                x = block(x)
            return self.head(x)

    definition, params, rest = nnx.split(Decoder(nnx.Rngs(0)), nnx.Param, ...)
    optimizer = optax.adamw(1e-3)

    def nnx_step(state: Any, tokens: Any) -> Any:
        def loss(p: Any) -> Any:
            logits = nnx.merge(definition, p, rest)(tokens[:, :-1])
            return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

        value, gradients = jax.value_and_grad(loss)(state["params"])
        updates, opt_state = optimizer.update(gradients, state["opt_state"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt_state": opt_state}, value

    tokens = jax.random.randint(jax.random.key(1), (16, 33), 0, 512)
    return [
        Model("linen", linen_step, start, batch),
        Model("nnx", nnx_step, {"params": params, "opt_state": optimizer.init(params)}, tokens),
    ]


def equinox() -> list[Model]:
    """A model that is a tree of arrays and functions; the arrays are the state."""
    import equinox as eqx
    import optax

    model = eqx.nn.MLP(WIDTH, WIDTH, 4 * WIDTH, 2, key=jax.random.key(0))
    arrays, static = eqx.partition(model, eqx.is_array)
    optimizer = optax.adam(1e-3)

    def step(state: Any, batch: Any) -> Any:
        def loss(p: Any) -> Any:
            return jnp.mean((jax.vmap(eqx.combine(p, static))(batch["x"]) - batch["y"]) ** 2)

        value, gradients = jax.value_and_grad(loss)(state[0])
        updates, opt_state = optimizer.update(gradients, state[1], state[0])
        return (eqx.apply_updates(state[0], updates), opt_state), value

    return [Model("equinox", step, (arrays, optimizer.init(arrays)), regression())]


def haiku() -> list[Model]:
    """Batch normalisation keeps averages that no training step reads."""
    import haiku as hk
    import optax

    def network(x: Any) -> Any:
        x = hk.Linear(4 * WIDTH)(x)
        x = hk.BatchNorm(True, True, 0.9)(x, is_training=True)
        return hk.Linear(WIDTH)(jax.nn.relu(x))

    model = hk.without_apply_rng(hk.transform_with_state(network))
    batch = regression()
    params, averages = model.init(jax.random.key(0), batch["x"])
    optimizer = optax.adam(1e-3)

    def step(state: Any, batch: Any) -> Any:
        def loss(p: Any) -> Any:
            out, averages = model.apply(p, state[1], batch["x"])
            return jnp.mean((out - batch["y"]) ** 2), averages

        (value, averages), gradients = jax.value_and_grad(loss, has_aux=True)(state[0])
        updates, opt_state = optimizer.update(gradients, state[2], state[0])
        return (optax.apply_updates(state[0], updates), averages, opt_state), value

    return [Model("haiku", step, (params, averages, optimizer.init(params)), batch)]


FRAMEWORKS = {"plain": plain, "flax": flax, "equinox": equinox, "dm-haiku": haiku}


def regression() -> Any:
    x = jax.random.normal(jax.random.key(2), (BATCH, WIDTH))
    return {"x": x, "y": jnp.sin(x)}


def losses(step: Callable[[Any, Any], Any], model: Model) -> tuple[list[float], Any]:
    """Of three steps, and the state behind them."""
    state, found = jax.tree.map(jnp.copy, model.state), []
    for _ in range(STEPS):
        state, value = step(state, model.batch)
        found.append(float(value))
    return found, state


def ways(model: Model, command: str) -> dict[str, Callable[[Any, Any], Any]]:
    """Every way to run the model sharded."""
    total = sum(leaf.nbytes for leaf in jax.tree.leaves(model.state))
    limit = int(total * SHARE_OF_WEIGHTS) + (1 << 20)
    jitted = jax.jit(model.step, donate_argnums=0)
    Path("model.mlir").write_text(jitted.lower(model.state, model.batch).as_text(debug_info=True))
    for ending in ("mlir", "jax_export"):
        run(command, "partition", "model.mlir", "--mesh", "h100-8", "--mesh-shape", SHAPE, "--memory-limit", str(limit),
            "--iterations", str(PLANS), "--quiet", "-o", f"sharded.{ending}", "--save-plan", "plan.json")  # fmt: skip
    run(command, "partition", "model.mlir", "--mesh", "h100-8", "--mesh-shape", SHAPE, "--memory-limit", str(limit),
        "--plan", "plan.json", "--quiet", "-o", "shardings.py")  # fmt: skip
    scope: dict[str, Any] = {}
    exec(Path("shardings.py").read_text(), scope)
    names = tuple(inspect.signature(model.step).parameters)
    named = dict(zip(names, (model.state, model.batch), strict=True))
    ins, outs = scope["in_shardings"](**named), scope["out_shardings"](model.step, **named)
    by_hand = jax.jit(model.step, donate_argnums=0, in_shardings=ins, out_shardings=outs)
    first = [True]

    def shardings_py(state: Any, batch: Any) -> Any:
        if first[0]:  # from then on the state lies as the step wants it
            state, first[0] = jax.device_put(state, ins[0]), False
        return by_hand(state, jax.device_put(batch, ins[1]))

    exported = jax.export.deserialize(bytearray(Path("sharded.jax_export").read_bytes()))
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    places = exported.in_shardings_jax(mesh)
    kept = toast.load("sharded.jax_export")
    order = {place.path: k for k, place in enumerate(kept.arguments)}

    def by_jax_alone(state: Any, batch: Any) -> Any:
        found = jax.tree_util.tree_leaves_with_path(dict(zip(names, (state, batch), strict=True)))
        leaves: list[Any] = [None] * len(order)
        for path, leaf in found:
            name = path[0].key + jax.tree_util.keystr(path[1:])
            if name in order:
                leaves[order[name]] = leaf
        results = exported.call(*map(jax.device_put, leaves, places))
        shape = jax.eval_shape(model.step, state, batch)
        return jax.tree.unflatten(jax.tree.structure(shape), results)

    return {
        "shardings.py": shardings_py,
        "toast.jit": toast.jit(
            model.step, mesh="h100-8", mesh_shape=SHAPE, memory_limit=limit, iterations=PLANS, donate_argnums=0
        ),
        "toast.load": toast.load("sharded.mlir"),
        "jax.export": by_jax_alone,
    }


def run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
    print("   ", done.stdout.strip())


def walk(model: Model, command: str) -> None:
    expected, _ = losses(jax.jit(model.step), model)
    print(f"{model.name}: losses on one device {', '.join(f'{loss:.6f}' for loss in expected)}")
    for way, step in ways(model, command).items():
        found, state = losses(step, model)
        np.testing.assert_allclose(found, expected, rtol=2e-3, err_msg=f"{model.name} through {way}")
        leaves = jax.tree.leaves(state)
        held = sum(leaf.addressable_shards[0].data.nbytes for leaf in leaves) / sum(leaf.nbytes for leaf in leaves)
        spread = all(len(leaf.sharding.device_set) == 8 for leaf in leaves)
        assert spread and held < 1.0, f"{model.name} through {way}: nothing is split"
        print(f"  {way:12} the same; each device holds {held:.0%} of the state")


def recipes(folder: Path, packages: Collection[str]) -> None:
    """Runs the scripts of docs/examples (`# name.py, needs package`) whose package is here."""
    for script in sorted(folder.glob("*.py")):
        found = re.match(r"# \w+\.py, needs ([\w-]+)\n", script.read_text())
        if found and found[1] in packages:
            print(script.name)
            run(sys.executable, "-c", BRIEFLY, str(script))


def main() -> None:
    command, *frameworks = sys.argv[1:]
    if command == "--recipes":
        recipes(Path(frameworks[0]), frameworks[1:])
        return
    for framework in frameworks:
        for model in FRAMEWORKS.get(framework, list)():  # Keras has a recipe only
            walk(replace(model, state=jax.tree.map(jnp.asarray, model.state)), command)


if __name__ == "__main__":
    main()
