"""From bytes to a `Source`: what enters is a path, what leaves is one normalised MLIR module and the `Program` read from it.

`formats` recognises and parses, `normalise` leaves one entry function without calls, `reader` flattens that into a `Program`.
"""
