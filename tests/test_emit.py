"""Emitting: what stands in the files, that they partition as planned, and that the program is left as it was.

Compiled for 8 virtual CPU devices. XLA:CPU makes no reduce-scatters: where one is planned, it all-reduces and slices.
"""

from __future__ import annotations

import json
import random
import re
from collections import defaultdict
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.sharding import PartitionSpec
from programs import Case, arg, case_of, source_of, source_of_text
from random_programs import cases, plans

from toast_cli import xla
from toast_cli.emit import FORMATS, emit, emit_hlo, emit_shardy
from toast_cli.emit.constraints import constraint_line, constraints_of
from toast_cli.emit.hlo import GspmdNotation, check_arrival
from toast_cli.emit.marks import operation_marks, pinned_marks
from toast_cli.emit.minimal import Chooser, choose_marks
from toast_cli.emit.propagate import WHOLE as WHOLE_PIPELINE
from toast_cli.emit.propagate import Propagation, numbered
from toast_cli.emit.settle import settled
from toast_cli.emit.snippet import matcher, rules_of, snippet, trimmed
from toast_cli.emit.specs import BoundarySpecs, NamedSpec, Spec
from toast_cli.emit.stablehlo import shardy_marks
from toast_cli.emit.tiling import gspmd_string
from toast_cli.errors import ToastError, UsageError
from toast_cli.frontend import Source
from toast_cli.plan.decisions import Plan
from toast_cli.plan.partitioned import PartitionedProgram
from toast_cli.plan.sharding import Sharding
from toast_cli.verify.collectives import collectives_in
from toast_cli.verify.compile import as_stablehlo
from toast_cli.verify.errors import relative_error
from toast_cli.verify.inputs import random_inputs

DEVICES = 8
Collectives = list[tuple[str, tuple[str, ...], float, float]]

# ---------------------------------------------------------------- programs

N, D, F = 8, 16, 64  # batch, model, hidden
WEIGHTS = {"down": arg(F, D), "up": arg(D, F)}


def loss(p: Any, x: Any) -> Any:
    return jnp.sum((x + jax.nn.relu(x @ p["up"]) @ p["down"]) ** 2)


def sgd(p: Any, x: Any) -> Any:
    return jax.tree.map(lambda w, g: w - 0.1 * g, p, jax.grad(loss)(p, x))


def scanned(ws: Any, x: Any) -> Any:
    return lax.scan(lambda c, w: (jnp.tanh(c @ w), jnp.sum(c)), x, ws)


def branched(p: Any, x: Any, w: Any) -> Any:
    return lax.cond(p, lambda: jnp.tanh(x @ w), lambda: x[:, :1] * jnp.ones((N, F)))


def looked_up(table: Any, w: Any, i: Any) -> Any:
    return lax.erf_inv(jnp.tanh(table[i] @ w)), lax.top_k(table @ w, 2)[0]


@pytest.fixture(scope="module")
def trained() -> Case:
    return case_of(sgd, WEIGHTS, arg(N, D), donate=(0,))


@pytest.fixture(scope="module")
def looped() -> Case:
    return case_of(scanned, arg(5, D, D), arg(N, D))


def compiled(case: Case, plan: Plan, form: str, annotate: str = "minimal") -> Any:
    lowered = case.lowered(plan)
    if form == "hlo":
        program = as_stablehlo(emit_hlo(case.source, lowered), "hlo")
    else:
        program = emit_shardy(case.source, lowered, annotate=annotate)
    return xla.compile_program(program, xla.cpu_devices(DEVICES), shardy=form == "stablehlo")


def collectives(case: Case, executable: Any) -> Collectives:
    """(kind, axes, bytes of the result per device, count), equal ones together, sorted; as `Case.collectives`."""
    mesh = case.problem.mesh
    found: dict[tuple[str, tuple[str, ...], float], float] = defaultdict(float)
    for one in collectives_in(xla.compiled_text(executable), mesh.names, mesh.sizes):
        found[one.kind, one.axes, float(one.bytes)] += one.count
    return sorted((*key, count) for key, count in found.items())


def on_cpu(case: Case, planned: Collectives) -> Collectives:
    """What XLA:CPU makes of planned collectives: each reduce-scatter is an all-reduce of as many times the bytes."""
    sizes = dict(zip(case.problem.mesh.names, case.problem.mesh.sizes, strict=True))
    found: dict[tuple[str, tuple[str, ...], float], float] = defaultdict(float)
    for kind, axes, size, count in planned:
        if kind == "reduce-scatter":
            kind, size = "all-reduce", size * prod(sizes[a] for a in axes)
        found[kind, axes, size] += count
    return sorted((*key, count) for key, count in found.items())


def worst_error(source: Source, lowered: PartitionedProgram, form: str) -> float:
    """The largest relative error of any result, partitioned against whole."""
    inputs = random_inputs(source.module, seed=1)
    shapes = [tuple(kind.shape) for kind in xla.main_function(source.module).type.results]
    program = emit_shardy(source, lowered) if form == "stablehlo" else as_stablehlo(emit_hlo(source, lowered), "hlo")
    whole = xla.run_program(xla.write_bytecode(source.module), inputs, shapes, 1, shardy=True)
    split = xla.run_program(program, inputs, shapes, prod(lowered.axis_sizes), shardy=form == "stablehlo")
    return max(relative_error(a, b) for a, b in zip(whole, split, strict=True))


def text_of(source: Source) -> str:
    text: str = source.module.operation.get_asm(enable_debug_info=True)
    return text


# ---------------------------------------------------------------- what XLA makes of the files


def strategy(case: Case, *decisions: str) -> Plan:
    """`x.0=data` -> the plan that shards dimension 0 of argument x over data; in order."""
    return tuple(case.shard(*decision.split("=")) for decision in decisions)


UP_IN, UP_OUT = "p['up'].0", "p['up'].1"
TRAINED = {
    "data parallel": (["x.0=data"], [("all-reduce", ("data",), 4096.0, 2.0)]),
    "fsdp": (
        ["x.0=data", f"{UP_IN}=data"],
        [("all-gather", ("data",), 4096.0, 2.0), ("all-reduce", ("data",), 4096.0, 2.0)],
    ),
    "megatron": ([f"{UP_OUT}=model"], [("all-reduce", ("model",), 512.0, 1.0)]),
    "megatron, batch split between": (
        [f"{UP_OUT}=model", "x.0=model"],
        [("all-gather", ("model",), 512.0, 2.0), ("all-reduce", ("model",), 512.0, 1.0)],
    ),
    "fsdp x megatron": (
        ["x.0=data", f"{UP_OUT}=model", f"{UP_IN}=data"],
        [
            ("all-gather", ("data",), 2048.0, 2.0),
            ("all-reduce", ("data",), 2048.0, 2.0),
            ("all-reduce", ("model",), 128.0, 1.0),
        ],
    ),
}
LOOPED = {
    "carry split": (["x.0=data"], []),
    "weights gathered in the loop": (["x.0=data", "ws.1=data"], [("all-gather", ("data",), 1024.0, 5.0)]),
    "carry split twice": (["x.0=data", "x.1=model"], [("all-reduce", ("model",), 128.0, 5.0)]),
}
FORMS = [("stablehlo", "minimal"), ("stablehlo", "full"), ("hlo", "")]


@pytest.mark.parametrize(("form", "annotate"), FORMS)
@pytest.mark.parametrize("name", TRAINED)
def test_a_training_step_communicates_as_planned(trained: Case, name: str, form: str, annotate: str) -> None:
    decisions, expected = TRAINED[name]
    plan = strategy(trained, *decisions)
    executable = compiled(trained, plan, form, annotate)
    assert collectives(trained, executable) == expected
    assert on_cpu(trained, trained.collectives(plan)) == expected


@pytest.mark.parametrize(("form", "annotate"), FORMS)
@pytest.mark.parametrize("name", LOOPED)
def test_a_loop_communicates_as_planned(looped: Case, name: str, form: str, annotate: str) -> None:
    decisions, expected = LOOPED[name]
    plan = strategy(looped, *decisions)
    found = collectives(looped, compiled(looped, plan, form, annotate))
    assert [c for c in found if c[2] > 4] == expected  # the sum of a carry is one number


@pytest.mark.parametrize("form", ["stablehlo", "hlo"])
def test_numbers_stay(trained: Case, looped: Case, form: str) -> None:
    assert worst_error(trained.source, trained.lowered(strategy(trained, *TRAINED["fsdp x megatron"][0])), form) < 1e-5
    assert worst_error(looped.source, looped.lowered(strategy(looped, *LOOPED["carry split twice"][0])), form) < 1e-5


@pytest.mark.parametrize("form", ["stablehlo", "hlo"])
def test_branches_and_chlo_stay(form: str) -> None:
    branches = case_of(branched, arg(dtype=jnp.bool_), arg(N, D), arg(D, F))
    assert worst_error(branches.source, branches.lowered(strategy(branches, "x.0=data", "w.1=model")), form) < 1e-5
    lookup = case_of(looked_up, arg(32, D), arg(D, F), arg(N, dtype=jnp.int32))
    assert worst_error(lookup.source, lookup.lowered(strategy(lookup, "i.0=data", "w.1=model")), form) < 1e-5


@pytest.mark.parametrize("form", ["stablehlo", "hlo"])
def test_donated_buffers_stay_donated(trained: Case, form: str) -> None:
    lowered = trained.lowered(strategy(trained, "x.0=data", f"{UP_IN}=data"))
    if form == "stablehlo":
        assert emit_shardy(trained.source, lowered).count(b"tf.aliasing_output") == 2
        assert (
            compiled(trained, strategy(trained, "x.0=data", f"{UP_IN}=data"), form)
            .get_compiled_memory_stats()
            .alias_size_in_bytes
            == 2048
        )
    else:
        assert re.search(
            rb"input_output_alias=\{ \{0\}: \(0, \{\}, m\w+-alias\), \{1\}: \(1,", emit_hlo(trained.source, lowered)
        )


def test_hlo_text_is_for_any_xla(trained: Case) -> None:
    text = emit_hlo(trained.source, trained.lowered(strategy(trained, "x.0=data"))).decode()
    assert "xla.sdy" not in text and "num_partitions=8" in text.splitlines()[0]


# ---------------------------------------------------------------- what stands in the files

SMALL = """
module @jit_f attributes {mhlo.num_partitions = 1 : i32, mhlo.num_replicas = 1 : i32} {
  func.func public @main(%arg0: tensor<8x16xf32>, %arg1: tensor<16x32xf32>, %arg2: tensor<32x16xf32>) -> (tensor<8x16xf32>) {
    %0 = stablehlo.dot_general %arg0, %arg1, contracting_dims = [1] x [0] : (tensor<8x16xf32>, tensor<16x32xf32>) -> tensor<8x32xf32>
    %1 = stablehlo.tanh %0 : tensor<8x32xf32>
    %2 = stablehlo.dot_general %1, %arg2, contracting_dims = [1] x [0] : (tensor<8x32xf32>, tensor<32x16xf32>) -> tensor<8x16xf32>
    %3 = stablehlo.add %2, %arg0 : tensor<8x16xf32>
    return %3 : tensor<8x16xf32>
  }
}
"""  # noqa: E501
# Values: 0 to 2 the arguments, then %0 to %3. Ops: 0 to 2 the arguments, 3 to 6 the operations, 7 the result.
BATCH, WHOLE, ROWS, COLUMNS = ((0,), ()), ((), ()), ((0,), ()), ((), (1,))


def by_hand(
    axes: dict[str, int],
    shardings: list[Sharding],
    computed: dict[int, Sharding] | None = None,
    required: dict[tuple[int, int], Sharding] | None = None,
) -> PartitionedProgram:
    return PartitionedProgram(tuple(axes), tuple(axes.values()), shardings, computed or {}, required or {})


# %arg2 rests split over data and is gathered for its use; %3 is partial over model and reduce-scattered; %5 is not
# split as %4 is.
SCATTERED = """
module @jit_f attributes {mhlo.num_partitions = 8 : i32, mhlo.num_replicas = 1 : i32} {
  sdy.mesh @mesh = <["data"=4, "model"=2]>
  func.func public @main(%arg0: tensor<8x16xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"data"}, {}]>}, \
%arg1: tensor<16x32xf32> {sdy.sharding = #sdy.sharding<@mesh, [{}, {"model"}]>}, \
%arg2: tensor<32x16xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"model"}, {"data"}]>}) -> \
(tensor<8x16xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"data"}, {}]>}) {
    %0 = stablehlo.dot_general %arg0, %arg1, contracting_dims = [1] x [0] : (tensor<8x16xf32>, tensor<16x32xf32>) -> tensor<8x32xf32>
    %1 = stablehlo.tanh %0 : tensor<8x32xf32>
    %2 = sdy.sharding_constraint %arg2 <@mesh, [{?}, {}]> : tensor<32x16xf32>
    %3 = stablehlo.dot_general %1, %2, contracting_dims = [1] x [0] : (tensor<8x32xf32>, tensor<32x16xf32>) -> tensor<8x16xf32>
    %4 = sdy.sharding_constraint %3 <@mesh, [{"data"}, {}]> : tensor<8x16xf32>
    %5 = sdy.sharding_constraint %4 <@mesh, [{"data", "model"}, {}]> : tensor<8x16xf32>
    %6 = stablehlo.add %5, %arg0 : tensor<8x16xf32>
    %7 = sdy.sharding_constraint %6 <@mesh, [{"data"}, {}]> : tensor<8x16xf32>
    return %7 : tensor<8x16xf32>
  }
}
"""  # noqa: E501


def test_literal_text() -> None:
    source = source_of_text(SMALL)
    scattered = by_hand(
        {"data": 4, "model": 2},
        [BATCH, COLUMNS, ((1,), (0,)), ((0,), (1,)), ((0,), (1,)), ((0, 1), ()), BATCH],
        computed={5: BATCH},
        required={(5, 1): ((1,), ()), (6, 0): BATCH},
    )
    module = xla.parse_module(xla.make_context(), emit_shardy(source, scattered, binary=True))
    assert str(module).strip() == SCATTERED.strip()
    assert emit_hlo(source, scattered).count(b'custom_call_target="Sharding"') == 3


def test_a_reshard_is_shared_and_stands_before_its_first_use() -> None:
    source = source_of_text(SMALL)
    shared = by_hand(
        {"data": 8},
        [BATCH, WHOLE, WHOLE, BATCH, BATCH, WHOLE, WHOLE],
        required={(3, 0): WHOLE, (6, 1): WHOLE, (5, 0): WHOLE},
    )
    marks = pinned_marks(source, shared)
    assert [(r.value, r.anchor.name, r.edges) for r in marks.reshards] == [
        (0, "stablehlo.dot_general", ((3, 0), (6, 1))),
        (4, "stablehlo.dot_general", ((5, 0),)),
    ]


def test_a_use_in_a_loop_has_its_own_reshard(looped: Case) -> None:
    lowered = looped.lowered(strategy(looped, "x.0=data", "ws.1=data"))
    (reshard,) = shardy_marks(looped.source, lowered).reshards
    assert reshard.anchor.parent.name == "stablehlo.while"


@pytest.mark.parametrize("format", FORMATS)
def test_the_program_is_left_as_it_was(trained: Case, format: str) -> None:
    before = text_of(trained.source)
    emit(trained.source, trained.lowered(strategy(trained, "x.0=data", f"{UP_IN}=data")), format)
    assert text_of(trained.source) == before


def test_source_locations_stay(trained: Case) -> None:
    text = emit_shardy(trained.source, trained.lowered(())).decode()
    assert '/test_emit.py":' in text


def test_a_mesh_name_that_is_taken() -> None:
    source = source_of_text(
        SMALL.replace("module @jit_f", "module @f").replace("  func.func", '  sdy.mesh @mesh = <["x"=3]>\n  func.func')
    )
    text = emit_shardy(source, by_hand({"data": 8}, [BATCH] * 7)).decode()
    assert re.findall(r"sdy.mesh @(\w+) = <(.*)>", text)[0] in (("mesh_0", '["data"=8]'), ("mesh", '["data"=8]'))


def test_axis_names_are_quoted() -> None:
    text = emit_shardy(source_of_text(SMALL), by_hand({'a "b"': 8}, [BATCH] * 7)).decode()
    assert '["a \\22b\\22"=8]' in text
    xla.parse_module(xla.make_context(), text)


UNKNOWN = [
    (
        lambda s, p: emit(s, p, "xml"),
        "unknown format 'xml'",
        "choose from stablehlo, bytecode, hlo, spmd, specs, python",
    ),
    (lambda s, p: emit_shardy(s, p, annotate="some"), "unknown value 'some'", "choose from minimal, full, arguments"),
]


@pytest.mark.parametrize(("ask", "what", "hint"), UNKNOWN)
def test_unknown_words(ask: Any, what: str, hint: str) -> None:
    with pytest.raises(UsageError) as error:
        ask(source_of_text(SMALL), by_hand({"data": 8}, [BATCH] * 7))
    assert (error.value.what, error.value.hint) == (what, hint)


# ---------------------------------------------------------------- manual regions

MANUAL = """
module @jit_f attributes {mhlo.num_partitions = 8 : i32, mhlo.num_replicas = 1 : i32} {
  sdy.mesh @ring = <["data"=4, "model"=2]>
  func.func public @main(%arg0: tensor<16x32xf32>) -> (tensor<16x32xf32>) {
    %0 = stablehlo.tanh %arg0 : tensor<16x32xf32>
    %1 = sdy.manual_computation(%0) in_shardings=[<@ring, [{"data"}, {}]>] out_shardings=[<@ring, [{"data"}, {}]>] manual_axes={"data"} (%arg1: tensor<4x32xf32>) {
      %3 = stablehlo.add %arg1, %arg1 : tensor<4x32xf32>
      sdy.return %3 : tensor<4x32xf32>
    } : (tensor<16x32xf32>) -> tensor<16x32xf32>
    %2 = stablehlo.negate %1 : tensor<16x32xf32>
    return %2 : tensor<16x32xf32>
  }
}
"""  # noqa: E501


def test_a_manual_region_is_left_alone() -> None:
    source = source_of_text(MANUAL)
    lowered = by_hand({"data": 4, "model": 2}, [((), (1,)), ((), (1,)), BATCH, BATCH], required={(2, 0): BATCH})
    text = emit_shardy(source, lowered, annotate="full").decode()
    assert (
        text.count("sdy.mesh ") == 1
        and "sdy.sharding_constraint" not in text.split("manual_computation")[1].split("sdy.return")[0]
    )
    executable = xla.compile_program(text.encode(), xla.cpu_devices(DEVICES), shardy=True)
    kinds = [c.kind for c in collectives_in(xla.compiled_text(executable), ("data", "model"), (4, 2))]
    assert kinds == ["all-gather"]


def test_a_manual_region_needs_its_mesh() -> None:
    source = source_of_text(MANUAL)
    with pytest.raises(UsageError) as error:
        emit_shardy(source, by_hand({"model": 2, "data": 4}, [WHOLE] * 4))
    assert (
        error.value.what
        == 'a manual region was written for the mesh ["data"=4, "model"=2], not for ["model"=2, "data"=4]'
    )
    assert "--mesh-shape" in error.value.hint


def test_a_manual_region_has_no_place_in_hlo() -> None:
    with pytest.raises(UsageError) as error:
        emit_hlo(source_of_text(MANUAL), by_hand({"data": 4, "model": 2}, [WHOLE] * 4))
    assert "manual regions" in error.value.what and "--format stablehlo" in error.value.hint


# ---------------------------------------------------------------- GSPMD's notation

TILINGS = [
    (((), ()), (4, 2), "{replicated}"),
    (((0,), ()), (4, 2), "{devices=[4,1,2]<=[8] last_tile_dim_replicate}"),
    (((1,), ()), (4, 2), "{devices=[2,1,4]<=[4,2]T(1,0) last_tile_dim_replicate}"),
    (((0, 1), ()), (4, 2), "{devices=[8,1]<=[8]}"),
    (((1, 0), ()), (4, 2), "{devices=[8,1]<=[4,2]T(1,0)}"),
    (((0,), (1,)), (4, 2), "{devices=[4,2]<=[8]}"),
    (((1,), (0,)), (4, 2), "{devices=[2,4]<=[4,2]T(1,0)}"),
    (((1,), ()), (4, 2, 3), "{devices=[2,1,12]<=[4,2,3]T(1,0,2) last_tile_dim_replicate}"),
    (((2,), (0,)), (4, 1, 3), "{devices=[3,4]<=[4,3]T(1,0)}"),
    (((1,),), (4, 1), "{replicated}"),
    ((), (4, 2), "{replicated}"),
]


@pytest.mark.parametrize(("sharding", "sizes", "expected"), TILINGS)
def test_tilings(sharding: Sharding, sizes: tuple[int, ...], expected: str) -> None:
    assert gspmd_string(sharding, sizes) == expected


@st.composite
def shardings(draw: st.DrawFn) -> tuple[Sharding, tuple[int, ...]]:
    sizes = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=4)))
    order = draw(st.permutations(range(len(sizes))))
    places = [draw(st.integers(-1, 2)) for _ in sizes]  # -1: the axis splits nothing
    return tuple(tuple(axis for axis in order if places[axis] == d) for d in range(3)), sizes


@given(shardings())
def test_a_tiling_puts_every_device_where_the_sharding_does(drawn: tuple[Sharding, tuple[int, ...]]) -> None:
    sharding, sizes = drawn
    text = gspmd_string(sharding, sizes)
    mesh = np.arange(prod(sizes)).reshape(sizes)
    if text == "{replicated}":
        assert prod(sizes[a] for axes in sharding for a in axes) == 1
        return
    tiles, devices, copies = xla.hlo_sharding_devices(text)
    assert tiles[:3] == [prod(sizes[a] for a in axes) for axes in sharding]
    grid = np.array(devices).reshape([*tiles, *([] if copies else [1])])
    for place in np.ndindex(*grid.shape[:3]):
        for device in grid[place]:
            at = np.argwhere(mesh == device)[0]
            for part, axes in zip(place, sharding, strict=True):
                assert part == np.ravel_multi_index([at[a] for a in axes] or [0], [sizes[a] for a in axes] or [1])


def test_a_sharding_that_is_lost_is_an_error() -> None:
    source = source_of_text(SMALL)
    lowered = by_hand({"data": 8}, [BATCH] * 7)
    text = emit_hlo(source, lowered).decode()
    marks, notation = operation_marks(source, lowered), GspmdNotation(source, lowered.axis_sizes)
    check_arrival(text, marks, notation)
    with pytest.raises(ToastError, match="2 of 3 parameters"):
        check_arrival(text.replace("parameter(0), sharding=", "parameter(0), was="), marks, notation)


# ---------------------------------------------------------------- specs and the snippet


def test_specs() -> None:
    source = source_of(sgd, WEIGHTS, arg(N, D))
    lowered = by_hand(
        {"data": 4, "model": 2}, [((0, 1), ()), COLUMNS, BATCH] + [WHOLE] * (len(source.program.values) - 3)
    )
    facts = json.loads(emit(source, lowered, "specs"))
    assert {key: facts[key] for key in ("schema", "program", "mesh")} == {
        "schema": "toast.specs/1",
        "program": "sgd",
        "mesh": {"axes": {"data": 4, "model": 2}},
    }
    assert facts["arguments"] == [
        {"index": 0, "name": "p['down']", "spec": [["data", "model"], None]},
        {"index": 1, "name": "p['up']", "spec": [None, ["model"]]},
        {"index": 2, "name": "x", "spec": [["data"], None]},
    ]
    assert [result["index"] for result in facts["results"]] == [0, 1]


def test_the_snippet_runs(trained: Case) -> None:
    lowered = trained.lowered(strategy(trained, "x.0=data", f"{UP_OUT}=model", f"{UP_IN}=data"))
    scope: dict[str, Any] = {"DEVICES": xla.cpu_devices(DEVICES)}
    text = emit(trained.source, lowered, "python").decode()
    exec(compile(text.replace("jax.devices()", "DEVICES"), "shardings.py", "exec"), scope)
    arguments = {"p": WEIGHTS, "x": arg(N, D)}
    step = jax.jit(
        sgd, in_shardings=scope["in_shardings"](**arguments), out_shardings=scope["out_shardings"](sgd, **arguments)
    )
    with pytest.raises(TypeError, match="argument 'p' is not among"):
        scope["in_shardings"](weights=WEIGHTS, x=arg(N, D))
    executable = step.lower(*arguments.values()).compile()
    weights = {"down": PartitionSpec("model", "data"), "up": PartitionSpec("data", "model")}
    assert {k: s.spec for k, s in executable.input_shardings[0][0].items()} == weights
    assert {k: s.spec for k, s in executable.output_shardings.items()} == weights
    assert executable.input_shardings[0][1].spec == PartitionSpec("data")
    assert [scope["spec_of"](path) for path in ("p['down']", "p['up']", "x", "p['unknown']")] == [
        weights["down"], weights["up"], PartitionSpec("data"), PartitionSpec(),
    ]  # fmt: skip


def test_the_snippet_without_names() -> None:
    specs = BoundarySpecs("main", {"data": 8}, (NamedSpec("", (("data",), None)),), (NamedSpec("", (None, ("data",))),))
    scope: dict[str, Any] = {"DEVICES": xla.cpu_devices(DEVICES)}
    exec(compile(snippet(specs).replace("jax.devices()", "DEVICES"), "shardings.py", "exec"), scope)
    (sharding,) = scope["in_shardings"](arg(8, 8))
    assert sharding.spec == PartitionSpec("data")
    assert scope["out_shardings"](jnp.transpose, arg(8, 8)).spec == PartitionSpec(None, "data")


LAYER = "['layers'][{}]['w']"
DATA, MODEL_LAST, ALL = (("data",), None), (None, ("model",)), (None, None)
# name -> (path, spec) of arguments, of results, the rules
FOLDED: dict[str, tuple[list[tuple[str, Spec]], list[tuple[str, Spec]], list[tuple[str, Spec]]]] = {
    "layers, and one that is split otherwise": (
        [(f"p['layers'][{k}]['w']", ALL if k == 1 else DATA) for k in range(3)], [("result", ())],
        [("p['layers'][1]['w']", ()), ("p['layers'][*]['w']", DATA[:1])],
    ),
    "a weight and its moments, in and out": (
        [(f"{root}['dense_{k}']['kernel']", MODEL_LAST) for root in ("s.params", "s.opt[0].mu",
            "s.opt[0].nu") for k in range(2)],
        [(f"result[0]{root}['dense_{k}']['kernel']", MODEL_LAST) for root in (".params",
            ".opt[0].mu") for k in range(2)],
        [("*['dense_*']['kernel']", MODEL_LAST)],
    ),
    "moments that are split, weights that are whole": (
        [("p['a']['w']", ALL), ("m['a']['w']", DATA)], [("result[0]['a']['w']", ALL), ("result[1]['a']['w']", DATA)],
        [("m['a']['w']", DATA[:1]), ("result[1]['a']['w']", DATA[:1])],
    ),
    "what is whole needs no rule": ([("p['w']", ALL), ("x", DATA)], [("result", ())], [("x", DATA[:1])]),
    "what comes out and is not read": (
        [("s['bn']['hidden']", DATA)], [("result[1]['bn']['hidden']", DATA), ("result[1]['bn']['average']", DATA)],
        [("*['bn']['average']", DATA[:1]), ("*['bn']['hidden']", DATA[:1])],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FOLDED)
def test_the_snippet_folds_by_pattern(name: str) -> None:
    arguments, results, expected = FOLDED[name]
    named = [NamedSpec(path, spec) for path, spec in (*arguments, *results)]
    rules = rules_of(named)
    assert sorted(rules) == sorted(expected)
    for one in named:
        fits = (spec for pattern, spec in rules if matcher(pattern).fullmatch(one.name))
        assert next(fits, ()) == trimmed(one.spec), one.name


def test_patterns_say_what_every_array_says() -> None:
    """However the specs lie over the paths: the first pattern that fits is right."""
    rng = random.Random(0)
    for _ in range(50):
        roots = [f"{root}{LAYER.format(k)}" for root in ("p", "o[0].mu", "result[0]", "result[1]") for k in range(3)]
        named = [NamedSpec(path, rng.choice([DATA, MODEL_LAST, ALL])) for path in [*roots, "x", "p['w']", "result[2]"]]
        rules = rules_of(named)
        for one in named:
            fits = (spec for pattern, spec in rules if matcher(pattern).fullmatch(one.name))
            assert next(fits, ()) == trimmed(one.spec)


def test_names_with_quotes_are_escaped() -> None:
    odd = 'p[\'a"""b\\\\n\']'
    specs = BoundarySpecs("f", {'"""': 8}, (NamedSpec(odd, (('"""',),)),), (NamedSpec("result", ()),))
    scope: dict[str, Any] = {"DEVICES": xla.cpu_devices(DEVICES)}
    exec(compile(snippet(specs).replace("jax.devices()", "DEVICES"), "shardings.py", "exec"), scope)
    assert scope["spec_of"](odd) == PartitionSpec('"""')


# ---------------------------------------------------------------- constraints, few and all needed


@settings(max_examples=15)
@given(st.data())
def test_any_plan_of_any_program_is_settled(data: st.DataObject) -> None:
    case = data.draw(cases())
    before = text_of(case.source)
    lowered = settled(case.program, case.lowered(data.draw(plans(case.problem))))
    choice = choose_marks(case.source, lowered)
    assert choice.unsettled == ()
    for marks in (choice.marks, pinned_marks(case.source, lowered)):
        with numbered(case.source):
            propagation = Propagation(case.source, lowered)
            quick, whole = propagation.run(marks).values, propagation.run(marks, WHOLE_PIPELINE).values
            assert whole == {value: quick[value] for value in whole}
    assert text_of(case.source) == before


@pytest.mark.parametrize("name", TRAINED)
def test_every_constraint_is_needed(trained: Case, name: str) -> None:
    lowered = settled(trained.program, trained.lowered(strategy(trained, *TRAINED[name][0])))
    with numbered(trained.source):
        chooser = Chooser(trained.source, lowered)
        chooser.choose()
        assert chooser.settles(chooser.pinned)
        for value in chooser.optional():
            assert not chooser.settles(chooser.pinned - {value})
    assert len(chooser.pinned) + len(chooser.reshards) <= 4


def test_constraints_for_people(looped: Case) -> None:
    lowered = looped.lowered(strategy(looped, "x.0=data", "ws.1=data"))
    (facts,) = constraints_of(looped.source, lowered, shardy_marks(looped.source, lowered))
    assert (facts.place, facts.type, facts.uses) == ("use", "f32[16,16]", 1)
    assert re.match(r"test_emit.py:\d+ \(jit\(scanned\)/while/body/.*dot_general\)", facts.location)
    assert facts.line == "x = jax.lax.with_sharding_constraint(x, P(None, P.UNCONSTRAINED))"


LINES = [
    (((0,), (), (0, 1)), frozenset(), 'P("data", None, ("data", "model"))'),
    (((), ()), frozenset({1}), "P(None, P.UNCONSTRAINED)"),
    ((), frozenset(), "P()"),
]


@pytest.mark.parametrize(("sharding", "open_dims", "spec"), LINES)
def test_lines_to_paste(sharding: Sharding, open_dims: frozenset[int], spec: str) -> None:
    line = constraint_line(sharding, ("data", "model"), open_dims)
    assert line == f"x = jax.lax.with_sharding_constraint(x, {spec})"
