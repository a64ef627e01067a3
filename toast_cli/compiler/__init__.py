"""What a compiler makes of a partitioned program, as rules: fusion, kernels, schedule, liveness, tiles, rewritten
collectives.

Enters: a program, what it is compiled for, and shardings where a rule depends on them. Leaves: which arrays reach
memory and when they are there, which work runs as one kernel, and which collectives stay as they were written.
"""
