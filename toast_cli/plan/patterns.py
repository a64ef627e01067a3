"""Makes a `Problem` of a program on a mesh: ops that every plan splits alike share a pattern."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

from toast_cli.dimensions.model import Dimensions, FactorKind, Form, Strand
from toast_cli.hardware.model import Mesh
from toast_cli.plan.accumulation import ACCUMULATORS, Accumulation, find_accumulations, ops_of
from toast_cli.plan.axis_assignment import ALL, Workarounds
from toast_cli.plan.decisions import NONE
from toast_cli.plan.loop_reads import LOOP_READS, read_in_trips, weight_views
from toast_cli.plan.op_sharding import NO_ROLE, OpPattern, PinnedSharding, Space
from toast_cli.plan.pins import number_pins, unused_pins
from toast_cli.plan.problem import Problem
from toast_cli.program.model import Op, Program
from toast_cli.program.ops import CONVOLUTION, GATHER, RESULT, SCATTER
from toast_cli.program.pins import NO_PINS, Pins
from toast_cli.program.rematerialised import remade_values
from toast_cli.program.roles import INPUTS, WEIGHTS, argument_roles, carried_results, views
from toast_cli.program.sums import adds_up

Dims = tuple[tuple[int, ...], ...]  # [dimensions] factors, major to minor


def make_problem(
    program: Program,
    dimensions: Dimensions,
    mesh: Mesh,
    user_pins: tuple[str, ...] = (),
    program_pins: Pins = NO_PINS,
    workarounds: Workarounds = ALL,
) -> Problem:
    """The problem of partitioning `program` over `mesh`.

    Args:
        user_pins: the user's `PATTERN=data,None` pins for arguments and results. program_pins: shardings that the
            program itself states.
    """
    free = remade_values(program)
    dimensions = split_as_read(program, dimensions, free)
    roles, argument_role = argument_roles(program)
    value_pins, use_pins = number_pins(program, mesh, user_pins, program_pins)
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
        classes = dimensions.factor_classes[number]
        groups = groups_of.get(classes)
        if groups is None:
            groups = groups_of[classes] = tuple(class_group[c] for c in classes)
        argument = argument_of_value.get(op.results[0], NONE) if op.results else NONE
        if op.name == RESULT:
            argument = taken_over.get(results_seen, NONE)
            results_seen += 1
        role, kind = (argument_role[argument], argument_kind[argument]) if argument != NONE else (NO_ROLE, NO_ROLE)
        if number in accumulating:
            role = kind = accumulators
        loop_role = loop_reads if number in seen_in_loops else NO_ROLE
        strands: tuple[Strand | None, ...] = dimensions.strands.get(number, ())
        result_pins = tuple(value_pins.get(v) for v in op.results) if any(v in value_pins for v in op.results) else ()
        operand_pins = _operand_pins(op, number, use_pins)
        form = dimensions.forms[number]
        space = _space(op, form) if workarounds.split_space else None
        closed = _closed_axes(op, mesh, program_pins.manual.get(number), operand_pins + result_pins)
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
        notices=(*program_pins.notices, *unused_pins(program, user_pins)),
        workarounds=workarounds,
        argument_kind=argument_kind,
        accumulations=accumulations,
    )


def _looked_up(op: Op, form: Form) -> frozenset[int]:
    """Factors of a look-up in a table, or of a scatter into one, that are no dimensions of the table."""
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
    pinned = {axis for pin in pins for axes in pin or () for axis in axes or ()}
    return frozenset(mesh.names.index(name) for name in names) | pinned


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
            FactorKind.REDUCTION in form.kinds and len(op.results) == 1 and adds_up(op) and op.results[0] not in pins
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
        groups = tuple(dimensions.class_group[c] for c in dimensions.factor_classes[number])
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
    """The factors of a windowed convolution; None for other ops."""
    if op.name != CONVOLUTION or not op.windows:
        return None
    image, kernel, result = ({s for factors in dims for s in factors} for dims in (*form.operands, form.results[0]))
    windowed = {factor for w in op.windows for factor in form.operands[0][w.operand_dim]}
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


def split_as_read(program: Program, dimensions: Dimensions, free: Sequence[bool]) -> Dimensions:
    """Dimensions in which ops that only enlarge an array (repeat it, or convert it to a wider type) are split as the
    first product that reads it, so that the small array is resharded. free: [values] made from constants alone."""
    forms, factor_classes, strands = list(dimensions.forms), list(dimensions.factor_classes), dict(dimensions.strands)
    for number, op in enumerate(program.ops):
        if not op.kind.view_or_convert or free[op.results[0]] or not _enlarges(program, op):
            continue
        way, product, position = _way_to_product(program, number)
        if product is None:
            continue
        for step, form in _along(way, dimensions.forms, dimensions.forms[product], position):
            forms[step], factor_classes[step] = form, dimensions.factor_classes[product]
            strands.pop(step, None)
            if product in dimensions.strands:
                strands[step] = dimensions.strands[product]
    return replace(dimensions, forms=tuple(forms), factor_classes=tuple(factor_classes), strands=strands)


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
    """(op, its form in the factors of the contraction) for each op of a path; empty where dimensions do not line up."""
    found: list[tuple[int, Form]] = []
    kinds = tuple([FactorKind.SUMMED_LATER if kind is FactorKind.REDUCTION else kind for kind in product.kinds])
    read: Dims = product.operands[position]
    for step in reversed(way):
        form = forms[step]
        factors = _same_factors(form, form.results[0], product, read)
        if factors is None or any(factor not in factors for dim in form.operands[0] for factor in dim):
            return []
        made, read = read, tuple([tuple([factors[factor] for factor in dim]) for dim in form.operands[0]])
        found.append((step, replace(product, kinds=kinds, operands=(read,), results=(made,))))
    return found


def _same_factors(form: Form, dims: Dims, product: Form, read: Dims) -> dict[int, int] | None:
    """Factor of an op's result -> factor of the product that is the same dimension."""
    found: dict[int, int] = {}
    for own, other in zip(dims, read, strict=True):
        if [form.sizes[factor] for factor in own] != [product.sizes[factor] for factor in other]:
            return None
        found.update(zip(own, other, strict=True))
    return found
