"""The strategy sentence: a plan is called after what it splits, a dimension after what the program does with it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from programs import arg, program_of

from toast_cli.dimensions import analyse
from toast_cli.hardware import load_spec
from toast_cli.plan.decisions import Shard
from toast_cli.plan.problem import Problem, make_problem
from toast_cli.program.model import Program
from toast_cli.report.words import summary
from toast_cli.tactics import strategy

L, B, S, D, F, V = 4, 16, 32, 64, 256, 512
MESH = load_spec("v5e-8").mesh({"data": 4, "model": 2}, None)
LAYERS = {"up": arg(L, D, F), "down": arg(L, F, D)}


def layer(x: Any, w: Any) -> tuple[Any, None]:
    return x + jnp.tanh(x @ w["up"]) @ w["down"], None


def adam(loss: Callable[..., Any], w: Any, state: Any, *data: Any) -> Any:
    gradients = jax.grad(loss)(w, *data)
    state = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state, gradients)
    return jax.tree.map(lambda w, m: w - 0.1 * m, w, state), state, loss(w, *data)


def trained(loss: Callable[..., Any], w: Any, *data: Any) -> Program:
    return program_of(functools.partial(adam, loss), w, w, *data, donate=(0, 1))


def stack() -> Program:
    return trained(lambda w, x: jax.lax.scan(layer, x, w)[0].sum(), LAYERS, arg(B, S, D))


def muon() -> Program:
    """An optimizer with products of each layer's gradient alone."""

    def update(w: Any, x: Any) -> Any:
        value, gradients = jax.value_and_grad(lambda w: jax.lax.scan(layer, x, w)[0].sum())(w)
        return jax.tree.map(lambda w, g: w - 0.1 * (g @ jnp.swapaxes(g, 1, 2)) @ g, w, gradients), value

    return program_of(update, LAYERS, arg(B, S, D), donate=(0,))


def float8() -> Program:
    """Quantised weights and activations: ops between a weight and its product."""

    def quantised(x: Any) -> Any:
        scale = jnp.max(jnp.abs(x)) / 448.0
        return jnp.clip(x / scale, -448.0, 448.0).astype(jnp.float8_e4m3fn).astype(jnp.float32) * scale

    def block(x: Any, w: Any) -> tuple[Any, None]:
        return x + quantised(jnp.tanh(quantised(x) @ quantised(w["up"]))) @ quantised(w["down"]), None

    return trained(lambda w, x: jax.lax.scan(block, x, w)[0].sum(), LAYERS, arg(B, S, D))


def spectral() -> Program:
    """A Fourier neural operator: a weight for each frequency, in two real parts."""
    modes = 8

    def loss(w: Any, x: Any) -> Any:
        spectrum = jnp.fft.rfft(x @ w["lift"], axis=1)[:, :modes]
        spectrum = jnp.einsum("bkc,cdk->bkd", spectrum, w["real"] + 1j * w["imaginary"])
        spectrum = jnp.pad(spectrum, ((0, 0), (0, S // 2 + 1 - modes), (0, 0)))
        return (jnp.fft.irfft(spectrum, n=S, axis=1) @ w["out"]).sum()

    w = {"lift": arg(3, D), "real": arg(D, D, modes), "imaginary": arg(D, D, modes), "out": arg(D, 3)}
    return trained(loss, w, arg(B, S, 3))


def vocabulary_in_tiles() -> Program:
    """A loss that reads the head in tiles of the vocabulary."""
    tile = V // 4

    def loss(w: Any, tokens: Any) -> Any:
        x = jnp.tanh(w["embed"][tokens] @ w["w"])

        def body(total: Any, k: Any) -> tuple[Any, None]:
            logits = x @ jax.lax.dynamic_slice_in_dim(w["head"], k * tile, tile).T
            return total + jnp.exp(logits).sum(-1), None

        return jnp.log(jax.lax.scan(body, jnp.zeros(B), jnp.arange(4))[0]).sum()

    return trained(loss, {"embed": arg(V, D), "w": arg(D, D), "head": arg(V, D)}, arg(B, dtype=jnp.int32))


def circular_pipeline(turns: int = 2, stages: int = 4) -> Program:
    """In each turn, a stage has another layer; activations move one stage on in each trip."""

    def trip(state: Any, k: Any, w: Any) -> tuple[Any, None]:
        turn = jnp.clip((k - jnp.arange(stages)) // stages, 0, turns - 1)
        up, down = (jax.vmap(lambda m, i: m[i], (1, 0))(w[name], turn) for name in ("up", "down"))
        state = jnp.concatenate([state[-1:], state[:-1]])
        return jax.vmap(lambda x, up, down: jnp.tanh(x @ up) @ down)(state, up, down), None

    def run(w: Any, x: Any) -> Any:
        return jax.lax.scan(functools.partial(trip, w=w), x, jnp.arange(turns * stages))[0]

    w = {"up": arg(turns, stages, D, F), "down": arg(turns, stages, F, D)}
    return program_of(run, w, arg(stages, B, S, D))


def decoder() -> Program:
    """A scanned decoder with a cache for each layer, and a batch of one."""

    def block(x: Any, scanned: Any) -> Any:
        w, cache = scanned
        query, *rows = ((x @ w[name]).reshape(1, 4, D // 4) for name in ("query", "key", "value"))
        keys, values = (
            jax.lax.dynamic_update_slice(old, new[:, None], (0, 3, 0, 0)) for old, new in zip(cache, rows, strict=True)
        )
        weights = jax.nn.softmax(jnp.einsum("bhd,bshd->bhs", query, keys))
        x = x + jnp.einsum("bhs,bshd->bhd", weights, values).reshape(1, D) @ w["out"]
        return layer(x, w)[0], (keys, values)

    w = {**LAYERS, **{name: arg(L, D, D) for name in ("query", "key", "value", "out")}}
    cache = (arg(L, 1, S, 4, D // 4),) * 2
    return program_of(lambda w, cache, x: jax.lax.scan(block, x, (w, cache)), w, cache, arg(1, D), donate=(1,))


def causal_convolution() -> Program:
    def loss(w: Any, x: Any) -> Any:
        x = jax.lax.conv_general_dilated(x, w["kernel"], (1,), [(2, 0)], dimension_numbers=("NWC", "WIO", "NWC"))
        return (jnp.tanh(x).mean(1) @ w["out"]).sum()

    return trained(loss, {"kernel": arg(3, 8, D), "out": arg(D, V)}, arg(B, S, 8))


def initial_weights() -> Program:
    return program_of(lambda key: jax.random.normal(key, (V, D)), arg(2, dtype=jnp.uint32))


def particles() -> Program:
    """Every atom acts on every other."""

    def energy(r: Any) -> Any:
        distance = ((r[:, None] - r[None]) ** 2).sum(-1) + 1.0
        return (1.0 / distance**3).sum()

    def step(r: Any, v: Any) -> tuple[Any, Any]:
        v = v - jax.grad(energy)(r)
        return r + v, v

    return program_of(step, arg(V, 3), arg(V, 3), donate=(0, 1))


@functools.cache
def problem(program: Callable[[], Program]) -> Problem:
    read = program()
    return make_problem(read, analyse(read), MESH)


SENTENCES: list[tuple[Callable[[], Program], str, str]] = [
    (stack, "data-parallel:data", "data (4): data-parallel; model (2): not used; weights and state replicated"),
    (stack, "fsdp:data", "data (4): FSDP; model (2): not used"),
    (
        stack,
        "zero2:data",
        "data (4): data-parallel with sharded state (ZeRO-2); model (2): not used; weights replicated",
    ),
    (stack, "fsdp:data+megatron:model", "data (4): FSDP; model (2): tensor-parallel (ff_2)"),
    (float8, "fsdp:data", "data (4): FSDP; model (2): not used"),
    (float8, "fsdp:data+megatron:model", "data (4): FSDP; model (2): tensor-parallel (ff_2)"),
    (spectral, "fsdp:data", "data (4): FSDP; model (2): not used"),
    (vocabulary_in_tiles, "fsdp:data", "data (4): FSDP; model (2): not used"),
    (circular_pipeline, "data-parallel:data", "data (4): data-parallel; model (2): not used; weights replicated"),
    (decoder, "context:data", "data (4): context-parallel (seq); model (2): not used; weights replicated"),
]


@pytest.mark.parametrize(("program", "name", "sentence"), SENTENCES, ids=[f"{p.__name__}-{n}" for p, n, _ in SENTENCES])
def test_a_plan_is_called_after_what_it_splits(program: Callable[[], Program], name: str, sentence: str) -> None:
    assert summary(problem(program), strategy(problem(program), name)) == sentence


def test_layers_that_only_an_optimizer_computes_apart_are_no_pipeline() -> None:
    given = problem(muon)
    layers = [Shard(k, 0) for k, group in enumerate(given.dimensions.groups) if group.role == "layers"]
    plan = (*strategy(given, "data-parallel:data"), *layers)
    assert summary(given, plan) == "data (4): FSDP; model (2): not used"


# program -> argument -> roles of its dimensions
ROLES: list[tuple[Callable[[], Program], str, list[str]]] = [
    (decoder, "cache[0]", ["layers", "", "seq", "heads", "head_dim"]),  # not a sequence of layers
    (decoder, "w['up']", ["layers", "embed", "ff"]),
    (circular_pipeline, "w['up']", ["layers", "layers", "ff", "ff"]),  # turns and stages
    (circular_pipeline, "x", ["layers", "batch", "batch", "ff"]),
    (vocabulary_in_tiles, "w['head']", ["vocab", "ff"]),  # not layers
    (causal_convolution, "data[0]", ["batch", "seq", "channels"]),  # not a height
    (spectral, "w['real']", ["ff", "ff", ""]),  # frequencies are no ensemble
    (particles, "r", ["", ""]),  # atoms interact, and so do coordinates
]


@pytest.mark.parametrize(("program", "path", "roles"), ROLES, ids=[f"{p.__name__}-{path}" for p, path, _ in ROLES])
def test_dimensions_have_the_role_that_the_program_gives_them(
    program: Callable[[], Program], path: str, roles: list[str]
) -> None:
    read, of = problem(program).program, problem(program).dimensions
    (number,) = (k for k, argument in enumerate(read.arguments) if argument.path == path)
    classes = of.factor_classes[number]
    dims = [
        "/".join(of.groups[of.class_group[classes[factor]]].role for factor in factors)
        for factors in of.forms[number].results[0]
    ]
    assert dims == roles


@pytest.mark.parametrize("program", [initial_weights, particles], ids=["initial weights", "particles"])
def test_a_program_without_samples_has_no_batch(program: Callable[[], Program]) -> None:
    assert "batch" not in {group.role for group in problem(program).dimensions.groups}


def test_tiles_of_the_vocabulary_are_the_vocabulary() -> None:
    assert {"vocab"} == {group.role for group in problem(vocabulary_in_tiles).dimensions.groups if group.size == V // 4}
