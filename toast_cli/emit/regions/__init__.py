"""Ops on local shapes with explicit collectives: the bodies of manual regions.

`loops` writes a whole loop; `rules` and `windows` have a local rule for each family of ops (others are computed
replicated); `site` is the interface of rules; `moves` writes reshards and reductions; `values` keeps each device's
piece of every value.
"""
