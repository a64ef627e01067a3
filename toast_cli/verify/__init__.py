"""Checks an emitted program with XLA. In: the bytes of a program. Out: facts about the compiled one.

`child` runs each compilation in its own process, so that a compiler that aborts is a verdict; `ahead`, `partitioned`
and `numbers` are the tasks; `collectives` reads a compiled module's text.
"""
