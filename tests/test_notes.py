"""Notes of a report: donated arguments, names, source lines, sizes that no mesh axis divides, tokens per second."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from programs import arg, problem_of, program_of, round_mesh, sample, source_of
from ragged_programs import program as ragged_program

from toast_cli.dimensions import analyse
from toast_cli.frontend import load
from toast_cli.pipeline import partition
from toast_cli.plan.problem import Problem, make_problem
from toast_cli.program.roles import carried_results, undonated
from toast_cli.report.build import _positions_written, padded_size, padding_advice, tokens_of
from toast_cli.report.style import make_console, render
from toast_cli.report.terminal import prediction
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


# -- two remarks of a report: sizes that no mesh axis divides, and tokens per second


LENGTH, EMBED = 8, 64
GPT_2 = "vocab (50,257) divides by no mesh axis and stays whole; pad it to 50,304 to shard it"


def language_model(table: jax.Array, up: jax.Array, tokens: jax.Array, targets: jax.Array) -> jax.Array:
    logits = jnp.tanh(table[tokens] @ up) @ table.T
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], -1).mean()


def problem(vocab: int, batch: int, data: int, model: int) -> Problem:
    ids = arg(batch, LENGTH, dtype=jnp.int32)
    source = source_of(jax.grad(language_model), arg(vocab, EMBED), arg(EMBED, EMBED), ids, ids)
    return make_problem(source.program, analyse(source.program), round_mesh(data=data, model=model))


# vocab, batch, data, model -> what is advised
ADVICE: list[tuple[tuple[int, int, int, int], list[str]]] = [
    ((50257, 16, 4, 2), [GPT_2]),
    ((50257, 24, 4, 3), ["vocab (50,257) divides by no mesh axis and stays whole; pad it to 50,304 to shard it"]),
    ((50258, 16, 4, 2), []),  # 2 divides it
    ((50304, 16, 4, 2), []),
    ((50257, 16, 1, 1), []),  # one device
    ((50304, 31, 4, 8), ["batch (31) divides by no mesh axis and stays whole; pad it to 32 to shard it"]),
    ((50304, 5, 8, 2), []),  # a fifth of padding is too much
]


@pytest.mark.parametrize(("sizes", "advice"), ADVICE)
def test_sizes_that_do_not_divide(sizes: tuple[int, int, int, int], advice: list[str]) -> None:
    assert padding_advice(problem(*sizes)) == advice


PADDED = [
    ((50257, [8, 2]), 50304),
    ((50257, [6]), 50304),
    ((50257, [7]), 51072),
    ((25, [8, 4]), 28),
    ((1023, [2]), 1024),
]


@pytest.mark.parametrize(("asked", "padded"), PADDED)
def test_the_size_to_pad_to(asked: tuple[int, list[int]], padded: int) -> None:
    """In whole tiles of 128 where the dimension is long: 7 x 128 is 896, and 57 of them are 51,072."""
    assert padded_size(*asked) == padded


def test_a_report_has_the_advice_among_its_notes() -> None:
    ids = arg(16, LENGTH, dtype=jnp.int32)
    source = source_of(jax.grad(language_model), arg(50257, EMBED), arg(EMBED, EMBED), ids, ids)
    request = Request("gpt2.mlir", "v4-32", iterations=1, content=source.module.operation.get_asm().encode())
    report = partition(request).report
    assert GPT_2 in report.analysis.notes


# sample -> tokens of one run
TOKENS = {
    "t2b_tiny": 16 * 32,
    "moe_tiny": 32 * 48,
    "long_tiny": 128,
    "itx_prefill_tiny": 32 * 40,
    "itx_decode_tiny": 32 * 4,  # a loop over 4 tokens
    "vit_tiny": 0,
    "gns_tiny": 0,
    "mlp_tiny": 0,
}


@pytest.mark.parametrize("name", TOKENS)
def test_tokens_of_a_run(name: str) -> None:
    source, dimensions = sample(name)
    found = make_problem(source.program, dimensions, round_mesh(data=4, model=2))
    assert tokens_of(found) == TOKENS[name]


def test_sequences_of_different_lengths_leave_doubt() -> None:
    def both(table: jax.Array, source: jax.Array, target: jax.Array) -> jax.Array:
        return jnp.einsum("bse,bte->bst", table[source], table[target])

    one, other = arg(4, 8, dtype=jnp.int32), arg(4, 16, dtype=jnp.int32)
    found = problem_of(source_of(both, arg(100, 64), one, other), round_mesh(data=2))
    assert tokens_of(found) == 0


def test_a_table_of_pages_holds_no_tokens() -> None:
    def decode(cache: jax.Array, pages: jax.Array, weights: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        query = x @ weights
        cache = cache.at[pages[:, 0], 0].set(query)
        keys = cache[pages].reshape(4, 8 * 16, 32)
        scores = jax.nn.softmax(jnp.einsum("bd,btd->bt", query, keys))
        return jnp.einsum("bt,btd->bd", scores, keys), cache

    shapes = arg(64, 16, 32), arg(4, 8, dtype=jnp.int32), arg(32, 32), arg(4, 32)
    assert tokens_of(problem_of(source_of(decode, *shapes, donate=(0,)), round_mesh(data=2))) == 0


def test_tokens_per_second_beside_the_step_time() -> None:
    report = partition(Request("sample_models/t2b_tiny.mlirbc.zst", "v4-32", strategy="megatron")).report
    seconds = report.predicted.step_seconds
    assert report.predicted.tokens_per_second == pytest.approx(512 / seconds)
    rows = " ".join(render([prediction(report, 100)], make_console(None)).split())
    assert f"tokens/s {512 / seconds:,.0f} of all devices together" in rows


def test_the_cache_of_a_decode() -> None:
    """Two layers' keys and values of 8 heads of 24, in bf16; the heads are split over 4 devices."""
    predicted = partition(Request("sample_models/itx_decode_tiny.mlir", "v4-8", strategy="megatron")).report.predicted
    assert predicted.cache_token_bytes == 2 * 2 * (8 / 4) * 24 * 2
    cache_bytes = 32 * 48 * predicted.cache_token_bytes
    others = predicted.argument_bytes - cache_bytes
    room = predicted.limit_bytes / (1 + predicted.peak_error) - others
    assert predicted.sequences == int(32 * room / (predicted.peak_bytes - others))
    assert predicted.tokens_in_turn == 4
    assert (
        partition(Request("sample_models/t2b_tiny.mlirbc.zst", "v4-8", strategy="fsdp")).report.predicted.sequences == 0
    )


@pytest.mark.parametrize(("at_once", "in_turn"), [(1, True), (2, False)])
def test_tokens_that_a_loop_makes_one_after_the_other(at_once: int, in_turn: bool) -> None:
    def decode(cache: jax.Array, token: jax.Array) -> jax.Array:
        def write(number: jax.Array, cache: jax.Array) -> jax.Array:
            made = token + cache.sum(axis=1, keepdims=True)
            return jax.lax.dynamic_update_slice(cache, made, (0, number * at_once, 0))

        return jax.lax.fori_loop(0, 8, write, cache)

    program = source_of(decode, arg(4, 32, 64), arg(4, at_once, 64), donate=(0,)).program
    assert _positions_written(program, {program.arguments[0].value: 32}) == (8 * at_once, in_turn)


def test_attention_of_a_decode_in_words() -> None:
    """Sequences over data, heads over model: attention is told by itself, and its caches are no optimizer state."""
    tactics = ("data-parallel:data", "megatron:model")
    request = Request("sample_models/itx_decode_tiny.mlir", "v4-8", tactics=tactics, iterations=1)
    assert partition(request).report.plan.summary.startswith("attention DP 2 × TP 2; data (2): data-parallel; model")


# -- A mesh axis that goes unused because its size divides nothing


def test_an_axis_that_divides_nothing(tmp_path: Path) -> None:
    path = tmp_path / "program.mlir"
    path.write_text(
        """func.func public @main(%x: tensor<7x5xf32>, %w: tensor<5x9xf32>) -> tensor<7x9xf32> {
  %0 = stablehlo.dot %x, %w : (tensor<7x5xf32>, tensor<5x9xf32>) -> tensor<7x9xf32>
  return %0 : tensor<7x9xf32>
}"""
    )
    notes = partition(Request(str(path), "h100-8", mesh_shape="data=4,model=2")).report.analysis.notes
    assert "mesh axis data (4) is not used: its size divides no dimension that toast can split" in notes
