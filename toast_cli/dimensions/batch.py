"""The batch: what no weight has, and most of the work can be split along while devices exchange nothing but sums of
gradients.

Enters: program, classes, the group of each class, what cannot be a batch because its elements have an order. Leaves:
the groups that are batches. Names and shapes play no part.
"""

from __future__ import annotations

from collections import defaultdict

from toast_cli.dimensions.classes import Classes
from toast_cli.dimensions.model import Form, SlotKind
from toast_cli.program.model import Program, Window
from toast_cli.program.ops import ARGUMENT, CARRY, RESULT
from toast_cli.program.roles import INPUTS, ROLES, STATE, WEIGHTS, argument_roles, carried_results

# A group that only so small a part of the work can be split along is no batch. Nor is one a second batch where so large
# a part of its work is shared with the first.
_LEAST_WORK, _MOST_SHARED = 0.3, 0.5


def find_batches(
    program: Program, classes: Classes, class_group: list[int], ordered: set[int], tokens: set[int]
) -> set[int]:
    """Groups that are batches: one, and others along which elements never meet either.

    Where inputs do not go together (real and generated images, two towers), each has a batch of its own, along which
    most of the work can be split that is left. Batches are looked for among what is handed on and never meets (chains
    of a sampler, whatever their positions are to others), then in inputs, in results (what is made of noise), in what
    comes first in all results (gradients of all that an attention reads, as if it were weights), and among all groups.

    Args:
        ordered: groups that are none: sequences, space, nodes. tokens: groups of what is looked up in tables; one of
            them at most is a batch.
    """
    splits = _Splits(program, classes, class_group)
    apart = splits.weights | ordered
    all_work = splits.free(set())
    batches: set[int] = set()
    leading = splits.leading - splits.mixed - ordered
    for among in (splits.alone, splits.data - apart, splits.made - apart, leading, splits.groups - apart):
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
    """What ops can be split along: for each group the work of the ops that need nothing of other devices for it.

    Attributes:
        groups: all there are. weights, data, made: those that weights, other arguments and results have.
        alone: the first dimension of all that is handed on, if all results have it and elements never meet along it
            (chains of a sampler).
        leading: the first dimension of all results, if that is one.
        mixed: those along which elements meet in some op, other than in sums over all of them.
    """

    def __init__(self, program: Program, classes: Classes, class_group: list[int]) -> None:
        _, of = argument_roles(program)
        roles = [ROLES[number] for number in of]
        arguments = [{class_group[c] for c in slots} for slots in classes.slot_classes[: len(roles)]]
        results = [
            {class_group[c] for c in slots}
            for op, slots in zip(program.ops, classes.slot_classes, strict=True)
            if op.name == RESULT
        ]
        self.groups, self.made = set(class_group), set[int]().union(*results)
        of_role = {role: [groups for r, groups in zip(roles, arguments, strict=True) if r == role] for role in ROLES}
        self.weights = set[int]().union(*of_role[WEIGHTS])
        self.data = set[int]().union(*of_role[STATE], *of_role[INPUTS])
        kept = [
            {class_group[classes.slot_classes[k][0]]}
            for k, result in enumerate(carried_results(program))
            if result >= 0 and arguments[k]
        ]
        self.alone = set.intersection(*kept, *filter(None, results)) if kept else set()
        first = [
            {class_group[slots[0]]} if slots else set[int]()
            for op, slots in zip(program.ops, classes.slot_classes, strict=True)
            if op.name == RESULT
        ]
        self.leading = set.intersection(*first) if first else set[int]()
        self.mixed: set[int] = set()
        # groups that meet, those of them that are free -> work
        self._work: dict[tuple[frozenset[int], frozenset[int]], float] = defaultdict(float)
        known: dict[object, tuple[frozenset[int], frozenset[int]]] = {}
        for number, op in enumerate(program.ops):
            key = form, slot_classes, _ = classes.forms[number], classes.slot_classes[number], op.windows
            if key not in known:
                groups = [class_group[c] for c in slot_classes]
                known[key] = frozenset(groups), self._free(form, groups, op.windows)
            elements = sum(program.values[v].elements for v in op.results)
            if op.name not in (ARGUMENT, RESULT, CARRY):
                self._work[known[key]] += (op.flops + elements) * op.trips

    def _free(self, form: Form, groups: list[int], windows: tuple[Window, ...]) -> frozenset[int]:
        """Groups along which one op can be split: all its results have them, element by element, or it makes a sum over
        them that nothing but weights (or nothing at all) has."""
        results = {groups[slot] for dims in form.results for slots in dims for slot in slots}
        kinds: dict[int, list[SlotKind]] = defaultdict(list)
        for group, kind in zip(groups, form.kinds, strict=True):
            kinds[group].append(kind)
        for window in windows:
            for slot in form.operands[0][window.operand_dim]:
                kinds[groups[slot]].append(SlotKind.PERMUTATION)
        free = {
            group
            for group, found in kinds.items()
            if found == [SlotKind.PARALLEL] or (found == [SlotKind.REDUCTION] and results <= self.weights)
        }
        self.mixed.update(kinds.keys() - free)
        self.alone -= {group for group, found in kinds.items() if found != [SlotKind.PARALLEL]}
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
        """The most work that ops with any one group have, of those that have none in `without`."""
        left: dict[int, float] = defaultdict(float)
        for (groups, _), work in self._work.items():
            if groups.isdisjoint(without):
                for group in groups:
                    left[group] += work
        return max(left.values(), default=0.0)
