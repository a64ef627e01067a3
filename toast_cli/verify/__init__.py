"""What XLA really does with an emitted program. Enters: the bytes of a program. Leaves: facts about the compiled one.

`child` runs each compilation in a process of its own, so that a compiler that aborts is a verdict; `compile` and
`numbers` are what to ask of it; `collectives` reads a compiled module's text.
"""
