"""Programs read from HLO: words that StableHLO has not, the order of operations, and that plans mean the same."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from normalised_programs import main_of, names, normalised
from programs import Case, arg, evaluator_of, round_mesh, source_of_text

from toast_cli import xla
from toast_cli.base.errors import InputError
from toast_cli.frontend import load
from toast_cli.frontend.convert import in_creation_order
from toast_cli.frontend.formats import parse_here
from toast_cli.tactics import strategies

# -- HLO --------------------------------------------------------------------------------------------------------------

HLO = {
    "tuples at the boundary": (
        """HloModule m, input_output_alias={ {0}: (0, {1}, may-alias), {1,0}: (1, {}, must-alias) }, buffer_donor={ (0, {0}) }
ENTRY e {
  p = (f32[4], f32[4]) parameter(0)
  q = f32[4] parameter(1)
  a = f32[4] get-tuple-element(p), index=0
  b = f32[4] get-tuple-element(p), index=1
  c = f32[4] add(a, b)
  t0 = () tuple()
  t = (f32[4], ()) tuple(q, t0)
  ROOT r = (f32[4], (f32[4], ())) tuple(c, t)
}""",  # noqa: E501
        ["add"],
    ),
    "products of matrices, and of a vector": (
        """HloModule m
ENTRY e {
  a = f32[4,8] parameter(0)
  b = f32[8,3] parameter(1)
  v = f32[8] parameter(2)
  c = f32[4,3] dot(a, b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  d = f32[4] dot(a, v), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT t = (f32[4,3], f32[4]) tuple(c, d)
}""",
        ["dot_general", "dot_general"],
    ),
    "a custom call with tuples": (
        """HloModule m
ENTRY e {
  p = f32[4] parameter(0)
  t = (f32[4], f32[4]) tuple(p, p)
  w = (s32[], (f32[4], f32[4])) custom-call(t, p), custom_call_target="foo"
  g = (f32[4], f32[4]) get-tuple-element(w), index=1
  ROOT a = f32[4] get-tuple-element(g), index=0
}""",
        ["custom_call"],
    ),
    "a tuple copied in a branch": (
        """HloModule m
t { p = (f32[4], (f32[4])) parameter(0)
  ROOT r = (f32[4], (f32[4])) copy(p) }
f { p = (f32[4], (f32[4])) parameter(0)
  ROOT r = (f32[4], (f32[4])) copy(p) }
ENTRY e {
  p = f32[4] parameter(0)
  c = pred[] parameter(1)
  t0 = (f32[4]) tuple(p)
  t = (f32[4], (f32[4])) tuple(p, t0)
  q = f32[4] parameter(2)
  t1 = (f32[4]) tuple(q)
  u = (f32[4], (f32[4])) tuple(q, t1)
  o = (f32[4], (f32[4])) conditional(c, t, u), true_computation=t, false_computation=f
  ROOT a = f32[4] get-tuple-element(o), index=0
}""",
        ["if"],
    ),
    "control dependencies, erf and top-k": (
        """HloModule m
ENTRY e {
  p = f32[2,4] parameter(0)
  t = token[] after-all()
  q = f32[2,4] add-dependency(p, t)
  r = f32[2,4] erf(q)
  k = (f32[2,1], s32[2,1]) topk(r), k=1, largest=true
  ROOT a = f32[2,1] get-tuple-element(k), index=0
}""",
        ["create_token", "chlo.erf", "chlo.top_k"],
    ),
}


@pytest.mark.parametrize(("program", "expected"), HLO.values(), ids=HLO)
def test_hlo_in_stablehlo_words(program: str, expected: list[str]) -> None:
    assert names(normalised(program).module) == expected


GATHER = """HloModule m
ENTRY e {
  p = f32[4] parameter(0)
  ROOT d = f32[8] all-gather(p), replica_groups={{0,1}}, dimensions={0}
}"""
OPTIMISED = {
    "fusion": """HloModule m
f { p = f32[4] parameter(0)
  ROOT a = f32[4] add(p, p) }
ENTRY e {
  p = f32[4] parameter(0)
  ROOT w = f32[4] fusion(p), kind=kLoop, calls=f
}""",
    "bitcast": """HloModule m
ENTRY e {
  p = f32[2,3]{1,0} parameter(0)
  ROOT a = f32[6]{0} bitcast(p)
}""",
    "async_start": """HloModule m
ENTRY e {
  p = f32[4] parameter(0)
  s = (f32[4], f32[8]) all-gather-start(p), replica_groups={{0,1}}, dimensions={0}
  ROOT d = f32[8] all-gather-done(s)
}""",
}


@pytest.mark.parametrize(("operation", "program"), OPTIMISED.items(), ids=OPTIMISED)
def test_a_program_that_xla_has_optimised_is_refused(operation: str, program: str) -> None:
    with pytest.raises(InputError, match=rf"XLA has optimised this program: it has the op {operation}") as refused:
        normalised(program)
    assert "as it was lowered" in (refused.value.hint or "")


def test_donation_in_hlo_becomes_attributes_of_flat_arguments() -> None:
    arguments = main_of(normalised(HLO["tuples at the boundary"][0]).module).attributes["arg_attrs"]
    assert [str(entry) for entry in arguments] == [
        "{jax.buffer_donor = true}",
        "{tf.aliasing_output = 0 : i32}",
        "{tf.aliasing_output = 1 : i32}",
    ]


def test_tuples_at_a_stablehlo_boundary_are_flattened() -> None:
    pair = "tuple<tensor<2xf32>, tuple<tensor<i32>>>"
    outcome = normalised(f"""module {{
      func.func @main(%a: {pair} {{mhlo.memory_kind = "device"}}, %b: tensor<2xf32> {{tf.aliasing_output = 0 : i32}}) -> {pair} {{
        %0 = func.call @swap(%a) : ({pair}) -> {pair}
        return %0 : {pair} }}
      func.func private @swap(%a: {pair}) -> {pair} {{
        %0 = stablehlo.get_tuple_element %a[0] : ({pair}) -> tensor<2xf32>
        %1 = stablehlo.get_tuple_element %a[1] : ({pair}) -> tuple<tensor<i32>>
        %2 = stablehlo.negate %0 : tensor<2xf32>
        %3 = stablehlo.tuple %2, %1 : {pair}
        %4 = sdy.named_computation<"block">(%3) (%b: {pair}) {{ sdy.return %b : {pair} }} : ({pair}) -> {pair}
        return %4 : {pair} }} }}""")  # noqa: E501
    main = main_of(outcome.module)
    assert str(main.type) == "(tensor<2xf32>, tensor<i32>, tensor<2xf32>) -> (tensor<2xf32>, tensor<i32>)"
    kind = '{mhlo.memory_kind = "device"}'
    assert [str(entry) for entry in main.attributes["arg_attrs"]] == [kind, kind, "{tf.aliasing_output = 0 : i32}"]
    assert names(outcome.module) == ["negate"]


def test_unused_settings_go_and_replicas_are_mentioned() -> None:
    outcome = normalised(
        "module attributes {mhlo.num_partitions = 8 : i32, mhlo.num_replicas = 2 : i32, "
        "mhlo.is_dynamic = false} { func.func @main() { return } }"
    )
    attributes = outcome.module.operation.attributes
    assert [str(attributes[name]) for name in ("mhlo.num_partitions", "mhlo.num_replicas")] == ["1 : i32", "1 : i32"]
    assert "mhlo.is_dynamic" not in attributes
    assert outcome.notices == ("the program was written for 2 replicas (pmap) and is read as one of them",)


def test_collectives_outside_manual_regions_are_mentioned() -> None:
    outcome = normalised(GATHER)
    assert outcome.notices == (
        "1 operation communicates between devices outside manual regions: such a program can be planned for, and not "
        "written",
    )


# -- A program read from HLO is the program that it was made from: its plans mean the same, and cost the same memory


N = 16  # batch, width and hidden units: arrays of all are of one shape


def loss(p: Any, x: Any) -> Any:
    for layer in p["layers"]:
        x = x + jax.nn.relu(jax.nn.relu(x @ layer["up"]) @ layer["down"])
    return jnp.mean(jax.nn.relu(x) ** 2)


def step(p: Any, m: Any, x: Any) -> Any:
    g = jax.grad(loss)(p, x)
    m = jax.tree.map(lambda a, b: jnp.where(jnp.isnan(b), 0.0, 0.9 * a + b), m, g)
    return jax.tree.map(lambda a, b: a - 0.1 * b, p, m), m


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    """The step as JAX lowers it, and as it is read from the HLO that is made of that."""
    p = {"layers": [{"up": arg(N, N), "down": arg(N, N)} for _ in range(3)]}
    module = jax.jit(step, donate_argnums=(0, 1)).lower(p, p, arg(N, N)).compiler_ir("stablehlo")
    hlo = xla.stablehlo_to_hlo_text(xla.write_bytecode(module))
    sources = [source_of_text(module.operation.get_asm(enable_debug_info=True)), load("x.hlo", content=hlo.encode())]
    return [Case(source, evaluator_of(source, round_mesh(data=4, model=2))) for source in sources]


def test_arguments_have_their_paths(cases: list[Case]) -> None:
    paths = [[argument.path for argument in case.program.arguments] for case in cases]
    assert paths[0] == paths[1] and "p['layers'][0]['up']" in paths[0]


def test_strategies_communicate_alike(cases: list[Case]) -> None:
    """XLA makes one array of all zeros of one shape, which would tie the batch to the width."""
    found = [{name: case.collectives(plan) for name, plan in strategies(case.problem).items()} for case in cases]
    assert found[0] == found[1] and found[0]["fsdp"]


def test_strategies_hold_alike(cases: list[Case]) -> None:
    """XLA prints every gradient where its weight is updated, behind all that the updates before it need."""
    peaks = [
        {name: case.evaluator.cost(plan).peak_bytes for name, plan in strategies(case.problem).items()}
        for case in cases
    ]
    assert peaks[1] == pytest.approx(peaks[0], rel=0.15)


# -- operations of HLO come in the order in which they were made, which their numbers tell


# As XLA prints it: all that the first result needs first, and the second layer's gradient after the first one's update.
STEP = b"""HloModule step, entry_computation_layout={(f32[4]{0}, f32[4]{0})->(f32[4]{0}, f32[4]{0})}

ENTRY main.9 {
  a.1 = f32[4]{0} parameter(0)
  sine.3 = f32[4]{0} sine(a.1)
  b.1 = f32[4]{0} parameter(1)
  multiply.4 = f32[4]{0} multiply(sine.3, b.1)
  cosine.5 = f32[4]{0} cosine(multiply.4)
  multiply.7 = f32[4]{0} multiply(cosine.5, sine.3)
  subtract.9 = f32[4]{0} subtract(a.1, multiply.7)
  multiply.6 = f32[4]{0} multiply(cosine.5, b.1)
  subtract.8 = f32[4]{0} subtract(b.1, multiply.6)
  ROOT tuple.10 = (f32[4]{0}, f32[4]{0}) tuple(subtract.9, subtract.8)
}
"""
IN_ORDER = ["sine.3", "multiply.4", "cosine.5", "multiply.6", "subtract.8", "multiply.7", "subtract.9"]


def parameter_names(data: bytes) -> list[str]:
    _, module = parse_here(data, "<test>")
    found = [xla.location_name(view.operation.location) for view in module.body.operations[0].regions[0].blocks[0]]
    return [name for name in found if "." in name and not name.startswith("tuple")]


def test_numbers_of_one_name_tell_the_order() -> None:
    assert sorted(parameter_names(STEP)) == sorted(IN_ORDER)
    places = {name: place for place, name in enumerate(parameter_names(STEP))}
    assert places["multiply.6"] < places["multiply.7"] and places["subtract.8"] < places["subtract.9"]


def test_numbers_that_say_otherwise_than_what_is_read_are_not_believed() -> None:
    backwards = STEP.replace(b"multiply.4", b"multiply.99").replace(b"sine.3", b"multiply.98")
    places = {name: place for place, name in enumerate(parameter_names(backwards))}
    assert places["multiply.98"] < places["multiply.99"] < places["cosine.5"] < places["multiply.6"]


def test_what_loops_hold_is_sorted() -> None:
    text = """func.func public @main(%n: tensor<i32>, %x: tensor<4xf32>) -> tensor<4xf32> {
      %0:2 = stablehlo.while(%i = %n, %y = %x) : tensor<i32>, tensor<4xf32>
      cond {
        %c = stablehlo.compare LT, %i, %n : (tensor<i32>, tensor<i32>) -> tensor<i1>
        stablehlo.return %c : tensor<i1>
      } do {
        %b = stablehlo.sine %y : tensor<4xf32> loc("sine.9")
        %a = stablehlo.sine %y : tensor<4xf32> loc("sine.8")
        %s = stablehlo.add %a, %b : tensor<4xf32> loc("add.1")
        stablehlo.return %i, %s : tensor<i32>, tensor<4xf32>
      }
      return %0#1 : tensor<4xf32>
    }"""
    module = xla.parse_module(xla.make_context(), text.encode())
    in_creation_order(module)
    found = [xla.location_name(one.location) for one in xla.walk_ops(module.operation, "stablehlo.sine")]
    assert module.operation.verify() and found == ["sine.8", "sine.9"]
