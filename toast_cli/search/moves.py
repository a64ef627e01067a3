"""Moves: the changes that the search makes to plans, in one table of neighbourhoods (`NEIGHBOURHOODS`).

A neighbourhood is a function from a plan to edits: decisions removed and decisions inserted. Each exists because some
programs need it; `benchmarks/moves.py` shows the gain of each.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from itertools import combinations, permutations, takewhile
from typing import NamedTuple

from toast_cli.plan.decision_space import decision_space
from toast_cli.plan.decisions import NONE, Decision, Plan, Replicate, Shard
from toast_cli.plan.loops import ACCUMULATORS, LOOP_READS
from toast_cli.plan.problem import Problem
from toast_cli.price.evaluator import GroupSeconds

# ---------------------------------------------------------------- edits

DecisionSequence = tuple[Decision, ...]  # decisions taken together, in order


class Edit(NamedTuple):
    """A change to a plan: decisions removed, decisions inserted (anywhere). If both are equal, they move."""

    out: DecisionSequence
    into: DecisionSequence


def subject(decision: Shard) -> tuple[int, int, int]:
    """Group, axis and part of the program: a plan decides about each once. The same group may take the same axis in
    several parts of the program, at different priorities."""
    return decision.group, decision.axis, decision.only


def suited(problem: Problem, plan: Plan) -> Plan:
    """The problem's fixed decisions, then all decisions of `plan` that may follow them; in canonical order."""
    decisions = list(problem.fixed)
    subjects = {subject(d) for d in decisions if isinstance(d, Shard)}
    for decision in plan:
        if decision_space(problem).offers(decision) and (
            subject(decision) not in subjects if isinstance(decision, Shard) else decision not in decisions
        ):
            decisions.append(decision)
            if isinstance(decision, Shard):
                subjects.add(subject(decision))
    return problem.canonical(tuple(decisions))


def results(problem: Problem, plan: Plan, edit: Edit) -> Iterator[Plan]:
    """The plans an edit can lead to, in canonical order, each once. A decision that replaces one about the same group
    and axis keeps its position; all others are inserted together at each position that makes a difference. None where
    the edit does not apply to the plan."""
    free = list(plan[len(problem.fixed) :])
    if any(d not in free for d in edit.out):
        return
    instead: dict[Decision, Decision] = {}
    if edit.out != edit.into:
        pairs = zip(edit.out, edit.into, strict=False)
        instead = dict(takewhile(lambda pair: pair[0][:2] == pair[1][:2], pairs))
    moved = edit.into[len(instead) :]
    free = [instead.get(d, d) for d in free if d in instead or d not in edit.out]
    subjects = [subject(d) if isinstance(d, Shard) else d for d in (*free, *moved)]
    if len(set(subjects)) < len(subjects):
        return
    seen = {plan}
    for place in _places(problem, free, moved) if moved else [0]:
        result = problem.canonical((*problem.fixed, *free[:place], *moved, *free[place:]))
        if result not in seen:
            seen.add(result)
            yield result


def _places(problem: Problem, free: list[Decision], move: DecisionSequence) -> Iterator[int]:
    """Positions to insert a move: the front, and after each decision that does not commute with one of it."""
    shards = [d for d in move if isinstance(d, Shard)]
    yield 0
    for place, before in enumerate(free, 1):
        if isinstance(before, Shard) and any(not problem.commute(d, before) for d in shards):
            yield place


# An addition is tried only if at least this fraction of the time that the busiest group takes is at stake.
LEAST_STAKE = 2e-3


class Moves:
    """The moves of one problem.

    Args:
        seconds: seconds of a step by groups (see `Evaluator.seconds_between`). Additions restricted to a part of the
            program are tried in descending order of the seconds at stake.
    """

    def __init__(self, problem: Problem, seconds: Callable[[Plan], GroupSeconds] | None = None) -> None:
        self.problem, self._seconds = problem, seconds
        self.choices = decision_space(problem).choices
        self.macros = _macros(problem)
        self._loop_edges = [
            d for d in self.choices if isinstance(d, Replicate) and problem.roles[d.role] in (ACCUMULATORS, LOOP_READS)
        ]
        # (group, axis) -> decisions to replicate arguments that this split would divide.
        self._storage: dict[tuple[int, int], list[Replicate]] = defaultdict(list)
        for kept, groups in decision_space(problem).rests.items():
            for group in groups:
                self._storage[group, kept.axis].append(kept)

    # -- moves that extend a plan ------------------------------------------------------------------------------------

    def after(self, plan: Plan) -> list[DecisionSequence]:
        """Moves that may be appended to a plan: each subject is decided once, and `Replicate` needs an axis in use. One
        move gathers loop-invariant arrays before loops over all axes."""
        subjects, held = _subjects(plan), set(plan)
        axes = {axis for _, axis, _ in subjects}
        decisions = [
            d
            for d in self.choices
            if (subject(d) not in subjects if isinstance(d, Shard) else d.axis in axes and d not in held)
        ]
        allowed = set(decisions)
        reads = tuple(d for d in self._loop_edges if d in allowed and self.problem.roles[d.role] == LOOP_READS)
        together = [reads] if len(reads) > 1 else []
        return [*((d,) for d in decisions), *(move for move in self.macros if allowed.issuperset(move)), *together]

    def held(self, plan: Plan) -> Plan:
        """The decisions of a plan that may be changed."""
        return plan[len(self.problem.fixed) :]

    # -- neighbourhoods ----------------------------------------------------------------------------------------------

    def single(self, plan: Plan) -> list[Edit]:
        """Removes, moves or adds a decision, or adds a macro."""
        held = self.held(plan)
        return [
            *(Edit((d,), ()) for d in held),
            *(Edit((d,), (d,)) for d in held if isinstance(d, Shard)),
            *(Edit((), move) for move in self.after(plan)),
        ]

    def replace(self, plan: Plan) -> list[Edit]:
        """Replaces a decision by another of its type: on the same axis, or about the same group or role."""
        present = set(plan)
        absent = [d for d in self.choices if d not in present]
        return [Edit((out,), (into,)) for out in self.held(plan) for into in absent if _alike(out, into)]

    def axes(self, plan: Plan) -> list[Edit]:
        """Moves, swaps or copies all decisions on an axis; for groups split over two axes, swaps the decisions' scopes,
        sides or axes."""
        decisions, offers = self.held(plan), decision_space(self.problem).offers
        axes = sorted({d.axis for d in decisions})
        about = {axis: tuple(d for d in decisions if d.axis == axis) for axis in axes}
        edits = [Edit(move, move) for move in about.values()] if len(axes) > 1 else []
        for axis, other in combinations(axes, 2):
            swap = {axis: other, other: axis}
            either = tuple(d for d in decisions if d.axis in swap)
            shared = {d[0] for d in about[axis]} & {d[0] for d in about[other]}
            both = tuple(d for d in either if d[0] in shared)
            for moved in dict.fromkeys((either, both)):
                into = tuple(d._replace(axis=swap[d.axis]) for d in moved)
                if into and all(map(offers, into)):
                    edits.append(Edit(moved, into))
            pairs = combinations([d for d in both if isinstance(d, Shard)], 2)
            crossed = (edit for a, b in pairs if a.group == b.group for edit in _crosswise(a, b))
            edits += [edit for edit in crossed if all(map(offers, edit.into))]
        for axis, other in permutations(axes, 2):
            into = tuple(filter(offers, (d._replace(axis=other) for d in about[axis])))
            if into and into != about[other]:
                edits.append(Edit(about[other], into))
        return edits

    def scopes(self, plan: Plan) -> list[Edit]:
        """Changes the side or the scope of a decision, or of all decisions about its group on any axis: they exempt
        some ops, or apply only to ops that also have another group."""
        edits, decisions = list[Edit](), decision_space(self.problem)
        for unit in self._by_group(plan):
            variants = (to for d in unit for to in (*decisions.variants(d), *decisions.parts(d)))
            into = (tuple(to._replace(axis=d.axis) for d in unit) for to in variants)
            edits += [Edit(unit, other) for other in dict.fromkeys(into)]
        return edits

    def additions(self, plan: Plan) -> list[Edit]:
        """Adds a decision that exempts some ops, takes another side of a conflict, or applies to a part of the
        program."""
        decisions, offered = decision_space(self.problem), set(self.choices)
        variants = (to for d in self._absent(plan) for to in (*decisions.variants(d), *decisions.parts(d)))
        return self._by_stake(plan, (to for to in variants if to not in offered))

    def storage(self, plan: Plan) -> list[Edit]:
        """Stores a kind of arguments replicated where the plan splits them; or adds or changes a split, but stores the
        arguments it affects replicated."""
        split, held = {d[:2] for d in plan if isinstance(d, Shard)}, set(plan)
        kept: dict[int, list[Decision]] = defaultdict(list)
        for decision, groups in decision_space(self.problem).rests.items():
            if decision not in held and any((group, decision.axis) in split for group in groups):
                kept[decision.role].append(decision)
        edits = [Edit((), (decision,)) for decisions in kept.values() for decision in decisions]
        edits += [Edit((), tuple(decisions)) for decisions in kept.values() if len(decisions) > 1]
        for out, into in self._more(plan):
            resting = {d for about in into if isinstance(about, Shard) for d in self._storage.get(about[:2], ())}
            if resting - held:
                edits.append(Edit(out, (*into, *sorted(resting - held))))
        return edits

    def loops(self, plan: Plan) -> list[Edit]:
        """Adds or changes a split, and also gathers loop-invariant arrays before loops and reduces loop-carried sums
        after them: where loops communicate in every trip, none of these alone gains anything."""
        if not self._loop_edges:
            return []
        held, edits = set(plan), list[Edit]()
        for out, into in self._more(plan):
            axes = {d.axis for d in (*plan, *into) if isinstance(d, Shard)}
            if loop_edges := tuple(d for d in self._loop_edges if d.axis in axes and d not in held):
                edits.append(Edit(out, (*into, *loop_edges)))
        return edits

    def hand_over(self, plan: Plan) -> list[Edit]:
        """Hands some ops from a group's decisions over to another group on the same axes: the sequence is split except
        in attention, where the heads are (Ulysses); the batch is split except in look-ups, where the features are. A
        variant also gathers loop-invariant arrays before loops."""
        subjects, held, offers = _subjects(plan), set(plan), decision_space(self.problem).offers
        others: dict[int, list[tuple[Shard, ...]]] = defaultdict(list)  # axis -> decisions that may take the ops over
        for move in (*((d,) for d in self.choices), *self.macros):
            shards = tuple(
                o for o in move if isinstance(o, Shard) and o.axis == move[0].axis and subject(o) not in subjects
            )
            if len(shards) == len(move):
                others[move[0].axis].append(shards)
            if len(shards) == len(move) == 1:
                parts = decision_space(self.problem).parts(shards[0])
                others[move[0].axis] += [(part,) for part in parts if isinstance(part, Shard)]
        edits = []
        for unit in self._by_group(plan):
            axes = [d.axis for d in unit]
            reads = tuple(
                e
                for e in self._loop_edges
                if e.axis in axes and e not in held and self.problem.roles[e.role] == LOOP_READS
            )
            for variant in decision_space(self.problem).variants(unit[0]):
                left = decision_space(self.problem).left_to(unit[0], variant)
                kept = tuple(variant._replace(axis=axis) for axis in axes)
                for move in others[axes[0]]:
                    if any(o.group in left and (o.only == NONE or o.only in left) for o in move):
                        into = tuple(o._replace(axis=axis) for axis in axes for o in move)
                        into = tuple(o for o in into if o.axis == axes[0] or (subject(o) not in subjects and offers(o)))
                        edits += [Edit(unit, (*kept, *into))] if len(move) == 1 else []
                        edits += [Edit(unit, (*kept, *into, *reads))] if reads else []
        return edits

    # -- shared by neighbourhoods ------------------------------------------------------------------------------------

    def _by_group(self, plan: Plan) -> list[tuple[Shard, ...]]:
        """Each `Shard` alone, and all about one group together if there are several."""
        about: dict[int, list[Shard]] = defaultdict(list)
        for d in self.held(plan):
            if isinstance(d, Shard):
                about[d.group].append(d)
        alone = [(d,) for members in about.values() for d in members]
        return [*alone, *(tuple(members) for members in about.values() if len(members) > 1)]

    def _more(self, plan: Plan) -> Iterator[Edit]:
        """Adds a split, or changes the side or scope of a decision."""
        yield from (Edit((), move) for move in self.after(plan) if isinstance(move[0], Shard))
        yield from self.scopes(plan)

    def _absent(self, plan: Plan) -> list[Decision]:
        """For each group and axis that the plan does not pair, the first decision about them."""
        subjects, absent = _subjects(plan), dict[tuple[int, int], Decision]()
        for d in self.choices:
            if isinstance(d, Shard) and subject(d) not in subjects:
                absent.setdefault(d[:2], d)
        return list(absent.values())

    def _by_stake(self, plan: Plan, added: Iterable[Decision]) -> list[Edit]:
        """Edits that add one of these decisions, most seconds at stake first; negligible stakes are left out."""
        if self._seconds is None:
            return [Edit((), (d,)) for d in added]
        seconds = self._seconds(plan)
        least = LEAST_STAKE * max(seconds.values(), default=0.0)

        def stake(d: Decision) -> float:
            if not isinstance(d, Shard):
                return 0.0
            if d.only != NONE:
                return seconds.get((d.group, d.only), 0.0)
            return seconds.get((d.group, d.group), 0.0) - seconds.get((d.group, d.unless), 0.0)

        staked = [(stake(d), d) for d in added]
        return [Edit((), (d,)) for s, d in sorted(staked, key=lambda pair: -pair[0]) if s > least]


Neighbourhood = Callable[[Moves, Plan], list[Edit]]
NEIGHBOURHOODS: dict[str, Neighbourhood] = {
    "scopes": Moves.scopes,
    "single": Moves.single,
    "axes": Moves.axes,
    "replace": Moves.replace,
    "additions": Moves.additions,
    "storage": Moves.storage,
    "loops": Moves.loops,
    "hand over": Moves.hand_over,
}


def _macros(problem: Problem) -> list[DecisionSequence]:
    """Macros, decisions that often pay off only together: one group over all axes."""
    over_axes: dict[int, list[Shard]] = defaultdict(list)
    for d in decision_space(problem).choices:
        if isinstance(d, Shard) and not any(d.sides) and d.unless == NONE:
            over_axes[d.group].append(d)
    return [tuple(shards) for shards in over_axes.values() if len(shards) > 1]


def _subjects(plan: Plan) -> set[tuple[int, int, int]]:
    """The subjects of a plan's `Shard` decisions (see `subject`)."""
    return {subject(d) for d in plan if isinstance(d, Shard)}


def _alike(decision: Decision, other: Decision) -> bool:
    return type(decision) is type(other) and (decision.axis == other.axis or decision[0] == other[0])


def _crosswise(a: Shard, b: Shard) -> list[Edit]:
    """Edits of two decisions about one group that exchange their scopes, their sides, or their axes."""
    pair: DecisionSequence = (a, b)
    exchanged: list[DecisionSequence] = [
        (a._replace(unless=b.unless, only=b.only), b._replace(unless=a.unless, only=a.only)),
        (a._replace(sides=b.sides), b._replace(sides=a.sides)),
        (a._replace(axis=b.axis), b._replace(axis=a.axis)),
    ]
    return [Edit(pair, into) for into in dict.fromkeys(exchanged) if into != pair]
