"""The passes: names of the rules by which toast predicts what a compiler makes of a program.

A `CompilerProfile` lists those that its compiler has, and code asks `"tiling" in profile.passes`. A rule that is
switched off (`CompilerProfile.without`) affects no prediction. The evidence for a rule stands at its function.
`benchmarks/passes.py` measures what each is worth.
"""

from __future__ import annotations

from collections.abc import Mapping

# Name -> what the compiler does.
PASSES: Mapping[str, str] = {
    # Collectives: their kinds and bytes.
    "narrowing": "A collective moves an array in the narrowest type that its readers need.",
    "broadcast-gathers": "Instead of a broadcast, its operand is gathered and broadcast afterwards.",
    "small-gathers": "An all-gather of a small vector becomes an all-reduce of the local piece padded with zeros.",
    "slice-gathers": "So does an all-gather over all devices of a large slice.",
    "tiled-reduce-scatter": "A reduce-scatter that gives a device no whole tiles becomes an all-reduce.",
    "reduction-combining": "Independent reductions of one kind become one collective and share its latency.",
    "reduction-motion": "A value that a loop only reduces and accumulates is reduced once after the loop.",
    "overlap": "Collectives that nothing waits for overlap with compute.",
    # Fusion: kernels, and which values are materialised.
    "fusion": "Elementwise ops and ops that only move data are fused into their readers.",
    "output-fusion": "Elementwise ops are fused into the epilogue of a contraction.",
    "multi-output-fusion": "Elementwise ops are merged into the kernel that writes their operand.",
    "reduction-fusion": "A reduction is merged into another kernel that has its operand in registers.",
    "normalization-fusion": "Reductions of rows are merged into the kernel that reads the rows again.",
    "unsliced-fusions": "A fused array is materialised whole where readers take different shards of it.",
    "recomputation": "Each kernel that reads a value recomputes it where that moves fewer bytes.",
    "shared-exponentials": "A value of exponentials that two contractions read is written.",
    "polynomials": "Functions without an instruction of their own are expanded into dozens of operations.",
    "narrow-stores": "A contraction's result that is later widened is written before it is widened.",
    "product-operands": "Arrays that only contractions read are written in the type that these multiply.",
    "one-hot-scatters": "A scatter of one element into each row of zeros is fused into its readers.",
    "sliced-products": "A contraction whose only reader is a slice computes only the slice.",
    "padded-operands": "An array that a product reads through a pad is materialised.",
    "unfilled-stacks": "An array of which a loop writes every slice is not filled before.",
    "interior-pads": "A pad between elements reads a whole array in memory, and writes one.",
    "library-convolutions": "A convolution reads whole arrays in memory, and writes one.",
    "library-products": "The kernel of a contraction computes little besides the contraction.",
    "fused-lookups": "Gathers are fused into their readers, and scatters fuse the computation of their updates.",
    "atomic-scatters": "A scatter adds each element with an atomic operation to an array in memory.",
    "vector-products": "A matrix-vector product is computed elementwise, with a sum.",
    "fourier-transforms": "Fourier transforms become small products, transpositions and twiddle factors.",
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
    "returned-layouts": "The result of a contraction is copied where it is returned in tiles of other dimensions.",
    "gathered-pieces": "A copy assembles the pieces of an all-gather, unless they are whole tiles.",
    "loop-copies": "Loop carries with another dimension order than the arguments are copied.",
    "scan-unification": "The stacked result of a scan in a loop reuses the buffer of the array it scans over.",
    "bf16-widening": "A chip that cannot compute in bf16 gets it widened to f32.",
    # Schedule and liveness.
    "early-results": "Results of the program are computed as soon as their operands are available.",
    "held-results": "Results that replace no argument have their buffers from the start of the program.",
    "loops-first": "Ops behind a loop that do not depend on it run before it where that frees memory.",
    "loop-gathers-first": "A loop gathers all loop-invariant arrays at the start of an iteration.",
    "late-reductions": "The result of a collective reduction lives until its readers in program order.",
    "in-place-updates": "Results reuse the buffers of operands without later readers.",
    "scatter-starts": "One kernel initialises the operands of several scatters.",
    # Memory spaces.
    "memory-space-assignment": "Small temporaries that are read soon are in on-chip memory.",
    "on-chip-reuse": "Small or brief arrays pass from one kernel to others without traffic to device memory.",
    "loop-residency": "Arrays that every iteration of a loop reads whole stay in on-chip memory.",
    "resident-kernels": "A kernel that touches no device memory has less start and end overhead.",
    "accumulator-windows": "A loop's product is added window by window; windows that do not fit become small ones.",
    "temporary-growth": "One factor stands for temporaries that the rules do not count.",
}
