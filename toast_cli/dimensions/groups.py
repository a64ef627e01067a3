"""Mirrored groups: classes with the same structural fingerprint are decided together.

A class's fingerprint counts its occurrences: factors of heavy ops (contractions, convolutions, gathers, scatters,
arguments; of all ops if no heavy one has it). Classes of one fingerprint that occur in one op (the widths of
consecutive layers of an MLP) are separated by graph colouring, so that no op has one group twice for that reason.
Classes linked by a stencil or a slice share a group, whatever their sizes.
"""

from __future__ import annotations

from collections import Counter, defaultdict

from toast_cli.dimensions.classes import Classes
from toast_cli.program.disjoint_set import DisjointSets
from toast_cli.program.model import Program
from toast_cli.program.ops import ARGUMENT


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


def families(program: Program, classes: Classes, groups: list[list[int]]) -> list[int]:
    """[groups] number of the family of each: groups with the same roles in heavy ops, whatever their sizes and counts.

    The widths of a convolutional network are one family though no two of them are mirror images.
    """
    roles: list[set[object]] = [set() for _ in classes.sizes]
    for number, op in enumerate(program.ops):
        if op.kind.heavy:
            form = classes.forms[number]
            for factor, member in enumerate(classes.factor_classes[number]):
                roles[member].add((op.name, form.kinds[factor], tuple(factor in s for d in form.operands for s in d)))
    numbers: dict[object, int] = {}
    found: list[int] = []
    for k, members in enumerate(groups):
        key = frozenset().union(*(roles[m] for m in members))
        found.append(numbers.setdefault(key or ("alone", k), len(numbers)))
    return found


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
        taken = {colours[n] for n in neighbours[number] if n in colours}
        colours[number] = next(c for c in range(len(taken) + 1) if c not in taken)
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
