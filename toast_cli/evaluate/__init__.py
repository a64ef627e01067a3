"""The incremental evaluator: time and memory of a plan, per device.

In: a `Problem` and plans. Out: a `Cost` per plan (step time, compute, communication, peak), and for one chosen
plan its collectives, its kernels and the arrays alive at the peak. It does not depend on MLIR.
"""
