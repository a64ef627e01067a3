"""Converts MLIR attributes, types and locations to plain data."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from toast_cli.xla.native import ir, sdy, stablehlo

_FULL_OF = re.compile(r'dense<([^\["<>]+)>')
_COMPLEX = re.compile(r"\(([-+.\de]+),([-+.\de]+)\)", re.IGNORECASE)


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
    """True if a sharding rule comes from the program, for a custom call, rather than from Shardy."""
    return bool(sdy.OpShardingRuleAttr(attribute).is_custom)


def dot_dimensions(attribute: Any) -> tuple[list[int], list[int], list[int], list[int]]:
    """Dimensions of `#stablehlo.dot`: batching of left and right, contracting of left and right."""
    dims = stablehlo.DotDimensionNumbers(attribute)
    return (
        list(dims.lhs_batching_dimensions), list(dims.rhs_batching_dimensions),
        list(dims.lhs_contracting_dimensions), list(dims.rhs_contracting_dimensions),
    )  # fmt: skip


def dot_dimension_numbers(dims: list[list[int]], context: Any) -> Any:
    """The attribute of these dimensions, in the order of `dot_dimensions`."""
    left, right, contracted_left, contracted_right = dims
    return stablehlo.DotDimensionNumbers.get(left, right, contracted_left, contracted_right, context=context)


@dataclass(frozen=True)
class PickedDimensions:
    """Dimension numbers of a gather's operand, or of each input of a scatter.

    Attributes:
        slices: window dimensions of the result (of the updates).
        single: collapsed (inserted) dimensions of the operand, of which one element is picked.
        batching: batching dimensions of the operand.
        counted: the matching dimensions of the indices, in the same order.
        mapped: dimensions of the operand that the components of an index refer to, in order.
        vector: the index vector dimension of the indices.
    """

    slices: tuple[int, ...]
    single: tuple[int, ...]
    batching: tuple[int, ...]
    counted: tuple[int, ...]
    mapped: tuple[int, ...]
    vector: int


def picked_dimensions(attribute: Any) -> PickedDimensions:
    """The dimension numbers in `#stablehlo.gather` or `#stablehlo.scatter`."""
    if stablehlo.GatherDimensionNumbers.isinstance(attribute):
        g = stablehlo.GatherDimensionNumbers(attribute)
        return PickedDimensions(
            tuple(g.offset_dims), tuple(g.collapsed_slice_dims), tuple(g.operand_batching_dims),
            tuple(g.start_indices_batching_dims), tuple(g.start_index_map), int(g.index_vector_dim),
        )  # fmt: skip
    s = stablehlo.ScatterDimensionNumbers(attribute)
    return PickedDimensions(
        tuple(s.update_window_dims), tuple(s.inserted_window_dims), tuple(s.input_batching_dims),
        tuple(s.scatter_indices_batching_dims), tuple(s.scattered_dims_to_operand_dims), int(s.index_vector_dim),
    )  # fmt: skip


def with_picked_dimensions(attribute: Any, picked: PickedDimensions) -> Any:
    """An attribute of the same kind with these dimension numbers."""
    windows, single, batching, counted, mapped = (
        list(numbers) for numbers in (picked.slices, picked.single, picked.batching, picked.counted, picked.mapped)
    )
    gather = stablehlo.GatherDimensionNumbers.isinstance(attribute)
    kind = stablehlo.GatherDimensionNumbers if gather else stablehlo.ScatterDimensionNumbers
    return kind.get(windows, single, batching, counted, mapped, picked.vector, context=attribute.context)


def shape_and_element_type(kind: Any) -> tuple[tuple[int, ...], str] | None:
    """Shape and printed element type of a ranked tensor type; None for a token."""
    if isinstance(kind, ir.RankedTensorType):
        return tuple(kind.shape), str(kind.element_type)
    return None


def constant_number(operation: Any) -> str | None:
    """The value of a splat `stablehlo.constant`, as text; None for other constants."""
    if isinstance(operation.results[0].type.element_type, ir.ComplexType):
        # Python cannot hold the attribute, and printing an operation takes time proportional to its function's length.
        text = operation.get_asm(large_elements_limit=1)
    else:
        value = operation.attributes["value"]
        text = str(value) if isinstance(value, ir.DenseElementsAttr) and value.is_splat else ""
    found = _FULL_OF.search(text)
    return found[1] if found else None


def splat_number(value: Any) -> Any | None:
    """The number that all elements of a constant, or of a broadcast constant, are; None for other values."""
    owner = value.owner
    while not isinstance(owner, ir.Block) and owner.name == "stablehlo.broadcast_in_dim":
        owner = owner.operands[0].owner
    if isinstance(owner, ir.Block) or owner.name != "stablehlo.constant":
        return None
    kind = owner.results[0].type.element_type
    if isinstance(kind, ir.ComplexType):
        found = _COMPLEX.fullmatch(constant_number(owner) or "")
        return complex(float(found[1]), float(found[2])) if found else None
    literal = owner.attributes["value"] if isinstance(kind, ir.FloatType | ir.IntegerType) else None
    return literal.get_splat_value().value if isinstance(literal, ir.DenseElementsAttr) and literal.is_splat else None


def holds_resource(constant: Any) -> bool:
    """True if the value of a `stablehlo.constant` is a `dense_resource`."""
    try:
        ir.DenseResourceElementsAttr(constant.attributes["value"])
    except (TypeError, ValueError):  # the bindings raise TypeError for complex numbers, ValueError for other attributes
        return False
    return True


def location_name(location: Any) -> str:
    """The name in a `NameLoc` (`params['w']`), else an empty string."""
    text = str(location)
    return text[5:-2].replace('\\"', '"') if text.startswith('loc("') and text.endswith('")') else ""
