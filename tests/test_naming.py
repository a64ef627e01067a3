"""Roles: what each dimension and each argument is to the program, whatever anything is called."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from programs import arg, program_of, sample

from toast_cli.dimensions import Dimensions, analyse
from toast_cli.program.model import Program
from toast_cli.program.roles import INPUTS, STATE, WEIGHTS, argument_roles

B, S, D, F, H, K, V, E = 16, 24, 32, 96, 4, 8, 48, 6


def role_of(program: Program, dimensions: Dimensions, argument: int, dim: int) -> str:
    """The role of one dimension (its major part) of an argument."""
    form, classes = dimensions.forms[argument], dimensions.slot_classes[argument]
    slot = form.results[0][dim][0]
    return dimensions.groups[dimensions.class_group[classes[slot]]].role


def block(x: Any, w: Any) -> Any:
    """One transformer block, heads split off by a reshape."""
    q, k, v = ((x @ w[n]).reshape(*x.shape[:2], H, K) for n in ("q", "k", "v"))
    scores = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k))
    x = x + jnp.einsum("bhqk,bkhd->bqhd", scores, v).reshape(x.shape[0], x.shape[1], H * K) @ w["o"]
    return x + jax.nn.relu(x @ w["up"]) @ w["down"]


BLOCK = {
    "q": arg(D, H * K), "k": arg(D, H * K), "v": arg(D, H * K), "o": arg(H * K, D), "up": arg(D, F), "down": arg(F, D)
}  # fmt: skip


def diffusion(w: Any, patches: Any, time: Any) -> Any:
    """A diffusion transformer: the time modulates the stream; no table anywhere."""
    x = patches @ w["patch"]
    scale = jax.nn.silu(time @ w["time"]) @ w["modulate"]
    for layer in w["layers"]:
        x = block(x * (1.0 + scale[:, None]), layer)
    return x @ w["out"]


def ensemble(w: Any, x: Any) -> Any:
    """Members of an ensemble, all on the same inputs."""
    return jax.vmap(lambda a, b: jax.nn.relu(x @ a) @ b)(w["a"], w["b"])


def mixture(w: Any, x: Any) -> Any:
    """Experts that a router weighs."""
    gates = jax.nn.softmax(x @ w["router"])
    hidden = jax.nn.relu(jnp.einsum("bsd,edf->besf", x, w["up"]))
    return jnp.einsum("bse,besf,efd->bsd", gates, hidden, w["down"])


def triangle(w: Any, pair: Any) -> Any:
    """Triangle multiplication over pairs of residues, of a batch of one protein."""
    left, right = pair @ w["left"], pair @ w["right"]
    return pair + jnp.einsum("bikc,bjkc->bijc", left, right) @ w["out"]


DIFFUSION = {
    "patch": arg(12, D), "time": arg(20, D), "modulate": arg(D, D), "layers": [BLOCK, BLOCK], "out": arg(D, 12)
}  # fmt: skip

# name -> function, arguments, {(argument, dimension): role}. Arguments are leaves, in order; dictionaries are sorted by key.
PROGRAMS: dict[str, tuple[Callable[..., Any], tuple[Any, ...], dict[tuple[int, int], str]]] = {
    "diffusion transformer": (
        diffusion, (DIFFUSION, arg(B, S, 12), arg(B, 20)),
        {(0, 0): "ff", (0, 1): "embed", (3, 0): "embed", (1, 1): "heads", (16, 0): "batch", (16, 1): "seq", (17, 0): "batch"},
    ),
    "ensemble": (ensemble, ({"a": arg(E, D, F), "b": arg(E, F, D)}, arg(B, D)), {(0, 0): "ensemble", (2, 0): "batch"}),
    "mixture": (
        mixture, ({"down": arg(E, F, D), "router": arg(D, E), "up": arg(E, D, F)}, arg(B, S, D)),
        {(0, 0): "experts", (1, 1): "experts", (0, 1): "ff"},
    ),
    "triangle": (
        triangle, ({"left": arg(D, D), "out": arg(D, D), "right": arg(D, D)}, arg(B, S, S, D)),
        {(3, 0): "batch"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PROGRAMS)
def test_dimensions_have_the_role_they_play(name: str) -> None:
    run, shapes, expected = PROGRAMS[name]
    program = program_of(run, *shapes)
    dimensions = analyse(program)
    assert {place: role_of(program, dimensions, *place) for place in expected} == expected


def test_residues_are_no_batch() -> None:
    run, shapes, _ = PROGRAMS["triangle"]
    program = program_of(run, *shapes)
    dimensions = analyse(program)
    assert "batch" not in {role_of(program, dimensions, 3, 1), role_of(program, dimensions, 3, 2)}


# sample -> roles its groups have, and roles none of them has
SAMPLES: dict[str, tuple[set[str], set[str]]] = {
    "t2b_tiny": ({"batch", "seq", "heads", "head_dim", "ff", "embed", "vocab"}, {"experts", "edges"}),
    "vit_tiny": ({"batch", "seq", "heads", "head_dim", "ff", "embed", "labels"}, {"vocab", "experts"}),
    "itx_decode_tiny": ({"batch", "seq", "heads", "ff", "embed", "vocab"}, {"experts", "ensemble"}),
    "itx_prefill_tiny": ({"batch", "seq", "heads", "ff", "embed", "vocab"}, {"experts", "ensemble"}),
    "moe_tiny": ({"batch", "seq", "heads", "ff", "embed", "vocab", "experts"}, {"ensemble"}),
    "gns_tiny": ({"nodes", "edges", "ff"}, {"batch", "seq", "experts"}),
    "long_tiny": ({"seq", "heads", "ff", "embed", "vocab"}, {"batch"}),
    "block_tiny": ({"seq", "heads", "ff", "embed"}, {"batch", "vocab"}),
    "resnet50_tiny": ({"batch", "channels", "height", "width", "labels"}, {"heads", "experts", "seq"}),
    "unet_tiny": ({"batch", "channels", "heads", "height", "width"}, {"experts", "edges"}),
    "rnn_tiny": ({"batch", "seq", "embed", "vocab"}, {"heads", "experts"}),
    "ssm_tiny": ({"batch", "seq", "embed", "vocab"}, {"heads", "experts"}),
    "mlp_tiny": ({"batch", "ff", "labels"}, {"seq", "heads", "experts", "vocab"}),
    "scan_tiny": ({"batch", "seq", "heads", "ff", "embed", "vocab", "layers"}, {"experts"}),
}


@pytest.mark.parametrize("name", SAMPLES)
def test_sample_models_have_the_roles_they_should(name: str) -> None:
    present, absent = SAMPLES[name]
    found = {group.role for group in sample(name)[1].groups}
    assert present <= found
    assert not absent & found


# ---------------------------------------------------------------- arguments


def step(x: Any, w: Any) -> Any:
    gradients = jax.grad(lambda w: jnp.sum(jax.nn.relu(x @ w["a"]) @ w["b"]))(w)
    return jax.tree.map(lambda w, g: w - 0.1 * g, w, gradients)


def momentum(x: Any, w: Any, m: Any) -> Any:
    gradients = jax.grad(lambda w: jnp.sum(jax.nn.relu(x @ w["a"]) @ w["b"]))(w)
    m = jax.tree.map(lambda m, g: 0.9 * m + g, m, gradients)
    return jax.tree.map(lambda w, m: w - 0.1 * m, w, m), m


W = {"a": arg(D, F), "b": arg(F, D)}
ARGUMENTS: list[tuple[str, Callable[..., Any], tuple[Any, ...], tuple[int, ...], list[str]]] = [
    ("a step that donates nothing", step, (arg(B, D), W), (), [INPUTS, WEIGHTS, WEIGHTS]),
    ("a step that donates", step, (arg(B, D), W), (1,), [INPUTS, WEIGHTS, WEIGHTS]),
    ("momentum, nothing donated", momentum, (arg(B, D), W, W), (), [INPUTS, WEIGHTS, WEIGHTS, STATE, STATE]),
    ("inference", lambda x, w: jax.nn.relu(x @ w["a"]) @ w["b"], (arg(B, D), W), (), [INPUTS, WEIGHTS, WEIGHTS]),
    ("residual inference", lambda x, w: x + jax.nn.relu(x @ w["a"]) @ w["b"], (arg(B, D), W), (), [INPUTS, WEIGHTS, WEIGHTS]),
    ("one weight", lambda x, w: x + x @ w, (arg(D, D), arg(D, D)), (), [INPUTS, WEIGHTS]),
    ("normed inference", lambda x, w: x + (x / jnp.sum(x)) @ w, (arg(D, D), arg(D, D)), (), [INPUTS, WEIGHTS]),
    ("look-up", lambda t, i: t[i], (arg(V, D), arg(B, dtype=jnp.int32)), (), [WEIGHTS, INPUTS]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("run", "shapes", "donate", "expected"), [row[1:] for row in ARGUMENTS], ids=[r[0] for r in ARGUMENTS]
)
def test_arguments_are_told_apart(
    run: Any, shapes: tuple[Any, ...], donate: tuple[int, ...], expected: list[str]
) -> None:
    names, of = argument_roles(program_of(run, *shapes, donate=donate))
    assert [names[k] for k in of] == expected
