"""Reductions whose result goes on in a finer sharding say so, lest that sharding spreads over what they read."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest
from emitted import partitioned, strategy
from jax import lax
from programs import Case, arg, case_of, round_mesh

from toast_cli.emit.annotations import full_annotations
from toast_cli.emit.minimal import choose_annotations
from toast_cli.program.ops import SCATTER


def loss_case() -> Case:
    """The gradient of a loss over `[batch, vocab]` logits."""

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        return -jax.nn.log_softmax(x @ w)[:, 0].mean()

    return case_of(jax.grad(loss), arg(8, 64), arg(16, 8))


def test_a_scattered_reduction_says_where_it_is_computed() -> None:
    case = loss_case()
    plan = (case.shard("x.0", "data"), case.shard("w.1", "model"), case.shard("x.0", "model"))
    lowered = case.lowered(plan)
    scattered = {
        op.results[0] for op in case.program.ops if op.name == "stablehlo.reduce" and op.results[0] in lowered.computed
    }
    pins = {pin.handle: pin.shardings for pin in choose_annotations(case.source, lowered).annotations.constraints}
    assert scattered
    for value in scattered:
        assert pins[case.source.definitions[value]][0] == lowered.computed[value]


def test_the_gradient_of_a_convolution_is_summed_where_it_is_made() -> None:
    def gradient(x: jax.Array, dy: jax.Array) -> jax.Array:
        def depthwise(k: jax.Array) -> jax.Array:
            dims = ("NWC", "WIO", "NWC")
            y = lax.conv_general_dilated(x, k, (1,), "SAME", dimension_numbers=dims, feature_group_count=128)
            return (y * dy).sum()

        return jax.grad(depthwise)(jnp.zeros((4, 1, 128)))

    case = case_of(gradient, arg(16, 32, 128), arg(16, 32, 128), mesh=round_mesh(data=2, fsdp=2, model=2))
    plan = strategy(case, "x.0=data", "x.0=fsdp", "x.2=model", "x.2=data", "x.2=fsdp")
    found = partitioned(case, plan)
    assert {(c.kind, c.axes, c.bytes) for c in found} == {("reduce-scatter", ("data", "fsdp"), 4 * 4 * 16)}


@pytest.mark.parametrize("name", ["a reduction", "a look-up", "a sum of products", "a product"])
def test_what_is_scattered_along_two_dimensions_is_reduced_whole_but_for_products(name: str) -> None:
    """XLA takes pieces along one dimension of what it all-reduces for a reduce-scatter; a product has two of them."""
    functions: dict[str, Callable[..., jax.Array]] = {
        "a reduction": lambda x, y, i: jnp.sort(jnp.tanh(x).sum(0), 0),
        "a look-up": lambda x, y, i: jnp.zeros((8, 16, 32)).at[i].add(x),
        "a sum of products": lambda x, y, i: jnp.einsum("bij,bk->ijk", x, y) + jnp.einsum("bij,bk->ijk", x, y * y),
        "a product": lambda x, y, i: jnp.einsum("bij,bk->ijk", x, y),
    }
    case = case_of(functions[name], arg(64, 16, 32), arg(64, 8), arg(64, dtype=jnp.int32))
    plan = strategy(case, "x.0=data", "x.0=model", "x.1=data", "x.2=model")
    lowered = case.lowered(plan)
    found = partitioned(case, plan)
    promised = {one.kind for one in lowered.collectives}
    assert promised == {one.kind for one in found}
    assert ("reduce-scatter" in promised) is (name == "a product")


@pytest.mark.parametrize("reduced", [False, True])
def test_the_partitioner_is_left_with_products_that_it_would_else_reduce_whole(reduced: bool) -> None:
    """Those that are scattered over one axis and reduced over another; XLA:TPU makes slow loops of others."""
    case = case_of(lambda x, y: x.T @ y, arg(64, 32), arg(64, 128))
    plan = strategy(case, "x.0=data", "x.1=data", "x.0=model" if reduced else "y.1=model")
    lowered = case.lowered(plan)
    assert bool(lowered.by_partitioner) is reduced
    pins = [pin.shardings for pin in choose_annotations(case.source, lowered).annotations.constraints]
    assert any(len(shardings) > 1 for shardings in pins) is not reduced
    found = partitioned(case, plan)
    made = {("reduce-scatter", ("data",)), *([("all-reduce", ("model",))] if reduced else [])}
    assert {(c.kind, c.axes) for c in found} == made


def test_a_product_is_scattered_before_a_look_up_reads_it() -> None:
    def pairs(z: jax.Array) -> jax.Array:
        i, j = jnp.tril_indices(5, -1)
        return jnp.einsum("bnd,bmd->bnm", z, z)[:, i, j]

    case = case_of(pairs, arg(64, 5, 16))
    plan = (case.shard("z.0", "data"), case.shard("z.2", "model"), case.shard("z.0", "model"))
    found = partitioned(case, plan)
    assert {(c.kind, c.axes, c.bytes) for c in found} == {("reduce-scatter", ("model",), 8 * 5 * 5 * 4)}


def test_a_product_scattered_out_of_mesh_order_says_where_it_is_computed() -> None:
    def combine(w: jax.Array, h: jax.Array, x: jax.Array) -> jax.Array:
        return x + jnp.einsum("gtec,egcd->gtd", w, h)

    sizes = {"data": 2, "fsdp": 2, "model": 2, "seq": 2}
    case = case_of(combine, arg(8, 64, 8, 24), arg(8, 8, 24, 64), arg(8, 64, 64), mesh=round_mesh(**sizes))
    groups = [("w.0", "data"), ("w.0", "seq"), ("w.2", "fsdp"), ("w.2", "model"), ("x.0", "fsdp"), ("x.1", "model")]
    plan = tuple(case.shard(dimension, axis) for dimension, axis in groups)
    found = partitioned(case, plan)
    assert {c.kind for c in found} == {"all-reduce"}  # and nothing is gathered; XLA:TPU leaves it one


@pytest.mark.parametrize("lookups", [1, 2])
@pytest.mark.parametrize("split", [False, True])
def test_the_gradient_of_a_tied_table(split: bool, lookups: int) -> None:
    """Left to itself, XLA scatters the look-ups' parts into the product's, which is then reduced before."""

    def gradient(ids: jax.Array, dx: jax.Array, x: jax.Array, dy: jax.Array) -> jax.Array:
        grad = dy.T @ x
        for _ in range(lookups):
            grad += jnp.zeros((2048, 512)).at[ids].add(dx)
            ids, dx = 2 * ids, jnp.tanh(dx)
        return grad

    case = case_of(gradient, arg(64, dtype=jnp.int32), arg(64, 512), arg(64, 512), arg(64, 2048))
    plan = tuple(case.shard(place, "data") for place in ("ids.0", "x.0", "x.1")[: 2 + split])
    size = 2048 * 512 * 4
    expected = ("reduce-scatter", ("data",), size // 4, 1) if split else ("all-reduce", ("data",), size, 1)
    assert case.collectives(plan) == [expected]
    lowered = case.lowered(plan)
    found = partitioned(case, plan)
    assert [(c.kind, c.axes, c.bytes) for c in found] == [expected[:3]]
    scatters = {case.source.definitions[op.results[0]] for op in case.source.program.ops if op.name == SCATTER}
    for each in (choose_annotations(case.source, lowered).annotations, full_annotations(case.source, lowered)):
        assert {pin.handle for pin in each.constraints} >= scatters  # in StableHLO, and in HLO


IDS, ROWS = [("ids.0", "data"), ("x.0", "data")], [("ids.0", "model"), ("x.0", "model")]


@pytest.mark.parametrize("product", ["plain", "transposed", "transposed twice"])
@pytest.mark.parametrize(
    "decisions",
    [
        IDS,
        [*IDS, ("x.1", "data")],
        [*IDS, ("dy.1", "data")],
        [("dy.1", "model"), *IDS, ("x.1", "data")],
        [("dy.1", "model"), *IDS, ("dy.1", "data")],
        [*IDS, *ROWS, ("x.1", "data")],
        [*IDS, *ROWS, ("x.1", "model")],
    ],
    ids=[
        "whole",
        "columns",
        "rows",
        "rows split besides",
        "rows split further",
        "reduced besides",
        "scattered over the second",
    ],
)
def test_a_look_up_and_a_product_are_reduced_together_or_apart(product: str, decisions: list[tuple[str, str]]) -> None:
    """Of a table that is looked up and multiplied by: toast promises what the partitioner makes of what it wrote."""

    def gradient(ids: jax.Array, dx: jax.Array, x: jax.Array, dy: jax.Array) -> jax.Array:
        looked_up = jnp.zeros((2048, 512)).at[ids].add(dx)
        multiplied = (x.T @ dy).T if product == "transposed" else dy.T @ x
        return looked_up + (multiplied.T.T if product == "transposed twice" else multiplied)

    assert_promised(gradient, decisions)


def test_gradients_that_are_converted_are_reduced_apart() -> None:
    """Those of weights cast to bf16, as in mixed precision."""

    def gradient(ids: jax.Array, dx: jax.Array, x: jax.Array, dy: jax.Array) -> jax.Array:
        looked_up, multiplied = jnp.zeros((2048, 512)).at[ids].add(dx), dy.T @ x
        return looked_up.astype(jnp.bfloat16).astype(jnp.float32) + multiplied.astype(jnp.bfloat16).astype(jnp.float32)

    assert_promised(gradient, IDS)


FORMS: dict[str, Callable[..., jax.Array]] = {
    "product": lambda x, dy: x.T @ dy,
    "transposed": lambda x, dy: (x.T @ dy).T * 2.0,
    "sum of products": lambda x, dy: x.T @ dy + (2.0 * x).T @ (dy + 1.0),
    "reduction": lambda x, dy: (x * dy).sum(0),
}
# Axes that split what is added up -> those of them that each device keeps a piece along, and of which dimension.
BESIDE = [
    ("data model", "data=x.1"),
    ("data model", "model=x.1"),
    ("a b c", "b=x.1"),
    ("c a", "c=x.1"),
    ("a b c", "a=x.1 b=x.1"),
    ("c b a", "c=x.1 b=dy.1"),
]


@pytest.mark.parametrize(("over", "kept"), BESIDE)
@pytest.mark.parametrize("form", FORMS)
def test_scattered_over_some_axes_and_reduced_over_others(form: str, over: str, kept: str) -> None:
    """Gradients of a batch over more axes than the state is split over. The partitioner scatters products that it is
    left alone with before it reduces them; of all else it reduces everything, and each device keeps its piece."""
    sizes = {"data": 4, "model": 2} if "data" in over else {"a": 2, "b": 2, "c": 2}
    case = case_of(FORMS[form], arg(64, 512), arg(64, 512), mesh=round_mesh(**sizes))
    pairs = [pair.split("=") for pair in kept.split()]
    plan = (
        *(case.shard("x.0", axis) for axis in over.split()),
        *(case.shard("x.1" if form == "reduction" else place, axis) for axis, place in pairs),
    )
    found = partitioned(case, plan)
    uses = case.collectives(plan)
    promised = [(kind, sorted(axes), round(size)) for kind, axes, size, count in uses for _ in range(int(count))]
    compiled = [(one.kind, sorted(one.axes), one.bytes) for one in found]
    assert sorted(promised) == sorted(compiled)
    if (form, kept) == ("product", "data=x.1"):
        assert ("reduce-scatter", ["data"], 512 * 512) in compiled


def assert_promised(gradient: Callable[..., jax.Array], decisions: list[tuple[str, str]]) -> None:
    case = case_of(gradient, arg(64, dtype=jnp.int32), arg(64, 512), arg(64, 512), arg(64, 2048))
    plan = tuple(case.shard(dimension, axis) for dimension, axis in decisions)
    found = partitioned(case, plan)
    uses = case.collectives(plan)
    promised = [(kind, axes, round(size)) for kind, axes, size, count in uses for _ in range(int(count))]
    assert sorted(promised) == sorted((c.kind, c.axes, c.bytes) for c in found)


def test_what_a_look_up_finds_is_scattered_before_it_is_squared() -> None:
    """XLA multiplies it by itself, would do so with all that is found, and then take a piece of that: as the whole is
    read, an all-reduce."""

    def normed(table: jax.Array, ids: jax.Array) -> jax.Array:
        x = table[ids]
        return x * lax.rsqrt(jnp.square(x).mean(-1, keepdims=True))

    case = case_of(normed, arg(512, 128), arg(32, 64, dtype="int32"))
    rows = case.shard("table.0", "data")
    elsewhere = case.shard("ids.0", "data")._replace(unless=rows.group)
    plan = (rows, case.shard("ids.0", "model"), elsewhere)
    found = partitioned(case, plan)
    assert [(c.kind, c.axes, c.bytes) for c in found if c.bytes > 2**15] == [
        ("reduce-scatter", ("data",), 4 * 64 * 128 * 4)
    ]


def test_a_product_is_scattered_before_it_is_averaged() -> None:
    """Of what a reduction reads XLA reduces all that there is, and takes a piece of what comes out: as the whole is
    read, an all-reduce."""

    def normed(x: jax.Array, w: jax.Array) -> jax.Array:
        y = x @ w
        return y - y.mean(0)

    case = case_of(normed, arg(64, 512), arg(512, 256))
    summed = case.shard("x.1", "data")
    plan = (summed, case.shard("x.0", "model"), case.shard("w.1", "data")._replace(unless=summed.group))
    found = partitioned(case, plan)
    assert [(c.kind, c.axes, c.bytes) for c in found if "data" in c.axes] == [
        ("reduce-scatter", ("data",), 32 * 64 * 4)
    ]
