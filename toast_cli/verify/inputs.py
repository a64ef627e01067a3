"""Random inputs for a program: the same for the same seed.

In: a parsed module and a seed. Out: numpy arrays, one per argument. Floating-point numbers are normal with
deviation 0.1, or near one if the program takes a square root or logarithm of them; integers are in the range of the
dimension that they index, else in [0, 8). State that must not be negative, such as Adam's second moments, is small, so
that updates to it count.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from toast_cli import xla
from toast_cli.frontend import attributes as foreign
from toast_cli.program.ops import DYNAMIC_UPDATE_SLICE, RAGGED_DOT, RESHAPE, kind_of
from toast_cli.xla import ir

FREE_RANGE = 8
DEVIATION, SMALL = 0.1, 1e-4
POSITIVE = frozenset({"stablehlo.sqrt", "stablehlo.rsqrt", "stablehlo.log", "stablehlo.power"})
FLOAT_NAMES = {"f64": "float64", "f32": "float32", "f16": "float16", "bf16": "bfloat16"}


def input_sets(module: Any, seed: int, count: int) -> list[list[NDArray[Any]]]:
    """[count][arguments of `main`]. All sets have the same state and differ in the other arguments.

    The difference of two runs is therefore free of terms that depend on the state alone.
    """
    carried = {argument for paired in new_versions(module).values() for argument in paired}

    def draw(number: int, argument: Any, run: int) -> NDArray[Any]:
        state = number in carried
        return random_array(argument, np.random.default_rng((seed, 0 if state else run, number)), state=state)

    arguments = list(xla.main_function(module).arguments)
    return [[draw(number, argument, run) for number, argument in enumerate(arguments)] for run in range(count)]


def random_array(argument: Any, rng: np.random.Generator, *, state: bool) -> NDArray[Any]:
    """A random array for one argument."""
    import ml_dtypes

    shape, element = xla.shape_and_element_type(argument.type) or ((), "i1")
    if element == "i1":
        return rng.integers(0, 2, shape).astype(bool)
    if element.startswith(("i", "ui")):
        name = element.replace("i", "int", 1)
        return rng.integers(0, index_range(argument), shape).astype(np.dtype(getattr(ml_dtypes, name, name)))
    if element.startswith("complex"):
        values = rng.normal(0, DEVIATION, shape) + 1j * rng.normal(0, DEVIATION, shape)
        return values.astype(np.complex64 if "f32" in element else np.complex128)
    if any(user.name in POSITIVE for user, _ in readers(argument)):
        numbers = (SMALL if state else 1.0) * rng.uniform(0.5, 1.5, shape)
    else:
        numbers = rng.normal(0, DEVIATION, shape)
    name = FLOAT_NAMES.get(element) or f"float{element[1]}_{element[2:].lower()}"
    return numbers.astype(np.dtype(getattr(ml_dtypes, name, name)))


def index_range(argument: Any) -> int:
    """The smallest dimension that values of this argument index into."""
    return min((extent for user, operand in readers(argument) for extent in indexed(user, operand)), default=FREE_RANGE)


def indexed(user: Any, operand: int) -> Iterator[int]:
    """Sizes of the dimensions that operand number `operand` indexes, for gathers, scatters and dynamic slices."""
    shape = ir.ShapedType(user.operands[0].type).shape
    if user.name == "stablehlo.gather" and operand == 1:
        yield from (shape[d] for d in listed(user.attributes["dimension_numbers"], "start_index_map"))
    elif user.name == "stablehlo.scatter" and operand == len(user.operands) // 2:
        yield from (
            shape[d] for d in listed(user.attributes["scatter_dimension_numbers"], "scatter_dims_to_operand_dims")
        )
    elif user.name == RAGGED_DOT and operand == 2:  # group sizes that sum to at most the number of rows
        rows = shape[listed(user.attributes["ragged_dot_dimension_numbers"], "lhs_ragged_dimensions")[0]]
        yield 1 + rows // ir.ShapedType(user.operands[2].type).shape[-1]
    elif user.name == "stablehlo.dynamic_slice" and operand >= 1:
        yield shape[operand - 1]
    elif user.name == "stablehlo.dynamic_update_slice" and operand >= 2:
        yield shape[operand - 2]


def listed(dimension_numbers: Any, name: str) -> list[int]:
    """The dimensions in one field of a dimension-numbers attribute, whose text omits empty fields."""
    found = re.search(rf"\b{name} = \[([\d, ]+)\]", str(dimension_numbers))
    return [int(part) for part in found[1].split(",")] if found else []


def readers(value: Any) -> Iterator[tuple[Any, int]]:
    """(operation, operand number) of every reader of `value`, also through operations that keep positive numbers
    positive."""
    seen: set[Any] = set()
    waiting = [value]
    while waiting:
        for use in waiting.pop().uses:
            user = use.owner.operation
            yield user, use.operand_number
            if kind_of(user.name).positive and user not in seen:
                seen.add(user)
                waiting += user.results


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
