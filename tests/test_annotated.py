"""What the program's own shardings come to, and what of them makes XLA communicate."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from normalised_programs import MESH

from toast_cli import xla
from toast_cli.ask_xla.annotated import (
    AsAnnotated,
    Rematerialisation,
    annotated_mesh,
    helpers,
    mend,
    priced,
    rematerialisations,
)
from toast_cli.ask_xla.compile import Answer, compile_for, virtual_devices
from toast_cli.ask_xla.confirm import seconds_on
from toast_cli.cli.app import run
from toast_cli.frontend import load
from toast_cli.hardware import Mesh, load_spec
from toast_cli.pipeline import partition
from toast_cli.report.comparison import compare, with_contender
from toast_cli.report.explain.annotated import explain_annotated
from toast_cli.report.explain.study import Study
from toast_cli.request import Request

SPEC = load_spec("v5e-8")


def at(x: Any, *spec: Any) -> Any:
    return lax.with_sharding_constraint(x, NamedSharding(MESH, PartitionSpec(*spec)))


def array(*shape: int, dtype: Any = jnp.float32) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(MESH, PartitionSpec()))


def lowered(function: Any, *arguments: Any) -> bytes:
    return jax.jit(function).trace(*arguments).lower(lowering_platforms=("cpu",)).as_text(debug_info=True).encode()


def mesh_of(shape: dict[str, int]) -> Mesh:
    return SPEC.mesh(shape, None)


def as_annotated(content: bytes, mesh: Mesh, through: Collection[str] = ()) -> Any:
    found = compile_for(content, "any", virtual_devices(mesh.devices))
    assert isinstance(found, Answer), found
    return priced(found, mesh, through)


def five_ways(x: Any, table: Any, words: Any) -> Any:
    swapped = at(jnp.cos(at(jnp.sin(x), None, "model")), "data", None)
    transposed = at(jnp.cos(at(jnp.sin(x), ("model", "data"), None)), None, "model")
    merged = at(at(jnp.sin(x), None, ("data", "model")).reshape(-1), "data")
    looked_up = at(2.0 * at(table[words], None, None, "model"), "data", None, None)
    joined = at(jnp.concatenate([at(jnp.sin(x), None, "model"), at(jnp.cos(x), None, "model")]), "data", None)
    return swapped, transposed, merged, looked_up, joined


def test_involuntary_rematerialisation_is_found() -> None:
    arguments = array(1024, 512), array(1024, 256), array(64, 32, dtype=jnp.int32)
    content = lowered(five_ways, *arguments)
    found = as_annotated(content, mesh_of({"data": 4, "model": 2}), helpers(content, "program"))
    assert isinstance(found, AsAnnotated), found
    first = five_ways.__code__.co_firstlineno
    assert {one.place for one in found.rematerialised} == {f"test_annotated.py:{first + k}" for k in range(1, 6)}


def products(x: Any, *weights: Any) -> Any:
    for weight in weights:
        x = jnp.tanh(at(x, ("data", "model"), None) @ at(at(weight, ("data", "model"), None), None, None))
    return x


@pytest.mark.parametrize(("machine", "overlaps"), [("h100:8", True), ("v4-16", False)])
def test_gathers_run_beside_products_where_the_compiler_has_it_so(machine: str, overlaps: bool) -> None:
    """Four weights of 8 MiB; all but the first gather run beside products and take 24 of 132 multiprocessors."""
    content = lowered(products, array(65536, 2048, dtype=jnp.bfloat16), *[array(2048, 2048, dtype=jnp.bfloat16)] * 4)
    found = as_annotated(content, load_spec(machine).mesh({"data": 4, "model": 2}, None))
    assert isinstance(found, AsAnnotated), found
    one = found.cost.communication_seconds / 4
    exposed = found.cost.step_seconds - found.cost.compute_seconds
    assert exposed == pytest.approx(one + 3 * one * 24 / 132 if overlaps else 4 * one, rel=0.1)


def one(start: Any, end: Any, *shape: int) -> Rematerialisation:
    return Rematerialisation("f32", shape, 0, start, end, 1.0, "", "")


def test_a_constraint_in_between_mends_it() -> None:
    """Swapped dimensions: 2 MiB gathered over 2 devices, or half of it exchanged and a quarter gathered."""
    mesh = mesh_of({"data": 4, "model": 2})
    found = mend(one(((), ("model",)), (("data",), ()), 1024, 512), mesh)
    assert found is not None
    assert found.through == (((0,), (1,)),)
    assert found.seconds < found.direct_seconds / 2


def test_warnings_are_read() -> None:
    """The array is whole again: the operation is printed on local shapes."""
    log = (
        "W1127 11:33:55.866834    4049 spmd_partitioner.cc:656] [SPMD] Involuntary full rematerialization. The "
        "compiler cannot go from sharding {devices=[2,1,4]<=[4,2]T(1,0) last_tile_dim_replicate} to "
        "{devices=[1,4,2]<=[8] last_tile_dim_replicate} efficiently for HLO operation %sharding_constraint.2 = "
        "bf16[36,1024]{1,0} "
        'copy(%sin.1), sharding={devices=[2,1,4]<=[4,2]T(1,0) last_tile_dim_replicate}, metadata={op_name="jit(f)/mul" '
        'source_file="a/model.py" source_line=7}. As the last resort, SPMD will replicate the tensor\n'
    )
    found = rematerialisations(Answer("ENTRY %main () -> f32[] {\n}", log=2 * log), ("data", "model"), (4, 2))
    assert found == [
        Rematerialisation(
            "bf16", (72, 1024), 147456, (("model",), ()), ((), ("data",)), 2.0, "jit(f)/mul", "model.py:7"
        )
    ]


def layer(x: Any, w: Any) -> Any:
    h = at(x @ w, "data", None)
    return at(jnp.tanh(h), "data", None)


def test_helpers() -> None:
    """A helper around `with_sharding_constraint` is called by its caller's line."""
    content = lowered(layer, array(1024, 512), array(512, 512))
    assert helpers(content, "program") == {f"test_annotated.py:{at.__code__.co_firstlineno + 1}"}


@pytest.mark.parametrize(
    ("shape", "found"),
    [
        ({"data": 4, "model": 2}, "data=4 x model=2"),
        ({"x": 2, "y": 4}, "data=4 x model=2"),
        ({"data": 4}, None),
    ],
    ids=["the mesh asked for", "the program's own", "another number of devices"],
)
def test_the_mesh_of_the_shardings(shape: dict[str, int], found: str | None, tmp_path: Path) -> None:
    path = tmp_path / "program.mlir"
    path.write_bytes(lowered(layer, array(1024, 512), array(512, 512)))
    spec = SPEC if found else load_spec("v5e-4")
    own = annotated_mesh(load(str(path)), spec, spec.mesh(shape, None))
    assert (own and str(own)) == found


def by_hand(x: Any, w: Any) -> Any:
    def body(x: Any, w: Any) -> Any:
        return lax.psum(x @ lax.all_gather(w, "data", axis=0, tiled=True), "model")

    specs = PartitionSpec("data", "model"), PartitionSpec(("model", "data"), None)
    return jax.shard_map(body, mesh=MESH, in_specs=specs, out_specs=PartitionSpec("data", None))(x, w)


def test_manual_regions() -> None:
    """256 KiB of partial sums over two devices, and half of the weights, 256 KiB, gathered over four."""
    found = as_annotated(lowered(by_hand, array(1024, 512), array(512, 256)), mesh_of({"data": 4, "model": 2}))
    assert isinstance(found, AsAnnotated), found
    sent = {(one.kind, one.axes, one.bytes) for one, _ in found.collectives}
    assert sent == {("all-reduce", ("model",), 262144), ("all-gather", ("data",), 262144)}


def test_hlo_text(tmp_path: Path) -> None:
    """HLO of JAX names the mesh too, and Shardy propagates its shardings as those of StableHLO."""
    path = tmp_path / "program.hlo"
    content = lowered(layer, array(1024, 512), array(512, 512))
    path.write_text(xla.stablehlo_to_hlo_text(xla.write_bytecode(xla.parse_module(xla.make_context(), content))))
    own = load(str(path)).own_mesh
    assert own == (("data", 4), ("model", 2))
    mesh = mesh_of(dict(own))
    found, same = (as_annotated(one, mesh) for one in (path.read_bytes(), content))
    assert isinstance(found, AsAnnotated)
    assert isinstance(same, AsAnnotated)
    assert found.cost == same.cost


def test_no_shardings_no_mesh(tmp_path: Path) -> None:
    path = tmp_path / "program.mlir"
    path.write_text("func.func @main(%a: tensor<8xf32>) -> tensor<8xf32> {\n  return %a : tensor<8xf32>\n}\n")
    assert load(str(path)).own_mesh == ()
    assert annotated_mesh(load(str(path)), SPEC, mesh_of({"data": 8})) is None


def test_a_row_beside_the_plan(tmp_path: Path) -> None:
    """A product split over what it sums: 4 MiB of partial sums are added up over 8 devices."""
    path = tmp_path / "program.mlir"

    def product(x: Any, w: Any) -> Any:
        return at(at(x, None, ("data", "model")) @ at(w, ("data", "model"), None), None, None)

    path.write_bytes(lowered(product, array(1024, 1024), array(1024, 1024)))
    request = Request(str(path), "v5e-8", mesh_shape="data=4,model=2", iterations=1)
    outcome = partition(request)
    own = outcome.annotated
    assert isinstance(own, AsAnnotated)
    assert [(c.kind, set(c.axes), c.bytes) for c, _ in own.collectives] == [
        ("all-reduce", {"data", "model"}, 4 * 1024**2)
    ]
    mesh = outcome.problem.mesh
    row = outcome.report.baselines["as annotated"]
    seconds = seconds_on(mesh, "all-reduce", 4 * 1024**2, ("data", "model"), combined=True)
    assert row.communication_seconds == pytest.approx(seconds)
    assert next(iter(outcome.report.baselines)) == "as annotated"
    table = with_contender(
        compare(outcome.evaluator, outcome.report, [outcome.result.plan]), own, None, outcome.evaluator
    )
    (annotated,) = [one for one in table.contenders if one.name == "as annotated"]
    assert annotated.step_seconds == row.step_seconds
    study = Study(outcome.source, outcome.evaluator, outcome.result.plan)
    found = explain_annotated(study, own, path.read_bytes(), str(path))
    assert found.items[0].text == "all-reduce over data+model"
    assert found.changes[0].what == "with toast's plan"


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"func.func @main(%a: tensor<8xf32>) -> tensor<8xf32> {\n  return %a : tensor<8xf32>\n}\n", "it has none"),
        (None, "they are for data=4,model=2, the mesh is data=4"),
    ],
    ids=["no shardings", "another number of devices"],
)
def test_nothing_to_explain(
    content: bytes | None, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "program.mlir"
    path.write_bytes(content or lowered(layer, array(1024, 512), array(512, 512)))
    options = ["--mesh", "v5e-4", "--mesh-shape", "data=4", "--iterations", "1", "--as-annotated"]
    assert run(["explain", str(path), *options]) == 2
    assert why in " ".join(capsys.readouterr().err.split())
