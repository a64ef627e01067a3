"""Formulas of cost: the roofline of a kernel, the matrix unit, collectives over links, and the parts of a `Cost`.

In: shapes, bytes and a chip or a mesh. Out: seconds and bytes. These formulas hold for any compiler; the effects
of a particular compiler are in `compiler`, and the cost of a whole plan in `evaluate`.
"""
