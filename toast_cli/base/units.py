"""Units as people write them (`28GiB`, `400 Gb/s`, `1us`), text from outside made harmless for a terminal, and
arithmetic expressions of sizes.

Units are exact about powers: `GB` is 10^9 bytes, `GiB` is 2^30, `Gb` is 10^9 bits. A bare number is in base units
(bytes, bytes per second, seconds, FLOP/s).
"""

from __future__ import annotations

import ast
import math
import operator
import re
import unicodedata
from collections.abc import Callable

from toast_cli.base.errors import UsageError

_PREFIXES = {"": 1, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_BINARY = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}

_BYTE_UNITS = {f"{prefix}B": scale for prefix, scale in {**_PREFIXES, **_BINARY}.items()}
_RATE_UNITS = {
    **{f"{unit}/s": scale for unit, scale in _BYTE_UNITS.items()},
    **{f"{prefix}{bits}": scale / 8 for prefix, scale in _PREFIXES.items() for bits in ("b/s", "bps", "bit/s")},
}
_FLOP_UNITS = {
    f"{prefix}{unit}": scale for prefix, scale in _PREFIXES.items() for unit in ("FLOP/s", "FLOPS", "FLOPs", "OPS", "")
}
_TIME_UNITS = {"h": 3600.0, "min": 60.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ns": 1e-9}

_QUANTITY = re.compile(r"([+-]?(?:\d[\d_]*(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?)\s*([^\d\s].*)?")


def parse_bytes(text: str | int, *, where: str = "") -> int:
    """Bytes from `28GiB`, `16 GB`, `512MiB` or a bare count; `where` goes into the error.

    Raises UsageError for anything else, for a bare `28G` (10^9 or 2^30?) and for amounts below one byte.
    """
    amount = _parse(str(text), _BYTE_UNITS, "an amount of memory", "28GiB, 16 GB or a number of bytes", where)
    if amount < 1:
        raise UsageError(f"{text} is less than one byte", where=where, hint="write e.g. 28GiB")
    return int(amount)


def parse_bandwidth(text: str | float, *, where: str = "") -> float:
    """Bytes per second from `45GB/s`, `400 Gb/s`, `200 Gbps` or a bare number; positive. Raises UsageError."""
    return _positive(text, _RATE_UNITS, "a bandwidth", "45GB/s, 400 Gb/s (bits) or bytes per second", where)


def parse_flops(text: str | float, *, where: str = "") -> float:
    """FLOP/s from `275 TFLOP/s`, `275T` or a bare number such as 275e12; positive. Raises UsageError."""
    return _positive(text, _FLOP_UNITS, "a compute rate", "275 TFLOP/s or 275e12", where)


def parse_seconds(text: str | float, *, where: str = "") -> float:
    """Seconds from `1us`, `0.5 ms`, `10min` or a bare number; zero or more. Raises UsageError."""
    amount = _parse(str(text), _TIME_UNITS, "a time", "1us, 0.5 ms, 10min or seconds", where)
    if amount < 0:
        raise UsageError(f"{text} is negative", where=where, hint="write e.g. 1us")
    return amount


def format_rate(rate: float, unit: str) -> str:
    """`45 GB/s`, `275 TFLOP/s`: three significant digits, powers of 1000; `unit` without its prefix."""
    for prefix in ("", "k", "M", "G", "T"):
        if abs(rate) < 999.5:
            return f"{rate:.3g} {prefix}{unit}"
        rate /= 1000
    return f"{rate:.4g} P{unit}"


def _positive(text: str | float, units: dict[str, float], kind: str, examples: str, where: str) -> float:
    amount = _parse(str(text), units, kind, examples, where)
    if amount <= 0:
        raise UsageError(f"{text} is not positive", where=where, hint=f"write e.g. {examples}")
    return amount


def _parse(text: str, units: dict[str, float], kind: str, examples: str, where: str) -> float:
    """Number and unit of `text`, in base units; UsageError says which units exist."""
    match = _QUANTITY.fullmatch(text.strip())
    if match is None:
        raise UsageError(f'"{text}" is not {kind}', where=where, hint=f"write e.g. {examples}")
    number, unit = float(match[1]), (match[2] or "").strip()
    if number in (float("inf"), float("-inf")):
        raise UsageError(f'"{text}" is too large', where=where, hint=f"write e.g. {examples}")
    if not unit:
        return number
    if unit not in units:
        hint = (
            f"{unit}B (powers of 1000) or {unit}iB (powers of 1024)?" if f"{unit}iB" in units else f"write {examples}"
        )
        raise UsageError(f'"{text}" is not {kind}: unknown unit "{unit}"', where=where, hint=hint)
    return number * units[unit]


# ---------------------------------------------------------------- printable text
# Makes text from outside harmless for a terminal or a log.

REPLACEMENT = "�"
# C0 and C1 controls, line and paragraph separators, and marks that reorder what is shown.
_CONTROLS = [*range(0x20), *range(0x7F, 0xA0), 0x200E, 0x200F, *range(0x2028, 0x202F), *range(0x2066, 0x206A), 0xFEFF]
_ONE_LINE = {**dict.fromkeys(_CONTROLS, REPLACEMENT), **dict.fromkeys(map(ord, "\t\n\r"), " ")}
_LINES = {code: new for code, new in _ONE_LINE.items() if chr(code) not in "\t\n"}


def printable(text: str) -> str:
    """The text on one line: line ends and tabs are spaces, other control characters are `�`."""
    return text if text.isascii() and text.isprintable() else _whole(text.translate(_ONE_LINE))


def printable_lines(text: str) -> str:
    """Like `printable`, for text of several lines: line ends and tabs stay."""
    return _whole(text.translate(_LINES))


def _whole(text: str) -> str:
    """Replaces lone surrogates, which stand for undecodable bytes of a file name."""
    if not any("\ud800" <= character <= "\udfff" for character in text):
        return text
    return "".join(REPLACEMENT if unicodedata.category(character) == "Cs" else character for character in text)


# ---------------------------------------------------------------- expressions

_OPERATORS: dict[type, Callable[[float, float], float]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Pow: math.pow,
}  # fmt: skip
# The last two are JAX's, in the shapes of programs with symbolic dimensions.
_FUNCTIONS: dict[str, Callable[..., float]] = {
    "min": min, "max": max, "floordiv": operator.floordiv, "mod": operator.mod,
}  # fmt: skip
MOST_TEXT = 2000  # of an expression


def evaluate(text: str, sizes: dict[str, float]) -> float:
    """The value of an arithmetic expression. Raises ValueError with a description of the error."""
    if len(text) > MOST_TEXT:
        raise ValueError("it is too long")
    try:
        return float(_value(ast.parse(text.strip(), mode="eval").body, sizes))
    except (SyntaxError, ZeroDivisionError, RecursionError, OverflowError, MemoryError, TypeError):
        raise ValueError(f"{text!r} is no expression") from None


def _value(node: ast.expr, sizes: dict[str, float]) -> float:
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float) and not isinstance(node.value, bool):
        return float(node.value)
    if isinstance(node, ast.Name):
        if node.id not in sizes:
            raise ValueError(f"{node.id!r} is no name of the rule")
        return sizes[node.id]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand, sizes)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_value(node.left, sizes), _value(node.right, sizes))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _FUNCTIONS and node.args:
        return _FUNCTIONS[node.func.id](*(_value(argument, sizes) for argument in node.args))
    raise ValueError(f"{ast.unparse(node)!r} is not known here")
