"""Finds a program's state: arguments that are returned updated, such as parameters and moments.

Enters: a parsed module. Leaves: for each result the arguments that it is a new version of. Donation states this;
without it, a result counts as new version of an argument with its type if elementwise ops lead from one to the other
(`p - lr * g` from `p`).
"""

from __future__ import annotations

from functools import partial
from typing import Any

from toast_cli import xla
from toast_cli.frontend import attributes as foreign
from toast_cli.program.ops import DYNAMIC_UPDATE_SLICE, RESHAPE, kind_of


def new_versions(module: Any) -> dict[int, tuple[int, ...]]:
    """Result number -> numbers of the arguments it is a new version of; other results are left out."""
    main = xla.main_function(module)
    arguments = list(main.arguments)
    number = {argument: k for k, argument in enumerate(arguments)}
    donated = aliases(main, len(arguments))
    returned = list(main.entry_block.operations)[-1].operands
    found: dict[int, tuple[int, ...]] = {}
    for result, value in enumerate(returned):
        reached = {number[origin] for origin in origins(value) if origin in number and origin.type == value.type}
        reached |= {k for k, alias in donated.items() if alias == result and arguments[k].type == value.type}
        if reached:
            found[result] = tuple(sorted(reached))
    return found


def aliases(main: Any, count: int) -> dict[int, int]:
    """Argument number -> number of the result that aliases its buffer."""
    attributes = list(main.attributes["arg_attrs"]) if "arg_attrs" in main.attributes else [{}] * count
    results = len(main.type.results)
    found = {
        k: foreign.integer(one, "tf.aliasing_output", partial("argument {}".format, k), least=0, most=results - 1)
        for k, one in enumerate(attributes)
    }
    return {k: number for k, number in found.items() if number is not None}


def origins(value: Any) -> list[Any]:
    """Values from which elementwise ops lead to `value`, itself included."""
    seen, waiting = {value}, [value]
    while waiting:
        operation = waiting.pop().owner
        operation = getattr(operation, "operation", operation)
        if not _keeps_places(getattr(operation, "name", "")):
            continue
        shape = xla.shape_and_element_type(operation.results[0].type)
        for operand in operation.operands:
            found = xla.shape_and_element_type(operand.type)
            if operand not in seen and found and shape and found[0] == shape[0]:
                seen.add(operand)
                waiting.append(operand)
    return list(seen)


def _keeps_places(name: str) -> bool:
    """True if an element of an op's result depends on the elements at its index in operands of its shape."""
    return kind_of(name).elementwise or name in (DYNAMIC_UPDATE_SLICE, RESHAPE)
