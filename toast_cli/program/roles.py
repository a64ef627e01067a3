"""Argument groups: tells weights, other state carried from step to step, and inputs apart.

Roles follow from structure; names only say which arguments belong together. An argument is *carried* if a result is an
update of it: one that aliases it, or one of its type that elementwise ops, loops and branches compute from it. Carried
arguments on which some other result depends (the loss, the logits) are weights, and so are arguments that
contractions, convolutions and gathers read as weights. Carried arguments on which no other result depends, and those
that are overwritten in part (a cache), are state.

Some arguments have no evidence of their own (a bias in an inference program). They take the role of the smallest
subtree of paths around them that has one. A subtree with several roles (a train state with weights and moments) is
divided.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from toast_cli.program.model import Op, Program, once
from toast_cli.program.ops import (
    ADD,
    BARRIER,
    BROADCAST_IN_DIM,
    CARRY,
    CONVERT,
    CONVOLUTION,
    DIVIDE,
    DOT_GENERAL,
    DYNAMIC_SLICE,
    DYNAMIC_UPDATE_SLICE,
    GATHER,
    JOIN,
    MULTIPLY,
    RAGGED_DOT,
    RESHAPE,
    SELECT,
    SLICE,
    SUBTRACT,
    TRANSPOSE,
)

WEIGHTS, STATE, INPUTS = "weights", "state", "inputs"
ROLES = (WEIGHTS, STATE, INPUTS)

_VIEWS = frozenset({CONVERT, TRANSPOSE, RESHAPE, BARRIER, DYNAMIC_SLICE, SLICE, BROADCAST_IN_DIM})
# Ops by which an update is computed from an array of the same shape.
_UPDATES = frozenset({ADD, SUBTRACT, MULTIPLY, SELECT, CONVERT, DIVIDE, BARRIER, CARRY, JOIN})
_UPDATE_STEPS = 8
# A subtree has one role if all other roles in it have at most this fraction of the bytes.
_IMPURITY = 0.1


@once
def argument_roles(program: Program) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """(role names, [arguments] number of each argument's role)."""
    sides = _sides_of_products(program)
    updates = _updates(program, sides)
    carried = _carried(program, sides, updates)
    evidence = _own_evidence(program, sides, carried, updates)
    if carried:
        evidence = {n: role for n, role in evidence.items() if not _among_data(program, n, evidence, carried)}
    otherwise = [STATE if number in carried else INPUTS for number in range(len(program.arguments))]
    roles = _spread(program, evidence, otherwise)
    return ROLES, tuple(ROLES.index(role) for role in roles)


def carried_results(program: Program) -> tuple[int, ...]:
    """[arguments] number of the result that replaces the argument in the next step; -1 for none.

    It is the result that reuses the argument's buffer, else an update of the argument with its type and its path in the
    user's tree, without the parameter's name. If no result is known to reuse a buffer and names do not match, results
    are in the order of the arguments that they replace.
    """
    replaced_by = [argument.aliased_result for argument in program.arguments]
    aliased = {number for number in replaced_by if number >= 0}
    by_place: dict[tuple[str, object], list[int]] = defaultdict(list)
    for n, argument in enumerate(program.arguments):
        by_place["".join(argument_path(program, n)[1:]), program.values[argument.value]].append(n)
    open_results = (k for k in range(len(program.results)) if k not in aliased)
    for k in open_results:
        path, value = COMPONENT.findall(program.results[k].path), program.results[k].value
        tails = ("".join(path[start:]) for start in range(1, len(path)))
        likely = next((by_place[t, program.values[value]] for t in tails if (t, program.values[value]) in by_place), [])
        if any(replaced_by[n] < 0 for n in likely):
            updated = _updated(program, value)
            source = next((n for n in likely if replaced_by[n] < 0 and program.arguments[n].value in updated), -1)
            if source >= 0:
                replaced_by[source] = k
    for k, n in _in_order(program, replaced_by):
        replaced_by[n] = k
    return tuple(replaced_by)


def with_donated_buffers(program: Program) -> Program:
    """The program with the result that reuses each donated argument's buffer, where only the donation is written
    (`jax.buffer_donor`, as JAX writes it where results have no sharding yet) and the result is an update of it."""
    if not any(argument.donated and argument.aliased_result < 0 for argument in program.arguments):
        return program
    pairs = zip(program.arguments, carried_results(program), strict=True)
    return replace(program, arguments=tuple(replace(a, aliased_result=k) if a.donated else a for a, k in pairs))


def optimizer_state(program: Program) -> list[int]:
    """Arguments (by number) that a training step keeps for its next update of the weights only: moments, master
    copies."""
    names, roles = argument_roles(program)
    replaced, cached = carried_results(program), _overwritten(program)
    if not any(names[role] == WEIGHTS and replaced[n] >= 0 for n, role in enumerate(roles)):
        return []

    def is_state(n: int) -> bool:
        value = program.values[program.arguments[n].value]
        return names[roles[n]] == STATE and replaced[n] >= 0 and not _counts(value.dtype) and n not in cached

    return [n for n in range(len(roles)) if is_state(n)]


def undonated(program: Program) -> list[int]:
    """Arguments (by number) that are carried to the next step but not donated; empty if the program donates
    anything."""
    if any(argument.donated for argument in program.arguments):
        return []
    return [n for n, k in enumerate(carried_results(program)) if k >= 0]


def _in_order(program: Program, replaced_by: list[int]) -> Iterator[tuple[int, int]]:
    """(result, argument) pairs of a step that does not say which results reuse buffers: the first unmatched argument of
    its type that the result updates, a donated one if any is. replaced_by: [arguments] the results that are known."""
    donated = {n for n, argument in enumerate(program.arguments) if argument.donated}
    if donated and all(replaced_by[n] >= 0 for n in donated):
        return
    sides = _sides_of_products(program)
    updates = _updates(program, sides)
    handed_on = _carried(program, sides, updates) | _overwritten(program)
    matched, replaced = {*replaced_by}, {n for n, k in enumerate(replaced_by) if k >= 0}
    for k, arguments in updates.items():
        kind = program.values[program.results[k].value]
        for n in sorted((arguments & (donated or handed_on)) - replaced) if k not in matched else ():
            if program.values[program.arguments[n].value] == kind:
                replaced.add(n)
                yield k, n
                break


def views(program: Program, of: Iterable[int] | None = None, *, trained: bool = False) -> dict[int, int]:
    """Value -> number of the argument that it is a plain view of: converted, transposed, reshaped, sliced. of: values
    of the arguments to consider, all by default. trained: an argument that a loop updates, step after step of training,
    is also what the loop carries for it."""
    wanted = None if of is None else set(of)
    origin = {a.value: n for n, a in enumerate(program.arguments) if wanted is None or a.value in wanted}
    replaced = carried_results(program) if trained else ()
    for op in program.ops:
        n = origin.get(op.operands[0], -1) if op.operands else -1
        if n < 0:
            continue
        if trained and op.name == CARRY:  # of all of the argument, if a result replaces it
            shapes = [program.values[value].shape for value in (op.operands[0], program.arguments[n].value)]
            is_view = replaced[n] >= 0 and shapes[0] == shapes[1]
        else:
            is_view = op.name in _VIEWS
        if is_view:
            origin[op.results[0]] = n
    return origin


# ---------------------------------------------------------------- carried arguments


def _updates(program: Program, sides: list[tuple[int, ...]]) -> dict[int, set[int]]:
    """Result (by number) -> the arguments it may be an update of.

    A residual network returns an update of its input, so the first operand of a product with a weight that nothing
    updates does not count as carried, unless weights of other products are updated (a first layer written as weight
    times input).
    """
    number = {argument.value: n for n, argument in enumerate(program.arguments)}
    donated = {n for n, argument in enumerate(program.arguments) if argument.donated}
    updates: dict[int, set[int]] = {}
    for k, result in enumerate(program.results):
        arguments = {number[v] for v in _updated(program, result.value) if v in number}
        if arguments:
            updates[k] = arguments
    updated = set().union(*updates.values()) | donated
    data = {side[0] for side in sides if len(side) == 2 and side[1] not in updated} - donated
    learned = {n for side in sides if len(side) == 1 for n in side} & updated - data - _overwritten(program)
    if learned:
        return updates
    return {k: arguments - data for k, arguments in updates.items() if arguments - data}


def _carried(program: Program, sides: list[tuple[int, ...]], updates: dict[int, set[int]]) -> set[int]:
    """Arguments (by number) that one step hands to the next: donated, or updated by a result, if some weight is.

    A buffer donated as scratch (a donated batch) is not carried: it aliases no result, while other arguments do.
    """
    updated: set[int] = set().union(*updates.values())
    if not updated & {n for side in sides for n in side}:
        updated = set()
    aliased = any(argument.aliased_result >= 0 for argument in program.arguments)
    donated = {n for n, a in enumerate(program.arguments) if a.donated and (a.aliased_result >= 0 or not aliased)}
    return donated | updated


def _updated(program: Program, result: int) -> set[int]:
    """Arrays of a result's shape that it is an update of, without itself.

    A loop's initial value is updated if each trip updates the carry: a cache whose rows each trip gathers anew is
    another array.
    """

    def sources(op: Op) -> Sequence[int]:
        if op.name != CARRY or op.results[0] in _walked(program, op.operands[1], _sources):
            return _sources(op)
        return op.operands[1:]

    return _walked(program, result, sources) - {result}


def _walked(program: Program, value: int, sources: Callable[[Op], Sequence[int]]) -> set[int]:
    """A value, and the values of its shape that it is computed from within some steps."""
    wanted = program.values[value].shape
    frontier, seen = {value}, {value}
    for _ in range(_UPDATE_STEPS):
        makers = (program.ops[program.producer[v]] for v in frontier)
        frontier = {v for op in makers for v in sources(op) if program.values[v].shape == wanted} - seen
        if not frontier:
            break
        seen |= frontier
    return seen


def _sources(op: Op) -> Sequence[int]:
    if op.name in _UPDATES:
        return op.operands
    return op.operands[:1] if op.name == DYNAMIC_UPDATE_SLICE else ()


# ---------------------------------------------------------------- evidence of single arguments


def _own_evidence(
    program: Program, sides: list[tuple[int, ...]], carried: set[int], updates: dict[int, set[int]]
) -> dict[int, str]:
    """Argument number -> role, for arguments with evidence of their own."""
    read = {n for side in sides for n in side}
    updated: set[int] = set().union(*updates.values())
    needed = _needed_elsewhere(program, carried, updates)
    whole_numbers = {n for n, a in enumerate(program.arguments) if _counts(program.values[a.value].dtype)}
    # A carried argument that is no update itself, and is multiplied with an updated weight, is a recurrence's hidden
    # state.
    hidden = {n for side in sides if updated.intersection(side) for n in side if n in carried} - updated
    other_state = carried & (whole_numbers | _overwritten(program) | hidden)
    replacement = carried_results(program)
    evidence: dict[int, str] = {}
    for n in carried:
        value = program.values[program.arguments[n].value]
        if n in other_state:
            evidence[n] = STATE
        elif needed is not None and n not in needed:
            # An argument whose update only uses arguments that no result depends on is a weight that nothing reads.
            others = updates.get(replacement[n], set()) - {n}
            if not others or others & needed:
                evidence[n] = STATE
        elif n in read or (needed is not None and n in updated and value.shape):
            evidence[n] = WEIGHTS
        elif value.shape:
            evidence[n] = STATE
    trained = {n for n, role in evidence.items() if role == WEIGHTS} if needed is not None else carried - other_state
    weights, data = weights_and_data(program, trained, whole_numbers - carried | other_state)
    evidence.update((n, INPUTS) for n in data - carried)
    evidence.update((n, WEIGHTS) for n in weights - carried)
    return evidence


def _counts(dtype: str) -> bool:
    """Whether a type is an integer type other than those of quantised weights."""
    return dtype.startswith(("i", "ui")) and dtype not in ("i8", "i4", "i2", "ui8", "ui4", "ui2")


def _among_data(program: Program, number: int, evidence: dict[int, str], carried: set[int]) -> bool:
    """Whether an argument that products read like a weight is in fact an array of the batch: a mask, coordinates.

    It is not carried while others are, and an input in the same subtree has the same leading dimension.
    """
    around = argument_path(program, number)[:-1]
    if number in carried or evidence[number] != WEIGHTS or not around:
        return False

    def elements(n: int) -> tuple[int, ...]:
        return program.values[program.arguments[n].value].shape[:1]

    return any(
        role == INPUTS and argument_path(program, n)[:-1] == around and elements(n) == elements(number)
        for n, role in evidence.items()
    )


def _needed_elsewhere(program: Program, carried: set[int], updates: dict[int, set[int]]) -> set[int] | None:
    """Arguments on which some result other than the updates depends (the loss); None if no such result depends on
    carried ones."""
    aliases = {argument.aliased_result for argument in program.arguments}
    kept = {k for k, arguments in updates.items() if arguments & carried} | aliases - {-1}
    new = _new_values(program, [program.results[k].value for k in kept])
    wanted = {result.value for k, result in enumerate(program.results) if k not in kept}
    stack = list(wanted)
    while stack:
        value = stack.pop()
        fresh = set(program.ops[program.producer[value]].operands) - wanted if value not in new else set()
        wanted |= fresh
        stack += fresh
    needed = {n for n, argument in enumerate(program.arguments) if argument.value in wanted}
    return needed if needed & carried else None


def _new_values(program: Program, results: Iterable[int]) -> set[int]:
    """New values of arguments: results, or the yields of loops and branches for them. Metrics computed from these (the
    norm of the new weights) depend on all that the update depends on, including moments."""
    stack, seen, values = list(results), set[int](), set[int]()
    while stack:
        value = stack.pop()
        op = program.ops[program.producer[value]]
        if op.name in (CARRY, JOIN):
            stack += [v for v in op.operands if v not in seen]
            seen.update(op.operands)
        else:
            values.add(value)
    return values


def _overwritten(program: Program) -> set[int]:
    """Arguments (by number) of which one step overwrites a part."""
    number = {argument.value: n for n, argument in enumerate(program.arguments)}
    for op in program.ops:  # a carry stands for its initial value
        if op.name == CARRY and op.operands[0] in number:
            number[op.results[0]] = number[op.operands[0]]
    updates = [op for op in program.ops if op.name == DYNAMIC_UPDATE_SLICE]
    return {number[op.operands[0]] for op in updates if op.operands[0] in number}


def _sides_of_products(program: Program) -> list[tuple[int, ...]]:
    """Per contraction, convolution (its kernel) or gather (its table): the arguments it reads, directly or through a
    plain view. The product of an argument with itself (pairs of a mask) is no evidence."""
    origin = views(program)
    read = [
        [origin[v] for v in op.operands[READERS[op.name]] if v in origin] for op in program.ops if op.name in READERS
    ]
    return [tuple(numbers) if len(set(numbers)) == len(numbers) else () for numbers in read]


# ---------------------------------------------------------------- roles of subtrees


def _spread(program: Program, evidence: dict[int, str], otherwise: list[str]) -> list[str]:
    """[arguments] role of its subtree of paths; `otherwise` if the subtree has no evidence."""
    roles = list(otherwise)
    paths = [argument_path(program, n) for n in range(len(program.arguments))]
    sizes = [max(1, program.values[argument.value].bytes) for argument in program.arguments]

    def judge(numbers: Iterable[int]) -> tuple[str, float]:
        """(role of most bytes, fraction of the other roles)."""
        votes: dict[str, int] = defaultdict(int)
        for n in numbers:
            if n in evidence:
                votes[evidence[n]] += sizes[n]
        if not votes:
            return "", 0.0
        most = max(ROLES, key=lambda role: votes[role])
        return most, 1.0 - votes[most] / sum(votes.values())

    def assign(numbers: list[int], depth: int, around: str) -> None:
        most, impurity = judge(numbers)
        children: dict[str, list[int]] = defaultdict(list)
        for n in numbers:
            children[paths[n][depth] if depth < len(paths[n]) else f"#{n}"].append(n)
        single = len(numbers) == 1
        mixed = not single and (
            impurity > _IMPURITY or any(judge(child)[0] not in ("", most) for child in children.values())
        )
        if mixed:
            for child in children.values():
                assign(child, depth + 1, most)
        elif most or around:
            for n in numbers:
                roles[n] = most or around

    roots: dict[str, list[int]] = defaultdict(list)
    for n, path in enumerate(paths):
        roots[path[0]].append(n)
    for numbers in roots.values():
        assign(numbers, 1, "")
    return roles


# ---------------------------------------------------------------- weights and data by the products that read them
# Tells weights from data by the products and look-ups that read them.

# Ops that read weights -> the operands that may be one: the kernel, the table, either side of a product.
READERS = {
    DOT_GENERAL: slice(None),
    CONVOLUTION: slice(1, 2),
    GATHER: slice(0, 1),
    RAGGED_DOT: slice(0, 2),
}
_KEY = "ui32"  # of random numbers
COMPONENT = re.compile(r"[A-Za-z_]\w*|\[(?:'[^']*'|\"[^\"]*\"|[^\]]*)\]")


def weights_and_data(program: Program, trained: set[int], data: set[int]) -> tuple[set[int], set[int]]:
    """(weights, data): arguments classified by the products and look-ups that read them, including the given ones.

    A factor of data is a weight (a frozen one, if others are trained). A factor of weights only is data, and so is an
    array whose rows random numbers pick. A factor of random numbers is a weight. A look-up by indices that the table
    itself determines (nearest neighbours) says nothing, nor does a product with constants (a Fourier or Legendre
    transform), nor, in a program that trains, a look-up by constants. Of two otherwise unknown factors, the right one
    is the weight, unless the left one is in a subtree of other weights.

    Args:
        trained, data: arguments that are known to be weights, and to be data (tokens, caches).
    """
    carried: dict[int, int] = {}
    for _ in range(2):  # the second time with what loops make of their carries
        weights, inputs, pairs, carried = _swept(program, trained, data, carried)
        if not carried:
            break
    roots = {argument_path(program, n)[0] for n in weights}
    for pair in pairs:
        left, right = (_numbers(bits) - weights - inputs for bits in pair)
        swapped = any(argument_path(program, n)[0] in roots for n in left) and not any(
            argument_path(program, n)[0] in roots for n in right
        )
        inputs |= right if swapped else left
        weights |= left if swapped else right
    return weights, inputs - weights


def _swept(
    program: Program, trained: set[int], data: set[int], carried: dict[int, int]
) -> tuple[set[int], set[int], list[tuple[int, int]], dict[int, int]]:
    """One pass over the program: weights, data, pairs of otherwise unknown factors (bit sets), and what each carry's
    next value is made of (a bit set). carried: the last, from the pass before, for carries that begin with constants
    (what a scan stacks, sums).

    Bit n of a set stands for argument n. Given `x @ w` and `h @ v` with h made of x and w, data of x tells that w is a
    weight; the product is an activation, which is data, so that v is a weight, too.
    """
    activation, noise = (1 << len(program.arguments) + k for k in range(2))
    known_weights = is_weight = _bits(trained)
    is_data = _bits(data) | activation
    made_of = [0] * len(program.values)  # [values] bit set of the arguments each depends on, or of the two above
    for n, argument in enumerate(program.arguments):
        made_of[argument.value] = noise if program.values[argument.value].dtype == _KEY else 1 << n
    determined_by = list(made_of)  # [values] bit set of the arguments, also those behind products
    pairs: list[tuple[int, int]] = []
    paired = 0  # bit set of all arguments in `pairs`
    for op in program.ops:
        sides = [made_of[v] for v in op.operands]
        sources = carried[op.results[0]] if op.name == CARRY and op.results[0] in carried and not sides[0] else 0
        determined = 0
        for bits, value in zip(sides, op.operands, strict=True):
            sources |= bits
            determined |= determined_by[value]
        if op.name in READERS and not (op.name == GATHER and determined_by[op.operands[1]] & sides[0]):
            picked_at_random = op.name == GATHER and sides[1] == noise
            for side, other in ((0, 1), (1, 0)) * 2:
                unknown = sides[side] & ~(is_weight | is_data | noise)
                if sides[0] == sides[1]:
                    continue
                of_weights, of_data = sides[other] & is_weight, sides[other] & is_data
                only_weights = of_weights and not sides[other] & ~(is_weight | noise)
                if sides[side] & is_data:
                    continue
                if picked_at_random or only_weights or (of_weights and not of_data and not sides[side] & is_weight):
                    is_single = unknown.bit_count() == 1 or sides[other] & known_weights
                    is_data |= unknown if is_single else 0
                elif of_data or sides[other] == noise or (op.name == GATHER and not known_weights and not sides[other]):
                    is_weight |= unknown & ~paired  # a gradient is a product with data, too
            unknowns = [0 if bits & is_data else bits & ~(is_weight | noise) for bits in sides[:2]]
            if sides[0] != sides[1] and all(bits.bit_count() == 1 for bits in unknowns):
                pairs.append((unknowns[0], unknowns[1]))
                paired |= unknowns[0] | unknowns[1]
            if op.name != GATHER and not all(bits & is_weight and not bits & ~(is_weight | noise) for bits in sides):
                sources = activation
        for value in op.results:
            made_of[value] |= sources
            determined_by[value] |= determined
    everything = activation - 1
    carried = {op.results[0]: made_of[op.operands[1]] for op in program.ops if op.name == CARRY}
    return _numbers(is_weight & everything), _numbers(is_data & everything), pairs, carried


def _bits(numbers: Iterable[int]) -> int:
    return sum(1 << n for n in numbers)


def _numbers(bits: int) -> set[int]:
    return {n for n in range(bits.bit_length()) if bits >> n & 1}


def argument_path(program: Program, number: int) -> list[str]:
    """The components of an argument's path; a unique one if it has no path."""
    return COMPONENT.findall(program.arguments[number].path) or [f"#{number}"]
