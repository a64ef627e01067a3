"""From a parsed module to one entry function: calls, tuples, leftovers of HLO, shapes, shardings, manual regions."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from jax import lax
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from toast_cli import xla
from toast_cli.errors import InputError
from toast_cli.frontend.constraints import check_manual_axes, constraints_on
from toast_cli.frontend.formats import parse
from toast_cli.frontend.gspmd import mesh_axes, read_tiling, split_shardings
from toast_cli.frontend.loaded import load_module
from toast_cli.frontend.normalise import Normalised, normalise

F32 = jnp.float32


def array(*shape: int, dtype: Any = F32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def normalised(text: str, keep: bool = False) -> Normalised:
    """The outcome for a program in any text format; it verifies, and `main` is its only function."""
    outcome = normalise(parse(text.encode(), "model")[1], "model", keep)
    assert outcome.module.operation.verify()
    functions = [op.name.value for op in outcome.module.body.operations if op.operation.name == "func.func"]
    assert functions == ["main"]
    return outcome


def main_of(module: Any) -> Any:
    return next(op for op in module.body.operations if op.operation.name == "func.func" and op.name.value == "main")


def names(module: Any) -> list[str]:
    """Names of the operations of `main`, nested ones included, in program order; without terminators."""
    found: list[str] = []

    def visit(operation: Any) -> Any:
        if operation.name not in ("func.func", "func.return", "stablehlo.return", "sdy.return"):
            found.append(operation.name.removeprefix("stablehlo."))
        return xla.ir.WalkResult.ADVANCE

    main_of(module).operation.walk(visit, xla.ir.WalkOrder.PRE_ORDER)
    return found


T4 = "tensor<4xf32>"
G = f'func.func private @g(%a: {T4}) -> {T4} {{ %0 = stablehlo.sine %a : {T4} loc("sin") return %0 : {T4} }}'


# -- calls and composites ---------------------------------------------------------------------------------------------

CALLS = {
    "twice, with its own locations": (
        f"""func.func public @main(%a: {T4}) -> {T4} {{
          %0 = func.call @g(%a) : ({T4}) -> {T4} loc("first")
          %1 = func.call @g(%0) : ({T4}) -> {T4} loc("second")
          return %1 : {T4} }}
        {G}""",
        ["sine", "sine"],
    ),
    "a callee that returns its argument": (
        f"""func.func public @main(%a: {T4}) -> {T4} {{
          %0 = func.call @same(%a) : ({T4}) -> {T4}
          return %0 : {T4} }}
        func.func private @same(%a: {T4}) -> {T4} {{ return %a : {T4} }}""",
        [],
    ),
    "nested, declared in any order": (
        f"""{G}
        func.func private @f(%a: {T4}) -> {T4} {{
          %0 = func.call @g(%a) : ({T4}) -> {T4}
          %1 = stablehlo.add %0, %0 : {T4}
          %2 = func.call @g(%1) : ({T4}) -> {T4}
          return %2 : {T4} }}
        func.func public @main(%a: {T4}) -> {T4} {{
          %0 = func.call @f(%a) : ({T4}) -> {T4}
          return %0 : {T4} }}""",
        ["sine", "add", "sine"],
    ),
    "inside the regions of while and case": (
        f"""func.func public @main(%a: {T4}, %i: tensor<i32>) -> {T4} {{
          %0:2 = stablehlo.while(%x = %a, %k = %i) : {T4}, tensor<i32>
           cond {{
            %c = stablehlo.compare LT, %k, %i : (tensor<i32>, tensor<i32>) -> tensor<i1>
            stablehlo.return %c : tensor<i1>
          }} do {{
            %1 = "stablehlo.case"(%k) ({{
              %2 = func.call @g(%x) : ({T4}) -> {T4}
              stablehlo.return %2 : {T4}
            }}) : (tensor<i32>) -> {T4}
            stablehlo.return %1, %k : {T4}, tensor<i32>
          }}
          return %0#0 : {T4} }}
        {G}""",
        ["while", "compare", "case", "sine"],
    ),
    "a composite through its decomposition": (
        f"""func.func public @main(%a: {T4}) -> {T4} {{
          %0 = stablehlo.composite "my.op" %a {{decomposition = @g}} : ({T4}) -> {T4}
          return %0 : {T4} }}
        {G}""",
        ["sine"],
    ),
    "a composite that stands for a CHLO operation": (
        """func.func public @main(%a: tensor<8xf32>) -> tensor<2xf32> {
          %0:2 = stablehlo.composite "chlo.top_k" %a {composite_attributes = {k = 2 : i64}, decomposition = @top}
            : (tensor<8xf32>) -> (tensor<2xf32>, tensor<2xi32>)
          return %0#0 : tensor<2xf32> }
        func.func private @top(%a: tensor<8xf32>) -> (tensor<2xf32>, tensor<2xi32>) {
          %0 = stablehlo.slice %a [0:2] : (tensor<8xf32>) -> tensor<2xf32>
          %1 = stablehlo.convert %0 : (tensor<2xf32>) -> tensor<2xi32>
          return %0, %1 : tensor<2xf32>, tensor<2xi32> }""",
        ["chlo.top_k"],
    ),
    "an entry of another name, and functions nobody calls": (
        f"func.func public @train_step(%a: {T4}) -> {T4} {{ return %a : {T4} }} {G}",
        [],
    ),
}


@pytest.mark.parametrize(("program", "expected"), CALLS.values(), ids=CALLS)
def test_calls_are_inlined(program: str, expected: list[str]) -> None:
    assert names(normalised(f"module {{ {program} }}").module) == expected


def test_inlined_operations_keep_the_call_in_their_location() -> None:
    module = normalised(f"module {{ {CALLS['twice, with its own locations'][0]} }}").module
    operations = list(main_of(module).entry_block.operations)
    assert [str(op.location) for op in operations[:2]] == ['loc("first/sin")', 'loc("second/sin")']


def test_inlining_is_linear_in_what_it_makes() -> None:
    """Forty levels that each call the one below twice: refused before it is tried."""
    levels = [
        f"""func.func private @f{k}(%a: {T4}) -> {T4} {{
          %0 = func.call @f{k + 1}(%a) : ({T4}) -> {T4}
          %1 = func.call @f{k + 1}(%0) : ({T4}) -> {T4}
          return %1 : {T4} }}"""
        for k in range(40)
    ]
    last = f"func.func private @f40(%a: {T4}) -> {T4} {{ return %a : {T4} }}"
    with pytest.raises(InputError, match="larger than 20,000,000 operations"):
        normalised(f"module {{ {' '.join(levels).replace('private @f0', 'public @main')} {last} }}")


REFUSED = {
    "recursion": (
        f"""module {{ func.func @main(%a: {T4}) -> {T4} {{
 %0 = func.call @f(%a) : ({T4}) -> {T4}
 return %0 : {T4} }}
func.func private @f(%a: {T4}) -> {T4} {{
 %0 = func.call @f(%a) : ({T4}) -> {T4}
 return %0 : {T4} }} }}""",
        ("model:5:7", "function @f calls itself", "cannot be partitioned"),
    ),
    "a declaration": (
        f"""module {{ func.func @main(%a: {T4}) -> {T4} {{
 %0 = func.call @f(%a) : ({T4}) -> {T4}
 return %0 : {T4} }}
func.func private @f(%a: {T4}) -> {T4} }}""",
        ("model:4:1", "function @f has no body", "StableHLO"),
    ),
    "blocks": (
        f"""module {{ func.func @main(%a: {T4}) -> {T4} {{
 cf.br ^bb1
^bb1:
 return %a : {T4} }} }}""",
        ("model:1:10", "function @main has branches between blocks", "StableHLO"),
    ),
    "no function": ("module {}", ("model", "there is no public function", "main")),
    "two entries": (
        "module { func.func @a() { return } func.func @b() { return } }",
        ("model", "among the public ones (@a, @b)", "call it main"),
    ),
    "a dynamic argument": (
        "module { func.func @main(%a: tensor<?x4xf32>) { return } }",
        ("model:1:10", "argument 0 (tensor<?x4xf32>) has no fixed shape", "jax.export.export"),
    ),
    "a bounded argument": (
        "module { func.func @main(%a: tensor<?xf32, #stablehlo.bounds<4>>) { return } }",
        ("model:1:10", "argument 0", "concrete"),
    ),
    "an unranked argument": (
        "module { func.func @main(%a: tensor<*xf32>) { return } }",
        ("model:1:10", "argument 0 (tensor<*xf32>) has no fixed shape", "concrete"),
    ),
    "a shape that depends on values": (
        """module { func.func @main(%a: tensor<f32>, %s: tensor<1xi32>) -> tensor<?xf32> {
 %0 = stablehlo.dynamic_broadcast_in_dim %a, %s, dims = [] : (tensor<f32>, tensor<1xi32>) -> tensor<?xf32>
 return %0 : tensor<?xf32> } }""",
        ("model:2:7", "the result of stablehlo.dynamic_broadcast_in_dim (tensor<?xf32>)", "concrete"),
    ),
    "a manual region without axes": (
        f"""module {{ func.func @main(%a: tensor<8xf32>) {{
 %0 = stablehlo.custom_call @SPMDFullToShardShape(%a) {{mhlo.sharding = "{{manual}}"}} : (tensor<8xf32>) -> {T4}
 return }} }}""",
        ("model:2:7", "GSPMD's form (SPMDFullToShardShape)", "Shardy"),
    ),
}


@pytest.mark.parametrize(("program", "expected"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_normalised_is_refused(program: str, expected: tuple[str, str, str]) -> None:
    with pytest.raises(InputError) as caught:
        normalised(program)
    where, what, hint = expected
    assert caught.value.where == where
    assert what in caught.value.what
    assert hint in caught.value.hint


def test_shapes_that_follow_from_static_arguments_are_worked_out() -> None:
    """What calling an exported program of symbolic shape with a concrete one gives."""
    shapes = jax.export.symbolic_shape("b, 4")
    exported = jax.export.export(jax.jit(lambda x: x @ x.T))(jax.ShapeDtypeStruct(shapes, F32))
    module = normalised(jax.jit(exported.call).lower(array(8, 4)).as_text()).module
    assert "?" not in str(module)
    assert str(main_of(module).type.results[0]) == "tensor<8x8xf32>"


# -- real programs ----------------------------------------------------------------------------------------------------

MESH = AbstractMesh((4, 2), ("data", "model"))


def sharding(*spec: Any) -> NamedSharding:
    return NamedSharding(MESH, PartitionSpec(*spec))


def with_collectives(x: jax.Array) -> jax.Array:
    def body(block: jax.Array) -> jax.Array:
        return lax.psum(block, "data") * lax.axis_index("model")

    rows = PartitionSpec("data", "model")
    return jax.shard_map(body, mesh=MESH, in_specs=rows, out_specs=PartitionSpec(None, "model"))(x * 2) + 1


def printing(x: jax.Array) -> jax.Array:
    jax.debug.print("{}", x)
    return x + 1


REAL: dict[str, tuple[Callable[..., Any], tuple[Any, ...], str]] = {
    # function, arguments, an operation that must be there
    "callback": (lambda x: jax.pure_callback(np.sin, array(8), x), (array(8),), "custom_call"),
    "debug print": (printing, (array(8),), "custom_call"),
    "cholesky": (jnp.linalg.cholesky, (array(3, 8, 8),), "custom_call"),
    "svd": (jnp.linalg.svd, (array(8, 4),), "custom_call"),
    "qr": (jnp.linalg.qr, (array(8, 4),), "custom_call"),
    "fft": (lambda x: jnp.fft.rfft(x).real, (array(8, 32),), "fft"),
    "top k": (lambda x: lax.top_k(x, 4), (array(8, 32),), "chlo.top_k"),
    "sort": (lambda x: (jnp.sort(x), jnp.argsort(x, 0)), (array(8, 32),), "sort"),
    "scan": (lambda x, w: lax.scan(lambda c, v: (jnp.tanh(c @ v), c.sum()), x, w), (array(8, 8), array(5, 8, 8)), "while"),
    "cond": (lambda p, x: lax.cond(p, jnp.sin, jnp.sort, x), (array(dtype=bool), array(8)), "case"),
    "switch": (
        lambda i, x: lax.switch(i, [jnp.sin, jnp.cos, jax.jit(jnp.tan)], x),
        (array(dtype=jnp.int32), array(8)),
        "case",
    ),
    "checkpoint": (jax.grad(lambda x: jax.checkpoint(lambda y: jnp.sin(jnp.sin(y)).sum())(x)), (array(8),), "optimization_barrier"),
    "random bits": (lambda k: jax.random.normal(jax.random.wrap_key_data(k, impl="rbg"), (8,)), (array(4, dtype=jnp.uint32),), "rng_bit_generator"),
    "narrow types": (
        lambda x, y: (x.astype(F32) @ jnp.ones((16, 2)), y.astype(jnp.int32) + 1),
        (array(8, 16, dtype=jnp.float8_e4m3fn), array(8, dtype=jnp.int4)),
        "dot_general",
    ),
    "zero-sized": (lambda x: jnp.concatenate([x, x[:0]]) @ jnp.zeros((4, 0)), (array(8, 4),), "dot_general"),
    "scalar": (lambda x: x * 2, (array(),), "multiply"),
    "size one": (lambda x: x + jnp.ones((1, 4)), (array(8, 1),), "broadcast_in_dim"),
    "special functions": (lambda x: jax.scipy.special.erfinv(x) + jax.scipy.special.gammaln(x), (array(8),), "chlo.erf_inv"),
    "composite": (lambda x: lax.composite(lambda y: jnp.sin(y) + 1, "my.op")(x) * 2, (array(8),), "sine"),
    "ragged product": (lax.ragged_dot, (array(64, 32), array(4, 32, 16), array(4, dtype=jnp.int32)), "dot_general"),
    "shard_map": (with_collectives, (array(8, 4),), "sdy.manual_computation"),
}  # fmt: skip


@pytest.mark.parametrize(("function", "arguments", "operation"), REAL.values(), ids=REAL)
def test_real_programs(function: Callable[..., Any], arguments: tuple[Any, ...], operation: str) -> None:
    lowered = jax.jit(function).trace(*arguments).lower(lowering_platforms=("cpu",))
    found = names(normalised(lowered.as_text(debug_info=True)).module)
    assert operation in found
    assert not {"func.call", "composite"} & set(found)


@pytest.mark.parametrize("name", ["svd", "scan", "cond", "sort", "narrow types", "shard_map", "top k", "composite"])
def test_the_same_programs_as_hlo(name: str) -> None:
    function, arguments, _ = REAL[name]
    lowered = jax.jit(function).trace(*arguments).lower(lowering_platforms=("cpu",))
    found = names(normalised(lowered.as_text("hlo")).module)
    assert not [op for op in found if op.startswith(("mhlo.", "tuple", "get_tuple_element", "func.", "composite"))]
    assert ("sdy.manual_computation" in found) == (name == "shard_map")
    assert not any("SPMD" in op or "xla.sdy" in op for op in found)


@pytest.mark.parametrize("name", ["scan", "cond", "sort", "composite", "ragged product"])
def test_numbers_do_not_change(name: str) -> None:
    """The program itself, and what the CPU compiler made of it (fusions, bitcasts, copies), read back."""
    function, arguments, _ = REAL[name]
    rng = np.random.default_rng(0)
    inputs = [
        rng.normal(size=a.shape).astype(a.dtype) if a.dtype == F32 else np.full(a.shape, 16).astype(a.dtype)
        for a in arguments
    ]
    expected = jax.tree.leaves(jax.jit(function)(*inputs))
    lowered = jax.jit(function).lower(*arguments)
    for text in (lowered.as_text(), lowered.compile().as_text()):
        module = normalised(text).module
        shapes = [tuple(xla.ir.ShapedType(t).shape) for t in main_of(module).type.results]
        with jax.enable_x64(False):
            results = xla.run_program(xla.write_bytecode(module), inputs, shapes, 1, shardy=True)
        for got, wanted in zip(results, expected, strict=True):
            np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)


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
}""",
        ["add"],
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
  o = (f32[4], (f32[4])) conditional(c, t, t), true_computation=t, false_computation=f
  ROOT a = f32[4] get-tuple-element(o), index=0
}""",
        ["if"],
    ),
    "a fusion with two results": (
        """HloModule m
f { p = f32[4] parameter(0)
  a = f32[4] add(p, p)
  b = f32[4] multiply(p, a)
  ROOT t = (f32[4], f32[4]) tuple(a, b) }
ENTRY e {
  p = f32[4] parameter(0)
  w = (f32[4], f32[4]) fusion(p), kind=kLoop, calls=f
  ROOT a = f32[4] get-tuple-element(w), index=1
}""",
        ["add", "multiply"],
    ),
    "asynchronous pairs": (
        """HloModule m
ENTRY e {
  p = f32[4] parameter(0)
  s = (f32[4], f32[8]) all-gather-start(p), replica_groups={{0,1}}, dimensions={0}
  d = f32[8] all-gather-done(s)
  cs = (f32[8], f32[8], u32[]) copy-start(d)
  ROOT cd = f32[8] copy-done(cs)
}""",
        ["all_gather"],
    ),
    "bitcasts are reshapes and transposes": (
        """HloModule m
ENTRY e {
  p = f32[2,3]{1,0} parameter(0)
  a = f32[6]{0} bitcast(p)
  b = f32[3,2]{0,1} bitcast(a)
  c = s32[3,2]{0,1} bitcast(b)
  ROOT d = s32[3,2]{0,1} negate(c)
}""",
        ["reshape", "reshape", "transpose", "bitcast_convert", "transpose", "transpose", "negate"],
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
        return %4 : {pair} }} }}""")
    main = main_of(outcome.module)
    assert str(main.type) == "(tensor<2xf32>, tensor<i32>, tensor<2xf32>) -> (tensor<2xf32>, tensor<i32>)"
    kind = '{mhlo.memory_kind = "device"}'
    assert [str(entry) for entry in main.attributes["arg_attrs"]] == [kind, kind, "{tf.aliasing_output = 0 : i32}"]
    assert names(outcome.module) == ["negate"]


def test_unused_settings_go_and_replicas_are_mentioned() -> None:
    outcome = normalised("module attributes {mhlo.num_partitions = 8 : i32, mhlo.num_replicas = 2 : i32, "
                         "mhlo.is_dynamic = false} { func.func @main() { return } }")  # fmt: skip
    attributes = outcome.module.operation.attributes
    assert [str(attributes[name]) for name in ("mhlo.num_partitions", "mhlo.num_replicas")] == ["1 : i32", "1 : i32"]
    assert "mhlo.is_dynamic" not in attributes
    assert outcome.notices == ("the program was written for 2 replicas (pmap) and is read as one of them",)


def test_collectives_outside_manual_regions_are_mentioned() -> None:
    outcome = normalised(HLO["asynchronous pairs"][0])
    assert outcome.notices == (
        "1 operation communicates between devices outside manual regions, left as found: "
        "was this program partitioned before?",
    )


# -- shardings --------------------------------------------------------------------------------------------------------

SHARDED = """module attributes {mhlo.num_partitions = 8 : i32} {
  sdy.mesh @mesh = <["data"=4, "model"=2]>
  func.func public @main(%a: tensor<8x4xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"data"}, {}]>, tf.aliasing_output = 0 : i32},
      %b: tensor<8x4xf32>) -> (tensor<8x4xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"data", "model"}, {?}]>}) {
    %0 = stablehlo.add %a, %b {sdy.sharding = #sdy.sharding_per_value<[<@mesh, [{?}, {"model", ?}]>]>} : tensor<8x4xf32>
    %1 = sdy.sharding_constraint %b <@mesh, [{}, {}]> : tensor<8x4xf32>
    %2 = sdy.sharding_constraint %1 <@mesh, [{"data":(1)2}, {"model"}]> : tensor<8x4xf32>
    %3 = stablehlo.multiply %0, %2 : tensor<8x4xf32>
    sdy.sharding_group %3 group_id=1 : tensor<8x4xf32>
    return %3 : tensor<8x4xf32>
  }
}"""


def test_shardings_are_dropped_with_one_notice() -> None:
    outcome = normalised(SHARDED)
    assert names(outcome.module) == ["add", "multiply"]
    assert "sdy" not in str(outcome.module)
    assert "tf.aliasing_output = 0" in str(outcome.module)
    assert outcome.kept == ()
    assert outcome.notices == ("6 shardings already in the program are dropped (--keep-shardings keeps them)",)


def test_shardings_are_kept_on_request() -> None:
    outcome = normalised(SHARDED, keep=True)
    assert "sdy" not in str(outcome.module)
    assert outcome.notices == ("6 shardings already in the program are kept",)
    main = main_of(outcome.module)
    a, b = main.arguments
    add, multiply, end = (op.operation for op in main.entry_block.operations)
    assert [(k.value, k.sharding.axes, k.uses, k.origin) for k in outcome.kept] == [
        (a, (("data",), ()), (), "argument 0"),
        (multiply.results[0], (("data", "model"), None), ((end, 0),), "result 0"),
        (add.results[0], (None, ("model",)), (), "model:5:10"),
        (b, ((), ()), (), "model:6:10"),
        # The second constraint on %b contradicts the first, so it speaks of the use it was made for.
        (b, (None, ("model",)), ((multiply, 1),), "model:7:10"),
    ]  # fmt: skip


def test_kept_shardings_must_fit_the_mesh() -> None:
    outcome = normalised(SHARDED, keep=True)
    found, notices = constraints_on(outcome.kept, ("model", "data", "pipe"), (2, 4, 2))
    assert [c.axes for c in found] == [k.sharding.axes for k in outcome.kept]
    assert notices == []
    for names_, sizes, what in [
        (("data", "model"), (2, 4), "has it with size 2"),
        (("data", "tensor"), (4, 2), "has only data, tensor"),
    ]:
        with pytest.raises(InputError, match=what) as caught:
            constraints_on(outcome.kept, names_, sizes)
        assert "--mesh-shape data=4,model=2" in caught.value.hint


GSPMD = """module attributes {mhlo.frontend_attributes = {xla.sdy.meshes = "{mesh = #sdy.mesh<[\\22data\\22=4, \\22model\\22=2]>}"}} {
  func.func public @main(%a: tensor<8x4xf32> {mhlo.sharding = "{devices=[4,1,2]<=[8] last_tile_dim_replicate}"}) -> tensor<8x4xf32> {
    %0 = stablehlo.custom_call @Sharding(%a) {backend_config = "unspecified_dims=[1]", mhlo.sharding = "{devices=[1,1,8]<=[8] last_tile_dim_replicate}"} : (tensor<8x4xf32>) -> tensor<8x4xf32>
    %1 = stablehlo.sine %0 {mhlo.sharding = "{devices=[2,4]<=[4,2]T(1,0)}", mhlo.frontend_attributes = {fun = "1", xla.sdy.sharding = "#sdy.sharding_per_value<[<@mesh, [{\\22model\\22}, {\\22data\\22}]>]>"}} : tensor<8x4xf32>
    %2 = stablehlo.cosine %1 {mhlo.sharding = "{devices=[8,1]0,1,4,5,2,3,6,7}"} : tensor<8x4xf32>
    return %2 : tensor<8x4xf32>
  }
}"""


def test_gspmd_shardings_are_translated_to_the_mesh() -> None:
    outcome = normalised(GSPMD, keep=True)
    assert names(outcome.module) == ["sine", "cosine"]
    assert "mhlo.frontend_attributes" in str(outcome.module)
    assert "sharding" not in str(outcome.module)
    kept = [k for k in outcome.kept if k.sharding.gspmd]
    found, notices = constraints_on(kept, ("data", "model"), (4, 2))
    assert [(c.origin, c.axes) for c in found] == [("argument 0", (("data",), ())), ("model:3:10", ((), None))]
    assert notices == [
        "1 of the program's shardings do not lie along the axes of this mesh and are left out "
        "(the first is {devices=[8,1]0,1,4,5,2,3,6,7}, model:5:10)"
    ]
    (frontend,) = [k for k in outcome.kept if not k.sharding.gspmd]
    assert frontend.sharding.axes == (("model",), ("data",))


def test_the_place_of_a_callback_is_no_sharding_to_drop() -> None:
    lowered = jax.jit(lambda x: jax.pure_callback(np.sin, array(8), x)).lower(array(8))
    outcome = normalised(lowered.as_text(), keep=True)
    assert outcome.notices == ()
    assert outcome.kept == ()
    assert "@maximal_mesh_0" in str(outcome.module)


def test_rules_of_custom_calls_survive_hlo() -> None:
    lowered = jax.jit(jnp.linalg.qr).lower(array(8, 4))
    assert "sdy.sharding_rule = #sdy.op_sharding_rule<([i, j])->" in str(normalised(lowered.as_text("hlo")).module)


TILINGS = [
    # text, rank, axes on data=4 x model=2
    ("{replicated}", 2, ((), ())),
    ("{devices=[4,2]<=[8]}", 2, (("data",), ("model",))),
    ("{devices=[8,1]<=[8]}", 2, (("data", "model"), ())),
    ("{devices=[8,1]<=[4,2]T(1,0)}", 2, (("model", "data"), ())),
    ("{devices=[1,2,4]<=[4,2]T(1,0) last_tile_dim_replicate}", 2, ((), ("model",))),
    ("{devices=[4,2]0,1,2,3,4,5,6,7 last_tile_dim_replicate}", 1, (("data",),)),
    ("{devices=[4,1,2]<=[8] last_tile_dims={replicated}}", 2, (("data",), ())),
    ("{devices=[2,4]<=[8]}", 2, None),
    ("{devices=[4,2]<=[8]}", 1, None),
    ("{devices=[2,2]<=[4]}", 2, None),
    ("{maximal device=0}", 2, None),
    ("{manual}", 2, None),
]


@pytest.mark.parametrize(("text", "rank", "expected"), TILINGS, ids=[t[0] for t in TILINGS])
def test_tilings_by_mesh_axes(text: str, rank: int, expected: Any) -> None:
    tiling = read_tiling(text)
    assert tiling is not None
    assert mesh_axes(tiling, rank, ("data", "model"), (4, 2)) == expected


@pytest.mark.parametrize(
    "text", ["{devices=[4,2]<=[8,2]}", "{devices=[4,2]0,1}", "{devices=[4]<=[2,2]T(0,0)}", "{}", "{what}"]
)
def test_notations_that_are_not_understood(text: str) -> None:
    assert read_tiling(text) is None


def test_lists_of_shardings_are_split() -> None:
    assert split_shardings("{{replicated}, {devices=[2,1,2]<=[4] last_tile_dims={manual}}}") == [
        "{replicated}",
        "{devices=[2,1,2]<=[4] last_tile_dims={manual}}",
    ]
    assert split_shardings("{maximal device=0}") == ["{maximal device=0}"]


@given(st.permutations([0, 1, 2]), st.lists(st.integers(0, 3), min_size=3, max_size=3))
def test_any_split_along_axes_is_found_again(order: list[int], dimensions: list[int]) -> None:
    """Axes a=2, b=3, c=4 in some order, each given to dimension 0, 1, 2 or to none."""
    sizes = (2, 3, 4)
    per_dimension = [[axis for axis in order if dimensions[axis] == d] for d in range(3)]
    used = list(itertools.chain(*per_dimension))
    rest = [axis for axis in range(3) if axis not in used]
    tiles = [int(np.prod([sizes[axis] for axis in axes])) for axes in per_dimension]
    copies = int(np.prod([sizes[axis] for axis in rest]))
    transposed = ",".join(str(axis) for axis in used + rest)
    assume(max(tiles) > 1)
    text = f"{{devices=[{','.join(map(str, [*tiles, copies]))}]<=[2,3,4]T({transposed}) last_tile_dim_replicate}}"
    tiling = read_tiling(text)
    assert tiling is not None and tiling.devices is not None
    axes = mesh_axes(tiling, 3, ("a", "b", "c"), sizes)
    assert axes == tuple(tuple("abc"[axis] for axis in dimension) for dimension in per_dimension)
    assert xla.hlo_sharding_devices(text)[1] == tiling.devices.reshape(-1).tolist()


# -- manual regions ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["stablehlo", "hlo"])
def test_manual_regions_stay_and_pin_their_boundary(form: str) -> None:
    lowered = jax.jit(with_collectives).trace(array(8, 4)).lower(lowering_platforms=("cpu",))
    outcome = normalised(lowered.as_text(form))
    region = next(
        op.operation for op in main_of(outcome.module).entry_block.operations if op.operation.name.startswith("sdy.")
    )
    assert [(p.value, p.sharding.axes, p.uses) for p in outcome.pins] == [
        (region.operands[0], (("data",), ("model",)), ((region, 0),)),
        (region.results[0], ((), ("model",)), ()),
    ]
    assert outcome.notices == ()
    assert '"data"=4, "model"=2' in str(outcome.module)
    check_manual_axes(outcome.module, ("data", "model", "one"), (4, 2, 1))
    for names_, sizes in [
        (("model", "data"), (2, 4)),
        (("data", "model"), (2, 4)),
        (("data", "model", "x"), (4, 2, 2)),
    ]:
        with pytest.raises(InputError, match="written for the mesh data=4,model=2") as caught:
            check_manual_axes(outcome.module, names_, sizes, "model")
        assert "--mesh-shape data=4,model=2" in caught.value.hint


def test_calls_inside_a_manual_region_are_inlined() -> None:
    def body(x: jax.Array) -> jax.Array:
        return jax.jit(jnp.sin)(x)

    spec = PartitionSpec("data")
    mapped = jax.shard_map(body, mesh=MESH, in_specs=spec, out_specs=spec)
    lowered = jax.jit(mapped).trace(array(8)).lower(lowering_platforms=("cpu",))
    assert names(normalised(lowered.as_text()).module) == ["sdy.manual_computation", "sine"]


def test_programs_lowered_with_shardings(tmp_path: Path) -> None:
    function = jax.jit(
        lambda x, w: (lax.with_sharding_constraint(jnp.sin(x @ w), sharding("data", "model")) + 1, x.sum()),
        in_shardings=(sharding("data", None), sharding(None, "model")),
        out_shardings=(None, sharding()),
        donate_argnums=0,
    )
    lowered = function.trace(array(8, 8), array(8, 8)).lower(lowering_platforms=("cpu",))
    path = tmp_path / "model.mlir"
    path.write_text(lowered.as_text())
    loaded = load_module(str(path), keep_shardings=True)
    assert (loaded.path, loaded.format) == (str(path), "stablehlo")
    assert [k.sharding.axes for k in loaded.kept] == [
        (("data",), ()),
        ((), ("model",)),
        (),
        (("data",), ("model",)),
    ]
    assert len(load_module(str(path)).notices) == 1
    assert "jax.buffer_donor = true" in str(loaded.module)
    assert "num_partitions = 1" in str(loaded.module)


def test_a_text_that_only_looks_like_a_sharding_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "model.mlir"
    path.write_text(GSPMD.replace("#sdy.sharding_per_value<", "#sdy.sharding_per_va<"))
    with pytest.raises(InputError, match="unknown attribute `sharding_per_va`") as caught:
        load_module(str(path))
    assert caught.value.where == str(path)
