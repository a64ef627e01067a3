"""The published runs: model, chips, mesh, batch, what is kept for the backward pass, measured step and its source."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from toast_cli.price.collectives import KINDS

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
    """Sizes of a decoder. gated: its feed-forward networks have a gate. experts: of `ff` each, of which a token takes
    `chosen`; 0 for a dense decoder."""

    layers: int
    model: int
    heads: int
    kv_heads: int
    ff: int
    vocab: int
    head: int = 128
    gated: bool = True
    experts: int = 0
    chosen: int = 0


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


def maxtext_seconds(of: Decoder, tokens: int, seq: int, teraflops: float) -> float:
    """Seconds of a step from the TFLOP/s of a chip that MaxText logs, which count attention without its causal half.
    tokens: of one chip."""
    width = of.head * of.heads
    products = 6 * of.model * of.ff + 2 * of.model * (2 * width + 2 * of.kv_heads * of.head) + 4 * seq * width
    return 3 * tokens * (of.layers * products + 2 * of.model * of.vocab) / (1e12 * teraflops)


MAXTEXT = "AI-Hypercomputer/maxtext, configs of "
FOUNDRY = "mosaicml/llm-foundry, scripts/train/benchmarking"
RECIPES = "AI-Hypercomputer/tpu-recipes, training/"
B16 = Decoder(32, 4096, 64, 64, 28672, 32000)
B32 = Decoder(32, 8192, 64, 64, 28672, 32000)
B64 = replace(B32, layers=64)
B128 = replace(B64, heads=128, kv_heads=128, ff=57344)
B256 = replace(B128, model=16384)
B512 = replace(B256, layers=128)
B1024 = replace(B512, heads=256, kv_heads=256, ff=114688)
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
    # Utilisation falls with the number of slices.
    *(Run(name, of, f"{slices}xv5e-256", f"slice={slices},data=256", "hsdp:slice,data", slices * batch, 2048, "full",
          alone * utilisation / now, MAXTEXT + f"v5e, {name}")
      for name, of, batch, alone, utilisation, slices, now in (
          ("32B", B32, 1024, 12.09, 66.9, 2, 64.8), ("32B", B32, 1024, 12.09, 66.9, 8, 63.7),
          ("32B", B32, 1024, 12.09, 66.9, 32, 60.4), ("64B", B64, 512, 13.5, 59.9, 2, 56.7),
          ("64B", B64, 512, 13.5, 59.9, 32, 50.2),
      )),
    Run("64B", B64, "v5e-256", "data=256", "fsdp:data", 512, 2048, "full", 13.5, MAXTEXT + "v5e, 64b"),
    Run("32B", B32, "v5p-128", "data=16,model=4", "fsdp:data+megatron:model+sequence", 384, 2048, "minimal", 7.30,
        MAXTEXT + "v5p, 32b"),
    Run("64B", B64, "v5p-128", "data=16,model=4", "fsdp:data+megatron:model+sequence", 192, 2048, "minimal", 7.38,
        MAXTEXT + "v5p, 64b"),
    *(Run(name, of, f"{slices}x{chip}" if slices > 1 else chip,
          f"slice=2,data={chips // model},model={model}" if slices > 1 else f"data={chips // model},model={model}",
          ("hsdp:slice,data" if slices > 1 else "fsdp:data") + "+megatron:model+sequence", slices * chips * each, 2048,
          kept, maxtext_seconds(of, 2048 * each, 2048, teraflops), MAXTEXT + f"v5p, {name}")
      for name, of, chip, chips, model, each, kept, rates in (
          ("128B", B128, "v5p-256", 128, 8, 1, "minimal", (315, 305)),
          ("128B", B128, "v5p-512", 256, 8, 1, "minimal", (316, 274)),
          ("256B", B256, "v5p-1024", 512, 8, 1, "minimal", (308, 289)),
          ("512B", B512, "v5p-1024", 512, 8, 2, "full", (294, 282)),
          ("1024B", B1024, "v5p-4096", 2048, 16, 2, "full", (297, 279)),
      )
      for slices, teraflops in enumerate(rates, 1)),
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
