"""Advice on padding dimensions that no mesh axis divides: a problem goes in, sentences come out."""

from __future__ import annotations

from math import lcm

from toast_cli.plan.problem import Problem
from toast_cli.program.roles import WEIGHTS
from toast_cli.quantities import format_count

# Minimum fraction of all weights' bytes in weights with a dimension, for advice about it.
SHARE = 0.05
# Maximum padding, as a fraction of the dimension: six heads do not become eight.
MOST_PADDING = 1 / 8
# Long dimensions are padded to whole tiles: 128 is the edge of a TPU's matrix unit.
LONG, TILE = 1024, 128


def padding_advice(problem: Problem) -> list[str]:
    """A sentence for the batch and each widespread dimension of the weights that is not sharded because of its size."""
    axes = [size for size in problem.mesh.sizes if size > 1]
    program, sizes = problem.program, problem.dimensions.class_sizes
    weights = sum(
        program.values[argument.value].bytes
        for argument, role in zip(program.arguments, problem.argument_role, strict=True)
        if problem.roles[role] == WEIGHTS
    )
    advice = []
    for number, group in enumerate(problem.dimensions.groups):
        worth_it = group.role == "batch" or problem.weight_bytes.get(number, 0) > SHARE * weights
        if (
            group.role == "layers"
            or not worth_it
            or not axes
            or any(sizes[c] % axis == 0 for c in group.classes for axis in axes)
        ):
            continue
        padded = padded_size(group.size, axes)
        if padded - group.size <= MOST_PADDING * group.size:
            advice.append(
                f"{group.name} ({format_count(group.size)}) divides by no mesh axis and stays whole; pad it to "
                f"{format_count(padded)} to shard it"
            )
    return advice


def padded_size(size: int, axes: list[int]) -> int:
    """The next divisible size: for a long dimension by all axes, in whole tiles; else by the smallest axis."""
    step = lcm(TILE, *axes) if size >= LONG else min(axes)
    return -(-size // step) * step
