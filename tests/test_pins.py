"""Pins: what the user has decided holds at rest, whatever the plan, and what makes no sense is refused."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from programs import Case, arg, case_of, result_shardings, round_mesh, source_of, source_of_text

from toast_cli.base.errors import UsageError
from toast_cli.dimensions import analyse
from toast_cli.frontend import program_pins
from toast_cli.plan.decisions import Plan, Shard
from toast_cli.plan.problem import make_problem
from toast_cli.plan.sharding import unused_pins
from toast_cli.price.evaluator import Evaluator
from toast_cli.program.names import matching

N, D, F = 8, 16, 64  # batch, model, hidden
WEIGHTS = {"down": arg(F, D), "up": arg(D, F)}
WEIGHT = D * F * 4.0  # bytes of either


def sgd(p: Any, x: Any) -> Any:
    def loss(p: Any) -> Any:
        return jnp.sum((x + jax.nn.relu(x @ p["up"]) @ p["down"]) ** 2)

    return jax.tree.map(lambda w, g: w - 0.1 * g, p, jax.grad(loss)(p))


def rests(case: Case, plan: Plan) -> dict[str, str]:
    return {a.path: case.rest(a.path, plan) for a in case.program.arguments}


def test_a_pin_decides_how_an_argument_and_what_takes_its_buffer_rest() -> None:
    case = case_of(sgd, WEIGHTS, arg(N, D), donate=(0,), pins=("p['up']=model,None",))
    plan = (case.shard("x.0", "data"),)
    lowered = case.lowered(plan)
    assert rests(case, plan) == {"p['down']": "-|-", "p['up']": "model|-", "x": "data|-"}
    assert result_shardings(case.program, lowered)[1] == ((1,), ())
    assert case.collectives(plan) == [
        ("all-gather", ("model",), WEIGHT, 1.0),
        ("all-reduce", ("data",), WEIGHT, 2.0),
    ]


# pattern -> arguments it pins, of p['down'], p['up'] and x
PATTERNS = {
    "p['up']": ["p['up']"], "p[*]": ["p['down']", "p['up']"], "*": ["p['down']", "p['up']", "x"], "*p']": ["p['up']"],
    "arg0": ["p['down']"], "x": ["x"], "p/up": ["p['up']"], "p/*": ["p['down']", "p['up']"],
    "{p/up,x}": ["p['up']", "x"],
    "{p,q}/{u*,down}": ["p['down']", "p['up']"],
}  # fmt: skip


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_star_matches_anything_and_brackets_themselves(pattern: str) -> None:
    case = case_of(sgd, WEIGHTS, arg(N, D), donate=(0,), pins=(f"{pattern}=data,-",))
    assert [path for path, rest in rests(case, ()).items() if rest == "data|-"] == PATTERNS[pattern]


def test_a_pin_of_a_result_holds_for_the_argument_whose_buffer_it_takes() -> None:
    case = case_of(sgd, WEIGHTS, arg(N, D), donate=(0,), pins=("result*up*=data,None",))
    assert case.rest("p['up']", ()) == "data|-"
    assert result_shardings(case.program, case.lowered(()))[1] == ((0,), ())


def test_open_dimensions_of_a_pin_follow_the_plan() -> None:
    case = case_of(sgd, WEIGHTS, arg(N, D), donate=(0,), pins=("p*=?,-",))
    plan = (case.shard("p['up'].1", "model"), case.shard("x.1", "data"))
    assert rests(case, plan) == {"p['down']": "model|-", "p['up']": "data|-", "x": "-|data"}


def test_an_axis_that_a_pin_takes_leaves_the_open_dimensions() -> None:
    case = case_of(lambda x: x * 2.0, arg(8, 8), pins=("x=?,data",))
    assert case.rest("x", (case.shard("x.0", "data"),)) == "-|data"


KEPT = """
sdy.mesh @mesh = <["data"=4, "model"=2]>
func.func @main(%x: tensor<8x16xf32>, %w: tensor<16x32xf32>) -> tensor<8x32xf32> {
  %0 = stablehlo.dot_general %x, %w, contracting_dims = [1] x [0] : (tensor<8x16xf32>, tensor<16x32xf32>) -> tensor<8x32xf32>
  %1 = sdy.sharding_constraint %0 <@mesh, [{}, {}]> : tensor<8x32xf32>
  %2 = stablehlo.sine %1 : tensor<8x32xf32>
  return %2 : tensor<8x32xf32>
}
"""  # noqa: E501


def test_bringing_a_value_to_where_the_program_pins_it_is_paid_for() -> None:
    source = source_of_text(KEPT, keep_shardings=True)
    mesh = round_mesh(data=4, model=2)
    stated = program_pins(source, mesh.names, mesh.sizes)
    problem = make_problem(source.program, analyse(source.program), mesh, (), stated)
    case = Case(source, Evaluator(problem))
    (dot,) = case.ops("dot_general")
    rows, columns, inner = problem.patterns[problem.op_pattern[dot]].groups
    model = mesh.names.index("model")
    # The product is split by columns and gathered, or partial and reduced: 8 * 32 * 4 bytes either way.
    assert case.collectives((Shard(columns, model),)) == [("all-gather", ("model",), 1024.0, 1.0)]
    assert case.collectives((Shard(inner, model),)) == [("all-reduce", ("model",), 1024.0, 1.0)]
    assert case.text(case.lowered((Shard(rows, model),)).shardings[case.program.ops[dot].results[0]]) == "-|-"


@pytest.mark.parametrize(
    ("pin", "what", "hint"),
    [
        ("x", "cannot read 'x'", "write --pin"),
        ("x=data,-,-", "has 3 entries but matches x with 2 dimensions", "fewer entries"),
        ("*=data,-,-,-", "has 4 entries but matches x with 2 dimensions", "match fewer arrays"),
        ("nothing=data", "no argument or result matches 'nothing'", "the nearest arguments are x"),
        ("x=pipe", "unknown mesh axis 'pipe'", "this mesh has data, model"),
        ("x=data,data", "mesh axis 'data' is given twice", "use each axis once"),
        ("x=data+data,-", "mesh axis 'data' is given twice", "use each axis once"),
        ("x=-,data", "does not divide dimension 1 (6) of x", "leave the dimension to toast"),
    ],
)
def test_pins_that_make_no_sense(pin: str, what: str, hint: str) -> None:
    with pytest.raises(UsageError) as caught:
        case_of(lambda x: x * 2.0, arg(8, 6), pins=(pin,))
    assert caught.value.where == "--pin"
    assert what in caught.value.what
    assert hint in f"{caught.value.what} {caught.value.hint}"


# pattern that matches none of params/layers/0..1/{wq,wk}, params/embed and x -> the paths that an error lists first
NEAREST = {
    "wq": "params/layers/*/wq",
    "params.layers.wk": "params/layers/*/wk",
    "params['layers']['wq']": "params/layers/*/wq",
    "embedding": "params/embed",
}


@pytest.mark.parametrize("pattern", NEAREST)
def test_a_pattern_that_matches_nothing_is_told_the_nearest_paths(pattern: str) -> None:
    layer = {"wk": arg(16, 16), "wq": arg(16, 16)}
    params = {"embed": arg(16, 16), "layers": [layer, layer]}
    with pytest.raises(UsageError) as caught:
        case_of(lambda params, x: x @ params["embed"], params, arg(8, 16), pins=(f"{pattern}=data,None",))
    assert caught.value.hint.startswith(f"the nearest arguments are {NEAREST[pattern]}")
    assert "[" not in caught.value.hint


# pattern -> the path, and whether it is meant
PATHS = [
    ("params/layers/1..17/wq", "params['layers'][17]['wq']", True),
    ("params/layers/1..17/wq", "params['layers'][18]['wq']", False),
    ("params/layers/1..17/wq", "params['layers'][171]['wq']", False),
    ("params/layers/0,3..4/wq", "params['layers'][4]['wq']", True),
    ("params/layers/0,3..4/wq", "params['layers'][2]['wq']", False),
    ("params/w1,3", "params['w3']", True),
    ("params/w1,3", "params['w2']", False),
    ("{params,opt/0/mu}/layers/*/wq", "opt[0].mu['layers'][2]['wq']", True),
    ("{params,opt/0/mu}/layers/*/wq", "opt[0].nu['layers'][2]['wq']", False),
    ("a{b}", "a{b}", True),
    ("a.b", "axb", False),
]


@pytest.mark.parametrize(("pattern", "path", "meant"), PATHS)
def test_what_reports_show_is_a_pattern(pattern: str, path: str, meant: bool) -> None:
    assert bool(matching(pattern, [path])) == meant


@pytest.mark.parametrize(
    ("user_pins", "told"),
    [
        (("*=data",), ()),
        (("*=?",), ("the pin '*=?' leaves every dimension open and decides nothing",)),
        (("p['a']=data", "*=model"), ("the pin \"p['a']=data\" decides nothing: later ones override it everywhere",)),
        (("*=model", "p['a']=data"), ()),
    ],
)
def test_pins_that_decide_nothing_are_remarked_on(user_pins: tuple[str, ...], told: tuple[str, ...]) -> None:
    program = source_of(lambda p, x: x @ p["a"], {"a": arg(16, 16)}, arg(16, 16)).program
    assert unused_pins(program, user_pins) == told
