"""Finds ops that cannot be in a manual region over all mesh axes: other regions, ops that run on one device, and random
number generators, which would differ between devices.

Enters: a `Source`. Leaves: which of its ops these are.
"""

from __future__ import annotations

from toast_cli.frontend.effects import is_placed
from toast_cli.frontend.source import Source
from toast_cli.program.model import Op
from toast_cli.program.ops import RNG


def is_region(op: Op) -> bool:
    """True for a manual region of the user's program."""
    return op.name == "sdy.manual_computation"


def is_bound(source: Source, number: int, op: Op) -> bool:
    """True if op `number` cannot be in a region."""
    return is_region(op) or op.name == RNG or is_placed(source.operations[number])
