"""Roles: what each dimension and each argument is to the program, whatever anything is called."""

from __future__ import annotations

import functools
import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from programs import arg, program_of, sample, source_of

from toast_cli.api.plan import logical_names
from toast_cli.base.errors import UsageError
from toast_cli.cli import main
from toast_cli.dimensions import Dimensions, analyse
from toast_cli.frontend import Source, load
from toast_cli.hardware import load_spec
from toast_cli.plan.decisions import Shard
from toast_cli.plan.problem import make_problem
from toast_cli.price.evaluator import Evaluator
from toast_cli.program.model import Program
from toast_cli.program.names import with_dimension_names
from toast_cli.program.roles import INPUTS, STATE, WEIGHTS, argument_roles
from toast_cli.report.words import summary
from toast_cli.search.run import Settings, run_search
from toast_cli.tactics import strategies

ROOT = Path(__file__).resolve().parents[1]
B, S, D, F, H, K, V, E = 16, 24, 32, 96, 4, 8, 48, 6


def role_of(program: Program, dimensions: Dimensions, argument: int, dim: int) -> str:
    """The role of one dimension (its major part) of an argument."""
    form, classes = dimensions.forms[argument], dimensions.factor_classes[argument]
    factor = form.results[0][dim][0]
    return dimensions.groups[dimensions.class_group[classes[factor]]].role


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


def started(w: Any, x: Any) -> Any:
    """A decoder starts with a token that is a constant: nothing but weights goes into its first queries."""
    token = jnp.full((x.shape[0], 1), 2, jnp.int32)
    return block(x @ w["read"] + block(w["table"][token], w), w) @ w["table"].T


def relative(w: Any, x: Any) -> Any:
    """Attention whose queries are multiplied with learnt relative positions, too."""
    return with_positions(w, x, lambda rows: rows)


def scaled_relative(w: Any, x: Any) -> Any:
    """The positions are scaled and converted first."""
    return with_positions(w, x, lambda rows: (rows * 0.125).astype(x.dtype))


def with_positions(w: Any, x: Any, made: Callable[[Any], Any]) -> Any:
    q, k, v = ((x @ w[n]).reshape(*x.shape[:2], H, K) for n in ("q", "k", "v"))
    place = made(w["places"][jnp.arange(S)[:, None] - jnp.arange(S) + S - 1])
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) + jnp.einsum("bqhd,qkd->bhqk", q, place)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v).reshape(x.shape[0], S, H * K) @ w["o"]


def positioned(w: Any, ids: Any) -> Any:
    """Positions are learnt, one row of a table for each."""
    x = w["table"][ids] + w["places"][jnp.arange(ids.shape[1])]
    return block(x, w) @ w["table"].T


def perceiver(w: Any, x: Any) -> Any:
    """Queries are learnt, the same for each element of the batch."""
    y = jnp.broadcast_to(w["latents"], (x.shape[0], *w["latents"].shape))
    q, k, v = ((z @ w[n]).reshape(*z.shape[:2], H, K) for z, n in ((y, "q"), (x, "k"), (x, "v")))
    scores = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k))
    y = y + jnp.einsum("bhqk,bkhd->bqhd", scores, v).reshape(*y.shape[:2], H * K) @ w["o"]
    return y + jax.nn.relu(y @ w["up"]) @ w["down"]


def sampler(w: Any, key: Any) -> Any:
    """Makes pictures of noise: no input has their batch."""
    x = jax.random.normal(key, (B, D))
    return jax.lax.fori_loop(0, 8, lambda _, x: x - 0.1 * jax.nn.relu(x @ w["a"]) @ w["b"], x)


def ensemble(w: Any, x: Any) -> Any:
    """Members of an ensemble, all on the same inputs."""
    return jax.vmap(lambda a, b: jax.nn.relu(x @ a) @ b)(w["a"], w["b"])


def mixture(w: Any, x: Any) -> Any:
    """Experts that a router weighs."""
    gates = jax.nn.softmax(x @ w["router"])
    hidden = jax.nn.relu(jnp.einsum("bsd,edf->besf", x, w["up"]))
    return jnp.einsum("bse,besf,efd->bsd", gates, hidden, w["down"])


def switched(w: Any, x: Any) -> Any:
    """Gradients through a loop over layers, in which a scatter with counted indices sends gates to their experts."""

    def layer(x: Any, w: Any) -> tuple[Any, None]:
        gate, index = jax.lax.top_k(jax.nn.softmax(x @ w["router"]), 2)
        rows, columns = jnp.arange(B)[:, None, None], jnp.arange(S)[None, :, None]
        gates = jnp.zeros((B, S, E)).at[rows, columns, index].set(gate)
        hidden = jax.nn.relu(jnp.einsum("bsd,edf->bsef", x, w["up"]))
        return x + jnp.einsum("bsef,efd,bse->bsd", hidden, w["down"], gates), None

    return jax.grad(lambda w: jnp.sum(jax.lax.scan(layer, x, w)[0] ** 2))(w)


def with_capacity(w: Any, x: Any) -> Any:
    """Experts compute a fixed number of tokens each; each token is written to the next free place of its expert."""
    expert = jnp.argmax(x @ w["router"], 1)
    chosen = jax.nn.one_hot(expert, E)
    place = jnp.take_along_axis(jnp.cumsum(chosen, 0), expert[:, None], 1)[:, 0].astype(jnp.int32)
    buffer = jnp.zeros((E, S, D)).at[expert, place].add(x, mode="drop")
    out = jnp.einsum("ecf,efd->ecd", jax.nn.relu(jnp.einsum("ecd,edf->ecf", buffer, w["up"])), w["down"])
    return out.at[expert, place].get(mode="fill", fill_value=0)


def picked_tokens(w: Any, x: Any, places: Any) -> Any:
    """Each expert computes the tokens that an input names, as in decoding with a capacity."""
    x = x @ w["in"]
    hidden = jax.nn.silu(jnp.einsum("ecd,edf->ecf", x[places], w["up"]))
    return x.at[places].add(jnp.einsum("ecf,efd->ecd", hidden, w["down"]))


def picked_experts(w: Any, x: Any) -> Any:
    """Each token reads the weights of its two experts, as in decoding."""
    gate, index = jax.lax.top_k(jax.nn.softmax(x @ w["router"]), 2)
    hidden = jax.nn.relu(jnp.einsum("bd,bkdf->bkf", x, w["up"][index]))
    return jnp.einsum("bkf,bkfd,bk->bd", hidden, w["down"][index], gate)


def two_towers(w: Any, images: Any, texts: Any) -> Any:
    """Every image is compared with every text."""

    def loss(w: Any) -> Any:
        one, other = (jax.nn.relu(x @ w[f"{n}1"]) @ w[f"{n}2"] for n, x in (("image", images), ("text", texts)))
        return jnp.sum(jax.nn.log_sigmoid((one @ other.T) * (2 * jnp.eye(B) - 1)))

    return jax.grad(loss)(w)


def chains(positions: Any, x: Any, y: Any) -> Any:
    """Each chain of a sampler goes up its own gradient."""
    density = lambda position: -jnp.sum(jnp.logaddexp(0.0, -y * (x @ position)))  # noqa: E731
    return positions + 0.1 * jax.vmap(jax.grad(density))(positions)


def recurrent(w: Any, tokens: Any) -> Any:
    """A recurrence over sequences that come batch first."""
    x = w["embed"][tokens].swapaxes(0, 1)
    cell = lambda h, x: (jnp.tanh(x @ w["in"] + h @ w["hidden"]),) * 2  # noqa: E731
    return jax.lax.scan(cell, jnp.zeros((tokens.shape[0], F)), x)[1].swapaxes(0, 1) @ w["out"]


def permuted(w: Any, rollout: Any, key: Any) -> Any:
    """Gradients of one minibatch after the other, of a permuted rollout."""

    def one(w: Any, x: Any) -> tuple[Any, None]:
        gradient = jax.grad(lambda w: jnp.sum(jax.nn.relu(x @ w["a"]) @ w["b"]))(w)
        return jax.tree.map(lambda w, g: w - 0.1 * g, w, gradient), None

    return jax.lax.scan(one, w, rollout[jax.random.permutation(key, 4 * B)].reshape(4, B, D))[0]


def triangle(w: Any, pair: Any) -> Any:
    """Triangle multiplication over pairs of residues, of a batch of one protein."""
    left, right = pair @ w["left"], pair @ w["right"]
    return pair + jnp.einsum("bikc,bjkc->bijc", left, right) @ w["out"]


def adversaries(w: Any, noise: Any, real: Any) -> Any:
    """What one network tells of pictures, and of those that another makes of as much noise."""

    def told(x: Any) -> Any:
        return (jax.nn.relu(x @ w["in"]) @ w["out"]).mean()

    made = jax.nn.relu(jax.nn.relu(noise @ w["wide"]) @ w["wider"]) @ w["picture"]
    return told(made) - told(real)


def spectral(w: Any, fields: Any) -> Any:
    """Several steps of a spectral model: fields go to a grid and back by constant matrices, with weights between."""
    to_grid = jnp.asarray(np.random.default_rng(0).normal(size=(3, S, V)), jnp.float32)

    def step(x: Any, _: Any) -> Any:
        grid = jnp.einsum("mkj,blmk->blmj", to_grid, x)
        grid = jnp.einsum("lf,blmj->bfmj", w["in"], grid)
        return x + jnp.einsum("fl,mkj,bfmj->blmk", w["out"], to_grid, jax.nn.relu(grid)), None

    return jax.lax.scan(step, fields, length=3)[0]


def spectral_step(w: Any, fields: Any, target: Any) -> Any:
    """A step of its training."""
    found, slopes = jax.value_and_grad(lambda w: jnp.mean((spectral(w, fields) - target) ** 2))(w)
    return jax.tree.map(lambda a, b: a - b, w, slopes), found


SPECTRAL = {"in": arg(D, F), "out": arg(F, D)}
DIFFUSION = {
    "patch": arg(12, D), "time": arg(20, D), "modulate": arg(D, D), "layers": [BLOCK, BLOCK], "out": arg(D, 12)
}  # fmt: skip

# name -> function, arguments, {(argument, dimension): role}. Arguments are leaves, in order; dictionaries are sorted by
# key.
PROGRAMS: dict[str, tuple[Callable[..., Any], tuple[Any, ...], dict[tuple[int, int], str]]] = {
    "diffusion transformer": (
        diffusion, (DIFFUSION, arg(B, S, 12), arg(B, 20)),
        {(0, 0): "ff", (0, 1): "embed", (3, 0): "embed", (1, 1): "heads", (16, 0): "batch", (16, 1): "seq",
         (17, 0): "batch"},
    ),
    "a spectral model": (spectral, (SPECTRAL, arg(B, D, 3, S)), {(2, 0): "batch", (2, 3): ""}),
    "a spectral model's training": (
        spectral_step, (SPECTRAL, *[arg(B, D, 3, S)] * 2), {(2, 0): "batch", (2, 3): "", (3, 0): "batch"},
    ),
    "adversaries": (
        adversaries,
        ({"in": arg(D, F), "out": arg(F, 1), "picture": arg(F, D), "wide": arg(20, F), "wider": arg(F, F)},
         arg(B, 20), arg(B, D)),
        {(5, 0): "batch", (6, 0): "batch"},
    ),
    "ensemble": (ensemble, ({"a": arg(E, D, F), "b": arg(E, F, D)}, arg(B, D)), {(0, 0): "ensemble", (2, 0): "batch"}),
    "mixture": (
        mixture, ({"down": arg(E, F, D), "router": arg(D, E), "up": arg(E, D, F)}, arg(B, S, D)),
        {(0, 0): "experts", (1, 1): "experts", (0, 1): "ff"},
    ),
    "a mixture in a loop": (
        switched, ({"down": arg(3, E, F, D), "router": arg(3, D, E), "up": arg(3, E, D, F)}, arg(B, S, D)),
        {(0, 1): "experts", (2, 1): "experts", (3, 0): "batch"},
    ),
    "a mixture with capacity": (
        with_capacity, ({"down": arg(E, F, D), "router": arg(D, E), "up": arg(E, D, F)}, arg(B, D)),
        {(0, 0): "experts", (2, 0): "experts", (2, 2): "ff"},
    ),
    "a mixture that decodes": (
        picked_tokens,
        ({"down": arg(E, F, D), "in": arg(D, D), "up": arg(E, D, F)}, arg(B, D), arg(E, 4, dtype=jnp.int32)),
        {(0, 0): "experts", (2, 0): "experts", (3, 0): "batch", (4, 0): "experts"},
    ),
    "experts that pick rows of the weights": (
        picked_experts, ({"down": arg(E, F, D), "router": arg(D, E), "up": arg(E, D, F)}, arg(B, D)),
        {(0, 0): "experts", (2, 0): "experts", (3, 0): "batch"},
    ),
    "two towers": (
        two_towers,
        ({"image1": arg(12, F), "image2": arg(F, D), "text1": arg(20, F), "text2": arg(F, D)}, arg(B, 12), arg(B, 20)),
        {(4, 0): "batch", (5, 0): "batch"},
    ),
    "chains": (chains, (arg(B, D), arg(V, D), arg(V)), {(0, 0): "batch"}),
    "a recurrence, batch first": (
        recurrent,
        ({"embed": arg(V, D), "hidden": arg(F, F), "in": arg(D, F), "out": arg(F, V)}, arg(B, S, dtype=jnp.int32)),
        {(4, 0): "batch", (4, 1): "seq"},
    ),
    "a decoder's first step": (
        started, ({**BLOCK, "read": arg(12, D), "table": arg(V, D)}, arg(B, S, 12)),
        {(8, 0): "batch", (8, 1): "seq", (3, 1): "heads", (5, 0): "vocab"},
    ),
    "learnt positions": (
        positioned, ({**BLOCK, "places": arg(2 * V, D), "table": arg(V, D)}, arg(B, S, dtype=jnp.int32)),
        {(3, 0): "positions", (5, 0): "vocab", (8, 0): "batch"},
    ),
    "relative positions": (
        relative, ({**{n: BLOCK[n] for n in "qkvo"}, "places": arg(2 * S - 1, K)}, arg(B, S, D)),
        {(5, 0): "batch", (5, 1): "seq", (4, 1): "heads", (2, 0): "positions"},
    ),
    "relative positions in bf16": (
        scaled_relative,
        ({**{n: arg(*BLOCK[n].shape, dtype=jnp.bfloat16) for n in "qkvo"}, "places": arg(2 * S - 1, K)},
         arg(B, S, D, dtype=jnp.bfloat16)),
        {(5, 0): "batch", (5, 1): "seq", (4, 1): "heads", (2, 0): "positions"},
    ),
    "a perceiver": (
        perceiver, ({**BLOCK, "latents": arg(20, D)}, arg(B, S, D)), {(7, 0): "batch", (7, 1): "seq", (4, 1): "heads"},
    ),
    "a sampler": (
        sampler, ({"a": arg(D, F), "b": arg(F, D)}, arg(2, dtype=jnp.uint32)), {(0, 1): "ff", (1, 0): "ff"},
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


def several_steps(w: Any, x: Any, y: Any) -> Any:
    """Several steps of training in one program: each carries the weights to the next."""

    def loss(w: Any, x: Any, y: Any) -> Any:
        return jnp.mean((jax.nn.relu(block(x, w)) - y) ** 2)

    def step(w: Any, batch: Any) -> Any:
        found, slopes = jax.value_and_grad(loss)(w, *batch)
        return jax.tree.map(lambda a, b: a - b, w, slopes), found

    return jax.lax.scan(step, w, (x, y))


def several_epochs(w: Any, x: Any, y: Any) -> Any:
    """A loop over epochs around the loop over steps, with the weights converted in front of both."""
    run = jax.tree.map(lambda a: a.astype(jnp.bfloat16), w)
    run, found = jax.lax.scan(lambda w, _: several_steps(w, x, y), run, length=3)
    return jax.tree.map(lambda a: a.astype(jnp.float32), run), found


@pytest.mark.parametrize(("run", "dtype"), [(several_steps, jnp.float32), (several_epochs, jnp.bfloat16)])
def test_a_loop_over_training_steps_hides_no_weights(run: Callable[..., Any], dtype: Any) -> None:
    """What the loop carries for a weight is that weight, so Megatron splits heads and hidden units."""
    program = program_of(run, BLOCK, arg(5, B, S, D, dtype=dtype), arg(5, B, S, D, dtype=dtype), donate=(0,))
    dimensions = analyse(program)
    down, query, up, x = 0, 3, 4, 6
    assert role_of(program, dimensions, down, 0) == role_of(program, dimensions, up, 1) == "ff"
    assert role_of(program, dimensions, query, 1) == "heads"
    assert role_of(program, dimensions, query, 0) == "embed"
    assert role_of(program, dimensions, x, 1) == "batch"


def test_megatron_splits_no_table_of_positions() -> None:
    """Each device would look for all rows among its own, and devices would add up what they find."""
    run, shapes, _ = PROGRAMS["learnt positions"]
    program = program_of(run, *shapes)
    problem = make_problem(program, analyse(program), load_spec("v5e-16").mesh())
    plan = strategies(problem)["fsdp x megatron"]
    split = {problem.dimensions.groups[one.group].role for one in plan if isinstance(one, Shard)}
    assert "vocab" in split
    assert "positions" not in split


def test_what_is_made_of_noise_has_a_batch() -> None:
    run, shapes, _ = PROGRAMS["a sampler"]
    assert [group.role for group in analyse(program_of(run, *shapes)).groups].count("batch") == 1


def test_minibatches_of_what_is_permuted_are_the_batch() -> None:
    program = program_of(permuted, {"a": arg(D, F), "b": arg(F, 1)}, arg(4 * B, D), arg(2, dtype=jnp.uint32))
    assert [group.size for group in analyse(program).groups if group.role == "batch"] == [B]


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


def equinox_step(everything: Any) -> Any:
    """Each layer is a weight times a vector, mapped over the batch, and all is one argument, as Equinox has it."""
    w, x = everything["first"], everything["rest"]
    gradients = jax.grad(lambda w: jnp.sum(jax.vmap(lambda x: w["b"] @ jax.nn.relu(w["a"] @ x))(x)))(w)
    return jax.tree.map(lambda w, g: w - 0.1 * g, w, gradients)


def masked(x: Any, mask: Any, w: Any) -> Any:
    """A mask of pairs is a product of the mask of elements with itself."""
    pairs = jnp.einsum("bi,bj->bij", mask, mask)
    loss = jax.grad(lambda w: jnp.sum((x @ w["a"] @ w["b"]) * pairs[..., None].sum(1)))
    return jax.tree.map(lambda w, g: w - 0.1 * g, w, loss(w))


def framed(batch: Any, w: Any) -> Any:
    """Frames of reference are multiplied with differences of positions: with no weight, and no argument."""
    positions, frames = batch["positions"], batch["frames"]
    apart = jnp.einsum("bij,bnmj->bnmi", frames, positions[:, None] - positions[:, :, None])
    loss = jax.grad(lambda w: jnp.sum((batch["x"] @ w["a"] @ w["b"]) * apart.sum((2, 3))[..., None]))
    return jax.tree.map(lambda w, g: w - 0.1 * g, w, loss(w))


def beams(cache: Any, tokens: Any, w: Any) -> Any:
    """Each trip adds a row to the cache and picks those of the best; weights, tokens and cache are of one type."""

    def trip(i: Any, carried: Any) -> Any:
        cache, x = carried
        x = jnp.tanh(x @ w["a"]) @ w["b"]
        cache = jnp.take(cache.at[i].set(x[0]), jnp.argsort(x[:, 0]), 0)
        return cache, x + cache.sum(0)

    return jax.lax.fori_loop(0, 4, trip, (cache, tokens))


def reporting(x: Any, w: Any, m: Any) -> Any:
    """The loss, and the norms of new weights and new moments."""
    loss, gradients = jax.value_and_grad(lambda w: jnp.sum(jax.nn.relu(x @ w["a"]) @ w["b"]))(w)
    m = jax.tree.map(lambda m, g: 0.9 * m + g, m, gradients)
    w = jax.tree.map(lambda w, m: w - 0.1 * m, w, m)
    return w, m, loss, [sum(jnp.sum(a * a) for a in jax.tree.leaves(tree)) for tree in (w, m)]


def reporting_of_many(x: Any, w: Any, m: Any) -> Any:
    """The same for many steps in one program, each on a batch of its own."""

    def one(carried: Any, x: Any) -> Any:
        w, m, *metrics = reporting(x, *carried)
        return (w, m), metrics

    (w, m), metrics = jax.lax.scan(one, (w, m), x)
    return w, m, metrics


def with_unread_weight(x: Any, w: Any, m: Any) -> Any:
    """Nothing reads the weight "a"; its moments decay, and are subtracted from it all the same."""
    loss, gradients = jax.value_and_grad(lambda w: jnp.sum(x @ w["b"].T))(w)
    m = jax.tree.map(lambda m, g: 0.9 * m + g, m, gradients)
    return jax.tree.map(lambda w, m: w - 0.1 * m, w, m), m, loss


def adapted(x: Any, base: Any, low: Any) -> Any:
    """Products of low rank are trained; what they are added to is not."""
    loss = lambda low: jnp.sum(jax.nn.relu(x @ (base["a"] + low[0] @ low[1])) @ base["b"])  # noqa: E731
    return jax.tree.map(lambda w, g: w - 0.1 * g, low, jax.grad(loss)(low))


def replayed(buffer: Any, key: Any, w: Any) -> Any:
    """The batch is made of rows that are picked at random."""
    return step(buffer[jax.random.randint(key, (B,), 0, V)], w)


def bonded(batch: Any, w: Any) -> Any:
    """A matrix of its own for each element of a batch is multiplied with what depends on data."""
    loss = lambda w: jnp.sum(batch["bonds"] @ jax.nn.relu(batch["atoms"] @ w["a"]) @ w["b"])  # noqa: E731
    return jax.tree.map(lambda w, g: w - 0.1 * g, w, jax.grad(loss)(w))


def neighbours(points: Any, w: Any) -> Any:
    """Each point reads the points that are nearest to it."""
    nearest = jax.lax.top_k(jnp.einsum("bnd,bmd->bnm", points, points), 3)[1]
    return step(jax.vmap(lambda x, i: x[i])(points, nearest).max(2), w)


def unrolled_in_time(w: Any, x: Any, y: Any) -> Any:
    """A scan over time inside the loss reads the batch by its counter; its results are the loops' carries."""

    def loss(w: Any) -> Any:
        row = lambda _, t: (None, jnp.tanh(x[:, t] @ w["a"]) @ w["b"])  # noqa: E731
        out = jax.lax.scan(row, None, jnp.arange(S))[1]
        return jnp.mean((out.transpose(1, 0, 2) - y) ** 2)

    return jax.tree.map(lambda w, g: w - 0.1 * g, w, jax.grad(loss)(w))


def interpolated(w: Any, x: Any, y: Any) -> Any:
    """Constant indices pick times of a batch."""
    loss = lambda w: jnp.mean((jnp.tanh(x[:, np.arange(0, S, 2)] @ w["a"]) @ w["b"] - y) ** 2)  # noqa: E731
    return jax.tree.map(lambda w, g: w - 0.1 * g, w, jax.grad(loss)(w))


W = {"a": arg(D, F), "b": arg(F, D)}
ARGUMENTS: list[tuple[str, Callable[..., Any], tuple[Any, ...], tuple[int, ...], list[str]]] = [
    ("a step that donates nothing", step, (arg(B, D), W), (), [INPUTS, WEIGHTS, WEIGHTS]),
    ("weights stand in front of what they multiply", equinox_step,
     ({"first": {"a": arg(F, D), "b": arg(D, F)}, "rest": arg(B, D)},), (), [WEIGHTS, WEIGHTS, INPUTS]),
    ("a step that donates", step, (arg(B, D), W), (1,), [INPUTS, WEIGHTS, WEIGHTS]),
    ("momentum, nothing donated", momentum, (arg(B, D), W, W), (), [INPUTS, WEIGHTS, WEIGHTS, STATE, STATE]),
    ("inference", lambda x, w: jax.nn.relu(x @ w["a"]) @ w["b"], (arg(B, D), W), (), [INPUTS, WEIGHTS, WEIGHTS]),
    ("residual inference", lambda x, w: x + jax.nn.relu(x @ w["a"]) @ w["b"], (arg(B, D), W), (),
     [INPUTS, WEIGHTS, WEIGHTS]),
    ("one weight", lambda x, w: x + x @ w, (arg(D, D), arg(D, D)), (), [INPUTS, WEIGHTS]),
    ("normed inference", lambda x, w: x + (x / jnp.sum(x)) @ w, (arg(D, D), arg(D, D)), (), [INPUTS, WEIGHTS]),
    ("a mask of pairs", masked, (arg(B, S, D), arg(B, S), W), (2,), [INPUTS, INPUTS, WEIGHTS, WEIGHTS]),
    ("frames among a batch", framed,
     ({"frames": arg(B, 3, 3), "positions": arg(B, S, 3), "x": arg(B, S, D)}, W), (1,),
     [INPUTS, INPUTS, INPUTS, WEIGHTS, WEIGHTS]),
    ("a cache whose rows are picked", beams, (arg(B, D), arg(B, D), W), (0,), [STATE, INPUTS, WEIGHTS, WEIGHTS]),
    ("norms among the metrics", reporting, (arg(B, D), W, W), (1, 2), [INPUTS, WEIGHTS, WEIGHTS, STATE, STATE]),
    ("norms of many steps", reporting_of_many, (arg(4, B, D), W, W), (1, 2), [INPUTS, WEIGHTS, WEIGHTS, STATE, STATE]),
    ("an unread weight", with_unread_weight, (arg(B, D), W, W), (1, 2), [INPUTS, WEIGHTS, WEIGHTS, STATE, STATE]),
    ("adapters", adapted, (arg(B, D), W, [arg(D, 2), arg(2, F)]), (2,), [INPUTS, *[WEIGHTS] * 4]),
    ("a replay buffer", replayed, (arg(V, D), arg(2, dtype=jnp.uint32), W), (2,), [INPUTS, INPUTS, WEIGHTS, WEIGHTS]),
    ("a graph's bonds", bonded, ({"atoms": arg(B, S, D), "bonds": arg(B, S, S)}, W), (1,),
     [INPUTS, INPUTS, WEIGHTS, WEIGHTS]),
    ("nearest neighbours", neighbours, (arg(B, S, D), W), (1,), [INPUTS, WEIGHTS, WEIGHTS]),
    ("a batch read in a scan", unrolled_in_time, (W, arg(B, S, D), arg(B, S, D)), (0,),
     [WEIGHTS, WEIGHTS, INPUTS, INPUTS]),
    ("a batch at constant times", interpolated, (W, arg(B, S, D), arg(B, S // 2, D)), (0,),
     [WEIGHTS, WEIGHTS, INPUTS, INPUTS]),
    ("fields of a spectral model", spectral, (SPECTRAL, arg(B, D, 3, S)), (), [WEIGHTS, WEIGHTS, INPUTS]),
    ("weights of noise", sampler, ({"a": arg(D, F), "b": arg(F, D)}, arg(2, dtype=jnp.uint32)), (),
     [WEIGHTS, WEIGHTS, INPUTS]),
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


# ---------------------------------------------------------------- one state argument


class TrainState(NamedTuple):
    """As Flax and Optax lay training state out."""

    step: Any
    params: Any
    opt_state: Any


def adam(loss: Callable[..., Any], params: Any, opt_state: Any, *data: Any) -> tuple[Any, Any, Any]:
    """One step of Adam, moments decayed and debiased."""
    value, gradients = jax.value_and_grad(loss)(params, *data)
    count = opt_state["count"] + 1
    mu = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, opt_state["mu"], gradients)
    nu = jax.tree.map(lambda n, g: 0.99 * n + 0.01 * g * g, opt_state["nu"], gradients)
    scale = 1.0 / (1.0 - 0.9 ** count.astype(jnp.float32))
    params = jax.tree.map(lambda p, m, n: p - 1e-3 * m * scale / (jnp.sqrt(n) + 1e-8), params, mu, nu)
    return params, {"count": count, "mu": mu, "nu": nu}, value


def perceptron_loss(p: Any, x: Any, y: Any) -> Any:
    for layer in p["layers"]:
        x = jax.nn.relu(x @ layer["w"] + layer["b"])
    logits = x @ p["head"]
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), y[:, None], axis=1))


def recurrent_loss(p: Any, tokens: Any) -> Any:
    """An LSTM whose gates are separate weights, concatenated where they are used."""
    x = p["embed"][tokens]
    kernel = jnp.concatenate([p["cell"][g] for g in "ifgo"], axis=1)
    recurrent = jnp.concatenate([p["hidden"][g] for g in "ifgo"], axis=1)

    def cell(carry: Any, inputs: Any) -> tuple[Any, Any]:
        c, h = carry
        i, f, g, o = jnp.split(inputs @ kernel + h @ recurrent + p["bias"], 4, axis=-1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (c, h), h

    start = jnp.zeros((x.shape[0], F))
    _, hidden = jax.lax.scan(cell, (start, start), x[:, :-1].swapaxes(0, 1))
    logits = jax.nn.log_softmax(hidden @ p["head"])
    return -jnp.mean(jnp.take_along_axis(logits, tokens[:, 1:].swapaxes(0, 1)[..., None], axis=-1))


PERCEPTRON = {"layers": [{"w": arg(D, D), "b": arg(D)} for _ in range(3)], "head": arg(D, 10)}
RECURRENT = {
    "embed": arg(V, D),
    "cell": {g: arg(D, F) for g in "ifgo"},
    "hidden": {g: arg(F, F) for g in "ifgo"},
    "bias": arg(4 * F),
    "head": arg(F, V),
}
STEPS: dict[str, tuple[Callable[..., Any], Any, tuple[Any, ...]]] = {
    "perceptron": (perceptron_loss, PERCEPTRON, (arg(64, D), arg(64, dtype=jnp.int32))),
    "recurrent": (recurrent_loss, RECURRENT, (arg(64, S, dtype=jnp.int32),)),
}


def separate(name: str) -> Source:
    loss, params, data = STEPS[name]
    opt_state = {"count": arg(dtype=jnp.int32), "mu": params, "nu": params}
    return source_of(functools.partial(adam, loss), params, opt_state, *data, donate=(0, 1))


def in_one(name: str, layout: str) -> Source:
    """The same step with all that is carried in one argument."""
    loss, params, data = STEPS[name]
    opt_state = {"count": arg(dtype=jnp.int32), "mu": params, "nu": params}

    def train(state: TrainState, *data: Any) -> tuple[TrainState, Any]:
        params, opt_state, value = adam(loss, state.params, state.opt_state, *data)
        return TrainState(state.step + 1, params, opt_state), value

    def tree(state: Any, *data: Any) -> tuple[Any, Any]:
        params, opt_state, value = adam(loss, state["params"], state["opt_state"], *data)
        return {"params": params, "opt_state": opt_state}, value

    def each(state: Any, *data: Any) -> tuple[Any, Any]:
        """Every weight beside its moments."""
        take = lambda k: jax.tree.map(lambda w: w[k], state["weights"], is_leaf=lambda w: isinstance(w, tuple))  # noqa: E731
        opt_state = {"count": state["count"], "mu": take(1), "nu": take(2)}
        params, opt_state, value = adam(loss, take(0), opt_state, *data)
        weights = jax.tree.map(lambda *w: w, params, opt_state["mu"], opt_state["nu"])
        return {"count": opt_state["count"], "weights": weights}, value

    layouts: dict[str, tuple[Any, Any]] = {
        "train state": (train, TrainState(arg(dtype=jnp.int32), params, opt_state)),
        "tree": (tree, {"params": params, "opt_state": opt_state}),
        "each weight": (each, {"count": opt_state["count"], "weights": jax.tree.map(lambda w: (w, w, w), params)}),
    }
    step, state = layouts[layout]
    return source_of(step, state, *data, donate=() if layout == "tree" else (0,))


MESH = load_spec("v4-32").mesh({"data": 8, "model": 2}, None)


def looks(source: Source) -> tuple[dict[tuple[str, int], int], dict[str, int], set[str]]:
    """(groups by name and size, arguments by role, strategies that apply): what does not depend on the order of
    arguments.
    """
    dimensions = analyse(source.program)
    problem = make_problem(source.program, dimensions, MESH)
    groups = Counter((group.role, group.size) for group in dimensions.groups if group.size > 1)
    roles = Counter(problem.roles[r] for k, r in enumerate(problem.argument_role) if source.program.values[k].shape)
    return groups, roles, set(strategies(problem))


@pytest.mark.parametrize(
    ("name", "layout"), [("perceptron", "tree"), ("perceptron", "train state"), ("recurrent", "each weight")]
)
def test_one_state_argument_is_seen_like_separate_ones(name: str, layout: str) -> None:
    apart, together = looks(separate(name)), looks(in_one(name, layout))
    assert together == apart
    groups, roles, found = apart
    assert {"batch", "ff"} <= {role for role, _ in groups}
    assert set(roles) == {WEIGHTS, STATE, INPUTS}
    assert roles[STATE] == 2 * roles[WEIGHTS]
    assert {"data-parallel", "fsdp", "megatron"} <= found


@pytest.mark.parametrize("layout", ["train state", "tree"])
def test_one_state_argument_gets_the_plan_of_separate_ones(layout: str) -> None:
    plans = []
    for source in (separate("perceptron"), in_one("perceptron", layout)):
        evaluator = Evaluator(make_problem(source.program, analyse(source.program), MESH))
        result = run_search(evaluator, Settings(evaluations=60))
        plans.append((summary(evaluator.problem, result.plan), result.cost.step_seconds))
    assert plans[0][0] == plans[1][0]
    assert plans[0][1] == pytest.approx(plans[1][1], rel=0.05)  # a train state counts its steps, too


def test_the_batch_of_a_recurrence_is_a_batch() -> None:
    program = separate("recurrent").program
    dimensions = analyse(program)
    tokens = len(program.arguments) - 1
    assert [role_of(program, dimensions, tokens, dim) for dim in (0, 1)] == ["batch", "seq"]


# ---------------------------------------------------------------- names people see


def test_the_summary_of_a_solver_says_what_is_split() -> None:
    """A program that only updates its state computes nothing else to speak of."""
    problem = make_problem(program := program_of(relaxed, arg(16, 64), donate=(0,)), analyse(program), MESH)
    groups = [problem.dimensions.class_group[c] for c in problem.dimensions.factor_classes[0]]
    assert summary(problem, (Shard(groups[0], 0),)) == "data (8): tensor-parallel (x.0); model (2): not used"


def relaxed(x: Any) -> tuple[Any, Any]:
    x = jax.lax.fori_loop(0, 5, lambda _, x: x + 0.1 * (jnp.roll(x, 1, 1) - x), x)
    return x, jnp.max(jnp.abs(x))


def names_of(program: Program) -> dict[tuple[str, int], str]:
    """(argument path, dimension) -> the name of its group."""
    dimensions = analyse(program)
    found = {}
    for k, argument in enumerate(program.arguments):
        for dim, factors in enumerate(dimensions.forms[k].results[0]):
            found[argument.path, dim] = dimensions.groups[
                dimensions.class_group[dimensions.factor_classes[k][factors[0]]]
            ].name
    return found


class Box(NamedTuple):
    """A field that wraps an array, as NNX has it."""

    value: Any


def towers(state: Any, x: Any, y: Any) -> Any:
    """Two perceptrons on inputs of their own: what their first layers sum over has no role."""
    out = jax.nn.relu(x @ state["left"]["kernel"].value) @ state["left"]["out"][0].value
    return out, jax.nn.relu(y @ state["right"]["kernel"].value) @ state["right"]["out"][0].value


def test_groups_without_a_role_are_named_after_array_and_place() -> None:
    state = {k: {"kernel": Box(arg(n, F)), "out": [Box(arg(F, 5))]} for k, n in (("left", 12), ("right", 14))}
    names = names_of(program_of(towers, state, arg(B, 12), arg(B, 14)))
    assert names["state['left']['kernel'].value", 0] == "left.kernel.0"
    assert names["state['right']['kernel'].value", 0] == "right.kernel.0"
    assert names["state['left']['out'][0].value", 1] == "left.out_0.1"


def test_names_the_user_wrote_are_taken_over() -> None:
    spec = jax.sharding.PartitionSpec
    tree = {"layers": [{"w": spec("pixels", "mlp"), "b": spec("mlp")}], "head": spec(None, ("kinds", "of"))}
    options = logical_names(tree)
    assert options == ("head=,kinds+of", "layers/0/b=mlp", "layers/0/w=pixels,mlp")
    names = names_of(with_dimension_names(separate("perceptron").program, options))
    assert names["params['layers'][0]['w']", 0] == "pixels"
    assert names["params['layers'][0]['w']", 1] == names["params['layers'][1]['w']", 0] == "mlp"
    assert names["params['head']", 0] == "ff"
    assert names["params['head']", 1] == "kinds+of"


@pytest.mark.parametrize(
    ("option", "told"),
    [
        ("nothing", "cannot read 'nothing'"),
        ("*absent*=embed", "no argument matches '*absent*'"),
        ("head=a,b,c", "names 3 dimensions but matches params/head with 2"),
    ],
)
def test_names_that_cannot_be_taken_over_are_refused(option: str, told: str) -> None:
    with pytest.raises(UsageError, match=re.escape(told)):
        with_dimension_names(separate("perceptron").program, (option,))


def test_axes_that_a_program_states_name_what_nothing_else_names() -> None:
    mesh = jax.make_mesh((1, 1), ("rows", "columns"), devices=jax.devices()[:1])
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("rows", "columns"))
    run = jax.jit(lambda w, v, x: jax.nn.relu(x @ w) @ v, in_shardings=(sharding, None, None))
    text = run.lower(arg(12, F), arg(F, 5), arg(B, 12)).as_text(debug_info=True)
    names = names_of(load("<text>", content=text.encode()).program)
    assert names["w", 0] == names["x", 1] == "rows"
    assert names["w", 1] == "ff"


def test_the_command_takes_names(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    program = str(ROOT / "sample_models" / "mlp_tiny.mlir")
    words = ["partition", program, "--mesh", "v4-32", "--strategy", "fsdp:data", "--quiet", "--json", str(report)]
    assert main([*words, "--names", "params*['w']=pixels,hidden"]) == 0
    groups = {group["name"] for group in json.loads(report.read_text())["analysis"]["group_list"]}
    assert {"pixels", "hidden"} & groups
    assert main([*words, "--names", "nothing=a"]) == 2
