"""The user's table of kernels: a YAML file in, and for each kernel its rule and its cost out.

    kernels:
      - name: my_attention*
        rule: ([b, h, q, d], [b, h, k, d], [b, h, k, d])->([b, h, q, d]) need_replication={q, k, d}
        flops: 4*b*h*q*k*d

The rule is in Shardy's notation: dimensions with one name have one sharding, and a name that operands and results do
not share, or that `need_replication` lists, is unsharded. `g*r` is a dimension of two factors, `_` one without a name.
Sizes follow from the kernel's arrays; expressions may use them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import chain
from math import prod
from typing import NamedTuple

from toast_cli.base.errors import InputError
from toast_cli.base.units import MOST_TEXT, evaluate
from toast_cli.base.yamltree import YamlValue, read_yaml
from toast_cli.program.model import Rule, Value, ValueFactors

EXAMPLE = "([b, h, q, d], [b, h, k, d], [b, h, k, d])->([b, h, q, d]) need_replication={q, k, d}"
Names = tuple[str, ...]  # of the factors of one dimension, major to minor

_RULE = re.compile(r"\(([^()]*)\)\s*->\s*\(([^()]*)\)\s*(?:need_replication\s*=\s*\{([^{}]*)\})?\s*")
_ARRAY = re.compile(r"\[([^\[\]]*)\]")
_NAME = re.compile(r"[A-Za-z]\w*")


class Table(NamedTuple):
    """A user's file: its text, and its name for messages."""

    text: str
    where: str


@dataclass(frozen=True)
class UserKernel:
    """A user's entry for kernels whose name, or target, matches a pattern.

    Attributes:
        operands, results: [dimensions] names of each dimension's factors; None without a rule. unsharded: factors that
            are not split. flops, bytes: expressions, "" if not given. where: place in the file.
    """

    pattern: str
    operands: tuple[tuple[Names, ...], ...] | None
    results: tuple[tuple[Names, ...], ...]
    unsharded: frozenset[str]
    flops: str
    bytes: str
    where: str


def read_table(table: Table) -> list[UserKernel]:
    """The kernels of a file, in order; the first match counts. Raises `ToastError` with the line."""
    top = read_yaml(table.text, table.where)
    entries = top if top.is_sequence else top.section("kernels").get("kernels")
    if entries is None or not entries.is_sequence:
        raise InputError("has no list of kernels", where=table.where, hint=f"e.g. - {{name: mine, rule: '{EXAMPLE}'}}")
    return [_entry(entry) for entry in entries.items()]


def _entry(entry: YamlValue) -> UserKernel:
    keys = entry.section("name", "rule", "flops", "bytes")
    if "name" not in keys or len(keys) < 2:
        raise entry.error("a kernel needs a name, and a rule or flops", f"e.g. name: mine, rule: '{EXAMPLE}'")
    operands, results, unsharded = _parsed(keys["rule"]) if "rule" in keys else (None, (), frozenset[str]())
    factors = {name for dims in (*(operands or ()), *results) for names in dims for name in names}
    expressions = {key: keys[key].scalar("an expression") if key in keys else "" for key in ("flops", "bytes")}
    for key, text in expressions.items():
        if text:
            try:
                evaluate(text, dict.fromkeys(factors, 1.0))
            except ValueError as error:
                raise keys[key].error(
                    f"{key}: {error}", "use names of the rule, numbers, + - * / ( ) min max"
                ) from None
    return UserKernel(
        keys["name"].scalar("a name"),
        operands,
        results,
        unsharded,
        expressions["flops"],
        expressions["bytes"],
        entry.where,
    )


def _parsed(entry: YamlValue) -> tuple[tuple[tuple[Names, ...], ...], tuple[tuple[Names, ...], ...], frozenset[str]]:
    text = entry.scalar("a rule")
    match = _RULE.fullmatch(text.strip()) if len(text) <= MOST_TEXT else None
    if match is None or any(_ARRAY.sub("", side).strip(", ") for side in match.groups()[:2]):
        raise entry.error("the rule cannot be read", f"write it as {EXAMPLE}")
    operands, results = (
        tuple(
            tuple(_names(entry, dim) for dim in dims.split(",")) if dims.strip() else ()
            for dims in _ARRAY.findall(side)
        )
        for side in match.groups()[:2]
    )
    operand_names, result_names = (
        {n for dims in side for names in dims for n in names} for side in (operands, results)
    )
    stated = {name.strip() for name in (match[3] or "").split(",") if name.strip()}
    unknown = sorted(stated - operand_names - result_names)
    if unknown:
        raise entry.error(
            f"the rule has no dimension {unknown[0]!r}", f"it has {', '.join(sorted(operand_names | result_names))}"
        )
    return operands, results, frozenset(stated | (operand_names ^ result_names))


def _names(entry: YamlValue, dim: str) -> Names:
    names = tuple(name.strip() for name in dim.split("*"))
    if names in (("_",), ("1",)):
        return ()
    wrong = next((name for name in names if not _NAME.fullmatch(name)), None)
    if wrong is not None or len({*names}) < len(names):
        raise entry.error(f"{dim.strip()!r} is no dimension of a rule", "a name, g*r, or _")
    return names


def find(kernels: list[UserKernel], *names: str) -> UserKernel | None:
    """The first entry whose pattern matches one of the names."""
    return next((entry for entry in kernels if any(name and fnmatchcase(name, entry.pattern) for name in names)), None)


def sizes_of(
    kernel: UserKernel, name: str, operands: list[Value], results: list[Value], sizes: Mapping[str, int] | None = None
) -> dict[str, int]:
    """The size of each named factor; `sizes`: those that are known. Raises `InputError` if the arrays do not match the
    rule."""
    if kernel.operands is None:
        return {}
    dims = [*kernel.operands, *kernel.results]
    counts = (len(operands), len(results)), (len(kernel.operands), len(kernel.results))
    if counts[0] != counts[1]:
        raise _misfit(kernel, name, f"has {counts[0][0]} operands and {counts[0][1]} results, the rule {counts[1]}")
    sizes = dict(sizes or {})
    pairs: list[tuple[Names, int]] = []
    for value, array in zip(chain(operands, results), dims, strict=True):
        if len(value.shape) != len(array):
            raise _misfit(kernel, name, f"has an array {value} where the rule has {len(array)} dimensions")
        pairs += zip(array, value.shape, strict=True)
    for names, size in sorted(pairs, key=lambda pair: len({*pair[0]} - {*sizes})):  # the fewest unknown names first
        open_names = [factor for factor in names if factor not in sizes]
        product = prod(sizes[factor] for factor in names if factor in sizes)
        if len(open_names) == 1 and product and size % product == 0:
            sizes[open_names[0]] = size // product
        elif open_names or (names and product != size):
            raise _misfit(kernel, name, f"has a dimension of {size} elements where the rule has {'*'.join(names)}")
    return sizes


def _misfit(kernel: UserKernel, name: str, what: str) -> InputError:
    return InputError(
        f"kernel {name} {what}", where=kernel.where, hint="one operand or result is one [...] of the rule"
    )


def rule_of(kernel: UserKernel, sizes: dict[str, int], operands: list[Value], results: list[Value]) -> Rule | None:
    """The rule; None if nothing can be split."""
    if kernel.operands is None or all(size == 1 for name, size in sizes.items() if name not in kernel.unsharded):
        return None
    numbers: dict[str, int] = {}
    counts: list[int] = []
    unsharded: set[int] = set()

    def factors(dims: tuple[Names, ...], value: Value) -> ValueFactors:
        factored = []
        for names, size in zip(dims, value.shape, strict=True):
            # Shardy has factors of size 1 only where a dimension has no other.
            for name in (own := tuple(factor for factor in names if sizes[factor] > 1) or names[:1]):
                if name not in numbers:
                    numbers[name] = len(counts)
                    counts.append(sizes[name])
            if not names:
                unsharded.add(len(counts))
                counts.append(size)
            factored.append(tuple(numbers[name] for name in own) or (len(counts) - 1,))
        return tuple(factored)

    of_operands = tuple(factors(dims, value) for dims, value in zip(kernel.operands, operands, strict=True))
    of_results = tuple(factors(dims, value) for dims, value in zip(kernel.results, results, strict=True))
    unsharded |= {numbers[name] for name in kernel.unsharded if name in numbers}
    return Rule(tuple(counts), of_operands, of_results, frozenset(), frozenset(unsharded))


def suggestion(name: str, operands: list[Value], results: list[Value]) -> str:
    """A suggested entry for the user's file: dimensions of equal size get one name."""
    names: dict[int, str] = {}

    def dims(value: Value) -> str:
        letters = []
        for size in value.shape:
            if size > 1 and size not in names and len(names) < len("abcdefghijklmnopqrstuvwxyz"):
                names[size] = chr(ord("a") + len(names))
            letters.append(names.get(size, "_"))
        return f"[{', '.join(letters)}]"

    arrays = [", ".join(map(dims, side)) for side in (operands, results)]
    text = f"({arrays[0]})->({arrays[1]})"
    return f"- {{name: {name}, rule: '{text} need_replication={{…}}', flops: …}}"
