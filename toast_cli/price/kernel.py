"""The work of one kernel: bytes and FLOPs for each operand and result of its op, on whole arrays, and the arithmetic
that the compiler makes of one op.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod

from toast_cli.price.cost import Grid, local_size
from toast_cli.price.fusion import expansions, part_made
from toast_cli.price.layouts import Tiling
from toast_cli.price.profile import CompilerProfile
from toast_cli.program.model import Op, Program, factors_of
from toast_cli.program.ops import ARGUMENT, FFT, RAGGED_DOT, SCATTER

Rows = tuple[tuple[int, ...], Tiling]  # shape and tiling of an array whose rows run along given dimensions


@dataclass(slots=True)
class KernelSide:
    """Work of a kernel for one operand or result of its op.

    Attributes:
        bytes, elements: read for an operand, written for a result. largest: elements of the largest array read.
        flops: elementwise operations. read: bytes that the epilogue of a contraction reads, for a result. passing: the
        part of these bytes in temporaries. widest: bytes of the largest of those, as they count in `reuse_widths`.
        staying: the part of these bytes in arrays that stay in on-chip memory while the loop runs, if all arrays that
            the loop keeps there fit; beside: bytes of all those, see `loop_residency`.
        fetched: the part of these bytes that is fetched ahead if it fits, see `on_chip.drop_early_fetches`.
        rows: the part of these bytes in arrays whose rows run along given dimensions, see `dims_of_rows`: a device that
            has a part of each row reads and writes whole tiles.
    """

    bytes: int = 0
    elements: int = 0
    largest: int = 0
    flops: float = 0.0
    read: int = 0
    passing: int = 0
    widest: float = 0.0
    staying: float = 0.0
    beside: float = 0.0
    fetched: int = 0
    rows: dict[Rows, int] = field(default_factory=dict)


@dataclass(slots=True)
class Kernel:
    """One kernel, without its op's own arithmetic.

    Attributes:
        operands, results: one `KernelSide` each.
        unfinished: bytes of a contraction with an elementwise epilogue. If its result is all-reduced first, it is
            written and read once more.
        rides: it is merged into another kernel, so that it reads nothing itself.
    """

    operands: list[KernelSide]
    results: list[KernelSide]
    unfinished: int = 0
    rides: bool = False


# ---------------------------------------------------------------- arithmetic
# Arithmetic of single ops: the operations that the compiler makes of one op on its vector or matrix unit.

MASKED = 1.5  # time of a masked product over that of a dense one, see `ragged_growth`
FOUND, ADDED, SWAPPED = 50.0, 65.0, 650.0  # operations to look an element up, to add it atomically, in 16 bits


def arithmetic(program: Program, op: Op, profile: CompilerProfile) -> float:
    """Flops of one execution of an op, on the vector unit or the matrix unit."""
    part = part_made(program, op) if "sliced-products" in profile.passes else 1.0
    growth = _fourier_growth(op, profile) * ragged_growth(op, profile)
    return part * growth * op_arithmetic(program, op, expansions(profile), "atomic-scatters" in profile.passes)


def op_arithmetic(program: Program, op: Op, cost: Mapping[str, float], atomic: bool) -> float:
    """The same without growth. cost: see `expansions`. atomic: see `lookup_operations`."""
    if atomic and op.kind.lookup:
        return lookup_operations(program, op)
    each = cost.get(op.name)
    return op.flops if each is None else each * program.values[op.results[0]].elements


def lookup_operations(program: Program, op: Op) -> float:
    """Vector-unit operations of a gather or scatter.

    XLA:GPU's kernel for scatters has one thread for each element of the updates. Adding f32 with an atomic operation
    takes as long as 65 f32 operations; 16-bit types use compare-and-swap loops, ten times as long with few additions
    per row. Gathers also have one thread per element, which takes 50 operations to find its row. Measured by
    `benchmarks/gpu_timer.py` on an H200: 0.4 to 0.6 elements of f32 added in a picosecond, 0.02 to 0.15 of bf16, 0.8
    looked up.
    """
    if op.name != SCATTER:
        return FOUND * program.values[op.results[0]].elements
    updates = program.values[op.operands[-1]]
    return (ADDED if updates.bits >= 32 else SWAPPED) * updates.elements


def scatter_start_bytes(program: Program, op: Op, free: tuple[bool, ...]) -> int:
    """Bytes moved to initialise the array that a scatter adds to, and to read the rows it adds to: it is written if it
    is made of constants, and copied if it is a non-donated argument or has other readers.
    """
    source = op.operands[0]
    size, rows = program.values[source].bytes, min(program.values[source].bytes, program.values[op.operands[-1]].bytes)
    if free[source]:
        return size + rows
    given = program.ops[program.producer[source]].name == ARGUMENT
    kept = given and not any(
        argument.value == source and argument.aliased_result >= 0 for argument in program.arguments
    )
    return rows + (2 * size if kept or len(program.users[source]) > 1 else 0)


def _fourier_growth(op: Op, profile: CompilerProfile) -> float:
    """Factor from counted flops (`5 n log2 n`, Frigo and Johnson's FFTW) to flops that take as long.

    XLA:TPU turns transforms into small products, transpositions and twiddle factors: 4 to 13 times as long, of 128 to
    65,536 points, powers of two and three times such powers (libtpu 0.0.42.1 for v4, v5e and v6e). A length with a
    larger odd factor takes longer (600 points: some thirty times, 1,000 points: two hundred).
    """
    return profile.fourier_growth if op.name == FFT and "fourier-transforms" in profile.passes else 1.0


def ragged_growth(op: Op, profile: CompilerProfile) -> float:
    """Flops that take as long over flops counted of a product of ragged groups: 1 where a kernel visits each row once,
    the number of groups or more where all rows are multiplied for each.

    XLA:TPU has such a kernel for products that keep rows (`[m, k] x [g, k, n] -> [m, n]`), and none for those that sum
    over them (`[m, k] x [m, n] -> [g, k, n]`, the gradient of the experts' weights). Each group of these takes 1.4 to
    1.56 times as long as one dense product of all rows, for the mask (2 to 16 groups of 4,096 or 8,192 rows, 512 to
    4,096 columns, v5e; 64 groups 2.3 times; libtpu 0.0.42.1). For v4 and v5p it has kernels for both, which on v5p are
    as fast as megablox within 2 % (marin-community/marin#2710).
    XLA:GPU has none at all: it writes the rows for each group, with zeros in place of others' rows, and multiplies
    [m, g k] x [g k, n]; 16 groups of 8,192 rows took 16 times as long as one dense product, with these copies.
    """
    masked = "masked-groups" in profile.passes
    if op.name != RAGGED_DOT or not (masked or "ragged-gradients" in profile.passes):
        return 1.0
    read, weights, result = factors_of(*op.rule.operands[:2], op.rule.results[0])
    groups = (result | weights) - read - (result & weights) if masked else result - read - weights
    return prod(op.rule.sizes[factor] for factor in groups) * (MASKED if groups and not masked else 1.0)


def elements_walked(profile: CompilerProfile, grid: Grid, cuts: tuple[int, ...]) -> float:
    """Elements of the larger operand on one device, 0 where the matrix unit multiplies. cuts: [factors] shards of each.

    Where one side of a product has one row on a device, XLA:TPU multiplies element by element and adds up: the
    attention of the one new query of a decoding step, or any product of a batch that is split into single rows. This
    processes the larger operand like elementwise work, and takes about twenty times the cycles of the matrix unit for
    two rows. Seen in single products of one row, with a batch and without (64 to 4,096 added up, f32 and bf16),
    compiled by libtpu 0.0.42.1 for v4, v5e, v5p and v6e (`python -m benchmarks.singles`).
    """
    if "vector-products" not in profile.passes or grid.window > 1.0:
        return 0.0
    sides = grid.batch, grid.depth, grid.rows, grid.columns
    batch, depth, rows, columns = (local_size(factors, cuts) for factors in sides)
    return batch * depth * max(rows, columns) if min(rows, columns) <= 1.0 else 0.0
