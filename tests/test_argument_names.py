"""Arguments that an exporter only numbers, or calls all the same, have no names."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from toast_cli.dimensions import analyse
from toast_cli.frontend import load
from toast_cli.frontend.reader import argument_paths


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
