"""Emitting: what stands in the files, that they partition as planned, and that the program is left as it was."""

from __future__ import annotations

import re
from typing import Any

import emitted
import jax.numpy as jnp
import pytest
from emitted import (
    BATCH,
    COLUMNS,
    DEVICES,
    LOOPED,
    SMALL,
    TRAINED,
    UP_IN,
    WHOLE,
    D,
    F,
    N,
    branched,
    by_hand,
    collectives,
    compiled,
    emit,
    emit_shardy,
    looked_up,
    on_cpu,
    shardy_annotations,
    strategy,
    text_of,
    worst_error,
)
from programs import Case, arg, case_of, source_of_text

from toast_cli import xla
from toast_cli.ask_xla.collectives import collectives_in
from toast_cli.ask_xla.compile import as_stablehlo
from toast_cli.base.errors import UsageError
from toast_cli.emit import FORMATS, emit_hlo
from toast_cli.emit.annotations import full_annotations


@pytest.fixture(scope="module")
def trained() -> Case:
    return emitted.trained()


@pytest.fixture(scope="module")
def looped() -> Case:
    return emitted.looped()


FORMS = [("stablehlo", "minimal"), ("stablehlo", "full"), ("hlo", "")]

# ---------------------------------------------------------------- what XLA makes of the files


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


def test_what_xla_folds_into_a_transpose_has_no_sharding_of_its_own(trained: Case) -> None:
    """A gradient is a contraction and a transpose, which XLA:TPU makes one contraction of; a constraint follows."""
    lines = emit_hlo(trained.source, trained.lowered(strategy(trained, *TRAINED["fsdp"][0]))).decode().splitlines()
    transposes = {found[1]: line for line in lines if (found := re.search(r" transpose\((\S+?)\)", line))}
    folded = [line for line in lines if " dot(" in line and line.split()[0] in transposes]
    turned = [transposes[line.split()[0]] for line in folded]
    assert folded and not any("sharding=" in line for line in folded + turned)
    constrained = {found[1] for line in lines if (found := re.search(r'custom-call\((\S+?)\).*"Sharding"', line))}
    assert constrained.issuperset(line.split()[0] for line in turned)


# ---------------------------------------------------------------- what stands in the files

# %arg2 rests split over data and is gathered for its use; %3 is partial over model and reduce-scattered; %5 is
# gathered for a sum with what lies as the sum does.
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
    assert emit_hlo(source, scattered).count(b'custom_call_target="Sharding"') == 7


def test_a_reshard_is_shared_and_stands_before_its_first_use() -> None:
    source = source_of_text(SMALL)
    shared = by_hand(
        {"data": 8},
        [BATCH, WHOLE, WHOLE, BATCH, BATCH, WHOLE, WHOLE],
        required={(3, 0): WHOLE, (6, 1): WHOLE, (5, 0): WHOLE},
    )
    annotations = full_annotations(source, shared)
    assert [(r.value, r.anchor.name, r.edges) for r in annotations.reshards] == [
        (0, "stablehlo.dot_general", ((3, 0), (6, 1))),
        (4, "stablehlo.dot_general", ((5, 0),)),
    ]


def test_a_use_in_a_loop_has_its_own_reshard(looped: Case) -> None:
    lowered = looped.lowered(strategy(looped, "x.0=data", "ws.1=data"))
    (reshard,) = shardy_annotations(looped.source, lowered).reshards
    assert reshard.anchor.parent.name == "stablehlo.while"


@pytest.mark.parametrize("format", FORMATS)
def test_the_program_is_left_as_it_was(trained: Case, format: str) -> None:
    before = text_of(trained.source)
    emit(trained.source, trained.lowered(strategy(trained, "x.0=data", f"{UP_IN}=data")), format)
    assert text_of(trained.source) == before


def test_source_locations_stay(trained: Case) -> None:
    text = emit_shardy(trained.source, trained.lowered(())).decode()
    assert '/emitted.py":' in text


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
        "choose from stablehlo, bytecode, hlo, specs, python",
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


def test_a_manual_region_in_hlo() -> None:
    lowered = by_hand({"data": 4, "model": 2}, [((), (1,)), ((), (1,)), BATCH, BATCH], required={(2, 0): BATCH})
    text = emit_hlo(source_of_text(MANUAL), lowered)
    assert text.count(b"SPMDFullToShardShape") == 1 and b"xla.sdy" not in text
    executable = xla.compile_program(as_stablehlo(text, "hlo"), xla.cpu_devices(DEVICES), shardy=False)
    assert "all-gather" in {c.kind for c in collectives_in(xla.compiled_text(executable), ("data", "model"), (4, 2))}
