"""One plan under study, with the data that all explanations need, and the data of an explanation (JSON schema
"toast.explain/1"; field names are stable).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from math import prod
from typing import Any

from toast_cli.base.errors import InputError
from toast_cli.base.yamltree import nearest
from toast_cli.dimensions.model import FactorKind
from toast_cli.frontend.source import Source
from toast_cli.hardware import written_shape
from toast_cli.plan.axis_assignment import claim_of
from toast_cli.plan.decisions import LOOK_UPS, NONE, SUMMED, Decision, Plan, Replicate, Shard
from toast_cli.plan.lower import lower
from toast_cli.plan.partitioned import PartitionedProgram
from toast_cli.plan.problem import Problem
from toast_cli.plan.saved import unmirror
from toast_cli.plan.sharding import OpSharding, Sharding
from toast_cli.price.cost import CollectiveUse, Cost
from toast_cli.price.evaluator import Evaluator
from toast_cli.report.build import collective_facts
from toast_cli.report.model import DecisionFacts, read_report
from toast_cli.report.words import LOOKED_UP, SUMS, rows_of, short_text, sides_of, summary
from toast_cli.request import Offload, Recompute


@dataclass(frozen=True)
class Study:
    """A plan to be explained, its costs and its collectives. source, evaluator: of the program. plan: its decisions are
    numbered from 1."""

    source: Source
    evaluator: Evaluator
    plan: Plan

    @cached_property
    def problem(self) -> Problem:
        """The problem without fixed decisions: the explanation may change what was fixed for the search."""
        return replace(self.evaluator.problem, fixed=(), closed=frozenset())

    @cached_property
    def cost(self) -> Cost:
        return self.evaluator.exact_cost(self.plan)

    @cached_property
    def lowered(self) -> PartitionedProgram:
        return lower(self.problem, self.plan)

    @cached_property
    def collectives(self) -> list[CollectiveUse]:
        """The most expensive first."""
        return self.evaluator.collectives(self.plan)

    @cached_property
    def collective_rows(self) -> list[list[CollectiveUse]]:
        """Collectives that look alike, as rows of a report and in the same order."""
        facts = collective_facts(self.source, self.evaluator, self.plan)
        return [[self.collectives[k] for k in row] for row in rows_of(facts)]

    @cached_property
    def op_shardings(self) -> list[OpSharding]:
        """[patterns]"""
        return [self.problem.op_sharding(p, self.plan) for p in range(len(self.problem.patterns))]

    def without(self, number: int) -> Plan:
        """The plan without its decision `number` (from 1)."""
        return self.problem.canonical((*self.plan[: number - 1], *self.plan[number:]))

    def explanation(
        self,
        subject: str,
        sentences: Iterable[str],
        *,
        listed: str = "",
        items: Iterable[Item] = (),
        alternatives: str = "",
        changes: Iterable[Change] = (),
    ) -> Explanation:
        """An explanation of something about this plan; see `Explanation`."""
        mesh = self.problem.mesh
        return Explanation(
            self.problem.program.name, mesh.name, mesh.shape, summary(self.problem, self.plan),
            self.cost.step_seconds, round(self.cost.peak_bytes), mesh.limit_bytes,
            subject, list(sentences), listed, list(items), alternatives, list(changes),
        )  # fmt: skip

    def change(self, what: str, plan: Plan, note: str = "") -> Change:
        """The cost of another plan."""
        return self.priced(what, self.evaluator.exact_cost(plan), note)

    def priced(self, what: str, cost: Cost, note: str = "") -> Change:
        fits = cost.peak_bytes <= self.problem.mesh.limit_bytes
        return Change(
            what,
            cost.step_seconds,
            cost.compute_seconds,
            cost.communication_seconds,
            round(cost.peak_bytes),
            fits,
            note,
        )

    # -- words ---------------------------------------------------------------------------------------------------

    def words(self, decision: Decision) -> str:
        """`batch over data`, `seq (f32[4,128,128].1) over model`: with the dimension it splits where an array has it
        twice."""
        sides = [name for _, name in sides_of(self.problem, decision)] if isinstance(decision, Shard) else []
        return short_text(self.problem, decision, f" ({', '.join(sides)})" if sides else "")

    def numbered(self, number: int) -> str:
        """`decision 3 (batch over data)`."""
        return f"decision {number} ({self.words(self.plan[number - 1])})"

    def sharding(self, sharding: Sharding) -> str:
        names = self.problem.mesh.names
        return f"({', '.join('+'.join(names[a] for a in axes) or 'None' for axes in sharding)})"

    # -- causes --------------------------------------------------------------------------------------------------

    def giver(self, pattern: int, factors: Iterable[int], axis: int) -> int:
        """Number of the decision that put `axis` on one of an op's factors; 0 where a pin or the op did."""
        ops = self.problem.patterns[pattern]
        groups = {ops.groups[factor] for factor in factors}
        for number, decision in enumerate(self.plan, 1):
            if isinstance(decision, Shard) and claim_of(ops, decision, self.problem.resolution_place) is None:
                continue
            if isinstance(decision, Shard) and decision.axis == axis and decision.group in groups:
                return number
        return 0

    def holder(self, pattern: int, axis: int) -> tuple[int, str]:
        """(decision number, name of the dimension) that uses an axis in an op; (0, "") if none does."""
        ops = self.problem.patterns[pattern]
        for factor, axes in enumerate(self.op_shardings[pattern].factor_axes):
            if axis in axes:
                return self.giver(pattern, [factor], axis), self.problem.dimensions.groups[ops.groups[factor]].name
        return 0, ""

    def why_not(self, pattern: int, number: int) -> str:
        """Why a decision about an op's dimension does not split it there; empty if it does, or a pin does."""
        ops, decision = self.problem.patterns[pattern], self.plan[number - 1]
        if not isinstance(decision, Shard):
            return ""
        axis, size = decision.axis, self.problem.mesh.sizes[decision.axis]
        factors = [factor for factor, group in enumerate(ops.groups) if group == decision.group]
        axes = self.op_shardings[pattern].factor_axes
        if claim_of(ops, decision, self.problem.resolution_place) is None:
            return "it leaves these ops to other decisions"
        if any(axis in axes[factor] for factor in factors):
            giver = self.giver(pattern, factors, axis)
            return "" if giver in (0, number) else f"decision {giver} splits it already"
        holder, name = self.holder(pattern, axis)
        if name:
            return f"{self.problem.mesh.names[axis]} is taken there by {name}" + (
                f", decision {holder}" if holder else ""
            )
        for k, other in enumerate(self.plan, 1):
            if isinstance(other, Replicate) and other.role == ops.role and other.axis == axis:
                return f"{self.numbered(k)} keeps it replicated"
        if all(ops.form.kinds[factor] is FactorKind.BLOCKED for factor in factors):
            return "the operation needs it whole"
        for factor in factors:
            ways = prod(self.problem.mesh.sizes[a] for a in axes[factor])
            if ops.form.sizes[factor] % (ways * size):
                return f"{ops.form.sizes[factor] // ways} cannot be split {size} ways"
        return "it is the inner part of a reshaped dimension, whose outer part is not fully split"

    def place(self, op: int, inside: str = "") -> str:
        return self.source.location(op, inside) or self.problem.program.ops[op].name

    def collective_item(self, number: int, share: float = 1.0) -> Item:
        use = self.collectives[number]
        axes = "+".join(use.over(self.problem.mesh.names))
        text, count = f"{use.kind} over {axes}", use.count * share
        return Item(text, self.place(use.op, use.place), count, use.seconds * share, round(use.bytes))

    # -- a collective represents those on all similar arrays -----------------------------------------------------

    @cached_property
    def _alike(self) -> dict[int, tuple[int, ...]]:
        """First value of an array item -> all its values."""
        return {item.values[0]: tuple(item.values) for item in self.evaluator.items.arrays}

    @cached_property
    def _ops_alike(self) -> dict[tuple[int, str, float], list[int]]:
        numbers: dict[tuple[int, str, float], list[int]] = defaultdict(list)
        for number, (op, pattern) in enumerate(zip(self.problem.program.ops, self.problem.op_pattern, strict=True)):
            numbers[pattern, op.name, op.flops].append(number)
        return numbers

    def share_of_values(self, use: CollectiveUse, values: set[int]) -> float:
        """Fraction of a collective's runs that move these arrays."""
        alike = self._alike.get(use.value, (use.value,))
        return len(values.intersection(alike)) / len(alike)

    def share_of_ops(self, use: CollectiveUse, ops: set[int]) -> float:
        """Fraction of a collective's runs that serve these ops: those that read the arrays, or make them partial."""
        program, patterns = self.problem.program, self.problem.op_pattern
        if use.value in program.ops[use.op].operands:
            readers = [
                op for value in self._alike.get(use.value, (use.value,)) for op, _ in program.users[value]
                if patterns[op] == patterns[use.op]
            ]  # fmt: skip
        else:
            op = program.ops[use.op]
            readers = self._ops_alike[patterns[use.op], op.name, op.flops]
        return sum(op in ops for op in readers) / len(readers) if readers else 0.0


# ---------------------------------------------------------------- explanations
# The data of an explanation. JSON schema "toast.explain/1"; field names are stable.

SCHEMA = "toast.explain/1"


@dataclass(frozen=True)
class Change:
    """The plan's cost if one thing were different: seconds a step and bytes per device, of the whole changed plan.

    what: the difference, in words. note: its other effects.
    """

    what: str
    step_seconds: float
    compute_seconds: float
    communication_seconds: float
    peak_bytes: int
    fits: bool
    note: str = ""


@dataclass(frozen=True)
class Item:
    """A listed op, collective or array. seconds and bytes are 0 if they do not apply."""

    text: str
    detail: str
    count: float = 1
    seconds: float = 0.0
    bytes: int = 0


@dataclass(frozen=True)
class Explanation:
    """The answer to one question about a plan, whose figures are at the top.

    Attributes:
        subject: what is explained ("plan", "decision 3"). sentences: the reasons, in words. items: the list with the
            title `listed`. changes: other plans, with the title `alternatives`.
    """

    program: str
    mesh: str
    axes: dict[str, int]
    summary: str
    step_seconds: float
    peak_bytes: int
    limit_bytes: int
    subject: str
    sentences: list[str]
    listed: str = ""
    items: list[Item] = field(default_factory=list)
    alternatives: str = ""
    changes: list[Change] = field(default_factory=list)
    schema: str = SCHEMA

    def to_json(self) -> dict[str, Any]:
        facts = asdict(self)
        return {"schema": facts.pop("schema"), **facts}


# ---------------------------------------------------------------- plans of stored reports
# The plan of a stored report: JSON and a problem in, its decisions out.


def stored_request(path: str) -> dict[str, Any]:
    """The mesh shape of a stored report and its program's rewriting, as fields of `Request`. Raises InputError for a
    file that is not a report."""
    report = read_report(path)
    program = report.program
    return {
        "mesh_shape": written_shape(report.mesh.axes),
        "parted": program.parted,
        "microbatches": max(1, program.microbatches),
        "recompute": program.recompute if program.recompute in list(Recompute) else None,
        "offload": program.offload if program.offload in list(Offload) else None,
    }


def stored_plan(path: str, problem: Problem) -> tuple[Problem, Plan]:
    """The decisions of a stored report, and their problem: `problem`, with layers separated if the plan decides them
    separately. Raises InputError if they do not belong to the program."""
    decisions = read_report(path).plan.decisions
    names = {group.name: k for k, group in enumerate(problem.dimensions.groups)}
    # Groups are separated of which decisions name only the first or last class (`ff:first`).
    targets = [decision.target for decision in decisions]
    partly_named = {target.rpartition(":")[0] for target in targets if target not in names and ":" in target}
    if separated := sorted(names[name] for name in partly_named if name in names):
        problem = unmirror(problem, separated)[0]
        names = {group.name: k for k, group in enumerate(problem.dimensions.groups)}
    plan = [_decision(decision, names, problem, path) for decision in decisions]
    return problem, problem.canonical(tuple(plan))


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
