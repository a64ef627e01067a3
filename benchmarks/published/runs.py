"""The published runs: model, chips, mesh, batch, what is kept for the backward pass, measured step and its source."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

# What is kept for the backward pass; names are those of `step.layer`.
Policy = Literal["full", "minimal"] | tuple[str, ...]
# --xla_tpu_enable_async_collective_fusion_fuse_all_gather, as MaxText's recipes have it; and
# --xla_tpu_enable_sparse_core_collective_offload_{all_gather,reduce_scatter,all_reduce}, as those for TPU7x.
FUSED = frozenset({"all-gather", "collective-permute"})
OFFLOADED = FUSED | {"reduce-scatter", "all-reduce"}


@dataclass(frozen=True)
class Decoder:
    """Sizes of a decoder with gated feed-forward networks."""

    layers: int
    model: int
    heads: int
    kv_heads: int
    ff: int
    vocab: int
    head: int = 128


@dataclass(frozen=True)
class Run:
    """One measured run.

    Attributes:
        mesh: what toast calls the slice; axes: its mesh shape. strategy: as `--strategy` takes it.
        batch, seq: sequences of the whole mesh, and their length. kept: see `Policy`; offloaded: it is in the host's
            memory. moment: type of Adam's first moment.
        step_seconds: measured. source: repository and file. asynchronous: the kinds of collectives that the compiler
            flags of the run let run beside computing.
    """

    name: str
    decoder: Decoder
    mesh: str
    axes: str
    strategy: str
    batch: int
    seq: int
    kept: Policy
    step_seconds: float
    source: str
    offloaded: bool = False
    moment: str = "float32"
    asynchronous: frozenset[str] = FUSED


MAXTEXT = "AI-Hypercomputer/maxtext, configs of "
RECIPES = "AI-Hypercomputer/tpu-recipes, training/"
B16 = Decoder(32, 4096, 64, 64, 28672, 32000)
B32 = Decoder(32, 8192, 64, 64, 28672, 32000)
B64 = replace(B32, layers=64)
LLAMA_8B = Decoder(32, 4096, 32, 8, 14336, 128256)
LLAMA_70B = Decoder(80, 8192, 64, 8, 28672, 128256)

RUNS = (
    Run("16B", B16, "v5e-256", "data=256", "fsdp:data", 1536, 2048, "full", 10.31, MAXTEXT + "v5e, 16b"),
    Run("32B", B32, "v5e-256", "data=256", "fsdp:data", 1024, 2048, "full", 12.09, MAXTEXT + "v5e, 32b"),
    Run("64B", B64, "v5e-256", "data=256", "fsdp:data", 512, 2048, "full", 13.5, MAXTEXT + "v5e, 64b"),
    Run("32B", B32, "v5p-128", "data=16,model=4", "fsdp:data+megatron:model+sequence", 384, 2048, "minimal", 7.30,
        MAXTEXT + "v5p, 32b"),
    Run("64B", B64, "v5p-128", "data=16,model=4", "fsdp:data+megatron:model+sequence", 192, 2048, "minimal", 7.38,
        MAXTEXT + "v5p, 64b"),
    *(Run("Llama 3.1 8B", LLAMA_8B, f"v6e-{chips}", f"data={chips}", "fsdp:data", each * chips, 8192,
          ("input", "q", "k", "v", "out"), seconds, RECIPES + "trillium Llama3.1-8B", offloaded=True)
      for chips, each, seconds in ((8, 3, 3.44), (16, 3, 3.39), (32, 3, 3.50), (64, 5, 5.65), (128, 4, 4.60),
                                   (256, 4, 4.55))),
    Run("Llama 3.1 70B", LLAMA_70B, "tpu7x-128", "data=128", "fsdp:data", 256, 8192,
        ("input", "context", "q", "k", "v"), 12.20, RECIPES + "ironwood llama3.1-70b", moment="bfloat16",
        asynchronous=OFFLOADED),
)  # fmt: skip
