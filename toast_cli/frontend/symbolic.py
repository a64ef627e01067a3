"""Sizes for symbolic dimensions: a `jax.export` file with symbolic shapes and a size for each symbol go in, the program
with those sizes comes out.

The file's FlatBuffer states the arguments' shapes as JAX writes them (`b`, `2*s`, `floordiv(b, 4)`); in its module
these dimensions are `?`. The sizes are written into the entry function's arguments, and XLA's shape refinement works
out all other shapes. It also checks the constraints that the file states (`mod(s, 128) == 0`).
https://docs.jax.dev/en/latest/export/shape_poly.html
"""

from __future__ import annotations

import operator
import re
import struct
from collections.abc import Mapping, Sequence
from typing import Any

from toast_cli.base.errors import InputError, UsageError
from toast_cli.base.files import read_whole_number
from toast_cli.base.units import evaluate
from toast_cli.base.yamltree import nearest
from toast_cli.frontend.attributes import first_error, splat_of
from toast_cli.frontend.convert import flatbuffer_vector
from toast_cli.frontend.inline import inline_calls, numbers
from toast_cli.frontend.known_numbers import DROP_UNREAD, known_numbers
from toast_cli.program.ops import CUSTOM_CALL
from toast_cli.xla import ir, location_name, parse_module, refine_shapes, run_passes, walk_ops, write_bytecode

DIM_OPTION = "--dim"
ENTRY = "main"  # as JAX calls it
# Field numbers of jax.export's FlatBuffer schema: the arguments' types, the arguments that the module has, the distinct
# types and the arguments' numbers among them (files since 2026 have these two instead of the first), a type's shape.
_TYPES, _KEPT, _DISTINCT, _NUMBERS, _SHAPE = 3, 15, 19, 22, 1
# Programs with symbolic shapes compute sizes in integers of 32 bits.
LARGEST = 2**31 - 1
_SYMBOL = re.compile(r"[A-Za-z_]\w*(?![\w(])")
_STATED = re.compile(r"symbolic shape constraint (.+?)\.(?: |$)")
_COMPARISONS = {"==": operator.eq, ">=": operator.ge, "<=": operator.le}
_BROKEN = re.compile(r"error: .*?Input shapes do not match the (?:symbolic shape constraint|[\w ]+\.) (.+?)\.(?: |$)")

# Symbol -> where it stands in arguments: `x[0]`, or `x[0] = 2*b` where it is not the dimension by itself.
Symbols = dict[str, list[str]]


def parse_dims(texts: Sequence[str]) -> dict[str, int]:
    """`b=256` -> {"b": 256}. Raises UsageError for other texts, and for a symbol that has two sizes."""
    sizes: dict[str, int] = {}
    for text in texts:
        name, _, size = (part.strip() for part in text.partition("="))
        number = read_whole_number(size)
        if not _SYMBOL.fullmatch(name) or not number:
            hint = "write a symbol of the program and its size, e.g. b=256"
            raise UsageError(f'"{text:.60}" is not the size of a symbolic dimension', where=DIM_OPTION, hint=hint)
        if number > LARGEST:
            what = f"{name}={number} is too large: programs with symbolic shapes compute sizes in 32 bits"
            raise UsageError(what, where=DIM_OPTION, hint=f"give at most {LARGEST}")
        if sizes.setdefault(name, number) != number:
            raise UsageError(f"{name} has two sizes, {sizes[name]} and {number}", where=DIM_OPTION, hint="give one")
    return sizes


def no_symbols(stated: str, where: str) -> InputError:
    """The error for sizes of a program that has no symbolic dimensions."""
    hint = f"leave {DIM_OPTION} out, or save jax.export.export(…)(…).serialize() of symbolic shapes"
    return InputError(f"the program has no symbolic dimensions for {stated}", where=where, hint=hint)


def symbols_of(data: bytes, module: Any) -> Symbols:
    """The symbols in the shapes of a jax.export file's arguments, in order; `module` is the file's own."""
    symbols: Symbols = {}
    for argument, shape in _symbolic(data, module):
        name = location_name(argument.location) or f"argument {argument.arg_number}"
        for dimension, text in enumerate(shape):
            for symbol in dict.fromkeys(_SYMBOL.findall(text)):
                place = f"{name}[{dimension}]"
                symbols.setdefault(symbol, []).append(place if text == symbol else f"{place} = {text}")
    return symbols


def constraints_of(module: Any) -> list[str]:
    """The constraints on symbols that a jax.export file states: `b >= 8`, `mod(s, 128) == 0`."""
    texts = [
        str(op.attributes["error_message"]) for op in walk_ops(module, CUSTOM_CALL) if "error_message" in op.attributes
    ]
    return list(dict.fromkeys(text for message in texts for text in _STATED.findall(message)))


def keeps(constraint: str, sizes: Mapping[str, int]) -> bool:
    """Whether sizes keep a constraint; True for one that cannot be worked out here: `with_sizes` decides."""
    left, sign, right = re.split(r"(==|>=|<=|$)", constraint, maxsplit=1)
    try:
        return not sign or bool(
            _COMPARISONS[sign](*(evaluate(text.replace("^", "**"), dict(sizes)) for text in (left, right)))
        )
    except ValueError:
        return True


def refuse_symbols(data: bytes, module: Any, where: str) -> None:
    """Raises InputError for a jax.export file with symbolic shapes, which names the symbols."""
    symbols = symbols_of(data, module)
    if symbols:
        named = ", ".join(f"{name} ({places[0]}{', …' * (len(places) > 1)})" for name, places in symbols.items())
        give = " ".join(f"{DIM_OPTION} {name}=SIZE" for name in symbols)
        what = f"the program has symbolic dimensions without a size: {named}"
        raise InputError(what, where=where, hint=f"give {give}; in Python, dims={{{next(iter(symbols))!r}: SIZE, …}}")


def with_sizes(data: bytes, module: Any, sizes: Mapping[str, int], where: str) -> bytes:
    """The program of a jax.export file, as MLIR bytecode, with static shapes; `module` is the file's own and changes.

    Args:
        sizes: symbol -> size.

    Raises InputError at `where` for a symbol without a size, a size of no symbol, sizes that break a constraint of the
    file, and sizes with which shapes do not fit together.
    """
    symbols = symbols_of(data, module)
    stated = ", ".join(f"{name}={size}" for name, size in sizes.items())
    if not symbols:
        raise no_symbols(stated, where)
    for name in sizes:
        if name not in symbols:
            what = f'the program has no symbolic dimension "{name}"'
            raise InputError(what, where=where, hint=nearest(name, symbols))
    if missing := {name: places for name, places in symbols.items() if name not in sizes}:
        named = ", ".join(f"{name} ({places[0]})" for name, places in missing.items())
        hint = f"give {' '.join(f'{DIM_OPTION} {name}=SIZE' for name in missing)}"
        raise InputError(f"there is no size for symbolic dimensions of the program: {named}", where=where, hint=hint)
    inline_calls(module, ENTRY, where)  # before shape refinement does, which gives operations other locations
    try:
        _write_sizes(module, {a: [_size(text, sizes) for text in shape] for a, shape in _symbolic(data, module)})
        refined = refine_shapes(write_bytecode(module), assertions=True)
    except (ir.MLIRError, RuntimeError, ValueError) as error:
        broken = list(dict.fromkeys(_BROKEN.findall(str(error))))
        if broken:
            what = f"{stated} breaks constraints that the file states: {'; '.join(broken)}"
            raise InputError(what, where=where, hint=f"choose other sizes with {DIM_OPTION}") from None
        reason = str(error) if isinstance(error, ValueError) else first_error(error)[1].rpartition("UNKNOWN: ")[2]
        hint = "are they sizes for which the function can be lowered, and small enough?"
        raise InputError(f"with {stated}, shapes do not fit together: {reason}", where=where, hint=hint) from None
    static = parse_module(module.context, refined)
    with static.context, ir.Location.unknown():
        _fold_sizes(static)
    return write_bytecode(static)


def _size(text: str, sizes: Mapping[str, int]) -> int:
    size = evaluate(text.replace("^", "**"), dict(sizes))
    if not 0 <= size <= LARGEST:
        raise ValueError(f"{text} is {size:.0f}")
    return int(size)


def _write_sizes(module: Any, shapes: Mapping[Any, Sequence[int]]) -> None:
    """Gives arguments of the entry function these shapes. Their uses read them through a conversion to the type that
    they had, since the functions that `main` calls have that type; shape refinement removes it."""
    function = next(iter(shapes)).owner.owner
    for argument, shape in shapes.items():
        written = argument.type
        with argument.location, ir.InsertionPoint.at_block_begin(argument.owner):
            converted = ir.Operation.create("stablehlo.convert", results=[written], operands=[argument])
            argument.replace_all_uses_except(converted.result, converted)
            argument.set_type(ir.RankedTensorType.get(shape, written.element_type))
    with module.context:
        types = [argument.type for argument in function.arguments]
        function.attributes["function_type"] = ir.TypeAttr.get(ir.FunctionType.get(types, function.type.results))


def _fold_sizes(module: Any) -> None:
    """Writes sizes as lowering with static shapes does, where shape refinement leaves computations with constants: the
    conversion of a size to a float (a mean divides by it), and the starts of dynamic slices."""
    for operation in walk_ops(module, "stablehlo.convert"):
        operand, result = operation.operands[0], operation.results[0]
        number = known_numbers(operand) if not result.type.rank else None
        if operand.type == result.type:
            result.replace_all_uses_with(operand)
        elif number is not None and isinstance(result.type.element_type, ir.FloatType):
            place = ir.InsertionPoint(operation)
            result.replace_all_uses_with(splat_of(f"{float(number):.17e}", result.type, place))
    for operation in walk_ops(module, "stablehlo.dynamic_slice"):
        for position, start in enumerate(list(operation.operands)[1:], 1):
            operation.operands[position] = _own_start(start, ir.InsertionPoint(operation))
    run_passes(module, DROP_UNREAD)


def _own_start(start: Any, place: Any) -> Any:
    """The start that a program with symbolic shapes packs into an array and clamps, `reshape(slice(clamp(0,
    concatenate(…, start, …), last)))`; another value as it is. A dynamic slice clamps its starts itself."""
    chain = [start]
    for name, operand in (("reshape", 0), ("slice", 0), ("clamp", 1), ("concatenate", 0)):
        if isinstance(chain[-1], ir.BlockArgument) or chain[-1].owner.name != f"stablehlo.{name}":
            return start
        chain.append(chain[-1].owner.operands[operand])
    number = numbers(chain[1].owner, "start_indices")[0]
    for part in chain[3].owner.operands:
        (size,) = part.type.shape
        if number < size:
            break
        number -= size
    elements = known_numbers(part)
    if elements is not None:
        return splat_of(str(elements[number]), start.type, place)
    scalar = not isinstance(part, ir.BlockArgument) and part.owner.name == "stablehlo.reshape"
    return part.owner.operands[0] if scalar and part.owner.operands[0].type == start.type else start


def _symbolic(data: bytes, module: Any) -> list[tuple[Any, tuple[str, ...]]]:
    """(argument of the module's entry function, its shape as the file states it) of each with a symbol in its shape.

    The module may have further arguments in front of those of the file (the number of a platform).
    """
    entry = next((op for op in module.body.operations if getattr(op.name, "value", "") == ENTRY), None)
    shapes = argument_shapes(data)
    arguments = [] if entry is None else list(entry.arguments)[-len(shapes) :]
    return [pair for pair in zip(arguments, shapes, strict=False) if any(map(_SYMBOL.search, pair[1]))]


def argument_shapes(data: bytes) -> list[tuple[str, ...]]:
    """The shapes of the arguments that the module of a jax.export file has, as JAX writes dimensions; empty for a file
    of another format."""
    view = memoryview(data)
    try:
        root = struct.unpack_from("<I", view, 0)[0]
        types = _tables(view, root, _TYPES)
        if not types:
            distinct = _tables(view, root, _DISTINCT)
            types = [distinct[number] for number in _integers(view, root, _NUMBERS)]
        return [_shape(view, types[number]) for number in _integers(view, root, _KEPT)]
    except (struct.error, IndexError, UnicodeDecodeError):
        return []


def _tables(view: memoryview, table: int, slot: int) -> list[int]:
    """Places of the tables, or of the strings, in a field of a table."""
    start, count = flatbuffer_vector(view, table, slot) or (0, 0)
    return [start + 4 * k + struct.unpack_from("<I", view, start + 4 * k)[0] for k in range(count)]


def _integers(view: memoryview, table: int, slot: int) -> tuple[int, ...]:
    start, count = flatbuffer_vector(view, table, slot) or (0, 0)
    return struct.unpack_from(f"<{count}H", view, start)


def _shape(view: memoryview, table: int) -> tuple[str, ...]:
    sizes = [(place, struct.unpack_from("<I", view, place)[0]) for place in _tables(view, table, _SHAPE)]
    return tuple(bytes(view[place + 4 : place + 4 + size]).decode() for place, size in sizes)
