"""Hand-written kernels: the sharding rules and costs of custom calls that are opaque to StableHLO and XLA's
partitioner.

On each kernel's call goes a sharding rule in Shardy's notation, which the rest of toast treats like the rule of any
other op, and a `HandWritten` with its cost and the changes needed to run it on shards. `mosaic` reads Pallas kernels
for TPU, `describe` cuDNN's attention and all others, `table` the user's table of kernels.
"""


class KernelError(Exception):
    """A kernel cannot be read; the message says why. It is computed replicated."""
