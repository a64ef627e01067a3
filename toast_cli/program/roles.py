"""Argument groups: which arguments are weights, which are other state that is carried from step to step, which are
inputs.

Structure decides, names only say what belongs together. An argument is *carried* when a result is an update of it: a
result that aliases it, or one of its type that elementwise ops, loops and branches make from it. Carried arguments on
which some other result depends (the loss, the logits) are weights, and so is what contractions, convolutions and
gathers read as such. Carried arguments on which no other result depends, and those that are overwritten in part (a
cache), are state.

Some arguments tell nothing by themselves (a bias in an inference program). They take the role of the smallest subtree
of paths around them that has one. A subtree whose parts play different roles (a train state with weights and moments)
is taken apart.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence

from toast_cli.program.model import Op, Program
from toast_cli.program.ops import CARRY, DYNAMIC_UPDATE_SLICE, GATHER, JOIN

WEIGHTS, STATE, INPUTS = "weights", "state", "inputs"
ROLES = (WEIGHTS, STATE, INPUTS)

_VIEWS = frozenset(
    [
        "stablehlo.convert",
        "stablehlo.transpose",
        "stablehlo.reshape",
        "stablehlo.copy",
        "stablehlo.optimization_barrier",
        "stablehlo.dynamic_slice",
        "stablehlo.slice",
        "stablehlo.broadcast_in_dim",
    ]
)
# Ops that read weights -> the operands that may be one: the kernel, the table, either side of a product.
_READERS = {
    "stablehlo.dot_general": slice(None),
    "stablehlo.convolution": slice(1, 2),
    "stablehlo.gather": slice(0, 1),
    "chlo.ragged_dot": slice(0, 2),
}
# What an update adds to an array, or scales it by; what an array of the same type passes through on the way to a
# result.
_UPDATES = frozenset(
    [
        "stablehlo.add",
        "stablehlo.subtract",
        "stablehlo.multiply",
        "stablehlo.select",
        "stablehlo.convert",
        "stablehlo.divide",
        "stablehlo.optimization_barrier",
        CARRY,
        JOIN,
    ]
)
# What overwrites a part of an array, such as a cache.
_OVERWRITES = frozenset([DYNAMIC_UPDATE_SLICE])
_KEY = "ui32"  # of random numbers
_UPDATE_STEPS = 8
# A subtree is of one role when all else in it has no more than this share of the bytes.
_IMPURITY = 0.1
_COMPONENT = re.compile(r"[A-Za-z_]\w*|\[(?:'[^']*'|\"[^\"]*\"|[^\]]*)\]")


def argument_roles(program: Program) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """(role names, [arguments] number of each argument's role)."""
    sides = _sides_of_products(program)
    updates = _updates(program, sides)
    carried = _carried(program, sides, updates)
    told = _told(program, sides, carried, updates)
    if carried:
        told = {n: role for n, role in told.items() if not _among_data(program, n, told, carried)}
    otherwise = [STATE if number in carried else INPUTS for number in range(len(program.arguments))]
    roles = _spread(program, told, otherwise)
    return ROLES, tuple(ROLES.index(role) for role in roles)


def carried_results(program: Program) -> tuple[int, ...]:
    """[arguments] number of the result that the next step is given in its place; -1 where there is none.

    It is the result that takes over the argument's buffer, else one that is an update of the argument, of its type, and
    has its name in the user's tree: the end of its path, from behind the parameter's name on. Where nothing is donated
    and names do not tell, results are in the order of the arguments that they replace.
    """
    found = [argument.aliased_result for argument in program.arguments]
    taken = {number for number in found if number >= 0}
    by_place: dict[tuple[str, object], list[int]] = defaultdict(list)
    for n, argument in enumerate(program.arguments):
        by_place["".join(_path(program, n)[1:]), program.values[argument.value]].append(n)
    open_results = (k for k in range(len(program.results)) if k not in taken)
    for k in open_results:
        path, value = _COMPONENT.findall(program.results[k].path), program.results[k].value
        tails = ("".join(path[start:]) for start in range(1, len(path)))
        likely = next((by_place[t, program.values[value]] for t in tails if (t, program.values[value]) in by_place), [])
        if any(found[n] < 0 for n in likely):
            updated = _updated(program, value)
            source = next((n for n in likely if found[n] < 0 and program.arguments[n].value in updated), -1)
            if source >= 0:
                found[source] = k
    for k, n in _undonated(program, found):
        found[n] = k
    return tuple(found)


def undonated(program: Program) -> list[int]:
    """Arguments (by number) that one step hands to the next, and whose memory a result of their type could take; none
    where the program donates anything."""
    if any(argument.donated for argument in program.arguments):
        return []
    return [n for n, k in enumerate(carried_results(program)) if k >= 0]


def _undonated(program: Program, found: list[int]) -> Iterator[tuple[int, int]]:
    """(result, argument) of a step that donates nothing: the first argument of its type that it is an update of and
    that has no result yet. found: [arguments] the results that are known."""
    if any(argument.donated for argument in program.arguments):
        return
    sides = _sides_of_products(program)
    updates = _updates(program, sides)
    handed_on = _carried(program, sides, updates) | _overwritten(program)
    known, replaced = {*found}, {n for n, k in enumerate(found) if k >= 0}
    for k, arguments in updates.items():
        kind = program.values[program.results[k].value]
        for n in sorted((arguments & handed_on) - replaced) if k not in known else ():
            if program.values[program.arguments[n].value] == kind:
                replaced.add(n)
                yield k, n
                break


def views(program: Program, of: Iterable[int] | None = None) -> dict[int, int]:
    """Value -> the argument (by number) that it is a plain view of: converted, transposed, reshaped, sliced. of: values
    of arguments, all of them unless given."""
    wanted = None if of is None else set(of)
    origin = {a.value: n for n, a in enumerate(program.arguments) if wanted is None or a.value in wanted}
    for op in program.ops:
        if op.name in _VIEWS and op.operands and op.operands[0] in origin:
            origin[op.results[0]] = origin[op.operands[0]]
    return origin


# ---------------------------------------------------------------- what is carried


def _updates(program: Program, sides: list[tuple[int, ...]]) -> dict[int, set[int]]:
    """Result (by number) -> the arguments it may be an update of.

    A residual network returns an update of its input: what the first operand of a product is, beside a weight that
    nothing updates, is not believed to be carried. It is where weights of other products are updated (a first layer
    that is written weight times input).
    """
    number = {argument.value: n for n, argument in enumerate(program.arguments)}
    donated = {n for n, argument in enumerate(program.arguments) if argument.donated}
    found: dict[int, set[int]] = {}
    for k, result in enumerate(program.results):
        arguments = {number[v] for v in _updated(program, result.value) if v in number}
        if arguments:
            found[k] = arguments
    updated = set().union(*found.values()) | donated
    data = {pair[0] for pair in sides if len(pair) == 2 and pair[1] not in updated} - donated
    learned = {n for found in sides if len(found) == 1 for n in found} & updated - data - _overwritten(program)
    if learned:
        return found
    return {k: arguments - data for k, arguments in found.items() if arguments - data}


def _carried(program: Program, sides: list[tuple[int, ...]], updates: dict[int, set[int]]) -> set[int]:
    """Arguments (by number) that one step hands to the next: donated, or updated by a result where some weight is.

    A buffer that is given away for scratch (a donated batch) is not carried: it aliases no result, and other arguments
    are updated.
    """
    updated: set[int] = set().union(*updates.values())
    if not updated & {n for found in sides for n in found}:
        updated = set()
    aliased = any(argument.aliased_result >= 0 for argument in program.arguments)
    given = {n for n, a in enumerate(program.arguments) if a.donated and (a.aliased_result >= 0 or not aliased)}
    return given | updated


def _updated(program: Program, result: int) -> set[int]:
    """Arrays of a result's shape that it is an update of, itself not.

    What a loop starts with is updated where each trip updates it: a cache whose rows are picked anew in each trip is
    another array.
    """

    def sources(op: Op) -> Sequence[int]:
        if op.name != CARRY or op.results[0] in _walked(program, op.operands[1], _sources):
            return _sources(op)
        return op.operands[1:]

    return _walked(program, result, sources) - {result}


def _walked(program: Program, value: int, sources: Callable[[Op], Sequence[int]]) -> set[int]:
    """A value, and those of its shape from which some steps lead to it."""
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
    return op.operands[:1] if op.name in _OVERWRITES else ()


# ---------------------------------------------------------------- what an argument tells by itself


def _told(
    program: Program, sides: list[tuple[int, ...]], carried: set[int], updates: dict[int, set[int]]
) -> dict[int, str]:
    """Argument (by number) -> its role, for those that tell one."""
    read = {n for found in sides for n in found}
    updated: set[int] = set().union(*updates.values())
    needed = _needed_elsewhere(program, carried, updates)
    whole_numbers = {n for n, a in enumerate(program.arguments) if _counts(program.values[a.value].dtype)}
    # What is handed on without being an update, and multiplied with a weight that is one, is a recurrence's hidden
    # state.
    hidden = {n for found in sides if updated.intersection(found) for n in found if n in carried} - updated
    other_state = carried & (whole_numbers | _overwritten(program) | hidden)
    replacement = carried_results(program)
    told: dict[int, str] = {}
    for n in carried:
        value = program.values[program.arguments[n].value]
        if n in other_state:
            told[n] = STATE
        elif needed is not None and n not in needed:
            # What is updated with the help of nothing but what no result depends on is a weight that nothing reads.
            others = updates.get(replacement[n], set()) - {n}
            if not others or others & needed:
                told[n] = STATE
        elif n in read or (needed is not None and n in updated and value.shape):
            told[n] = WEIGHTS
        elif value.shape:
            told[n] = STATE
    trained = {n for n, role in told.items() if role == WEIGHTS}
    weights, data = _weights_and_data(program, trained, whole_numbers - carried | other_state)
    told.update((n, INPUTS) for n in data - carried)
    told.update((n, WEIGHTS) for n in weights - carried)
    return told


def _counts(dtype: str) -> bool:
    """Whether arrays of a type hold whole numbers that are no quantised weights."""
    return dtype.startswith(("i", "ui")) and dtype not in ("i8", "i4", "i2", "ui8", "ui4", "ui2")


def _among_data(program: Program, number: int, told: dict[int, str], carried: set[int]) -> bool:
    """Whether an argument that products read, as if it was a weight, is one of a batch's arrays: a mask, coordinates.

    It is not carried where others are, and beside it in the user's tree is an input of as many elements.
    """
    around = _path(program, number)[:-1]
    if number in carried or told[number] != WEIGHTS or not around:
        return False

    def elements(n: int) -> tuple[int, ...]:
        return program.values[program.arguments[n].value].shape[:1]

    return any(
        role == INPUTS and _path(program, n)[:-1] == around and elements(n) == elements(number)
        for n, role in told.items()
    )


def _needed_elsewhere(program: Program, carried: set[int], updates: dict[int, set[int]]) -> set[int] | None:
    """Arguments on which a result depends that hands none of them on (the loss); None where no such result depends on
    what is carried."""
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
    """What is made to take an argument's place: results, or what loops and branches yield for them. Metrics that are
    worked out from these (the norm of the new weights) need all that the update needs, moments too."""
    stack, seen, found = list(results), set[int](), set[int]()
    while stack:
        value = stack.pop()
        op = program.ops[program.producer[value]]
        if op.name in (CARRY, JOIN):
            stack += [v for v in op.operands if v not in seen]
            seen.update(op.operands)
        else:
            found.add(value)
    return found


def _overwritten(program: Program) -> set[int]:
    """Arguments (by number) of which one step overwrites a part."""
    number = {argument.value: n for n, argument in enumerate(program.arguments)}
    for op in program.ops:  # a loop's own value stands for what it starts with
        if op.name == CARRY and op.operands[0] in number:
            number[op.results[0]] = number[op.operands[0]]
    return {number[op.operands[0]] for op in program.ops if op.name in _OVERWRITES and op.operands[0] in number}


def _sides_of_products(program: Program) -> list[tuple[int, ...]]:
    """Per contraction, convolution (its kernel) or gather (its table): the arguments it reads, directly or through a
    plain view. The product of an argument with itself (pairs of a mask) says nothing."""
    origin = views(program)
    read = [
        [origin[v] for v in op.operands[_READERS[op.name]] if v in origin] for op in program.ops if op.name in _READERS
    ]
    return [tuple(numbers) if len(set(numbers)) == len(numbers) else () for numbers in read]


def _weights_and_data(program: Program, trained: set[int], data: set[int]) -> tuple[set[int], set[int]]:
    """(weights, data): what arguments are by what they meet in products and look-ups, those given included.

    What data is multiplied with is a weight (a frozen one, where others are trained). What only weights are multiplied
    with is data, and so is what random numbers pick rows of. Of two arguments that meet and nothing else is known of,
    the right one is the weight, unless the left one belongs to other weights.

    Args:
        trained, data: arguments that are known to be weights, and to be data (tokens, caches).
    """
    activation, noise = (1 << len(program.arguments) + k for k in range(2))
    is_weight, is_data = _bits(trained), _bits(data) | activation
    made_of = [0] * len(program.values)  # [values] a bit for each argument that they are made of, or the two above
    for n, argument in enumerate(program.arguments):
        made_of[argument.value] = noise if program.values[argument.value].dtype == _KEY else 1 << n
    pairs: list[tuple[int, int]] = []
    for op in program.ops:
        sides = [made_of[v] for v in op.operands]
        made = 0
        for bits in sides:
            made |= bits
        if op.name in _READERS:
            picked_at_random = op.name == GATHER and sides[1] == noise
            for mine, other in ((0, 1), (1, 0)) * 2:
                unknown = sides[mine] & ~(is_weight | is_data | noise)
                if sides[0] == sides[1]:
                    continue
                of_weights, of_data = sides[other] & is_weight, sides[other] & is_data
                only_weights = of_weights and not sides[other] & ~(is_weight | noise)
                if sides[mine] & is_data:
                    continue
                if picked_at_random or only_weights or (of_weights and not of_data and not sides[mine] & is_weight):
                    is_data |= unknown if unknown.bit_count() == 1 else 0
                elif of_data or not sides[other] & ~noise:
                    is_weight |= unknown
            unknowns = [0 if bits & is_data else bits & ~(is_weight | noise) for bits in sides[:2]]
            if sides[0] != sides[1] and all(bits.bit_count() == 1 for bits in unknowns):
                pairs.append((unknowns[0], unknowns[1]))
            if op.name != GATHER and not all(bits & is_weight and not bits & ~(is_weight | noise) for bits in sides):
                made = activation
        for value in op.results:
            made_of[value] |= made
    everything = activation - 1
    weights, found = _numbers(is_weight & everything), _numbers(is_data & everything)
    roots = {_path(program, n)[0] for n in weights}
    for one, other in pairs:
        left, right = (_numbers(bits) - weights - found for bits in (one, other))
        swapped = any(_path(program, n)[0] in roots for n in left) and not any(
            _path(program, n)[0] in roots for n in right
        )
        found |= right if swapped else left
        weights |= left if swapped else right
    return weights, found - weights


def _bits(numbers: Iterable[int]) -> int:
    return sum(1 << n for n in numbers)


def _numbers(bits: int) -> set[int]:
    return {n for n in range(bits.bit_length()) if bits >> n & 1}


# ---------------------------------------------------------------- what belongs together


def _spread(program: Program, told: dict[int, str], otherwise: list[str]) -> list[str]:
    """[arguments] role: what its subtree of paths is; `otherwise` where nothing around an argument tells."""
    roles = list(otherwise)
    paths = [_path(program, n) for n in range(len(program.arguments))]
    sizes = [max(1, program.values[argument.value].bytes) for argument in program.arguments]

    def judge(numbers: Iterable[int]) -> tuple[str, float]:
        """The role of most bytes, and the share of the others."""
        votes: dict[str, int] = defaultdict(int)
        for n in numbers:
            if n in told:
                votes[told[n]] += sizes[n]
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


def _path(program: Program, number: int) -> list[str]:
    """The components of an argument's path; one that nothing else has where there is none."""
    return _COMPONENT.findall(program.arguments[number].path) or [f"#{number}"]
