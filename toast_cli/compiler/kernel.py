"""The work of one kernel: bytes and flops for each operand and result of its op, on whole arrays."""

from __future__ import annotations

from dataclasses import dataclass, field

from toast_cli.compiler.layouts import Tiling

Rows = tuple[tuple[int, ...], Tiling]  # shape and tiling of an array whose rows run along given dimensions


@dataclass(slots=True)
class Side:
    """Work of a kernel for one operand or result of its op.

    Attributes:
        bytes, elements: read for an operand, written for a result. largest: elements of the largest array read.
        flops: elementwise operations. read: bytes that the epilogue of a contraction reads, for a result. passing: the
        part of these bytes in temporaries. widest: bytes of the largest of those, as they count in `reuse_widths`.
        staying: the part of these bytes in arrays that stay in on-chip memory while the loop runs, if all arrays that
            the loop keeps there fit; beside: bytes of all those, see `loop_residency`.
        rows: the part of these bytes in arrays whose rows run along given dimensions, see `dims_of_rows`: a device that
            has a part of each row reads and writes whole tiles.
    """

    bytes: int = 0
    elements: int = 0
    largest: int = 0
    flops: float = 0.0
    read: int = 0
    passing: int = 0
    widest: float = 0.0
    staying: float = 0.0
    beside: float = 0.0
    rows: dict[Rows, int] = field(default_factory=dict)


@dataclass(slots=True)
class Kernel:
    """One kernel, without its op's own arithmetic.

    Attributes:
        operands, results: one `Side` each.
        unfinished: bytes of a contraction with an elementwise epilogue. If its result is all-reduced first, it is
            written and read once more.
        rides: it is merged into another kernel, so that it reads nothing itself.
    """

    operands: list[Side]
    results: list[Side]
    unfinished: int = 0
    rides: bool = False
