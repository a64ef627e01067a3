"""Recognising, unpacking and parsing programs of every format, and refusing what is none."""

from __future__ import annotations

import gzip
import io
import random
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import jax
import jax.export
import jax.numpy as jnp
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from toast_cli import xla
from toast_cli.base import children
from toast_cli.base.errors import InputError
from toast_cli.frontend.convert import flatbuffer_bytes, leaf_number, message_fields, strings_are_text
from toast_cli.frontend.formats import hlo_module_proto, read_bytes, recognise
from toast_cli.frontend.loading import load_module, parse

pytestmark = pytest.mark.children  # some programs end the process that reads them


@pytest.fixture(autouse=True, scope="module")
def forks() -> Iterator[None]:
    """A fork starts in milliseconds; threads of the compiler that other tests left are idle."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(children, "may_fork", lambda: True)
        yield


def step(weights: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The one program that is written in every format; its first argument is donated."""
    return weights - 0.1 * weights, jnp.tanh(x @ weights)


ARGUMENTS = (jax.ShapeDtypeStruct((4, 4), jnp.float32), jax.ShapeDtypeStruct((8, 4), jnp.float32))


@cache
def written() -> dict[str, bytes]:
    """The program in every format."""
    jitted = jax.jit(step, donate_argnums=0)
    lowered = jitted.lower(*ARGUMENTS)
    text = lowered.as_text(debug_info=True)
    proto = lowered.compiler_ir("hlo").as_serialized_hlo_module_proto()
    exported = jax.export.export(jitted)(*ARGUMENTS)
    return {
        "stablehlo": text.encode(),
        "bytecode": xla.write_bytecode(xla.parse_module(xla.make_context(), text)),
        "portable": exported.mlir_module_serialized,
        "jax.export": bytes(exported.serialize()),
        "hlo-text": lowered.as_text("hlo").encode(),
        "hlo-proto": proto,
    }


FORMATS = ("stablehlo", "bytecode", "portable", "jax.export", "hlo-text", "hlo-proto")


def zstd_stream(data: bytes) -> bytes:
    """zstd as a pipe writes it: two frames, no sizes in their headers."""
    half = len(data) // 2
    frames = io.BytesIO()
    for part in (data[:half], data[half:]):
        with zstandard.ZstdCompressor().stream_writer(frames, closefd=False, size=-1) as writer:
            writer.write(part)
    return frames.getvalue()


def wrapped(payload: bytes) -> bytes:
    """A protocol buffer message whose field 1 is `payload`: what HloProto is to HloModuleProto."""
    size, length = len(payload), b""
    while size > 0x7F:
        length += bytes([size & 0x7F | 0x80])
        size >>= 7
    return b"\x0a" + length + bytes([size]) + payload


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_is_recognised_and_parsed(name: str) -> None:
    kind, module = parse(written()[name], "program")
    assert kind == name
    main = next(op for op in module.body.operations if op.name.value == "main")
    assert [str(t) for t in main.type.inputs] == ["tensor<4x4xf32>", "tensor<8x4xf32>"]
    assert "tf.aliasing_output" in [item.name for item in main.attributes["arg_attrs"][0]]


@pytest.mark.parametrize(
    ("prefix", "name"),
    [
        (b"\xef\xbb\xbf", "stablehlo"),
        (b"\n// a comment\n", "stablehlo"),
        (b"\xef\xbb\xbf", "hlo-text"),
        (b"\n// a comment\n/* and\nanother */\n", "hlo-text"),
    ],
)
def test_comments_and_byte_order_marks_come_before_text(prefix: bytes, name: str) -> None:
    assert parse(prefix + written()[name], "program")[0] == name


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_protos_around_the_module_are_taken_off(layers: int) -> None:
    proto = written()["hlo-proto"]
    data = proto
    for _ in range(layers):
        data = wrapped(data)
    assert recognise(data) == "hlo-proto"
    assert hlo_module_proto(data) == proto


@pytest.mark.parametrize(
    "pack",
    [
        bytes,
        gzip.compress,
        zstandard.compress,
        zstd_stream,
        lambda data: gzip.compress(zstandard.compress(data)),
        lambda data: zstandard.compress(gzip.compress(gzip.compress(data))),
    ],
    ids=["plain", "gzip", "zstd", "zstd frames", "zstd in gzip", "gzip in gzip in zstd"],
)
def test_compression_is_taken_off(tmp_path: Path, pack: Callable[[bytes], bytes]) -> None:
    path = tmp_path / "program"
    path.write_bytes(pack(written()["stablehlo"]))
    assert read_bytes(str(path)) == written()["stablehlo"]


def test_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    stdin = io.TextIOWrapper(io.BytesIO(gzip.compress(b"module {}")))
    monkeypatch.setattr(sys, "stdin", stdin)
    assert read_bytes("-") == b"module {}"


@pytest.mark.parametrize(
    ("content", "what", "hint"),
    [
        (b"", "the program is empty", "completely"),
        (gzip.compress(b""), "the program is empty", "completely"),
        (gzip.compress(b"module {}" * 99)[:-9], "damaged gzip data", "completely"),
        (gzip.compress(b"module {}" * 99)[:-8] + b"\0" * 8, "damaged gzip data", "completely"),
        (zstandard.compress(b"module {}" * 99)[:-3], "damaged zstd data", "completely"),
        (b"\x28\xb5\x2f\xfd garbage", "damaged zstd data", "completely"),
        (gzip.compress(gzip.compress(gzip.compress(gzip.compress(b"module {}")))), "more than 3 layers", "unpack"),
    ],
    ids=["empty", "empty gzip", "short gzip", "wrong checksum", "short zstd", "no zstd", "too deep"],
)
def test_unreadable_files(tmp_path: Path, content: bytes, what: str, hint: str) -> None:
    path = tmp_path / "program.mlir"
    path.write_bytes(content)
    with pytest.raises(InputError) as caught:
        read_bytes(str(path))
    assert caught.value.where == str(path)
    assert what in caught.value.what
    assert hint in caught.value.hint


def test_missing_files(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such file; check the path"):
        read_bytes(str(tmp_path / "nowhere" / "model.mlir"))
    with pytest.raises(InputError, match="this is a directory"):
        read_bytes(str(tmp_path))
    with pytest.raises(InputError, match="cannot be read"):
        read_bytes("a\0b")


UNPARSABLE = [
    # content, line and column, what, hint
    (b"   \n ", "", "the program is empty", "completely"),
    (b"module {\n  func.func @main() {\n    return %x\n", "3:14", "expected", "complete"),
    (b"module {\n  func.func @main() {\n    foo.bar\n", "3:5", "foo", "StableHLO"),
    (b"mesh: v4-32\naxes: {data: 8}\n", "", "not a program", "toast reads"),
    (b"PK\x03\x04 and \xff so on", "", "not a program", "toast reads"),
    (b"\x93NUMPY\x01\x00v\x00", "", "not a program", "toast reads"),
    (bytes(range(256)), "", "not a program", "toast reads"),
    (
        b"HloModule m\nENTRY e {\n p = f32[4] parameter(0)\n ROOT r = f32[4] ad(p, p)\n}",
        "4:18",
        "Unknown opcode: ad",
        "XLA",
    ),
    (
        b"HloModule m\nENTRY e {\n p = f32[4] parameter(0)\n ROOT r = f32[4] add(p, q)\n}",
        "4:25",
        "does not exist: q",
        "XLA",
    ),
    (b"HloModule m\n", "2:1", "expects name", "XLA"),
    # An assertion that ends the process:
    (b"HloModule m\nENTRY e {\n p = f32[4] parameter(5)\n ROOT r = f32[4] add(p, p)\n}", "", "damaged", "XLA"),
    (b'hlo_module {\n  name: "m"\n}\n', "", "not a program", "toast reads"),
    (b"ML\xefR\x0dMLIR\x00", "", "", "complete"),
    # What overflows the parser's stack:
    (b"module attributes {a = " + b"[" * 200_000 + b"]" * 200_000 + b"} {}", "", "damaged", "complete"),
    (b"module {" * 200_000, "", "damaged", "complete"),
]


@pytest.mark.parametrize(("content", "place", "what", "hint"), UNPARSABLE, ids=range(len(UNPARSABLE)))
def test_unparsable_programs(content: bytes, place: str, what: str, hint: str) -> None:
    with pytest.raises(InputError) as caught:
        parse(content, "model")
    assert caught.value.where == (f"model:{place}" if place else "model")
    assert what in caught.value.what
    assert hint in caught.value.hint
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["bytecode", "portable", "jax.export", "hlo-text", "hlo-proto"])
def test_damaged_files_are_errors_and_nothing_else(name: str) -> None:
    data = bytearray(written()[name])
    dice = random.Random(name)
    for _ in range(5):
        data[dice.randrange(len(data) // 4, len(data))] = dice.randrange(256)
    for damaged in (bytes(data), written()[name][: len(data) * 2 // 3]):
        try:
            parse(damaged, "model")
        except InputError as error:
            assert error.hint


def test_names_that_are_not_text_are_refused() -> None:
    data = written()["bytecode"].replace(b"tf.aliasing_output", b"tf.aliasing\xffoutput")
    assert strings_are_text(written()["bytecode"])
    assert not strings_are_text(data)
    with pytest.raises(InputError, match=r"damaged|not text"):
        load_module("model", content=data)


@settings(max_examples=20)
@given(st.data())
def test_truncated_text_is_an_error_with_a_place(data: st.DataObject) -> None:
    text = written()["stablehlo"]
    end = data.draw(st.integers(1, text.rindex(b"}")))
    cut = text[:end]
    if recognise(cut) == "stablehlo":
        try:
            parse(cut, "model")
        except InputError as error:
            assert error.where.startswith("model")


@given(st.binary(max_size=300))
def test_recognising_never_fails(data: bytes) -> None:
    assert recognise(data) in ("", *FORMATS)
    flatbuffer_bytes(data, 13)
    message_fields(data)
    strings_are_text(data)


@given(st.lists(st.tuples(st.integers(1, 2**20), st.integers(0, 2**63) | st.binary(max_size=200)), max_size=8))
def test_protocol_buffers_are_read_back(fields: list[tuple[int, int | bytes]]) -> None:
    def varint(number: int) -> bytes:
        head = b""
        while number > 0x7F:
            head += bytes([number & 0x7F | 0x80])
            number >>= 7
        return head + bytes([number])

    data = b"".join(
        varint(tag << 3) + varint(value)
        if isinstance(value, int)
        else varint(tag << 3 | 2) + varint(len(value)) + value
        for tag, value in fields
    )
    read = message_fields(data)
    assert read is not None
    assert [(f.tag, f.value, bytes(f.payload)) for f in read] == [
        (tag, value, b"") if isinstance(value, int) else (tag, 0, value) for tag, value in fields
    ]
    assert message_fields(data + b"\xff") is None


@pytest.mark.parametrize(
    ("tree", "path", "expected"),
    [
        (None, (), 0),
        ([None, None], (1,), 1),
        ([[None, None], None], (1,), 2),
        ([[None, [], None], None], (0, 2), 1),
        ([[None], None], (0,), None),
        ([None], (3,), None),
        ([None], (0, 0), None),
    ],
)
def test_places_in_nested_tuples(tree: object, path: tuple[int, ...], expected: int | None) -> None:
    assert leaf_number(tree, path) == expected


@pytest.mark.parametrize("numbers", ["dimensions={}", "dimensions={}, replica_groups={}"])
def test_a_list_that_is_too_short(numbers: str) -> None:
    root = f"ROOT g = f32[64,128] all-gather(p), {numbers}"
    text = f"HloModule m\nENTRY e {{\n  p = f32[64,128] parameter(0)\n  {root}\n}}\n"
    with pytest.raises(InputError, match=r"range_check|Syntax error"):
        load_module("m.hlo", content=text.encode())
