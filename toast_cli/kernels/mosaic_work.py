"""Counts a Pallas kernel's arithmetic: that of its body, times the steps of its grid on which each part runs.

A branch on grid indices counts for the steps on which it is taken: a causal kernel skips about half of its steps. A
branch on data always counts, and a loop of unknown length counts once; `Work.assumed` says so.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import prod, sqrt
from typing import Any

import numpy as np

from toast_cli.kernels.index_maps import DYNAMIC, IntegerValues, Known, short_name
from toast_cli.xla import ir

PRODUCTS = ("tpu.matmul", "vector.contract")
TRANSCENDENTAL = frozenset(
    f"math.{name}"
    for name in (
        "atan2", "cbrt", "cos", "erf", "exp", "exp2", "expm1", "log", "log1p", "log2", "powf", "rsqrt", "sin", "sqrt",
        "tan", "tanh",
    )
)  # fmt: skip
_CONTRACTED = re.compile(r"dimension_numbers<\[([\d, ]*)\]")


@dataclass(frozen=True)
class Work:
    """Arithmetic of a kernel over its whole grid.

    Attributes:
        products: operations of the matrix unit; a multiply-add counts 2. vector: elementwise ones and reductions.
        transcendentals: of those, the transcendental ones. skipped: fraction of the arithmetic that branches on grid
            indices skip, between 0 and 1. assumed: what the counts assume: "as if ...".
    """

    products: float = 0.0
    vector: float = 0.0
    transcendentals: float = 0.0
    skipped: float = 0.0
    assumed: tuple[str, ...] = ()

    @property
    def flops(self) -> float:
        return self.products + self.vector


def work_of(block: Any, known: dict[Any, Known], grid: tuple[int, ...]) -> Work:
    """The work of a body over its grid; known: its arguments. A bound of the grid that the program computes counts as
    1."""
    counter = _Counter(IntegerValues(known))
    counter.block(block, 1.0, 1.0)
    if not counter.integers.complete:
        counter.assumed["it skipped no step: its grid is too large to look at each"] = None
    steps = prod(n for n in grid if n != DYNAMIC)
    done, whole = counter.flops, counter.whole
    return Work(
        counter.products * steps,
        (done - counter.products) * steps,
        counter.transcendentals * steps,
        1.0 - done / whole if whole else 0.0,
        tuple(counter.assumed),
    )


class _Counter:
    """Sums the arithmetic of one step, averaged over all steps. whole: without skipped branches."""

    def __init__(self, integers: IntegerValues) -> None:
        self.integers = integers
        self.assumed: dict[str, None] = {}
        self.products = self.flops = self.transcendentals = self.whole = 0.0

    def block(self, block: Any, times: float, whole: float) -> None:
        for view in block.operations:
            operation = view.operation
            name = short_name(operation)
            if len(operation.regions) == 0:
                self._count(operation, name, times, whole)
                continue
            for part, region in zip(self._parts(operation, name), operation.regions, strict=False):
                taken, all_steps = part
                for inner in region.blocks:
                    self.block(inner, times * taken, whole * all_steps)

    def _parts(self, operation: Any, name: str) -> list[tuple[float, float]]:
        """For each region of an operation, its runs per run of the operation; and its runs if no branch on grid indices
        skipped anything."""
        if name == "scf.if":
            values = self.integers.values(operation.operands[0])
            other = len(operation.regions) > 1 and any(len(b.operations) > 1 for b in operation.regions[1].blocks)
            if values is None:
                return [(0.5, 0.5)] * 2 if other else [(1.0, 1.0)] * 2
            taken = float(np.mean(values != 0))
            return [(taken, taken if other else 1.0), (1.0 - taken, 1.0 - taken)]
        if name == "scf.for" and len(operation.operands) >= 3:
            bounds = [self.integers.values(operand) for operand in list(operation.operands)[:3]]
            start, end, step = bounds
            if start is not None and end is not None and step is not None:
                trips = float(np.mean(np.maximum(0, np.ceil((end - start) / np.maximum(step, 1)))))
                return [(trips, trips)]
        if name in ("scf.for", "scf.while"):
            self.assumed["its loops of unknown length ran once"] = None
        return [(1.0, 1.0)] * len(operation.regions)

    def _count(self, operation: Any, name: str, times: float, whole: float) -> None:
        if len(operation.results) != 1:
            return
        elements = _elements(operation.results[0].type)
        transcendental = name in TRANSCENDENTAL
        if name in PRODUCTS:
            flops = _product_flops(operation, elements)
            self.products += flops * times
        elif name in ("vector.multi_reduction", "tpu.all_reduce", "vector.reduction"):
            flops = _elements(operation.operands[0].type)
        elif name.startswith("math.") or (name.startswith("arith.") and name.endswith("f") and elements > 1):
            flops = elements
        else:
            return
        self.flops += flops * times
        self.whole += flops * whole
        self.transcendentals += elements * times if transcendental else 0.0


def _elements(kind: Any) -> float:
    return float(prod(kind.shape)) if isinstance(kind, ir.ShapedType) and kind.has_rank else 1.0


def _product_flops(operation: Any, elements: float) -> float:
    """2 times the elements of the result times those along the contracted dimensions."""
    left, right = operation.operands[0].type, operation.operands[1].type
    attributes = operation.attributes
    stated = _CONTRACTED.search(str(attributes["dimension_numbers"])) if "dimension_numbers" in attributes else None
    if stated:
        dims = [int(d) for d in stated[1].split(",") if d.strip()]
        return 2.0 * elements * float(prod(left.shape[d] for d in dims))
    return 2.0 * elements * sqrt(_elements(left) * _elements(right) / max(elements, 1.0))
