"""Checks an emitted program with XLA. Enters: the bytes of a program. Leaves: facts about the compiled one.

`child` runs each compilation in its own process, so that a compiler that aborts is a verdict; `ahead`, `partitioned`
and `numbers` are the tasks; `collectives` reads a compiled module's text.
"""
