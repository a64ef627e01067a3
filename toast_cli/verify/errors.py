"""Compares two sets of results such that a small wrong part is not hidden by a large right one.

In: the results of two programs in two runs with equal state and different other inputs, and the first program's
results for inputs perturbed by one rounding error. Out: one `ResultError` for each result, the worst of three
comparisons:

* *value*: the result itself;
* *change*: the result minus the argument that it is a new version of, so that in `p - lr * g` the step counts and not
`p`;
* *response*: the result of one run minus that of the other, so that in `b1 * m + (1 - b1) * g` only the part that
depends on `g` counts.

The tolerance comes from the narrowest floating-point type that the program computes in and from the perturbed runs,
which show how rounding errors grow. A comparison is skipped if rounding may be half of it, unless the numbers are equal
as they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

# Relative error (to the largest number) from rounding in another order, by the narrowest floating-point type of the
# computation.
TOLERANCES = {"f64": 1e-9, "f32": 1e-4, "f16": 1e-2, "bf16": 4e-2}
NARROWER = 0.3  # eight bits and fewer
_EPSILON = {"f64": 2.0**-52, "f32": 2.0**-23, "f16": 2.0**-10, "bf16": 2.0**-7}
_NARROWER_EPSILON = 2.0**-3
# Reordered sums round more than once, perturbed inputs are off once; measured on the sample models, the factor is at
# most two.
_SHAKEN = 4.0
# Each of two rounded numbers is off by half a unit in the last place, and so are their operands.
_ULPS = 4.0
_SWAMPED = 0.5


@dataclass(frozen=True)
class ResultError:
    """The worst comparison of one result.

    Attributes:
        type: `f32[8,16]`. what: the comparison, "value", "change" or "response". looks: those made; empty if all
            differences are rounding.
        error: largest difference over the largest absolute number (0: equal, inf: not finite in one only). allowed:
            its tolerance.
    """

    index: int
    type: str
    what: str
    error: float
    allowed: float
    looks: tuple[str, ...] = ("value",)

    @property
    def wrong(self) -> bool:
        return not self.error <= self.allowed


@dataclass(frozen=True)
class Runs:
    """Results of a program's runs: `results` [runs][results], and per result the arguments of the first run that it is
    a new version of."""

    results: list[list[Array]]
    before: dict[int, list[Array]]


def result_errors(types: list[str], narrowest: str, expected: Runs, shaken: Runs, found: Runs) -> list[ResultError]:
    """Judges every result.

    Args:
        types: [results] as `f32[8,16]`. narrowest: the narrowest floating-point type computed in.
        expected, shaken: of the whole program, on the inputs and on shaken ones. found: of the partitioned program.
    """
    return [worst_look(k, kind, narrowest, expected, shaken, found) for k, kind in enumerate(types)]


def worst_look(index: int, kind: str, narrowest: str, expected: Runs, shaken: Runs, found: Runs) -> ResultError:
    """The comparison of one result that exceeds its tolerance the most."""
    element = kind.partition("[")[0].removeprefix("complex<").removesuffix(">")
    size = max(largest(run[index]) for run in expected.results)
    taken: list[tuple[str, float, float]] = []
    for (what, a), (_, trembling), (_, b) in zip(
        looks(expected, index), looks(shaken, index), looks(found, index), strict=True
    ):
        rounded = _ULPS * _EPSILON.get(element, _NARROWER_EPSILON) * size / (largest(a) or 1.0)
        floor = 0.0 if what == "value" else rounded
        least, error = tolerance_of(element, narrowest) + floor, relative_error(a, b)
        allowed = max(least, _SHAKEN * relative_error(a, trembling) + floor)
        if least < _SWAMPED and (allowed < _SWAMPED or error <= least):
            taken.append((what, error, allowed))
    if not taken:
        return ResultError(index, kind, "value", 0.0, float("inf"), ())
    what, error, allowed = max(taken, key=lambda look: excess(look[1], look[2]))
    return ResultError(index, kind, what, error, allowed, tuple(dict.fromkeys(look[0] for look in taken)))


def looks(runs: Runs, index: int) -> Iterator[tuple[str, Array]]:
    """The arrays to compare for one result, each with the name of the comparison."""
    first, *others = (wide(run[index]) for run in runs.results)
    for array in (first, *others):
        yield "value", array
    if np.issubdtype(first.dtype, np.inexact):
        for old in runs.before.get(index, []):
            yield "change", first - wide(old)
        for array in others:
            yield "response", array - first


def shake(arrays: list[Array], narrowest: str, seed: int) -> list[Array]:
    """Perturbs floating-point arrays by up to one rounding error of a type; the others stay as they are.

    The perturbation of array k does not depend on its values, so that state which two runs share stays shared.
    """
    epsilon = _EPSILON.get(narrowest, _NARROWER_EPSILON)

    def shaken(k: int, array: Array) -> Array:
        numbers = wide(array)
        if not np.issubdtype(numbers.dtype, np.inexact):
            return array
        factor = 1 + epsilon * np.random.default_rng((seed, k)).uniform(-1, 1, array.shape)
        return (numbers * factor).astype(array.dtype)

    return [shaken(k, array) for k, array in enumerate(arrays)]


def tolerance_of(element: str, narrowest: str) -> float:
    """Relative tolerance of a result of one element type; integers must be equal."""
    if not element.startswith(("f", "bf")):
        return 0.0
    return max(TOLERANCES.get(narrowest, NARROWER), TOLERANCES.get(element, NARROWER))


def excess(error: float, allowed: float) -> float:
    """The ratio of an error to its tolerance."""
    return error / allowed if allowed else float("inf") if error else 0.0


def relative_error(expected: Array, found: Array) -> float:
    """Largest difference over the largest finite absolute value; infinities and NaNs must be equal in both."""
    a, b = wide(expected), wide(found)
    finite = np.isfinite(a)
    if not np.array_equal(a[~finite], b[~finite], equal_nan=True) or not np.isfinite(b[finite]).all():
        return float("inf")
    if not finite.any():
        return 0.0
    return float(apart(a[finite], b[finite]).max()) / (largest(a) or 1.0)


def largest(array: Array) -> float:
    """The largest finite absolute value; 0 if there is none."""
    given = wide(array)
    numbers = np.abs(given.astype(np.float64) if given.dtype.kind in "iub" else given)
    finite = numbers[np.isfinite(numbers)]
    return float(finite.max()) if finite.size else 0.0


def wide(array: Array) -> Array:
    """Floating-point numbers (also those numpy does not know) in double precision; integers as they are, booleans as 0
    and 1."""
    if np.iscomplexobj(array):
        return array.astype(np.complex128)
    if array.dtype.kind == "b":  # which cannot be subtracted
        return array.astype(np.int8)
    return array if array.dtype.kind in "iu" else array.astype(np.float64)


def apart(a: Array, b: Array) -> Array:
    """Absolute differences in double precision: booleans cannot be subtracted, and small integers wrap around.

    Different 64-bit integers never count as equal.
    """
    if a.dtype.kind not in "iub":
        return np.asarray(np.abs(a - b))
    return np.where(a == b, 0.0, np.maximum(np.abs(a.astype(np.float64) - b.astype(np.float64)), 1.0))


def narrowest_float(elements: set[str]) -> str:
    """Of element types as MLIR prints them, the floating-point type with the fewest digits; f64 if there is none."""
    floats = {element.removeprefix("complex<").removesuffix(">") for element in elements}
    known = [element for element in floats if element.startswith(("f", "bf"))]
    return max(known, key=lambda element: TOLERANCES.get(element, NARROWER), default="f64")
