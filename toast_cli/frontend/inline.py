"""Inlining: calls and composites disappear into the entry function.

What enters is a module with functions that call one another, what leaves is the same module with every call site replaced by a
copy of its callee's body, innermost first. The copying happens in C++ and costs a fraction of parsing; locations keep the
call's name in front (`jit(f)/jit(gelu)/mul`).
"""

from __future__ import annotations

from typing import Any

from toast_cli.errors import InputError
from toast_cli.frontend.diagnostics import place_of
from toast_cli.xla import inline_function, ir, walk_ops

# More operations than this after inlining come from calls that double at every level, not from a model.
MAX_OPERATIONS = 20_000_000


def inline_calls(module: Any, entry: str, path: str) -> None:
    """Inlines everything that `entry` reaches; other functions stay, some of them with their own calls inlined.

    Raises `InputError` for recursion, for a callee without a body or with several blocks, and for an endless expansion.
    """
    symbols = ir.SymbolTable(module.operation)
    sizes: dict[str, int] = {}  # functions already free of calls -> operations in them

    def visit(name: str, callers: tuple[str, ...]) -> None:
        function = body_of(symbols, name, path)
        sites = [(call, callee_name(call)) for call in call_sites(function)]
        size = count_operations(function)
        for call, callee in sites:
            if callee not in symbols:
                raise InputError(
                    f"there is no function @{callee}", where=place_of(call, path), hint="is the module whole?"
                )
            if callee == name or callee in callers:
                hint = "a recursive program has no fixed size and cannot be partitioned"
                raise InputError(f"function @{callee} calls itself", where=place_of(call, path), hint=hint)
            if callee not in sizes:
                visit(callee, (*callers, name))
            size += sizes[callee]
            if size > MAX_OPERATIONS:
                what = f"inlining its calls makes @{name} larger than {MAX_OPERATIONS:,} operations"
                raise InputError(what, where=path, hint="write repeated layers as a loop (`jax.lax.scan`)")
        for call, callee in sites:
            replace_operation(call, inline_function(symbols[callee], call.operands, call))
        sizes[name] = size

    visit(entry, ())


def body_of(symbols: Any, name: str, path: str) -> Any:
    """The function called `name`, which must consist of one block."""
    function = symbols[name]
    blocks = list(function.regions[0].blocks)
    if len(blocks) == 1:
        return function
    what = f"function @{name} has {'branches between blocks' if blocks else 'no body'}"
    hint = "toast reads StableHLO, where loops and branches are operations with regions"
    raise InputError(what, where=place_of(function, path), hint=hint)


def call_sites(function: Any) -> list[Any]:
    """Calls and composites, those inside regions included."""
    return walk_ops(function, "func.call", "stablehlo.composite")


def callee_name(call: Any) -> str:
    """Name of the function that a call runs, or that says what a composite means."""
    attribute = "callee" if call.name == "func.call" else "decomposition"
    return str(ir.FlatSymbolRefAttr(call.attributes[attribute]).value)


def count_operations(root: Any) -> int:
    """Operations under `root`, nested ones included."""
    count = 0

    def visit(_: Any) -> Any:
        nonlocal count
        count += 1
        return ir.WalkResult.ADVANCE

    root.operation.walk(visit)
    return count


def replace_operation(operation: Any, values: list[Any]) -> None:
    """Lets users of the operation's results use `values` instead, and erases it."""
    for result, value in zip(operation.results, values, strict=True):
        result.replace_all_uses_with(value)
    operation.erase()
