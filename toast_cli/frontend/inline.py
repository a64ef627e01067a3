"""Inlines calls and composites into the entry function, and finds operations that return an operand unchanged."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from toast_cli.base.errors import InputError
from toast_cli.base.files import read_whole_number
from toast_cli.frontend.attributes import place_of
from toast_cli.program.ops import kind_of
from toast_cli.xla import inline_function, ir, operations_in, outer_operands, splat_number, walk_ops

# ---------------------------------------------------------------- inlining
# Inlines calls and composites into the entry function.
#
# The copying happens in C++ and costs a fraction of parsing; locations keep the call's name in front
# (`jit(f)/jit(gelu)/mul`).

# Limit on operations after inlining. More come from calls that double at every level, not from a model. The environment
# can raise it.
MAX_OPERATIONS = 1_000_000
LIMIT_VARIABLE = "TOAST_MAX_OPERATIONS"

# Operations with bodies that XLA compiles as functions. Loops and branches may capture values.
BODIES = frozenset(
    f"stablehlo.{name}"
    for name in (
        "reduce", "reduce_window", "select_and_scatter", "scatter", "sort", "map", "all_reduce", "reduce_scatter",
        "collective_reduce",
    )
)  # fmt: skip


def inline_calls(module: Any, entry: str, path: str) -> None:
    """Inlines everything that `entry` reaches; other functions stay, some of them with their own calls inlined.

    Raises `InputError` for recursion, for a callee without a body or with several blocks, and for an endless expansion.
    All of that is known before anything is copied.
    """
    symbols = ir.SymbolTable(module.operation)
    sites: dict[str, list[tuple[Any, str]]] = {}  # function -> its calls, with the names of what they call
    for name in callees_first(symbols, entry, sites, path):
        for call, callee in sites[name]:
            replace_operation(call, inline_function(symbols[callee], call.operands, call))


def callees_first(symbols: Any, entry: str, sites: dict[str, list[tuple[Any, str]]], path: str) -> list[str]:
    """The functions that `entry` reaches, each after all that it calls; fills `sites`.

    It also adds up the number of operations after inlining.
    """
    order: list[str] = []
    sizes: dict[str, int] = {}  # functions in `order` -> operations in them once their calls are inlined
    waiting = [entry]
    while waiting:
        name = waiting[-1]
        if name in sizes:
            waiting.pop()
            continue
        if name not in sites:
            sites[name] = [
                (call, callee_name(call))
                for call in walk_ops(body_of(symbols, name, path), "func.call", "stablehlo.composite")
            ]
            for call, callee in sites[name]:
                if callee not in symbols or symbols[callee].operation.name != "func.func":
                    place = place_of(call, path)
                    raise InputError(f"there is no function @{callee}", where=place, hint="is the module whole?")
        missing = list(dict.fromkeys(callee for _, callee in sites[name] if callee not in sizes))
        for callee in missing:
            if callee in sites:  # recursion: it is in progress
                call = next(call for call, called in sites[name] if called == callee)
                hint = "a recursive program has no fixed size and cannot be partitioned"
                raise InputError(f"function @{callee} calls itself", where=place_of(call, path), hint=hint)
        if missing:
            waiting += missing[::-1]
            continue
        sizes[name] = len(operations_in(symbols[name])) + sum(sizes[callee] for _, callee in sites[name])
        if sizes[name] > most_operations():
            what = f"inlining its calls makes @{name} larger than {most_operations():,} operations"
            hint = f"write repeated layers as a loop (`jax.lax.scan`), or set {LIMIT_VARIABLE} to allow more"
            raise InputError(what, where=path, hint=hint)
        order.append(waiting.pop())
    return order


def most_operations() -> int:
    """`MAX_OPERATIONS`, or the value of the environment's `TOAST_MAX_OPERATIONS`."""
    limit = read_whole_number(os.environ.get(LIMIT_VARIABLE, ""))
    return MAX_OPERATIONS if limit is None else limit


def body_of(symbols: Any, name: str, path: str) -> Any:
    """The function called `name`; raises `InputError` unless it has exactly one block."""
    function = symbols[name]
    blocks = list(function.regions[0].blocks)
    if len(blocks) == 1:
        return function
    what = f"function @{name} has {'branches between blocks' if blocks else 'no body'}"
    hint = "toast reads StableHLO, where loops and branches are operations with regions"
    raise InputError(what, where=place_of(function, path), hint=hint)


def callee_name(call: Any) -> str:
    """Name of the function that a call runs, or that defines a composite."""
    attribute = "callee" if call.name == "func.call" else "decomposition"
    return str(ir.FlatSymbolRefAttr(call.attributes[attribute]).value)


def moved_out(block: Any, before: Any) -> list[Any]:
    """Moves the operations of a block in front of the one that holds it; returns what the block yields."""
    *inner, terminator = block.operations
    for operation in inner:
        operation.operation.move_before(before)
    return list(terminator.operands)


def replace_operation(operation: Any, values: list[Any]) -> None:
    """Replaces the operation's results by `values`, and erases it."""
    for result, value in zip(operation.results, values, strict=True):
        result.replace_all_uses_with(value)
    operation.erase()


def copy_captured_constants(module: Any, path: str) -> None:
    """Gives each body a copy of the constants, and of expressions of constants, that it captures.

    Raises `InputError` for a body that captures anything else, which XLA refuses.
    """
    for operation in walk_ops(module, *BODIES):
        for region in operation.regions:
            _close(operation, region.blocks[0], path)


def _close(operation: Any, block: Any, path: str) -> None:
    """Gives one body copies of what it captures, at its start."""
    arguments = set(block.arguments)
    copies: dict[Any, Any] = {}
    operations = [view.operation for view in block.operations]
    first = operations[0]

    def copied(value: Any) -> Any:
        """The copy of a value in the body."""
        if value not in copies:
            maker = None if isinstance(value, ir.BlockArgument) else value.owner
            kind = kind_of("" if maker is None else maker.name)
            if maker is None or not (kind.source or kind.elementwise or kind.rearranges):
                raise InputError(
                    f"the body of {operation.name} reads a value that is computed outside it",
                    where=place_of(operation, path),
                    hint="XLA takes constants only there: compute the value in the body, or apply it before or after",
                )
            operands = [copied(operand) for operand in maker.operands]
            copy = maker.clone(ip=ir.InsertionPoint(first))
            for place, operand in enumerate(operands):
                copy.operands[place] = operand
            copies.update(zip(maker.results, copy.results, strict=True))
        return copies[value]

    for user, place, operand in outer_operands(operations):
        if operand not in arguments:
            user.operands[place] = copied(operand)


# ---------------------------------------------------------------- operations without effect
# Finds operations that return an operand unchanged: a reverse along dimensions of size 1, an identity transpose or one
# that undoes another, a slice of everything, an update of a whole array, an addition of zero (`total = 0` in front of
# a Python loop), or a logical operation with a known result (`done & False`).
#
# XLA drops them before it partitions, and so gathers, for example, the kernel of a 1x1 convolution once for the
# forward and the backward pass, which flips it. With these operations the plan would treat the two as different
# arrays.
#
# An addition of zero then returns -0.0 for -0.0, as in XLA.


def unchanged_operand(operation: Any) -> Any | None:
    """The operand that an operation returns unchanged, for the kinds in `IDLE_KINDS`, `NEUTRAL` and `ABSORBING`,
    concatenations and updates; None if the operation changes it."""
    if operation.name == CONCATENATION:
        # The one operand that has elements; `associative_scan` leaves such concatenations.
        return next((piece for piece in operation.operands if piece.type == operation.results[0].type), None)
    if operation.name == OVERWRITING:
        new = operation.operands[1]
        return new if new.type == operation.results[0].type else None
    if operation.name in ABSORBING:
        # An operand of `and` that is all false (of `or`: all true); beam searches that may not stop early have these.
        element = operation.results[0].type.element_type
        if not isinstance(element, ir.IntegerType) or element.width != 1:
            return None
        return next((value for value in operation.operands if splat_number(value) == ABSORBING[operation.name]), None)
    if operation.name in NEUTRAL:
        element, sides = NEUTRAL[operation.name]
        neutral = next((side for side in sides if splat_number(operation.operands[side]) == element), None)
        return None if neutral is None else operation.operands[1 - neutral]
    kind, first = operation.results[0].type, operation.operands[0]
    if first.type == kind and IDLE_KINDS[operation.name](operation):
        return first
    # Two shape operations that cancel, as in the gradient of a product with a transposed table.
    before = first.owner
    if operation.name not in UNDOING or isinstance(before, ir.Block) or before.name != operation.name:
        return None
    source = before.operands[0]
    return source if source.type == kind and UNDOING[operation.name](before, operation) else None


def flips_nothing(operation: Any) -> bool:
    shape = ir.RankedTensorType(operation.results[0].type).shape
    return all(shape[d] == 1 for d in numbers(operation, "dimensions"))


def permutes_nothing(operation: Any) -> bool:
    """True for a permutation that moves only dimensions of size 1."""
    shape = ir.RankedTensorType(operation.results[0].type).shape
    moved = [d for d in numbers(operation, "permutation") if shape[d] > 1]
    return moved == sorted(moved)


def permutes_back(first: Any, second: Any) -> bool:
    """True if the second of two transposes undoes the first."""
    order = numbers(first, "permutation")
    return [order[d] for d in numbers(second, "permutation")] == list(range(len(order)))


def spreads_nothing(operation: Any) -> bool:
    order = numbers(operation, "broadcast_dimensions")
    return order == sorted(order)


def pads_nothing(operation: Any) -> bool:
    names = ("edge_padding_low", "edge_padding_high", "interior_padding")
    return not any(any(numbers(operation, name)) for name in names)


def always(operation: Any) -> bool:
    """True: with equal operand and result types, such an operation is the identity."""
    return True


def numbers(operation: Any, name: str) -> list[int]:
    return list(ir.DenseI64ArrayAttr(operation.attributes[name]))


IDLE_KINDS: dict[str, Callable[[Any], bool]] = {
    "stablehlo.reverse": flips_nothing,
    "stablehlo.transpose": permutes_nothing,
    "stablehlo.broadcast_in_dim": spreads_nothing,
    "stablehlo.pad": pads_nothing,
    "stablehlo.slice": always,
    "stablehlo.dynamic_slice": always,
    "stablehlo.reshape": always,
    "stablehlo.convert": always,
}
# Shape operations -> a function that says if the second of two undoes the first, given equal types.
UNDOING: dict[str, Callable[[Any, Any], bool]] = {
    "stablehlo.transpose": permutes_back,
    "stablehlo.reshape": lambda first, second: True,
}
CONCATENATION = "stablehlo.concatenate"
OVERWRITING = "stablehlo.dynamic_update_slice"
# Logical operation -> its absorbing element.
ABSORBING = {"stablehlo.and": 0.0, "stablehlo.or": 1.0}
# Element-wise operation -> its neutral element, and the operand positions in which it is neutral.
NEUTRAL: dict[str, tuple[float, tuple[int, ...]]] = {
    "stablehlo.add": (0, (0, 1)),
    "stablehlo.subtract": (0, (1,)),
    "stablehlo.multiply": (1, (0, 1)),
    "stablehlo.divide": (1, (1,)),
}
