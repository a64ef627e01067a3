"""A profile: everything that was fitted to one version of one compiler on one chip, or observed in the programs it
makes, as data.

The rules themselves are code, one file each (see `passes`); a profile says which of them this compiler has, and holds
the figures they use. The profiles are in `profiles`, one file for each version of a compiler.

Enters: nothing. Leaves: the type `CompilerProfile`, and the groups of figures it is made of.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import inf
from types import MappingProxyType

from toast_cli.cost.model import Attained

TileShape = tuple[int, int]  # rows, lanes
IDEAL = Attained()


@dataclass(frozen=True, slots=True)
class FusionLimits:
    """Where fusion ends.

    Attributes:
        readers: more readers of a value than this no longer matter. sources: arrays that one kernel reads at most.
        steps: operations in a row that are computed again in each reader. results: that the kernel of one contraction
            writes.
        shared_bits: exponentials of at most so many bits count as written, see `shared_exponentials`.
        constant_bytes: a value derived from constants alone is stored beyond this size if it is kept at all.
        polynomials: operation without an instruction of its own -> operations of the vector unit that it is expanded
            into.
    """

    readers: int = 8
    sources: int = 12
    steps: int = 32
    results: int = 4
    shared_bits: int = 64
    constant_bytes: int = 1024
    polynomials: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}), hash=False)


@dataclass(frozen=True, slots=True)
class SpaceToBatch:
    """How space is cut into pieces of the batch for convolutions of few images, see `space_to_batch`.

    Attributes:
        images: a device with fewer has few. pieces: of space; space of less than two elements each is not cut.
        grouped_steps: arrays that a norm in groups writes. joined_steps: arrays written where a norm is added to what
            has not the form.
        passes: how often what a convolution reads and what it makes could be read and written in the time that cutting
            it and putting it together takes; fitted to the steps with 4 images of the family "convolution step" of
            `benchmarks/op_cases.py` on v4, v5e and v6e, libtpu 0.0.42.1.
    """

    images: int = 8
    pieces: int = 8
    grouped_steps: int = 3
    joined_steps: int = 2
    passes: float = 18.0


@dataclass(frozen=True, slots=True)
class OnChip:
    """What the compiler keeps out of device memory, see `memory_space_assignment`; the default is nothing.

    Attributes:
        bytes: of on-chip memory that it gives to arrays.
        filled: part of that which temporaries fill; prefetched arguments and gaps have the rest.
        refills: how long a temporary stays there at most, in times that it takes to read so many bytes from device
            memory.
        speed: bytes a second that kernels read and write there, over what they attain of device memory; 0: nothing
            stays there while a loop runs, see `loop_residency`.
        vector_seconds, product_seconds: of starting and draining a kernel that takes all it reads from there and writes
            there, without and with a contraction, see `resident_kernels`; 0: unknown. narrow_seconds: what it takes
            besides where the contraction's result has less rows than a tile, or it multiplies less than f32.
        vector_speed: bytes a second that a kernel without a contraction reads and writes there, over what it attains of
            device memory.
        ahead: part of `bytes` that arguments and results have outside of loops, see `prefetched_arguments`.
        own_bytes: of that memory that a kernel has for itself. window_bytes: of the largest piece in which a product
            adds to what a loop keeps there, see `accumulator_windows`; 0: unknown.
    """

    bytes: float = 0.0
    filled: float = 0.0
    refills: float = 0.0
    speed: float = 0.0
    vector_seconds: float = 0.0
    product_seconds: float = 0.0
    narrow_seconds: float = 0.0
    vector_speed: float = 0.0
    ahead: float = 0.0
    own_bytes: float = 0.0
    window_bytes: float = 0.0


@dataclass(frozen=True, slots=True)
class ScatterTiles:
    """How a reduce-scatter takes an array apart, see `reduce_scatter`.

    Attributes:
        tile: (rows, columns) of the tiles of memory. word_bits: narrower elements are packed into words of so many
            bits.
        streams, square_streams: that run at once around a ring, and around four devices in a square.
        growth: a piece is padded as long as it grows by less than this factor.
        nearly: orders of dimensions with up to this factor more tiles count as equal.
        square_edge: the shortest edge of a square slice that is reduced by an all-reduce that uses all links.
        part: the fewest and the most tiles of the equal parts that the columns of wide arrays are taken in.
        near_tie: orders with up to this factor more tiles of a gradient count as equal.
        tied_arrays: so many arrays that a tied table's gradient updates settle its order; fewer leave it in rows.
    """

    tile: TileShape = (8, 128)
    word_bits: int = 32
    streams: int = 2
    square_streams: int = 4
    growth: float = 1.5
    nearly: float = 1.1
    square_edge: int = 4
    part: tuple[int, int] = (32, 228)
    near_tie: float = 1.01
    tied_arrays: int = 3


@dataclass(frozen=True, slots=True)
class SliceGathers:
    """Which all-gathers over all devices become all-reduces, see `slice_gathers`: over so many and more, of results of
    up to so many bytes."""

    devices: int = 64
    bytes: float = inf


@dataclass(frozen=True)
class CompilerProfile:
    """One compiler in one version for one chip. The defaults are those of a compiler of which nothing was measured.

    Attributes:
        compiler, version: e.g. "XLA:TPU", "libtpu 0.0.42.1". chip: name of the chip's preset.
        passes: names of the rules (see `passes.PASSES`) that this compiler has.
        asynchronous: kinds of collectives that it runs beside computing.
        attained: what kernels get of the chip's peak rates.
        memory_tile: what the two innermost dimensions of an array in memory are padded to, in elements; (1, 1):
            nothing.
        fourier_growth: operations of the vector unit for each that a Fourier transform counts.
        turning_cycles: of turning one pixel of up to 128 images, see `convolution_tiles`.
        packed_part: of what writing an array of less than 4 bytes an element to device memory takes, the part that a
            convolution takes to pack it where it stays on the chip.
        product_bits: bits of an f32 element that a contraction takes by default.
        scatter_bytes: a scatter sorts its indices where what it adds to takes so much, see `lookup_rows`.
        combined_bytes: collectives of one kind that nothing waits for become one of about this many bytes.
        temporary_growth: temporaries as this compiler lays them out over those that the rules count.
        peak_error: nine of ten predicted peaks of the test points are nearer than this to what the compiler needs, as a
            fraction.
        sources: field -> where its figures come from, and the command that measured them.
    """

    compiler: str
    version: str
    chip: str
    passes: frozenset[str]
    asynchronous: frozenset[str] = frozenset()
    attained: Attained = IDEAL
    memory_tile: TileShape = (1, 1)
    fusion: FusionLimits = FusionLimits()
    space_to_batch: SpaceToBatch = SpaceToBatch()
    on_chip: OnChip = OnChip()
    scatter: ScatterTiles = ScatterTiles()
    slice_gathers: SliceGathers = SliceGathers()
    fourier_growth: float = 7.0
    turning_cycles: float = 16.0
    packed_part: float = 0.75
    product_bits: int = 16
    scatter_bytes: float = 16 * 2**20
    combined_bytes: float = 30 * 2**20
    temporary_growth: float = 1.0
    peak_error: float = 0.20
    sources: Mapping[str, str] = field(default_factory=dict, compare=False)

    def without(self, *names: str) -> CompilerProfile:
        """The same compiler with some passes switched off. Raises ValueError for a name that is no pass of it."""
        unknown = sorted(set(names) - self.passes)
        if unknown:
            raise ValueError(
                f"{self.compiler} has no pass {', '.join(unknown)}; it has {', '.join(sorted(self.passes))}"
            )
        return replace(self, passes=self.passes - set(names))
