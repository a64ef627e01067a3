"""Machines by name: `v5p-512`, `h100:64`, `2xv5p-512`."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toast_cli.base.errors import SpecError
from toast_cli.cli.app import run
from toast_cli.hardware import available_specs, export_platform, find_preset, load_spec, needs_no_file, parse_spec
from toast_cli.hardware.spec import generate, slice_torus

# Ready specifications with an axis that has a part of a dimension less than it could.
OTHER_AXES = {"v3-32": {"data": 8, "model": 4}, "v4-32": {"data": 4, "model": 4}}


@pytest.mark.parametrize("name", available_specs())
def test_ready_specifications_are_what_their_names_make(name: str) -> None:
    ready, text = load_spec(name), generate(name)
    assert text is not None
    made = parse_spec(text, ready.source)
    if name in OTHER_AXES:
        assert made.axes == OTHER_AXES[name]
        ready = replace(ready, requests=made.requests)
    assert replace(made, description=ready.description) == ready


# name -> dimensions, innermost first; axes
MADE = {
    "v2-512": ("core=2 x x=16 x y=16", "data=32 x model=16"),
    "v3-64": ("core=2 x x=4 x y=8", "data=8 x model=8"),
    "v4-8": ("x=2 x y=2", "data=2 x model=2"),
    "v4-16": ("x=2 x y=2 x z=2", "data=4 x model=2"),
    "v5p-512": ("x=4 x y=8 x z=8", "data=32 x model=8"),
    "v5p-1152": ("x=4 x y=12 x z=12", "data=48 x model=12"),
    "v5p-12288": ("x=16 x y=16 x z=24", "data=256 x model=24"),
    "v5e-64": ("x=8 x y=8", "data=8 x model=8"),
    "v5litepod-8": ("x=2 x y=4", "data=4 x model=2"),
    "v6e-1": ("one device", "data=1"),
    "tpu7x-256": ("core=2 x x=4 x y=4 x z=8", "data=16 x model=16"),
    "h100:4": ("switch=4", "data=2 x model=2"),
    "H100:3": ("switch=3", "data=3"),
    "h200-128": ("switch=8 x network=16", "data=16 x model=8"),
    "a100-40:16": ("switch=8 x network=2", "data=2 x model=8"),
    "2xv5p-512": ("x=4 x y=8 x z=8 x network=2", "data=64 x model=8"),
    "gb200:72": ("switch=72", "data=9 x model=8"),
    "gb300-144": ("switch=72 x network=2", "data=2 x model=72"),
    "b300-8": ("switch=8", "data=4 x model=2"),
    "mi300x-8": ("switch=8", "data=4 x model=2"),
    "mi325x-8": ("switch=8", "data=4 x model=2"),
    "mi355x-16": ("switch=8 x network=2", "data=2 x model=8"),
    "tpu7x-2": ("core=2", "data=2"),
    "4xh100:8": ("switch=8 x network=4", "data=4 x model=8"),
}


@pytest.mark.parametrize("name", MADE)
def test_machines_made_from_names(name: str) -> None:
    spec = load_spec(name)
    assert (spec.dimension_text(), str(spec.mesh())) == MADE[name]
    assert spec.description and needs_no_file(spec.name)
    assert load_spec(spec.name).mesh() == spec.mesh()


SAME = [
    ("h100:64", "h100-64"),
    ("v5litepod-16", "v5e-16"),
    ("1xV4-32", "v4-32"),
    ("A100:16", "a100-16"),
    ("v5p:64", "v5p-128"),
]
SAME += [("v4:16", "v4-32"), ("tpu7x:4", "tpu7x-8"), ("v5e:16", "v5e-16"), ("2xv5p:32", "2xv5p-64")]


def test_exports_name_the_platform_of_the_chip() -> None:
    names = {name: export_platform(load_spec(name).chip) for name in ("v5e-8", "gb200:8", "mi300x-8")}
    assert names == {"v5e-8": "tpu", "gb200:8": "cuda", "mi300x-8": "rocm"}


@pytest.mark.parametrize(("typed", "ready"), SAME)
def test_other_spellings_of_built_in_ones(typed: str, ready: str) -> None:
    assert load_spec(typed) == load_spec(ready)


# Chips of slices as Google publishes them (Cloud TPU docs, "TPU v5p"; xpk, system_characteristics).
PUBLISHED = {
    256: (4, 8, 8), 320: (4, 4, 20), 384: (4, 8, 12), 448: (4, 4, 28), 512: (8, 8, 8), 640: (4, 8, 20), 768: (8, 8, 12),
    960: (4, 12, 20), 1024: (8, 8, 16), 1152: (8, 12, 12), 1536: (8, 12, 16), 1728: (12, 12, 12), 2048: (8, 16, 16),
    3072: (12, 16, 16), 3456: (12, 12, 24), 4096: (16, 16, 16), 5440: (4, 20, 68), 6144: (16, 16, 24),
    6912: (12, 24, 24), 8960: (16, 20, 28),
}  # fmt: skip


def test_slices_of_cubes_are_the_published_ones() -> None:
    preset = find_preset("v5p")
    assert {chips: slice_torus(preset, chips) for chips in PUBLISHED} == PUBLISHED


WRONG = [
    (
        "v5p-500",
        "v5p has no slice of that size (the number counts TensorCores, two a chip)",
        "nearest: v5p-384, v5p-512",
    ),
    ("v4-33", "v4 has no slice of that size", "nearest: v4-32, v4-64"),
    ("v5e-512", "the number counts chips", "nearest: v5e-256"),
    ("v2-64", "v2 has no slice of that size", "nearest: v2-32, v2-128"),
    ("h100:12", "12 GPUs do not fill hosts of 8", "nearest: h100-8, h100-16"),
    ("2xh100:12", "12 GPUs do not fill hosts of 8", "nearest: 2xh100-8, 2xh100-16"),
    ("h100:0", "0 GPUs do not fill hosts of 8", "nearest: h100-8"),
    ("v5p:33", "v5p has no slice of that size (the number counts chips)", "nearest: v5p:32, v5p:64"),
    ("0xv5p-512", "a machine has 1 to", ""),
    ("9999999xh100:999999992", "a machine has 1 to", ""),
    ("h101:64", "neither a file nor a built-in one", 'did you mean "h100-64"?'),
    ("v5p", "neither a file nor a built-in one", "others by chip and number, e.g. v5p-512"),
]


@pytest.mark.parametrize(("name", "what", "hint"), WRONG)
def test_names_of_no_machine(name: str, what: str, hint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["mesh", "show", name]) == 2
    said = capsys.readouterr().err
    assert what in said and hint in said and f'no mesh specification "{name}"' in said
    assert not needs_no_file(name)


@given(st.from_regex(r"([0-9]{1,3}x)?(v[2-6][ep]?|tpu7x|h100|a100(-40)?)[-:][0-9]{1,5}", fullmatch=True))
def test_any_name_is_a_machine_or_a_clear_error(name: str) -> None:
    try:
        spec = load_spec(name)
    except SpecError as error:
        assert error.hint
    else:
        assert spec.mesh().devices == spec.devices


def test_the_list_says_how_to_name_others(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["mesh", "list"]) == 0
    assert "others by chip and number: v5p-512" in capsys.readouterr().out
