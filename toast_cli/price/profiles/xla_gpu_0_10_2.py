"""XLA:GPU as in jaxlib 0.10.2 (`jax-cuda12-plugin`), for every GPU; none newer than B200 and none of AMD was measured.

Memory was measured ahead of time, without a GPU (`python benchmarks/gpu.py --compile`, stored in
`benchmarks/data/gpu.jsonl`). The compiler estimates no cycles; the rates that kernels attain were measured on one H200,
hold on an H100, and are taken to be the same fraction of every chip's peak (`python -m benchmarks.gpu_times`, stored in
`benchmarks/data/gpu_times.jsonl`).
"""

from __future__ import annotations

from dataclasses import replace

from toast_cli.hardware import presets
from toast_cli.price.collectives import KINDS
from toast_cli.price.cost import Attained
from toast_cli.price.profile import CompilerProfile
from toast_cli.price.profiles import PLAIN, POLYNOMIALS

RELEASE = (0, 10, 2)
VERSION = "jaxlib 0.10.2"
ATTAINED = Attained(
    matrix=0.75, vector=0.6, memory=0.88, kernel_seconds=1.2e-6, hand_written=0.5, grouped=0.5, separate=True
)
# Cost of an elementwise function, in f32 additions.
FUNCTIONS = {
    "stablehlo.exponential": 18.0,
    "stablehlo.exponential_minus_one": 30.0,
    "stablehlo.tanh": 50.0,
    "stablehlo.log": 45.0,
    "stablehlo.log_plus_one": 50.0,
    "stablehlo.logistic": 25.0,
}
SOURCES = {
    "passes": "none that change kind or bytes of collectives",
    "asynchronous": "programs of published packages compiled for 8 H100: all kinds have a start and an end apart",
    "communicating": "each of NCCL's channels occupies a multiprocessor, see hardware/chips.toml",
    "attained": "kernels that one H200 ran, benchmarks/data/gpu_times.jsonl; hand_written: cuDNN's attention on an "
    "H100, `python benchmarks/gpu_attention.py`: heads of 128 reach 0.38 to 0.70 of the peak forward and 0.39 to 0.54 "
    "backward, heads of 64 half of that; the rest is an estimate",
    "memory_tile": "arrays are not padded",
    "on_chip": "caches hold no arrays of their own",
    "fusion": "functions: elementwise ops that an H200 ran in bf16, which the f32 units bound; the rest: as XLA:TPU",
    "combined_bytes": "--xla_gpu_all_reduce_combine_threshold_bytes, its default",
    "temporary_growth": f"fitted to XLA:GPU of {VERSION}, benchmarks/data/gpu.jsonl",
}
PASSES = PLAIN.passes | {"temporary-growth", "library-convolutions", "scatter-starts", "fused-lookups"} | {
    "library-products", "normalization-fusion", "atomic-scatters", "masked-groups", "ragged-blocks",
}  # fmt: skip


PROFILES = {
    preset.chip.name: CompilerProfile(
        compiler="XLA:GPU",
        version=VERSION,
        chip=preset.chip.name,
        passes=PASSES | (set() if "bf16" in preset.chip.matrix_flops else {"bf16-widening"}),
        asynchronous=frozenset(KINDS),
        communicating=preset.nccl.channels / preset.multiprocessors,
        attained=replace(ATTAINED, multiprocessors=preset.multiprocessors),
        fusion=replace(PLAIN.fusion, polynomials=POLYNOMIALS | FUNCTIONS),
        temporary_growth=1.12,
        sources=SOURCES,
    )
    for preset in presets()
    if preset.nccl
}
