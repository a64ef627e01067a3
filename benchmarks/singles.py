"""What XLA:TPU makes of single ops that two passes are about, beside what they say.

* `vector_products`: cycles of a product of one row, and of two, with weights of so many elements.
* `gathered_pieces`: temporaries of a look-up in a table that rests split over all devices and is gathered, over its
  size.

`python -m benchmarks.singles [MESH ...]` compiles them ahead of time with libtpu and prints both tables.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.common import Row, show
from toast_cli.ask_xla.child import Failure
from toast_cli.ask_xla.compile import Answer, compile_for, target_of
from toast_cli.hardware import load_spec
from toast_cli.price.layouts import pieces_are_copied
from toast_cli.price.profiles import find_profile

MESHES = ("v4-32", "v5e-16", "v6e-64")
WEIGHTS = ((4096, 4096), (1024, 8192))
TABLES = ((80_000, 2048), (80_064, 2048), (80_128, 2048), (160_000, 1024))
PRODUCTS = {
    "mesh": "{mesh}", "type": "{dtype}", "weights": "{weights}", "cycles of one row": "{one:.0f}",
    "of two": "{two:.0f}", "elements a cycle": "{rate:.0f}",
}  # fmt: skip
LOOKUPS = {
    "mesh": "{mesh}", "table": "{table}", "rows of a piece": "{piece:.0f}", "temporaries": "{times:.2f} x the table",
    "counted": "{counted} x",
}  # fmt: skip


def main(meshes: list[str]) -> int:
    show("products of few rows", PRODUCTS, [row for mesh in meshes or MESHES for row in products(mesh)])
    show("gathered tables", LOOKUPS, [row for mesh in meshes or MESHES for row in lookups(mesh)])
    return 0


def products(mesh: str) -> Iterator[Row]:
    import jax

    for dtype in ("float32", "bfloat16"):
        for depth, columns in WEIGHTS:
            cycles = [
                compiled(
                    mesh,
                    lambda x, w: x @ w,
                    *(jax.ShapeDtypeStruct(s, dtype) for s in ((rows, depth), (depth, columns))),
                ).cycles
                for rows in (1, 2)
            ]
            yield {
                "mesh": mesh, "dtype": dtype, "weights": f"{depth} x {columns}", "one": cycles[0], "two": cycles[1],
                "rate": depth * columns / cycles[0],
            }  # fmt: skip


def lookups(mesh: str) -> Iterator[Row]:
    import jax
    import jax.numpy as jnp

    spec = load_spec(mesh)
    for rows, features in TABLES:
        whole = f"sdy.sharding_constraint %arg0 <@mesh, [{{}}, {{}}]> : tensor<{rows}x{features}xbf16>"
        shapes = jax.ShapeDtypeStruct((rows, features), jnp.bfloat16), jax.ShapeDtypeStruct((64, 128), jnp.int32)
        text = jax.jit(lambda table, ids: jnp.tanh(table[ids])).lower(*shapes).as_text()
        facts = compiled_text(mesh, gathered(text, spec.devices, whole))
        piece = rows / spec.devices
        yield {
            "mesh": mesh, "table": f"{rows} x {features} bf16", "piece": piece,
            "times": facts.temp_bytes / (rows * features * 2),
            "counted": 1 + pieces_are_copied(find_profile(spec.chip), (int(piece), features), 0, looked_up=True),
        }  # fmt: skip


def gathered(text: str, devices: int, constraint: str) -> str:
    """The program with its first argument split along rows over all devices, and gathered before anything reads it."""
    head, _, body = text.partition("func.func public @main(%arg0: ")
    kind, _, rest = body.partition(",")
    signature, _, ops = rest.partition("{\n")
    split = kind.split(" {")[0] + ' {sdy.sharding = #sdy.sharding<@mesh, [{"d"}, {}]>}'
    ops = ops.replace("%arg0", "%whole")
    mesh = f'sdy.mesh @mesh = <["d"={devices}]>\n  '
    return f"{head}{mesh}func.func public @main(%arg0: {split},{signature}{{\n    %whole = {constraint}\n{ops}"


def compiled(mesh: str, run: Callable[..., Any], *shapes: Any) -> Answer:
    import jax

    return compiled_text(mesh, jax.jit(run).lower(*shapes).as_text())


def compiled_text(mesh: str, text: str) -> Answer:
    spec = load_spec(mesh)
    text = text.replace("mhlo.num_partitions = 1 ", f"mhlo.num_partitions = {spec.devices} ")
    facts = compile_for(text.encode(), "stablehlo", target_of(spec))
    if isinstance(facts, Failure):
        raise SystemExit(facts.reason)
    return facts


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
