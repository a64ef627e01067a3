"""What HLO has and StableHLO has not: tuples, copies, donation settings."""

from __future__ import annotations

import pytest
from normalised_programs import main_of, names, normalised

from toast_cli.base.errors import InputError

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
        ["if", "constant", "constant"],
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
