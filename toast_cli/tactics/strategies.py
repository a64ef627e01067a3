"""Expert strategies: tactics put together over all mesh axes, as people write them by hand.

Enters: a `Problem`. Leaves: plans by name; any name is what `--strategy` takes. Of several axes the last is the tensor
axis.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

from toast_cli.errors import UsageError
from toast_cli.plan.decisions import Plan
from toast_cli.plan.mirrors import taken_apart
from toast_cli.plan.problem import Problem
from toast_cli.tactics.model import data_group, weight_groups
from toast_cli.tactics.wishes import compose, parse_wishes, place

# Those a report compares a plan with. What only suits some programs is left out where it does not.
BASELINES = ("data-parallel", "fsdp", "megatron", "fsdp+expert", "data-parallel x megatron", "fsdp x megatron")
_WITHOUT_BATCH = ("context", "edge", *BASELINES)
# All that `toast compare` tries.
STRATEGIES = (
    "data-parallel", "zero2", "fsdp", "megatron", "megatron+sequence", "context", "expert", "edge", "spatial",
    "data-parallel+expert", "fsdp+expert", "data-parallel x megatron", "zero2 x megatron", "fsdp x megatron",
    "fsdp x megatron+sequence", "fsdp x context", "fsdp+expert x megatron", "edge x megatron",
)  # fmt: skip
# Further products that an expert would write, which a search starts from as well.
PRODUCTS = ("context x megatron", "data-parallel x context", "data-parallel x spatial", "fsdp x spatial")

# Pairs of tactics that an expert puts on two parts of a mesh, whichever part is whose.
PAIRS = tuple(
    (one, other)
    for one in ("data-parallel", "fsdp", "context", "spatial")
    for other in ("megatron", "context", "spatial")
    if one != other and (one, other) != ("spatial", "context")
)


def strategies(problem: Problem) -> dict[str, Plan]:
    """The baselines that make sense here, name -> plan."""
    has_batch = any(group.role == "batch" for group in problem.dimensions.groups)
    return applicable(problem, BASELINES if has_batch else _WITHOUT_BATCH)[0]


def applicable(problem: Problem, names: tuple[str, ...] = STRATEGIES) -> tuple[dict[str, Plan], dict[str, str]]:
    """(name -> plan of the strategies that apply, each plan once; name -> why not of the others)."""
    found: dict[str, Plan] = {}
    reasons: dict[str, str] = {}
    for name in names:
        try:
            plan = strategy(problem, name)
        except UsageError as error:
            reasons[name] = error.what
            continue
        same = next((other for other, known in found.items() if known == plan), None)
        if same is not None:
            reasons[name] = f"here the same as {same}"
        elif plan:
            found[name] = plan
    return found, reasons


def products(problem: Problem) -> dict[str, Plan]:
    """Pairs of tactics that apply, each on one part of the mesh's axes, name (`context:data+megatron:model`) -> plan;
    each plan once."""
    names = [name for name, size in zip(problem.mesh.names, problem.mesh.sizes, strict=True) if size > 1]
    cuts = [(names[:k], names[k:]) for k in range(1, len(names))]
    listed = (
        f"{one}:{','.join(a)}+{other}:{','.join(b)}"
        for first, rest in cuts
        for one, other in PAIRS
        for a, b in ((first, rest), (rest, first))
    )
    return applicable(problem, tuple(listed))[0]


def strategy(problem: Problem, name: str, first: int | None = None) -> Plan:
    """The plan of one strategy. Raises UsageError where it does not apply, or the mesh has too few axes.

    Args:
        first: of a strategy that has axes for two tactics, how many (of those with several devices) are the first
            one's; None: all but one.
    """
    if problem.mirrored is not None:  # what a strategy is does not depend on what the search has taken apart
        alike, parts = problem.mirrored
        return problem.canonical(taken_apart(strategy(alike, name, first), parts))
    wanted = parse_wishes(strategy=name).wishes
    axes = [k for k, size in enumerate(problem.mesh.sizes) if size > 1]
    names = [problem.mesh.names[k] for k in axes]
    if not axes:
        raise UsageError("the mesh has one device", where="--strategy")
    leading = [k for k, wish in enumerate(wanted) if k == 0 or not wish.tactic.companion]
    if first is not None and len(leading) == 2 and 0 < first < len(names):
        shares = dict(zip(leading, (names[:first], names[first:]), strict=True))
        wanted = tuple(replace(w, axes=tuple(shares[k])) if k in shares else w for k, w in enumerate(wanted))
    placed = [(wish, tuple(axes[a] for a in over)) for wish, over in place(wanted, names)]
    return problem.canonical(compose(problem, placed))


def starting_plans(problem: Problem) -> list[Plan]:
    """What a search may start from: every strategy and product of two that applies, with every number of axes for the
    first of its two tactics.
    """
    found: list[Plan] = []
    for name in (*STRATEGIES, *PRODUCTS) if problem.decisions.choices else ():
        for first in range(1, max(2, len(problem.mesh.sizes))):
            with suppress(UsageError):
                found.append(strategy(problem, name, first))
    return list(dict.fromkeys(found))


__all__ = [
    "BASELINES",
    "STRATEGIES",
    "applicable",
    "data_group",
    "products",
    "starting_plans",
    "strategies",
    "strategy",
    "weight_groups",
]
