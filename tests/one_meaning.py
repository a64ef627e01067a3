"""One meaning: what the evaluator, the lowered program and the report say that a plan sends."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from contextlib import suppress
from itertools import product

from toast_cli.base.errors import UsageError
from toast_cli.frontend import Source
from toast_cli.plan.decisions import Plan
from toast_cli.plan.lower import lower
from toast_cli.plan.problem import Problem
from toast_cli.price.evaluator import Evaluator
from toast_cli.report.build import collective_facts
from toast_cli.tactics import strategies
from toast_cli.tactics.strategies import applicable, strategy

FIRST = ("data-parallel", "zero2", "fsdp", "context", "expert", "edge", "spatial")
LAST = ("megatron", "megatron+sequence", "context", "expert")

Totals = dict[tuple[str, tuple[int, ...]], tuple[float, float]]  # kind, axes -> bytes, count


def plans_of(problem: Problem) -> dict[str, Plan]:
    """Name -> plan, each plan once: every known strategy that applies, and products of two tactics (of three on a mesh
    of three axes)."""
    named = {**strategies(problem), **applicable(problem)[0]}
    names = [" x ".join(parts) for parts in product(FIRST, LAST)]
    if sum(size > 1 for size in problem.mesh.sizes) > 2:
        names += [" x ".join(parts) for parts in product(FIRST, LAST[2:], LAST[:2])]
    for name in names:
        with suppress(UsageError):
            named.setdefault(name, strategy(problem, name))
    once: dict[Plan, str] = {}
    for name, plan in named.items():
        if plan:
            once.setdefault(plan, name)
    return {name: plan for plan, name in once.items()}


def disagreements(source: Source, evaluator: Evaluator, plan: Plan) -> list[str]:
    """What evaluator and report say otherwise than the lowered program, as the partitioner writes collectives."""
    problem, number_of = evaluator.problem, evaluator.problem.mesh.names.index
    lowered = totals((c.kind, c.axes, c.local_bytes, c.runs) for c in lower(problem, plan).collectives)
    priced = totals((u.written[0], u.axes, u.written[1], u.count) for u in evaluator.collectives(plan))
    facts = [one.as_written() for one in collective_facts(source, evaluator, plan)]
    promised = totals((c.kind, tuple(map(number_of, c.axes)), c.bytes, c.count) for c in facts)
    said = {"evaluator": priced, "report": promised}
    return [f"{who} says {text}" for who, sent in said.items() if (text := difference(sent, lowered))]


def totals(collectives: Iterable[tuple[str, tuple[int, ...], float, float]]) -> Totals:
    """Bytes of results and counts by kind and axes, of (kind, axes, bytes of one, count)."""
    found: Totals = defaultdict(lambda: (0.0, 0.0))
    for kind, axes, size, count in collectives:
        key = kind, tuple(sorted(axes))
        found[key] = found[key][0] + size * count, found[key][1] + count
    return dict(found)


def difference(one: Totals, other: Totals) -> str:
    """The first kind and axes of which two say different things, bytes being whole; empty where there are none."""
    for key in sorted({*one, *other}):
        (size, count), (others, of_others) = one.get(key, (0.0, 0.0)), other.get(key, (0.0, 0.0))
        if abs(count - of_others) > 1e-6 * max(count, 1.0) or abs(size - others) > 0.5 * count + 1e-6 * size:
            return f"{size:.0f} bytes in {count:g} {key[0]} over {key[1]}, not {others:.0f} in {of_others:g}"
    return ""
