"""What XLA:TPU makes of programs with hand-written kernels: `python -m benchmarks.kernels [PROGRAM ...]`.

The kernels are those of JAX's own library, lowered for TPU, alone and in a small layer, and JAX's ragged products. One
row for each program, mesh, and plan of the search and of every strategy that applies: what was written is compiled
ahead of time, and its collectives are compared with those that were promised. Exits with 1 where something does not
compile, or where less than 98 % of the bytes are as promised, if they are more than a few.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import zstandard
from jax.experimental.pallas.ops.tpu.flash_attention import flash_attention
from jax.experimental.pallas.ops.tpu.megablox import gmm
from jax.experimental.pallas.ops.tpu.paged_attention import paged_attention
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

from benchmarks import fidelity
from benchmarks.common import Row, note, show, write_json
from toast_cli.pipeline import partition
from toast_cli.price.evaluator import Evaluator
from toast_cli.request import Request
from toast_cli.tactics import strategies

AIM, SMALL_KIB = 0.98, 1.0  # what moves less is no part of the aim
COLUMNS = {
    "program": "{program}", "mesh": "{mesh}", "plan": "{plan}", "predicted KiB": "{predicted_kib:.1f}",
    "compiled KiB": "{compiled_kib:.1f}", "agreeing": "{agreeing}", "predicted ms": "{milliseconds:.3f}",
    "": "{verdict}",
}  # fmt: skip

Function = Callable[..., Any]
BATCH, HEADS, GROUPS, LENGTH, WIDTH = 16, 16, 4, 512, 128
EXPERTS, ROWS, MODEL, HIDDEN = 16, 2048, 2048, 1024


def of(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def gradients(function: Function, *arrays: Any) -> Any:
    """Those of the sum of a function's result, for its arguments of floating-point numbers."""
    places = tuple(k for k, array in enumerate(arrays) if jnp.issubdtype(array.dtype, jnp.floating))
    return jax.grad(lambda *a: function(*a).astype(jnp.float32).sum(), argnums=places)(*arrays)


def masked(mask: Any) -> Any:
    return masks.MultiHeadMask([mask] * HEADS)


def splash_heads(mask: Any) -> Function:
    return jax.vmap(splash.make_splash_mha(masked(mask), head_shards=1, q_seq_shards=1))


def splash_groups(mask: Any) -> Function:
    """Each head of keys and values has its own heads of queries, in a dimension of their own."""
    of_group = masks.MultiHeadMask([mask] * (HEADS // GROUPS))
    return jax.vmap(jax.vmap(splash.make_splash_mqa(of_group, head_shards=1, q_seq_shards=1)))


def layer(attention: Function) -> Function:
    """Attention between its projections, with weights in float32."""

    def forward(weights: dict[str, Any], x: Any) -> Any:
        q, k, v = (
            jnp.einsum("bsm,mhd->bhsd", x, weights[name].astype(jnp.bfloat16)) for name in ("query", "key", "value")
        )
        return x + jnp.einsum("bhsd,hdm->bsm", attention(q, k, v), weights["out"].astype(jnp.bfloat16))

    def step(weights: dict[str, Any], x: Any) -> Any:
        slopes = jax.grad(lambda w: jnp.mean(forward(w, x).astype(jnp.float32) ** 2))(weights)
        return jax.tree.map(lambda w, slope: w - 0.01 * slope, weights, slopes)

    return step


def weights(groups: int) -> dict[str, jax.ShapeDtypeStruct]:
    shapes = {"query": (MODEL, HEADS, WIDTH), "key": (MODEL, groups, WIDTH), "value": (MODEL, groups, WIDTH)}
    return {name: of(*shape, dtype=jnp.float32) for name, shape in (shapes | {"out": (HEADS, WIDTH, MODEL)}).items()}


def experts(product: Function) -> Function:
    """A layer of experts whose rows lie sorted by expert."""

    def step(weights: dict[str, Any], x: Any, sizes: Any) -> Any:
        def loss(weights: dict[str, Any]) -> Any:
            up, down = (weights[name].astype(jnp.bfloat16) for name in ("up", "down"))
            made = product(jax.nn.silu(product(x, up, sizes)).astype(jnp.bfloat16), down, sizes)
            return jnp.mean(made.astype(jnp.float32) ** 2)

        return jax.tree.map(lambda w, slope: w - 0.01 * slope, weights, jax.grad(loss)(weights))

    return step


CAUSAL, LOCAL = masks.CausalMask((LENGTH, LENGTH)), masks.LocalMask((LENGTH, LENGTH), (128, 0), 0)
QUERIES, KEYS = of(BATCH, HEADS, LENGTH, WIDTH), of(BATCH, GROUPS, LENGTH, WIDTH)
OF_GROUPS = of(BATCH, GROUPS, HEADS // GROUPS, LENGTH, WIDTH)
X, SIZES = of(BATCH, LENGTH, MODEL), of(EXPERTS, dtype=jnp.int32)
SORTED = of(ROWS, MODEL), of(EXPERTS, MODEL, HIDDEN), SIZES
EXPERT_WEIGHTS = {
    "up": of(EXPERTS, MODEL, HIDDEN, dtype=jnp.float32), "down": of(EXPERTS, HIDDEN, MODEL, dtype=jnp.float32),
}  # fmt: skip
PAGES = of(GROUPS, 256, 16, WIDTH)


def grouped_flash(q: Any, k: Any, v: Any) -> Any:
    """Flash attention has as many heads of keys as of queries."""
    return flash_attention(q, *(jnp.repeat(array, HEADS // GROUPS, 1) for array in (k, v)), causal=True)


def summed(x: Any, y: Any, sizes: Any) -> Any:
    """The mode of `ragged_dot` that adds up over the rows of each group."""
    numbers = jax.lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((0,), (0,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[]
    )
    return jax.lax.ragged_dot_general(x, y, sizes, numbers)


def in_a_batch(x: Any, y: Any, sizes: Any) -> Any:
    """The mode of `ragged_dot` whose groups are parts of a dimension that both operands share."""
    numbers = jax.lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((2,), (1,)), ((0,), (0,))), lhs_ragged_dimensions=[0], rhs_group_dimensions=[]
    )
    return jax.lax.ragged_dot_general(x, y, sizes, numbers)


causal_flash = partial(flash_attention, causal=True)
# Name -> the function and its arguments.
PROGRAMS: dict[str, tuple[Function, tuple[Any, ...]]] = {
    "flash": (flash_attention, (QUERIES,) * 3),
    "flash_causal": (causal_flash, (QUERIES,) * 3),
    "flash_gradient": (partial(gradients, causal_flash), (QUERIES,) * 3),
    "flash_groups": (grouped_flash, (QUERIES, KEYS, KEYS)),
    "flash_layer": (layer(causal_flash), (weights(HEADS), X)),
    "flash_groups_layer": (layer(grouped_flash), (weights(GROUPS), X)),
    "splash": (splash_heads(CAUSAL), (QUERIES,) * 3),
    "splash_local": (splash_heads(LOCAL), (QUERIES,) * 3),
    "splash_heads": (splash_heads(CAUSAL), (QUERIES, KEYS, KEYS)),
    "splash_heads_gradient": (partial(gradients, splash_heads(CAUSAL)), (QUERIES, KEYS, KEYS)),
    "splash_groups": (splash_groups(CAUSAL), (OF_GROUPS, KEYS, KEYS)),
    "splash_groups_gradient": (partial(gradients, splash_groups(CAUSAL)), (OF_GROUPS, KEYS, KEYS)),
    "splash_layer": (layer(splash_heads(CAUSAL)), (weights(GROUPS), X)),
    "gmm": (gmm, SORTED),
    "gmm_gradient": (partial(gradients, gmm), SORTED),
    "gmm_layer": (experts(gmm), (EXPERT_WEIGHTS, of(ROWS, MODEL), SIZES)),
    "paged": (
        partial(paged_attention, pages_per_compute_block=4),
        (of(BATCH, HEADS, WIDTH), PAGES, PAGES, of(BATCH, dtype=jnp.int32), of(BATCH, 16, dtype=jnp.int32)),
    ),
    "ragged": (jax.lax.ragged_dot, SORTED),
    "ragged_summed": (summed, (of(ROWS, MODEL), of(ROWS, HIDDEN), SIZES)),
    "ragged_batch": (in_a_batch, (of(64, 128, MODEL), of(64, MODEL, HIDDEN), SIZES)),
    "ragged_gradient": (partial(gradients, jax.lax.ragged_dot), SORTED),
    "ragged_layer": (experts(jax.lax.ragged_dot), (EXPERT_WEIGHTS, of(ROWS, MODEL), SIZES)),
}


def main(arguments: list[str] | None = None) -> int:
    options = _options(arguments)
    unknown = [name for name in options.programs if name not in PROGRAMS and not Path(name).is_file()]
    if unknown:
        raise SystemExit(f"no program {unknown[0]}; there are {', '.join(PROGRAMS)}")
    rows: list[Row] = []
    for name in options.programs or PROGRAMS:
        path = stored(name, options.keep)
        for mesh in options.mesh:
            for row in measure(Path(name).name, path, mesh, options):
                rows.append(row)
                note(" ".join(form.format_map(row) for form in COLUMNS.values()))
                if row["verdict"] and row.get("differences"):
                    note(f"    {fidelity.difference(row)}")
    show("hand-written kernels, compiled by XLA:TPU", COLUMNS, rows, {"wrong": "red"})
    write_json(options.json, rows)
    return 1 if any(row["verdict"] for row in rows) else 0


def stored(name: str, folder: Path) -> Path:
    """The program as JAX lowers it for TPU, kept in `folder`; a file as it is."""
    if name not in PROGRAMS:
        return Path(name)
    path = folder / f"{name}.mlir.zst"
    if not path.exists():
        function, arrays = PROGRAMS[name]
        jax.clear_caches()
        text = jax.jit(function).trace(*arrays).lower(lowering_platforms=("tpu",)).as_text(debug_info=True)
        folder.mkdir(parents=True, exist_ok=True)
        path.write_bytes(zstandard.compress(text.encode()))
    return path


def measure(name: str, path: Path, mesh: str, options: argparse.Namespace) -> Iterator[Row]:
    """A row for each plan that splits something."""
    outcome = partition(Request(str(path), mesh, iterations=options.iterations))
    plans = {"search": outcome.result.plan, **strategies(outcome.problem)}
    for label, plan in plans.items():
        if not plan or (options.plans and label not in options.plans):
            continue
        job = fidelity.Job(name, mesh, "tpu")
        row = {"program": name, "plan": label, "form": options.form, "mesh": mesh, "compiler": "tpu"}
        row |= fidelity.compare(outcome, plan, options.form, job, options)
        row["milliseconds"] = 1e3 * Evaluator(outcome.problem).cost(plan).step_seconds
        if row.get("share", 0.0) < AIM and not row.get("compiled_kib", SMALL_KIB) < SMALL_KIB:
            row["verdict"] = "wrong"
        yield row


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("programs", nargs="*", help="; ".join(PROGRAMS))
    parser.add_argument("--mesh", nargs="+", default=["v5e-16", "v4-32"], metavar="SPEC")
    parser.add_argument("--plans", nargs="+", default=[], metavar="NAME", help="only these plans, e.g. search fsdp")
    parser.add_argument("--form", default="stablehlo", choices=["stablehlo", "hlo"])
    parser.add_argument("--iterations", type=int, default=60, help="of the search")
    parser.add_argument(
        "--keep", type=Path, default=Path("build/kernels"), metavar="FOLDER", help="of compiled programs"
    )
    parser.add_argument("--json", metavar="FILE")
    parser.set_defaults(no_numbers=True)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
