"""Kernels of paged attention: what is split, what they take, and that they are written as JAX lowers them for parts."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas.ops.tpu.paged_attention import paged_attention
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh
from jax.sharding import PartitionSpec as P
from test_hand_written import free, kernels

from toast_cli import xla
from toast_cli.dimensions import analyse
from toast_cli.emit.stablehlo import kernel_lines
from toast_cli.frontend.loading import load
from toast_cli.frontend.source import Source
from toast_cli.kernels import paged
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


def lowered(function: Any, *shapes: Any, donated: tuple[int, ...] = ()) -> Any:
    """Lowered for a TPU on any machine."""
    device = AbstractDevice("TPU v5 lite", 1, "tpu")
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        return jax.jit(function, donate_argnums=donated).trace(*shapes).lower(lowering_platforms=("tpu",))


def read(function: Any, *shapes: Any) -> Source:
    return load("paged.mlir", content=lowered(function, *shapes).as_text(debug_info=True).encode())


PAGED = partial(paged_attention, pages_per_compute_block=2)
RAGGED = partial(ragged_paged_attention, num_kv_pages_per_block=2, num_queries_per_block=8)
SPLIT = {
    # function, groups; what is split of each operand and result: a sequences, b heads of keys and values
    "paged": (PAGED, GROUP, ["a", "a", ".", ".", "ab..", "b...", "b...", "ab..", "ab..", "ab.."]),
    "groups of 8": (PAGED, 8, ["a", "a", ".", ".", "ab.", "b...", "b...", "ab.", "ab.", "ab."]),
    "a head of queries each": (PAGED, 1, ["a", "a", ".", ".", "ab..", "b...", "b...", "ab..", "ab..", "ab.."]),
    "blocks in the grid, a cap on scores": (partial(PAGED, inline_seq_dim=False, attn_logits_soft_cap=30.0), 8, None),
    "ragged": (partial(RAGGED, sm_scale=0.3, soft_cap=20.0), GROUP, ["", "", "", "", "", ".b.", "..b.", ".b."]),
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


@pytest.mark.parametrize(("ragged", "pages", "read_pages"), [(False, 4096, BATCH * EACH), (True, 64, 64)])
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


def test_one_head_of_keys_and_values_is_no_dimension() -> None:
    """The ragged kernel has no rule then."""
    assert "heads" not in {group.role for group in analyse(read(RAGGED, *arrays(ragged=True, kv=1)).program).groups}


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
    return partition(Request("paged.mlir", "v6e-8", iterations=100, content=content))


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
    assert ("heads", kv) in {(group.role, group.size) for group in outcome.problem.dimensions.groups}
    assert tokens_of(outcome.problem) == 64
    (down,) = [k for k, argument in enumerate(outcome.source.program.arguments) if "down" in argument.path]
    lowered_plan = outcome.evaluator.lowered(outcome.result.plan)
    axes = lowered_plan.shardings[outcome.source.program.arguments[down].value][0]
    assert len(axes) == len(outcome.problem.mesh.axes)
    written = xla.parse_module(xla.make_context(), outcome.emit("stablehlo").content)
    batch, heads, _ = local
    expected = lowered(PAGED, *arrays(ragged=False, kv=heads // GROUP, pages=4096, batch=batch, each=64)).compiler_ir()
    assert bodies_of(written) == bodies_of(expected)
    (line,) = kernel_lines(outcome.source, lowered_plan)
    assert line.line.count("P(") == 6  # queries, keys, values, lengths and page table; and the result


# A package that must not be initialised, with a kernel that asks which TPU it runs on. Its file stands for that of
# tpu-inference: `ragged_paged_attention` calls one kernel for sequences of one token, and one for all others.
INIT = "raise RuntimeError('it starts vLLM')"
UTIL = """
import jax

def get_tpu_version():
    return int(jax.devices()[0].device_kind.split()[1])
"""
KERNEL = """
import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from tpu_inference.kernels.ragged_paged_attention.v3.util import get_tpu_version

def ragged_paged_attention(q, k, v, pages, lengths, table, starts, kinds, *, sm_scale, d_block_sizes, m_block_sizes,
                           vmem_limit_bytes):
    def kernel(*refs):
        sums = refs[12]
        sums[...] = jnp.full(sums.shape, sm_scale, jnp.float32)
        if get_tpu_version() >= 6:
            sums[...] = sums[...] * sums[...]

    def run(case, sizes, queries, pages):
        everywhere = pl.BlockSpec(memory_space=pltpu.HBM)
        grid = pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=7, grid=(1,), in_specs=[everywhere] * 3, out_specs=[everywhere] * 2,
            scratch_shapes=[pltpu.VMEM((8, 128), jnp.float32)],
        )
        return pl.pallas_call(
            kernel, grid_spec=grid, out_shape=[queries, pages], input_output_aliases={7: 0, 9: 1},
            name=f"RPA{case}-p_{pages.shape[1]}-bq_{sizes[0]}_{sizes[2]}-bkv_{sizes[1]}_{sizes[3]}",
        )(lengths, table, starts, kinds, *[jnp.zeros(n, jnp.int32) for n in (3, 4, 6)], queries, new, pages)

    tokens, heads, width = k.shape
    new = jnp.concatenate([k, v], -1).reshape(tokens, *pages.shape[2:])
    queries = q.reshape(tokens, heads, -1, 2, width).swapaxes(0, 1)
    queries, pages = run("d", d_block_sizes, queries, pages)
    queries, pages = run("m", m_block_sizes, queries, pages)
    return queries.swapaxes(0, 1).reshape(q.shape), pages
"""
BLOCKS = {"d_block_sizes": (1, 64, 1, 64), "m_block_sizes": (8, 64, 8, 64)}


@pytest.fixture
def rpa(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """[version of the TPU] the kernel's module, as tpu-inference has it."""
    folder = tmp_path / "tpu_inference/kernels/ragged_paged_attention/v3"
    folder.mkdir(parents=True)
    for name, text in (("util", UTIL), ("kernel", KERNEL)):
        (folder / f"{name}.py").write_text(text)
    (tmp_path / "tpu_inference/__init__.py").write_text(INIT)
    monkeypatch.syspath_prepend(str(tmp_path))
    paged._module.cache_clear()
    yield partial(paged._module, "tpu_inference.kernels.ragged_paged_attention.v3.kernel")
    paged._module.cache_clear()


def rpa_arrays(kv: int, tokens: int = BATCH) -> list[Any]:
    new, cache = S((tokens, kv, WIDTH), BF16), S((PAGES, PAGE, kv, 2, WIDTH), BF16)
    return [
        S((tokens, kv * GROUP, WIDTH), BF16),
        new,
        new,
        cache,
        *[S((n,), I32) for n in (BATCH, BATCH * EACH, BATCH + 1, 3)],
    ]


def bodies_of(module: Any) -> list[str]:
    calls = [
        call
        for call in xla.walk_ops(module, "stablehlo.custom_call")
        if xla.ir.StringAttr(call.attributes["call_target_name"]).value == TARGET
    ]
    bodies = [parse_body(config_of(xla.ir.StringAttr(call.attributes["backend_config"]).value)) for call in calls]
    return [str(body.operation.get_asm(enable_debug_info=False)) for body in bodies]


@pytest.mark.parametrize("version", [6, 5])
def test_kernels_of_tpu_inference_are_split_by_heads(rpa: Any, version: int) -> None:
    """Both are written as the package lowers them for a head of keys and values on the TPU that the program is for,
    without initialising the package; the pages are written where they lie, in one buffer."""
    function = partial(rpa(version).ragged_paged_attention, sm_scale=0.3, vmem_limit_bytes=1 << 20, **BLOCKS)
    program = lowered(function, *rpa_arrays(KV), donated=(3,)).as_text(debug_info=True).encode()
    outcome = partition(Request("rpa.mlir", "v6e-4", iterations=20, content=program))
    written = xla.parse_module(xla.make_context(), outcome.emit("stablehlo").content)
    assert bodies_of(written) == bodies_of(lowered(function, *rpa_arrays(1)).compiler_ir())
    assert not kernel_lines(outcome.source, outcome.evaluator.lowered(outcome.result.plan))  # the package has its own
    assert tokens_of(outcome.problem) == BATCH
    assert "tpu_inference" not in sys.modules
    cache = PAGES * PAGE * 2 * WIDTH * 2
    assert outcome.evaluator.exact_cost(outcome.result.plan).peak_bytes < 1.5 * cache


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
    assert any("pip install --no-deps tpu_inference, or call it in shard_map" in note for note in source.notices) == (
        case != "p"
    )


@pytest.mark.parametrize("devices", [1, 4])
def test_pages_that_only_get_new_rows(devices: int) -> None:
    """sglang-jax's kernel for new keys and values: it moves rows, not pages, and the pages have one buffer, also where
    the program calls it in a `shard_map` between reshapes."""
    rows, pages = S((BATCH, 1, KV, 2, WIDTH), BF16), S((PAGES, PAGE, KV, 2, WIDTH), BF16)
    heads, mesh = (
        P(None, None, "x"),
        AbstractMesh((devices,), ("x",), abstract_device=AbstractDevice("TPU v5 lite", 1, "tpu")),
    )

    def update(slices: Any, rows: Any, pages: Any, count: Any) -> Any:
        flat = [array.reshape(-1, 2 * array.shape[2], WIDTH) for array in (rows, pages)]
        grid = pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1, grid=(count[0],), in_specs=[pl.BlockSpec(memory_space=pltpu.HBM)] * 2,
            out_specs=pl.BlockSpec(memory_space=pltpu.HBM),
        )  # fmt: skip
        made = pl.pallas_call(
            lambda *refs: None, grid_spec=grid, out_shape=S(flat[1].shape, BF16), input_output_aliases={2: 0},
            name="kv_cache_update_kernel",
        )(slices, *flat)  # fmt: skip
        return made.reshape(pages.shape)

    with use_abstract_mesh(mesh):
        split = jax.shard_map(update, in_specs=(P(), heads, heads, P()), out_specs=heads, check_vma=False)
        traced = jax.jit(split, donate_argnums=2).trace(S((3, BATCH), I32), rows, pages, S((1,), I32))
        content = traced.lower(lowering_platforms=("tpu",)).as_text().encode()
    outcome = partition(Request("update.mlir", "v6e-4", mesh_shape="x=4", iterations=50, content=content))
    own = PAGES * PAGE * 2 * KV * WIDTH * 2 // devices  # lowered for one device, it is not split
    cost = outcome.evaluator.exact_cost(outcome.result.plan)
    assert own < cost.peak_bytes < 1.1 * own
    assert cost.step_seconds < 1e-5
    assert any("where the program splits it" in note for note in outcome.source.notices) == (devices == 1)
