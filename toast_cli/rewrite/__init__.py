"""Rewrites of a program: equivalent programs that need less memory or less time, or that a mesh can split better.

* `recompute`: values that the forward pass saves are computed again in the backward pass, or the other way round.
* `microbatches`: the batch runs in microbatches, one after the other.
* `offload`: residuals or optimizer state are in host memory while they are not needed.
* `fused_products`: fused products are parted.
* `stages`: the step is cut into programs of pipeline stages (`stage_files`), which no longer are one program;
  `layer_loops` divides scans over layers among them.

The new program has the same arguments and results. It is analysed, searched and written like the user's own, so
nothing behind a rewrite knows of it. `candidates/` chooses which rewrites are tried. `CONTRIBUTING.md` has the recipe
for a new one.
"""

from toast_cli.rewrite.microbatches import batch_parts, with_microbatches
from toast_cli.rewrite.offload import with_offload
from toast_cli.rewrite.recompute import kept_bytes, with_recompute

__all__ = ["batch_parts", "kept_bytes", "with_microbatches", "with_offload", "with_recompute"]
