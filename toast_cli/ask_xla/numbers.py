"""Runs the partitioned and the original program on the same random inputs and compares the results.

Both run twice, with the same state and different other inputs, and the original twice more on perturbed inputs.
Programs on narrow floating-point numbers run on f32, since reordered sums of 16-bit numbers differ by percents
(`widened`), and products that XLA:CPU does not have as dense ones (see `emit.hlo`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from toast_cli import xla
from toast_cli.ask_xla.child import Failure, ask, free_bytes
from toast_cli.ask_xla.compile import Dialect, as_stablehlo
from toast_cli.emit.hlo import with_dense_products
from toast_cli.frontend import attributes as foreign
from toast_cli.program.model import dtype_of
from toast_cli.program.ops import DYNAMIC_UPDATE_SLICE, RAGGED_DOT, RESHAPE, kind_of
from toast_cli.xla import ir

RUNS = 2
# Fraction of the free memory that both programs may use.
_SHARE_OF_MEMORY = 0.8
# Part of the target name of custom calls that call back into the process that made the program.
CALLBACKS = (b"python", b"callback")
TRANSFERS = frozenset({"infeed", "outfeed", "recv", "send"})
# Rough throughput of a virtual CPU machine, for programs large enough to matter.
_FLOPS_PER_SECOND = 2e9

_NARROW = r"bf16|f16|f8E[0-9A-Z]+|f6E[0-9A-Z]+|f4E[0-9A-Z]+"
_TYPE = re.compile(rf"(tensor<(?:\d+x)*|complex<)(?:{_NARROW})(?=[>,])")
_CONSTANT = re.compile(rf'dense<("0x[0-9A-F]*"|[^">]*)>( : tensor<(?:\d+x)*)({_NARROW})>')
# A conversion that has become an identity. XLA removes it, and takes a sharding on it for that of all results of a
# barrier before it.
_NOTHING = re.compile(r'(= stablehlo\.convert %\S+) \{mhlo\.sharding = "[^"]*"\} (: \((tensor<[^>]*>)\) -> \3)')
_HEX = re.compile(r"0x[0-9A-F]+")
_BITS = "stablehlo.bitcast_convert"


def compare_numbers(
    original: bytes,
    partitioned: bytes,
    devices: int,
    seed: int = 0,
    *,
    form: Dialect = "stablehlo",
    timeout_seconds: float = 600.0,
) -> list[ResultError] | Failure:
    """Runs `original` (StableHLO) on one virtual CPU device and `partitioned` (of `form`) on `devices`, in a child
    process.

    If results differ, compares once more on other inputs: a difference at a kink of an activation depends on the
    inputs, but a wrong plan is wrong on all of them.
    """
    errors = compare_once(original, partitioned, devices, seed, form, timeout_seconds)
    if isinstance(errors, Failure) or not any(error.wrong for error in errors):
        return errors
    again = compare_once(original, partitioned, devices, seed + 1, form, timeout_seconds)
    if isinstance(again, Failure):
        return errors
    return [second if first.wrong else first for first, second in zip(errors, again, strict=True)]


def compare_once(
    original: bytes, partitioned: bytes, devices: int, seed: int, form: Dialect, timeout_seconds: float
) -> list[ResultError] | Failure:
    """Compares on one set of inputs."""
    arguments = original, partitioned, devices, seed, form, timeout_seconds
    reply = ask(compare_here, *arguments, timeout_seconds=timeout_seconds)
    if isinstance(reply, Failure):
        return reply
    errors: list[ResultError] = reply[0]
    return errors


# -- in the child -----------------------------------------------------------------------------------------------------


def compare_here(
    original: bytes, partitioned: bytes, devices: int, seed: int, form: Dialect, seconds: float
) -> list[ResultError]:
    """The comparison, in this process. seconds: it is refused if it would take longer."""
    unsplit = xla.parse_module(xla.make_context(), original)
    refuse_effects(unsplit)
    split = xla.parse_module(unsplit.context, as_stablehlo(partitioned, form))
    refuse_effects(split)
    module, split = for_cpu(unsplit, split)
    types, shapes = result_types(module), [shape for shape, _ in result_types(module)]
    programs = [
        (xla.write_bytecode(module), own_devices(module), True), (xla.write_bytecode(split), devices, form != "hlo")
    ]  # fmt: skip
    loaded = []
    for program, count, shardy in programs:
        virtual = xla.cpu_devices(count)
        loaded.append((xla.compile_program(program, virtual, shardy=shardy), virtual))
    refuse_large([(executable, len(virtual)) for executable, virtual in loaded], seconds)
    inputs = input_sets(module, seed, RUNS)
    narrowest, versions = narrowest_float(xla.element_types(module)), new_versions(module)

    def run(program: int, arrays: list[list[Any]]) -> Runs:
        results = [xla.execute(*loaded[program], arguments, shapes) for arguments in arrays]
        return Runs(results, {k: [arrays[0][number] for number in numbers] for k, numbers in versions.items()})

    shaken = run(0, [shake(arguments, narrowest, seed) for arguments in inputs])
    errors = result_errors([type_name(*kind) for kind in types], narrowest, run(0, inputs), shaken, run(1, inputs))
    names = [type_name(*kind) for kind in result_types(unsplit)]
    return [replace(error, type=name) for error, name in zip(errors, names, strict=True)]


def for_cpu(module: Any, split: Any) -> tuple[Any, Any]:
    """Both modules on f32 if they compute in a narrower type and can be widened, and without products that XLA:CPU
    lacks."""
    module, split = map(with_dense_products, (module, split))
    elements = xla.element_types(module) | {element for _, element in result_types(module)}
    if not any(re.fullmatch(_NARROW, element) for element in elements):
        return module, split
    first, second = widened(module), widened(split)
    if first is None or second is None:
        return module, split
    return xla.parse_module(module.context, first), xla.parse_module(split.context, second)


def result_types(module: Any) -> list[tuple[tuple[int, ...], str]]:
    """(shape, element type) of each result of `main`."""
    return [xla.shape_and_element_type(kind) or ((), str(kind)) for kind in xla.main_function(module).type.results]


def type_name(shape: tuple[int, ...], element: str) -> str:
    """`f32[8,16]`."""
    return f"{element}[{','.join(map(str, shape))}]"


def refuse_large(executables: list[tuple[Any, int]], seconds: float) -> None:
    """Raises `ValueError` if running compiled programs on so many virtual devices needs more memory or time than
    available."""
    needed = flops = 0.0
    for executable, devices in executables:
        memory = executable.get_compiled_memory_stats()
        device_bytes = memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes
        needed = max(needed, devices * device_bytes)
        analysis = executable.cost_analysis()
        flops += RUNS * devices * max(float(analysis.get("flops", 0.0)), 0.0)
    free = free_bytes()
    if needed > _SHARE_OF_MEMORY * free:
        raise ValueError(f"running it takes {needed / 2**30:.1f} GiB, and {free / 2**30:.1f} GiB are free here")
    if flops / _FLOPS_PER_SECOND > seconds:
        raise ValueError(
            f"running it takes {flops:.1e} operations, some {flops / _FLOPS_PER_SECOND / 60:.0f} minutes here"
        )


def refuse_effects(module: Any) -> None:
    """Raises `ValueError` for a program that communicates with its host while it runs. An infeed would wait forever,
    and a file holds only the address of a Python callback, so calling it would crash the process."""
    for operation in xla.operations_in(module):
        name = operation.name.partition(".")[2]
        if name in TRANSFERS:
            raise ValueError(f"the program has {name} operations, which wait for a host")
        if name == "custom_call":
            target = bytes(xla.ir.StringAttr(operation.attributes["call_target_name"]).value_bytes).lower()
            if any(word in target for word in CALLBACKS):
                raise ValueError("the program calls back into Python, which its file does not hold")


def own_devices(module: Any) -> int:
    """Number of devices that an unpartitioned program needs: one, or the size of its manual regions' mesh."""
    if not xla.walk_ops(module, "sdy.manual_computation"):
        return 1
    meshes = [str(mesh.attributes["mesh"]) for mesh in xla.walk_ops(module, "sdy.mesh")]
    return max(prod(int(size) for size in re.findall(r"=(\d+)", mesh)) for mesh in meshes)


def widened(module: Any) -> str | None:
    """Text of the module with every floating-point type below 32 bits replaced by f32; the module stays as it is. None
    if that changes the program, because it reads the bits of a narrow number."""
    for cast in xla.walk_ops(module, _BITS):
        kinds = [xla.shape_and_element_type(value.type) for value in (cast.operands[0], cast.results[0])]
        if any(kind is not None and re.fullmatch(_NARROW, kind[1]) for kind in kinds):
            return None
    text = module.operation.get_asm(enable_debug_info=False)
    return _NOTHING.sub(r"\1 \2", _TYPE.sub(r"\1f32", _CONSTANT.sub(_wide_constant, text)))


def _wide_constant(match: re.Match[str]) -> str:
    """Rewrites a constant that is written as bits (a long list, infinities) to the bits of f32;
    others stay as printed."""
    numbers, shape, element = match.groups()
    narrow = dtype_of(element)
    if numbers.startswith('"'):
        wide = np.frombuffer(bytes.fromhex(numbers[3:-1]), narrow).astype(np.float32)
        numbers = f'"0x{wide.tobytes().hex().upper()}"'
    else:
        numbers = _HEX.sub(lambda bits: _wide_bits(bits[0], narrow), numbers)
    return f"dense<{numbers}>{shape}f32>"


def _wide_bits(bits: str, narrow: np.dtype[Any]) -> str:
    raw = int(bits, 16).to_bytes(narrow.itemsize, "little")
    return f"0x{int(np.frombuffer(raw, narrow).astype(np.float32).view(np.uint32)[0]):08X}"


# ---------------------------------------------------------------- comparing results
# Compares two sets of results such that a small wrong part is not hidden by a large right one.
#
# The tolerance comes from the narrowest floating-point type that the program computes in and from the perturbed runs,
# which show how rounding errors grow. A comparison is skipped if rounding may be half of it, unless the numbers are
# equal as they are.

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


def result_errors(
    types: list[str], narrowest: str, expected: Runs, shaken: Runs, partitioned: Runs
) -> list[ResultError]:
    """Judges every result.

    Args:
        types: [results] as `f32[8,16]`. narrowest: the narrowest floating-point type computed in.
        expected, shaken: of the whole program, on the inputs and on shaken ones. partitioned: of the other one.
    """
    return [worst_look(k, kind, narrowest, expected, shaken, partitioned) for k, kind in enumerate(types)]


def worst_look(index: int, kind: str, narrowest: str, expected: Runs, shaken: Runs, partitioned: Runs) -> ResultError:
    """The comparison of one result that exceeds its tolerance the most."""
    element = kind.partition("[")[0].removeprefix("complex<").removesuffix(">")
    size = max(largest(run[index]) for run in expected.results)
    judged: list[tuple[str, float, float]] = []
    for (name, a), (_, trembling), (_, b) in zip(
        looks(expected, index), looks(shaken, index), looks(partitioned, index), strict=True
    ):
        rounded = _ULPS * _EPSILON.get(element, _NARROWER_EPSILON) * size / (largest(a) or 1.0)
        floor = 0.0 if name == "value" else rounded
        least, error = tolerance_of(element, narrowest) + floor, relative_error(a, b)
        allowed = max(least, _SHAKEN * relative_error(a, trembling) + floor)
        if least < _SWAMPED and (allowed < _SWAMPED or error <= least):
            judged.append((name, error, allowed))
    if not judged:
        return ResultError(index, kind, "value", 0.0, float("inf"), ())
    name, error, allowed = max(judged, key=lambda look: excess(look[1], look[2]))
    return ResultError(index, kind, name, error, allowed, tuple(dict.fromkeys(look[0] for look in judged)))


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


def relative_error(expected: Array, actual: Array) -> float:
    """Largest difference over the largest finite absolute value; infinities and NaNs must be equal in both."""
    a, b = wide(expected), wide(actual)
    finite = np.isfinite(a)
    if not np.array_equal(a[~finite], b[~finite], equal_nan=True) or not np.isfinite(b[finite]).all():
        return float("inf")
    if not finite.any():
        return 0.0
    return float(differences(a[finite], b[finite]).max()) / (largest(a) or 1.0)


def largest(array: Array) -> float:
    """The largest finite absolute value; 0 if there is none."""
    wide_array = wide(array)
    numbers = np.abs(wide_array.astype(np.float64) if wide_array.dtype.kind in "iub" else wide_array)
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


def differences(a: Array, b: Array) -> Array:
    """Absolute differences in double precision: booleans cannot be subtracted, and small integers wrap around.

    Different 64-bit integers never count as equal.
    """
    if a.dtype.kind not in "iub":
        return np.asarray(np.abs(a - b))
    return np.where(a == b, 0.0, np.maximum(np.abs(a.astype(np.float64) - b.astype(np.float64)), 1.0))


def narrowest_float(elements: set[str]) -> str:
    """Of element types as MLIR prints them, the floating-point type with the fewest digits; f64 if there is none."""
    scalars = {element.removeprefix("complex<").removesuffix(">") for element in elements}
    floats = [element for element in scalars if element.startswith(("f", "bf"))]
    return max(floats, key=lambda element: TOLERANCES.get(element, NARROWER), default="f64")


# ---------------------------------------------------------------- random inputs
# Floating-point numbers are normal with deviation 0.1, or near one if the program takes a square root or logarithm of
# them; integers are in the range of the dimension that they index, else in [0, 8). State that must not be negative,
# such as Adam's second moments, is small, so that updates to it count.

FREE_RANGE = 8
DEVIATION, SMALL = 0.1, 1e-4
POSITIVE = frozenset({"stablehlo.sqrt", "stablehlo.rsqrt", "stablehlo.log", "stablehlo.power"})


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
    shape, element = xla.shape_and_element_type(argument.type) or ((), "i1")
    if element == "i1":
        return rng.integers(0, 2, shape).astype(bool)
    if element.startswith(("i", "ui")):
        # The smallest dimension that values of this argument index into.
        extents = [extent for user, operand in readers(argument) for extent in indexed(user, operand)]
        return rng.integers(0, min(extents, default=FREE_RANGE), shape).astype(dtype_of(element))
    if element.startswith("complex"):
        values = rng.normal(0, DEVIATION, shape) + 1j * rng.normal(0, DEVIATION, shape)
        return values.astype(np.complex64 if "f32" in element else np.complex128)
    if any(user.name in POSITIVE for user, _ in readers(argument)):
        numbers = (SMALL if state else 1.0) * rng.uniform(0.5, 1.5, shape)
    else:
        numbers = rng.normal(0, DEVIATION, shape)
    return numbers.astype(dtype_of(element))


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
    match = re.search(rf"\b{name} = \[([\d, ]+)\]", str(dimension_numbers))
    return [int(part) for part in match[1].split(",")] if match else []


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
    versions: dict[int, tuple[int, ...]] = {}
    for result, value in enumerate(returned):
        reached = {number[origin] for origin in origins(value) if origin in number and origin.type == value.type}
        reached |= {k for k, alias in donated.items() if alias == result and arguments[k].type == value.type}
        if reached:
            versions[result] = tuple(sorted(reached))
    return versions


def aliases(main: Any, count: int) -> dict[int, int]:
    """Argument number -> number of the result that aliases its buffer."""
    attributes = list(main.attributes["arg_attrs"]) if "arg_attrs" in main.attributes else [{}] * count
    results = len(main.type.results)
    result_of = {
        k: foreign.integer(attribute, "tf.aliasing_output", partial("argument {}".format, k), least=0, most=results - 1)
        for k, attribute in enumerate(attributes)
    }
    return {k: number for k, number in result_of.items() if number is not None}


def origins(value: Any) -> list[Any]:
    """Values from which elementwise ops lead to `value`, itself included."""
    seen, waiting = {value}, [value]
    while waiting:
        operation = waiting.pop().owner
        operation = getattr(operation, "operation", operation)
        name = getattr(operation, "name", "")
        if not (kind_of(name).elementwise or name in (DYNAMIC_UPDATE_SLICE, RESHAPE)):
            continue  # an element of its result depends on others than those at its index
        shape = xla.shape_and_element_type(operation.results[0].type)
        for operand in operation.operands:
            kind = xla.shape_and_element_type(operand.type)
            if operand not in seen and kind and shape and kind[0] == shape[0]:
                seen.add(operand)
                waiting.append(operand)
    return list(seen)
