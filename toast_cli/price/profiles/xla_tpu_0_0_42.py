"""XLA:TPU as in libtpu 0.0.42.1, compiling for v2 to tpu7x.

All figures are measured by ahead-of-time compilation, without a TPU: single operations (`python
benchmarks/calibrate_ops.py --compile`, stored in `benchmarks/data/ops.csv`), whole programs (`python
benchmarks/calibrate.py`, `programs.jsonl`) and the memory they need (`python benchmarks/calibrate_memory.py`,
`memory.jsonl`). v2, v3 and tpu7x are unmeasured: their figures are those of the nearest chips, but for tpu7x's rate of
products, which is fitted to published runs.
"""

from __future__ import annotations

from dataclasses import replace
from math import inf

from toast_cli.price.cost import Attained
from toast_cli.price.profile import CompilerProfile, OnChip
from toast_cli.price.profiles import PLAIN

RELEASE = (0, 0, 42, 1)
VERSION = "libtpu 0.0.42.1"
MIB = 2**20

# Every figure but `vector` and `pass_bytes`, which all chips share, is fitted chip by chip.
_SHARED = Attained(vector=0.66, pass_bytes=4.0, hand_written=0.5, grouped=0.67, streamed=0.86)
V4, V5E, V5P, V6E = (
    replace(
        _SHARED, matrix=matrix, memory=memory, elementwise=elementwise, narrow_write=narrow, kernel_seconds=start,
        kept_bytes=kept * MIB, passed_bytes=passed * MIB,
    )
    for matrix, memory, elementwise, narrow, start, kept, passed in (
        (0.90, 0.68, 0.735, 2.9, 1.5e-6, 4, 0),
        (0.84, 0.675, 0.76, 2.65, 1.9e-6, 32, 120),
        (0.91, 0.545, 0.0, 2.7, 3.8e-6, 16, 0),
        (0.65, 0.72, 0.80, 2.9, 1.45e-6, 32, 0),
    )
)  # fmt: skip
ATTAINED = {"v2": V4, "v3": V4, "v4": V4, "v5e": V5E, "v5p": V5P, "v6e": V6E, "tpu7x": replace(V6E, matrix=0.75)}
ESTIMATED = {
    "v2": "as v4", "v3": "as v4",
    "tpu7x": "as v6e; products by a published step (`python -m benchmarks.published`) and products of 1,024 to 16,384, "
    "predicted 9 % slower to 19 % faster than AI-Hypercomputer/tpu-recipes measured",
}  # fmt: skip

# Memory that libtpu's memory-space assignment allocates: its `preallocated-temp` allocations of another colour than
# device memory's. It lets an array wait there for 8 refills (`xla_tpu_cmem_max_overlap_to_mem_size_async_copy_ratio`)
# of its own estimate of time; plans take about three times what an ideal split of all work would, which is what
# `refills` are counted in. `speed`: cycles of a Haiku LSTM's products of weights in on-chip memory (unmeasured for
# v5p). `vector_speed`, `window_bytes`: `python -m benchmarks.singles`.
ON_CHIP = {
    name: OnChip(mib * MIB, 0.75, 3.0, speed, vector_speed, 16 * MIB, window * MIB)
    for name, mib, speed, vector_speed, window in (
        ("v4", 128, 2.2, 1.0, 0),
        ("v5e", 112, 8.0, 1.84, 7),
        ("v5p", 46, 0.0, 2.2, 0),
        ("v6e", 94, 5.0, 4.7, 0),
    )
}

# Where all-gathers over a whole slice become all-reduces up to a size only.
SLICE_GATHERS = dict.fromkeys(("v5e", "v6e", "tpu7x"), 16.0 * MIB)

# Kinds of collectives that are asynchronous in compiled programs, or are spread over the fusions that they overlap
# with; for all-gathers this holds on v5e only.
ASYNCHRONOUS = {"v5e": frozenset({"all-gather", "collective-permute"})}

# Tiles of a reduce-scatter in the memory of its kernel, which is twice as large on the newer chips.
SCATTER_TILES = {"v6e": 3770, "tpu7x": 3770}

PACKED_PART = {"v6e": 1.0, "tpu7x": 1.0}

RETILING_CYCLES = {"v6e": 13.0, "tpu7x": 13.0}

PASSES = PLAIN.passes | {
    "narrowing", "small-gathers", "slice-gathers", "tiled-reduce-scatter", "reduction-motion",
    "unsliced-fusions", "product-operands", "one-hot-scatters", "sliced-products", "moved-operands",
    "vector-products", "fourier-transforms", "tiling", "tile-dimensions", "lookup-rows", "lookup-steps",
    "space-to-batch", "convolution-tiles", "swapped-convolutions", "gathered-pieces",
    "memory-space-assignment", "on-chip-reuse", "loop-residency", "scalar-unit", "accumulator-windows", "held-results",
    "convolved-arguments", "unfilled-stacks",
}  # fmt: skip

# Seen in loops, softmaxes and ragged products compiled for each generation.
PASSES_OF = {
    "v2": {"ragged-gradients"}, "v3": {"ragged-gradients"}, "v4": {"ragged-kernels"}, "v5p": {"ragged-kernels"},
    "v5e": {"ragged-gradients", "loop-gathers-first", "queued-gathers"},
    "v6e": {"ragged-gradients", "masked-softmaxes", "product-rows"},
    "tpu7x": {"ragged-gradients", "masked-softmaxes", "product-rows"},
}  # fmt: skip

SOURCES = {
    "passes": "programs compiled for v4, v5e, v5p and v6e; each rule tells in its docstring what was seen",
    "asynchronous": "programs of published packages compiled for v4, v5e and v6e, `python -m benchmarks.real.quick "
    "--ask step`; others as v4 and v6e",
    "attained": f"fitted to {VERSION}'s estimates, benchmarks/data/ops.csv; kept_bytes: fit programs of "
    "programs.jsonl; passed_bytes: those, and steps of published programs in real.jsonl; hand_written: published steps "
    "of MaxText with flash and splash attention on v5e, v5p and TPU7x come out within 7 %, see docs/howto/kernels.md; "
    "grouped: a profile of megablox on v5p (marin-community/marin, .agents/logbooks/grug-moe-ep-ring.md); streamed: "
    "decode steps with ragged paged attention on TPU7x (arXiv:2604.15464)",
    "memory_tile": f"layouts in {VERSION}'s compiled programs: T(8,128)",
    "fusion": f"{VERSION}'s compiled programs; polynomials: `python benchmarks/calibrate_ops.py --compile`",
    "fourier_growth": f"single transforms of 128 to 65,536 points compiled by {VERSION} for v4, v5e and v6e: 4 to 13",
    "turning_cycles": f"single convolutions of 3 features compiled by {VERSION} for v5e and v6e: 15 to 22 cycles",
    "retiling_cycles": f"caches that loops carry, of 16 and 64 sequences in bf16, by {VERSION}: for v6e 21.7 cycles, "
    "17.4 where one side is on the chip, 13.1 for slices; for v5e 28.8, one side on the chip; less reads and writes",
    "packed_part": f"single convolutions compiled by {VERSION}: on v5e 0.73 forward and 0.98 of gradients, of which "
    "the fit programs' ResNet bears the smaller; on v6e 1.0 to 1.3; others as v5e",
    "slice_gather_bytes": "`python -m benchmarks.singles`",
    "product_bits": "XLA's default precision of f32 products on TPUs: one pass in bf16",
    "scatter_bytes": f"segment sums compiled by {VERSION} for v5e: 16 to 512 features, 2,048 to 65,536 rows",
    "scatter_tiles": f"sums over 2 to 16 devices compiled by {VERSION}: the limit is between the primes "
    "227 and 229 tiles over 4 devices, 151 and 157 over 8; on v6e and tpu7x 467 and 479, 313 and 317",
    "combined_bytes": "20 all-reduces of 128 KiB became one, and 12 of 4 MiB; the limit is XLA:GPU's default",
    "temporary_growth": "1: the rules are those of XLA:TPU",
}
ON_CHIP_SOURCE = (
    f"dumps of {VERSION}'s memory-space assignment; fitted to fit programs of benchmarks/data/memory.jsonl; kernels "
    "that stay there: `python -m benchmarks.singles`"
)


def _profile(chip: str) -> CompilerProfile:
    estimated, is_measured = ESTIMATED.get(chip), chip in ON_CHIP
    sources = SOURCES | {"on_chip": ON_CHIP_SOURCE if is_measured else "unknown, counted as none"}
    if estimated:
        sources["attained"] = f"estimate: {estimated}"
    return CompilerProfile(
        compiler="XLA:TPU",
        version=VERSION,
        chip=chip,
        passes=PASSES | PASSES_OF.get(chip, set()),
        asynchronous=ASYNCHRONOUS.get(chip, frozenset({"collective-permute"})),
        attained=ATTAINED[chip],
        memory_tile=(8, 128),
        fusion=replace(PLAIN.fusion, shared_bits=16),
        on_chip=ON_CHIP.get(chip, OnChip()),
        slice_gather_bytes=SLICE_GATHERS.get(chip, inf),
        retiling_cycles=RETILING_CYCLES.get(chip, 21.3),
        packed_part=PACKED_PART.get(chip, 0.75),
        scatter_tiles=SCATTER_TILES.get(chip, 1824),
        sources=sources,
    )


PROFILES = {chip: _profile(chip) for chip in ATTAINED}
