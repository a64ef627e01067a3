"""Finds batch dimensions: those that no weight has and along which most of the work can be split with no communication
but gradient sums.

In: program, classes, the group of each class, and groups that cannot be batches because their elements are ordered.
Out: the groups that are batches. Names and shapes are not used.
"""

from __future__ import annotations

from collections import defaultdict

from toast_cli.dimensions.classes import Classes
from toast_cli.dimensions.model import FactorKind, Form
from toast_cli.program.model import Program, Window
from toast_cli.program.ops import ARGUMENT, CARRY, RESULT
from toast_cli.program.roles import INPUTS, ROLES, STATE, WEIGHTS, argument_roles, carried_results

# Least fraction of the work that can be split along a batch, and largest fraction of its work that a second batch may
# share with the first.
_LEAST_WORK, _MOST_SHARED = 0.3, 0.5


def find_batches(
    program: Program, classes: Classes, class_group: list[int], ordered: set[int], tokens: set[int]
) -> set[int]:
    """Groups that are batches: one, and others along which elements do not interact either.

    Independent inputs (real and generated images, two towers) each have a batch of their own, along which most of the
    remaining work can be split. Candidates are, in this order: carried dimensions without interaction (chains of a
    sampler), groups of inputs, of results (samples made from noise), the leading dimension of all results (gradients
    with respect to an attention's inputs), and all groups. Without weights, interacting inputs (particles) and results
    made from random numbers alone (initial weights) have none.

    Args:
        ordered: groups that are no batches: sequences, space, nodes. tokens: groups of look-up indices, of which at
            most one is a batch.
    """
    splits = _Splits(program, classes, class_group)
    apart = splits.weights | ordered
    all_work = splits.free(set())
    batches: set[int] = set()
    leading = splits.leading - splits.mixed - ordered
    candidates = [splits.alone, splits.data - apart, splits.made - apart, leading, splits.groups - apart]
    if not splits.weights and splits.data <= splits.mixed:
        candidates = [splits.groups - splits.made - splits.mixed - ordered]
    for among in candidates:
        while True:
            free, most = splits.free(batches), splits.most(batches)
            likely = [
                g for g in sorted(among - batches) if free[g] > max(_LEAST_WORK * most, _MOST_SHARED * all_work[g])
            ]
            if not likely:
                break
            batch = max(likely, key=lambda g: (round(free[g] / most, 3), g not in splits.mixed, -g))
            batches.update([batch], (g for g in likely if g not in splits.mixed | tokens))
        if batches:
            break
    return batches


class _Splits:
    """For each group, the work of the ops that can be split along it without communication.

    Attributes:
        groups: all groups. weights, data, made: groups of weights, of other arguments and of results.
        alone: the first dimension of all carried arguments, if all results have it and elements do not interact along
            it (chains of a sampler).
        leading: the first dimension of all results, if it is the same group.
        mixed: groups along which elements interact in some op, other than in sums over all of them.
    """

    def __init__(self, program: Program, classes: Classes, class_group: list[int]) -> None:
        _, of = argument_roles(program)
        roles = [ROLES[number] for number in of]
        arguments = [{class_group[c] for c in factors} for factors in classes.factor_classes[: len(roles)]]
        results = [
            {class_group[c] for c in factors}
            for op, factors in zip(program.ops, classes.factor_classes, strict=True)
            if op.name == RESULT
        ]
        self.groups, self.made = set(class_group), set[int]().union(*results)
        of_role = {role: [groups for r, groups in zip(roles, arguments, strict=True) if r == role] for role in ROLES}
        self.weights = set[int]().union(*of_role[WEIGHTS])
        self.data = set[int]().union(*of_role[STATE], *of_role[INPUTS])
        kept = [
            {class_group[classes.factor_classes[k][0]]}
            for k, result in enumerate(carried_results(program))
            if result >= 0 and arguments[k]
        ]
        self.alone = set.intersection(*kept, *filter(None, results)) if kept else set()
        first = [
            {class_group[factors[0]]} if factors else set[int]()
            for op, factors in zip(program.ops, classes.factor_classes, strict=True)
            if op.name == RESULT
        ]
        self.leading = set.intersection(*first) if first else set[int]()
        self.mixed: set[int] = set()
        # # (groups of an op, those it can be split along) -> work
        self._work: dict[tuple[frozenset[int], frozenset[int]], float] = defaultdict(float)
        known: dict[object, tuple[frozenset[int], frozenset[int]]] = {}
        for number, op in enumerate(program.ops):
            key = form, factor_classes, _ = classes.forms[number], classes.factor_classes[number], op.windows
            if key not in known:
                groups = [class_group[c] for c in factor_classes]
                known[key] = frozenset(groups), self._free(form, groups, op.windows)
            elements = sum(program.values[v].elements for v in op.results)
            if op.name not in (ARGUMENT, RESULT, CARRY):
                self._work[known[key]] += (op.flops + elements) * op.trips

    def _free(self, form: Form, groups: list[int], windows: tuple[Window, ...]) -> frozenset[int]:
        """Groups along which one op can be split: all its results have them, element by element, or it sums over them
        and its result only has groups of weights, or none."""
        results = {groups[factor] for dims in form.results for factors in dims for factor in factors}
        kinds: dict[int, list[FactorKind]] = defaultdict(list)
        for group, kind in zip(groups, form.kinds, strict=True):
            kinds[group].append(kind)
        for window in windows:
            for factor in form.operands[0][window.operand_dim]:
                kinds[groups[factor]].append(FactorKind.PERMUTATION)
        free = {
            group
            for group, found in kinds.items()
            if found == [FactorKind.PARALLEL] or (found == [FactorKind.REDUCTION] and results <= self.weights)
        }
        self.mixed.update(kinds.keys() - free)
        self.alone -= {group for group, found in kinds.items() if found != [FactorKind.PARALLEL]}
        return frozenset(free)

    def free(self, without: set[int]) -> dict[int, float]:
        """Group -> work of the ops that can be split along it and not along any in `without`."""
        left: dict[int, float] = defaultdict(float)
        for (groups, free), work in self._work.items():
            if groups.isdisjoint(without):
                for group in free:
                    left[group] += work
        return left

    def most(self, without: set[int]) -> float:
        """The most work of the ops with any one group, over ops that have no group in `without`."""
        left: dict[int, float] = defaultdict(float)
        for (groups, _), work in self._work.items():
            if groups.isdisjoint(without):
                for group in groups:
                    left[group] += work
        return max(left.values(), default=0.0)
