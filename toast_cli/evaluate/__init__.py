"""The incremental engine: what a plan costs in time and memory, per device.

Enters: a `Problem` and plans. Leaves: a `Cost` per plan (step time, compute, communication, peak), and for one chosen
plan its collectives, its kernels and what is alive at the peak. Knows nothing of MLIR.
"""
