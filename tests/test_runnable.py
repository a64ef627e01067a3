"""Something to run: written programs in every form, called on 8 virtual devices, do what the function does on one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import toast_cli as toast
from toast_cli.program.model import dtype_of
from toast_cli.program.names import subtrees, tree_of

ROOT = Path(__file__).resolve().parents[1]

# A train step in one argument, in a class of the user's own, with state that nothing reads; two steps through every way
# to run it.
WALK = '''
import sys
from pathlib import Path
from typing import NamedTuple

import jax, jax.numpy as jnp, numpy as np
import toast_cli as toast
from jax.sharding import AxisType

folder = Path(sys.argv[1])


class TrainState(NamedTuple):
    params: dict
    averages: dict
    step: jax.Array


def train_step(state, unused, batch):
    def loss(p):
        h = jnp.tanh(batch["x"] @ p["up"])
        h = jnp.concatenate([h, h], axis=1)[:, :512]  # on explicit axes JAX refuses to do this with split features
        return jnp.mean((h @ p["down"] - batch["y"]) ** 2), h.mean(0)

    (value, mean), gradients = jax.value_and_grad(loss, has_aux=True)(state.params)
    params = jax.tree.map(lambda p, g: p - 0.05 * g, state.params, gradients)
    hidden = 0.9 * state.averages["hidden"] + 0.1 * mean
    return TrainState(params, {"hidden": hidden, "debiased": hidden * 2.0}, state.step + 1), value


rng = np.random.default_rng(0)
up, down = (jnp.asarray(rng.normal(size=shape) * 0.1, jnp.float32) for shape in ((128, 512), (512, 128)))
state = TrainState({"up": up, "down": down}, {"hidden": jnp.zeros(512), "debiased": jnp.zeros(512)}, jnp.int32(0))
batch = {"x": jnp.asarray(rng.normal(size=(64, 128)), jnp.float32), "y": jnp.ones((64, 128))}
unused = jnp.zeros(3)


def losses(step):
    """Of two steps, the state handed from one to the next."""
    now, found = jax.tree.map(jnp.copy, state), []
    for _ in range(2):
        now, value = step(now, unused, batch)
        found.append(float(value))
    assert isinstance(now, TrainState) and int(now.step) == 2, now
    return found, now


expected, end = losses(jax.jit(train_step))
options = {"mesh_shape": "data=4,model=2", "pins": ["state.params['up']=data,model"], "iterations": 10}
plan = toast.partition(jax.jit(train_step, donate_argnums=0).lower(state, unused, batch), "h100-8", **options)
auto = jax.make_mesh((4, 2), ("data", "model"), (AxisType.Auto,) * 2)
explicit = jax.make_mesh((4, 2), ("data", "model"), (AxisType.Explicit,) * 2)
(folder / "shardings.py").write_bytes(plan.program("python"))
scope = {}
exec((folder / "shardings.py").read_text(), scope)
named = {"state": state, "unused": unused, "batch": batch}
ways = {}
for name, ins, outs in (
    ("shardings.py", scope["in_shardings"](**named), scope["out_shardings"](train_step, **named)),
    ("plan, explicit mesh", plan.in_shardings(explicit), plan.out_shardings(explicit)),
):
    def placed(*arguments, jitted=jax.jit(train_step, donate_argnums=0, in_shardings=ins, out_shardings=outs), ins=ins):
        # Only what comes from outside is moved: the state of the step before lies as the next step wants it.
        return jitted(*(a if k == 0 and int(a.step) else jax.device_put(a, i) for k, (a, i) in enumerate(zip(arguments, ins))))
    ways[name] = placed
ways["toast.jit"] = toast.jit(train_step, mesh="h100-8", donate_argnums=0, **options)
for ending in ("mlir", "jax_export"):
    plan.save(folder / f"sharded.{ending}")
    ways[f"toast.load {ending}"] = toast.load(folder / f"sharded.{ending}")
other = jax.make_mesh((4, 2), ("fsdp", "tensor"), (AxisType.Explicit,) * 2)
renamed = toast.load(folder / "sharded.mlir", mesh=other, axes={"data": "fsdp", "model": "tensor"})
assert renamed.axes == {"fsdp": 4, "tensor": 2}
ways["toast.load, axes"] = renamed
for name, step in ways.items():
    found, last = losses(step)
    np.testing.assert_allclose(found, expected, rtol=1e-4, err_msg=name)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5, err_msg=name), end, last)
    assert len(last.params["up"].sharding.device_set) == 8, name
    assert last.params["up"].addressable_shards[0].data.shape == (32, 256), name

with jax.set_mesh(explicit):
    for step in (toast.load(folder / "sharded.mlir"), toast.jit(train_step, mesh="h100-8", donate_argnums=0, **options)):
        np.testing.assert_allclose(losses(step)[0], expected, rtol=1e-4)

# HLO text knows no names: leaves in order go in, and come out.
plan.save(folder / "sharded.hlo")
hlo = toast.load(folder / "sharded.hlo")
order = [place.path for place in ways["toast.load mlir"].arguments]
by_path = {"state.params['down']": down, "state.params['up']": up, "state.averages['hidden']": state.averages["hidden"],
           "state.step": state.step, "batch['x']": batch["x"], "batch['y']": batch["y"]}
out = hlo(*(jnp.copy(by_path[path]) for path in order))
np.testing.assert_allclose(float(out[-1]), expected[0], rtol=1e-4)

# The file by JAX alone. The class of the user's own is flat in it.
exported = jax.export.deserialize((folder / "sharded.jax_export").read_bytes())
assert exported.nr_devices == 8
shardings = exported.in_shardings_jax(auto)
flat = exported.call(*(jax.device_put(by_path[path], s) for path, s in zip(order, shardings, strict=True)))
np.testing.assert_allclose(float(flat[-1]), expected[0], rtol=1e-4)

# Donation is kept: what was given is used up.
given = jax.device_put(jax.tree.map(jnp.copy, state), scope["in_shardings"](**named)[0])
ways["toast.load mlir"](given, unused, batch)
assert given.params["up"].is_deleted()
assert renamed(state, unused, batch)[0].params["up"].sharding.spec == jax.sharding.PartitionSpec("fsdp", "tensor")
for arguments in ((state,), (state, unused, {"x": batch["x"][:48], "y": batch["y"]})):
    try:
        ways["toast.load mlir"](*arguments)
    except toast.ToastError as error:
        print(error)
'''  # noqa: E501


def test_every_way_to_run_a_program_trains_alike(tmp_path: Path) -> None:
    devices = os.environ["XLA_FLAGS"] + " --xla_force_host_platform_device_count=8"
    flags = {"XLA_FLAGS": devices, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", WALK, str(tmp_path)]
    child = subprocess.run(command, env={**os.environ, **flags}, capture_output=True, text=True, check=False)
    assert child.returncode == 0, child.stderr[-3000:]
    assert "batch['x'] is missing" in child.stdout
    assert "batch['x'] is [48, 128], and the program takes [64, 128]" in child.stdout


class Pair(NamedTuple):
    first: Any
    second: Any


# paths, known trees -> the tree of the leaves 0, 1, …
TREES: list[tuple[list[str], Any, Any]] = [
    ([""], (), 0),
    (["[0]", "[1]"], (), (0, 1)),
    (["['a']", "['b'][0]", "['b'][1]"], (), {"a": 0, "b": (1, 2)}),
    (["[0].first", "[0].second", "[1]"], (Pair(7, 8),), (Pair(0, 1), 2)),
    (["[0].first", "[0].second", "[1]"], (), ({"first": 0, "second": 1}, 2)),
    (["['x'][\"it's\"]"], (), {"x": {"it's": 0}}),
    (["", ""], (), (0, 1)),
    (["[0]", "?"], (), (0, 1)),
]


@pytest.mark.parametrize(("paths", "known", "expected"), TREES)
def test_paths_tell_the_tree(paths: list[str], known: Any, expected: Any) -> None:
    found: dict[frozenset[str], Any] = {}
    for tree in known:
        found.update(subtrees(tree))
    assert tree_of(paths, list(range(len(paths))), found) == expected


@pytest.mark.parametrize(
    ("element", "dtype"),
    [("f32", "float32"), ("bf16", "bfloat16"), ("i1", "bool"), ("i8", "int8"), ("ui16", "uint16"),
     ("f8E4M3FN", "float8_e4m3fn"),
     ("f8E5M2", "float8_e5m2"), ("f8E4M3B11FNUZ", "float8_e4m3b11fnuz"), ("complex<f32>", "complex64"), ("i4", "int4")],
)  # fmt: skip
def test_element_types(element: str, dtype: str) -> None:
    assert dtype_of(element) == jnp.dtype(dtype)


def test_what_is_no_sharded_program_is_refused(tmp_path: Path) -> None:
    with pytest.raises(toast.ToastError, match="states no shardings"):
        toast.load(ROOT / "sample_models" / "mlp_tiny.mlir")
    with pytest.raises(toast.ToastError, match="no such file"):
        toast.load(tmp_path / "nothing.mlir")
    plan = toast.partition(ROOT / "sample_models" / "mlp_tiny.mlir", "h100-8", mesh_shape="data=8", iterations=10)
    plan.save(tmp_path / "sharded.mlir")
    step = toast.load(tmp_path / "sharded.mlir", devices=jax.devices()[:1])
    assert "on data=8" in repr(step)
    with pytest.raises(toast.ToastError, match="for 8 devices, and JAX sees 1"):
        step(*(np.zeros(place.shape, dtype_of(place.dtype)) for place in step.arguments))
    other = jax.make_mesh((1,), ("model",), devices=jax.devices()[:1])
    with pytest.raises(toast.ToastError, match="for a mesh data=8; this one is model=1"):
        toast.load(tmp_path / "sharded.mlir", mesh=other)
    with pytest.raises(toast.ToastError, match="no mesh axis 'modle'; its axes: data"):
        toast.load(tmp_path / "sharded.mlir", axes={"modle": "fsdp"})
