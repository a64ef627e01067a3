"""Notes of a report on what a program leaves out: donated arguments, names and source lines."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from programs import arg, program_of
from ragged_programs import program as ragged_program

from toast_cli.frontend import load
from toast_cli.pipeline import partition
from toast_cli.program.roles import carried_results, undonated
from toast_cli.request import Request

N, D, F = 256, 512, 1024
PARAMS = {"down": arg(F, D), "up": arg(D, F)}
MOMENTS = {"down": arg(F, D), "up": arg(D, F)}


def train(params: Any, moments: Any, x: Any) -> Any:
    def loss(p: Any) -> Any:
        return jnp.mean((jax.nn.relu(x @ p["up"]) @ p["down"]) ** 2)

    gradients = jax.grad(loss)(params)
    moments = jax.tree.map(lambda m, g: 0.9 * m + g, moments, gradients)
    return jax.tree.map(lambda w, m: w - 0.1 * m, params, moments), moments


def decode(weights: Any, cache: Any, token: Any, position: Any) -> Any:
    query, key = jnp.split(token @ weights, 2, axis=1)
    cache = jax.lax.dynamic_update_slice(cache, key[:, None], (0, position, 0))
    scores = jax.nn.softmax(jnp.einsum("bd,btd->bt", query, cache))
    return jnp.einsum("bt,btd->bd", scores, cache), cache


def forward(params: Any, x: Any) -> Any:
    """Its result has the type of its input, and does not replace it."""
    return x + jax.nn.relu(x @ params["up"]) @ params["down"]


DECODING = (arg(D, 2 * D), arg(8, 64, D), arg(8, D), arg(dtype=jnp.int32))
# program, its arguments, what is donated -> arguments whose memory a result could take
STEPS: dict[str, tuple[Any, tuple[Any, ...], tuple[int, ...], list[str]]] = {
    "nothing donated": (
        train, (PARAMS, MOMENTS, arg(N, D)), (),
        ["params['down']", "params['up']", "moments['down']", "moments['up']"],
    ),
    "something donated": (train, (PARAMS, MOMENTS, arg(N, D)), (0,), []),
    "a cache": (decode, DECODING, (), ["cache"]),
    "a cache that is donated": (decode, DECODING, (1,), []),
    "a forward pass": (forward, (PARAMS, arg(N, D)), (), []),
}  # fmt: skip


@pytest.mark.parametrize("name", STEPS)
def test_arguments_that_could_be_donated(name: str) -> None:
    function, shapes, donated, expected = STEPS[name]
    program = program_of(function, *shapes, donate=donated)
    assert [program.arguments[n].path for n in undonated(program)] == expected


def notes_of(tmp_path: Path, *, debug_info: bool, donate: tuple[int, ...]) -> list[str]:
    lowered = jax.jit(train, donate_argnums=donate).lower(PARAMS, MOMENTS, arg(N, D))
    path = tmp_path / "step.mlir"
    path.write_text(lowered.as_text(debug_info=debug_info))
    request = Request(str(path), "h100-8", mesh_shape="data=8", strategy="fsdp:data")
    return partition(request).report.analysis.notes


def test_an_undonated_step_is_told_what_donation_saves(tmp_path: Path) -> None:
    # Four arrays of 1024 x 512 x 4 B = 2 MiB, an eighth of each on a device: 1 MiB.
    assert notes_of(tmp_path, debug_info=True, donate=()) == [
        "nothing is donated, though results replace params, moments: with jax.jit(…, donate_argnums=…) they share "
        "memory, which saves up to 1.00 MiB on each device"
    ]
    assert notes_of(tmp_path, debug_info=True, donate=(0, 1)) == []


def test_a_program_without_names_is_told_how_to_have_them(tmp_path: Path) -> None:
    undonated_note, names = notes_of(tmp_path, debug_info=False, donate=())
    assert "results replace 4 arguments" in undonated_note
    assert names == "arguments have no names and ops no source lines: lowered.as_text(debug_info=True) writes them"


def test_results_without_names_replace_arguments_in_order() -> None:
    """Else a plan could leave new weights elsewhere than the old ones, and the next step would move them."""

    def step(w: jax.Array, m: jax.Array, v: jax.Array, x: jax.Array) -> tuple[jax.Array, ...]:
        g = x.T @ jnp.tanh(x @ w)
        m, v = 0.9 * m + g, 0.9 * v + g * g
        return w - m / jnp.sqrt(v), m, v, jnp.sum(g)

    program = program_of(step, arg(64, 64), arg(64, 64), arg(64, 64), arg(32, 64))
    nameless = replace(
        program,
        arguments=tuple(replace(argument, path="") for argument in program.arguments),
        results=tuple(replace(result, path="") for result in program.results),
    )
    assert carried_results(nameless) == (0, 1, 2, -1)
    assert undonated(nameless) == [0, 1, 2]


@pytest.mark.parametrize("debug_info", [True, False])
def test_donated_arguments_are_tied_to_the_results_that_update_them(tmp_path: Path, debug_info: bool) -> None:
    """`jax.buffer_donor` names no result: JAX writes it where arguments have a sharding and results do not yet."""
    lowered = jax.jit(train, donate_argnums=(0, 1)).lower(PARAMS, MOMENTS, arg(N, D))
    text = lowered.as_text(debug_info=debug_info)
    path = tmp_path / "step.mlir"
    path.write_text(re.sub(r"tf.aliasing_output = \d+ : i32", "jax.buffer_donor = true", text))
    assert [argument.aliased_result for argument in load(str(path)).program.arguments] == [0, 1, 2, 3, -1]


# A ragged product, a chip, and whether its compiler multiplies all rows for each group.
GROUPED = [("rows", "v5e-8", False), ("contracted", "v5e-8", True), ("rows", "h100-8", True)]


@pytest.mark.parametrize(("name", "mesh", "masked"), GROUPED)
def test_what_a_kernel_of_grouped_products_would_take_is_said(name: str, mesh: str, masked: bool) -> None:
    text = f"module {{ {ragged_program(name)} }}"
    found = partition(Request("ragged.mlir", mesh, content=text.encode(), iterations=1)).report.analysis.notes
    assert any("a kernel of grouped products, such as Pallas' megablox, would take" in note for note in found) == masked


@pytest.mark.parametrize(("batch", "is_small"), [(32, True), (65_536, False)])
def test_a_program_too_small_to_gain_is_told_so(batch: int, is_small: bool) -> None:
    lowered = jax.jit(train, donate_argnums=(0, 1)).lower(
        *({"down": arg(64, 32), "up": arg(32, 64)},) * 2, arg(batch, 32)
    )
    report = partition(Request("m.mlir", "v4-32", iterations=30, content=lowered.as_text().encode())).report
    said = [note for note in report.analysis.notes if note.startswith("too small to gain from 16 devices: ")]
    assert len(said) == is_small == (report.plan.decisions == [])
    for note in said:
        assert re.search(r"at least [\d.]+× the work .* --strategy [\w -]+ shows it all the same", note)
        assert not any("is not used" in other for other in report.analysis.notes)
