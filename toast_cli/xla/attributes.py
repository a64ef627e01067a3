"""What MLIR attributes, types and locations say, as plain data."""

from __future__ import annotations

from typing import Any

from toast_cli.xla.native import ir, sdy, stablehlo


def sharding_rule(attribute: Any) -> tuple[Any, ...]:
    """A populated `sdy.sharding_rule` as plain data: sizes, operand and result factors, reduction, need-replication,
    permutation.
    """
    rule = sdy.OpShardingRuleAttr(attribute)

    def mappings(tensors: Any) -> tuple[tuple[tuple[int, ...], ...], ...]:
        return tuple(
            tuple(tuple(sdy.DimMappingAttr(d).factor_indices) for d in sdy.TensorMappingAttr(t).dim_mappings)
            for t in tensors
        )

    return (
        tuple(rule.factor_sizes),
        mappings(rule.operand_mappings),
        mappings(rule.result_mappings),
        frozenset(rule.reduction_factors),
        frozenset(rule.need_replication_factors),
        frozenset(rule.permutation_factors),
    )


def is_custom_rule(attribute: Any) -> bool:
    """Whether a sharding rule was written by whoever made the program, for a custom call, rather than populated by
    Shardy.
    """
    return bool(sdy.OpShardingRuleAttr(attribute).is_custom)


def dot_dimensions(attribute: Any) -> tuple[list[int], list[int], list[int], list[int]]:
    """Of `#stablehlo.dot`: batching dimensions of left and right, contracting dimensions of left and right."""
    dims = stablehlo.DotDimensionNumbers(attribute)
    return (
        list(dims.lhs_batching_dimensions), list(dims.rhs_batching_dimensions),
        list(dims.lhs_contracting_dimensions), list(dims.rhs_contracting_dimensions),
    )  # fmt: skip


def dot_dimension_numbers(dims: list[list[int]], context: Any) -> Any:
    """The attribute of these dimensions, in the order of `dot_dimensions`."""
    left, right, contracted_left, contracted_right = dims
    return stablehlo.DotDimensionNumbers.get(left, right, contracted_left, contracted_right, context=context)


def shape_and_element_type(kind: Any) -> tuple[tuple[int, ...], str] | None:
    """Shape and printed element type of a ranked tensor type; None for a token."""
    if isinstance(kind, ir.RankedTensorType):
        return tuple(kind.shape), str(kind.element_type)
    return None


def location_name(location: Any) -> str:
    """The name in a `NameLoc` (`params['w']`), else an empty string."""
    text = str(location)
    return text[5:-2].replace('\\"', '"') if text.startswith('loc("') and text.endswith('")') else ""
