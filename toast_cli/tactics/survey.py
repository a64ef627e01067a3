"""Surveys the effect of each tactic on a program on a mesh, axis by axis, or the reason why it has none."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from toast_cli.plan.decisions import Replicate, Shard
from toast_cli.plan.problem import Problem
from toast_cli.tactics.model import DoesNotApply, Look, Tactic, effective
from toast_cli.tactics.named import find_tactic


@dataclass(frozen=True)
class Applies:
    """The effect of a tactic. axes: names of those it applies to. decides: what it splits or replicates there. reason:
    why it does not apply, if axes is empty.
    """

    name: str
    about: str
    axes: list[str]
    decides: list[str]
    reason: str


def survey(problem: Problem, tactics: Iterable[Tactic]) -> list[Applies]:
    return [_survey(problem, tactic) for tactic in tactics]


def _survey(problem: Problem, tactic: Tactic) -> Applies:
    axes: list[str] = []
    decides: dict[str, None] = {}
    reason = "the mesh has one device"
    for axis, size in enumerate(problem.mesh.sizes):
        if size == 1:
            continue
        try:
            plan = effective(problem, tuple(tactic.decide(Look(problem, (axis,), find=find_tactic))))
        except DoesNotApply as why:
            reason = str(why)
            continue
        axes.append(problem.mesh.names[axis])
        for decision in plan:
            if isinstance(decision, Replicate):
                decides[f"{problem.roles[decision.role]} whole"] = None
            elif isinstance(decision, Shard):
                decides[problem.dimensions.groups[decision.group].name] = None
    return Applies(tactic.name, tactic.about, axes, list(decides), "" if axes else reason)
