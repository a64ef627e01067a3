"""The published runs: model, chips, mesh, batch, what is kept for the backward pass, measured step and its source."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from toast_cli.cost.collectives import KINDS

# What is kept for the backward pass; names are those of `step.layer`. "full" keeps nothing, "minimal" the products
# without batch dimensions, "all" everything. On GPUs attention's results are kept unless it is "full".
Policy = Literal["full", "minimal", "all"] | tuple[str, ...]
# --xla_tpu_enable_async_collective_fusion_fuse_all_gather, as MaxText's recipes have it; on v6e also
# --xla_tpu_enable_sparse_core_collective_offload_all_reduce; on TPU7x those for all_gather and reduce_scatter are on.
FUSED = frozenset({"all-gather", "collective-permute"})
REDUCED = FUSED | {"all-reduce"}
OFFLOADED = REDUCED | {"reduce-scatter"}


@dataclass(frozen=True)
class Decoder:
    """Sizes of a decoder. gated: its feed-forward networks have a gate."""

    layers: int
    model: int
    heads: int
    kv_heads: int
    ff: int
    vocab: int
    head: int = 128
    gated: bool = True


@dataclass(frozen=True)
class Run:
    """One measured run.

    Attributes:
        mesh: what toast calls the slice; axes: its mesh shape. strategy: as `--strategy` takes it.
        batch, seq: sequences of the whole mesh, and their length. kept: see `Policy`; offloaded: it is in the host's
            memory. moment: type of Adam's first moment.
        step_seconds: measured. source: repository and file. asynchronous: the kinds of collectives that the compiler
            flags of the run let run beside computing. fused: splash attention computes all gradients in one kernel
            (`use_fused_bwd_kernel`). scanned: layers are a scan.
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
    fused: bool = False
    scanned: bool = True

    @property
    def platform(self) -> str:
        """Of JAX: "tpu" or "cuda"."""
        return "cuda" if ":" in self.mesh else "tpu"


MAXTEXT = "AI-Hypercomputer/maxtext, configs of "
FOUNDRY = "mosaicml/llm-foundry, scripts/train/benchmarking"
RECIPES = "AI-Hypercomputer/tpu-recipes, training/"
B16 = Decoder(32, 4096, 64, 64, 28672, 32000)
B32 = Decoder(32, 8192, 64, 64, 28672, 32000)
B64 = replace(B32, layers=64)
LLAMA_8B = Decoder(32, 4096, 32, 8, 14336, 128256)
LLAMA_2 = Decoder(32, 4096, 32, 32, 11008, 32000)
MPT_3B = Decoder(32, 2560, 20, 20, 10240, 50368, gated=False)
MPT_7B = Decoder(32, 4096, 32, 32, 16384, 50368, gated=False)
MPT_13B = Decoder(40, 5120, 40, 40, 20480, 50368, gated=False)
MPT_70B = Decoder(80, 8192, 64, 64, 32768, 50368, gated=False)
LLAMA_70B = Decoder(80, 8192, 64, 8, 28672, 128256)

RUNS = (
    Run("16B", B16, "v5e-256", "data=256", "fsdp:data", 1536, 2048, "full", 10.31, MAXTEXT + "v5e, 16b"),
    Run("32B", B32, "v5e-256", "data=256", "fsdp:data", 1024, 2048, "full", 12.09, MAXTEXT + "v5e, 32b"),
    # Utilisation falls from 66.9 % of one slice to 64.8 %.
    Run("32B", B32, "2xv5e-256", "slice=2,data=256", "hsdp:slice,data", 2048, 2048, "full", 12.09 * 66.9 / 64.8,
        MAXTEXT + "v5e, 32b"),
    Run("64B", B64, "v5e-256", "data=256", "fsdp:data", 512, 2048, "full", 13.5, MAXTEXT + "v5e, 64b"),
    Run("32B", B32, "v5p-128", "data=16,model=4", "fsdp:data+megatron:model+sequence", 384, 2048, "minimal", 7.30,
        MAXTEXT + "v5p, 32b"),
    Run("64B", B64, "v5p-128", "data=16,model=4", "fsdp:data+megatron:model+sequence", 192, 2048, "minimal", 7.38,
        MAXTEXT + "v5p, 64b"),
    *(Run("Llama 3.1 8B", LLAMA_8B, f"v6e-{chips}", f"data={chips}", "fsdp:data", each * chips, 8192,
          ("input", "q", "k", "v", "out"), seconds, RECIPES + "trillium Llama3.1-8B", offloaded=True,
          asynchronous=REDUCED, fused=True)
      for chips, each, seconds in ((8, 3, 3.44), (16, 3, 3.39), (32, 3, 3.50), (64, 5, 5.65), (128, 4, 4.60),
                                   (256, 4, 4.55))),
    Run("Llama 3.1 70B", LLAMA_70B, "tpu7x-128", "data=128", "fsdp:data", 256, 8192,
        ("input", "context", "q", "k", "v"), 12.20, RECIPES + "ironwood llama3.1-70b", moment="bfloat16",
        asynchronous=OFFLOADED, fused=True),
    Run("Llama 2 7B", LLAMA_2, "h100:8", "data=8", "fsdp:data", 16, 4096, "minimal", 0.721,
        "NVIDIA/JAX-Toolbox, docs/frameworks/maxtext", asynchronous=frozenset(KINDS), scanned=False),
    # Selective checkpointing of single operations: every second product of a layer is computed again.
    *(Run("Llama 3.1 8B", LLAMA_8B, f"h100:{gpus}", f"data={gpus}", "fsdp:data", 2 * gpus, 8192,
          ("q", "v", "gate", "down"), 2 * 8192 / tokens, "pytorch/torchtitan, benchmarks llama3_h100_202412",
          asynchronous=frozenset(KINDS), scanned=False)
      for gpus, tokens in ((8, 6667), (128, 6514))),
    Run("MPT 7B", MPT_7B, "h100:8", "data=8", "fsdp:data", 48, 2048, "all", 6 * 2048 / 10643, FOUNDRY,
        asynchronous=frozenset(KINDS), scanned=False),
    *(Run("MPT 13B", MPT_13B, f"h100:{gpus}", f"data={gpus}", "fsdp:data", 2 * gpus, 2048, "all", 2 * 2048 / tokens,
          FOUNDRY, asynchronous=frozenset(KINDS), scanned=False)
      for gpus, tokens in ((8, 4792), (64, 4800))),
    # One of several microbatches, which are all alike but for the optimizer's step.
    *(Run(name, decoder, "a100-80:8", "data=8", "fsdp:data", 8 * each, 2048, "all", each * 2048 / tokens,
          FOUNDRY, asynchronous=frozenset(KINDS), scanned=False)
      for name, decoder, each, tokens in (("MPT 3B", MPT_3B, 10, 10811), ("MPT 7B", MPT_7B, 6, 4641),
                                          ("MPT 13B", MPT_13B, 2, 2262))),
    Run("MPT 70B", MPT_70B, "h100:64", "data=64", "fsdp:data", 512, 2048, "full", 8 * 2048 / 1039, FOUNDRY,
        asynchronous=frozenset(KINDS), scanned=False),
)  # fmt: skip
