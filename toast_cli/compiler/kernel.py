"""What one kernel does: reads, writes and arithmetic on each side of its op, on whole arrays."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Side:
    """What a kernel does on one side of its op. bytes and elements: read on the side of an operand, written on that of a result;
    flops: elementwise. read: bytes read on the side of a result, by what finishes a product. passing: of all these bytes those of arrays
    that the program makes and does not keep."""

    bytes: int = 0
    elements: int = 0
    flops: float = 0.0
    read: int = 0
    passing: int = 0


@dataclass(slots=True)
class Kernel:
    """operands: [operands] one side each. results: [results]. The op's own arithmetic is not in them.

    unfinished: bytes of a product that elementwise work finishes before it is written. Where a reduction comes between, the
    product is written and read once more. rides: on another kernel, so that it reads nothing itself.
    """

    operands: list[Side]
    results: list[Side]
    unfinished: int = 0
    rides: bool = False
