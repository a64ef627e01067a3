"""Ops that only enlarge an array for a contraction to read: they repeat it (keys and values for the heads that share
them) or convert it to a wider type. Each is sharded as the contraction shards its operand, so that the small array is
resharded, not the large one.

Enters: a program and its dimensions. Leaves: the dimensions, with these ops described in the slots of the product.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from toast_cli.dimensions.model import Dimensions, Form, SlotKind
from toast_cli.program.model import Op, Program

Dims = tuple[tuple[int, ...], ...]  # [dimensions] slots, major to minor


def split_as_read(program: Program, dimensions: Dimensions, free: Sequence[bool]) -> Dimensions:
    """Dimensions in which enlarging ops are split as the first product that reads them. free: [values] made from
    constants alone."""
    forms, slot_classes, strands = list(dimensions.forms), list(dimensions.slot_classes), dict(dimensions.strands)
    for number, op in enumerate(program.ops):
        if not op.kind.view_or_convert or free[op.results[0]] or not _enlarges(program, op):
            continue
        way, product, position = _way_to_product(program, number)
        if product is None:
            continue
        for step, form in _along(way, dimensions.forms, dimensions.forms[product], position):
            forms[step], slot_classes[step] = form, dimensions.slot_classes[product]
            strands.pop(step, None)
            if product in dimensions.strands:
                strands[step] = dimensions.strands[product]
    return replace(dimensions, forms=tuple(forms), slot_classes=tuple(slot_classes), strands=strands)


def _enlarges(program: Program, op: Op) -> bool:
    operand, result = program.values[op.operands[0]], program.values[op.results[0]]
    return operand.elements > 1 and result.bytes > operand.bytes


def _way_to_product(program: Program, number: int) -> tuple[list[int], int | None, int]:
    """(ops from this one on that only change an array's shape or type, first contraction that reads their result,
    operand position)."""
    way = [number]
    while uses := program.users[program.ops[way[-1]].results[0]]:
        reader, position = min(uses)
        if program.ops[reader].kind.contraction:
            return way, reader, position
        if len(uses) > 1 or not program.ops[reader].kind.view_or_convert:
            break
        way.append(reader)
    return way, None, 0


def _along(way: list[int], forms: Sequence[Form], product: Form, position: int) -> list[tuple[int, Form]]:
    """(op, its form in the slots of the contraction) for each op of a path; empty where dimensions do not line up."""
    found: list[tuple[int, Form]] = []
    kinds = tuple([SlotKind.SUMMED_LATER if kind is SlotKind.REDUCTION else kind for kind in product.kinds])
    read: Dims = product.operands[position]
    for step in reversed(way):
        form = forms[step]
        slots = _same_slots(form, form.results[0], product, read)
        if slots is None or any(slot not in slots for dim in form.operands[0] for slot in dim):
            return []
        made, read = read, tuple([tuple([slots[slot] for slot in dim]) for dim in form.operands[0]])
        found.append((step, replace(product, kinds=kinds, operands=(read,), results=(made,))))
    return found


def _same_slots(form: Form, dims: Dims, product: Form, read: Dims) -> dict[int, int] | None:
    """Slot of an op's result -> slot of the product that is the same dimension."""
    found: dict[int, int] = {}
    for own, other in zip(dims, read, strict=True):
        if [form.sizes[slot] for slot in own] != [product.sizes[slot] for slot in other]:
            return None
        found.update(zip(own, other, strict=True))
    return found
