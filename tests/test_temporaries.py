"""Buffers: temporaries as compilers lay them out, results that replace no argument, padded and joined arrays."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from programs import PLAIN, arg, case_of, evaluator_of, mesh_of, round_mesh, source_of, source_of_text

from toast_cli.dimensions import analyse
from toast_cli.frontend import load
from toast_cli.hardware import find_preset, load_spec
from toast_cli.plan.problem import make_problem
from toast_cli.price.evaluator import Evaluator
from toast_cli.price.fusion import visible_part
from toast_cli.price.gpu_libraries import temporary_growth
from toast_cli.price.liveness import shrinking
from toast_cli.price.profiles import find_profile

CHAIN = """
func.func @main(%x: tensor<64x64x{t}>, %w: tensor<64x64x{t}>) -> tensor<64x64x{t}> {{
  %0 = stablehlo.dot_general %x, %w, contracting_dims = [1] x [0] : (tensor<64x64x{t}>, tensor<64x64x{t}>) -> tensor<64x64x{t}>
  %1 = stablehlo.dot_general %0, %w, contracting_dims = [1] x [0] : (tensor<64x64x{t}>, tensor<64x64x{t}>) -> tensor<64x64x{t}>
  %2 = stablehlo.dot_general %1, %0, contracting_dims = [1] x [0] : (tensor<64x64x{t}>, tensor<64x64x{t}>) -> tensor<64x64x{t}>
  return %2 : tensor<64x64x{t}>
}}
"""  # noqa: E501


def chain_on(spec: str, dtype: str, folder: Path) -> Evaluator:
    path = folder / "p.mlir"
    path.write_text(CHAIN.format(t=dtype))
    program = load(str(path)).program
    return Evaluator(make_problem(program, analyse(program), load_spec(spec).mesh()))


@pytest.mark.parametrize(
    ("chip", "dtype", "widened"),
    [
        ("v4", "bf16", 1.0),
        ("H100", "bf16", 1.0),
        ("V100", "f16", 1.0),
        ("V100", "f32", 1.0),
        ("V100", "bf16", 2.0),
        ("P100", "bf16", 2.0),
    ],
)
def test_what_a_chip_cannot_compute_in_is_widened(chip: str, dtype: str, widened: float, tmp_path: Path) -> None:
    evaluator, profile = chain_on("h100-8", dtype, tmp_path), find_profile(find_preset(chip).chip)
    growth = temporary_growth(evaluator.problem.program, evaluator.items.stored, profile)
    assert growth == pytest.approx(profile.temporary_growth * widened)


def test_tpus_are_what_the_model_is_made_for() -> None:
    tpu, gpu = (find_profile(find_preset(chip).chip) for chip in ("v4", "H100"))
    assert tpu.temporary_growth == 1.0 < gpu.temporary_growth


@pytest.mark.parametrize(
    ("spec", "dtype", "factor"), [("v4-32", "bf16", 1.0), ("h100-8", "f32", 1.12), ("v100-8", "bf16", 2.24)]
)
def test_only_temporaries_grow(spec: str, dtype: str, factor: float, tmp_path: Path) -> None:
    evaluator = chain_on(spec, dtype, tmp_path)
    counted = evaluator.memory_profile(()).max()
    for cost in (evaluator.cost(()), evaluator.exact_cost(())):
        assert cost.peak_bytes == pytest.approx(cost.argument_bytes + factor * (counted - cost.argument_bytes))
        assert counted > cost.argument_bytes


@pytest.mark.parametrize(
    ("chip", "batch", "heads", "groups", "rows", "masked", "expected"),
    [
        ("v6e", 2, 2, 4, 4096, True, 4.25),  # scores, exponentials, scale and filler in f32, and the mask
        ("v6e", 2, 8, 1, 3072, True, 4.25),
        ("v6e", 1, 8, 1, 4096, True, 4.25),
        ("v6e", 1, 2, 4, 4096, True, 1.0),  # one batch of grouped queries: the product's kernel finds the maxima
        ("v6e", 2, 1, 8, 4096, True, 1.0),
        ("v6e", 2, 2, 4, 4096, False, 1.0),
        ("v6e", 2, 2, 4, 2560, True, 1.0),
        ("v6e", 2, 2, 1, 16384, True, 1.0),
        ("v5p", 2, 2, 4, 4096, True, 1.0),
    ],
)
def test_a_masked_softmax_takes_what_the_compiler_allocates(
    chip: str, batch: int, heads: int, groups: int, rows: int, masked: bool, expected: float
) -> None:
    """Arrays of the size of f32 scores that are alive at once, as in programs compiled by libtpu 0.0.42.1."""

    def run(q: Any, k: Any, v: Any) -> Any:
        scores = jnp.einsum("bqhgd,bkhd->bhgqk", q, k, preferred_element_type=jnp.float32) * 0.125
        scores = jnp.where(jnp.tril(jnp.ones((rows, rows), bool)), scores, -1e30) if masked else scores
        return jnp.einsum("bhgqk,bkhd->bqhgd", jax.nn.softmax(scores).astype(jnp.bfloat16), v)

    keys = arg(batch, rows, heads, 128, dtype=jnp.bfloat16)
    source = source_of(run, arg(batch, rows, heads, groups, 128, dtype=jnp.bfloat16), keys, keys)
    cost = evaluator_of(source, f"{chip}-8").cost(())
    scores = 4 * batch * heads * groups * rows**2
    assert (cost.peak_bytes - cost.argument_bytes) / scores == pytest.approx(expected, rel=0.1)


# -- buffers of results that replace no argument: they are there before the results are made


HOLDING = replace(PLAIN, passes=PLAIN.passes | {"held-results"})
LARGE, SMALL = arg(64, 64), arg(16, 16)  # 16 and 1 KiB


def chain(x: Any) -> Any:
    return x @ x @ x @ x


def late(x: Any, v: Any) -> Any:
    """A small result of large arrays."""
    return v @ chain(x)[:16, :16]


def replacing(x: Any, v: Any) -> Any:
    """A result that takes the place of an array that is there from the start."""
    return lax.sort(v) * chain(x)[0, 0]


@pytest.mark.parametrize(
    ("what", "fn", "shapes", "donate", "without", "peak"),
    [
        ("arguments 17 KiB, two products, and the result", late, (LARGE, SMALL), (), 49, 50),
        ("its buffer is an argument's", late, (LARGE, SMALL), (1,), 49, 49),
        ("the sorted array is there already", replacing, (LARGE, SMALL), (), 50, 50),
        ("the first product is in the result's buffer", chain, (LARGE,), (), 48, 48),
    ],
)
def test_results_have_their_buffers_from_the_start(
    what: str, fn: Any, shapes: tuple[Any, ...], donate: tuple[int, ...], without: float, peak: float
) -> None:
    for profile, expected in ((PLAIN, without), (HOLDING, peak)):
        case = case_of(fn, *shapes, mesh=round_mesh(data=1), profile=profile, donate=donate)
        assert case.evaluator.exact_cost(()).peak_bytes / 1024 == pytest.approx(expected, abs=0.1), what


TO_HOST = """
func.func @main(%x: tensor<64x64xf32>, %v: tensor<16x16xf32>)
    -> (tensor<16x16xf32> {mhlo.memory_kind = "pinned_host"}) {
  %0 = stablehlo.dot_general %x, %x, contracting_dims = [1] x [0]
    : (tensor<64x64xf32>, tensor<64x64xf32>) -> tensor<64x64xf32>
  %1 = stablehlo.dot_general %0, %x, contracting_dims = [1] x [0]
    : (tensor<64x64xf32>, tensor<64x64xf32>) -> tensor<64x64xf32>
  %2 = stablehlo.slice %1 [0:16, 0:16] : (tensor<64x64xf32>) -> tensor<16x16xf32>
  %3 = stablehlo.dot_general %v, %2, contracting_dims = [1] x [0]
    : (tensor<16x16xf32>, tensor<16x16xf32>) -> tensor<16x16xf32>
  %4 = stablehlo.custom_call @annotate_device_placement(%3) {
    has_side_effect = true, mhlo.frontend_attributes = {_xla_buffer_placement = "pinned_host"}
  } : (tensor<16x16xf32>) -> tensor<16x16xf32>
  return %4 : tensor<16x16xf32>
}
"""


def test_a_result_in_host_memory_holds_nothing_on_the_device() -> None:
    source = source_of_text(TO_HOST)
    for profile in (PLAIN, HOLDING):
        evaluator = evaluator_of(source, round_mesh(data=1), profile=profile)
        assert evaluator.exact_cost(()).peak_bytes / 1024 == pytest.approx(49, abs=0.1)


def test_a_result_that_is_split_is_too_small_for_temporaries() -> None:
    case = case_of(lambda x, v: chain(x) @ v, LARGE, arg(64, 32), mesh=round_mesh(data=4), profile=HOLDING)
    plans = {56: (), 52: (case.shard("v.1", "data"),)}  # result 8 KiB, or 2 KiB, which is there from the start
    for peak, plan in plans.items():
        assert case.evaluator.exact_cost(plan).peak_bytes / 1024 == pytest.approx(peak, abs=0.1)


# -- what is written because it is padded or joined, how often it is read, and buffers that are not shared


def test_what_is_narrower_than_what_it_is_made_of_has_its_own_buffer() -> None:
    def narrowed(x: Any, w: Any) -> Any:
        return jnp.sin(x).astype(jnp.bfloat16), jnp.cos(w)

    source = source_of(narrowed, arg(64, 64), arg(64, 64))
    program = source.program
    makers = {op.name: number for number, op in enumerate(program.ops)}
    stored = [True] * len(program.values)
    convert, cosine = makers["stablehlo.convert"], makers["stablehlo.cosine"]
    found = shrinking(program, stored, [1.0] * len(stored))
    assert found[convert] and not found[cosine]
    stored[program.ops[makers["stablehlo.sine"]].results[0]] = False  # computed where it is converted
    assert shrinking(program, stored, [1.0] * len(stored))[convert]
    parts = [1.0] * len(stored)
    parts[program.ops[cosine].results[0]] = 0.5
    assert shrinking(program, stored, parts)[cosine]


def loss(x: Any, w: Any, *, cut: bool) -> Any:
    """The gradient of a classifier's loss with regard to its features, without the last row's where cut."""
    logits = x @ w
    logits = logits[:-1] if cut else logits
    probabilities = jnp.exp(logits) / jnp.exp(logits).sum(1, keepdims=True)
    probabilities = jnp.pad(probabilities, ((0, 1), (0, 0))) if cut else probabilities
    return probabilities @ w.T


@pytest.mark.parametrize("cut", [True, False])
def test_the_gradient_of_logits_is_written_where_it_is_padded(cut: bool) -> None:
    source = source_of(lambda x, w: loss(x, w, cut=cut), arg(256, 16), arg(16, 2**16))
    stored = evaluator_of(source, mesh_of("v5e-16")).items.stored
    program = source.program
    divided = next(op for op in program.ops if op.name == "stablehlo.divide").results[0]
    assert stored[divided] is cut


def halves(x: Any, y: Any) -> Any:
    """Rotary embedding: the halves of each row are turned and joined again."""
    first, second = jnp.split(x, 2, -1)
    return jnp.concatenate([-second, first], -1) * y


@pytest.mark.parametrize(
    ("moved", "written"),
    [
        (lambda x, y: jnp.pad(jnp.sin(x), ((0, 8), (0, 0)))[8:] * y, {"sine"}),
        (lambda x, y: jnp.roll(jnp.sin(x), 1, 0) * y, {"sine"}),
        (lambda x, y: jnp.concatenate([jnp.sin(x), jnp.cos(x)], 0)[64:] * y, {"sine", "cosine"}),
        (halves, {"negate", "slice"}),
        (lambda x, y: jnp.roll(x, 1, 0) * y, set()),
        (lambda x, y: jnp.sin(x)[:32] * y[:32], set()),
        (lambda x, y: (lambda z: z[:32] * z[32:])(jnp.sin(x) * y), {"multiply"}),
    ],
)  # fmt: skip
@pytest.mark.parametrize("mesh", ["v4-32", "v5e-16", "v5p-64", "v6e-64", "h100-8"])
def test_what_pads_and_concatenations_move_is_written(mesh: str, moved: Any, written: set[str]) -> None:
    source = source_of(lambda x, y: jnp.exp(moved(x, y)), arg(64, 256), arg(64, 256))
    stored = evaluator_of(source, mesh_of(mesh)).items.stored
    ops = [op for op in source.program.ops if any(stored[value] for value in op.results) and op.operands]
    names = [op.name.removeprefix("stablehlo.") for op in ops if not op.name.startswith("toast.")]
    assert set(names) - {"exponential"} == (written if mesh != "h100-8" else set())


def test_a_roll_reads_an_array_once_and_a_stencil_five_times() -> None:
    def stencil(x: Any) -> Any:
        y = jnp.pad(x, 1)
        return 4 * y[1:-1, 1:-1] - y[2:, 1:-1] - y[:-2, 1:-1] - y[1:-1, 2:] - y[1:-1, :-2]

    for function, times in ((lambda x: 2 * jnp.roll(x, 3, 1), 1), (stencil, 5)):
        source = source_of(function, arg(64, 64))
        kernels = [kernel for kernel in evaluator_of(source, mesh_of("v5e-16")).items.compilation.kernels if kernel]
        read = sum(operand.bytes for kernel in kernels for operand in kernel.operands)
        assert read == pytest.approx(times * 64 * 64 * 4, rel=0.06)
    pads = [op for op in source_of(lambda x: jnp.roll(x, 3, 0), arg(64, 64)).program.ops if op.name == "stablehlo.pad"]
    assert sorted(visible_part(op) for op in pads) == [3 / 64, 61 / 64]


@pytest.mark.parametrize(
    "config", [(0, 0, 1), (1, 0, 1), (1, 1, 0)]
)  # between rows as in the gradient of x[::2]; at edges
@pytest.mark.parametrize("mesh", ["v5e-16", "v5p-64", "h100-8"])
def test_pads_between_elements_and_at_edges_are_fused(mesh: str, config: tuple[int, int, int]) -> None:
    def spread(x: Any, y: Any) -> Any:
        return jnp.sin(lax.pad(jnp.exp(x), 0.0, (config, (0, 0, 0)))) * y

    rows = 64 + sum(config[:2]) + 63 * config[2]
    source = source_of(spread, arg(64, 256), arg(rows, 256))
    stored = evaluator_of(source, mesh_of(mesh)).items.stored
    made = {op.name: op.results[0] for op in source.program.ops if op.results}
    names = ("stablehlo.pad", "stablehlo.sine")
    assert not any(stored[made[name]] for name in names)
