"""The mutation engine: an intact input and a random generator go in, a damaged input comes out.

Three views of an input are mutated: its bytes, its words (for text, also of other formats), and its tree (for JSON).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

# What numbers and words are replaced by: limits, wrong kinds, things that mean something elsewhere.
NUMBERS = [
    b"0", b"-1", b"1", b"2", b"3", b"7", b"127", b"128", b"255", b"65536", b"2147483647", b"2147483648",
    b"4294967296", b"9223372036854775807", b"9223372036854775808", b"-9223372036854775808", b"1e400", b"1e-400",
    b"nan", b"9" * 40, b"9" * 5000, b"0x10", b"1_000", b"0.5",
]  # fmt: skip
WORDS = [
    b"", b"?", b"*", b"@main", b"@mesh", b"%0", b"tensor<?xf32>", b"tensor<*xf32>", b"tensor<0xf32>",
    b"tensor<f32>", b"tensor<4xcomplex<f32>>", b"tensor<4x!quant.uniform<i8:f32, 1.0>>", b"i1", b"ui64",
    b"f8E4M3FN", b"tuple<>", b"!stablehlo.token", b"none", b"index", b"memref<4xf32>", b'""', b'"\\00"',
    b'"\\FF\\FE"', b'"\\1B[31m"', b"unit", b"true", b"null", b"[]", b"{}", b"dense<0> : tensor<4xi32>",
    b"dense<[]> : tensor<0xi64>", b"#sdy.sharding<@mesh, [{}]>", b"#sdy.sharding_per_value<[]>",
    b"{devices=[2,2]<=[4]}", b"{maximal device=0}", b"..", b"/dev/null", b"data", b"model", b"v4-32", b"fsdp:data",
    b"\xc2\x9b31m", b"\xe2\x80\xae", b"\x1b]0;x\x07", b"\n::error::x",
]  # fmt: skip
ATTRIBUTES = [
    b"mhlo.sharding", b"sdy.sharding", b"tf.aliasing_output", b"jax.buffer_donor", b"jax.result_info",
    b"mhlo.frontend_attributes", b"mhlo.num_replicas", b"mhlo.num_partitions", b"sdy.sharding_rule",
    b"mhlo.is_dynamic", b"sym_visibility", b"mhlo.layout_mode", b"mhlo.input_output_alias",
    b"mhlo.xla_entry_computation_parameter_layouts",
]  # fmt: skip
VALUES = [
    b"5", b"5 : i32", b"-1 : i32", b"99 : i64", b'""', b'"x"', b'"\\FF"', b"[1]", b"[]", b"{}", b"unit", b"true",
    b"dense<1> : tensor<2xi64>", b"@main", b"f32", b'"{replicated}"',
    b'"{devices=[1000000,1000000]<=[1000000000000]}"', b'"{devices=[2,1]0,1}"', b'"{manual}"', b'"{devices=["',
    b'{xla.sdy.sharding = ""}', b'{xla.sdy.sharding = "#sdy.sharding_per_value<[<@mesh, [{}]>]>"}',
    b'{xla.sdy.sharding_rule = ""}', b"{xla.sdy.meshes = 5}", b'{xla.sdy.meshes = "{m = #sdy.mesh<[]>}"}',
    b"#sdy.sharding<@nowhere, [{}]>", b'#sdy.mesh<["a"=2]>', b"#sdy.sharding_per_value<[]>",
]  # fmt: skip
_TOKEN = re.compile(rb'"(?:[^"\\\n]|\\.)*"|[A-Za-z_%@#!.][\w.$%@#]*|-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?|\s+|.', re.DOTALL)
_NUMBER = re.compile(rb"-?\d+")
_BRACES = re.compile(rb"\{")

Mutation = Callable[[bytes, Random], bytes]


def mutated(data: bytes, others: Sequence[bytes], rng: Random, text: bool) -> bytes:
    """The input after one to six mutations; parts of the `others` may get into it."""
    for _ in range(rng.choice((1, 1, 1, 2, 3, 6))):
        if others and rng.random() < 0.08:
            data = spliced(data, rng.choice(others), rng)
        else:
            data = rng.choice(TEXTUAL if text and rng.random() < 0.85 else BINARY)(data, rng)
    return data[: 1 << 20]


# -- bytes ------------------------------------------------------------------------------------------------------------


def _slice(data: bytes, rng: Random, most: int = 64) -> tuple[int, int]:
    start = rng.randrange(len(data) + 1)
    return start, min(len(data), start + rng.randrange(1, most))


def flipped(data: bytes, rng: Random) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 8))):
        if changed:
            changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def overwritten(data: bytes, rng: Random) -> bytes:
    start, end = _slice(data, rng, 9)
    filling = rng.choice((b"\0", b"\xff", b"\x7f", b"\x80", rng.randbytes(8)))
    return data[:start] + (filling * 8)[: end - start] + data[end:]


def inserted(data: bytes, rng: Random) -> bytes:
    start, _ = _slice(data, rng)
    return data[:start] + rng.randbytes(rng.randrange(1, 9)) + data[start:]


def deleted(data: bytes, rng: Random) -> bytes:
    start, end = _slice(data, rng)
    return data[:start] + data[end:]


def repeated(data: bytes, rng: Random) -> bytes:
    start, end = _slice(data, rng)
    return data[:start] + data[start:end] * rng.choice((2, 3, 100, 2000)) + data[end:]


def cut(data: bytes, rng: Random) -> bytes:
    return data[: rng.randrange(len(data) + 1)]


def moved(data: bytes, rng: Random) -> bytes:
    start, end = _slice(data, rng)
    piece, rest = data[start:end], data[:start] + data[end:]
    to = rng.randrange(len(rest) + 1)
    return rest[:to] + piece + rest[to:]


def spliced(data: bytes, other: bytes, rng: Random) -> bytes:
    return data[: rng.randrange(len(data) + 1)] + other[rng.randrange(len(other) + 1) :]


# -- words ------------------------------------------------------------------------------------------------------------


def _words(data: bytes) -> list[bytes]:
    return _TOKEN.findall(data[: 1 << 16]) + ([data[1 << 16 :]] if len(data) > 1 << 16 else [])


def another_number(data: bytes, rng: Random) -> bytes:
    places = list(_NUMBER.finditer(data[: 1 << 16]))
    if not places:
        return inserted(data, rng)
    place = rng.choice(places)
    return data[: place.start()] + rng.choice(NUMBERS) + data[place.end() :]


def another_word(data: bytes, rng: Random) -> bytes:
    words = _words(data)
    if words:
        number = rng.randrange(len(words))
        words[number] = rng.choice((rng.choice(WORDS), rng.choice(words)))
    return b"".join(words)


def without_a_word(data: bytes, rng: Random) -> bytes:
    words = _words(data)
    if words:
        start = rng.randrange(len(words))
        del words[start : start + rng.choice((1, 1, 2, 5))]
    return b"".join(words)


def words_swapped(data: bytes, rng: Random) -> bytes:
    words = [*_words(data), b" ", b" "]
    first, second = rng.randrange(len(words)), rng.randrange(len(words))
    words[first], words[second] = words[second], words[first]
    return b"".join(words)


def lines_changed(data: bytes, rng: Random) -> bytes:
    lines = data.split(b"\n")
    number, other = rng.randrange(len(lines)), rng.randrange(len(lines))
    change = rng.randrange(4)
    if change == 0:
        del lines[number]
    elif change == 1:
        lines.insert(other, lines[number])
    elif change == 2:
        lines[number], lines[other] = lines[other], lines[number]
    else:
        lines[number : number + 1] = [lines[number]] * rng.choice((2, 50))
    return b"\n".join(lines)


def with_an_attribute(data: bytes, rng: Random) -> bytes:
    places = [place.end() for place in _BRACES.finditer(data[: 1 << 16])]
    at = rng.choice(places) if places else rng.randrange(len(data) + 1)
    return data[:at] + rng.choice(ATTRIBUTES) + b" = " + rng.choice(VALUES) + b", " + data[at:]


def with_a_word(data: bytes, rng: Random) -> bytes:
    at = rng.randrange(len(data) + 1)
    return data[:at] + rng.choice(WORDS) + data[at:]


def nested(data: bytes, rng: Random) -> bytes:
    start, end = _slice(data, rng)
    left, right = rng.choice(((b"(", b")"), (b"[", b"]"), (b"{", b"}"), (b"<", b">"), (b'"', b'"')))
    depth = rng.choice((1, 3, 1500))
    return data[:start] + left * depth + data[start:end] + right * depth + data[end:]


BINARY: list[Mutation] = [flipped, flipped, flipped, overwritten, overwritten, inserted, deleted, repeated, cut, moved]
TEXTUAL: list[Mutation] = [
    another_number, another_number, another_word, another_word, without_a_word, words_swapped, lines_changed,
    with_an_attribute, with_an_attribute, with_a_word, nested, repeated,
]  # fmt: skip


# -- words, such that the program often still makes sense
# ---------------------------------------------------------------

SMALL = [b"0", b"1", b"2", b"3", b"4", b"5", b"6", b"8", b"16", b"64", b"1000", b"65536", b"1073741824"]
ELEMENTS = [
    b"f32", b"bf16", b"f16", b"f64", b"i32", b"i1", b"ui8", b"i64", b"complex<f32>", b"f8E4M3FN", b"i4", b"ui64",
]  # fmt: skip
ALIKE = [
    [
        b"stablehlo.add",
        b"stablehlo.multiply",
        b"stablehlo.maximum",
        b"stablehlo.subtract",
        b"stablehlo.power",
        b"stablehlo.remainder",
        b"stablehlo.and",
    ],
    [
        b"stablehlo.abs",
        b"stablehlo.negate",
        b"stablehlo.exponential",
        b"stablehlo.sine",
        b"stablehlo.sign",
        b"stablehlo.optimization_barrier",
        b"stablehlo.not",
    ],
    [b"LT", b"LE", b"GT", b"GE", b"EQ", b"NE"],
    [b'"x"', b'"y"', b'"x":(1)2', b'"x":(2)2', b"?", b""],
    [b"add(", b"multiply(", b"maximum(", b"subtract(", b"and("],
    [b"replicated", b"devices=[4,2]<=[8]", b"devices=[2,2]<=[4]", b"maximal device=0", b"manual"],
]
_DIMENSION = re.compile(rb"(?<=[<x\[,])\d+(?=[x,\]])")
_ELEMENT = re.compile(rb"(?<=x)(?:f32|bf16|i32|i1|f64)(?=>)|\bf32(?=\[)")


def dimension_renamed(data: bytes, rng: Random) -> bytes:
    """One size, everywhere."""
    sizes = sorted(set(_DIMENSION.findall(data)))
    if not sizes:
        return data
    old, new = rng.choice(sizes), rng.choice(SMALL)
    return _DIMENSION.sub(lambda match: new if match[0] == old else match[0], data)


def element_renamed(data: bytes, rng: Random) -> bytes:
    """One type of elements, everywhere."""
    new = rng.choice(ELEMENTS)
    return _ELEMENT.sub(new, data)


def one_alike(data: bytes, rng: Random) -> bytes:
    """A word for another of its kind, once or everywhere."""
    present = [(word, group) for group in ALIKE for word in group if word and word in data]
    if not present:
        return data
    word, group = rng.choice(present)
    places = [place.start() for place in re.finditer(re.escape(word), data)]
    new, at = rng.choice(group), rng.choice(places)
    return data.replace(word, new) if rng.random() < 0.3 else data[:at] + new + data[at + len(word) :]


def small_number(data: bytes, rng: Random) -> bytes:
    places = list(_NUMBER.finditer(data[: 1 << 16]))
    if not places:
        return data
    place = rng.choice(places)
    return data[: place.start()] + rng.choice(SMALL) + data[place.end() :]


# Behind these a dictionary of attributes may stand, or there is one to add to.
_OPEN = re.compile(rb"\{(?=[a-z_.]+ = )|(?<=[a-z0-9)])(?= : \(?tensor)|(?<=>)(?=, %\w+: tensor|\) -> )")


def annotated(data: bytes, rng: Random) -> bytes:
    """An attribute of any kind where one may stand."""
    places = list(_OPEN.finditer(data[: 1 << 16]))
    if not places:
        return data
    place = rng.choice(places)
    attribute = rng.choice(ATTRIBUTES) + b" = " + rng.choice(VALUES)
    added = b"{" + attribute + b", " if place[0] else b" {" + attribute + b"}"
    return data[: place.start()] + added + data[place.end() :]


GENTLE: list[Mutation] = [
    dimension_renamed, dimension_renamed, element_renamed, one_alike, one_alike, one_alike, small_number,
    annotated, annotated, annotated,
]  # fmt: skip


def mutated_gently(data: bytes, rng: Random) -> bytes:
    """The text after one or two mutations that a parser may well accept."""
    for _ in range(rng.choice((1, 1, 2, 3))):
        data = rng.choice(GENTLE)(data, rng)
    return data


# -- trees ------------------------------------------------------------------------------------------------------------

LEAVES: list[Any] = [
    None, True, 0, -1, 1.5, 1e308, 2**63, 10**30, "", "x", "a\0b", "\x1b[31m", "\ud800", "../../x", [], {}, [[]],
    {"": None}, [1], "data", "nan",
]  # fmt: skip


def mutated_json(data: bytes, rng: Random) -> bytes:
    """JSON with values of other kinds, keys that are missing or too many, and deep or long parts."""
    facts = json.loads(data)
    for _ in range(rng.choice((1, 1, 2, 4))):
        facts = _changed(facts, rng)
    return json.dumps(facts).encode("utf-8", "surrogatepass")


def _changed(facts: Any, rng: Random) -> Any:
    if rng.random() < 0.15 or not isinstance(facts, dict | list) or not facts:
        return _deep(rng) if rng.random() < 0.1 else rng.choice(LEAVES)
    key: Any = rng.choice(list(facts)) if isinstance(facts, dict) else rng.randrange(len(facts))
    change = rng.randrange(8)
    copy: Any = facts.copy()
    if change == 0:
        del copy[key]
    elif change == 1 and isinstance(copy, list):
        copy *= rng.choice((2, 100))
    elif change == 2 and isinstance(copy, dict):
        copy[rng.choice((f"{key}x", "", "schema", "\x1b"))] = copy[key]
    else:
        copy[key] = _changed(copy[key], rng)
    return copy


def _deep(rng: Random) -> Any:
    facts: Any = 1
    for _ in range(rng.choice((10, 300))):
        facts = [facts] if rng.random() < 0.5 else {"a": facts}
    return facts
