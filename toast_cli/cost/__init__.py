"""Formulas of cost: the roofline of a kernel, the matrix unit, collectives over links, and what a `Cost` is made of.

Enters: shapes, bytes and a chip or a mesh. Leaves: seconds and bytes. These formulas hold for any compiler; what one
compiler makes of a program is in `compiler`, and the cost of a whole plan in `evaluate`.
"""
