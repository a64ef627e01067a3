"""Hand-written kernels: the sharding rules and costs of custom calls that are opaque to StableHLO and XLA's
partitioner.

In: a normalised module. Out: on each kernel's call a sharding rule in Shardy's notation, which the rest of toast
treats like the rule of any other op, and a `HandWritten` with its cost and the changes needed to run it on shards.

`mosaic` reads Pallas kernels for TPU, `index_maps` finds the grid axes that their block indices depend on,
`mosaic_rules` finds independent dimensions, `mosaic_work` counts arithmetic, `local` rewrites a kernel for local
shapes; `cudnn` reads cuDNN's attention, `table` reads the user's table of kernels, and `describe` combines them all.
"""
