"""The plan of a stored report: JSON and a problem in, its decisions out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from toast_cli.errors import InputError
from toast_cli.explain.words import LOOKED_UP, SUMS
from toast_cli.hardware.yamltree import nearest
from toast_cli.plan.decisions import LOOK_UPS, NONE, SUMMED, Decision, Plan, Replicate, Shard
from toast_cli.plan.mirrors import unmirror
from toast_cli.plan.problem import Problem
from toast_cli.report.json_file import read_report
from toast_cli.report.model import DecisionFacts
from toast_cli.request import Offload, Recompute


def stored_shape(path: str) -> str:
    """The mesh shape a stored report was made for, as `--mesh-shape` takes it. Raises InputError for a file that
    is not a report."""
    return ",".join(f"{axis}={size}" for axis, size in read_report(path).mesh.axes.items())


def stored_rewriting(path: str) -> dict[str, Any]:
    """The program rewriting of a stored report's plan, as fields of `Request`."""
    program = read_report(path).program
    return {
        "parted": program.parted,
        "microbatches": max(1, program.microbatches),
        "recompute": program.recompute if program.recompute in list(Recompute) else None,
        "offload": program.offload if program.offload in list(Offload) else None,
    }


def stored_plan(path: str, problem: Problem) -> tuple[Problem, Plan]:
    """The decisions of a stored report, and their problem: `problem`, with layers separated if the plan decides them
    separately. Raises InputError if they do not belong to the program."""
    decisions = read_report(path).plan.decisions
    problem = _taken_apart(problem, decisions)
    names = {group.name: k for k, group in enumerate(problem.dimensions.groups)}
    plan = [_decision(decision, names, problem, path) for decision in decisions]
    return problem, problem.canonical(tuple(plan))


def _taken_apart(problem: Problem, decisions: Sequence[DecisionFacts]) -> Problem:
    """The problem with those groups separated of which decisions name only the first or last class (`ff:first`)."""
    names = {group.name: k for k, group in enumerate(problem.dimensions.groups)}
    targets = [decision.target for decision in decisions]
    whole = {target.rpartition(":")[0] for target in targets if target not in names and ":" in target}
    apart = sorted(names[name] for name in whole if name in names)
    return unmirror(problem, apart)[0] if apart else problem


def _decision(facts: DecisionFacts, names: dict[str, int], problem: Problem, path: str) -> Decision:
    target, unless, only = facts.target, facts.unless, facts.only
    if facts.axis not in problem.mesh.names:
        raise InputError(f"the mesh has no axis {facts.axis!r}, which the report's plan uses", where=path)
    axis = problem.mesh.names.index(facts.axis)
    if facts.kind == "replicate" and target in problem.roles:
        return Replicate(problem.roles.index(target), axis)
    if facts.kind not in ("shard", "replicate"):
        raise InputError(f"a decision of kind {facts.kind!r} is not supported", where=path, hint="make the report anew")
    scopes = {"": NONE, SUMS: SUMMED, LOOKED_UP: LOOK_UPS, **names}
    for name in (target, *(scope for scope in (unless, only) if scope not in scopes)):
        if name not in names:
            raise InputError(
                f"the report is of another program: this one has no dimension {name!r}",
                where=path,
                hint=nearest(name, names),
            )
    group = problem.dimensions.groups[names[target]]
    if len(facts.sides) != len(group.resolutions):
        raise InputError(f"the report is of another program: {target} has other conflicts", where=path)
    return Shard(names[target], axis, tuple(facts.sides.values()), scopes[unless], names.get(only, NONE))
