"""Two remarks of a report: sizes that no mesh axis divides, and tokens per second."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from programs import arg, problem_of, round_mesh, sample, source_of

from toast_cli.dimensions import analyse
from toast_cli.pipeline import partition
from toast_cli.plan.problem import Problem, make_problem
from toast_cli.report.build import _positions_written, padded_size, padding_advice, tokens_of
from toast_cli.report.style import make_console, render
from toast_cli.report.terminal import prediction
from toast_cli.request import Request

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
