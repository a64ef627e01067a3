"""A move of the search that leaves the mirrored problem: one layer decided otherwise than the others, where that pays.

Enters: the best plan in which every layer is decided alike. All groups are taken apart at once (see `plan.mirrors`),
and edits of what the first, the last and the other layers do are tried on that plan. Groups whose parts end up alike
are put together again. Leaves: the better plan with the problem it belongs to, or what came in.
"""

from __future__ import annotations

import time
from dataclasses import replace

from toast_cli.evaluate.evaluator import Evaluator
from toast_cli.plan.decisions import Plan, Shard
from toast_cli.plan.mirrors import Parts, mirrored_groups, taken_apart, unmirror
from toast_cli.search.edits import Edit, results
from toast_cli.search.mesh_search import Confirmed
from toast_cli.search.model import Budget, Incumbent, OutOfBudget, SearchResult
from toast_cli.search.moves import Moves
from toast_cli.search.objective import PRICE, Objective

UNMIRROR_SHARE = 0.1  # of the user's evaluations
LEAST_EVALUATIONS = 10  # with fewer nothing is tried
LEAST_GAIN = 2.0 * PRICE  # of one edit, in units of reward: that much more has to be said about the plan


def unmirrored(evaluator: Evaluator, result: SearchResult, budget: Budget) -> tuple[Evaluator, SearchResult]:
    """`result` or something better; its evaluations and seconds come on top of those of `result`."""
    start = time.monotonic()
    problem = evaluator.problem
    on_offer = {d.group for d in problem.decisions.choices if isinstance(d, Shard)}
    named = {g for d in (*problem.fixed, *result.plan) if isinstance(d, Shard) for g in (d.unless, d.only)}
    apart = [g for g in mirrored_groups(problem) if g in on_offer and g not in named]
    if not apart or (budget.evaluations is not None and budget.evaluations < LEAST_EVALUATIONS):
        return evaluator, result
    wide, parts = unmirror(problem, apart)
    start_plan = wide.canonical(taken_apart(result.plan, parts))
    plan, looked = _edit(Evaluator(wide, [start_plan], evaluator), start_plan, parts, budget)
    spent = replace(result, evaluations=result.evaluations + looked, seconds=result.seconds + time.monotonic() - start)
    needed = [g for g in apart if _differ(plan, g, parts[g])]
    if not needed:
        return evaluator, spent
    narrow, kept = unmirror(problem, needed)
    names = {old: new for g in needed for old, new in zip(parts[g], kept[g], strict=True)}
    gone = {part: g for g in apart if g not in needed for part in parts[g]}
    here = {**gone, **names}

    def narrowed(d: Shard) -> Shard:
        group, unless, only = (here.get(g, g) for g in (d.group, d.unless, d.only))
        return d._replace(group=group, unless=unless, only=only)

    found = narrow.canonical(
        tuple(
            narrowed(d) if isinstance(d, Shard) else d for d in plan if not isinstance(d, Shard) or d.group not in gone
        )
    )
    final = Evaluator(narrow, [found], evaluator)
    cost = final.exact_cost(found)
    spent = replace(spent, evaluations=spent.evaluations + 1)
    objective = Objective(problem, evaluator.cost(problem.fixed))
    if objective.rank(found, cost) >= objective.rank(result.plan, result.cost):
        return evaluator, replace(spent, seconds=result.seconds + time.monotonic() - start)
    better = replace(
        spent, plan=found, cost=cost, fits=objective.met(cost), best_found_at=spent.evaluations,
        seconds=result.seconds + time.monotonic() - start,
    )  # fmt: skip
    return final, better


def _edit(evaluator: Evaluator, plan: Plan, parts: Parts, budget: Budget) -> tuple[Plan, int]:
    """The best plan that edits of the groups taken apart lead to, and how many plans were looked at."""
    problem = evaluator.problem
    incumbent = Incumbent(problem, Confirmed(evaluator), budget)
    moves = Moves(problem)
    family = {*parts, *(part for split in parts.values() for part in split)}

    def worth(of: Plan) -> float:
        return incumbent.reward(of, incumbent.look(of)) + PRICE * len(of)  # what counts is settled in the end

    try:
        now, improved = worth(plan), True
        while improved:
            improved = False
            for edit in [*moves.small_edits(plan), *moves.exchanges(plan)]:
                if not _about(edit, family):
                    continue
                tried = [(worth(to), to) for to in results(problem, plan, edit)]
                best, to = max(tried, key=lambda t: t[0], default=(now, plan))
                if best > now + LEAST_GAIN:
                    plan, now, improved = to, best, True
    except OutOfBudget:
        pass
    return plan, len(incumbent.seen)


def _about(edit: Edit, family: set[int]) -> bool:
    """Whether an edit is about groups taken apart and nothing else."""
    return all(isinstance(d, Shard) and d.group in family for d in (*edit.out, *edit.into))


def _differ(plan: Plan, group: int, parts: tuple[int, ...]) -> bool:
    """Whether parts of a group are decided otherwise than the rest of it."""

    def about(number: int) -> list[tuple[object, ...]]:
        return [d[1:] for d in plan if isinstance(d, Shard) and d.group == number]

    return any(about(part) != about(group) for part in parts)
