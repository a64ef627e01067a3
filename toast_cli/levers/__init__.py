"""Memory rewrites ("levers"): equivalent programs that need less memory, or less time.

* `recompute`: values that the forward pass saves are computed again in the backward pass.
* `keep`: products that the program computes again are saved instead.
* `microbatches`: the batch runs in microbatches, one after the other.
* `offload`: residuals or optimizer state are in host memory while they are not needed.

In: a `Source` and what to do (the options `--recompute`, `--microbatches` and `--offload`). Out: another
`Source` with the same arguments and results, or a text that says why there is none. The new program is analysed,
searched and written like the user's own, so nothing behind a lever knows of it. `toast_cli.fitting` chooses levers
where no plan fits in memory (`--fit auto`), or also where one makes the step faster (`--fit fastest`).

`CONTRIBUTING.md` has the recipe for a new one.
"""

from toast_cli.levers.microbatches import batch_parts, with_microbatches
from toast_cli.levers.offload import with_offload
from toast_cli.levers.recompute import with_recompute

__all__ = ["batch_parts", "with_microbatches", "with_offload", "with_recompute"]
