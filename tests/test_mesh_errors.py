"""What is said about mesh specifications, shapes and quantities that are wrong, and how right quantities are read."""

from __future__ import annotations

from pathlib import Path

import pytest

from toast_cli.base.errors import SpecError, UsageError
from toast_cli.base.units import format_rate, parse_bandwidth, parse_bytes, parse_flops, parse_seconds
from toast_cli.hardware import load_spec, parse_shape, parse_spec

GIB = 2**30

# What is said about wrong ones: (specification, line, what, hint)
WRONG = [
    ("", None, "holds no specification", "docs/reference/mesh-spec.md"),
    ("- 1\n", 1, "the specification is a list, not a mapping", ""),
    ("chip: v4\nname: [", "2:8", "not valid YAML", ""),
    ("name: x\n", 1, "names no chip", "chip: v4"),
    ("chip: v44\n", 1, 'unknown chip "v44"', 'did you mean "v4"? allowed: v2, v3'),
    ("chip: h10\n", 1, 'unknown chip "h10"', 'did you mean "H100"?'),
    ("chip:\n", 1, "chip is empty", ""),
    (
        "chip: v4\n\ntopologie: {}\n",
        3,
        'unknown key "topologie"',
        'did you mean "topology"? allowed: name, description',
    ),
    ("chip: v4\nchip: v5e\n", 2, '"chip" is given twice', "first on line 1"),
    ("chip:\n  preset: v4\n  memory_gb: 3\n", 3, 'unknown key "memory_gb" in chip', 'did you mean "memory'),
    ("chip:\n  preset: v4\n  memory: 24G\n", 3, 'chip.memory: "24G" is not an amount', "GB (powers of 1000) or GiB"),
    ("chip:\n  preset: v4\n  memory: lots\n", 3, '"lots" is not an amount of memory', "28GiB"),
    ("chip:\n  preset: v4\n  memory: true\n", 3, "chip.memory is true or false", ""),
    ("chip:\n  preset: v4\n  memory: 1GiB\n", 3, "of 1024 MiB of memory nothing is left", "set chip.reserved"),
    ("chip:\n  preset: v4\n  matrix_tile: [1, 2, 3]\n", 3, "needs two numbers", "[128, 128]"),
    ("chip:\n  preset: v4\n  matrix_flops: {bf17: 1e12}\n", 3, 'unknown key "bf17"', 'did you mean "bf16"?'),
    ("chip:\n  preset: v4\n  vector_flops: -1\n", 3, "-1 is not positive", "TFLOP/s"),
    ("chip:\n  name: mine\n", 2, "chip has no platform", "preset"),
    ("chip:\n  preset: v4\n  platform: npu\n", 3, 'chip.platform is "npu"', "allowed: tpu, gpu"),
    ("chip: v4\ntopology:\n  torus: [2, two]\n", 3, 'torus[1] is "two", not a whole number', ""),
    ("chip: v4\ntopology:\n  torus: [0]\n", 3, 'torus[0] is "0"', ""),
    ("chip: v5e\ntopology:\n  torus: [2, 2, 2]\n", 3, "has 3 dimensions; v5e has at most 2", ""),
    ("chip: v5e\ntopology:\n  torus: [32, 16]\n", 3, "512 chips; one v5e slice has at most 256", "topology.network"),
    ("chip: H100\ntopology:\n  torus: [2, 2]\n", 3, "H100 has no torus", "topology.switch"),
    ("chip: v4\ntopology:\n  switch: 8\n", 3, "joined by a torus", "topology.torus"),
    ("chip: v4\ntopology:\n  torus: [4]\n  switch: 8\n", 4, "both torus and switch", "keep the one"),
    ("chip: v4\ntopology:\n  torus: [2, 2]\n  wraparound: [true]\n", 4, "1 entries for 2", ""),
    ("chip: v4\ntopology:\n  torus: [2, 2]\n  wraparound: maybe\n", 4, 'wraparound is "maybe"', "true or false"),
    ("chip: H100\ntopology:\n  switch: 8\n  wraparound: true\n", 4, "belongs to a torus", "topology.torus"),
    ("chip: v4\ntopology:\n  torus: [2]\n  core: {}\n", 4, "this chip is one device", ""),
    ("chip: H100\ntopology:\n  switch: {bandwidth: 1GB/s}\n", 3, "switch has no size", "size"),
    ("chip: H100\ntopology:\n  switch: {size: 8, bandwidth: 450GB}\n", 3, '"450GB" is not a bandwidth', "45GB/s"),
    ("chip: H100\ntopology:\n  switch: 8\n  network: {bandwidth: 1GB/s}\n", 4, "one of hosts and slices", "hosts: 2"),
    ("chip: H100\ntopology:\n  switch: 8\n  network: {hosts: 2, per: host}\n", 4, "says whose the bandwidth is", ""),
    (
        "chip: H100\ntopology:\n  switch: 8\n  network:\n    hosts: 2\n    bandwidth: 1GB/s\n    per: rack\n",
        7,
        'network.per is "rack"',
        "allowed: device, chip, host",
    ),
    ("chip: v4\ntopology:\n  torus: [2]\n  link: {latency: -1us}\n", 4, "-1us is negative", ""),
    (
        "chip: v4\ntopology:\n  torus: [2, 2]\naxes:\n  data: 8\n",
        5,
        "axes data=8 are 8 devices; the topology has 4",
        "x=2",
    ),
    ("chip: v3\ntopology:\n  torus: [2, 2]\naxes:\n  data: 4\n", 5, "the topology has 8", "2 devices a chip"),
    ("chip: v4\naxes:\n  da ta: 1\n", 3, '"da ta" is no axis name', ""),
    ("chip: v4\naxes:\n  None: 1\n", 3, '"None" cannot name an axis', "PartitionSpec"),
    ("chip: v4\naxes: {}\n", 2, "axes is empty", "leave axes out"),
    ("chip: v4\naxes:\n  data: {}\n", 3, "neither size nor over", ""),
    ("chip: v4\naxes:\n  data: x\n", 3, 'axes.data is "x", not a whole number', ""),
    (
        "chip: v4\ntopology:\n  torus: [2, 2]\naxes:\n  data: {size: 2, over: X}\n  model: 2\n",
        5,
        'axes.data.over is "X"',
        'did you mean "x"? allowed: x, y',
    ),
    (
        "chip: v4\ntopology:\n  torus: [2, 2]\naxes:\n  data: {size: 2, over: x}\n  model: {size: 2, over: x}\n",
        5,
        "cannot be mapped onto x=2 x y=2",
        "leave out `over`",
    ),
    (
        "chip: v4\naxes:\n  data: {size: 1, over: x}\n",
        3,
        "names a physical dimension, but the machine is one device",
        "",
    ),
    ("chip: H100\ntopology:\n  switch: 9999999999\n", 3, "9,999,999,999 devices; 1,048,576 are the most", ""),
    ("chip: v4\nmemory_fraction: 1.5\n", 2, 'memory_fraction is "1.5"', "up to 1"),
    ("chip: v4\nmemory_fraction: most\n", 2, 'memory_fraction is "most"', "0.95"),
]


@pytest.mark.parametrize(("body", "line", "what", "hint"), WRONG, ids=[row[2] for row in WRONG])
def test_wrong_specification(body: str, line: int | str | None, what: str, hint: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse_spec(body, "m.yaml")
    assert caught.value.where == ("m.yaml" if line is None else f"m.yaml:{line}")
    assert what in caught.value.what
    assert hint in caught.value.hint


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("v44-32", 'did you mean "v4-32"?'),
        ("h100_64.yaml", 'did you mean "h100-64"?'),
        ("nothing-like-it", "allowed: a100-16, b200-8"),
    ],
)
def test_unknown_name(name: str, hint: str) -> None:
    with pytest.raises(SpecError) as caught:
        load_spec(name)
    assert name in caught.value.what
    assert hint in caught.value.hint
    assert parse_spec(caught.value.hint.partition("with e.g. ")[2], "own.yaml").devices == 8


def test_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="is a directory"):
        load_spec(str(tmp_path))
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00\x80")
    with pytest.raises(SpecError, match="is not UTF-8 text"):
        load_spec(str(tmp_path / "binary.yaml"))
    (tmp_path / "control.yaml").write_text("chip: \x01v4")
    with pytest.raises(SpecError, match=r"control\.yaml: not valid YAML"):
        load_spec(str(tmp_path / "control.yaml"))


@pytest.mark.parametrize(
    ("shape", "what"),
    [
        ({"data": 3}, "data=3 is 3 devices; v4-32 has 16"),
        ({"data": 16, "model": 0}, 'axis "model" has size 0'),
        ({}, "no axes"),
    ],
)
def test_shape_that_does_not_fit(shape: dict[str, int], what: str) -> None:
    with pytest.raises(SpecError) as caught:
        load_spec("v4-32").mesh(shape)
    assert what in caught.value.what
    assert caught.value.where == "--mesh-shape"


def test_shape_hint_lists_what_fits() -> None:
    with pytest.raises(SpecError, match="shapes that fit: data=16, data=8 x model=2, data=4 x model=4"):
        load_spec("v4-32").mesh({"data": 4})


# Words on the command line


@pytest.mark.parametrize(
    ("text", "shape"),
    [("data=8,model=2", {"data": 8, "model": 2}), (" b = 2 , a=1", {"b": 2, "a": 1}), ("x_1=4", {"x_1": 4})],
)
def test_parse_shape(text: str, shape: dict[str, int]) -> None:
    assert list(parse_shape(text).items()) == list(shape.items())


@pytest.mark.parametrize(
    "text", ["", "data", "data=", "data=0", "data=-1", "data=2.5", "8x2", "data=2,,model=2", "1=2"]
)
def test_parse_shape_refuses(text: str) -> None:
    with pytest.raises(UsageError, match="is not an axis"):
        parse_shape(text)


def test_parse_shape_refuses_the_word_for_no_axis() -> None:
    with pytest.raises(UsageError, match='--shapes: "None" cannot name an axis'):
        parse_shape("data=2,None=2", "--shapes")


def test_parse_shape_refuses_a_repeated_axis() -> None:
    with pytest.raises(UsageError, match='--mesh-shape: axis "data" is given twice'):
        parse_shape("data=2,data=2")


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("28GiB", 28 * GIB), ("16 GB", 16_000_000_000), ("512MiB", 2**29), ("1.5KiB", 1536), ("7", 7), ("7B", 7),
        (12, 12), ("1_000", 1000), ("2e3 kB", 2_000_000), ("1TiB", 2**40),
    ],
)  # fmt: skip
def test_parse_bytes(text: str | int, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["", "GiB", "28 gigs", "28G", "-1GiB", "0", "0.5", "1e999", "nan", "28GiB/s"])
def test_parse_bytes_refuses(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_bytes(text, where="--memory-limit")
    assert caught.value.where == "--memory-limit"
    assert caught.value.hint


def test_other_quantities() -> None:
    assert parse_bandwidth("400 Gb/s") == parse_bandwidth("400Gbps") == parse_bandwidth("50GB/s") == 50e9
    assert parse_bandwidth("1GiB/s") == GIB
    assert parse_flops("275 TFLOP/s") == parse_flops("275T") == parse_flops("2.75e14") == 275e12
    assert parse_seconds("1us") == parse_seconds("1µs") == parse_seconds("0.001 ms") == pytest.approx(1e-6)
    assert (parse_seconds("10min"), parse_seconds("2 h"), parse_seconds("90")) == (600, 7200, 90)
    assert [format_rate(rate, "B/s") for rate in (45e9, 1.2e12, 999.9e9)] == ["45 GB/s", "1.2 TB/s", "1 TB/s"]
