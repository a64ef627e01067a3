"""The named-dimension analysis: what must be split alike, what conflicts, what mirrors what."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from programs import Case, arg, case_of, classes_of, groups_of, program_of, round_mesh, sample, value_classes
from random_programs import cases

from toast_cli.dimensions import Dimensions, analyse
from toast_cli.program.model import Program
from toast_cli.program.ops import ARGUMENT, CARRY, JOIN, RESULT

B, S, D, H, K, F = 2, 16, 24, 4, 8, 96


def letters(run: Any, *shapes: Any) -> str:
    """Every argument and result as its dimensions, each a product of classes named a, b, … in order of first sight."""
    program = program_of(run, *shapes)
    dimensions = analyse(program)
    names: dict[int, str] = {}

    def text(value: int) -> str:
        dims = value_classes(program, dimensions, value)
        return " ".join(
            "".join(names.setdefault(c, "abcdefghijklmnop"[len(names)]) for c in dim) or "1" for dim in dims
        )

    arguments = ", ".join(text(a.value) for a in program.arguments)
    return f"{arguments} -> {', '.join(text(r.value) for r in program.results)}"


# name, function, argument shapes, classes
CLASSES: list[tuple[str, Any, tuple[Any, ...], str]] = [
    ("product", lambda x, w: x @ w, (arg(8, 4), arg(4, 6)), "a b, b c -> a c"),
    ("perceptron", lambda x, v, w: jax.nn.relu(x @ v) @ w, (arg(8, 4), arg(4, 6), arg(6, 5)), "a b, b c, c d -> a d"),
    ("square matrix tied to nothing", lambda x, w: x @ w, (arg(8, 8), arg(8, 8)), "a b, b c -> a c"),
    ("residual", lambda x, w: x + x @ w, (arg(8, 8), arg(8, 8)), "a b, b b -> a b"),
    ("split", lambda x: x.reshape(8, 4, 6), (arg(8, 24),), "a bc -> a b c"),
    ("merge", lambda x: x.reshape(8, 24), (arg(8, 4, 6),), "a b c -> a bc"),
    ("[B, S, HK] beside [B, S, H, K]", lambda x, y: x.reshape(B, S, H, K) + y, (arg(B, S, H * K), arg(B, S, H, K)),
     "a b cd, a b c d -> a b c d"),
    ("two splits that refine each other", lambda x: (x.reshape(8, 4), x.reshape(4, 8)), (arg(32,),),
     "abc -> ab c, a bc"),
    ("two splits that do not line up", lambda x: (x.reshape(4, 6), x.reshape(6, 4)), (arg(24,),), "ab -> a b, c d"),
    ("transpose", lambda x: x.T, (arg(8, 4),), "a b -> b a"),
    ("sum", lambda x: x.sum(0), (arg(8, 4),), "a b -> b"),
    ("broadcast", lambda x, b: x + b, (arg(8, 4), arg(4)), "a b, b -> a b"),
    ("covariance", lambda x: x @ x.T, (arg(8, 4),), "a b -> a a"),
    ("matrix and its transpose", lambda x: x + x.T, (arg(8, 8),), "a a -> a a"),
    ("loop", lambda w, x: lax.scan(lambda c, _: (c @ w, None), x, None, length=4)[0], (arg(8, 8), arg(4, 8)),
     "a a, b a -> b a"),
    ("stacked results of a loop", lambda x: lax.scan(lambda c, r: (c + r, c * r), jnp.zeros(8), x), (arg(4, 8),),
     "a b -> b, c b"),
    ("call", lambda x, w: jax.jit(jnp.matmul)(x, w), (arg(8, 4), arg(4, 6)), "a b, b c -> a c"),
    ("branches", lambda p, x, y: lax.cond(p, lambda: x, lambda: y), (arg(dtype=bool), arg(8, 4), arg(8, 4)),
     ", a b, a b -> a b"),
    ("table lookup", lambda t, i: t[i], (arg(32, 8), arg(6, dtype=jnp.int32)), "a b, c -> c b"),
    ("dimensions of one element have no class", lambda x: x.reshape(8, 1, 4), (arg(8, 4),), "a b -> a 1 b"),
    ("concatenation", lambda x, y: jnp.concatenate([x, y], 1), (arg(8, 4), arg(8, 6)), "a b, a c -> a d"),
]  # fmt: skip


@pytest.mark.parametrize(("run", "shapes", "expected"), [c[1:] for c in CLASSES], ids=[c[0] for c in CLASSES])
def test_classes(run: Any, shapes: tuple[Any, ...], expected: str) -> None:
    assert letters(run, *shapes) == expected


def test_a_donated_argument_and_what_takes_its_buffer_are_one() -> None:
    program = program_of(lambda x, y: (jnp.zeros((8, 8)) + 1.0, y), arg(8, 8), arg(3), donate=(0,))
    dimensions = analyse(program)
    (result, _) = program.results
    assert value_classes(program, dimensions, result.value) == value_classes(program, dimensions, 0)


# ---------------------------------------------------------------- conflicts


def attention(x: Any, wq: Any, wk: Any, wv: Any, wo: Any) -> Any:
    q, k, v = ((x @ w).reshape(B, S, H, K) for w in (wq, wk, wv))
    scores = jax.nn.softmax(jnp.einsum("bshd,bthd->bhst", q, k))
    return x + jnp.einsum("bhst,bthd->bshd", scores, v).reshape(B, S, H * K) @ wo


def attention_shapes(layers: int = 1) -> list[Any]:
    return [arg(B, S, D), *[arg(D, H * K)] * 3 * layers, *[arg(H * K, D)] * layers]


def gradient_of_attention(x: Any, wq: Any, wk: Any, wv: Any, wo: Any) -> Any:
    return jax.grad(lambda *a: jnp.sum(attention(*a) ** 2), argnums=(0, 1, 2, 3, 4))(x, wq, wk, wv, wo)


@pytest.mark.parametrize("run", [attention, gradient_of_attention], ids=["forward", "forward and backward"])
def test_attention_has_one_conflict_with_two_sides(run: Any) -> None:
    program = program_of(run, *attention_shapes())
    dimensions = analyse(program)
    (resolution,) = dimensions.resolutions
    assert (resolution.sides, resolution.components, dimensions.components) == (2, 1, 1)
    seq = dimensions.groups[resolution.group]
    assert (seq.name, seq.size) == ("seq", S)
    assert groups_of(program, dimensions, "x")[1] == (resolution.group,)
    scores = {v for v, value in enumerate(program.values) if value.shape[-2:] == (S, S) and program.producer[v] >= 0}
    assert dimensions.conflicts == len(scores)


def test_heads_are_the_major_part_of_a_merged_dimension() -> None:
    program = program_of(attention, *attention_shapes())
    dimensions = analyse(program)
    (heads, query_size), (same_heads, value_size) = (
        classes_of(program, dimensions, "wq")[1],
        classes_of(program, dimensions, "wv")[1],
    )
    assert (heads, dimensions.class_sizes[heads]) == (same_heads, H)
    assert dimensions.class_sizes[query_size] == dimensions.class_sizes[value_size] == K
    assert query_size != value_size  # what queries and keys share, values do not
    assert classes_of(program, dimensions, "wo")[0] == (heads, value_size)
    assert dimensions.groups[dimensions.class_group[heads]].name == "heads"


def stacked_attention(x: Any, *weights: Any) -> Any:
    for k in range(0, len(weights), 4):
        x = attention(x, *weights[k : k + 4])
    return x


def test_the_attention_of_every_layer_takes_one_choice() -> None:
    shapes = attention_shapes()
    dimensions = analyse(program_of(stacked_attention, shapes[0], *shapes[1:] * 3))
    assert dimensions.components == 3
    assert [(r.components, r.sides) for r in dimensions.resolutions] == [(3, 2)]


def test_covariance_has_two_sides() -> None:
    dimensions = analyse(program_of(lambda x: x @ x.T, arg(8, 16)))
    assert [(r.sides, r.values) for r in dimensions.resolutions] == [(2, 1)]


def reshards(case: Case, *place: str) -> int:
    """Uses that need another sharding than they find, when a dimension is split over `data`."""
    return len(case.lowered((case.shard(*place, "data"),)).required)


def test_a_twisted_component_is_cut_once() -> None:
    """x + x.T ties each side of x to the other: one of the two links must give, and one reshard sits there."""
    case = case_of(lambda x: x + x.T, arg(8, 8))
    assert reshards(case, "x.0") == 1
    plan = (case.shard("x.0", "data"),)
    # 256 bytes over 4 devices: each ends up with a quarter of the transposed matrix.
    assert case.collectives(plan) == [("all-to-all", ("data",), 64.0, 1.0)]


def test_the_lighter_link_of_a_twisted_component_is_cut() -> None:
    """In the loop the transpose would be paid for ten times, outside once."""

    def run(x: Any, w: Any) -> Any:
        y = lax.fori_loop(0, 10, lambda _, c: jnp.sin(c) * x, x)
        return y + x.T

    case = case_of(run, arg(8, 8), arg(1))
    plan = (case.shard("x.0", "data"),)
    assert [(kind, count) for kind, _, _, count in case.collectives(plan)] == [("all-to-all", 1.0)]


# ---------------------------------------------------------------- groups


def perceptron(layers: int) -> Any:
    def run(x: Any, *weights: Any) -> Any:
        for k in range(layers):
            x = x + jax.nn.relu(x @ weights[2 * k]) @ weights[2 * k + 1]
        return x

    return run


def test_every_layers_width_is_one_group() -> None:
    program = program_of(perceptron(3), arg(8, D), *[arg(D, F), arg(F, D)] * 3)
    dimensions = analyse(program)
    widths = [g for g in dimensions.groups if g.size == F]
    assert [len(g.classes) for g in widths] == [3]
    assert widths[0].name.startswith("ff")


def test_classes_of_different_sizes_do_not_mirror_each_other() -> None:
    program = program_of(perceptron(2), arg(8, D), arg(D, F), arg(F, D), arg(D, 2 * F), arg(2 * F, D))
    assert sorted(len(g.classes) for g in analyse(program).groups) == [1, 1, 1, 1]


def test_consecutive_widths_of_a_plain_perceptron_are_coloured_apart() -> None:
    def run(x: Any, *weights: Any) -> Any:
        for w in weights:
            x = jax.nn.relu(x @ w)
        return x

    program = program_of(run, arg(8, D), *[arg(D, D)] * 6)
    dimensions = analyse(program)
    for number, factors in enumerate(dimensions.factor_classes):
        groups = [dimensions.class_group[c] for c in factors]
        assert len(set(groups)) == len(groups), program.ops[number]
    inner = [groups_of(program, dimensions, f"weights[{k}]")[1][0] for k in range(1, 5)]
    assert inner[0] == inner[2] != inner[1] == inner[3]  # every other width together
    assert not dimensions.resolutions


def test_a_stencil_links_what_it_reads_with_what_it_writes() -> None:
    def run(x: Any, w: Any) -> Any:
        return lax.conv_general_dilated(x, w, (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    program = program_of(run, arg(4, 18, 34, 8), arg(3, 3, 8, 6))
    dimensions = analyse(program)
    groups = groups_of(program, dimensions, "x")
    assert [dimensions.groups[g].name for (g,) in groups] == ["batch", "height", "width", "channels"]
    assert [sorted(dimensions.class_sizes[c] for c in dimensions.groups[g].classes) for (g,) in groups] == [
        [4],
        [16, 18],
        [32, 34],
        [8],
    ]


def test_both_sizes_of_a_stencil_must_divide() -> None:
    def run(x: Any, w: Any) -> Any:
        return lax.conv_general_dilated(x, w, (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    case = case_of(run, arg(4, 16, 18, 8), arg(3, 3, 8, 6))  # 16 -> 14 rows, 18 -> 16 columns; the mesh has 4 x 2
    result = case.program.results[0].value
    for axis, place, expected in [
        ("data", "x.1", "-|-|-|-"),
        ("model", "x.1", "-|model|-|-"),
        ("model", "x.2", "-|-|model|-"),
    ]:
        assert case.text(case.lowered((case.shard(place, axis),)).shardings[result]) == expected


# ---------------------------------------------------------------- laws


def structure(program: Program, dimensions: Dimensions) -> list[Any]:
    """Per op its factors' classes, numbered in order of first sight over the ops as they are in `program`."""
    seen: dict[int, int] = {}
    return [[seen.setdefault(c, len(seen)) for c in factors] for factors in dimensions.factor_classes]


def renamed(program: Program, new: list[int]) -> Program:
    """The program with value v called new[v]."""
    ops = tuple(
        replace(op, operands=tuple(new[v] for v in op.operands), results=tuple(new[v] for v in op.results))
        for op in program.ops
    )
    values = [program.values[0]] * len(new)
    for old, value in enumerate(program.values):
        values[new[old]] = value
    return Program(
        program.name,
        ops,
        tuple(values),
        tuple(replace(a, value=new[a.value]) for a in program.arguments),
        tuple(replace(r, value=new[r.value]) for r in program.results),
        program.loops,
    )


@settings(max_examples=25)
@given(cases(), st.randoms(use_true_random=False))
def test_renaming_values_changes_no_class_group_or_side(case: Case, random: Any) -> None:
    program = case.program
    new = list(range(len(program.values)))
    random.shuffle(new)
    before, after = analyse(program), analyse(renamed(program, new))
    assert structure(program, before) == structure(program, after)
    assert before.class_group == after.class_group
    assert [g.resolutions for g in before.groups] == [g.resolutions for g in after.groups]
    assert before.strands == after.strands


def reordered(program: Program, random: Any) -> tuple[Program, list[int]]:
    """The same ops in another order that respects what they read (arguments first, results last), and the order."""
    producer, placed, order = program.producer, set[int](), []
    waiting = [n for n, op in enumerate(program.ops) if op.name not in (ARGUMENT, RESULT)]
    order = [n for n, op in enumerate(program.ops) if op.name == ARGUMENT]
    placed.update(order)
    while waiting:
        ready = [n for n in waiting if all(producer[v] in placed for v in program.ops[n].operands)]
        chosen = random.choice(ready)
        waiting.remove(chosen)
        placed.add(chosen)
        order.append(chosen)
    order += [n for n, op in enumerate(program.ops) if op.name == RESULT]
    return replace(program, ops=tuple(program.ops[n] for n in order)), order


@settings(max_examples=25)
@given(cases(loops=False), st.randoms(use_true_random=False))
def test_reordering_independent_ops_changes_no_class(case: Case, random: Any) -> None:
    program = case.program
    other, order = reordered(program, random)
    before, after = analyse(program), analyse(other)
    back: list[Any] = [()] * len(order)
    for place, number in enumerate(order):
        back[number] = after.factor_classes[place]
    renumbered: dict[int, int] = {}
    for factors, again in zip(before.factor_classes, back, strict=True):
        assert len(factors) == len(again)
        for one, other_class in zip(factors, again, strict=True):
            assert renumbered.setdefault(one, other_class) == other_class
    assert len(set(renumbered.values())) == len(renumbered)
    assert len(before.groups) == len(after.groups)
    assert before.components == after.components


@pytest.mark.parametrize("name", ["scan_tiny", "itx_decode_tiny", "gns_tiny", "moe_tiny"])
def test_what_flows_into_and_out_of_control_flow_has_one_name(name: str) -> None:
    source, dimensions = sample(name)
    program = source.program
    for op in program.ops:
        if op.name in (CARRY, JOIN):
            (result,) = op.results
            wanted = value_classes(program, dimensions, result)
            assert [value_classes(program, dimensions, v) for v in op.operands] == [wanted] * len(op.operands)


# name -> names its groups must include
NAMED = {
    "t2b_tiny": {"batch", "seq", "heads", "ff", "vocab"},
    "scan_tiny": {"batch", "seq", "heads", "ff", "vocab", "layers"},
    "gns_tiny": {"edges", "nodes"},
    "resnet50_tiny": {"batch", "height", "width"},
    "moe_tiny": {"batch", "experts"},
}


@pytest.mark.parametrize("name", NAMED)
def test_groups_are_called_what_they_are(name: str) -> None:
    names = [g.name for g in sample(name)[1].groups]
    assert NAMED[name] <= set(names)
    assert len(set(names)) == len(names)


def test_the_mesh_has_no_say_in_the_analysis() -> None:
    small, large = (case_of(attention, *attention_shapes(), mesh=round_mesh(data=n)) for n in (2, 8))
    assert small.problem.dimensions == large.problem.dimensions
