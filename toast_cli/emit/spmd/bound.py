"""What cannot stand in a manual region over all mesh axes: other regions, what runs on one device, and random numbers
that each device would make for itself.

Enters: a `Source`. Leaves: which of its ops these are.
"""

from __future__ import annotations

from toast_cli.frontend.effects import is_placed
from toast_cli.frontend.source import Source
from toast_cli.program.model import Op
from toast_cli.program.ops import RNG


def is_region(op: Op) -> bool:
    """Whether it is a manual region that the program brings along."""
    return op.name == "sdy.manual_computation"


def is_bound(source: Source, number: int, op: Op) -> bool:
    """Whether op `number` cannot stand in a region."""
    return is_region(op) or op.name == RNG or is_placed(source.operations[number])
