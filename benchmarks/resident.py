"""What kernels take that neither read nor write device memory: cycles that XLA:TPU estimates for them.

Compiles loops that keep all their arrays in on-chip memory, ahead of time with libtpu: one for elementwise work on one
array, and one for each product that is added to what the loop carries, with whether it was compiled again and whether
`has_small_windows` says so. `python -m benchmarks.resident [MESH ...]` prints one row for each kernel;
`OnChip.vector_speed` and `OnChip.window_bytes` were read off them by hand.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.common import Row, show
from toast_cli.ask_xla.child import Failure
from toast_cli.ask_xla.compile import compile_for, target_of
from toast_cli.ask_xla.hlo_text import computations
from toast_cli.hardware import Spec, load_spec
from toast_cli.price.on_chip import has_small_windows
from toast_cli.price.profiles import find_profile

MESHES = ("v4-32", "v5e-16", "v5p-64", "v6e-64")
TRIPS = 50
ROWS = [8 * 4**power for power in range(6)]  # of 1,024 f32 elements
ADDED = (
    (640, 6144), (640, 8192), (768, 5120), (768, 6144), (1024, 3072), (1024, 4096), (1024, 6144), (1152, 3840),
    (1280, 4096), (1280, 5120), (1536, 2560), (1536, 4096), (1600, 4800), (1792, 2560), (1792, 4096), (2048, 3584),
    (2048, 4096), (2048, 6144), (2048, 8192), (2304, 2304), (2560, 3072), (4096, 4096),
)  # fmt: skip
COLUMNS = {
    "mesh": "{mesh}", "kernel": "{kernel}", "compiled us": "{compiled:.2f}", "KiB": "{kib:.0f}", "GB/s": "{rate:.0f}",
}  # fmt: skip
ADDED_COLUMNS = {
    "mesh": "{mesh}", "added to": "{kernel}", "compiled us": "{compiled:.2f}", "GB/s": "{rate:.0f}",
    "again": "{again}", "predicted": "{predicted}",
}  # fmt: skip
_AGAIN = re.compile(r'"retry_count":"(\d+)"')
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_RESULT = re.compile(r"(?:f32|bf16)\[(\d+),(\d+)\]")


def main(meshes: list[str]) -> int:
    show("kernels in on-chip memory", COLUMNS, [row for mesh in meshes or MESHES for row in measured(mesh)])
    show("products added to what a loop carries", ADDED_COLUMNS, [r for mesh in meshes or MESHES for r in added(mesh)])
    return 0


def elementwise() -> tuple[Callable[..., Any], list[Any]]:
    """Arrays, each changed by a polynomial of itself in every trip."""
    import jax
    import jax.numpy as jnp

    def run(arrays: Any) -> Any:
        return jax.lax.fori_loop(0, TRIPS, lambda _, arrays: [x * x * 0.5 + 1.0 for x in arrays], arrays)

    return run, [[jax.ShapeDtypeStruct((rows, 1024), jnp.float32) for rows in ROWS]]


def accumulating(rows: int, columns: int) -> tuple[Callable[..., Any], list[Any]]:
    """The gradient of a recurrence's weights: products of 16 steps' states with what was made of them."""
    import jax
    import jax.numpy as jnp

    def run(total: Any, weights: Any, driven: Any) -> Any:
        def step(carried: tuple[Any, Any], driven: Any) -> tuple[tuple[Any, Any], Any]:
            total, state = carried
            made = jnp.tanh(driven + state @ weights)
            after = jnp.tanh(made @ weights.T)
            return (total + state.T @ made, after), after

        return jax.lax.scan(step, (total, jnp.ones((16, rows))), driven)

    shapes = (rows, columns), (rows, columns), (TRIPS, 16, columns)
    return run, [jax.ShapeDtypeStruct(shape, "float32") for shape in shapes]


def added(mesh: str) -> Iterator[Row]:
    """One row for each shape of what is added to."""
    spec = load_spec(mesh)
    profile = find_profile(spec.chip)
    for shape in ADDED:
        for found, line in lines_of(lambda shape=shape: accumulating(*shape), spec):
            if found in (shape, shape[::-1]):
                seconds = float(_CYCLES.findall(line)[0]) / spec.chip.clock_hertz
                again, predicted = _AGAIN.findall(line)[0] != "0", has_small_windows(profile, *found, 32)
                yield {
                    "mesh": mesh, "kernel": f"{found[0]} x {found[1]}", "compiled": seconds * 1e6,
                    "rate": 8 * found[0] * found[1] / seconds / 1e9,
                    "again": "yes" if again else "no", "predicted": "yes" if predicted else "no",
                }  # fmt: skip


def measured(mesh: str) -> Iterator[Row]:
    """One row for each kernel of the loop of elementwise work."""
    spec = load_spec(mesh)
    kernels = sorted((shape, float(_CYCLES.findall(line)[0])) for shape, line in lines_of(elementwise, spec))
    for (rows, columns), cycles in kernels:
        seconds, size = cycles / spec.chip.clock_hertz, 8 * rows * columns  # read and written
        yield {
            "mesh": mesh, "kernel": f"{rows} x {columns}", "compiled": seconds * 1e6, "kib": size / 1024,
            "rate": size / seconds / 1e9,
        }  # fmt: skip


def lines_of(
    make: Callable[[], tuple[Callable[..., Any], list[Any]]], spec: Spec
) -> Iterator[tuple[tuple[int, int], str]]:
    """(shape of the result, text) of each kernel of the loop's body."""
    import jax

    run, arguments = make()
    text = jax.jit(run).lower(*arguments).as_text()
    text = text.replace("mhlo.num_partitions = 1 ", f"mhlo.num_partitions = {spec.devices} ")
    facts = compile_for(text.encode(), "stablehlo", target_of(spec))
    if isinstance(facts, Failure):
        raise SystemExit(facts.reason)
    bodies, entry = computations(facts.hlo_text)
    for name, nodes in bodies.items():
        for node in nodes.values() if name != entry else ():
            result = _RESULT.match(node.kind) if node.opcode == "fusion" else None
            if result and _CYCLES.search(node.rest):
                yield (int(result[1]), int(result[2])), node.rest


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
