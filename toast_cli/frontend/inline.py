"""Inlines calls and composites into the entry function.

Enters: a module with functions that call one another. Leaves: the same module with every call site replaced by a copy
of its callee's body, innermost first. The copying happens in C++ and costs a fraction of parsing; locations keep the
call's name in front (`jit(f)/jit(gelu)/mul`).
"""

from __future__ import annotations

import os
from typing import Any

from toast_cli.errors import InputError
from toast_cli.frontend.diagnostics import place_of
from toast_cli.inputs import whole_number
from toast_cli.xla import ADVANCE, inline_function, ir, walk_ops

# Limit on operations after inlining. More come from calls that double at every level, not from a model. The environment
# can raise it.
MAX_OPERATIONS = 1_000_000
LIMIT_VARIABLE = "TOAST_MAX_OPERATIONS"


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
            sites[name] = [(call, callee_name(call)) for call in call_sites(body_of(symbols, name, path))]
            for call, callee in sites[name]:
                refuse_unknown(call, callee, symbols, path)
        missing = list(dict.fromkeys(callee for _, callee in sites[name] if callee not in sizes))
        for callee in missing:
            if callee in sites:  # recursion: it is in progress
                call = next(call for call, called in sites[name] if called == callee)
                hint = "a recursive program has no fixed size and cannot be partitioned"
                raise InputError(f"function @{callee} calls itself", where=place_of(call, path), hint=hint)
        if missing:
            waiting += missing[::-1]
            continue
        sizes[name] = count_operations(symbols[name]) + sum(sizes[callee] for _, callee in sites[name])
        if sizes[name] > most_operations():
            what = f"inlining its calls makes @{name} larger than {most_operations():,} operations"
            hint = f"write repeated layers as a loop (`jax.lax.scan`), or set {LIMIT_VARIABLE} to allow more"
            raise InputError(what, where=path, hint=hint)
        order.append(waiting.pop())
    return order


def most_operations() -> int:
    """`MAX_OPERATIONS`, or the value of the environment's `TOAST_MAX_OPERATIONS`."""
    given = whole_number(os.environ.get(LIMIT_VARIABLE, ""))
    return MAX_OPERATIONS if given is None else given


def refuse_unknown(call: Any, callee: str, symbols: Any, path: str) -> None:
    """Raises `InputError` for a call of a name that is not a function of the module."""
    if callee not in symbols or symbols[callee].operation.name != "func.func":
        raise InputError(f"there is no function @{callee}", where=place_of(call, path), hint="is the module whole?")


def body_of(symbols: Any, name: str, path: str) -> Any:
    """The function called `name`; raises `InputError` unless it has exactly one block."""
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
    """Name of the function that a call runs, or that defines a composite."""
    attribute = "callee" if call.name == "func.call" else "decomposition"
    return str(ir.FlatSymbolRefAttr(call.attributes[attribute]).value)


def count_operations(root: Any) -> int:
    """Operations under `root`, nested ones included."""
    count = 0

    def visit(_: Any) -> Any:
        nonlocal count
        count += 1
        return ADVANCE

    root.operation.walk(visit)
    return count


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
