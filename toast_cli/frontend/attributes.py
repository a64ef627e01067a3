"""Reads attributes that a program brings along: `mhlo.sharding`, `tf.aliasing_output`, `jax.result_info` and the like.

MLIR verifies only the attributes that an operation defines. These are discardable attributes, so each may be missing or
of any kind. The functions here return a plain value, or None if the attribute is missing. They raise `InputError` with
the source location if an attribute is of the wrong kind.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from toast_cli.errors import InputError
from toast_cli.frontend.diagnostics import first_error
from toast_cli.printable import printable
from toast_cli.xla import ir, sdy

# Returns the location of an attribute for error messages. It is called only if something is wrong.
Locator = Callable[[], str]
# MLIR's attribute parser recurses once per bracket.
MAX_BRACKETS = 200
_SHOWN = 60


def text(attributes: Mapping[str, Any] | Any, name: str, place: Locator) -> str | None:
    """A string. Bytes that are no UTF-8 become replacement characters."""
    if name not in attributes:
        return None
    return string_value(attributes[name], name, place)


def string_value(attribute: Any, name: str, place: Locator) -> str:
    """The string that an attribute called `name` must be."""
    if not isinstance(attribute, ir.StringAttr):
        raise wrong_kind(attribute, name, "a text", place)
    return bytes(attribute.value_bytes).decode("utf-8", "replace")


def integer(attributes: Mapping[str, Any] | Any, name: str, place: Locator, *, least: int, most: int) -> int | None:
    """A whole number from `least` to `most`."""
    if name not in attributes:
        return None
    attribute = attributes[name]
    if not isinstance(attribute, ir.IntegerAttr):
        raise wrong_kind(attribute, name, "a whole number", place)
    number = int(attribute.value)
    if not least <= number <= most:
        raise wrong_kind(attribute, name, f"a number from {least} to {most}", place)
    return number


def entries(attributes: Mapping[str, Any] | Any, name: str, place: Locator) -> dict[str, Any]:
    """The entries of a dictionary; none where the attribute is missing."""
    if name not in attributes:
        return {}
    return dictionary_value(attributes[name], name, place)


def dictionary_value(attribute: Any, name: str, place: Locator) -> dict[str, Any]:
    """The entries of the dictionary that an attribute called `name` must be."""
    if not isinstance(attribute, ir.DictAttr):
        raise wrong_kind(attribute, name, "a dictionary", place)
    return {str(item.name): item.attr for item in attribute}


def parsed(written: str, name: str, kind: Any, place: Locator) -> Any:
    """Parses a text into an attribute that must be of a given class (`sdy.TensorShardingAttr`).

    Uses the current context.
    """
    if not written.strip() or "\0" in written:
        raise InputError(f"{name} is empty", where=place(), hint=_hint(name))
    if _depth(written) > MAX_BRACKETS:
        raise InputError(f"{name} is nested too deeply", where=place(), hint=_hint(name))
    try:
        attribute = ir.Attribute.parse(written)
    except ir.MLIRError as error:
        what = f"{name} cannot be read: {first_error(error)[1]}"
        raise InputError(what, where=place(), hint=_hint(name)) from None
    return of_kind(attribute, name, kind, place)


def of_kind(attribute: Any, name: str, kind: Any, place: Locator) -> Any:
    """The attribute as one of Shardy's or MLIR's classes."""
    known = kind.isinstance(attribute) if hasattr(kind, "isinstance") else isinstance(attribute, kind)
    if not known:
        raise wrong_kind(attribute, name, _KINDS.get(kind, "what belongs there"), place)
    return kind(attribute)


def wrong_kind(attribute: Any, name: str, wanted: str, place: Locator) -> InputError:
    shown = printable(str(attribute))
    shown = shown if len(shown) <= _SHOWN else f"{shown[: _SHOWN - 1]}…"
    return InputError(f"{name} is {shown}, not {wanted}", where=place(), hint=_hint(name))


def _hint(name: str) -> str:
    return f"correct {name}, or take it out of the program"


def _depth(written: str) -> int:
    depth = deepest = 0
    for character in written:
        if character in "([{<":
            depth += 1
            deepest = max(deepest, depth)
        elif character in ")]}>":
            depth -= 1
    return deepest


_KINDS: dict[Any, str] = {
    sdy.TensorShardingAttr: "the sharding of one array",
    sdy.TensorShardingPerValueAttr: "a list of shardings",
    sdy.OpShardingRuleAttr: "a sharding rule",
    sdy.MeshAttr: "a mesh",
    sdy.ManualAxesAttr: "a list of manual axes",
    ir.DictAttr: "a dictionary",
}
