"""What each TPU generation attains of its published figures, and what its compiler rewrites: fitted to libtpu, as no vendor says so."""

from __future__ import annotations

from toast_cli.hardware.model import Attained, OnChip, Rewrites

# Fitted to the cycles that the compiler estimates for small programs: benchmarks/calibrate_ops.py.
FITTED = "fitted to libtpu 0.0.42.1's estimates, benchmarks/data/ops.csv; kept_bytes: fit programs of programs.jsonl"

# Every figure but vector and pass_bytes, which all chips share, is fitted chip by chip.
V4 = Attained(
    matrix=0.90,
    vector=0.66,
    memory=0.735,
    pass_bytes=4.0,
    narrow_write=2.9,
    kernel_seconds=1.5e-6,
    kept_bytes=4 * 2**20,
)
V5E = Attained(
    matrix=0.84,
    vector=0.66,
    memory=0.675,
    pass_bytes=4.0,
    narrow_write=2.65,
    kernel_seconds=1.9e-6,
    kept_bytes=32 * 2**20,
)
V5P = Attained(
    matrix=0.91,
    vector=0.66,
    memory=0.545,
    pass_bytes=4.0,
    narrow_write=2.7,
    kernel_seconds=3.8e-6,
    kept_bytes=16 * 2**20,
)
V6E = Attained(
    matrix=0.65,
    vector=0.66,
    memory=0.80,
    pass_bytes=4.0,
    narrow_write=2.9,
    kernel_seconds=1.45e-6,
    kept_bytes=32 * 2**20,
)
# What libtpu's memory-space assignment hands out: its `preallocated-temp` allocations of another colour than device memory's. It lets an array
# wait there for 8 refills (`xla_tpu_cmem_max_overlap_to_mem_size_async_copy_ratio`) of its own estimate of time; plans take about three times
# what an ideal split of all work would, which is what `refills` are counted in. Nobody has looked at v2, v3 and tpu7x.
ON_CHIP = {
    name: OnChip(bytes=mib * 2**20, filled=0.75, refills=3.0)
    for name, mib in {"v4": 128, "v5e": 112, "v5p": 46, "v6e": 94}.items()
}
ON_CHIP_SOURCE = (
    "dumps of libtpu 0.0.42.1's memory-space assignment; fitted to fit programs of benchmarks/data/memory.jsonl"
)
# The tile is that of the layouts XLA:TPU writes, `{1,0:T(8,128)}` ("Tiled layout", openxla.org/xla).
TPU_REWRITES = Rewrites(narrows=True, scatter_tile=(8, 128))
REWRITES_SOURCE = "small programs compiled by libtpu 0.0.42.1 for v4, v5e, v5p and v6e (compiler/reduce_scatter.py, compiler/narrowing.py)"
