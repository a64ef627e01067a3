"""Candidates: which variants of a program are searched, and which plan is taken.

* `variants`: the program as written and rewritten, each searched on every candidate mesh.
* `fitting`: rewrites tried where no plan fits in memory (`--fit auto`), or where one is faster (`--fit fastest`).
* `ask_compiler`: the best plans compiled, and the one taken that the compiler finds best.
* `stage_plans`: plans and prices of pipeline stages.
* `largest_size`: sizes tried for a symbolic dimension (`--dim b=max`).
"""
