"""Conflicts: values (and ops) that have one group twice, grouped by the choices of side that resolve them together;
and the groups themselves, classes that are decided together.

Attention scores `[batch, heads, seq, seq]` cannot give both sequence dimensions the same axis. Every occurrence of a
group in such a value is a *strand end*; ops carry strands from value to value, so that choosing one side for one value
chooses it for the whole *component*. An op that would tie a strand to its own other side (a symmetric matrix plus its
transpose) is left untied, the lightest ops first, and gets a reshard. Equal components form one *resolution group*.
Light ops between the ops of a component, such as the sums of a softmax, belong to it although they have the group
once, so that a decision that exempts a conflict exempts all of it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass

from toast_cli.dimensions.classes import Classes
from toast_cli.dimensions.model import FactorKind, Resolution, Strand
from toast_cli.program.model import Program
from toast_cli.program.ops import ARGUMENT, CARRY, RESULT
from toast_cli.program.values import DisjointSets

_MOST_NEAR = 8  # most components that a light op can belong to; with more it belongs to none

# One occurrence of a group: (value number, or -1 - op number for an op of its own; place in the value, or factor of the
# op). Places count by dimension, since not every op has factors for all dimensions of a value.
End = tuple[int, int]
PLACES_PER_DIMENSION = 64


@dataclass(frozen=True)
class Conflicts:
    resolutions: tuple[Resolution, ...]
    strands: dict[int, tuple[Strand | None, ...]]  # op -> per factor
    values: int
    components: int


def find_conflicts(program: Program, classes: Classes, class_group: list[int]) -> Conflicts:
    ops = _crowded_ops(classes, class_group)
    if not ops:
        return Conflicts((), {}, 0, 0)
    ends, factor_ends = _ends(program, classes, class_group, ops)
    find = _tie(program, ops, ends, factor_ends)
    components = _components(ends, find)
    return _resolve(program, classes, class_group, factor_ends, find, components)


def _crowded_ops(classes: Classes, class_group: list[int]) -> dict[int, list[int]]:
    """Op number -> factors whose group occurs in two or more of its factors."""
    crowded: dict[tuple[int, ...], list[int]] = {}
    crowded_ops: dict[int, list[int]] = {}
    for number, factors in enumerate(classes.factor_classes):
        twice = crowded.get(factors)
        if twice is None:
            groups = [class_group[c] for c in factors]
            twice = crowded[factors] = (
                [k for k, g in enumerate(groups) if groups.count(g) > 1] if len(groups) > 1 else []
            )
        if twice:
            crowded_ops[number] = twice
    return crowded_ops


def _ends(
    program: Program, classes: Classes, class_group: list[int], ops: dict[int, list[int]]
) -> tuple[dict[int, dict[int, list[End]]], dict[tuple[int, int], list[End]]]:
    """Strand ends per conflicting value and group, and the ends that each crowded factor of each op touches."""
    ends: dict[int, dict[int, list[End]]] = {}
    factor_ends: dict[tuple[int, int], list[End]] = defaultdict(list)
    for number, crowded in ops.items():
        op, form, factor_class = program.ops[number], classes.forms[number], classes.factor_classes[number]
        for value, dims in zip(op.operands + op.results, form.operands + form.results, strict=True):
            by_group: dict[int, list[tuple[int, int]]] = defaultdict(
                list
            )  # group -> place and factor of each occurrence
            for dim, factors in enumerate(dims):
                for k, factor in enumerate(factors):
                    if factor in crowded:
                        by_group[class_group[factor_class[factor]]].append((PLACES_PER_DIMENSION * dim + k, factor))
            for group, occurrences in by_group.items():
                if len(occurrences) > 1:
                    ends.setdefault(value, {}).setdefault(group, [(value, place) for place, _ in occurrences])
                    for place, factor in occurrences:
                        factor_ends[number, factor].append((value, place))
        own: dict[int, list[End]] = defaultdict(list)
        for factor in crowded:
            if not factor_ends[number, factor]:  # no value has this conflict: the op has a choice of its own
                own[class_group[factor_class[factor]]].append((-1 - number, factor))
        for group, places_of_op in own.items():
            for end in places_of_op:
                factor_ends[number, end[1]].append(end)
            ends.setdefault(-1 - number, {})[group] = places_of_op
    return ends, factor_ends


class _Strands:
    """Sets of strand ends that are tied together. values: representative of a set -> values that have an end in it."""

    def __init__(self) -> None:
        self._sets: DisjointSets[End] = DisjointSets()
        self.values: dict[End, set[int]] = {}

    def __call__(self, end: End) -> End:
        root = self._sets.find(end)
        if root not in self.values:
            self.values[root] = {root[0]}
        return root

    def compatible(self, a: End, b: End) -> bool:
        """Whether tying both would not tie two ends of one value."""
        a, b = self(a), self(b)
        if a == b:
            return True
        small, large = sorted((self.values[a], self.values[b]), key=len)
        return small.isdisjoint(large)

    def union(self, a: End, b: End) -> None:
        a, b = self(a), self(b)
        if a == b:
            return
        if len(self.values[a]) < len(self.values[b]):
            a, b = b, a
        self._sets.union(a, b)
        self.values[a] |= self.values.pop(b)


def _tie(
    program: Program,
    ops: dict[int, list[int]],
    ends: dict[int, dict[int, list[End]]],
    factor_ends: dict[tuple[int, int], list[End]],
) -> _Strands:
    """Ties donated arguments to the results that reuse their buffers, then the ends that each op links, heaviest ops
    first; an op that would tie two sides of a component is left untied.
    """
    find = _Strands()
    for by_group in ends.values():
        for group_ends in by_group.values():
            for end in group_ends:
                find(end)
    for argument in program.arguments:
        if 0 <= argument.aliased_result < len(program.results):
            taken_over = ends.get(program.results[argument.aliased_result].value, {})
            for group, group_ends in ends.get(argument.value, {}).items():
                for a, b in zip(group_ends, taken_over.get(group, ()), strict=False):
                    if a[1] == b[1] and find.compatible(a, b):
                        find.union(a, b)

    def weight(number: int) -> float:
        op = program.ops[number]
        return max(program.values[v].bytes for v in op.operands + op.results) * op.trips

    for number in sorted(ops, key=lambda n: (-weight(n), n)):
        ties = [(factor_ends[number, s][0], end) for s in ops[number] for end in factor_ends[number, s][1:]]
        if all(find.compatible(a, b) for a, b in ties):
            for a, b in ties:
                if find.compatible(a, b):
                    find.union(a, b)
    return find


def _components(ends: dict[int, dict[int, list[End]]], find: _Strands) -> dict[End, tuple[End, int]]:
    """Strand root -> (component root, side within the component). Sides are numbered in order of first appearance."""
    components: DisjointSets[End] = DisjointSets()
    for by_group in ends.values():
        for group_ends in by_group.values():
            roots = [find(end) for end in group_ends]
            for other in roots[1:]:
                components.union(*sorted((components.find(roots[0]), components.find(other))))
    sides: dict[End, tuple[End, int]] = {}
    counts: dict[End, int] = defaultdict(int)
    for by_group in ends.values():
        for group_ends in by_group.values():
            for end in group_ends:
                root = find(end)
                if root not in sides:
                    component = components.find(root)
                    sides[root] = (component, counts[component])
                    counts[component] += 1
    return sides


def _resolve(
    program: Program,
    classes: Classes,
    class_group: list[int],
    factor_ends: dict[tuple[int, int], list[End]],
    find: _Strands,
    sides: dict[End, tuple[End, int]],
) -> Conflicts:
    """Groups equal components into resolution groups, and assigns every crowded factor its strand."""
    side_count: dict[End, int] = defaultdict(int)
    for component, _ in sides.values():
        side_count[component] += 1
    looks: dict[End, set[object]] = defaultdict(set)
    touched: dict[End, set[int]] = defaultdict(set)
    group_of: dict[End, int] = {}
    order: list[End] = []
    placed: list[tuple[int, int, End, int]] = []  # op, factor, component, side
    for (number, factor), ends in sorted(factor_ends.items()):
        op, factor_class = program.ops[number], classes.factor_classes[number]
        component, side = sides[find(ends[0])]
        if component not in group_of:
            order.append(component)
            group_of[component] = class_group[factor_class[factor]]
        kind = classes.forms[number].kinds[factor]
        if op.flops or kind in (FactorKind.BLOCKED, FactorKind.PERMUTATION):
            looks[component].add((op.name, classes.forms[number].sizes, factor, side, kind))
        touched[component].update(v for v, _ in ends if v >= 0)
        placed.append((number, factor, component, side))
    number_of, kinds = _gather_alike(order, group_of, side_count, looks)
    counts: dict[int, list[int]] = defaultdict(lambda: [0, 0])
    for component in order:
        counts[number_of[component]][0] += 1
        counts[number_of[component]][1] += len(touched[component])
    resolutions = tuple(Resolution(group, counts[k][0], counts[k][1], sides) for k, (group, sides) in enumerate(kinds))
    strands: dict[int, list[Strand | None]] = {n: [None] * len(classes.factor_classes[n]) for n, _ in factor_ends}
    for number, factor, component, side in placed:
        strands[number][factor] = Strand(number_of[component], side)
    of_op: dict[int, set[End]] = defaultdict(set)
    for number, _, component, _ in placed:
        of_op[number].add(component)
    for number, between in _between(program, of_op).items():
        factor_class = classes.factor_classes[number]
        for factor, member in enumerate(factor_class):
            for component in sorted(between):
                if class_group[member] == group_of[component]:
                    own = strands.setdefault(number, [None] * len(factor_class))
                    own[factor] = own[factor] or Strand(number_of[component], 0)
    conflicts = len(set().union(*touched.values())) if touched else 0
    return Conflicts(resolutions, {n: tuple(s) for n, s in strands.items()}, conflicts, len(order))


def _between(program: Program, of_op: dict[int, set[End]]) -> dict[int, set[End]]:
    """Light op -> components of which it is between two ops, with only light ops in between."""
    behind: dict[int, set[End]] = {}
    ahead: dict[int, set[End]] = {}
    heavy = [op.kind.heavy or op.name in (ARGUMENT, CARRY, RESULT) for op in program.ops]
    light = [n not in of_op and not heavy[n] for n in range(len(heavy))]
    for number, op in enumerate(program.ops):
        if light[number]:
            near: set[End] = set()
            for value in op.operands:
                near |= of_op.get(program.producer[value], set()) | behind.get(program.producer[value], set())
            if 0 < len(near) <= _MOST_NEAR:
                behind[number] = near
    for number in range(len(program.ops) - 1, -1, -1):
        if number in behind:
            near = set()
            for user in {user for value in program.ops[number].results for user, _ in program.users[value]}:
                near |= of_op.get(user, set()) | ahead.get(user, set())
            ahead[number] = near & behind[number]
    return {number: near for number, near in sorted(ahead.items()) if near}


def _gather_alike(
    order: list[End], group_of: dict[End, int], side_count: dict[End, int], looks: dict[End, set[object]]
) -> tuple[dict[End, int], list[tuple[int, int]]]:
    """(component -> resolution group, [resolution groups] (class group, sides)). A component whose working ops are a
    subset of another's counts as equal: the ops of attention's forward pass also occur in the backward pass.
    """
    models: list[tuple[int, int, set[object]]] = []
    number_of: dict[End, int] = {}
    for component in sorted(order, key=lambda c: -len(looks[c])):
        kind = (group_of[component], side_count[component])
        for number, (group, sides, seen) in enumerate(models):
            if (group, sides) == kind and looks[component] <= seen and bool(looks[component]) == bool(seen):
                number_of[component] = number
                break
        else:
            number_of[component] = len(models)
            models.append((*kind, looks[component]))
    return number_of, [(group, sides) for group, sides, _ in models]


# ---------------------------------------------------------------- mirrored groups
# Mirrored groups: classes with the same structural fingerprint are decided together.
#
# A class's fingerprint counts its occurrences: factors of heavy ops (contractions, convolutions, gathers, scatters,
# arguments; of all ops if no heavy one has it). Classes of one fingerprint that occur in one op (the widths of
# consecutive layers of an MLP) are separated by graph colouring, so that no op has one group twice for that reason.
# Classes linked by a stencil or a slice share a group, whatever their sizes.


def mirrored_groups(program: Program, classes: Classes) -> list[list[int]]:
    """Groups of class numbers; each group in class order, groups in order of their first class."""
    buckets: dict[object, list[int]] = defaultdict(list)
    for number, fingerprint in enumerate(_fingerprints(program, classes)):
        buckets[classes.sizes[number], fingerprint].append(number)
    colours = _separate(classes, buckets)
    groups: dict[tuple[int, int], list[int]] = defaultdict(list)
    for bucket, members in enumerate(buckets.values()):
        for number in members:
            groups[bucket, colours.get(number, 0)].append(number)
    return _join_linked(sorted(groups.values()), classes.links)


def _fingerprints(program: Program, classes: Classes) -> list[frozenset[tuple[object, int]]]:
    heavy: list[Counter[object]] = [Counter() for _ in classes.sizes]
    light: list[Counter[object]] = [Counter() for _ in classes.sizes]
    for number, op in enumerate(program.ops):
        factors = classes.factor_classes[number]
        if not factors:
            continue
        is_heavy = op.kind.heavy or op.name == ARGUMENT
        counters = heavy if is_heavy else light
        signature = (op.name, op.detail, classes.forms[number], op.trips)
        key = hash(signature)
        for factor, number_of_class in enumerate(factors):
            counters[number_of_class][key, factor] += 1
    return [frozenset((some or any_op).items()) for some, any_op in zip(heavy, light, strict=True)]


def _separate(classes: Classes, buckets: dict[object, list[int]]) -> dict[int, int]:
    """A colour per class such that classes of one bucket that occur in one op differ; greedy, in class order."""
    bucket_of = {c: k for k, members in enumerate(buckets.values()) if len(members) > 1 for c in members}
    neighbours: dict[int, set[int]] = defaultdict(set)
    for factors in set(classes.factor_classes):
        if len(factors) < 2:
            continue
        for a in factors:
            for b in factors:
                if a != b and a in bucket_of and bucket_of[a] == bucket_of.get(b):
                    neighbours[a].add(b)
    colours: dict[int, int] = {}
    for number in sorted(bucket_of):
        used = {colours[n] for n in neighbours[number] if n in colours}
        colours[number] = next(c for c in range(len(used) + 1) if c not in used)
    return colours


def _join_linked(groups: list[list[int]], links: tuple[tuple[int, int], ...]) -> list[list[int]]:
    group_of = {c: k for k, members in enumerate(groups) for c in members}
    sets: DisjointSets[int] = DisjointSets()
    for a, b in links:
        sets.union(*sorted((sets.find(group_of[a]), sets.find(group_of[b]))))
    joined: dict[int, list[int]] = defaultdict(list)
    for k, members in enumerate(groups):
        joined[sets.find(k)].extend(members)
    return [sorted(members) for _, members in sorted(joined.items())]
