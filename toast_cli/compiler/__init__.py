"""The effects of the compiler on a partitioned program, as rules: fusion, kernels, schedule, liveness, tiles, rewritten
collectives.

Enters: a program, a compiler profile, and shardings where a rule depends on them. Leaves: which arrays are materialised
and when they are live, which ops form one kernel, and which collectives stay as they were written.
"""
