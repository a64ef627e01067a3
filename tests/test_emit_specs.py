"""PartitionSpecs of arguments and results: as JSON, and as the Python that places arrays."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any

import emitted
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from emitted import BATCH, COLUMNS, DEVICES, UP_IN, UP_OUT, WEIGHTS, WHOLE, D, N, by_hand, emit, sgd, strategy
from jax.sharding import AxisType, PartitionSpec
from programs import Case, arg, source_of

from toast_cli import xla
from toast_cli.emit.device_mesh import device_mesh
from toast_cli.emit.specs import (
    InterfaceArray,
    NamedAxes,
    ProgramInterface,
    device_mesh_text,
    matcher,
    rules_of,
    snippet,
    trimmed,
)


@pytest.fixture(scope="module")
def trained() -> Case:
    return emitted.trained()


def test_specs() -> None:
    source = source_of(sgd, WEIGHTS, arg(N, D))
    lowered = by_hand(
        {"data": 4, "model": 2}, [((0, 1), ()), COLUMNS, BATCH] + [WHOLE] * (len(source.program.values) - 3)
    )
    facts = json.loads(emit(source, lowered, "specs"))
    assert {key: facts[key] for key in ("schema", "program", "mesh")} == {
        "schema": "toast.specs/1",
        "program": "sgd",
        "mesh": {"axes": {"data": 4, "model": 2}},
    }
    assert facts["arguments"] == [
        {"index": 0, "name": "p['down']", "spec": [["data", "model"], None]},
        {"index": 1, "name": "p['up']", "spec": [None, ["model"]]},
        {"index": 2, "name": "x", "spec": [["data"], None]},
    ]
    assert [result["index"] for result in facts["results"]] == [0, 1]


def test_the_snippet_runs(trained: Case) -> None:
    lowered = trained.lowered(strategy(trained, "x.0=data", f"{UP_OUT}=model", f"{UP_IN}=data"))
    scope: dict[str, Any] = {"DEVICES": xla.cpu_devices(DEVICES)}
    text = emit(trained.source, lowered, "python").decode()
    exec(compile(text.replace("jax.devices()", "DEVICES"), "shardings.py", "exec"), scope)
    arguments = {"p": WEIGHTS, "x": arg(N, D)}
    step = jax.jit(
        sgd, in_shardings=scope["in_shardings"](**arguments), out_shardings=scope["out_shardings"](sgd, **arguments)
    )
    with pytest.raises(TypeError, match="argument 'p' is not among"):
        scope["in_shardings"](weights=WEIGHTS, x=arg(N, D))
    executable = step.lower(*arguments.values()).compile()
    weights = {"down": PartitionSpec("model", "data"), "up": PartitionSpec("data", "model")}
    assert {k: s.spec for k, s in executable.input_shardings[0][0].items()} == weights
    assert {k: s.spec for k, s in executable.output_shardings.items()} == weights
    assert executable.input_shardings[0][1].spec == PartitionSpec("data")
    assert [scope["spec_of"](path) for path in ("p['down']", "p['up']", "x", "p['unknown']")] == [
        weights["down"],
        weights["up"],
        PartitionSpec("data"),
        PartitionSpec(),
    ]


def test_the_snippet_without_names() -> None:
    argument, result = InterfaceArray("", (("data",), None)), InterfaceArray("", (None, ("data",)))
    specs = ProgramInterface("main", {"data": 8}, (argument,), (result,), 8)
    scope: dict[str, Any] = {"DEVICES": xla.cpu_devices(DEVICES)}
    exec(compile(snippet(specs).replace("jax.devices()", "DEVICES"), "shardings.py", "exec"), scope)
    (sharding,) = scope["in_shardings"](arg(8, 8))
    assert sharding.spec == PartitionSpec("data")
    assert scope["out_shardings"](jnp.transpose, arg(8, 8)).spec == PartitionSpec(None, "data")


LAYER = "['layers'][{}]['w']"
DATA, MODEL_LAST, ALL = (("data",), None), (None, ("model",)), (None, None)
# name -> (path, spec) of arguments, of results, the rules
FOLDED: dict[str, tuple[list[tuple[str, NamedAxes]], list[tuple[str, NamedAxes]], list[tuple[str, NamedAxes]]]] = {
    "layers, and one that is split otherwise": (
        [(f"p['layers'][{k}]['w']", ALL if k == 1 else DATA) for k in range(3)], [("result", ())],
        [("p['layers'][1]['w']", ()), ("p['layers'][*]['w']", DATA[:1])],
    ),
    "a weight and its moments, in and out": (
        [(f"{root}['dense_{k}']['kernel']", MODEL_LAST) for root in ("s.params", "s.opt[0].mu",
            "s.opt[0].nu") for k in range(2)],
        [(f"result[0]{root}['dense_{k}']['kernel']", MODEL_LAST) for root in (".params",
            ".opt[0].mu") for k in range(2)],
        [("*['dense_*']['kernel']", MODEL_LAST)],
    ),
    "moments that are split, weights that are whole": (
        [("p['a']['w']", ALL), ("m['a']['w']", DATA)], [("result[0]['a']['w']", ALL), ("result[1]['a']['w']", DATA)],
        [("m['a']['w']", DATA[:1]), ("result[1]['a']['w']", DATA[:1])],
    ),
    "what is whole needs no rule": ([("p['w']", ALL), ("x", DATA)], [("result", ())], [("x", DATA[:1])]),
    "what comes out and is not read": (
        [("s['bn']['hidden']", DATA)], [("result[1]['bn']['hidden']", DATA), ("result[1]['bn']['average']", DATA)],
        [("*['bn']['average']", DATA[:1]), ("*['bn']['hidden']", DATA[:1])],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FOLDED)
def test_the_snippet_folds_by_pattern(name: str) -> None:
    arguments, results, expected = FOLDED[name]
    named = [InterfaceArray(path, spec) for path, spec in (*arguments, *results)]
    rules = rules_of(named)
    assert sorted(rules) == sorted(expected)
    for one in named:
        fits = (spec for pattern, spec in rules if matcher(pattern).fullmatch(one.path))
        assert next(fits, ()) == trimmed(one.axes), one.path


def test_patterns_say_what_every_array_says() -> None:
    """However the specs lie over the paths: the first pattern that fits is right."""
    rng = random.Random(0)
    for _ in range(50):
        roots = [f"{root}{LAYER.format(k)}" for root in ("p", "o[0].mu", "result[0]", "result[1]") for k in range(3)]
        paths = [*roots, "x", "p['w']", "result[2]"]
        named = [InterfaceArray(path, rng.choice([DATA, MODEL_LAST, ALL])) for path in paths]
        rules = rules_of(named)
        for one in named:
            fits = (spec for pattern, spec in rules if matcher(pattern).fullmatch(one.path))
            assert next(fits, ()) == trimmed(one.axes)


def test_an_odd_layer_is_said_once_for_weight_and_moments() -> None:
    """Also where weight, moments and what comes out all lie otherwise than most layers do."""
    roots = ("s.params", "s.mu", "s.nu", "result[0].params", "result[0].mu", "result[0].nu")
    odd = [InterfaceArray(f"{root}['net']['dense_1']['w']", MODEL_LAST) for root in roots]
    others = [InterfaceArray(f"{root}['net']['dense_{k}']['w']", DATA) for root in roots for k in (0, 2, 3)]
    assert rules_of([*odd, *others]) == [
        ("*['net']['dense_1']['w']", trimmed(MODEL_LAST)),
        ("*['net']['dense_*']['w']", trimmed(DATA)),
    ]


def test_names_with_quotes_are_escaped() -> None:
    odd = 'p[\'a"""b\\\\n\']'
    specs = ProgramInterface("f", {'"""': 8}, (InterfaceArray(odd, (('"""',),)),), (InterfaceArray("result", ()),), 8)
    scope: dict[str, Any] = {"DEVICES": xla.cpu_devices(DEVICES)}
    exec(compile(snippet(specs).replace("jax.devices()", "DEVICES"), "shardings.py", "exec"), scope)
    assert scope["spec_of"](odd) == PartitionSpec('"""')


# -- devices in the order that was priced: of a torus, of several hosts or slices, and as `shardings.py` has them


@dataclass(frozen=True)
class Device:
    """What JAX says of a device that is not here."""

    id: int
    platform: str
    device_kind: str
    slice_index: int = 0
    coords: tuple[int, ...] = ()
    core_on_chip: int = 0
    process_index: int = 0


def cube(edges: tuple[int, ...], slices: int = 1) -> list[Any]:
    places = product(range(slices), *(range(edge) for edge in reversed(edges)))
    return [Device(k, "tpu", "TPU v4", slice_, tuple(at[::-1])) for k, (slice_, *at) in enumerate(places)]


def hosts(count: int) -> list[Any]:
    return [Device(k, "gpu", "NVIDIA H100 80GB HBM3", k // 8) for k in range(8 * count)]


def steps(mesh: Any, axis: int) -> set[int]:
    """By how much the ids of neighbours along an axis differ."""
    ids = np.vectorize(lambda device: device.id)(mesh.devices)
    return {int(step) for step in np.diff(ids, axis=axis).ravel()}


@pytest.mark.parametrize(
    "axes", [{"data": 16, "model": 4}, {"data": 32, "model": 2}, {"data": 8, "model": 8}, {"x": 64}]
)
def test_every_shape_of_a_torus(axes: dict[str, int]) -> None:
    """`jax.make_mesh` refuses 32 x 2 and 8 x 8 on a cube of 4 x 4 x 4."""
    devices = cube((4, 4, 4))
    mesh = device_mesh(axes, devices)
    assert dict(mesh.shape) == axes and set(mesh.devices.flat) == set(devices)
    if axes in ({"data": 16, "model": 4}, {"x": 64}):
        assert (mesh.devices == jax.make_mesh(tuple(axes.values()), tuple(axes), devices=devices).devices).all()


# name -> devices, axes, steps in the ids along each axis
SLICES: dict[str, tuple[list[Any], dict[str, int], list[set[int]]]] = {
    "hosts along the first axis": (hosts(4), {"data": 4, "model": 8}, [{8}, {1}]),
    "the first axis also within a host": (hosts(4), {"data": 16, "model": 2}, [{2}, {1}]),
    "hosts along two axes": (hosts(4), {"data": 2, "model": 16}, [{16}, {1}]),
}


@pytest.mark.parametrize("name", SLICES)
def test_hosts_are_along_the_first_axes(name: str) -> None:
    devices, axes, expected = SLICES[name]
    mesh = device_mesh(axes, devices)
    assert [steps(mesh, k) for k in range(len(axes))] == expected


def test_slices_are_along_the_first_axis() -> None:
    devices = cube((4, 4, 4), slices=2)
    mesh = device_mesh({"data": 16, "model": 8}, devices)
    halves = [{device.slice_index for device in half.flat} for half in np.split(mesh.devices, 2)]
    assert halves == [{0}, {1}]


def test_one_host_and_axis_types() -> None:
    devices = xla.cpu_devices(8)
    mesh = device_mesh({"data": 4, "model": 2}, devices)
    assert list(mesh.devices.flat) == list(devices) and mesh.axis_types == (AxisType.Auto,) * 2
    assert prod(mesh.shape.values()) == 8


def test_shardings_py_has_the_whole_function() -> None:
    text = device_mesh_text()
    assert text.startswith("def device_mesh(") and text.count("\ndef ") == 0 and "return Mesh(" in text
