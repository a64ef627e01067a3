"""`LoweredPlan`: what a plan means for every value and every use of it. This is all that emit needs to know."""

from __future__ import annotations

from dataclasses import dataclass

from toast_cli.plan.layout import Layout


@dataclass(frozen=True)
class LoweredPlan:
    """Layouts of one program under one plan.

    Attributes:
        axis_names, axis_sizes: of the mesh, in order; layouts name axes by number.
        layouts: [values] the layout each value has once its op, and the reduction it leaves behind, are done.
        computed: the layout in which the op itself computes a value, where that differs from `layouts` (the value is
            partial there, and a reduce-scatter takes it to `layouts`).
        required: (op number, operand position) -> the layout that use needs, where that differs from the value's: a reshard
            sits on this edge.
    """

    axis_names: tuple[str, ...]
    axis_sizes: tuple[int, ...]
    layouts: list[Layout]
    computed: dict[int, Layout]
    required: dict[tuple[int, int], Layout]
