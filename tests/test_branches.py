"""Conditionals and selections whose outcome a program states."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from normalised_programs import array, names, normalised

T4 = "tensor<4xf32>"
BRANCHES = """({ %s = stablehlo.sine %a : tensor<4xf32> stablehlo.return %s : tensor<4xf32> },
  { %c = stablehlo.cosine %b : tensor<4xf32> stablehlo.return %c : tensor<4xf32> },
  { stablehlo.return %b : tensor<4xf32> })"""
CONSTANT = "%{name} = stablehlo.constant dense<{number}> : tensor<{kind}>"
CLAMPED = """%wide = stablehlo.convert %n : (tensor<i8>) -> tensor<i32>
  %k = stablehlo.clamp %low, %wide, %high : tensor<i32>"""


def program(stated: str, operation: str) -> str:
    text = f"{stated} %0 = {operation} return %0 : {T4}"
    return (
        f"module {{ func.func public @main(%a: {T4}, %b: {T4}, %i: tensor<i32>, %p: tensor<i1>) -> {T4} {{ {text} }} }}"
    )


def constant(name: str, number: object, kind: str = "i32") -> str:
    return CONSTANT.format(name=name, number=number, kind=kind)


CASE = f'"stablehlo.case"(%k) {BRANCHES} : (tensor<i32>) -> {T4}'
IF = f""""stablehlo.if"(%k) ({{ %s = stablehlo.sine %a : {T4} stablehlo.return %s : {T4} }},
  {{ stablehlo.return %b : {T4} }}) : (tensor<i1>) -> {T4}"""
SELECT = f"stablehlo.select %k, %s, %b : tensor<4xi1>, {T4}"
SINE = f"%s = stablehlo.sine %a : {T4}"
ROUNDED = "%{name} = stablehlo.reduce_precision %a, format = {format} : tensor<4xf32>"
BRANCH = "%n{name} = stablehlo.negate %{operand} : tensor<4xf32> stablehlo.return %n{name} : tensor<4xf32>"


def alike(format: str = "e5m10", operand: str = "v") -> str:
    """A conditional with two branches that are alike but for what is given."""
    first = ROUNDED.format(name="u", format="e5m10") + BRANCH.format(name="u", operand="u")
    other = ROUNDED.format(name="v", format=format) + BRANCH.format(name="v", operand=operand)
    return f'"stablehlo.case"(%i) ({{ {first} }}, {{ {other} }}) : (tensor<i32>) -> {T4}'


DIFFERENT = ["case", *("reduce_precision", "negate") * 2]
KNOWN = {
    "the first branch": (constant("k", 0), CASE, ["sine"]),
    "the second": (constant("k", 1), CASE, ["cosine"]),
    "one that is none is the last": (constant("k", -1), CASE, []),
    "converted and clamped": (
        f"{constant('low', 0)} {constant('high', 2)} {constant('n', 1, 'i8')} {CLAMPED}",
        CASE,
        ["cosine"],
    ),
    "an index that is computed": ("%k = stablehlo.negate %i : tensor<i32>", CASE, ["negate", "case", "sine", "cosine"]),
    "an argument": ("", CASE.replace("%k", "%i"), ["case", "sine", "cosine"]),
    "branches that are alike": ("", alike(), ["reduce_precision", "negate"]),
    "one attribute differs": ("", alike(format="e8m7"), DIFFERENT),
    "one operand differs": ("", alike(operand="b"), DIFFERENT),
    "true": (constant("k", "true", "i1"), IF, ["sine"]),
    "false": (constant("k", "false", "i1"), IF, []),
    "a truth that is given": ("", IF.replace("%k", "%p"), ["if", "sine"]),
    "what is selected": (f"{SINE} {constant('k', 'true', '4xi1')}", SELECT, ["sine"]),
    "what is not": (f"{SINE} {constant('k', 'false', '4xi1')}", SELECT, []),
    "some of it": (
        f"{SINE} {constant('k', '[true, false, true, true]', '4xi1')}",
        SELECT,
        ["sine", "constant", "select"],
    ),
}


@pytest.mark.parametrize(("stated", "operation", "left"), KNOWN.values(), ids=KNOWN)
def test_a_branch_that_the_program_states_is_taken(stated: str, operation: str, left: list[str]) -> None:
    assert names(normalised(program(stated, operation)).module) == left


def test_inner_conditionals_decide_outer_ones() -> None:
    def run(x: jax.Array, y: jax.Array) -> jax.Array:
        def update(_: None) -> tuple[jax.Array, jax.Array]:
            return lax.switch(jnp.int32(2), [jnp.sin, jnp.cos, jnp.tanh], x), y + 1.0

        return lax.cond(jnp.bool_(True), update, lambda _: (x, y), None)

    found = names(normalised(jax.jit(run).lower(array(4), array(4)).as_text()).module)
    assert found == ["tanh", "constant", "broadcast_in_dim", "add"]
