"""Hand-written kernels: what a custom call of a program does that says nothing to StableHLO or XLA's partitioner.

Enters: a normalised module. Leaves: on each kernel's call a sharding rule in Shardy's words, which the rest of toast
treats like the rule of any other op, and a `HandWritten` with its price and with what changes where it runs on a part
of its arrays.

`mosaic` reads Pallas kernels for TPU, `index_maps` says what their block indices depend on, `mosaic_rules` which of
their dimensions are independent, `mosaic_work` counts their arithmetic, `local` rewrites one for local shapes;
`cudnn` reads cuDNN's attention, `table` what users say of kernels by name, and `describe` puts it all together.
"""
