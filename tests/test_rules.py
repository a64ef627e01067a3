"""Every op has a rule or is listed as one nobody can split: over all sample models, and for ops no sample holds."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from programs import SAMPLES, arg, problem_of, round_mesh, sample, source_of, source_of_text

from toast_cli.frontend.rules import table_rule
from toast_cli.plan.decisions import Shard
from toast_cli.plan.lower import lower
from toast_cli.program.model import Op, Program, Rule, ValueFactors

TINY = sorted(p.name.split(".")[0] for p in SAMPLES.iterdir() if "_tiny." in p.name)

# Every op of the sample models, by where its rule comes from.
FROM_SHARDY = frozenset(
    """
    abs add and broadcast_in_dim compare concatenate convert convolution cosine divide dot_general dynamic_slice
    dynamic_update_slice exponential gather is_finite log log_plus_one maximum multiply negate optimization_barrier pad
    power reduce reduce_window reshape reverse rsqrt scatter select select_and_scatter sine slice sqrt subtract tanh
    transpose
    """.split()  # noqa: SIM905 - a line of names reads better than a column
)
FROM_TABLE = {"constant", "iota", "chlo.erfc", "chlo.square"}
OF_OUR_OWN = {"toast.argument", "toast.carry", "toast.join", "toast.result"}
OPAQUE: set[str] = set()


def text_of(rule: Rule) -> str:
    """`([i, k], [k, j])->([i, j]) reduction={k}`, factors named in order of their numbers from i."""
    letters = "ijklmnopqrstuvwxyz"

    def arrays(values: tuple[ValueFactors, ...]) -> str:
        return ", ".join(
            "[" + ", ".join("".join(letters[f] for f in dim) or "-" for dim in dims) + "]" for dims in values
        )

    text = f"({arrays(rule.operands)})->({arrays(rule.results)})"
    for name, factors in (
        ("reduction", rule.reduction),
        ("need_replication", rule.need_replication),
        ("permutation", rule.permutation),
    ):
        if factors:
            text += f" {name}={{{', '.join(letters[f] for f in sorted(factors))}}}"
    return text


def fits(program: Program, op: Op) -> bool:
    """Whether the rule speaks of every dimension of every array of the op."""
    arrays = (*op.rule.operands, *op.rule.results)
    return [len(dims) for dims in arrays] == [len(program.values[v].shape) for v in op.operands + op.results]


@pytest.mark.parametrize("name", TINY)
def test_every_op_of_the_sample_models_has_a_rule(name: str) -> None:
    program = sample(name)[0].program
    for op in program.ops:
        short = op.name.removeprefix("stablehlo.")
        assert short in FROM_SHARDY | FROM_TABLE | OF_OUR_OWN | OPAQUE, (
            f"{op.name} {op.detail}: add it to the table here"
        )
        assert op.opaque == (short in OPAQUE), f"{op.name} {op.detail}"
        assert fits(program, op), op


def test_the_table_above_lists_nothing_else() -> None:
    met = {op.name.removeprefix("stablehlo.") for name in TINY for op in sample(name)[0].program.ops}
    assert met >= FROM_SHARDY | FROM_TABLE | OPAQUE


# name, custom-call target, operand shapes, result shapes, rule ("": nobody knows)
TABLE: list[tuple[str, str, list[tuple[int, ...]], list[tuple[int, ...]], str]] = [
    ("stablehlo.constant", "", [], [(2, 3)], "()->([i, j])"),
    ("stablehlo.iota", "", [], [(2, 3)], "()->([i, j])"),
    ("stablehlo.partition_id", "", [], [()], "()->([])"),
    ("chlo.square", "", [(2, 3)], [(2, 3)], "([i, j])->([i, j])"),
    ("chlo.erf_inv", "", [(4,)], [(4,)], "([i])->([i])"),
    ("chlo.next_after", "", [(2, 3), (2, 3)], [(2, 3)], "([i, j], [i, j])->([i, j])"),
    ("chlo.broadcast_add", "", [(2, 3), (2, 3)], [(2, 3)], "([i, j], [i, j])->([i, j])"),
    ("chlo.broadcast_add", "", [(2, 3), (3,)], [(2, 3)], ""),  # broadcasting left implicit
    ("chlo.top_k", "", [(5, 2, 8)], [(5, 2, 3), (5, 2, 3)], "([i, j, -])->([i, j, -], [i, j, -])"),
    ("stablehlo.custom_call", "Qr", [(7, 4, 4)], [(7, 4, 4), (7, 4)], "([i, -, -])->([i, -, -], [i, -])"),
    ("stablehlo.custom_call", "Qr", [(7, 4, 4)], [(5, 4, 4)], ""),  # batch dimensions that differ
    ("stablehlo.custom_call", "Cholesky", [(7, 4, 4)], [(7, 4, 4)], "([i, -, -])->([i, -, -])"),
    ("stablehlo.custom_call", "mhlo.erf", [(7, 4)], [(7, 4)], "([i, j])->([i, j])"),
    ("stablehlo.custom_call", "somebody's kernel", [(7, 4)], [(7, 4)], ""),
    ("somebody.op", "", [(7, 4)], [(7, 4)], ""),
]


@pytest.mark.parametrize(("name", "target", "operands", "results", "expected"), TABLE)
def test_rules_of_our_own(
    name: str, target: str, operands: list[tuple[int, ...]], results: list[tuple[int, ...]], expected: str
) -> None:
    rule = table_rule(name, target, operands, results)
    assert (text_of(rule) if rule else "") == expected


PLACE = arg(dtype=jnp.int32)
# What Shardy says, as the rest of the tool reads it.
READ: list[tuple[str, Any, tuple[Any, ...], str]] = [
    ("dot_general", lambda x, y: x @ y, (arg(2, 3), arg(3, 4)), "([i, k], [k, j])->([i, j]) reduction={k}"),
    ("transpose", lambda x: x.T, (arg(2, 3),), "([j, i])->([i, j])"),
    ("reshape", lambda x: x.reshape(2, 12), (arg(2, 3, 4),), "([i, j, k])->([i, jk])"),
    ("reshape", lambda x: x.reshape(2, 3, 4), (arg(2, 12),), "([i, jk])->([i, j, k])"),
    ("concatenate", lambda x, y: jnp.concatenate([x, y], 1), (arg(2, 3), arg(2, 5)),
     "([i, j], [i, j])->([i, j]) need_replication={j}"),
    ("concatenate", lambda x: jnp.roll(x, 4, 1), (arg(2, 8),), "([i, j], [i, j])->([i, j]) need_replication={j}"),
    # Of these, Shardy of jaxlib 0.12 says something else.
    ("pad", lambda x: lax.pad(x, 0.0, ((0, 0, 0), (1, 0, 0))), (arg(2, 8),), "([i, j], [])->([i, j]) permutation={j}"),
    ("pad", lambda x: lax.pad(x, 0.0, ((0, 0, 0), (1, -1, 0))), (arg(2, 8),), "([i, j], [])->([i, j])"),
    ("reshape", lambda x: x.reshape(2, 1, 3), (arg(2, 3),), "([i, k])->([i, j, k])"),
    ("dynamic_update_slice", lambda x, u, at: lax.dynamic_update_slice(x, u, (at, at)), (arg(4, 8), arg(4, 2), PLACE),
     "([i, j], [i, k], [], [])->([i, j]) need_replication={k}"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "run", "shapes", "expected"), READ)
def test_rules_that_shardy_knows(name: str, run: Any, shapes: tuple[Any, ...], expected: str) -> None:
    program = source_of(run, *shapes).program
    (op,) = (op for op in program.ops if op.name == f"stablehlo.{name}")
    assert text_of(op.rule) == expected


def test_windows_of_kernels_are_whole() -> None:
    """Neither what goes along them nor what is made along them (a gradient) is split; places of images are."""

    def convolved(x: Any, w: Any) -> Any:
        return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    x, w = arg(8, 16, 16, 4), arg(3, 3, 4, 8)
    both = source_of(lambda x, w, g: (convolved(x, w), jax.vjp(convolved, x, w)[1](g)[1]), x, w, arg(8, 16, 16, 8))
    forward, gradient = (op.rule for op in both.program.ops if op.name == "stablehlo.convolution")
    assert {forward.sizes[f] for dim in forward.operands[1][:2] for f in dim} == {1}
    assert forward.permutation == {f for dim in forward.results[0][1:3] for f in dim}
    assert {gradient.sizes[f] for dim in gradient.results[0] for f in dim} == {1, 4, 8}
    assert not gradient.permutation and len(gradient.reduction) == 3


UNKNOWN = """
func.func @main(%x: tensor<8x8xf32>) -> tensor<8x8xf32> {
  %0 = stablehlo.sine %x : tensor<8x8xf32>
  %1 = stablehlo.custom_call @somebodys_kernel(%0) : (tensor<8x8xf32>) -> tensor<8x8xf32>
  %2 = stablehlo.cosine %1 : tensor<8x8xf32>
  return %2 : tensor<8x8xf32>
}
"""


def test_an_op_nobody_knows_is_computed_whole_and_said_so() -> None:
    source = source_of_text(UNKNOWN)
    assert [(op.name, op.detail) for op in source.program.ops if op.opaque] == [
        ("stablehlo.custom_call", "somebodys_kernel")
    ]
    problem = problem_of(source, round_mesh(data=4))
    groups = problem.patterns[problem.op_pattern[0]].groups
    lowered = lower(problem, (Shard(groups[0], 0),))
    argument, sine, kernel, cosine = range(4)
    assert lowered.shardings[source.program.ops[sine].results[0]] == ((0,), ())  # split before it
    assert lowered.required[kernel, 0] == ((), ())  # gathered for it
    assert lowered.shardings[source.program.ops[kernel].results[0]] == ((), ())
    assert lowered.shardings[source.program.ops[argument].results[0]] == ((0,), ())
    # Nothing ties what comes after it to what went in.
    assert lowered.shardings[source.program.ops[cosine].results[0]] == ((), ())


def test_equal_rules_are_one_object() -> None:
    program = source_of(lambda x, y: jnp.sin((x @ y) @ y) @ y, arg(4, 4), arg(4, 4)).program
    dots = [op.rule for op in program.ops if op.name == "stablehlo.dot_general"]
    assert len(dots) == 3
    assert all(rule is dots[0] for rule in dots)


@pytest.mark.parametrize(
    "run",
    [lambda x: lax.top_k(x, 3)[0], lambda x: jnp.sort(x, 1), lambda x: jnp.cumsum(x, 1)],
    ids=["top_k", "sort", "cumulative sum"],
)
def test_ops_that_act_on_one_dimension_can_be_split_along_the_other(run: Any) -> None:
    problem = problem_of(source_of(run, arg(16, 8)), round_mesh(data=4))
    rows = problem.patterns[problem.op_pattern[0]].groups[0]
    lowered = lower(problem, (Shard(rows, 0),))
    assert {
        sharding
        for sharding, value in zip(lowered.shardings, problem.program.values, strict=True)
        if value.shape[:1] == (16,)
    } == {((0,), ())}
    assert not lowered.required


def test_a_fourier_transform_is_split_along_its_batch_only() -> None:
    program = source_of(lambda x: jnp.fft.rfft2(x).real, arg(16, 12, 8)).program
    (rule,) = (op.rule for op in program.ops if op.name == "stablehlo.fft")
    assert rule.operands == rule.results and rule.need_replication == {1, 2}


def test_only_rules_that_shardy_populates_are_taken_off_again() -> None:
    rule = "#sdy.op_sharding_rule<([i])->([i]) {i=8}, custom>"
    source = source_of_text(
        f"""func.func public @main(%a: tensor<8xf32>) -> tensor<8xf32> {{
          %0 = stablehlo.custom_call @own(%a) {{sdy.sharding_rule = {rule}}} : (tensor<8xf32>) -> tensor<8xf32>
          %1 = stablehlo.add %0, %0 : tensor<8xf32>
          return %1 : tensor<8xf32> }}"""
    )
    assert [operation.name for operation in source.operations if "sdy.sharding_rule" in operation.attributes] == [
        "stablehlo.custom_call"
    ]
    assert all(op.rule.sizes == (8,) for op in source.program.ops)


def test_what_is_made_of_constants_alone_is_added_up_whole() -> None:
    """`iota` takes the sharding of each use: nothing splits its sum. A product's other side does."""

    def sums(x: jax.Array) -> Any:
        return jnp.sum(lax.iota(jnp.float32, 16)) + x, jnp.ones((4, 16)) @ x

    rules = {op.name: text_of(op.rule) for op in source_of(sums, arg(16, 8)).program.ops}
    assert rules["stablehlo.reduce"] == "([i], [])->([]) need_replication={i}"
    assert rules["stablehlo.dot_general"] == "([i, k], [k, j])->([i, j]) reduction={k}"
