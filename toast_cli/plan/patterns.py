"""Makes a `Problem` of a program on a mesh: ops that every plan splits alike share a pattern."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from toast_cli.dimensions.model import Dimensions, Form, SlotKind, Strand
from toast_cli.hardware.model import Mesh
from toast_cli.plan.accumulation import ACCUMULATORS, Accumulation, find_accumulations, ops_of
from toast_cli.plan.decisions import NOWHERE
from toast_cli.plan.iteration import NO_ROLE, OpPattern, PinnedSharding, Space
from toast_cli.plan.loop_reads import LOOP_READS, read_in_trips, weight_views
from toast_cli.plan.pins import number_pins, unused_pins
from toast_cli.plan.problem import Problem
from toast_cli.plan.repeats import split_as_read
from toast_cli.plan.workarounds import ALL, Workarounds
from toast_cli.program.model import Op, Program
from toast_cli.program.ops import CONVOLUTION, GATHER, RESULT, SCATTER
from toast_cli.program.pins import NO_PINS, Pins
from toast_cli.program.rematerialised import remade_values
from toast_cli.program.roles import INPUTS, WEIGHTS, argument_roles, carried_results, views
from toast_cli.program.sums import adds_up


def make_problem(
    program: Program,
    dimensions: Dimensions,
    mesh: Mesh,
    wishes: tuple[str, ...] = (),
    stated: Pins = NO_PINS,
    workarounds: Workarounds = ALL,
) -> Problem:
    """The problem of partitioning `program` over `mesh`.

    Args:
        wishes: the user's `PATTERN=data,None` pins for arguments and results. stated: shardings that the program itself
            states.
    """
    free = remade_values(program)
    dimensions = split_as_read(program, dimensions, free)
    roles, argument_role = argument_roles(program)
    value_pins, use_pins = number_pins(program, mesh, wishes, stated)
    kinds, argument_kind = _kinds_of_arguments(program, dimensions, roles, argument_role, value_pins)
    argument_of_value = {
        value: k for value, k in views(program).items() if _lies_as(program, value, k, roles[argument_role[k]])
    }
    taken_over = {result: k for k, result in enumerate(carried_results(program)) if result >= 0}
    accumulations = _accumulations(program, dimensions, value_pins)
    accumulators, accumulating = len(roles) + len(kinds), ops_of(accumulations)
    weight_role = roles.index(WEIGHTS)
    weights = [argument.value for k, argument in enumerate(program.arguments) if argument_role[k] == weight_role]
    seen_in_loops = weight_views(program, weights)
    reads = bool(seen_in_loops) or any(True for _ in read_in_trips(program, free))
    loop_reads = accumulators + bool(accumulations)
    patterns: list[OpPattern] = []
    numbers: dict[tuple[object, ...], int] = {}
    op_pattern: list[int] = []
    class_group = dimensions.class_group
    groups_of: dict[tuple[int, ...], tuple[int, ...]] = {}
    results_seen = 0
    for number, op in enumerate(program.ops):
        classes = dimensions.slot_classes[number]
        groups = groups_of.get(classes)
        if groups is None:
            groups = groups_of[classes] = tuple(class_group[c] for c in classes)
        argument = argument_of_value.get(op.results[0], NOWHERE) if op.results else NOWHERE
        if op.name == RESULT:
            argument = taken_over.get(results_seen, NOWHERE)
            results_seen += 1
        role, kind = (argument_role[argument], argument_kind[argument]) if argument != NOWHERE else (NO_ROLE, NO_ROLE)
        if number in accumulating:
            role = kind = accumulators
        loop_role = loop_reads if number in seen_in_loops else NO_ROLE
        strands: tuple[Strand | None, ...] = dimensions.strands.get(number, ())
        result_pins = tuple(value_pins.get(v) for v in op.results) if any(v in value_pins for v in op.results) else ()
        operand_pins = _operand_pins(op, number, use_pins)
        form = dimensions.forms[number]
        space = _space(op, form) if workarounds.split_space else None
        closed = _closed_axes(op, mesh, stated.manual.get(number), operand_pins + result_pins)
        looked_up = _looked_up(op, form)
        key = (form, groups, strands, role, kind, operand_pins, result_pins, space, closed, loop_role, looked_up)
        at = numbers.get(key)
        if at is None:
            at = numbers[key] = len(patterns)
            patterns.append(OpPattern(*key))
        op_pattern.append(at)
    places = {r: k for group in dimensions.groups for k, r in enumerate(group.resolutions)}
    return Problem(
        program,
        dimensions,
        mesh,
        tuple(patterns),
        tuple(op_pattern),
        (*roles, *kinds, *((ACCUMULATORS,) if accumulations else ()), *((LOOP_READS,) if reads else ())),
        argument_role,
        free,
        places,
        notices=(*stated.notices, *unused_pins(program, wishes)),
        workarounds=workarounds,
        argument_kind=argument_kind,
        accumulations=accumulations,
    )


def _looked_up(op: Op, form: Form) -> frozenset[int]:
    """Slots of a look-up in a table, or of a scatter into one, that are no dimensions of the table."""
    if op.name not in (GATHER, SCATTER):
        return frozenset()
    return frozenset(range(len(form.sizes))).difference(*form.operands[0])


def _closed_axes(
    op: Op, mesh: Mesh, manual: tuple[str, ...] | None, pins: tuple[PinnedSharding | None, ...]
) -> frozenset[int]:
    """Mesh axes of an op's manual region and those its boundary names; all axes if the region's axes have names that
    the mesh lacks. manual: names of the region's axes, where known."""
    if op.region is None:
        return frozenset()
    names = op.region.axes if manual is None else manual
    if any(name not in mesh.names for name in names):
        return frozenset(range(len(mesh.names)))
    said = {axis for pin in pins for axes in pin or () for axis in axes or ()}
    return frozenset(mesh.names.index(name) for name in names) | said


def _lies_as(program: Program, value: int, argument: int, role: str) -> bool:
    """Whether a view of an argument has the sharding in which the argument is stored.

    A view of a weight has it, unless it is larger (a bias that is broadcast over a batch). A view of an input with
    another shape or type does not, so that a replicated input is sliced first: XLA lays out and converts all of it
    before it takes a slice.
    """
    view, whole = program.values[value], program.values[program.arguments[argument].value]
    return view == whole if role == INPUTS else view.elements <= whole.elements


def _accumulations(
    program: Program, dimensions: Dimensions, pins: Mapping[int, PinnedSharding]
) -> tuple[Accumulation, ...]:
    """The loop-carried sums that no pin binds."""
    if not program.loops or any(value.written for value in program.values):  # regions have no uneven shards
        return ()
    found = find_accumulations(
        program,
        [
            SlotKind.REDUCTION in form.kinds and len(op.results) == 1 and adds_up(op) and op.results[0] not in pins
            for op, form in zip(program.ops, dimensions.forms, strict=True)
        ],
    )
    return tuple(one for one in found if program.ops[one.carry].results[0] not in pins)


def _kinds_of_arguments(
    program: Program,
    dimensions: Dimensions,
    roles: tuple[str, ...],
    argument_role: tuple[int, ...],
    pins: Mapping[int, PinnedSharding],
) -> tuple[list[str], tuple[int, ...]]:
    """(names of the kinds of arguments that are not all of their role, [arguments] number of each one's kind, after
    those of the roles). Arguments of one kind have the same dimensions, such as one weight in every layer."""
    members: dict[object, list[int]] = defaultdict(list)
    for number, argument in enumerate(program.arguments):
        groups = tuple(dimensions.class_group[c] for c in dimensions.slot_classes[number])
        form, strands = dimensions.forms[number], dimensions.strands.get(number, ())
        members[argument_role[number], form, groups, strands, pins.get(argument.value)].append(number)
    names: list[str] = []
    found = list(argument_role)
    for alike in members.values():
        if len(alike) == argument_role.count(argument_role[alike[0]]):
            continue
        for number in alike:
            found[number] = len(roles) + len(names)
        name = program.arguments[alike[0]].label or f"argument {alike[0]}"
        rest = f" and {len(alike) - 1} alike" if len(alike) > 1 else ""
        names.append(f"argument {name}{rest}" if name in roles else f"{name}{rest}")
    return names, tuple(found)


def _space(op: Op, form: Form) -> Space | None:
    """The slots of a windowed convolution; None for other ops."""
    if op.name != CONVOLUTION or not op.windows:
        return None
    image, kernel, result = ({s for slots in dims for s in slots} for dims in (*form.operands, form.results[0]))
    windowed = {slot for w in op.windows for slot in form.operands[0][w.operand_dim]}
    sets = (
        windowed & result - kernel,
        windowed & kernel,
        image & kernel - windowed,
        kernel - windowed,
    )
    return Space(*map(frozenset, sets))


def _operand_pins(
    op: Op, number: int, use_pins: dict[tuple[int, int], PinnedSharding]
) -> tuple[PinnedSharding | None, ...]:
    if not use_pins:
        return ()
    pins = tuple(use_pins.get((number, k)) for k in range(len(op.operands)))
    return pins if any(p is not None for p in pins) else ()
