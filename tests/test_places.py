"""Places in the user's source, and names of arguments: what a report calls things."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from programs import source_of

from toast_cli.dimensions import analyse
from toast_cli.frontend import load
from toast_cli.frontend.places import frames_of, place_text
from toast_cli.frontend.reader import argument_paths

FLAX = "/usr/venv/lib/python3.11/site-packages/flax/nnx/nn"
BLOCK = '"build.<locals>.Block.__call__"("/home/me/gpt.py":28:16 to :42)'
ATTENTION = (
    f'loc("jit(f)/dot_general"(callsite("dot_product_attention"("{FLAX}/attention.py":288:10 to :90) at '
    f'callsite("MultiHeadAttention.__call__"("{FLAX}/attention.py":752:8 to 765:5) at callsite({BLOCK} at '
    '"<module>"("/home/me/gpt.py":90:1 to :9)))))'
)
# location -> the user's place
PLACES: list[tuple[str, str]] = [
    (ATTENTION, "gpt.py:28 Block.__call__ → MultiHeadAttention (dot_general)"),
    (
        f'loc("jit(f)/mul"(callsite("Linear.__call__"("{FLAX}/linear.py":422:4) at "loop"("{FLAX}/x.py":1:2))))',
        "linear.py:422 Linear.__call__ (mul)",
    ),
    ('loc("jit(f)/mul"("/a/model.py":12:4))', "model.py:12 (mul)"),
    ('loc("/a/model.py":12:4)', "model.py:12"),
    ('loc("f"("/usr/lib/python3.11/contextlib.py":81:9))', "contextlib.py:81 (f)"),
    ('loc("a"(callsite("<lambda>"("C:\\\\me\\\\model.py":3:1) at "g"("b.py":4:1))))', "model.py:3 (a)"),
    ('loc("reduce_sum")', "reduce_sum"),
    ("loc(unknown)", ""),
]


@pytest.mark.parametrize(("location", "users"), PLACES)
def test_places(location: str, users: str) -> None:
    assert place_text(location) == users


def test_frames() -> None:
    stack = frames_of(ATTENTION)
    assert [frame.is_users for frame in stack] == [False, False, True, True]
    assert [frame.place for frame in stack] == ["attention.py:288", "attention.py:752", "gpt.py:28", "gpt.py:90"]


def helper(x: jax.Array) -> jax.Array:
    return jnp.matmul(x, x)


def test_a_program_of_jax_says_its_functions() -> None:
    """What JAX writes is read: the function and its callers, JAX's own frames left out."""
    source = source_of(lambda x: jnp.tanh(helper(x)), jax.ShapeDtypeStruct((4, 4), jnp.float32))
    product = next(k for k, op in enumerate(source.program.ops) if op.name == "stablehlo.dot_general")
    assert source.location(product).startswith("test_places.py:")
    assert " helper (" in source.location(product)
    assert source.stack(product)[0].function == "helper"
    assert len(source.stack(product)) > 1


def test_lines_of_the_programs_own_text_are_named_by_its_file(tmp_path: Path) -> None:
    """A program without locations has its own lines for a source; bytecode made of it elsewhere has not."""
    path = tmp_path / "mine.mlir"
    path.write_text(jax.jit(lambda x: jnp.sin(x) @ x).lower(jnp.zeros((4, 4))).as_text())
    line = next(n for n, text in enumerate(path.read_text().splitlines(), 1) if "sine" in text)
    source = load(str(path))
    sine = next(n for n, op in enumerate(source.program.ops) if op.name == "stablehlo.sine")
    assert source.location(sine) == source.stack(sine)[0].place == f"mine.mlir:{line}"
    assert replace(source, format="bytecode").location(sine) == f"-:{line}"


# -- arguments that an exporter only numbers, or calls all the same, have no names


@pytest.mark.parametrize(
    ("names", "paths"),
    [
        (["p0.1", "p12.345", "x"], ["", "", "x"]),  # PyTorch/XLA
        (["Arg_0.1", "Arg_1.2"], ["", ""]),  # JAX's HLO
        (["param_0.1", "parameter.3", "arg_6.7"], [""] * 3),
        (["p0", "arg1", "param_2"], ["p0", "arg1", "param_2"]),  # a user's own
        (["XLA_Args", "XLA_Args"], ["", ""]),  # TensorFlow
        (["params['w']", "params['b']", ""], ["params['w']", "params['b']", ""]),
        (["x", "p", "position.3"], ["x", "p", "position.3"]),
        (["params__l___0___w__.1", "x.1"], ["params['l'][0]['w']", "x"]),  # JAX's HLO, of trees
        (["s__mu____h_0__.1", "s__mu____h_1__.1", "y_0__1_.2"], ["s['mu']['h_0']", "s['mu']['h_1']", "y[0][1]"]),
        (["m_layers_0__w_in.1", "m_layers_1__w_in.1"], ["m_layers[0].w_in", "m_layers[1].w_in"]),
        (["x.1", "x.2"], ["x.1", "x.2"]),  # two that would be one
        (["a__.1", "b___.2"], ["a__.1", "b___.2"]),  # nothing that XLA has made of a path
    ],
)
def test_names_that_say_nothing(names: list[str], paths: list[str]) -> None:
    assert argument_paths(names) == paths


def layer(w: Any, b: Any, x: Any) -> Any:
    with jax.named_scope("encoder"), jax.named_scope("dense"):
        return x @ w + b


def test_arguments_without_names_are_called_by_what_reads_them(tmp_path: Path) -> None:
    """Dimensions are told by what they are of, with their sizes."""
    arrays = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((150, 96), (96,), (640, 150))]
    text = jax.jit(lambda *a: layer(*a)).lower(*arrays).as_text(debug_info=True)
    path = tmp_path / "program.mlir"
    path.write_text(re.sub(r'loc\("a\[\d\]"\)', "loc(unknown)", text))
    program = load(str(path)).program
    assert [argument.path for argument in program.arguments] == [""] * 3
    dense = "encoder/dense"
    assert [one.label for one in program.arguments] == [
        f"{dense}/dot_general",
        f"{dense}/add",
        f"{dense}/dot_general_2",
    ]
    names = {group.size: group.name for group in analyse(program).groups}
    assert names[96] == "features_96"
    assert names[150] == "features_150"
