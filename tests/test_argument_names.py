"""Arguments that an exporter only numbers, or calls all the same, have no names."""

from __future__ import annotations

import pytest

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
    ],
)
def test_names_that_say_nothing(names: list[str], paths: list[str]) -> None:
    assert argument_paths(names) == paths
