"""Kernels of paged attention: what is split, what they take, and that they are written as JAX lowers them for parts."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas.ops.tpu.paged_attention import paged_attention
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh
from test_hand_written import free, kernels

from toast_cli import xla
from toast_cli.emit.stablehlo import kernel_lines
from toast_cli.frontend.loading import load
from toast_cli.frontend.source import Source
from toast_cli.kernels.mosaic import TARGET, config_of, parse_body
from toast_cli.kernels.table import Table, read_table, rule_of
from toast_cli.pipeline import Outcome, Request, partition
from toast_cli.program.model import Value
from toast_cli.report.build import tokens_of

BATCH, WIDTH, PAGE, PAGES, EACH = 16, 128, 16, 256, 8  # EACH: pages of a sequence
KV, GROUP = 4, 4
S, BF16, I32 = jax.ShapeDtypeStruct, jnp.bfloat16, jnp.int32


def arrays(
    ragged: bool, kv: int = KV, group: int = GROUP, pages: int = PAGES, batch: int = BATCH, each: int = EACH
) -> list[Any]:
    queries, table = S((batch, kv * group, WIDTH), BF16), S((batch, each), I32)
    if ragged:
        cache = [S((pages, PAGE, 2 * kv, WIDTH), BF16)]
        return [queries, *cache, S((batch,), I32), table, S((batch + 1,), I32), S((1,), I32)]
    return [queries, *[S((kv, pages, PAGE, WIDTH), BF16)] * 2, S((batch,), I32), table]


def lowered(function: Any, *shapes: Any) -> Any:
    """Lowered for a TPU on any machine."""
    device = AbstractDevice("TPU v5 lite", 1, "tpu")
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        return jax.jit(function).trace(*shapes).lower(lowering_platforms=("tpu",))


def read(function: Any, *shapes: Any) -> Source:
    return load("paged.mlir", content=lowered(function, *shapes).as_text(debug_info=True).encode())


PAGED = partial(paged_attention, pages_per_compute_block=2)
RAGGED = partial(ragged_paged_attention, num_kv_pages_per_block=2, num_queries_per_block=8)
SPLIT = {
    # function, groups; what is split of each operand and result: a sequences, b heads of keys and values
    "paged": (PAGED, GROUP, ["a", "a", ".", ".", "ab..", "b...", "b...", "ab..", "ab..", "ab.."]),
    "groups of 8": (PAGED, 8, ["a", "a", ".", ".", "ab.", "b...", "b...", "ab.", "ab.", "ab."]),
    "a head of queries each": (PAGED, 1, ["a", "a", ".", ".", "ab..", "b...", "b...", "ab..", "ab..", "ab.."]),
    "blocks in the grid": (partial(PAGED, inline_seq_dim=False), 8, None),
    "a cap on scores": (partial(PAGED, attn_logits_soft_cap=30.0), 8, None),
    "ragged": (partial(RAGGED, sm_scale=0.3), GROUP, ["", "", "", "", "", ".b.", "..b.", ".b."]),
    "ragged, a cap on scores": (partial(RAGGED, sm_scale=0.3, soft_cap=20.0), GROUP, None),
}


@pytest.mark.parametrize("name", SPLIT)
def test_what_is_split(name: str) -> None:
    function, group, split = SPLIT[name]
    source = read(function, *arrays(name.startswith("ragged"), group=group))
    (op,) = kernels(source)
    letters = {letter for text in free(op) for letter in text} - {"."}
    assert len(letters) == (1 if name.startswith("ragged") else 2)
    assert op.kernel is not None
    stated = {key: value for key, value in function.keywords.items() if isinstance(value, float)}
    assert {key: dict(op.kernel.parameters)[key] for key in stated} == pytest.approx(stated)
    if split is not None:
        names = dict(zip(sorted(letters), "ab" if len(letters) == 2 else "b", strict=True))
        assert ["".join(names.get(x, x) for x in text) for text in free(op) if text.strip(".")] == [
            text for text in split if text.strip(".")
        ]


@pytest.mark.parametrize(("pages", "read_pages"), [(4096, BATCH * EACH), (64, 64)])
@pytest.mark.parametrize("ragged", [False, True])
def test_pages_that_are_read(ragged: bool, pages: int, read_pages: int) -> None:
    """All entries of the page table, and no more pages than there are; scores and sums over all of their positions."""
    source = read(RAGGED if ragged else PAGED, *arrays(ragged, pages=pages))
    (kernel,) = [op.kernel for op in kernels(source)]
    assert kernel is not None
    assert kernel.bytes == pytest.approx(2 * 2 * KV * read_pages * PAGE * WIDTH, rel=0.15)
    assert kernel.products == 4 * BATCH * KV * GROUP * EACH * PAGE * WIDTH
    assert not kernel.only_multiplies  # it has a softmax
    assert any("used all of its entries in the page table" in note for note in source.notices)


def test_a_kernel_that_the_installed_package_does_not_make_is_whole() -> None:
    source = read(partial(RAGGED, sliding_window=40), *arrays(ragged=True))
    (op,) = kernels(source)
    assert not "".join(free(op)).strip(".")
    assert any("does not lower ragged_paged_attention to this body" in note for note in source.notices)


def test_heads_for_which_there_is_no_kernel_stay_together() -> None:
    """The ragged kernel has no form for 3, 6 and 12 heads of keys and values: 24 are split into eights."""
    (op,) = kernels(read(RAGGED, *arrays(ragged=True, kv=24)))
    (split,) = {factor for dims in op.rule.results[0] for factor in dims} - op.rule.need_replication
    assert op.rule.sizes[split] == 3


@pytest.mark.parametrize(("sizes", "is_split"), [((2, 12), True), ((1, 24), False)])
def test_heads_that_all_stay_together_cannot_be_split(sizes: tuple[int, int], is_split: bool) -> None:
    (kernel,) = read_table(Table("- {name: one, rule: '([k*u])->([k*u]) need_replication={u}'}", ""))
    heads = [Value((24,), "f32")]
    assert (rule_of(kernel, dict(zip("ku", sizes, strict=True)), heads, heads) is not None) == is_split


def layer(attention: Any, weights: Any, pages: Any, x: Any, lengths: Any, table: Any) -> Any:
    """Attention over pages and a feed-forward network."""
    query = jnp.einsum("bm,mhd->bhd", x, weights["query"])
    x = x + jnp.einsum("bhd,hdm->bm", attention(query, *pages, lengths, table), weights["out"])
    return x + jax.nn.silu(x @ weights["in"]) @ weights["down"]


def planned(kv: int) -> Outcome:
    _, *pages, lengths, table = arrays(ragged=False, kv=kv, pages=4096, batch=64, each=64)
    heads, model = kv * GROUP, 1024
    weights = {"query": S((model, heads, WIDTH), BF16), "out": S((heads, WIDTH, model), BF16),
               "in": S((model, 16384), BF16), "down": S((16384, model), BF16)}  # fmt: skip
    program = lowered(partial(layer, PAGED), weights, pages, S((64, model), BF16), lengths, table)
    content = program.as_text(debug_info=True).encode()
    return partition(Request("paged.mlir", "v6e-8", iterations=200, content=content))


# heads of keys and values; the shape of queries on a device of 8
FOUND = [(8, (64, 4, WIDTH)), (2, (8, 8, WIDTH))]


@pytest.mark.parametrize(("kv", "local"), FOUND)
def test_it_is_written_for_shards(kv: int, local: tuple[int, int, int]) -> None:
    """By heads, and with fewer of them than devices, also by sequence, beside a feed-forward network that all devices
    split; each runs what JAX lowers for its shapes."""
    outcome = planned(kv)
    uses, rate = (
        outcome.evaluator.kernels(outcome.result.plan),
        0.86 * outcome.problem.mesh.chip.memory_bytes_per_second,
    )
    (seconds,) = [use.seconds - use.bytes / rate for use in uses if outcome.source.program.ops[use.op].kernel]
    assert seconds == pytest.approx(1.45e-6)  # what starting a kernel takes
    assert "heads" in {group.role for group in outcome.problem.dimensions.groups}
    assert tokens_of(outcome.problem) == 64
    (down,) = [k for k, argument in enumerate(outcome.source.program.arguments) if "down" in argument.path]
    lowered_plan = outcome.evaluator.lowered(outcome.result.plan)
    axes = lowered_plan.shardings[outcome.source.program.arguments[down].value][0]
    assert len(axes) == len(outcome.problem.mesh.axes)
    written = xla.parse_module(xla.make_context(), outcome.emit("stablehlo").content)
    batch, heads, _ = local
    expected = lowered(PAGED, *arrays(ragged=False, kv=heads // GROUP, pages=4096, batch=batch, each=64)).compiler_ir()
    assert body_of(written) == body_of(expected)
    (line,) = kernel_lines(outcome.source, lowered_plan)
    assert line.line.count("P(") == 6  # queries, keys, values, lengths and page table; and the result


def body_of(module: Any) -> str:
    (call,) = [
        call
        for call in xla.walk_ops(module, "stablehlo.custom_call")
        if xla.ir.StringAttr(call.attributes["call_target_name"]).value == TARGET
    ]
    body = parse_body(config_of(xla.ir.StringAttr(call.attributes["backend_config"]).value))
    return str(body.operation.get_asm(enable_debug_info=False))


@pytest.mark.parametrize(
    ("tokens", "case", "scores"),
    [(BATCH, "d", BATCH), (BATCH, "m", 0), (4 * BATCH, "d", 0), (4 * BATCH, "m", 4 * BATCH), (BATCH, "p", 0)],
)
def test_one_of_the_kernels_of_tpu_inference_does_all_work(tokens: int, case: str, scores: int) -> None:
    """The call as tpu-inference writes it: keys and values side by side in the pages, to which new ones are added."""
    heads, cache = S((KV, tokens, GROUP // 2, 2, WIDTH), BF16), S((PAGES, PAGE, KV, 2, WIDTH), BF16)
    scalars = [S((n,), I32) for n in (BATCH, BATCH * EACH, BATCH + 1, 3, 3, 4, 6)]

    def call(*operands: Any) -> Any:
        grid = pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=7, grid=(1,), in_specs=[pl.BlockSpec(memory_space=pltpu.HBM)] * 3,
            out_specs=[pl.BlockSpec(memory_space=pltpu.HBM)] * 2,
        )  # fmt: skip
        return pl.pallas_call(
            lambda *refs: None, grid_spec=grid, out_shape=[heads, cache], input_output_aliases={7: 0, 9: 1},
            name=f"RPA{case}-p_{PAGE}-bq_1_1-bkv_64_64",
        )(*operands)  # fmt: skip

    source = read(call, *scalars, heads, S((tokens, KV, 2, WIDTH), BF16), cache)
    (op,) = kernels(source)
    assert op.kernel is not None
    assert op.kernel.products == 4 * scores * KV * GROUP * EACH * PAGE * WIDTH
    pages, rows = BATCH * EACH * PAGE * 2 * KV * WIDTH * 2, (GROUP + 1) * 2 * KV * tokens * WIDTH * 2
    assert op.kernel.bytes == pytest.approx(pages + rows if scores else 0, rel=0.01)
    assert any("is split only where the program splits it" in note for note in source.notices)
