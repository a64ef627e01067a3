"""The effects of the compiler on a partitioned program, as rules: fusion, kernels, schedule, liveness, tiles, rewritten
collectives.

By subject: `fusion`, `fusion_rules`, `kernels`, `merged_kernels` (what one kernel computes), `arithmetic`,
`convolutions`, `gpu_libraries` (what it takes), `schedule`, `liveness`, `on_chip` (memory), `layouts`, `short_tiles`,
`space_to_batch` (tiles), `collectives`, `reduce_scatter`, `partitioner` (communication). `profile` has the numbers of
each compiler.

In: a program, a compiler profile, and shardings where a rule depends on them. Out: which arrays are materialised
and when they are live, which ops form one kernel, and which collectives stay as they were written.
"""
