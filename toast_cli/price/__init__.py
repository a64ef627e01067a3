"""Time and memory of a plan, per device: what a compiler makes of a partitioned program, and what that costs.

Formulas that hold for any compiler: `cost` (roofline, matrix unit), `collectives` (links, NCCL), `timeline` (overlap).
Rules of one compiler, each a named pass (`profile`), with its figures in `profiles`: `fusion`, `kernel`, `compilation`
(kernels), `liveness`, `on_chip` (memory), `layouts`, `convolutions` (tiles), `compiled_collectives`, `gpu_libraries`.
The incremental engine: `items` and `arrays` (what is priced), `pricing`, `kernel_pricing`, `buffers` (the price of one
item), `memo`, and `evaluator`, which the search asks. It does not depend on MLIR.
"""
