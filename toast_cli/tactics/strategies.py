"""The expert strategies: data parallelism, FSDP (ZeRO-3), Megatron, and FSDP with Megatron."""

from __future__ import annotations

from collections import defaultdict
from math import prod

from toast_cli.dimensions.model import SlotKind
from toast_cli.plan.decisions import Plan, Shard
from toast_cli.plan.problem import Problem


def strategies(problem: Problem) -> dict[str, Plan]:
    """Every expert strategy that makes sense here: name -> plan. Several axes: the last one is the tensor axis."""
    axes = [a for a, size in enumerate(problem.mesh.sizes) if size > 1]
    if not axes:
        return {}
    found = {
        "data-parallel": data_parallel(problem, axes),
        "fsdp": fsdp(problem, axes),
        "megatron": megatron(problem, axes),
    }
    if len(axes) > 1:
        found["data-parallel x megatron"] = problem.canonical(
            data_parallel(problem, axes[:-1]) + megatron(problem, axes[-1:])
        )
        found["fsdp x megatron"] = fsdp_megatron(problem, axes[:-1], axes[-1:])
    return {name: plan for name, plan in found.items() if plan}


def data_parallel(problem: Problem, axes: list[int]) -> Plan:
    """The batch over `axes`: of the groups no weight has, the one that divides most of the work."""
    batch = batch_group(problem, axes)
    return () if batch is None else tuple(_shard(problem, batch, axis) for axis in axes)


def fsdp(problem: Problem, axes: list[int]) -> Plan:
    """Data parallelism with weights and optimizer state split over the same axes at rest (ZeRO stage 3)."""
    plan = data_parallel(problem, axes)
    if not plan:
        return ()
    rest = [g for g, _ in weight_groups(problem)]
    return problem.canonical(plan + tuple(_shard(problem, g, axis) for g in rest for axis in axes))


def megatron(problem: Problem, axes: list[int]) -> Plan:
    """Weights split along every dimension but the one they all share (the residual stream), activations with them."""
    inner = [g for g, _ in weight_groups(problem)][1:]
    return tuple(_shard(problem, g, axis) for g in inner for axis in axes)


def fsdp_megatron(problem: Problem, data: list[int], model: list[int]) -> Plan:
    """FSDP over `data`, Megatron over `model`."""
    plan = data_parallel(problem, data)
    if not plan:
        return ()
    hub = [g for g, _ in weight_groups(problem)][:1]
    return problem.canonical(
        plan + megatron(problem, model) + tuple(_shard(problem, g, axis) for g in hub for axis in data)
    )


def batch_group(problem: Problem, axes: list[int]) -> int | None:
    """The group absent from all weights along which most arithmetic can be split over `axes`.

    Of groups that are within a hundredth of each other the first without a conflict: batch rather than sequence.
    """
    taken = {g for g, _ in weight_groups(problem)}
    ways = prod(problem.mesh.sizes[a] for a in axes)
    work: dict[int, float] = defaultdict(float)
    for op, number in zip(problem.program.ops, problem.op_pattern, strict=True):
        if not op.flops:
            continue
        pattern = problem.patterns[number]
        for group in {
            group
            for slot, group in enumerate(pattern.groups)
            if group not in taken
            and pattern.form.kinds[slot] != SlotKind.BLOCKED
            and pattern.form.sizes[slot] % ways == 0
        }:
            work[group] += op.flops * op.trips
    most = max(work.values(), default=0.0)
    best = [g for g in sorted(work) if work[g] >= 0.99 * most]
    return min(best, key=lambda g: len(problem.dimensions.groups[g].resolutions), default=None)


def weight_groups(problem: Problem) -> list[tuple[int, int]]:
    """(group, bytes of weights that have it), the most widespread first."""
    return sorted(problem.weight_bytes.items(), key=lambda item: (-item[1], item[0]))


def _shard(problem: Problem, group: int, axis: int) -> Shard:
    return Shard(group, axis, (0,) * len(problem.dimensions.groups[group].resolutions))
