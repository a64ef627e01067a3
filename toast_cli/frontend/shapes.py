"""Static shapes: every array's size must be known, because a plan divides sizes.

In: a parsed module. Out: a module without dynamic shapes: the same one, or, if all arguments are static, one
whose inner shapes are refined from them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from toast_cli.child import ChildError, in_child
from toast_cli.errors import InputError
from toast_cli.frontend.diagnostics import first_error, place_of
from toast_cli.xla import ir, make_context, operations_in, parse_module, refine_shapes, walk_ops, write_bytecode

HINT = (
    "give every dimension a number: jax.export.export(jax.jit(f))(jax.ShapeDtypeStruct((32, 128), …)) with concrete "
    "shapes instead of symbolic_shape(…), or lower with concrete arguments"
)
BOUNDED_HINT = "write a dimension of bounded size with its bound: f32[128,64] in the place of f32[<=128,64]"
WORKED_OUT_HINT = (
    "a size that only a run of the program knows cannot be planned for: pad to the bound instead (in TensorFlow, "
    "tf.convert_to_tensor makes the gradient of a look-up dense, without tf.unique)"
)
# Limit on the processor time of shape refinement.
SECONDS = 60


# Operations that read the shape of their result, or slice bounds, from arrays.
GIVEN_SHAPES = frozenset(
    f"stablehlo.{name}"
    for name in (
        "dynamic_reshape", "dynamic_broadcast_in_dim", "dynamic_iota", "dynamic_pad", "dynamic_gather", "dynamic_conv",
        "real_dynamic_slice",
    )
)  # fmt: skip


@dataclass(frozen=True)
class Dynamic:
    """A value without a static shape: `what` it is, and the operation (or function) it belongs to."""

    what: str
    operation: Any


def with_static_shapes(module: Any, function: Any, path: str) -> Any:
    """The module, or a refined copy of it. Raises `InputError` naming the first value whose shape is not fixed.

    Args:
        function: the entry function of `module`.
    """
    found = dynamic_argument(function) or first_dynamic(module) or first_given_a_shape(module)
    if found is None:
        return module
    if found.operation.name != "func.func" and dynamic_argument(function) is None:
        try:
            refined = in_child("toast_cli.frontend.shapes:refined", write_bytecode(module), seconds=SECONDS)
        except (InputError, ChildError):
            raise refusal(found, path) from None
        return parse_module(make_context(), refined)
    raise refusal(found, path)


def first_given_a_shape(module: Any) -> Dynamic | None:
    """The first operation that reads its result's shape from an array; shape refinement makes it static."""
    given = next(iter(walk_ops(module, *GIVEN_SHAPES)), None)
    return given and Dynamic(f"the result of {given.name}", given)


def refined(bytecode: bytes) -> bytes:
    """Runs shape refinement, in a child process. Raises `InputError` if it fails."""
    try:
        return refine_shapes(bytecode)
    except (ir.MLIRError, RuntimeError) as error:
        raise InputError(first_error(error)[1]) from None


def refusal(found: Dynamic, path: str) -> InputError:
    hint = HINT
    if "#stablehlo.bounds" in found.what:
        hint = BOUNDED_HINT if found.operation.name == "func.func" else WORKED_OUT_HINT
    return InputError(f"{found.what} has no fixed shape", where=place_of(found.operation, path), hint=hint)


def dynamic_argument(function: Any) -> Dynamic | None:
    """The first argument of the entry function without a static shape."""
    for k, argument in enumerate(function.arguments):
        if not is_static(argument.type):
            return Dynamic(f"argument {k} ({argument.type})", function.operation)
    return None


def first_dynamic(module: Any) -> Dynamic | None:
    """The first operation, in program order, with a result without a static shape."""
    known: dict[Any, bool] = {}
    for operation in operations_in(module):
        for kind in [result.type for result in operation.results]:
            if kind not in known:
                known[kind] = is_static(kind)
            if not known[kind]:
                return Dynamic(f"the result of {operation.name} ({kind})", operation)
    return None


def is_static(kind: Any) -> bool:
    """True if a type (also each type in a tuple) has a static shape."""
    if isinstance(kind, ir.TupleType):
        return all(is_static(kind.get_type(k)) for k in range(kind.num_types))
    return not isinstance(kind, ir.ShapedType) or (kind.has_rank and kind.has_static_shape)
