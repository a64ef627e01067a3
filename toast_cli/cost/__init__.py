"""Formulas of cost: the roofline of a kernel, the matrix unit, collectives over links, and the parts of a `Cost`.

Enters: shapes, bytes and a chip or a mesh. Leaves: seconds and bytes. These formulas hold for any compiler; the effects
of a particular compiler are in `compiler`, and the cost of a whole plan in `evaluate`.
"""
