"""The program of one device: its numbers are those of the whole program, and its collectives are those of the plan."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax import lax
from programs import Case, arg, case_of, evaluator_of, sample
from random_programs import cases
from random_programs import plans as plans_of
from spmd_cases import differing, wrong_in, wrong_results
from sweeps import sweep

from benchmarks.spmd import differences, random_plans, random_rows
from toast_cli.ask_xla.child import Failure
from toast_cli.ask_xla.compile import compile_for, virtual_devices
from toast_cli.emit.hlo import emit_spmd_hlo
from toast_cli.emit.spmd.writer import emit_spmd
from toast_cli.errors import UsageError
from toast_cli.plan.lower import lower
from toast_cli.tactics import strategies

KINDS = ("all_gather", "all_reduce", "reduce_scatter", "all_to_all", "collective_permute")


def written(case: Case, *plan: Any) -> Counter[str]:
    """How many collectives of each kind stand in the program."""
    text = emit_spmd(case.source, case.lowered(plan)).decode()
    return Counter(kind for kind in KINDS for _ in re.finditer(rf'stablehlo\.{kind}"?\(', text))


# ---------------------------------------------------------------- programs and what their collectives are

X, W = arg(16, 8), arg(8, 32)
Plan = list[tuple[str, str]]


def loop(x: jax.Array, w: jax.Array) -> jax.Array:
    return lax.fori_loop(0, 3, lambda i, y: jnp.tanh(y @ w) + i, x)


def constants(x: jax.Array) -> jax.Array:
    """Everything that is made from nothing: counting, tables, equal elements."""
    counted = lax.broadcasted_iota(jnp.int32, (16, 8), 0) + lax.broadcasted_iota(jnp.int32, (16, 8), 1)
    table = jnp.arange(128.0).reshape(16, 8) ** 2
    return jnp.where(counted % 3 == 0, x, 2.0) * table


def branches(x: jax.Array, w: jax.Array) -> jax.Array:
    return lax.cond(x[0, 0] > 0, lambda: x @ w, lambda: jnp.sin(x) @ (2 * w))


def while_data_says(x: jax.Array) -> jax.Array:
    """How often the loop runs is not known beforehand, and its condition adds up over all devices."""
    return lax.while_loop(lambda y: jnp.sum(y * y) > 1.0, lambda y: y / 2, x)


def rows_set(x: jax.Array, rows: jax.Array, at: jax.Array) -> jax.Array:
    """Rows as wide as the array; every second one does not begin at 0, so that it is dropped."""
    numbers = lax.ScatterDimensionNumbers((1, 2), (), (0, 1))
    return lax.scatter(x, jnp.stack([at, at % 2], 1), rows[:, None], numbers, mode="drop")


def rows_of_sequences(x: jax.Array, rows: jax.Array, at: jax.Array) -> jax.Array:
    return jax.vmap(lambda of, row, i: lax.dynamic_update_slice(of, row[None], (i, 0)))(x, rows, at)


PROGRAMS: dict[str, tuple[Callable[..., Any], tuple[Any, ...], Plan, dict[str, int]]] = {
    "batch": (lambda x, w: jnp.tanh(x @ w), (X, W), [("x.0", "data")], {}),
    "weights gathered": (lambda x, w: x @ w, (X, W), [("x.0", "data"), ("w.1", "data")], {"all_gather": 1}),
    "partial product": (lambda x, w: jnp.sin(x @ w), (X, W), [("x.1", "model")], {"all_reduce": 1}),
    "scattered": (lambda x, w: x.T @ (x @ w), (X, W), [("x.0", "data"), ("x.1", "data")],
                  {"all_gather": 1, "reduce_scatter": 1}),
    "one reduction of two terms": (lambda x, w: x @ w + (2 * x) @ w, (X, W), [("x.1", "model")], {"all_reduce": 1}),
    "behind a transpose": (lambda x, w: (x @ w).T + ((2 * x) @ w).T, (X, W), [("x.1", "model")], {"all_reduce": 1}),
    "maximum": (lambda x: jnp.exp(x - x.max(1, keepdims=True)), (X,), [("x.1", "model")], {"all_reduce": 1}),
    "product": (lambda x: jnp.prod(x, 0), (X,), [("x.0", "data")], {"all_reduce": 1}),
    "all and any": (lambda x: (jnp.all(x > 0, 0), jnp.any(x > 0, 0)), (X,), [("x.0", "data")], {"all_reduce": 2}),
    "sum that starts at 3": (lambda x: lax.reduce(x, jnp.float32(3), lax.add, (0,)), (X,), [("x.0", "data")],
                             {"all_reduce": 1}),
    "argmax": (lambda x: jnp.argmax(x, 0), (X,), [("x.0", "data")], {"all_gather": 2}),
    "constants": (constants, (X,), [("x.0", "data"), ("x.1", "model")], {}),
    "transpose": (lambda x: x.T, (X,), [("x.0", "data"), ("x.1", "model")], {}),
    "split in two": (lambda x: jnp.sin(x).reshape(4, 4, 8), (X,), [("x.0", "data")], {}),
    "heads put together": (lambda x: jnp.sin(x).reshape(4, 32), (arg(4, 4, 8),), [("x.1", "data")], {}),
    "loop": (loop, (X, arg(8, 8)), [("x.0", "data")], {}),
    "loop with a reduction": (loop, (X, arg(8, 8)), [("x.0", "data"), ("w.0", "model")], {"reduce_scatter": 1}),
    "branches": (branches, (X, W), [("x.0", "data"), ("w.1", "model")], {}),
    "while data says": (while_data_says, (X,), [("x.0", "data")], {"all_reduce": 1}),
    "top of rows": (lambda x: lax.top_k(x, 3), (X,), [("x.0", "data")], {}),
    "sorted columns": (lambda x: lax.sort(x, dimension=0), (X,), [("x.1", "model")], {}),
    "rows set": (rows_set, (X, arg(4, 8), arg(4, dtype="int32")), [("x.1", "model"), ("x.0", "data")],
                 {"all_gather": 1}),
    "rows of sequences": (rows_of_sequences, (arg(4, 16, 8), arg(4, 8), arg(4, dtype="int32")),
                          [("x.1", "data"), ("x.2", "model")], {"all_gather": 1}),
    "Fourier": (lambda x: jnp.fft.irfft(2 * jnp.fft.rfft(x)), (X,), [("x.0", "data"), ("x.1", "model")],
                {"all_gather": 1}),
}  # fmt: skip


@pytest.mark.parametrize("name", PROGRAMS)
def test_numbers_and_collectives(name: str) -> None:
    function, arguments, decisions, expected = PROGRAMS[name]
    case = case_of(function, *arguments)
    plan = tuple(case.shard(*decision) for decision in decisions)
    assert case.lowered(plan).axis_sizes == (4, 2)
    assert wrong_results(case.source, case.lowered(plan), 8) == []
    if name != "branches":  # what decides between them is one element, which some device has
        assert written(case, *plan) == expected


def test_complex_sums_are_scattered_in_parts() -> None:
    """XLA:TPU refuses reduce-scatters of complex numbers: "Supported lowering only of Sum reduce-scatter"."""
    case = case_of(lambda x, y: jnp.abs(lax.complex(x, y).sum(0) * 2), arg(16, 8, 4), arg(16, 8, 4))
    plan = case.shard("x.0", "data"), case.shard("x.1", "data"), case.shard("x.2", "model")
    lowered = case.lowered(plan)
    text = emit_spmd(case.source, lowered).decode()
    assert len(re.findall(r"stablehlo.reduce_scatter", text)) == 1
    assert re.search(r"\(tensor<2x8x2xf32>\) -> tensor<2x2x2xf32>", text)
    assert wrong_results(case.source, lowered, 8) == []
    assert differences(case.source, lowered) == {}


def test_a_total_is_summed_up_before_it_becomes_an_array() -> None:
    """A scalar that becomes an array is made anew for each who reads it, and must be whole by then."""
    case = case_of(lambda x: x[:1, 0] * jnp.broadcast_to(x.sum(), (1,)), X)
    plan = case.shard("x.0", "data"), case.shard("x.1", "model")
    assert wrong_results(case.source, case.lowered(plan), 8) == []
    assert written(case, *plan)["all_reduce"] >= 1


@pytest.mark.parametrize(
    ("name", "strategy"),
    sweep(
        product(["mlp_tiny", "scan_tiny"], ["fsdp", "megatron", "fsdp x megatron"]),
        ("mlp_tiny", "fsdp x megatron"),
        ("scan_tiny", "megatron"),
    ),
)
def test_numbers_of_training_steps(name: str, strategy: str) -> None:
    source, _ = sample(name)
    problem = evaluator_of(source, "h100-8", {"data": 4, "model": 2}).problem
    assert wrong_results(source, lower(problem, strategies(problem)[strategy]), 8) == []


MESHES = {8: ("h100-8", {"data": 4, "model": 2}), 16: ("a100-16", {"data": 4, "model": 4})}


@pytest.mark.parametrize(
    ("name", "devices"),
    sweep(
        product(["gns_tiny", "moe_tiny", "rnn_tiny", "t2b_tiny", "resnet50_tiny"], MESHES),
        ("gns_tiny", 8),
        ("rnn_tiny", 16),
    ),
)
def test_collectives_are_the_promised_ones(name: str, devices: int) -> None:
    """One for one, by kind, axes and bytes, under every known strategy and under plans drawn at random."""
    source, _ = sample(name)
    problem = evaluator_of(source, *MESHES[devices]).problem
    for label, plan in {**strategies(problem), **random_plans(problem, 2)}.items():
        assert differences(source, lower(problem, plan)) == {}, label


@pytest.mark.parametrize("axis", ["data", "model"])
def test_slices_of_one_array_are_put_together_whole(axis: str) -> None:
    """Shardy calls that a permutation, however they lie in the array."""
    case = case_of(lambda x: jnp.concatenate([x[:, :8], x[:, :8]], 1), arg(8, 16))
    lowered = case.lowered((case.shard(f"{case.program.arguments[0].path}.1", axis),))
    assert [one.kind for one in lowered.collectives].count("all-gather") == 2
    assert differences(case.source, lowered) == {}
    assert wrong_results(case.source, lowered, 8) == []


@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_collectives_of_random_programs(data: st.DataObject) -> None:
    case = data.draw(cases())
    plan = data.draw(plans_of(case.problem))
    assert differences(case.source, case.lowered(plan)) == {}


@pytest.mark.parametrize("name", sweep(["mlp_tiny", "scan_tiny"], "mlp_tiny"))
def test_numbers_as_hlo_text(name: str) -> None:
    """XLA takes it with Shardy switched off."""
    source, _ = sample(name)
    problem = evaluator_of(source, "h100-8", {"data": 4, "model": 2}).problem
    text = emit_spmd_hlo(source, lower(problem, strategies(problem)["fsdp x megatron"]))
    assert wrong_in(source, text, 8, "hlo") == []
    assert b"num_partitions=8" in text and b"sdy" not in text


@settings(max_examples=20, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_numbers_of_random_programs(data: st.DataObject) -> None:
    case = data.draw(cases())
    plans = [data.draw(plans_of(case.problem)) for _ in range(2)]
    programs = {plan: emit_spmd(case.source, case.lowered(plan)) for plan in plans}
    assert differing(case.source, programs, 8) == {}


def test_the_partitioner_adds_nothing() -> None:
    """What is compiled has the collectives that are written, one for one."""
    source, _ = sample("mlp_tiny")
    problem = evaluator_of(source, "h100-8", {"data": 4, "model": 2}).problem
    content = emit_spmd(source, lower(problem, strategies(problem)["fsdp x megatron"]))
    compiled = compile_for(content, "stablehlo", virtual_devices(8))
    assert not isinstance(compiled, Failure), compiled
    for kind in KINDS:
        there = re.findall(rf"= \S+ {kind.replace('_', '-')}\(", compiled.hlo_text)
        assert len(there) == len(re.findall(rf'stablehlo\.{kind}"?\(', content.decode())), kind


def test_the_source_stays_as_it_was() -> None:
    case = case_of(loop, X, arg(8, 8))
    before = str(case.source.module)
    emit_spmd(case.source, case.lowered((case.shard("x.0", "data"),)))
    assert str(case.source.module) == before


def test_donated_arguments_stay_donated() -> None:
    case = case_of(lambda x: x + 1, X, donate=(0,))
    text = emit_spmd(case.source, case.lowered((case.shard("x.0", "data"),))).decode()
    assert re.search(r'%arg0: tensor<16x8xf32> \{[^)]*sdy.sharding = [^)]*"data"[^)]*tf.aliasing_output = 0', text)


def test_regions_of_the_program_are_refused() -> None:
    def on_host(x: jax.Array) -> jax.Array:
        return jax.pure_callback(lambda v: np.asarray(v) * 2, jax.ShapeDtypeStruct((16, 8), np.float32), x) + 1

    case = case_of(on_host, X)
    for write in (emit_spmd, emit_spmd_hlo):
        with pytest.raises(UsageError, match=r"host callback, .*\) cannot be written"):
            write(case.source, case.lowered(()))


def test_rows_of_random_programs_are_measured_once() -> None:
    """Each program has a name of its own, under which it is drawn again; rows that are known are left out."""
    rows = list(random_rows(2, numbers=True))
    assert [(row["program"], row["numbers"], row["differing"]) for row in rows] == [
        ("random 0", "equal", 0),
        ("random 1", "equal", 0),
    ]
    assert list(random_rows(2, numbers=True, known=frozenset((row["program"], "", "random") for row in rows))) == []
