"""Mesh specifications: what they say, how axes lie on physical links, and what `toast mesh` shows of them."""

from __future__ import annotations

import dataclasses
import re
from importlib.resources import files
from math import prod
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from toast_cli.base.errors import ToastError, UsageError
from toast_cli.cli.mesh import mesh_app
from toast_cli.hardware import (
    Spec,
    available_specs,
    chip_names,
    find_preset,
    load_spec,
    matrix_rate,
    parse_shape,
    parse_spec,
)
from toast_cli.hardware.topology import divisors, wraparound

GIB = 2**30

# name: devices, dimensions (innermost first; * marks a ring), default axes, usable GiB of a device.
READY = {
    "v2-8": (8, "core=2 x=2 y=2", "data=4 x model=2", 7.48),
    "v3-32": (32, "core=2 x=4 y=4", "data=16 x model=2", 15.48),
    "v4-32": (16, "x=2 y=2 z=4", "data=8 x model=2", 30.75),
    "v4-128": (64, "x=4* y=4* z=4*", "data=16 x model=4", 30.75),
    "v5e-16": (16, "x=4 y=4", "data=4 x model=4", 15.75),
    "v5e-256": (256, "x=16* y=16*", "data=16 x model=16", 15.75),
    "v5p-64": (32, "x=2 y=4 z=4", "data=8 x model=4", 95.74),
    "v6e-64": (64, "x=8 y=8", "data=8 x model=8", 31.25),
    "tpu7x-8": (8, "core=2 x=2 y=2", "data=4 x model=2", 94.75),
    "tpu7x-128": (128, "core=2 x=4* y=4* z=4*", "data=16 x model=8", 94.75),
    "p100-8": (8, "switch=8", "data=4 x model=2", 15.89),
    "v100-8": (8, "switch=8", "data=4 x model=2", 31.77),
    "a100-16": (16, "switch=8 network=2", "data=2 x model=8", 79.26),
    "h100-8": (8, "switch=8", "data=4 x model=2", 79.11),
    "h100-64": (64, "switch=8 network=8", "data=8 x model=8", 79.11),
    "h200-8": (8, "switch=8", "data=4 x model=2", 139.75),
    "b200-8": (8, "switch=8", "data=4 x model=2", 178.36),
}


def dimensions_of(spec: Spec) -> str:
    return " ".join(f"{d.name}={d.size}{'*' if d.kind == 'ring' else ''}" for d in spec.dimensions)


def links_of(spec: Spec, shape: str) -> dict[str, str]:
    """Axis -> its links as `x:line4@45` (dimension, kind, size, GB/s), innermost first."""
    return {
        axis.name: " ".join(f"{k.dimension}:{k.kind}{k.size}@{k.bytes_per_second / 1e9:g}" for k in axis.links)
        for axis in spec.mesh(parse_shape(shape)).axes
    }


def spec_from(body: str) -> Spec:
    return parse_spec(body, "m.yaml")


# Ready specifications


def test_ready_specs_are_the_listed_ones() -> None:
    assert sorted(available_specs()) == sorted(READY)


@pytest.mark.parametrize("name", READY)
def test_ready_spec(name: str) -> None:
    devices, dimensions, axes, usable = READY[name]
    spec = load_spec(name)
    mesh = spec.mesh()
    assert (spec.name, spec.devices, mesh.devices, dimensions_of(spec), str(mesh)) == (
        name, devices, devices, dimensions, axes,
    )  # fmt: skip
    assert spec.description
    assert (spec.chip.memory_bytes - spec.chip.reserved_bytes) / GIB == pytest.approx(usable, abs=0.01)
    assert mesh.limit_bytes / GIB == pytest.approx(usable * spec.memory_fraction, abs=0.01)
    assert spec.memory_fraction == (0.95 if spec.chip.platform == "tpu" else 0.9)


def shapes_of(spec: Spec) -> list[dict[str, int]]:
    """The shapes that toast tries, and those with three axes that follow from them."""
    pairs = [shape for shape in spec.mesh_shapes() if "model" in shape]
    triples = [
        {"data": shape["data"] // size, "fsdp": size, "model": shape["model"]}
        for shape in pairs
        for size in divisors(shape["data"])[1:-1]
    ]
    return [*spec.mesh_shapes(), *triples]


@pytest.mark.parametrize("name", READY)
def test_every_shape_of_a_ready_spec_covers_its_devices(name: str) -> None:
    spec = load_spec(name)
    shapes = shapes_of(spec)
    assert len({tuple(shape.items()) for shape in shapes}) == len(shapes)
    for shape in shapes:
        mesh = spec.mesh(shape)
        assert prod(shape.values()) == mesh.devices == spec.devices
        for axis in mesh.axes:
            assert prod(link.size for link in axis.links) == axis.size
        for dimension in spec.dimensions:
            pieces = [link for axis in mesh.axes for link in axis.links if link.dimension == dimension.name]
            assert prod(link.size for link in pieces) == dimension.size


def test_ready_specs_ship_inside_the_package_and_are_those_at_the_top() -> None:
    packaged = {file.name: file.read_text() for file in (files("toast_cli.hardware") / "specs").iterdir()}
    top = {file.name: file.read_text() for file in (Path(__file__).parents[1] / "mesh_specs").glob("*.yaml")}
    assert packaged == top


def test_specs_are_found_by_name_with_and_without_ending_and_a_file_comes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert load_spec("v4-32.yaml").mesh() == load_spec("v4-32").mesh()
    monkeypatch.chdir(tmp_path)
    Path("v4-32.yaml").write_text("name: mine\nchip: v5e\ntopology: {torus: [2, 2]}\n")
    assert load_spec("v4-32.yaml").name == "mine"
    assert load_spec("v4-32").name == "v4-32"


def test_names_sort_by_number() -> None:
    names = available_specs()
    assert names.index("v4-32") < names.index("v4-128") and names.index("h100-8") < names.index("h100-64")


# Chips


@pytest.mark.parametrize("name", chip_names())
def test_every_figure_of_a_preset_names_its_source(name: str) -> None:
    preset = find_preset(name)
    figures = {field.name for field in dataclasses.fields(preset.chip)} - {"name", "platform", "preset", "sources"}
    assert set(preset.chip.sources) == figures
    assert set(preset.sources) == set(preset.wires)
    assert all([*preset.chip.sources.values(), *preset.sources.values()])
    assert 0 < preset.chip.reserved_bytes < 0.1 * preset.chip.memory_bytes


@pytest.mark.parametrize(
    ("chip", "dtype", "rate"),
    [
        ("v4", "bf16", 275e12),
        ("v4", "f16", 275e12),  # not listed: the next wider one is f32, one bf16 pass
        ("v4", "f8E4M3FN", 275e12),  # not listed: the next wider one is bf16
        ("v4", "i8", 275e12),
        ("v4", "f64", 275e12 / 2),  # wider than all: by width
        ("v3", "bf16", 61.5e12),  # half a chip
        ("tpu7x", "f8E5M2", 2307e12),
        ("P100", "bf16", 10.6e12),  # no bf16: runs as f32
        ("P100", "f16", 21.2e12),
        ("V100", "bf16", 15.7e12),
        ("A100-80", "f32", 156e12),  # TF32
        ("A100-80", "complex<f32>", 156e12),
        ("A100-80", "ui8", 624e12),
        ("H100", "f8E4M3FN", 1979e12),
    ],
)
def test_matrix_rate(chip: str, dtype: str, rate: float) -> None:
    assert matrix_rate(find_preset(chip).chip, dtype) == pytest.approx(rate)


@pytest.mark.parametrize(
    ("shape", "wrap_edge", "rings"),
    [
        ((4, 4, 4), 0, (True, True, True)),  # v4, v5p: one full cube
        ((4, 4, 8), 0, (True, True, True)),
        ((2, 2, 4), 0, (False, False, False)),  # smaller than a cube
        ((2, 4, 4), 0, (False, False, False)),
        ((4, 4), 0, (False, False)),
        ((16, 16), 16, (True, True)),  # v5e, v6e: only a dimension of 16
        ((8, 16), 16, (False, True)),
        ((8, 8), 16, (False, False)),
        ((16, 16), 32, (False, False)),  # v3: only the whole pod
        ((32, 32), 32, (True, True)),
    ],
)
def test_wraparound_rules(shape: tuple[int, ...], wrap_edge: int, rings: tuple[bool, ...]) -> None:
    assert wraparound(shape, wrap_edge) == rings


# Axes on physical links


@pytest.mark.parametrize(
    ("spec", "shape", "links"),
    [
        # whole dimensions
        ("v4-32", "data=8,model=2", {"data": "y:line2@45 z:line4@45", "model": "x:line2@45"}),
        ("v4-32", "data=4,model=4", {"data": "z:line4@45", "model": "x:line2@45 y:line2@45"}),
        ("v4-128", "a=4,b=4,c=4", {"a": "z:ring4@45", "b": "y:ring4@45", "c": "x:ring4@45"}),
        ("v4-32", "data=16", {"data": "x:line2@45 y:line2@45 z:line4@45"}),
        # a cut ring: the inner 8 are a line; pairs 8 apart close a ring whose links 8 of them share: 45 / 8 GB/s
        ("v5e-256", "data=32,model=8", {"data": "x:ring2@5.625 y:ring16@45", "model": "x:line8@45"}),
        # a cut line stays a line
        ("v5e-16", "data=8,model=2", {"data": "x:line2@22.5 y:line4@45", "model": "x:line2@45"}),
        # two cores a chip: they share each link (100 / 2), and the last axis gets the core
        ("v3-32", "data=16,model=2", {"data": "x:line4@50 y:line4@50", "model": "core:switch2@225"}),
        # the network goes to the first axes
        ("a100-16", "data=2,model=8", {"data": "network:network2@25", "model": "switch:switch8@300"}),
        (
            "a100-16",
            "data=8,model=2",
            {"data": "switch:switch4@300 network:network2@25", "model": "switch:switch2@300"},
        ),
        ("h100-64", "a=4,b=16", {"a": "network:network4@50", "b": "switch:switch8@450 network:network2@50"}),
        # axes of one device take no links
        ("v4-32", "data=16,model=1", {"data": "x:line2@45 y:line2@45 z:line4@45", "model": ""}),
    ],
)
def test_axis_links(spec: str, shape: str, links: dict[str, str]) -> None:
    assert links_of(load_spec(spec), shape) == links


def test_a_strided_piece_has_longer_hops() -> None:
    data, _ = load_spec("v5e-256").mesh({"data": 32, "model": 8}).axes
    assert [(link.dimension, link.stride, link.latency_seconds) for link in data.links] == [
        ("x", 8, 8e-6),
        ("y", 1, 1e-6),
    ]


def test_over_says_where_an_axis_runs() -> None:
    spec = spec_from(
        "chip: v4\ntopology: {torus: [2, 2, 4]}\naxes:\n  data: {over: [x, z]}\n  model: {size: 2, over: y}\n"
    )
    assert spec.axes == {"data": 8, "model": 2}
    assert links_of(spec, "data=8,model=2") == {"data": "x:line2@45 z:line4@45", "model": "y:line2@45"}
    # another shape is laid freely
    assert links_of(spec, "data=4,model=4") == links_of(load_spec("v4-32"), "data=4,model=4")


def test_without_axes_the_tool_chooses_a_balanced_shape() -> None:
    spec = spec_from("chip: v4\ntopology: {torus: [2, 2, 4]}\n")
    assert spec.axes is None
    assert str(spec.mesh()) == "data=4 x model=4"
    assert str(spec_from("chip: v3\ntopology: {torus: [2, 2]}").mesh()) == "data=4 x model=2"
    assert str(spec_from("chip: v5e").mesh()) == "data=1"


def test_mesh_shapes_in_order() -> None:
    spec = load_spec("v4-32")
    assert spec.mesh_shapes() == [
        {"data": 16},
        {"data": 8, "model": 2},
        {"data": 4, "model": 4},
        {"data": 2, "model": 8},
    ]
    assert spec_from("chip: H100\ntopology: {switch: 7}").mesh_shapes() == [{"data": 7}]
    assert spec_from("chip: v5e").mesh_shapes() == [{"data": 1}]


@given(st.lists(st.sampled_from([1, 2, 3, 4, 6]), min_size=1, max_size=3), st.integers(1, 4), st.data())
def test_any_shape_of_the_right_product_can_be_laid(torus: list[int], hosts: int, data: st.DataObject) -> None:
    spec = spec_from(f"chip: v4\ntopology: {{torus: {torus}, network: {{slices: {hosts}}}}}\n")
    shape = data.draw(st.sampled_from(shapes_of(spec)))
    assert spec.mesh(shape).devices == prod(torus) * hosts


# Specifications in full


def test_chip_overrides_keep_the_rest_and_name_their_line() -> None:
    spec = spec_from("chip:\n  preset: v4\n  memory: 24GiB\n  matrix_flops: {bf16: 200T}\n")
    v4 = find_preset("v4").chip
    assert spec.chip.memory_bytes == 24 * GIB
    assert spec.chip.matrix_flops == {**v4.matrix_flops, "bf16": 200e12}
    assert spec.chip.vector_flops == v4.vector_flops
    assert spec.chip.sources["memory_bytes"] == "m.yaml:2"
    assert spec.limit_bytes == int((24 - 1.25) * GIB * 0.95)


def test_inline_chip_and_explicit_topology() -> None:
    spec = spec_from(
        """
        chip:
          name: abacus
          platform: gpu
          matrix_flops: {bf16: 100 TFLOP/s, f32: 5e13}
          vector_flops: 10T
          matrix_tile: [16, 8]
          memory: 10 GB
          memory_bandwidth: 1TB/s
        topology:
          switch: {size: 4, bandwidth: 100GB/s, latency: 2us}
          network: {hosts: 2, bandwidth: 400Gb/s, per: host, latency: 0.01 ms}
        memory_fraction: 0.5
        """
    )
    assert (spec.chip.name, spec.chip.platform, spec.chip.matrix_tile) == ("abacus", "gpu", (16, 8))
    assert spec.chip.matrix_flops == {"bf16": 100e12, "f32": 50e12}
    assert spec.limit_bytes == 5_000_000_000
    switch, network = spec.dimensions
    assert (switch.bytes_per_second, switch.latency_seconds) == (100e9, 2e-6)
    # 400 Gb/s are 50 GB/s, shared by the 4 devices of a host
    assert (network.bytes_per_second, network.latency_seconds) == (12.5e9, pytest.approx(1e-5))


def test_slices_over_a_network_share_the_host_bandwidth() -> None:
    # v3: 4 chips of 2 devices a host, so 25 GB/s a host are 3.125 a device; 10 GB/s a chip are 5 a device.
    per_host = spec_from("chip: v3\ntopology: {torus: [4, 4], network: {slices: 2, bandwidth: 25GB/s, per: host}}")
    per_chip = spec_from("chip: v3\ntopology: {torus: [4, 4], network: {slices: 2, bandwidth: 10GB/s, per: chip}}")
    assert per_host.devices == 64
    assert per_host.dimensions[-1].bytes_per_second == 25e9 / 8
    assert per_chip.dimensions[-1].bytes_per_second == 5e9


def test_wraparound_and_link_as_written() -> None:
    spec = spec_from(
        "chip: v4\ntopology:\n  torus: [2, 2, 4]\n  wraparound: [no, false, true]\n"
        "  link: {bandwidth: 50GB/s, latency: 2us}\n"
    )
    assert [(d.kind, d.bytes_per_second, d.latency_seconds) for d in spec.dimensions] == [
        ("line", 50e9, 2e-6),
        ("line", 50e9, 2e-6),
        ("ring", 50e9, 2e-6),
    ]


def test_memory_limit_replaces_the_specified_one() -> None:
    assert load_spec("v4-32").mesh(memory_limit=7).limit_bytes == 7
    with pytest.raises(UsageError, match="memory limit of 0 bytes"):
        load_spec("v4-32").mesh(memory_limit=0)


DOCUMENT = (Path(__file__).parents[1] / "docs" / "reference" / "mesh-spec.md").read_text()


@pytest.mark.parametrize("example", re.findall(r"```yaml\n(.*?)```", DOCUMENT, re.DOTALL))
def test_documented_example(example: str) -> None:
    assert spec_from(example).mesh().devices > 1


def test_document_names_every_chip() -> None:
    assert all(f"`{name}`" in DOCUMENT for name in chip_names())


# The command


def run(*arguments: str) -> str:
    result = CliRunner(env={"COLUMNS": "100"}).invoke(mesh_app, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0
    return result.stdout


def test_mesh_list_shows_every_ready_spec() -> None:
    lines = run("list").splitlines()
    assert {line.split()[0] for line in lines} >= set(READY)


def test_mesh_show() -> None:
    shown = run("show", "v4-32")
    for part in (
        "v4-32  TPU v4 slice, 16 chips",
        "16 devices, data=8 × model=2",
        "29.2 GiB a device for plans (95.0% of 30.8 GiB usable)",
        "bf16 275 TFLOP/s",
        "4 o─o─o─o    45 GB/s",
        "y: line of 2, 45 GB/s",
        "data=16, data=8 × model=2, data=4 × model=4, data=2 × model=8",
    ):
        assert part in shown
    assert "\x1b" not in shown


def test_mesh_show_of_another_shape_and_of_every_ready_spec() -> None:
    assert "32  x: ring of 2, 5.62 GB/s" in run("show", "v5e-256", "--mesh-shape", "data=32,model=8")
    for name in READY:
        assert run("show", name).startswith(name)


def test_mesh_validate(tmp_path: Path) -> None:
    good = tmp_path / "good.yaml"
    good.write_text("chip: v4\ntopology: {torus: [2, 2]}\n")
    assert run("validate", str(good)) == f"{good}: valid: 4 devices (v4), data=2 x model=2 (chosen by the tool)\n"
    good.write_text("chip: v4\ntopology: {torus: 2.5}\n")
    with pytest.raises(ToastError, match=r"good\.yaml:2"):
        run("validate", str(good))
    with pytest.raises(ToastError, match="no such file"):
        run("validate", str(tmp_path / "none.yaml"))
