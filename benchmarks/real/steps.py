"""Training steps in the styles that people write: what a loss function goes into, and what comes out to be lowered.

Every style takes `loss(params, batch, key) -> scalar` and abstract parameters, and returns a function with abstract
arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

Loss = Callable[[Any, Any, Any], Any]
MICROBATCHES = 8


@dataclass(frozen=True)
class Lowerable:
    """A function, its abstract arguments, and the numbers of those that it may overwrite."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    donated: tuple[int, ...] = ()


OPTIMISERS: dict[str, Callable[[], optax.GradientTransformation]] = {
    "adam": lambda: optax.adam(1e-3),
    "adamw": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3, weight_decay=0.1)),
    "adafactor": lambda: optax.adafactor(1e-3),
    "lion": lambda: optax.lion(1e-4),
    "momentum": lambda: optax.sgd(0.1, momentum=0.9, nesterov=True),
    "sgd": lambda: optax.sgd(0.1),
    "multisteps": lambda: optax.MultiSteps(optax.adamw(1e-3), every_k_schedule=4).gradient_transformation(),
}


def key_shape() -> jax.ShapeDtypeStruct:
    """An old-style random key."""
    return jax.ShapeDtypeStruct((2,), jnp.uint32)


def separate(loss: Loss, params: Any, batch: Any, optimiser: str = "adamw") -> Lowerable:
    """`step(params, opt_state, batch, key)`."""
    tx = OPTIMISERS[optimiser]()

    def step(params: Any, opt_state: Any, batch: Any, key: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params, batch, key)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    return Lowerable(step, (params, jax.eval_shape(tx.init, params), batch, key_shape()), (0, 1))


def train_state(loss: Loss, params: Any, batch: Any, optimiser: str = "adamw") -> Lowerable:
    """Flax's `TrainState` as the one state argument, dropout keys folded in from the step's number."""
    from flax.training.train_state import TrainState

    tx = OPTIMISERS[optimiser]()
    state = jax.eval_shape(lambda p: TrainState.create(apply_fn=None, params=p, tx=tx), params)

    def step(state: Any, batch: Any, key: Any) -> Any:
        key = jax.random.fold_in(key, state.step)
        value, grads = jax.value_and_grad(loss)(state.params, batch, key)
        return state.apply_gradients(grads=grads), {"loss": value, "norm": optax.global_norm(grads)}

    return Lowerable(step, (state, batch, key_shape()), (0,))


def one_state(loss: Loss, params: Any, batch: Any, optimiser: str = "adamw") -> Lowerable:
    """A dictionary of everything that lasts."""
    tx = OPTIMISERS[optimiser]()
    state = {
        "params": params,
        "opt_state": jax.eval_shape(tx.init, params),
        "step": jax.ShapeDtypeStruct((), jnp.int32),
    }

    def step(state: Any, batch: Any, key: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(state["params"], batch, jax.random.fold_in(key, state["step"]))
        updates, opt_state = tx.update(grads, state["opt_state"], state["params"])
        changed = optax.apply_updates(state["params"], updates)
        return {"params": changed, "opt_state": opt_state, "step": state["step"] + 1}, value

    return Lowerable(step, (state, batch, key_shape()), (0,))


def accumulating(loss: Loss, params: Any, batch: Any, optimiser: str = "adamw") -> Lowerable:
    """Gradients of eight microbatches added up in a scan, one update."""
    tx = OPTIMISERS[optimiser]()

    def step(params: Any, opt_state: Any, batch: Any, key: Any) -> Any:
        def split(x: Any) -> Any:
            return x.reshape(MICROBATCHES, x.shape[0] // MICROBATCHES, *x.shape[1:])

        def one(carry: Any, part: Any) -> Any:
            value, grads = jax.value_and_grad(loss)(params, part, key)
            return jax.tree.map(jnp.add, carry, (grads, value)), None

        zeros = (jax.tree.map(jnp.zeros_like, params), jnp.zeros((), jnp.float32))
        (grads, value), _ = jax.lax.scan(one, zeros, jax.tree.map(split, batch))
        grads = jax.tree.map(lambda g: g / MICROBATCHES, grads)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value / MICROBATCHES

    return Lowerable(step, (params, jax.eval_shape(tx.init, params), batch, key_shape()), (0, 1))


def mixed_precision(loss: Loss, params: Any, batch: Any, optimiser: str = "adamw") -> Lowerable:
    """Weights kept in f32 and cast to bf16 for the model."""

    def lowered(params: Any, batch: Any, key: Any) -> Any:
        def cast(x: Any) -> Any:
            return x.astype(jnp.bfloat16) if jnp.issubdtype(x.dtype, jnp.floating) else x

        return loss(jax.tree.map(cast, params), batch, key).astype(jnp.float32)

    return separate(lowered, params, batch, optimiser)


def rematerialised(loss: Loss, params: Any, batch: Any, optimiser: str = "adamw") -> Lowerable:
    """The whole loss under `jax.checkpoint` that keeps contractions without batch dimensions."""
    policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    return separate(jax.checkpoint(loss, policy=policy), params, batch, optimiser)


STYLES: dict[str, Callable[..., Lowerable]] = {
    "separate": separate,
    "train state": train_state,
    "one state": one_state,
    "accumulating": accumulating,
    "mixed precision": mixed_precision,
    "remat": rematerialised,
}


def cross_entropy(logits: Any, labels: Any) -> Any:
    """Mean over all labels, in f32."""
    return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), labels).mean()
