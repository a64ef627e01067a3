"""The tool from Python: what `toast.partition` takes, and its answer in JAX's words; `toast.jit` on virtual devices."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml
from jax import export
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

import toast_cli as toast
from toast_cli.api.plan import machine_of, slash_expression
from toast_cli.emit.specs import InterfaceArray
from toast_cli.hardware import load_spec

ROOT = Path(__file__).resolve().parents[1]
SHAPE = {"data": 4, "model": 2}
PINS = ("params['up']=data,model", "batch/x=data")


def step(params: Any, unused: jax.Array, batch: Any) -> Any:
    def loss(p: Any) -> jax.Array:
        return jnp.mean((jnp.tanh(batch["x"] @ p["up"]) @ p["down"]) ** 2)

    value, gradients = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), {"loss": value}


ARGUMENTS = (
    {"down": jax.ShapeDtypeStruct((512, 128), jnp.float32), "up": jax.ShapeDtypeStruct((128, 512), jnp.float32)},
    jax.ShapeDtypeStruct((3,), jnp.float32),
    {"x": jax.ShapeDtypeStruct((64, 128), jnp.float32)},
)
STEP = jax.jit(step, donate_argnums=0)


def plan_of(program: Any, **options: Any) -> toast.Plan:
    return toast.partition(program, "h100-8", mesh_shape=SHAPE, pins=PINS, iterations=30, **options)


@pytest.fixture(scope="module")
def plan() -> toast.Plan:
    return plan_of(STEP.lower(*ARGUMENTS))


def test_specs_have_the_trees_of_the_function(plan: toast.Plan) -> None:
    params, unused, batch = plan.in_specs()
    assert params["up"] == P("data", "model")
    assert unused == P(), "an argument that the function does not use"
    assert batch == {"x": P("data")}
    results = plan.out_specs()
    assert jax.tree.structure(results, is_leaf=lambda x: isinstance(x, P)) == jax.tree.structure(
        jax.eval_shape(step, *ARGUMENTS)
    )
    assert results[0]["up"] == P("data", "model"), "it takes the argument's buffer"
    assert results[1]["loss"] == P()


def test_shardings_are_for_a_mesh_with_the_plans_axes(plan: toast.Plan) -> None:
    mesh = AbstractMesh((4, 2), ("data", "model"), (AxisType.Auto,) * 2)
    assert plan.in_shardings(mesh)[0]["up"] == jax.sharding.NamedSharding(mesh, P("data", "model"))
    assert plan.out_shardings(mesh)[1]["loss"].spec == P()
    for sizes, names in (((8,), ("data",)), ((2, 4), ("data", "model"))):
        other = AbstractMesh(sizes, names, (AxisType.Auto,) * len(sizes))
        with pytest.raises(toast.ToastError, match=r"axis '(model|data)' of size"):
            plan.in_shardings(other)
    with pytest.raises(toast.ToastError, match="the plan is for 8 devices, and JAX sees 1"):
        plan.mesh(jax.devices()[:1])


def test_every_form_of_a_program_gives_the_same_plan(plan: toast.Plan, tmp_path: Path) -> None:
    lowered = STEP.lower(*ARGUMENTS)
    exported = export.export(STEP)(*ARGUMENTS)
    path = tmp_path / "step.mlir"
    path.write_text(lowered.as_text(debug_info=True))
    flat = list(jax.tree.leaves(plan.in_specs(), is_leaf=lambda x: isinstance(x, P)))
    for program in (exported, path, str(path), path.read_bytes()):
        other = plan_of(program)
        assert other.report.plan == plan.report.plan
        if program is exported:
            assert other.in_specs() == plan.in_specs()
        else:
            assert other.in_specs() == (flat[0], flat[1], flat[3]), "flat, and without what the program does not have"


def test_the_plan_says_what_it_is(plan: toast.Plan) -> None:
    assert plan.axes == SHAPE
    assert plan.fits
    assert "train" not in repr(plan)
    assert "ms a step" in repr(plan)
    assert plan.report.program.name == "step"
    for name, axes in plan.logical_axis_rules():
        assert isinstance(name, str)
        assert set([axes] if isinstance(axes, str) else axes) <= set(SHAPE)


def test_constraints_and_programs(plan: toast.Plan, tmp_path: Path) -> None:
    assert all("with_sharding_constraint" in one.line for one in plan.constraints)
    assert b"sdy.mesh" in plan.program()
    target = tmp_path / "sharded.hlo"
    plan.save(target)
    assert target.read_text().startswith("HloModule")
    with pytest.raises(toast.ToastError, match="format"):
        plan.save(tmp_path / "sharded.what")


def test_formats_of_frameworks(plan: toast.Plan) -> None:
    """Rules over paths give every array its spec, the first that is found; MaxText's YAML has a line for each name."""
    rules = plan.partition_rules()
    specs = {"params/down": None, "params/up": P("data", "model"), "batch/x": P("data")}
    for path, spec in specs.items():
        found = next(rule for expression, rule in rules if re.search(expression, path))
        assert spec is None or found == spec
    assert rules[-1] == (".*", P())
    logical = plan.logical_axis_rules()
    name = logical[0][0] if logical else ""
    read = yaml.safe_load(plan.maxtext_rules({name: ["first", "second"]}))["logical_axis_rules"] or []
    assert [entry[0] for entry in read][:2] == ["first", "second"][: len(read)]


def sharded(named: list[InterfaceArray]) -> toast.Plan:
    """A plan of these shardings of arguments on 4 x 2 devices."""
    arguments = [SimpleNamespace(name=one.path, sharding=[axes or () for axes in one.axes]) for one in named]
    report = SimpleNamespace(arguments=arguments, mesh=SimpleNamespace(axes=SHAPE))
    return toast.Plan(SimpleNamespace(report=report))  # type: ignore[arg-type]


def test_layouts_for_keras(plan: toast.Plan) -> None:
    assert plan.keras_layouts("params")["up"] == ("data", "model")
    with pytest.raises(toast.ToastError, match="no argument 'weights'"):
        plan.keras_layouts("weights")
    named = [
        InterfaceArray("params['a/kernel']", (None, ("data", "model"))),
        InterfaceArray("params['a/bias']", (None,)),
    ]
    with pytest.raises(toast.ToastError, match="over data and model"):
        sharded(named).keras_layouts("params")
    assert sharded(named[1:]).keras_layouts("params") == {}, "what is whole has no layout"


def test_lines_for_pytorch_xla(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lines run, against a module that takes the place of torch_xla, and say what the plan says."""
    named = [
        InterfaceArray("params['0.up.weight']", (("data", "model"), None)),
        InterfaceArray("params['0.up.bias']", (("data",),)),
        InterfaceArray("params['0.norm.weight']", (None,)),
        InterfaceArray("batch['x']", (("data",), None)),
    ]
    marked: list[tuple[Any, ...]] = []

    class Model:
        def named_parameters(self) -> list[tuple[str, str]]:
            return [("0.up.weight", "weight"), ("0.up.bias", "bias")]

        def named_buffers(self) -> list[tuple[str, str]]:
            return []

    stand_in: Any = ModuleType("torch_xla.distributed.spmd")
    stand_in.Mesh = lambda devices, shape, names: (len(devices), shape, names)
    stand_in.mark_sharding = lambda *given: marked.append(given)
    for name in ("torch_xla", "torch_xla.distributed"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "torch_xla.distributed.spmd", stand_in)
    monkeypatch.setattr(sys.modules["torch_xla.distributed"], "spmd", stand_in, raising=False)
    exec(sharded(named).mark_sharding_lines("params"), {"model": Model()})
    mesh = (8, (4, 2), ("data", "model"))
    assert marked == [("weight", mesh, (("data", "model"), None)), ("bias", mesh, ("data",))]


@pytest.mark.parametrize(
    ("pattern", "expression"),
    [
        ("params['up']", "^params/up$"),
        ("*['layers'][*]['w']", "layers/.*/w$"),
        ("*['Dense_*']['kernel'].value", "Dense_.*/kernel/value$"),
        ("x", "^x$"),
    ],
)
def test_patterns_over_slashes(pattern: str, expression: str) -> None:
    assert slash_expression(pattern) == expression


def test_reports_are_typed_and_subscriptable(plan: toast.Plan) -> None:
    assert plan.report["predicted"]["step_seconds"] == plan.report.predicted.step_seconds
    with pytest.raises(KeyError):
        plan.report["nothing"]


def test_notebooks_show_a_piece_of_a_page(plan: toast.Plan) -> None:
    page = plan._repr_html_()
    assert "peak memory" in page
    assert "<td class='wide'>batch/x</td>" in page


def test_what_holds_a_lowered_program_is_taken(plan: toast.Plan) -> None:
    """As Equinox' `filter_jit(f).lower(…)` does."""

    class Held:
        lowered = STEP.lower(*ARGUMENTS)

    assert plan_of(Held()).summary == plan.summary


@pytest.mark.parametrize(
    ("program", "mesh", "message"),
    [
        (3, "h100-8", "cannot partition a int"),
        ("nowhere.mlir", "h100-8", "no such file"),
        (b"", "h100-8", "<bytes>: the program is empty"),
        (ROOT / "sample_models/mlp_tiny.mlir", "h100-9", "no mesh specification"),
    ],
)
def test_bad_input_is_a_toast_error(program: Any, mesh: str, message: str) -> None:
    with pytest.raises(toast.ToastError, match=message):
        toast.partition(program, mesh)


@pytest.mark.parametrize(
    ("mesh", "options", "message"),
    [
        ("v4-31", {}, "no slice of that size"),
        ("h100-8", {"strategi": "fsdp"}, 'unknown option "strategi"; did you mean "strategy"'),
        ("h100-8", {"tactic": "fsdp:data"}, 'unknown option "tactic"; did you mean "tactics"'),
        ("h100-8", {"strategy": "fdsp"}, "fdsp"),
        ("h100-8", {"fit": "no"}, "--fit: unknown word"),
        ("h100-8", {"microbatches": 0}, "--microbatches: 0 is too small"),
        ("h100-8", {"memory_limit": "much"}, "--memory-limit"),
        ("h100-8", {"strategy": ["fsdp", "megatron"]}, "--strategy: takes no list"),
        ("h100-8", {"pins": 5}, "--pin: takes no int"),
        ("h100-8", {"effort": 3}, "--effort: takes no int"),
        ("h100-8", {"complete": True}, "--complete adds to a saved plan"),
        (AbstractMesh((4,), ("data",)), {}, 'toast knows no machine of 0 devices; name it: mesh="v5e-8"'),
    ],
)
def test_options_are_checked_before_there_is_a_program(mesh: Any, options: dict[str, Any], message: str) -> None:
    for call in (lambda: toast.jit(step, mesh=mesh, **options), lambda: toast.partition(b"", mesh, **options)):
        with pytest.raises(toast.ToastError, match=re.escape(message)):
            call()


@pytest.mark.parametrize(
    ("kind", "slices", "devices", "machine"),
    [
        ("TPU v4", 1, 16, "v4-32"),
        ("TPU v5 lite", 1, 16, "v5e-16"),
        ("TPU v5", 2, 64, "2xv5p-64"),
        ("TPU v3", 1, 8, "v3-8"),
        ("TPU7x", 1, 8, "tpu7x-8"),
        ("NVIDIA H100 80GB HBM3", 1, 64, "H100:64"),
        ("cpu", 1, 8, None),
        ("TPU v5 lite", 1, 2, None),  # part of a slice
    ],
)
def test_a_mesh_of_jax_names_its_machine(kind: str, slices: int, devices: int, machine: str | None) -> None:
    found = np.array([SimpleNamespace(device_kind=kind, slice_index=k % slices) for k in range(devices)])
    mesh = SimpleNamespace(devices=found.reshape(-1, 2), axis_names=("a", "b"), shape={"a": devices // 2, "b": 2})
    if machine is None:
        with pytest.raises(toast.ToastError, match=f"toast knows no machine of {devices} {kind}"):
            machine_of(mesh)
        return
    assert machine_of(mesh) == (machine, f"a={devices // 2},b=2")
    spec = load_spec(machine)
    assert spec.devices == devices


def test_a_saved_plan_and_a_strategy_are_taken(plan: toast.Plan, tmp_path: Path) -> None:
    plan.save_plan(tmp_path / "plan.json")
    lowered = STEP.lower(*ARGUMENTS)
    again = toast.partition(lowered, "h100-8", mesh_shape=SHAPE, plan=tmp_path / "plan.json", pins=PINS)
    assert again.report.plan.decisions == plan.report.plan.decisions
    fsdp = toast.partition(lowered, "h100-8", mesh_shape={"data": 8}, strategy="fsdp")
    assert fsdp.report.search.algorithm == "strategy"
    split = toast.partition(lowered, "h100-8", mesh_shape={"data": 8}, tactics="fsdp:data", iterations=50)
    assert split.report.plan.tactics == ["fsdp:data"]


def test_nothing_is_imported_before_it_is_used() -> None:
    code = "import sys, toast_cli; assert 'Plan' in dir(toast_cli); print('jax' in sys.modules, 'numpy' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert found.stdout == "False False\n"
    with pytest.raises(AttributeError, match="no attribute 'toaster'"):
        toast.toaster  # noqa: B018


JIT = """
import jax, jax.numpy as jnp, numpy as np
from functools import partial
import toast_cli as toast

def f(w, x, scale, unused, *, kind, shift):
    y = jnp.tanh(x @ w["a"]) @ w["b"] * scale + shift
    return {"y": y if kind == "plain" else -y, "w": jax.tree.map(lambda v: v * 2, w)}

key = jax.random.key(0)
w = {"a": jax.random.normal(key, (128, 512)), "b": jax.random.normal(key, (512, 128))}
x = jax.random.normal(key, (64, 128))
g = toast.jit(f, mesh="h100-8", mesh_shape="data=4,model=2", pins=["w['a']=None,model", "x=data"],
              iterations=60, donate_argnums=0, static_argnames=("kind", "scale"))
plain = jax.jit(f, static_argnames=("kind", "scale"))
for kind in ("plain", "negative", "plain"):
    mine = g(jax.tree.map(jnp.copy, w), x, 3, None, kind=kind, shift=0.5)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-4), mine, plain(w, x, 3, None, kind=kind, shift=0.5))
assert len(g._known) == 2, "one program per static value"
assert mine["w"]["a"].sharding.spec == jax.sharding.PartitionSpec(None, "model"), mine["w"]["a"].sharding
assert g.plan(w, x, 3, None, kind="plain", shift=0.5).report.mesh.axes == {"data": 4, "model": 2}
assert "all-reduce" in g.lower(w, x, 3, None, kind="plain", shift=0.5).compile().as_text()
donated = jax.tree.map(jnp.copy, w)
donated = jax.device_put(donated, g.plan(w, x, 3, None, kind="plain", shift=0.5).in_shardings()[0])
g(donated, x, 3, None, kind="plain", shift=0.5)
assert donated["a"].is_deleted(), "the buffer was given away"
outer = jax.jit(lambda w, x: g(w, x, 3, None, kind="plain", shift=0.5)["y"] + 1)
np.testing.assert_allclose(outer(w, x), plain(w, x, 3, None, kind="plain", shift=0.5)["y"] + 1, rtol=2e-5, atol=2e-4)
print("right")
"""  # noqa: E501


# A script, its searches cut short.
BRIEFLY = """
import functools, runpy, toast_cli
toast_cli.jit = functools.partial(toast_cli.jit, iterations=300)
runpy.run_path("{}", run_name="__main__")
"""


def on_8_devices(*command: str) -> str:
    """Standard output of a Python process that sees 8 CPU devices."""
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=8"
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    found = subprocess.run([sys.executable, *command], capture_output=True, text=True, cwd=ROOT, env=environment)
    assert found.returncode == 0, found.stderr
    return found.stdout


def test_jit_runs_sharded_and_gives_the_same_numbers() -> None:
    assert on_8_devices("-c", JIT) == "right\n"


@pytest.mark.thorough
def test_the_example_trains_as_on_one_device() -> None:
    lines = on_8_devices("-c", BRIEFLY.format("docs/examples/train.py")).splitlines()
    losses = [tuple(map(float, line.split()[1:])) for line in lines[2:-1]]
    assert len(losses) == 5
    assert losses[-1][1] < losses[0][1]
    assert all(abs(one - eight) < 1e-3 * one for one, eight in losses)


def test_names_that_the_user_wrote_are_taken_over() -> None:
    """As `nn.get_partition_spec` gives them, or as lines; they stand in the summary and in logical axis rules."""
    tree = {"params": {"up": P("embed", "mlp"), "down": P("mlp", "embed")}}
    for names in (tree["params"], ("params/up=embed,mlp",)):
        found = plan_of(STEP.lower(*ARGUMENTS), names=names)
        groups = {group.name for group in found.report.analysis.group_list}
        assert {"embed", "mlp"} <= groups
    with pytest.raises(toast.ToastError, match="no argument matches 'nothing'"):
        plan_of(STEP.lower(*ARGUMENTS), names=("nothing=embed",))
