"""Which values reach memory. One static pass, before any plan is known.

A first model of what XLA's fusion does: elementwise work, broadcasts and conversions are computed where they are read; what
contractions, convolutions, reductions, gathers, scatters and loops make or read lies in memory. A product followed by one
elementwise reader is written only once, by that reader (output fusion).
"""

from __future__ import annotations

from toast_cli.program.model import ARGUMENT, CARRY, JOIN, RESULT, Op, Program

_ELEMENTWISE = [
    "abs",
    "add",
    "and",
    "atan2",
    "bitcast_convert",
    "cbrt",
    "ceil",
    "clamp",
    "compare",
    "complex",
    "convert",
    "cosine",
    "divide",
    "exponential",
    "exponential_minus_one",
    "floor",
    "imag",
    "is_finite",
    "log",
    "log_plus_one",
    "logistic",
    "maximum",
    "minimum",
    "multiply",
    "negate",
    "not",
    "or",
    "popcnt",
    "power",
    "real",
    "remainder",
    "round_nearest_afz",
    "round_nearest_even",
    "rsqrt",
    "select",
    "shift_left",
    "shift_right_arithmetic",
    "shift_right_logical",
    "sign",
    "sine",
    "sqrt",
    "subtract",
    "tan",
    "tanh",
    "xor",
    "reduce_precision",
]
_SHAPE_ONLY = [
    "broadcast_in_dim",
    "broadcast",
    "constant",
    "iota",
    "reshape",
    "transpose",
    "slice",
    "pad",
    "reverse",
    "concatenate",
    "dynamic_slice",
]

ELEMENTWISE = frozenset(f"stablehlo.{name}" for name in _ELEMENTWISE)
FUSIBLE = ELEMENTWISE | {f"stablehlo.{name}" for name in _SHAPE_ONLY}
# A view of something in memory is read in place by whoever needs it.
VIEWS = frozenset(
    f"stablehlo.{name}" for name in ("convert", "reshape", "transpose", "broadcast_in_dim", "bitcast_convert", "slice")
)
# Not worth computing twice: what takes a polynomial or an iteration an element. Everything else that is fusible is fused into
# each of its readers, up to a few ops deep.
EXPENSIVE = frozenset(
    f"stablehlo.{name}"
    for name in [
        "exponential",
        "exponential_minus_one",
        "log",
        "log_plus_one",
        "logistic",
        "tanh",
        "cosine",
        "sine",
        "tan",
        "atan2",
        "power",
        "sqrt",
        "rsqrt",
        "cbrt",
        "divide",
        "remainder",
        "dynamic_slice",
        "concatenate",
    ]
)
RECOMPUTED_DEPTH = 4
PRODUCTS = frozenset({"stablehlo.dot_general", "stablehlo.dot", "stablehlo.convolution"})


def is_fusible(name: str) -> bool:
    return name in FUSIBLE or (name.startswith("chlo.") and name != "chlo.top_k")


def is_elementwise(name: str) -> bool:
    return name in ELEMENTWISE or (name.startswith("chlo.") and name != "chlo.top_k")


def materialised(program: Program, free: tuple[bool, ...]) -> list[bool]:
    """[values] whether each value is written to memory."""
    ops, users = program.ops, program.users
    stored = [False] * len(program.values)
    depth = [0] * len(program.values)  # ops between a value and what it is computed from that is stored
    for op in ops:
        below = 1 + max((depth[v] for v in op.operands), default=0)
        for value in op.results:
            stored[value] = _stored(program, users[value], op, value, below, free)
            depth[value] = 0 if stored[value] or free[value] else below - (op.name in VIEWS)
    return stored


def _stored(
    program: Program, uses: list[tuple[int, int]], producer: Op, value: int, depth: int, free: tuple[bool, ...]
) -> bool:
    ops, name = program.ops, producer.name
    if name in (ARGUMENT, CARRY, JOIN):
        return True
    readers = {u for u, _ in uses}
    kept = any(ops[u].name in (CARRY, JOIN, RESULT) for u in readers)
    if free[value]:
        return kept and program.values[value].bytes > 1024
    if any(ops[u].loop != producer.loop for u in readers):  # read inside a loop: nothing is fused across its boundary
        return True
    if name in PRODUCTS and len(readers) == 1:
        (reader,) = readers
        return not (is_elementwise(ops[reader].name) and _same_size(program, value, reader))
    if not is_fusible(name):
        return True
    if kept:
        return True
    if name in VIEWS and depth <= 1:
        return False
    if any(not is_fusible(ops[u].name) and ops[u].name != "stablehlo.reduce" for u in readers):
        return True
    return len(readers) > 1 and (name in EXPENSIVE or name.startswith("chlo.") or depth > RECOMPUTED_DEPTH)


def _same_size(program: Program, value: int, reader: int) -> bool:
    result = program.ops[reader].results[0]
    return program.values[result].shape == program.values[value].shape
