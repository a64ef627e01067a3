"""The plan of a stored report: JSON and a problem in, its decisions out."""

from __future__ import annotations

from typing import Any

from toast_cli.errors import InputError
from toast_cli.explain.words import LOOKED_UP, SUMS
from toast_cli.hardware.yamltree import nearest
from toast_cli.inputs import read_json
from toast_cli.plan.decisions import LOOK_UPS, NOWHERE, SUMMED, Decision, Plan, Replicate, Shard
from toast_cli.plan.mirrors import unmirror
from toast_cli.plan.problem import Problem
from toast_cli.report.json_file import read_report
from toast_cli.request import Offload, Recompute

_REMAKE = "make one with `toast partition --json FILE`"


def stored_shape(path: str) -> str:
    """The mesh shape a stored report was made for, as `--mesh-shape` takes it. Raises InputError for a file that
    is not a report."""
    read_report(path)
    axes = read_json(path, _REMAKE)["mesh"].get("axes")
    if not isinstance(axes, dict) or not axes or not all(type(size) is int for size in axes.values()):
        raise InputError("the report has no mesh.axes", where=path)
    return ",".join(f"{axis}={size}" for axis, size in axes.items())


def stored_rewriting(path: str) -> dict[str, Any]:
    """The program rewriting of a stored report's plan, as fields of `Request`."""
    read_report(path)
    program = read_json(path, _REMAKE).get("program")
    facts = program if isinstance(program, dict) else {}
    number, policy, offload = facts.get("microbatches", 1), facts.get("recompute"), facts.get("offload")
    return {
        "parted": facts.get("parted") is True,
        "microbatches": number if type(number) is int and number > 0 else 1,
        "recompute": policy if policy in list(Recompute) else None,
        "offload": offload if offload in list(Offload) else None,
    }


def stored_plan(path: str, problem: Problem) -> tuple[Problem, Plan]:
    """The decisions of a stored report, and their problem: `problem`, with layers separated if the plan decides them
    separately. Raises InputError if they do not belong to the program."""
    read_report(path)
    decisions = read_json(path, _REMAKE)["plan"]["decisions"]
    problem = _taken_apart(problem, decisions)
    names = {group.name: k for k, group in enumerate(problem.dimensions.groups)}
    plan = [_decision(decision, names, problem, path) for decision in decisions]
    return problem, problem.canonical(tuple(plan))


def _taken_apart(problem: Problem, decisions: Any) -> Problem:
    """The problem with those groups separated of which decisions name only the first or last class (`ff:first`)."""
    names = {group.name: k for k, group in enumerate(problem.dimensions.groups)}
    targets = [d["target"] for d in decisions if isinstance(d, dict) and isinstance(d.get("target"), str)]
    whole = {target.rpartition(":")[0] for target in targets if target not in names and ":" in target}
    apart = sorted(names[name] for name in whole if name in names)
    return unmirror(problem, apart)[0] if apart else problem


def _decision(facts: Any, names: dict[str, int], problem: Problem, path: str) -> Decision:
    try:
        kind, target, axis = facts["kind"], facts["target"], problem.mesh.names.index(facts["axis"])
        sides = tuple(int(side) for side in facts["sides"].values())
    except (KeyError, TypeError, ValueError, AttributeError):
        raise InputError("a decision of the report cannot be read", where=path, hint="make the report anew") from None
    if kind == "replicate" and target in problem.roles:
        return Replicate(problem.roles.index(target), axis)
    if kind not in ("shard", "replicate"):
        raise InputError(f"a decision of kind {kind!r} is not supported", where=path, hint="make the report anew")
    unless, only = facts.get("unless", ""), facts.get("only", "")
    scopes = {"": NOWHERE, SUMS: SUMMED, LOOKED_UP: LOOK_UPS, **names}
    for name in (target, *(scope for scope in (unless, only) if scope not in scopes)):
        if name not in names:
            raise InputError(
                f"the report is of another program: this one has no dimension {name!r}",
                where=path,
                hint=nearest(name, names),
            )
    group = problem.dimensions.groups[names[target]]
    if len(sides) != len(group.resolutions):
        raise InputError(f"the report is of another program: {target} has other conflicts", where=path)
    return Shard(names[target], axis, sides, scopes[unless], names.get(only, NOWHERE))
