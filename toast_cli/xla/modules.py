"""MLIR modules: contexts, parsing, writing, passes and searches; attributes, types and locations as plain data."""

from __future__ import annotations

import io
import re
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from toast_cli.program.ops import BROADCAST_IN_DIM, CONSTANT
from toast_cli.xla.native import (
    ADVANCE,
    SKIP,
    PassManager,
    chlo,
    ir,
    jax_mlir_ext,
    jax_native,
    mhlo,
    refusing,
    sdy,
    stablehlo,
    tpu,
)


def make_context() -> Any:
    """A fresh `ir.Context` with every dialect a JAX program may hold: func, stablehlo, chlo, sdy, mhlo and upstream
    ones. It works in the thread that uses it, so that a fork of the process can use it too.
    """
    context = ir.Context()
    context.enable_multithreading(False)
    registry = ir.DialectRegistry()
    jax_mlir_ext.register_dialects(registry)
    context.append_dialect_registry(registry)
    context.dialects["func"]  # upstream ones are loaded where a program has them, which takes a tenth of the time
    sdy.register_dialect(context)
    mhlo.register_mhlo_dialect(context)
    chlo.register_dialect(context)
    stablehlo.register_dialect(context)
    return context


@refusing
def parse_module(context: Any, program: bytes | str) -> Any:
    """An `ir.Module` from MLIR text or bytecode.

    Raises `ir.MLIRError` (with `error_diagnostics`) when it does not parse, RuntimeError where its sizes are absurd.
    """
    return ir.Module.parse(program, context)


@refusing
def parse_kernel(body: bytes) -> Any:
    """A Pallas kernel for TPU from MLIR bytecode, in a context of its own. Raises as `parse_module` does; hostile bytes
    may abort the process."""
    context = ir.Context()
    context.enable_multithreading(False)
    context.allow_unregistered_dialects = True
    tpu.register_dialect(context)
    return ir.Module.parse(body, context)


@refusing
def parse_portable_artifact(context: Any, artifact: bytes) -> Any:
    """An `ir.Module` from a StableHLO portable artifact. Raises `ir.MLIRError`; hostile bytes may abort the process."""
    return stablehlo.deserialize_portable_artifact(context, artifact)


def write_portable_artifact(bytecode: bytes) -> bytes:
    """A StableHLO portable artifact, of this jaxlib's version, of MLIR text or bytecode; Shardy's shardings stay in
    it.
    """
    module = parse_module(make_context(), bytecode)
    return bytes(jax_native.mlir.serialize_portable_artifact(module, stablehlo_version(), True))


def stablehlo_version() -> str:
    """The version of StableHLO that this jaxlib writes, `1.17.0`."""
    return str(stablehlo.get_current_version())


def write_bytecode(module: Any) -> bytes:
    """A module, or its operation, as MLIR bytecode, locations included."""
    buffer = io.BytesIO()
    module.operation.write_bytecode(buffer)
    return buffer.getvalue()


@refusing
def run_passes(module: Any, pipeline: str) -> None:
    """Runs a pass pipeline, e.g. `func.func(sdy-populate-op-sharding-rules)`, on the module, in place.

    The module is verified once, before, and not again after each pass, which takes a third of the time.
    Raises `ir.MLIRError` when the module is malformed or a pass fails. A failed internal check aborts the process: see
    `docs` of the pass before use.
    """
    manager = PassManager.parse(f"builtin.module({pipeline})", module.context)
    manager.enable_verifier(False)
    module.operation.verify()
    manager.run(module.operation)


def walk_ops(root: Any, *names: str, inner_first: bool = False) -> list[Any]:
    """All operations with one of these names under `root`, nested ones included, in program order. inner_first: an
    operation comes after those nested in it, else before."""
    operations: list[Any] = []
    wanted = frozenset(names)

    def visit(operation: Any) -> Any:
        if operation.name in wanted:
            operations.append(operation)
        return ADVANCE

    root.operation.walk(visit, ir.WalkOrder.POST_ORDER if inner_first else ir.WalkOrder.PRE_ORDER)
    return operations


def operations_in(root: Any, *, outside: str = "") -> list[Any]:
    """An operation and all nested in it, in program order. outside: name of operations whose insides are left out."""
    operations: list[Any] = []

    def visit(operation: Any) -> Any:
        operations.append(operation)
        return SKIP if operation.name == outside else ADVANCE

    root.operation.walk(visit, ir.WalkOrder.PRE_ORDER)
    return operations


def string_of(attribute: Any) -> str:
    """The text of a string attribute. Bytes that are no UTF-8 become replacement characters."""
    return bytes(ir.StringAttr(attribute).value_bytes).decode("utf-8", "replace")


def call_target(call: Any) -> str:
    """The target of a custom call."""
    return string_of(call.attributes["call_target_name"])


def holders(operation: Any) -> Iterator[Any]:
    """The operations in whose regions an operation is, the innermost first; the last one is the module."""
    while (holder := operation.parent) is not None:
        operation = holder.operation
        yield operation


def terminator(block: Any) -> Any:
    """The last operation of a block."""
    return block.operations[len(block.operations) - 1].operation


def outer_operands(operations: Iterable[Any]) -> list[tuple[Any, int, Any]]:
    """(operation, operand number, value) of what operations, and those nested in them, read and do not make."""
    within = [inner for operation in operations for inner in operations_in(operation)]
    defined = {value for inner in within for value in inner.results}
    blocks = [block for inner in within for region in inner.regions for block in region]
    defined.update(value for block in blocks for value in block.arguments)
    return [(reader, k, value) for reader in within for k, value in enumerate(reader.operands) if value not in defined]


def create(name: str, operands: list[Any], results: list[Any], attributes: dict[str, Any], before: Any) -> list[Any]:
    """Results of a new operation in front of `before`, at the same source location."""
    ip = ir.InsertionPoint(before)
    operation = ir.Operation.create(
        name, results=results, operands=operands, attributes=attributes, loc=before.location, ip=ip
    )
    return list(operation.results)


def like(operation: Any, operands: list[Any]) -> list[Any]:
    """Results of a new operation in front of this one, with the same name, attributes and types of results."""
    types = [result.type for result in operation.results]
    return create(operation.name, operands, types, attributes_of(operation), operation)


def attributes_of(operation: Any) -> dict[str, Any]:
    return {name: operation.attributes[name] for name in operation.attributes}


def attribute_key(operation: Any) -> Hashable:
    """What operations of one name with equal attributes share."""
    try:
        return tuple(attributes_of(operation).items())
    except TypeError:  # complex numbers, which Python cannot hold
        return printed(operation)


def inline_function(function: Any, arguments: Iterator[Any] | list[Any], call: Any) -> list[Any]:
    """Clones the body of `function` (one block) in front of `call`; returns the values it returned.

    Locations of the clones keep the call's name in front (`call/op`). The call itself stays as it is.
    """
    with ir.InsertionPoint(call), call.location:
        return list(jax_mlir_ext.inlined_func_call(function.operation, list(arguments)))


def remove_sharding_rules(module: Any) -> None:
    """Removes every populated `sdy.sharding_rule`; one that the program itself brought (a custom call's) stays."""
    run_passes(module, "func.func(sdy-drop-sharding-rules)")


def free_symbol(module: Any, name: str) -> str:
    """The name, or `name_0`, `name_1`, …: the first that no symbol of the module has."""
    symbols = {op.attributes["sym_name"].value for op in module.body.operations if "sym_name" in op.attributes}
    names = (name, *(f"{name}_{k}" for k in range(len(symbols))))
    return next(free for free in names if free not in symbols)


def declare_mesh(module: Any, symbol: str, mesh: Any) -> Any:
    """A new `sdy.mesh` at the beginning of the module. mesh: its attribute."""
    named = {"sym_name": ir.StringAttr.get(symbol, module.context), "mesh": mesh}
    start = ir.InsertionPoint.at_block_begin(module.body)
    return ir.Operation.create("sdy.mesh", attributes=named, loc=ir.Location.unknown(module.context), ip=start)


def main_function(module: Any) -> Any:
    """The entry function."""
    return next(op for op in module.body.operations if op.operation.name == "func.func" and op.name.value == "main")


def module_name(module: Any) -> str:
    """The module's symbol name without jit's prefix; "main" if it has none."""
    attributes = module.operation.attributes
    name = str(attributes["sym_name"].value) if "sym_name" in attributes else ""
    return name.removeprefix("jit_") or "main"


def element_types(module: Any) -> set[str]:
    """Element types, as MLIR prints them, of all operation results in the module."""
    seen = {str(result.type) for operation in operations_in(module) for result in operation.results}
    with module.context:
        kinds = [shape_and_element_type(ir.Type.parse(kind)) for kind in seen]
    return {kind[1] for kind in kinds if kind}


# ---------------------------------------------------------------- attributes, types and locations
# Converts MLIR attributes, types and locations to plain data.

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


def printed(operation: Any, limit: int | None = None) -> str:
    """An operation without operands as text; constants of more elements than the limit are left out. What is printed is
    a copy outside of its function: printing takes time proportional to the length of what is around."""
    text: str = operation.operation.clone(ip=False).get_asm(large_elements_limit=limit)
    return text


def constant_number(operation: Any) -> str | None:
    """The value of a splat `stablehlo.constant`, as text; None for other constants."""
    if isinstance(operation.results[0].type.element_type, ir.ComplexType):
        text = printed(operation, limit=1)  # Python cannot hold the attribute
    else:
        value = operation.attributes["value"]
        text = str(value) if isinstance(value, ir.DenseElementsAttr) and value.is_splat else ""
    match = _FULL_OF.search(text)
    return match[1] if match else None


def splat_number(value: Any) -> Any | None:
    """The number that all elements of a constant, or of a broadcast constant, are; None for other values."""
    owner = value.owner
    while not isinstance(owner, ir.Block) and owner.name == BROADCAST_IN_DIM:
        owner = owner.operands[0].owner
    if isinstance(owner, ir.Block) or owner.name != CONSTANT:
        return None
    kind = owner.results[0].type.element_type
    if isinstance(kind, ir.ComplexType):
        match = _COMPLEX.fullmatch(constant_number(owner) or "")
        return complex(float(match[1]), float(match[2])) if match else None
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
