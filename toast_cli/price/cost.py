"""The results of the cost model for one plan, and the formulas for one kernel: a roofline for its local shape, the use
of the matrix unit.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, hypot, inf, prod
from typing import Final, Literal

from toast_cli.dimensions.model import Form
from toast_cli.hardware import Chip, matrix_rate
from toast_cli.hardware.model import groups_name
from toast_cli.plan.partitioned import Reason
from toast_cli.program.model import factors_of

BY_HAND: Final = "by hand"
INSIDE: Final = "inside"
ITSELF: Final = "itself"


@dataclass(frozen=True, slots=True)
class Attained:
    """The rates that kernels attain of a chip's published peaks; the default is an ideal chip.

    Attributes:
        matrix, vector, memory: fractions of the peak rates that large, well-shaped kernels reach. elementwise: fraction
            of memory bandwidth for kernels without a contraction; 0: `memory`.
        pass_bytes: least memory traffic counted for each element of the largest array that a vector kernel reads, in
            any memory.
        narrow_write: factor on the bytes written of an array with less than 4 bytes an element (packing). kept_bytes:
        an array up to this size that one kernel makes and others read stays in on-chip memory, and is no memory
        traffic. passed_bytes: nor is a larger array, if at most this much is written between its production and its
        last read; 0: it is.
        kernel_seconds: overhead of starting and draining one kernel.
        hand_written: fraction of the matrix unit's peak rate that hand-written attention kernels reach (Pallas, cuDNN).
        grouped: that of those which only multiply, such as the products of groups of rows. streamed: fraction of
        memory bandwidth that hand-written attention kernels reach; 0: `memory`.
        multiprocessors: number that share the tiles of a product's result, see `padding`; 0: there is one matrix
        unit. separate: nothing of the next kernel is loaded while one computes, see `kernel_seconds`.
    """

    matrix: float = 1.0
    vector: float = 1.0
    memory: float = 1.0
    elementwise: float = 0.0
    pass_bytes: float = 0.0
    narrow_write: float = 1.0
    kept_bytes: float = 0.0
    passed_bytes: float = 0.0
    kernel_seconds: float = 0.0
    hand_written: float = 1.0
    grouped: float = 1.0
    streamed: float = 0.0
    multiprocessors: int = 0
    separate: bool = False


@dataclass(frozen=True, slots=True)
class Cost:
    """Cost of one run of the program on one device, in seconds and bytes."""

    compute_seconds: float
    communication_seconds: float
    peak_bytes: float
    argument_bytes: float
    # [axes] seconds of the collectives that run over each, alone or with others; empty where no goal asks for it.
    axis_seconds: tuple[float, ...] = ()
    transfer_seconds: float = 0.0
    """Seconds of transfers between device and host memory, which XLA overlaps with compute."""
    # Seconds that communication adds to compute as the compiler schedules it, and if all kinds overlapped with compute;
    # None where the schedule is not simulated, see `Evaluator.cost`.
    exposed_seconds: float | None = None
    least_exposed_seconds: float | None = None

    @property
    def busy_seconds(self) -> float:
        """Compute, or the overlapped transfers if these take longer."""
        return max(self.compute_seconds, self.transfer_seconds)

    @property
    def step_seconds(self) -> float:
        """The expected step: compute plus the communication that the compiler does not overlap (`price.timeline`).
        Where the schedule is not simulated, `most_seconds`."""
        return self.most_seconds if self.exposed_seconds is None else self.busy_seconds + self.exposed_seconds

    @property
    def most_seconds(self) -> float:
        """Compute plus all communication, neither overlapped: the upper bound."""
        return self.busy_seconds + self.communication_seconds

    @property
    def least_seconds(self) -> float:
        """The step if the compiler overlapped every kind of collective with compute: the lower bound."""
        return self.busy_seconds + (self.least_exposed_seconds or 0.0)


@dataclass(frozen=True, slots=True)
class CollectiveUse:
    """One collective of a plan, equal ones merged.

    Attributes:
        kind, axes, bytes: as the chip's compiler emits it (see `compiled_collectives`); bytes of the result on one
        device.
        count: runs in one run of the program, loops counted. seconds: of all of them.
        op: the op that needs or makes the array. value: the array.
        waited_for: it is on the critical path, see `early_values`.
        written: kind and bytes as the partitioner writes it, before the chip's compiler changes it.
        reason: why it is there, see `plan.partitioned`; "by hand": the user wrote it in a manual region; "inside": the
            partitioner adds it in one, along axes that are left to it; "itself": the op is it, in the program of one
            device.
        group: devices in each group where the groups are not those along whole axes, else 0; `axes` are then those that
            the groups span.
        place: location in the module of its op, for one in a manual region.
    """

    kind: str
    axes: tuple[int, ...]
    bytes: float
    count: float
    seconds: float
    op: int
    value: int
    waited_for: bool
    written: tuple[str, float]
    reason: Reason | Literal["by hand", "inside", "itself"]
    group: int = 0
    place: str = ""

    def over(self, names: tuple[str, ...]) -> list[str]:
        """The axes it runs over, by name, or the size of its device groups."""
        return [groups_name(self.group)] if self.group else [names[axis] for axis in self.axes]


@dataclass(frozen=True, slots=True)
class Alive:
    """One array alive at the peak; role is "argument", "temporary", "carry", "gathered" or "partial", or "inside": all
    that is alive in the manual region that makes it."""

    value: int
    bytes: float
    role: str


@dataclass(frozen=True, slots=True)
class KernelUse:
    """Equal kernels on one device, with all their runs.

    Attributes:
        ops: the ops they belong to. name: of each. runs: executions in one run of the program.
        flops, bytes: flops, and bytes read and written, of all runs. seconds: of all runs.
        inside: they are in the manual region that the op is.
    """

    ops: tuple[int, ...]
    name: str
    runs: float
    flops: float
    bytes: float
    seconds: float
    inside: bool = False

    @property
    def op(self) -> int:
        """The first of the ops, which stands for all."""
        return self.ops[0]


# ---------------------------------------------------------------- roofline
# Time of one kernel on one device: a roofline for its *local* shape.


def kernel_seconds(
    chip: Chip,
    attained: Attained,
    dtype: str,
    matrix_flops: float,
    vector_flops: float,
    memory_bytes: float,
    kernels: float = 1.0,
) -> float:
    """Seconds of one execution.

    Args:
        attained: fractions of the chip's peak rates that kernels reach.
        dtype: of the product's operands. matrix_flops: of the product, padding included (see `padding`).
            vector_flops: elementwise.
        memory_bytes: read and written, passes included. kernels: how many launches this is.
    """
    product = matrix_flops / (matrix_rate(chip, dtype) * attained.matrix) if matrix_flops else 0.0
    memory = memory_bytes / (chip.memory_bytes_per_second * attained.memory)
    vector = vector_flops / (chip.vector_flops * attained.vector)
    busy = hypot(product, memory) if attained.separate else max(product, memory)
    return max(busy, vector) + kernels * attained.kernel_seconds


# ---------------------------------------------------------------- matrix unit
# Utilisation of the matrix unit by the local shape of a product.
#
# A matrix unit is a grid of `matrix_tile` cells, fed row by row (Jouppi et al., "In-Datacenter Performance Analysis of
# a TPU", 2017). A product of [M, K] and [K, N] fills the grid with tiles of K x N and streams M past it, or N past
# tiles of K x M: padding to whole tiles is wasted, half of the time for a 64-wide shape on a 128-wide grid. Rows are
# streamed 8 at a time.
#
# A GPU has a matrix unit in each multiprocessor. One multiprocessor computes each tile of the result, so that the last
# wave of tiles leaves some idle; with few tiles, several share the depth of one ("split K"). Smaller tiles spread
# better, but load more for each product they compute. A library picks the fastest tile.

STREAMED_ROWS = 8  # sublanes of a vector register
# Tiles of a multiprocessor -> fraction of the rate of large ones that cuBLAS, cuDNN and Triton reach with them in the
# single ops of `benchmarks/gpu_timer.py` on an H200.
TILES = (((256, 128), 1.0), ((128, 128), 1.0), ((128, 64), 0.55), ((64, 64), 0.45), ((64, 32), 0.3), ((32, 32), 0.2))
LEAST_DEPTH = 512  # of one part of a split depth
Factors = tuple[tuple[int, int], ...]  # factor, elements along it


@dataclass(frozen=True, slots=True)
class Grid:
    """A product of [rows, depth] and [depth, columns], batch times. window: kernel positions of a convolution, 1 for
    others.

    grouped: a convolution of feature groups runs as one of all features with a block-diagonal kernel.
    """

    batch: Factors
    rows: Factors
    columns: Factors
    depth: Factors
    window: float
    grouped: bool


def grid_of(form: Form, flops: float, convolution: bool) -> Grid:
    """The grid of an op with two operands; `flops` of the op as a whole."""
    left, right, out = factors_of(*form.operands[:2], form.results[0])

    def sized(factors: set[int]) -> Factors:
        return tuple((factor, form.sizes[factor]) for factor in sorted(factors))

    batch, rows, columns = left & right & out, (left & out) - right, (right & out) - left
    depth = (left | right) - out
    positions = flops / 2 / prod(form.sizes[s] for s in (*batch, *rows, *columns, *depth))
    return Grid(
        sized(batch), sized(rows), sized(columns), sized(depth), positions if convolution else 1.0,
        convolution and bool(batch),
    )  # fmt: skip


def product_growth(chip: Chip, attained: Attained, dtype: str, grid: Grid, cuts: tuple[int, ...]) -> float:
    """Flops done over flops needed; cuts: [factors] shards of each. Limited to the growth at which the vector unit
    would be faster."""
    rows, columns, depth = (local_size(factors, cuts) for factors in (grid.rows, grid.columns, grid.depth))
    depth *= max(1.0, grid.window)
    if attained.multiprocessors and not grid.grouped:
        factor = shared_out(attained.multiprocessors, local_size(grid.batch, cuts), rows, columns, depth)
    elif grid.grouped:
        groups = local_size(grid.batch, cuts)
        factor = groups * padding(chip.matrix_tile, rows, columns * groups, depth * groups)
    else:
        factor = padding(chip.matrix_tile, rows, columns, depth)
    return bounded_growth(chip, attained, dtype, factor)


def bounded_growth(chip: Chip, attained: Attained, dtype: str, factor: float) -> float:
    """`factor`, limited to the growth at which the matrix unit is as slow as the vector unit."""
    limit = matrix_rate(chip, dtype) * attained.matrix / (chip.vector_flops * attained.vector)
    return min(factor, max(1.0, limit))


def local_size(factors: Factors, cuts: tuple[int, ...]) -> float:
    """Elements along some factors on one device."""
    return prod(size / cuts[factor] for factor, size in factors)


def padding(tile: tuple[int, int], rows: float, columns: float, depth: float) -> float:
    """Factor by which padding to a grid of that tile increases a product of [rows, depth] and [depth, columns]; at
    least 1."""
    high, wide = tile
    streamed = _padded(rows, min(STREAMED_ROWS, high)) * _padded(columns, wide)
    swapped = _padded(rows, wide) * _padded(columns, min(STREAMED_ROWS, high))
    return min(streamed, swapped) / (rows * columns) * _padded(depth, high) / depth


def shared_out(count: int, batch: float, rows: float, columns: float, depth: float) -> float:
    """Time of a product on `count` multiprocessors, relative to full use of all with large tiles."""
    least = inf
    for tile, rate in TILES:
        for high, wide in (tile, tile[::-1]):
            tiles = batch * ceil(rows / high) * ceil(columns / wide)
            shares = max(1, min(count // tiles, depth // LEAST_DEPTH))
            least = min(least, ceil(tiles * shares / count) / shares * high * wide / rate)
    return least * count / (batch * rows * columns)


def _padded(size: float, tile: int) -> float:
    return ceil(size / tile) * tile
