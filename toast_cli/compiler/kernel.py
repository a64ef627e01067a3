"""What one kernel does: reads, writes and arithmetic on each side of its op, on whole arrays."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Side:
    """What a kernel does on one side of its op.

    Attributes:
        bytes, elements: read on the side of an operand, written on the side of a result. largest: of the elements read
            those of the largest array.
        flops: elementwise operations. read: bytes that what finishes a contraction reads, on the side of a result.
        passing: of all these bytes those of arrays that the program makes and does not keep. widest: bytes of the
            largest of these arrays, as they count in `on_chip_reuse`. given: of all these bytes those of arguments and
            results, see `prefetched_arguments`.
        staying: of all these bytes those of arrays that lie in on-chip memory as long as the loop runs, where they fit
            there beside the others that the loop keeps so; `beside`: bytes of all of them, see `loop_residency`.
    """

    bytes: int = 0
    elements: int = 0
    largest: int = 0
    flops: float = 0.0
    read: int = 0
    passing: int = 0
    given: int = 0
    widest: float = 0.0
    staying: float = 0.0
    beside: float = 0.0


@dataclass(slots=True)
class Kernel:
    """One kernel, without its op's own arithmetic.

    Attributes:
        operands, results: one `Side` each.
        unfinished: bytes of a contraction that elementwise work finishes before it is written. Where a reduction comes
            between, the contraction is written and read once more.
        rides: it is part of another kernel, so that it reads nothing itself.
    """

    operands: list[Side]
    results: list[Side]
    unfinished: int = 0
    rides: bool = False
