"""Compiler profiles: data fitted to one version of one compiler on one chip, or observed in the programs it compiles.

The rules themselves are code (see `passes`); a profile lists those that its compiler has, and holds the figures they
use. The profiles are in `profiles`, one file for each version of a compiler.

In: nothing. Out: the type `CompilerProfile`, and its groups of figures.
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
    """Limits of fusion.

    Attributes:
        readers: most readers of a value that are told apart. sources: most arrays that one kernel reads. steps: longest
        chain of ops that each reader recomputes. results: most that the kernel of one contraction writes. shared_bits:
        exponentials of at most this many bits count as written, see `exponentials_are_written`.
        constant_bytes: a value derived from constants alone that a loop or result reads is stored if it is larger than
        this. polynomials: op without an instruction of its own -> vector-unit operations that it expands into.
    """

    readers: int = 8
    sources: int = 12
    steps: int = 32
    results: int = 4
    shared_bits: int = 64
    constant_bytes: int = 1024
    polynomials: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}), hash=False)


@dataclass(frozen=True, slots=True)
class OnChip:
    """Use of on-chip memory by the compiler, see `on_chip`; the default is none.

    Attributes:
        bytes: of on-chip memory available to arrays.
        filled: fraction of that which temporaries fill; prefetched arguments and gaps take the rest.
        refills: longest stay of a temporary there, in units of the time to read `bytes` from device memory.
        speed: bandwidth of kernels there relative to device memory; 0: nothing stays there while a loop runs, see
            `loop_residency`.
        vector_seconds, product_seconds: overhead of starting and draining a kernel that only reads and writes there,
            without and with a contraction, see `Starts`; 0: unknown. narrow_seconds: additional overhead if
            the contraction's result has fewer rows than a tile, or its operands are narrower than f32. vector_speed:
            bandwidth there of a kernel without a contraction, relative to device memory.
        own_bytes: scratch memory of a kernel. window_bytes: of the largest window in which a product accumulates into
            an array that a loop keeps there, see `has_small_windows`; 0: unknown.
    """

    bytes: float = 0.0
    filled: float = 0.0
    refills: float = 0.0
    speed: float = 0.0
    vector_seconds: float = 0.0
    product_seconds: float = 0.0
    narrow_seconds: float = 0.0
    vector_speed: float = 0.0
    own_bytes: float = 0.0
    window_bytes: float = 0.0


@dataclass(frozen=True, slots=True)
class SliceGathers:
    """All-gathers over all devices that become all-reduces, see `stays_slice_gather`. devices: least number. bytes:
    largest result."""

    devices: int = 64
    bytes: float = inf


@dataclass(frozen=True)
class CompilerProfile:
    """One compiler in one version for one chip. The defaults are those of an unmeasured compiler.

    Attributes:
        compiler, version: e.g. "XLA:TPU", "libtpu 0.0.42.1". chip: name of the chip's preset.
        passes: names of the rules (see `passes.PASSES`) that this compiler has.
        asynchronous: kinds of collectives that it overlaps with compute.
        communicating: part of a device's compute units that a collective takes while it overlaps with compute.
        attained: fractions of the chip's peak rates that kernels reach.
        memory_tile: multiples to which the two innermost dimensions of an array are padded, in elements; (1, 1): no
            padding.
        fourier_growth: vector-unit operations per counted operation of a Fourier transform.
        turning_cycles: cycles to transpose one pixel of up to 128 images, see `PixelProducts`.
        packed_part: time of a convolution to pack a result of less than 4 bytes an element that stays on the chip, as a
            fraction of the time to write it to device memory.
        product_bits: bits of an f32 element that a contraction multiplies by default.
        scatter_bytes: a scatter sorts its indices if its operand has at least this many bytes, see `dims_of_rows`.
        scatter_tiles: f32 tiles that all parts of the columns of a reduce-scatter take together, see `reduce_scatter`.
        combined_bytes: collectives of one kind that nothing waits for are combined up to about this many bytes.
        temporary_growth: bytes of this compiler's temporaries over those that the rules count.
        sources: field -> where its figures come from, and the command that measured them.
    """

    compiler: str
    version: str
    chip: str
    passes: frozenset[str]
    asynchronous: frozenset[str] = frozenset()
    communicating: float = 0.0
    attained: Attained = IDEAL
    memory_tile: TileShape = (1, 1)
    fusion: FusionLimits = FusionLimits()
    on_chip: OnChip = OnChip()
    slice_gathers: SliceGathers = SliceGathers()
    fourier_growth: float = 7.0
    turning_cycles: float = 16.0
    packed_part: float = 0.75
    product_bits: int = 16
    scatter_bytes: float = 16 * 2**20
    scatter_tiles: int = 1824
    combined_bytes: float = 30 * 2**20
    temporary_growth: float = 1.0
    sources: Mapping[str, str] = field(default_factory=dict, compare=False)

    def without(self, *names: str) -> CompilerProfile:
        """The same compiler with some passes switched off. Raises ValueError for a name that is no pass of it."""
        unknown = sorted(set(names) - self.passes)
        if unknown:
            raise ValueError(
                f"{self.compiler} has no pass {', '.join(unknown)}; it has {', '.join(sorted(self.passes))}"
            )
        return replace(self, passes=self.passes - set(names))
