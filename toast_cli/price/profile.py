"""Compiler profiles: data fitted to one version of one compiler on one chip, or observed in the programs it compiles;
and the passes, the names of the rules by which toast predicts what a compiler makes of a program.

A profile lists the passes that its compiler has, and code asks `"tiling" in profile.passes`. A rule that is switched
off (`CompilerProfile.without`) affects no prediction. The evidence for a rule stands at its function;
`benchmarks/passes.py` measures what each is worth. The profiles are in `profiles`, one file for each version of a
compiler.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import inf
from types import MappingProxyType

from toast_cli.price.cost import Attained

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
        vector_speed: bandwidth there of a kernel without a contraction, relative to device memory.
        own_bytes: scratch memory of a kernel. window_bytes: of the largest window in which a product accumulates into
            an array that a loop keeps there, see `has_small_windows`; 0: unknown.
    """

    bytes: float = 0.0
    filled: float = 0.0
    refills: float = 0.0
    speed: float = 0.0
    vector_speed: float = 0.0
    own_bytes: float = 0.0
    window_bytes: float = 0.0


@dataclass(frozen=True)
class CompilerProfile:
    """One compiler in one version for one chip. The defaults are those of an unmeasured compiler.

    Attributes:
        compiler, version: e.g. "XLA:TPU", "libtpu 0.0.42.1". chip: name of the chip's preset.
        passes: names of the rules (see `PASSES`) that this compiler has.
        asynchronous: kinds of collectives that it overlaps with compute.
        communicating: part of a device's compute units that a collective takes while it overlaps with compute.
        attained: fractions of the chip's peak rates that kernels reach.
        memory_tile: multiples to which the two innermost dimensions of an array are padded, in elements; (1, 1): no
            padding.
        slice_gather_bytes: an all-gather over a large slice of up to this size becomes an all-reduce, see
            `stays_slice_gather`.
        fourier_growth: vector-unit operations per counted operation of a Fourier transform.
        turning_cycles: cycles to transpose one pixel of up to 128 images, see `PixelProducts`.
        retiling_cycles: cycles to rearrange the rows of 4 KiB into other tiles, see `liveness.relaid_bytes`.
        packed_part: time of a convolution to pack a result of less than 4 bytes an element that stays on the chip, as a
            fraction of the time to write it to device memory.
        product_bits: bits of an f32 element that a contraction multiplies by default.
        scatter_bytes: a scatter sorts its indices if its operand has at least this many bytes, see `dims_of_rows`.
        scatter_tiles: f32 tiles that all parts of the columns of a reduce-scatter take together, see
        `compiled_collectives`.
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
    slice_gather_bytes: float = inf
    fourier_growth: float = 7.0
    turning_cycles: float = 16.0
    retiling_cycles: float = 21.3
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


# ---------------------------------------------------------------- passes
# Name -> what the compiler does.
PASSES: Mapping[str, str] = {
    # Collectives: their kinds and bytes.
    "narrowing": "A collective moves an array in the narrowest type that its readers need.",
    "small-gathers": "An all-gather of a small vector becomes an all-reduce of the local piece padded with zeros.",
    "slice-gathers": "So does an all-gather over all devices of a large slice.",
    "tiled-reduce-scatter": "A reduce-scatter that gives a device no whole tiles becomes an all-reduce.",
    "reduction-combining": "Independent reductions of one kind become one collective and share its latency.",
    "reduction-motion": "A value that a loop only reduces and accumulates is reduced once after the loop.",
    "overlap": "Collectives that nothing waits for overlap with compute.",
    "ragged-blocks": "A ragged all-to-all in one host is one block of threads for each update.",
    # Fusion: kernels, and which values are materialised.
    "fusion": "Elementwise ops and ops that only move data are fused into their readers.",
    "output-fusion": "Elementwise ops are fused into the epilogue of a contraction.",
    "multi-output-fusion": "Elementwise ops are merged into the kernel that writes their operand.",
    "reduction-fusion": "A reduction is merged into another kernel that has its operand in registers.",
    "product-rows": "Reductions of rows are merged into the kernel of the contraction that makes the rows.",
    "normalization-fusion": "Reductions of rows are merged into the kernel that reads the rows again.",
    "unsliced-fusions": "A fused array is materialised whole where readers take different shards of it.",
    "recomputation": "Each kernel that reads a value recomputes it where that moves fewer bytes.",
    "shared-exponentials": "A value of exponentials that two contractions read is written.",
    "polynomials": "Functions without an instruction of their own are expanded into dozens of operations.",
    "narrow-stores": "A contraction's result that is later widened is written before it is widened.",
    "masked-softmaxes": "A softmax reads its mask, and what it scales by and fills in, as arrays in memory.",
    "product-operands": "Arrays that only contractions read are written in the type that these multiply.",
    "one-hot-scatters": "A scatter of one element into each row of zeros is fused into its readers.",
    "sliced-products": "A contraction whose only reader is a slice computes only the slice.",
    "unfilled-stacks": "An array of which a loop writes every slice is not filled before.",
    "moved-operands": "What a pad or a concatenation moves is materialised.",
    "library-convolutions": "A convolution reads whole arrays in memory, and writes one.",
    "library-products": "The kernel of a contraction computes little besides the contraction.",
    "fused-lookups": "Gathers are fused into their readers, and scatters fuse the computation of their updates.",
    "atomic-scatters": "A scatter adds each element with an atomic operation to an array in memory.",
    "lookup-steps": "A lookup takes its indices one after another.",
    "vector-products": "A matrix-vector product is computed elementwise, with a sum.",
    "fourier-transforms": "Fourier transforms become small products, transpositions and twiddle factors.",
    "ragged-kernels": "Ragged products are kernels that visit each row once, also those that add up over rows.",
    "ragged-gradients": "The gradient of a ragged product multiplies all rows for each group.",
    "masked-groups": "Every ragged product multiplies all rows for each group.",
    # Layouts of arrays.
    "tiling": "The two innermost dimensions of an array are padded to tiles.",
    "tile-dimensions": "The two innermost dimensions are those that waste least and that contractions allow.",
    "lookup-rows": "What is gathered, and what scatters read, has its rows in the lanes.",
    "space-to-batch": "For convolutions of few images, pieces of space become pieces of the batch.",
    "convolution-tiles": "A convolution multiplies pixel by pixel, with images and features in tiles.",
    "swapped-convolutions": "A kernel that is larger than its image becomes the image, after it has been reversed.",
    "convolved-arguments": "Arguments that convolutions read are copied into tiles of images and features.",
    "gathered-pieces": "A copy assembles the pieces of an all-gather, unless they are whole tiles.",
    "loop-copies": "Loop carries with another dimension order than the arguments are copied.",
    "scan-unification": "The stacked result of a scan in a loop reuses the buffer of the array it scans over.",
    "bf16-widening": "A chip that cannot compute in bf16 gets it widened to f32.",
    # Schedule and liveness.
    "early-results": "Results of the program are computed as soon as their operands are available.",
    "held-results": "Results that replace no argument have their buffers from the start of the program.",
    "loops-first": "A contraction before a loop runs behind it if the loop frees more than the contraction reads.",
    "loop-gathers-first": "A loop gathers all loop-invariant arrays at the start of an iteration.",
    "common-subexpressions": "Equal ops on equal operands are computed once.",
    "queued-gathers": "One asynchronous all-gather is on its way at a time.",
    "in-place-updates": "Results reuse the buffers of operands without later readers.",
    "scatter-starts": "One kernel initialises the operands of several scatters.",
    # Memory spaces.
    "memory-space-assignment": "Small temporaries that are read soon are in on-chip memory.",
    "on-chip-reuse": "Small or brief arrays pass from one kernel to others without traffic to device memory.",
    "loop-residency": "Arrays that every iteration of a loop reads whole stay in on-chip memory.",
    "scalar-unit": "Scalars that are computed from scalars take no kernel.",
    "accumulator-windows": "A loop's product is added window by window; windows that do not fit become small ones.",
    "temporary-growth": "One factor stands for temporaries that the rules do not count.",
}
