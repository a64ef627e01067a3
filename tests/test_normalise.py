"""From a parsed module to one entry function: calls, shapes, and what real programs hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from normalised_programs import F32, array, main_of, names, normalised, with_collectives
from run_here import run_program

from toast_cli import xla
from toast_cli.base.errors import InputError
from toast_cli.frontend import normalise

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
    "a composite of an operation that this jaxlib lacks": (
        f"""func.func public @main(%a: {T4}) -> {T4} {{
          %0 = stablehlo.composite "chlo.erfcx" %a {{decomposition = @g}} : ({T4}) -> {T4}
          return %0 : {T4} }}
        {G}""",
        ["sine"],
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
            }}, {{
              stablehlo.return %x : {T4}
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
    with pytest.raises(InputError, match="larger than 1,000,000 operations"):
        normalised(f"module {{ {' '.join(levels).replace('private @f0', 'public @main')} {last} }}")


IMAGE = "tensor<1x8x8x4xf32>"
NEUTRAL = f"""%none = stablehlo.constant dense<0.0> : {IMAGE}
  %z1 = stablehlo.constant dense<1.0> : tensor<f32>
  %one = stablehlo.broadcast_in_dim %z1, dims = [] : (tensor<f32>) -> {IMAGE}
  %ones = stablehlo.broadcast_in_dim %z1, dims = [] : (tensor<f32>) -> tensor<4xf32>
  %spread = stablehlo.broadcast_in_dim %ones, dims = [3] : (tensor<4xf32>) -> {IMAGE}
"""
PADS = f"({IMAGE}, tensor<f32>) -> {IMAGE}"
IDLE = {
    "a flip of one row": (f"stablehlo.reverse %a, dims = [0] : {IMAGE}", True),
    "a flip of eight": (f"stablehlo.reverse %a, dims = [0, 1] : {IMAGE}", False),
    "a permutation in place": (f"stablehlo.transpose %a, dims = [0, 1, 2, 3] : ({IMAGE}) -> {IMAGE}", True),
    "a permutation of equal dimensions": (f"stablehlo.transpose %a, dims = [0, 2, 1, 3] : ({IMAGE}) -> {IMAGE}", False),
    "a slice of everything": (f"stablehlo.slice %a [0:1, 0:8, 0:8, 0:4] : ({IMAGE}) -> {IMAGE}", True),
    "a slice of everything, wherever it starts": (
        f"stablehlo.dynamic_slice %a, {', '.join(['%i'] * 4)}, sizes = [1, 8, 8, 4] : "
        f"({IMAGE}, {', '.join(['tensor<i32>'] * 4)}) -> {IMAGE}",
        True,
    ),
    "all of it overwritten": (
        f"stablehlo.dynamic_update_slice %b, %a, {', '.join(['%i'] * 4)} : "
        f"({IMAGE}, {IMAGE}, {', '.join(['tensor<i32>'] * 4)}) -> {IMAGE}",
        True,
    ),
    "one row of eight overwritten": (
        f"stablehlo.dynamic_update_slice %a, %row, {', '.join(['%i'] * 4)} : "
        f"({IMAGE}, tensor<1x1x8x4xf32>, {', '.join(['tensor<i32>'] * 4)}) -> {IMAGE}",
        False,
    ),
    "a conversion to the same type": (f"stablehlo.convert %a : {IMAGE}", True),
    "a broadcast in place": (f"stablehlo.broadcast_in_dim %a, dims = [0, 1, 2, 3] : ({IMAGE}) -> {IMAGE}", True),
    "a broadcast that permutes": (f"stablehlo.broadcast_in_dim %a, dims = [0, 2, 1, 3] : ({IMAGE}) -> {IMAGE}", False),
    "no padding": (
        f"stablehlo.pad %a, %z, low = [0, 0, 0, 0], high = [0, 0, 0, 0], interior = [0, 0, 0, 0] : {PADS}",
        True,
    ),
    "nothing added": (f"stablehlo.add %a, %none : {IMAGE}", True),
    "added to nothing": (f"stablehlo.add %none, %a : {IMAGE}", True),
    "nothing subtracted": (f"stablehlo.subtract %a, %none : {IMAGE}", True),
    "subtracted from nothing": (f"stablehlo.subtract %none, %a : {IMAGE}", False),
    "added to itself": (f"stablehlo.add %a, %a : {IMAGE}", False),
    "once": (f"stablehlo.multiply %one, %a : {IMAGE}", True),
    "once, by a number that is broadcast twice": (f"stablehlo.multiply %spread, %a : {IMAGE}", True),
    "nothing of it": (f"stablehlo.multiply %none, %a : {IMAGE}", False),
    "a shift": (
        f"stablehlo.pad %a, %z, low = [0, 1, 0, 0], high = [0, -1, 0, 0], interior = [0, 0, 0, 0] : {PADS}",
        False,
    ),
}


@pytest.mark.parametrize(("operation", "idle"), IDLE.values(), ids=IDLE)
def test_what_does_nothing_is_left_out(operation: str, idle: bool) -> None:
    program = (
        f"func.func public @main(%a: {IMAGE}, %z: tensor<f32>, %b: {IMAGE}, %row: tensor<1x1x8x4xf32>, "
        f"%i: tensor<i32>) -> {IMAGE} {{ {NEUTRAL} %0 = {operation} "
        f"return %0 : {IMAGE} }}"
    )
    beside = Counter(names(normalised(f"module {{ func.func public @main() {{ {NEUTRAL} return }} }}").module))
    found = list((Counter(names(normalised(f"module {{ {program} }}").module)) - beside).elements())
    assert found == ([] if idle else [operation.split()[0].partition(".")[2]])


def test_what_is_undone_is_left_out_with_what_undoes_it() -> None:
    x, turned, flat = "tensor<2x3x3xf32>", "tensor<3x3x2xf32>", "tensor<18xf32>"
    program = f"""module {{ func.func public @main(%a: {x}) -> ({x}, {x}, {flat}) {{
      %0 = stablehlo.transpose %a, dims = [1, 2, 0] : ({x}) -> {turned}
      %1 = stablehlo.transpose %0, dims = [2, 0, 1] : ({turned}) -> {x}
      %2 = stablehlo.transpose %0, dims = [2, 1, 0] : ({turned}) -> {x}
      %3 = stablehlo.sine %1 : {x}
      %4 = stablehlo.reshape %3 : ({x}) -> {flat}
      %5 = stablehlo.reshape %4 : ({flat}) -> {x}
      %6 = stablehlo.reshape %2 : ({x}) -> {flat}
      %7 = stablehlo.reshape %6 : ({flat}) -> {x}
      return %5, %7, %4 : {x}, {x}, {flat} }} }}"""
    assert names(normalised(program).module) == ["transpose", "transpose", "sine", "reshape"]


def test_a_complex_number_is_not_taken_for_one() -> None:
    lowered = jax.jit(lambda x: x * (1 + 0j) + (0 + 2j)).lower(array(4, dtype=jnp.complex64))
    assert [name for name in names(normalised(lowered.as_text()).module) if name in ("multiply", "add")] != []


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
        ("model:1:10", "argument 0", "every dimension a number"),
    ),
    "a size that the program works out": (
        """module { func.func @main(%a: tensor<4xf32>, %n: tensor<i32>) -> tensor<f32> {
          %0 = stablehlo.set_dimension_size %a, %n, dim = 0
            : (tensor<4xf32>, tensor<i32>) -> tensor<?xf32, #stablehlo.bounds<4>>
          %1 = stablehlo.constant dense<0.0> : tensor<f32>
          %2 = stablehlo.reduce(%0 init: %1) applies stablehlo.add across dimensions = [0]
            : (tensor<?xf32, #stablehlo.bounds<4>>, tensor<f32>) -> tensor<f32>
          return %2 : tensor<f32> } }""",
        ("model:2:16", "the result of stablehlo.set_dimension_size", "pad to the bound"),
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
    "scan": (lambda x, w: lax.scan(lambda c, v: (jnp.tanh(c @ v), c.sum()), x, w), (array(8, 8), array(5, 8, 8)),
             "while"),
    "cond": (lambda p, x: lax.cond(p, jnp.sin, jnp.sort, x), (array(dtype=bool), array(8)), "case"),
    "switch": (
        lambda i, x: lax.switch(i, [jnp.sin, jnp.cos, jax.jit(jnp.tan)], x),
        (array(dtype=jnp.int32), array(8)),
        "case",
    ),
    "checkpoint": (jax.grad(lambda x: jax.checkpoint(lambda y: jnp.sin(jnp.sin(y)).sum())(x)), (array(8),),
                   "optimization_barrier"),
    "random bits": (lambda k: jax.random.normal(jax.random.wrap_key_data(k, impl="rbg"), (8,)),
                    (array(4, dtype=jnp.uint32),), "rng_bit_generator"),
    "narrow types": (
        lambda x, y: (x.astype(F32) @ jnp.ones((16, 2)), y.astype(jnp.int32) + 1),
        (array(8, 16, dtype=jnp.float8_e4m3fn), array(8, dtype=jnp.int4)),
        "dot_general",
    ),
    "zero-sized": (lambda x: jnp.concatenate([x, x[:0]]) @ jnp.zeros((4, 0)), (array(8, 4),), "dot_general"),
    "scalar": (lambda x: x * 2, (array(),), "multiply"),
    "size one": (lambda x: x + jnp.ones((1, 4)), (array(8, 1),), "broadcast_in_dim"),
    "special functions": (lambda x: jax.scipy.special.erfinv(x) + jax.scipy.special.gammaln(x), (array(8),),
                          "chlo.erf_inv"),
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
    function, arguments, _ = REAL[name]
    rng = np.random.default_rng(0)
    inputs = [
        rng.normal(size=a.shape).astype(a.dtype) if a.dtype == F32 else np.full(a.shape, 16).astype(a.dtype)
        for a in arguments
    ]
    expected = jax.tree.leaves(jax.jit(function)(*inputs))
    module = normalised(jax.jit(function).lower(*arguments).as_text()).module
    shapes = [tuple(xla.ir.ShapedType(t).shape) for t in main_of(module).type.results]
    with jax.enable_x64(False):
        results = run_program(xla.write_bytecode(module), inputs, shapes, 1, shardy=True)
    for got, wanted in zip(results, expected, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)


def test_what_a_program_does_not_hold_is_not_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, walks = CALLS["twice, with its own locations"][0], list[str]()
    steps = ("with_static_shapes", "legalize", "refuse_foreign", "collective_notices")
    for step in steps:
        told = getattr(normalise, step)
        monkeypatch.setattr(normalise, step, lambda *given, step=step, told=told: (walks.append(step), told(*given))[1])
    assert names(normalised(plain).module) and walks == []
    idle = f"""func.func public @main(%a: {T4}) -> {T4} {{
      %0 = "mhlo.copy"(%a) : ({T4}) -> {T4}
      return %0 : {T4} }}"""
    assert names(normalised(idle).module) == [] and walks == ["legalize"]


@pytest.mark.parametrize(
    ("operation", "left"),
    [
        ("stablehlo.and %a, %no", []),
        ("stablehlo.and %no, %a", []),
        ("stablehlo.or %a, %yes", []),
        ("stablehlo.and %a, %yes", ["and"]),
        ("stablehlo.or %a, %no", ["or"]),
    ],
)
def test_a_question_that_is_answered_already_is_not_asked(operation: str, left: list[str]) -> None:
    kind = "tensor<8xi1>"
    program = f"""module {{ func.func public @main(%a: {kind}) -> {kind} {{
  %no = stablehlo.constant dense<false> : {kind}
  %yes = stablehlo.constant dense<true> : {kind}
  %0 = {operation} : {kind}
  return %0 : {kind}
}} }}"""
    assert [name for name in names(normalised(program).module) if name != "constant"] == left


def test_equal_scalars_of_a_block_are_one() -> None:
    """Not those with dimensions, which a plan may split differently, nor in other blocks, nor of complex numbers."""
    program = """module { func.func public @main(%a: tensor<f32>, %b: tensor<i1>) -> tensor<f32> {
  %one = stablehlo.constant dense<1.0> : tensor<f32>
  %same = stablehlo.constant dense<1.0> : tensor<f32>
  %two = stablehlo.constant dense<2.0> : tensor<f32>
  %i = stablehlo.constant dense<(0.0,1.0)> : tensor<complex<f32>>
  %j = stablehlo.constant dense<(0.0,1.0)> : tensor<complex<f32>>
  %0 = stablehlo.subtract %a, %one : tensor<f32>
  %1 = stablehlo.subtract %a, %same : tensor<f32>
  %2 = stablehlo.subtract %a, %two : tensor<f32>
  %k = stablehlo.multiply %i, %j : tensor<complex<f32>>
  %real = stablehlo.real %k : (tensor<complex<f32>>) -> tensor<f32>
  %3 = stablehlo.multiply %0, %1 : tensor<f32>
  %4 = "stablehlo.if"(%b) ({
    %inside = stablehlo.subtract %a, %one : tensor<f32>
    "stablehlo.return"(%inside) : (tensor<f32>) -> ()
  }, {
    "stablehlo.return"(%3) : (tensor<f32>) -> ()
  }) : (tensor<i1>) -> tensor<f32>
  %5 = stablehlo.add %4, %2 : tensor<f32>
  %6 = stablehlo.add %5, %real : tensor<f32>
  return %6 : tensor<f32>
} }"""
    left = Counter(names(normalised(program).module))
    assert (left["constant"], left["subtract"]) == (4, 3)


# -- conditionals and selections whose outcome a program states


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
