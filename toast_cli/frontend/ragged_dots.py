"""Products of ragged groups (`chlo.ragged_dot`): their dimension numbers and sharding rule.

Consecutive rows belong to groups; `group_sizes` states how many rows each group has. The ragged dimension is one of
three kinds (as in `jax.lax.ragged_dot_general`):
* not contracted: `[m, k] x [g, k, n] -> [m, n]`, each row with the matrix of its group (a mixture of experts);
* contracted: `[m, k] x [m, n] -> [g, k, n]`, a product for each group (the gradient of the experts' weights);
* a batch dimension: `[b, m, k] x [b, k, n] -> [b, m, n]`.

Groups are a factor like any other: a device that has the matrices of some groups computes the rows of these, so the
result is a partial sum, as it is along `k`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from toast_cli.program.model import Rule, ValueFactors
from toast_cli.program.ops import RAGGED_DOT
from toast_cli.xla import create, ir

Shape = tuple[int, ...]
Dims = tuple[int, ...]
NUMBERS = "ragged_dot_dimension_numbers"


@dataclass(frozen=True)
class RaggedDot:
    """Dimension numbers. left, right: of the two operands. ragged: the left operand's dimension of rows. group: the
    right operand's dimension of groups, or -1. rank: of the left operand."""

    left_batch: Dims
    right_batch: Dims
    left_contracting: Dims
    right_contracting: Dims
    ragged: int
    group: int
    rank: int

    @property
    def contracts_rows(self) -> bool:
        return self.ragged in self.left_contracting

    @property
    def left_free(self) -> Dims:
        """Dimensions that only the left operand and the result have."""
        return tuple(d for d in range(self.rank) if d not in self.left_batch + self.left_contracting)

    @property
    def right_ragged(self) -> int:
        """The right operand's dimension of rows; -1 if it has none."""
        for left, right in ((self.left_contracting, self.right_contracting), (self.left_batch, self.right_batch)):
            if self.ragged in left:
                return right[left.index(self.ragged)]
        return -1

    @property
    def result_ragged(self) -> int:
        """The result's dimension of rows, if these are not contracted."""
        return (self.left_batch + self.left_free).index(self.ragged)

    @property
    def prefix(self) -> Dims:
        """Dimensions of the left operand that `group_sizes` has in front of the groups, if any."""
        if self.ragged in self.left_batch:
            return self.left_batch[: self.left_batch.index(self.ragged)]
        others = self.left_contracting if self.contracts_rows else self.left_free
        return self.left_batch + others[: others.index(self.ragged)]


def ragged_dot(operation: Any) -> RaggedDot | None:
    """The dimension numbers of a `chlo.ragged_dot`; None for numbers that do not fit its arrays."""
    text = str(operation.attributes[NUMBERS])

    def dims(name: str) -> Dims:
        found = re.search(rf"\b{name}_dimensions = \[([^\]]*)\]", text)
        return tuple(int(n) for n in found[1].split(",") if n.strip()) if found else ()

    left, right, sizes = (tuple(operand.type.shape) for operand in operation.operands)
    ragged, group = dims("lhs_ragged"), dims("rhs_group")
    numbers = RaggedDot(
        dims("lhs_batching"), dims("rhs_batching"), dims("lhs_contracting"), dims("rhs_contracting"),
        ragged[0] if ragged else -1, group[0] if group else -1, len(left),
    )  # fmt: skip
    lefts, rights = (
        numbers.left_batch + numbers.left_contracting,
        numbers.right_batch + numbers.right_contracting + group,
    )
    fits = (
        len(ragged) == 1
        and len(group) == (ragged[0] not in lefts)
        and len(numbers.left_batch) == len(numbers.right_batch)
        and len(numbers.left_contracting) == len(numbers.right_contracting)
        and all(
            len(set(of)) == len(of) and all(0 <= d < len(shape) for d in of)
            for of, shape in ((lefts, left), (rights, right))
        )
        and 0 <= ragged[0] < len(left)
    )
    if not fits or sizes[:-1] not in ((), tuple(left[d] for d in numbers.prefix)) or not sizes:
        return None
    return numbers


def ragged_rule(operation: Any) -> Rule | None:
    """The rule of a `chlo.ragged_dot`. `group_sizes` is replicated along the groups."""
    at = ragged_dot(operation)
    if at is None:
        return None
    left, right, sizes = (tuple(operand.type.shape) for operand in operation.operands)
    made = tuple(operation.results[0].type.shape)
    lengths: list[int] = []

    def factor(length: int) -> tuple[int]:
        lengths.append(length)
        return (len(lengths) - 1,)

    of_left: ValueFactors = tuple(map(factor, left))
    shared = dict(zip(at.right_batch + at.right_contracting, at.left_batch + at.left_contracting, strict=True))
    of_right: ValueFactors = tuple(of_left[shared[d]] if d in shared else factor(n) for d, n in enumerate(right))
    groups = of_right[at.group] if at.group >= 0 else factor(sizes[-1]) if at.contracts_rows else ()
    free = tuple(of_right[d] for d in range(len(right)) if d not in shared and d != at.group)
    rows = tuple(of_left[d] for d in at.left_batch + at.left_free)
    result: ValueFactors = (*((groups,) if at.contracts_rows else ()), *rows, *free)
    if tuple(lengths[f] for (f,) in result) != made:
        return None
    prefix = tuple(of_left[d] for d in at.prefix) if len(sizes) > 1 else ()
    summed = {f for d in at.left_contracting for f in of_left[d]} | set(groups if at.group >= 0 else ())
    # If each batch has its own group sizes, rows of a group begin at another place in each batch.
    whole = frozenset(groups if prefix else ())
    return Rule(
        tuple(lengths), (of_left, of_right, (*prefix, ())), (result,), frozenset(summed) - whole, need_replication=whole
    )


def group_factor(rule: Rule, at: RaggedDot) -> int:
    """The factor of the groups; -1 if neither operands nor the result have such a dimension."""
    if at.group >= 0:
        return rule.operands[1][at.group][0]
    return rule.results[0][0][0] if at.contracts_rows else -1


def ragged_flops(operation: Any, rule: Rule) -> float:
    """FLOPs: two for each pair of numbers that are multiplied; each row is multiplied with one group's matrix."""
    at = ragged_dot(operation)
    if at is None:
        return 0.0
    of_groups = group_factor(rule, at)
    flops = 2.0
    for factor, size in enumerate(rule.sizes):
        flops *= 1 if factor == of_groups else size
    return flops


def general_ragged_dot(operation: Any) -> list[Any]:
    """Converts an `mhlo.ragged_dot`, as HLO is converted to, to a `chlo.ragged_dot`."""
    written = str(operation.attributes[NUMBERS])
    inner = re.sub(r"dot_dimension_numbers = #mhlo\.dot<([^>]*)>", r"\1", written).replace("#mhlo", "#chlo")
    attributes = {NUMBERS: ir.Attribute.parse(inner)}
    if "precision_config" in operation.attributes:
        text = str(operation.attributes["precision_config"]).replace("#mhlo", "#chlo")
        attributes["precision_config"] = ir.Attribute.parse(text)
    types = [result.type for result in operation.results]
    return create(RAGGED_DOT, list(operation.operands), types, attributes, operation)
