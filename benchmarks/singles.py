"""What XLA:TPU makes of single ops that passes and figures of the profiles are about, beside what these say.

    python -m benchmarks.singles [TABLE ...] [--mesh SPEC ...]

Each table is one of `TABLES`. Programs are compiled ahead of time with libtpu: no device is needed.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from benchmarks.common import Row, show
from toast_cli.ask_xla.child import Failure
from toast_cli.ask_xla.compile import Answer, compile_for, estimated_cycles, target_of
from toast_cli.ask_xla.hlo_text import computations
from toast_cli.hardware import Spec, load_spec
from toast_cli.price.compiled_collectives import stays_slice_gather
from toast_cli.price.layouts import pieces_are_copied
from toast_cli.price.on_chip import has_small_windows
from toast_cli.price.profiles import find_profile


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="*", metavar="TABLE", help=f"of {', '.join(TABLES)}; all where none is named")
    parser.add_argument("--mesh", nargs="+", metavar="SPEC", help="other specifications than each table's own")
    options = parser.parse_args()
    for name in options.tables or TABLES:
        table = TABLES[name]
        rows = [{"mesh": mesh, **row} for mesh in options.mesh or table.meshes for row in table.rows(load_spec(mesh))]
        show(table.title, {"mesh": "{mesh}", **table.columns}, rows, {"differs": "red"})


def asked(spec: Spec, text: str) -> Answer:
    """What the compiler makes of a program for all devices."""
    text = text.replace("mhlo.num_partitions = 1 ", f"mhlo.num_partitions = {spec.devices} ")
    answer = compile_for(text.encode(), "stablehlo", target_of(spec))
    if isinstance(answer, Failure):
        raise SystemExit(answer.reason)
    return answer


def text_of(run: Callable[..., Any], *shapes: Any) -> str:
    return str(jax.jit(run).lower(*shapes).as_text())


def arg(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def sharded(sharding: str) -> str:
    return f"{{sdy.sharding = #sdy.sharding<@mesh, {sharding}>}}"


def vector_products(spec: Spec) -> Iterator[Row]:
    """Cycles of a product of one row, and of two, with weights of so many elements."""
    for dtype in (jnp.float32, jnp.bfloat16):
        for depth, columns in ((4096, 4096), (1024, 8192)):
            weights = arg(depth, columns, dtype=dtype)
            one, two = (
                asked(spec, text_of(jnp.matmul, arg(rows, depth, dtype=dtype), weights)).cycles for rows in (1, 2)
            )
            yield {
                "dtype": weights.dtype, "weights": f"{depth} x {columns}", "one": one, "two": two,
                "rate": depth * columns / one,
            }  # fmt: skip


PIECES = '[{"d"}, {}]'


def gathered_pieces(spec: Spec) -> Iterator[Row]:
    """Temporaries of a look-up in a table that rests split over all devices and is gathered, over its size."""
    for rows, features in ((80_000, 2048), (80_064, 2048), (80_128, 2048), (160_000, 1024)):
        table, ids = f"tensor<{rows}x{features}xbf16>", arg(64, 128, dtype=jnp.int32)
        text = text_of(lambda table, ids: jnp.tanh(table[ids]), arg(rows, features, dtype=jnp.bfloat16), ids)
        head, _, body = text.partition("func.func public @main(%arg0: ")
        kind, _, rest = body.partition(",")
        signature, _, ops = rest.partition("{\n")
        split, ops = f"{kind.split(' {')[0]} {sharded(PIECES)}", ops.replace("%arg0", "%whole")
        gather = f"%whole = sdy.sharding_constraint %arg0 <@mesh, [{{}}, {{}}]> : {table}"
        mesh = f'sdy.mesh @mesh = <["d"={spec.devices}]>\n  '
        text = f"{head}{mesh}func.func public @main(%arg0: {split},{signature}{{\n    {gather}\n{ops}"
        piece = rows / spec.devices
        yield {
            "table": f"{rows} x {features} bf16", "piece": piece,
            "times": asked(spec, text).temp_bytes / (rows * features * 2),
            "counted": 1 + pieces_are_copied(find_profile(spec.chip), (int(piece), features), 0, looked_up=True),
        }  # fmt: skip


def slice_gathers(spec: Spec) -> Iterator[Row]:
    """Whether a weight that rests in pieces is gathered or all-reduced, over a whole slice and over a part of it."""
    mesh, columns, sep = spec.mesh(None), 1024, '", "'
    axes = ", ".join(f'"{name}"={size}' for name, size in zip(mesh.names, mesh.sizes, strict=True))
    for over in (mesh.names, mesh.names[:1]):
        for mib in (2, 16, 18, 64):
            rows = mib * 2**20 // (2 * columns)
            given, weight, out = (
                f"tensor<{shape}xbf16>" for shape in (f"4096x{rows}", f"{rows}x{columns}", "4096x1024")
            )
            pieces, everywhere = (sharded(f'[{{"{sep.join(names)}"}}, {{}}]') for names in (over, mesh.names))
            answer = asked(
                spec,
                f"""module @gathered {{
  sdy.mesh @mesh = <[{axes}]>
  func.func public @main(%x: {given} {everywhere}, %w: {weight} {pieces}) -> ({out} {everywhere}) {{
    %0 = sdy.sharding_constraint %w <@mesh, [{{}}, {{}}]> : {weight}
    %1 = stablehlo.dot_general %x, %0, contracting_dims = [1] x [0] : ({given}, {weight}) -> {out}
    return %1 : {out}
  }}
}}
""",
            )
            compiled = re.search(r" (all-gather|all-reduce)(-start)?\(", answer.hlo_text)
            stays = stays_slice_gather(
                find_profile(mesh.chip), mesh, tuple(mesh.names.index(axis) for axis in over), mib * 2**20
            )
            row = {"compiled": compiled[1] if compiled else "nothing", "pass": "all-gather" if stays else "all-reduce"}
            verdict = "" if row["compiled"] == row["pass"] else "differs"
            yield {"over": "+".join(over), "mib": mib, "verdict": verdict, **row}


WORK = {
    "exp, tanh": ("exponential %x", "tanh %0"),
    "multiply, add": ("multiply %x, %x", "add %0, %x"),
    "negate, abs": ("negate %x", "abs %0"),
}
ROWS, SIDES, ALL = '[{"data"}, {}, {"model"}, {}]', '[{"data"}, {}, {}, {"model"}]', '[{"data"}, {}, {}, {}]'
# How the array is made, and how either product takes it.
TAKEN = {
    "other pieces": (ALL, ROWS, SIDES),
    "a piece and all": (ALL, ROWS, ALL),
    "one piece": (ALL, ROWS, ROWS),
    "made in pieces": (ROWS, ROWS, ROWS),
}


def unsliced(spec: Spec) -> Iterator[Row]:
    """Microseconds of all kernels that make an array whole along an axis of four and multiply by pieces of it: both
    products take the same quarter, different ones, or one takes all. For comparison it is made in quarters."""
    array, other = "tensor<16x12x512x512xbf16>", "tensor<16x12x512x64xbf16>"
    types = f"({array}, {other}) -> {other}"
    for work, (first, second) in WORK.items():
        row: Row = {"work": work}
        for case, (made, one, two) in TAKEN.items():
            answer = asked(
                spec,
                f"""module @unsliced {{
  sdy.mesh @mesh = <["data"=4, "model"=4]>
  func.func public @main(
    %x: {array} {sharded(ALL)}, %k: {other} {sharded(ALL)}
  ) -> ({other} {sharded(ROWS)}, {other} {sharded(ROWS)}) {{
    %0 = stablehlo.{first} : {array}
    %1 = stablehlo.{second} : {array}
    %y = sdy.sharding_constraint %1 <@mesh, {made}> : {array}
    %a = sdy.sharding_constraint %y <@mesh, {one}> : {array}
    %b = sdy.sharding_constraint %y <@mesh, {two}> : {array}
    %r = stablehlo.dot_general %a, %k, batching_dims = [0, 1] x [0, 1], contracting_dims = [3] x [2] : {types}
    %s = stablehlo.dot_general %b, %k, batching_dims = [0, 1] x [0, 1], contracting_dims = [2] x [2] : {types}
    return %r, %s : {other}, {other}
  }}
}}
""",
            )
            row[case] = 1e6 * estimated_cycles(answer.hlo_text) / spec.chip.clock_hertz
        yield row


TRIPS = 50
CYCLES, AGAIN = re.compile(r'"estimated_cycles":"(\d+)"'), re.compile(r'"retry_count":"(\d+)"')
RESULT = re.compile(r"(?:f32|bf16)\[(\d+),(\d+)\]")


def kernels_in_loops(spec: Spec, text: str) -> Iterator[tuple[tuple[int, int], float, str]]:
    """(shape of the result, seconds, text) of each kernel of a loop's body."""
    bodies, entry = computations(asked(spec, text).hlo_text)
    for name, nodes in bodies.items():
        for node in nodes.values() if name != entry else ():
            result = RESULT.match(node.kind) if node.opcode == "fusion" else None
            if result and (cycles := CYCLES.search(node.rest)):
                yield (int(result[1]), int(result[2])), float(cycles[1]) / spec.chip.clock_hertz, node.rest


def resident(spec: Spec) -> Iterator[Row]:
    """What elementwise kernels take that neither read nor write device memory: `OnChip.vector_speed` was read off them.
    Each array is changed by a polynomial of itself in every trip."""

    def run(arrays: Any) -> Any:
        return jax.lax.fori_loop(0, TRIPS, lambda _, arrays: [x * x * 0.5 + 1.0 for x in arrays], arrays)

    text = text_of(run, [arg(8 * 4**power, 1024) for power in range(6)])
    for (rows, columns), seconds, _ in sorted(kernels_in_loops(spec, text)):
        size = 8 * rows * columns  # read and written
        yield {
            "kernel": f"{rows} x {columns}", "us": seconds * 1e6, "kib": size / 1024, "rate": size / seconds / 1e9,
        }  # fmt: skip


# Shapes of what a loop adds up.
ADDED = (
    (640, 6144), (640, 8192), (768, 5120), (768, 6144), (1024, 3072), (1024, 4096), (1024, 6144), (1152, 3840),
    (1280, 4096), (1280, 5120), (1536, 2560), (1536, 4096), (1600, 4800), (1792, 2560), (1792, 4096), (2048, 3584),
    (2048, 4096), (2048, 6144), (2048, 8192), (2304, 2304), (2560, 3072), (4096, 4096),
)  # fmt: skip


def added(spec: Spec) -> Iterator[Row]:
    """Gradients of a recurrence's weights in on-chip memory, products of 16 steps' states with what was made of them:
    whether the kernel was compiled again (`OnChip.window_bytes`), and whether `has_small_windows` says so."""

    def run(total: Any, weights: Any, driven: Any) -> Any:
        def step(carried: tuple[Any, Any], driven: Any) -> tuple[tuple[Any, Any], Any]:
            total, state = carried
            made = jnp.tanh(driven + state @ weights)
            after = jnp.tanh(made @ weights.T)
            return (total + state.T @ made, after), after

        return jax.lax.scan(step, (total, jnp.ones((16, weights.shape[0]))), driven)

    profile = find_profile(spec.chip)
    for shape in ADDED:
        text = text_of(run, arg(*shape), arg(*shape), arg(TRIPS, 16, shape[1]))
        for result, seconds, line in kernels_in_loops(spec, text):
            if result in (shape, shape[::-1]):
                again, predicted = AGAIN.findall(line)[0] != "0", has_small_windows(profile, *result, 32)
                yield {
                    "kernel": f"{result[0]} x {result[1]}", "us": seconds * 1e6,
                    "rate": 8 * result[0] * result[1] / seconds / 1e9, "again": "yes" if again else "no",
                    "predicted": "yes" if predicted else "no",
                }  # fmt: skip


class Table(NamedTuple):
    title: str
    rows: Callable[[Spec], Iterator[Row]]
    meshes: tuple[str, ...]
    columns: dict[str, str]


SOME, CHIPS = ("v4-32", "v5e-16", "v6e-64"), ("v4-32", "v5e-16", "v5p-64", "v6e-64")
TABLES = {
    "vector-products": Table("products of few rows", vector_products, SOME, {
        "type": "{dtype}", "weights": "{weights}", "cycles of one row": "{one:.0f}", "of two": "{two:.0f}",
        "elements a cycle": "{rate:.0f}"}),
    "gathered-pieces": Table("gathered tables", gathered_pieces, SOME, {
        "table": "{table}", "rows of a piece": "{piece:.0f}", "temporaries": "{times:.2f} x the table",
        "counted": "{counted} x"}),
    "slice-gathers": Table("all-gathers of a weight as compiled", slice_gathers,
                           ("v5e-16", "v5e-256", "v4-32", "v4-128", "v5p-64", "v6e-64"), {
        "over": "{over}", "MiB": "{mib}", "compiled": "{compiled}", "pass": "{pass}", "": "{verdict}"}),
    "unsliced": Table("microseconds of all kernels, by what two products take of an array", unsliced, ("v5e-16",), {
        "work": "{work}", **{case: f"{{{case}:.1f}}" for case in TAKEN}}),
    "resident": Table("kernels in on-chip memory", resident, CHIPS, {
        "kernel": "{kernel}", "compiled us": "{us:.2f}", "KiB": "{kib:.0f}", "GB/s": "{rate:.0f}"}),
    "added": Table("products added to what a loop carries", added, CHIPS, {
        "added to": "{kernel}", "compiled us": "{us:.2f}", "GB/s": "{rate:.0f}", "again": "{again}",
        "predicted": "{predicted}"}),
}  # fmt: skip

if __name__ == "__main__":
    main()
