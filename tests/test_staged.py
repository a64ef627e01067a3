"""Programs of pipeline stages: they train as the program that they were cut from, on the devices of their stages."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import jax
import jax.numpy as jnp
import pytest
from programs import arg, source_of

from toast_cli import xla
from toast_cli.base.errors import UsageError
from toast_cli.base.files import Target, check_targets, write_folder
from toast_cli.cli.app import run
from toast_cli.rewrite.layer_loops import LayerLoops
from toast_cli.rewrite.stage_files import BACKWARD, FORWARD
from toast_cli.rewrite.stages import one_f_one_b

ROOT = Path(__file__).parents[1]

# Decoders with a tied embedding, a norm in front of each layer, dropout, clipped gradients and momentum; scanned (as
# MaxText stacks them, layers are the second dimension of a weight), with a loss on what each layer reads.
WALK = """
import json, sys
from functools import cache
from pathlib import Path
import jax, jax.numpy as jnp, numpy as np
from jax import lax
import toast_cli as toast
from toast_cli.cli.app import run

LAYERS, WORDS, WIDTH, BATCH = 4, 48, 16, 32

def layer(x, w, key):
    scale = lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)
    hidden = jnp.tanh((x * scale) @ w["up"])
    return x + jnp.where(jax.random.bernoulli(key, 0.9, hidden.shape), hidden, 0) @ w["down"]

@cache
def trained(scanned, dtype):
    def loss(params, tokens, key):
        x, one, keys = params["embed"][tokens[:, 0]], jax.checkpoint(layer), jax.random.split(key, LAYERS)
        if scanned:
            stacked = {"up": params["layers"]["up"], "down": jnp.moveaxis(params["layers"]["down"], 1, 0)}
            x, kept = lax.scan(lambda y, w: (one(y, *w), jnp.mean(y * y)), x, (stacked, keys))
        else:
            for w, k in zip(params["layers"], keys):
                x = one(x, w, k)
        logits, more = (x @ params["embed"].T).astype(jnp.float32), 0.01 * jnp.sum(kept) if scanned else 0.0
        return more + jnp.mean(jax.nn.logsumexp(logits, -1) - jnp.take_along_axis(logits, tokens[:, 1:], -1)[:, 0])

    def step(params, moments, count, tokens, key):
        value, gradients = jax.value_and_grad(loss)(params, tokens, key)
        norm = jnp.sqrt(sum(jnp.sum(jnp.float32(g) ** 2) for g in jax.tree.leaves(gradients)))
        scale = jnp.minimum(1.0, 0.5 / norm) / (1.0 + 0.1 * count)
        moments = jax.tree.map(lambda m, g: 0.9 * m + scale * g, moments, gradients)
        params = jax.tree.map(lambda w, m: (w - 0.1 * m - 0.01 * w).astype(dtype), params, moments)
        return params, moments, count + 1, value

    random = np.random.default_rng(0)
    shapes = {"up": (LAYERS, WIDTH, 2 * WIDTH), "down": (LAYERS, 2 * WIDTH, WIDTH)}
    layers = {n: 0.3 * random.normal(size=s) for n, s in shapes.items()}
    if scanned:
        layers["down"] = np.moveaxis(layers["down"], 0, 1)
    else:
        layers = [{n: w[k] for n, w in layers.items()} for k in range(LAYERS)]
    params = {"layers": layers, "embed": random.normal(size=(WORDS, WIDTH))}
    params = jax.tree.map(lambda w: jnp.asarray(w.astype(jnp.bfloat16).astype(dtype)), params)
    zeros = jax.tree.map(lambda w: jnp.asarray(np.zeros(w.shape, np.float32)), params)
    return step, jax.jit(step), (params, zeros, jnp.int32(0))

def distance(one, other):
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return float(sum(np.sum((np.asarray(a) - np.asarray(b)) ** 2) for a, b in pairs) ** 0.5)

folder, found = Path(sys.argv[1]), {}
inputs = jax.random.randint(jax.random.key(1), (BATCH, 2), 0, WORDS), jax.random.PRNGKey(7)
for form, (shape, pipeline, inside) in json.loads(sys.argv[2]).items():
    step, plain, state = trained(form == "scanned", jnp.bfloat16 if form == "narrow" else jnp.float32)
    lowered = jax.jit(step, donate_argnums=(0, 1)).lower(*state, *inputs)
    (folder / "step.mlir").write_text(lowered.as_text(debug_info=True))
    asked = ["--mesh", "v5e-8", "--mesh-shape", shape, "--pipeline", pipeline, "--strategy", inside]
    assert run(["partition", str(folder / "step.mlir"), *asked, "--quiet", "-o", f"{folder}/{form}/"]) == 0
    staged = toast.load(folder / form)
    mine, given = jax.tree.map(jnp.copy, state), None
    if form == "narrow":  # both round: how far is each from the gradients of f32
        _, exact, state = trained(False, jnp.float32)
        exact = exact(*state, *inputs)[1]
        found[form] = [distance(of(*mine, *inputs)[1], exact) for of in (plain, staged)]
        continue
    for _ in range(3):
        *state, value = plain(*state, *inputs)
        given, state = mine, tuple(state)
        *mine, loss = staged(*mine, *inputs)
        for one, other in zip(jax.tree.leaves((state, value)), jax.tree.leaves((tuple(mine), loss)), strict=True):
            np.testing.assert_allclose(np.asarray(other), np.asarray(one), rtol=2e-4, atol=2e-6)
    places = [sorted(d.id for d in w.sharding.device_set) for w in jax.tree.leaves(mine[0]["layers"])]
    used = [w.is_deleted() for w in jax.tree.leaves(given[:2])]
    found[form] = {"places": places, "used": used, "shapes": [w.shape for w in jax.tree.leaves(mine[0]["layers"])]}
    if form == "unrolled":
        mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(2, 4), ("fsdp", "pipe"))
        other = toast.load(folder / form, mesh=mesh, axes={"data": "fsdp"})
        places = zip(other.arguments, other.in_shardings)
        found["other"] = [[d.id for d in s.mesh.devices.flat] for a, s in places if "params['layers']" in a.path]
print(json.dumps(found))
"""
# Form of the program -> mesh, stages and microbatches, the plan in a stage.
FORMS = {
    "unrolled": ("pipe=4,data=2", "4:4", "data-parallel"),
    "scanned": ("pipe=2,data=2,model=2", "2:8", "fsdp x megatron"),
    "narrow": ("pipe=2,data=4", "2:4", "data-parallel"),
}


@pytest.fixture(scope="module")
def walk(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The folder with the written programs, and what a process with 8 devices found."""
    folder = tmp_path_factory.mktemp("stages")
    xla_flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=8"  # with those of conftest.py
    flags = {"XLA_FLAGS": xla_flags, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", WALK, str(folder), json.dumps(FORMS)]
    child = subprocess.run(command, env={**os.environ, **flags}, capture_output=True, text=True, check=False)
    assert child.returncode == 0, child.stderr[-3000:]
    return folder, json.loads(child.stdout.splitlines()[-1])


def test_the_state_stays_on_its_stage_and_is_used_up(walk: tuple[Path, dict[str, Any]]) -> None:
    found = walk[1]["unrolled"]
    assert found["places"] == [[2 * stage, 2 * stage + 1] for stage in range(4) for _ in ("down", "up")]
    assert all(found["used"])


def test_stages_are_on_the_devices_of_a_mesh_with_other_names_in_another_order(
    walk: tuple[Path, dict[str, Any]],
) -> None:
    assert walk[1]["other"] == [[stage, stage + 4] for stage in range(4) for _ in ("down", "up")]


def test_stages_send_one_activation_and_the_shared_weight(walk: tuple[Path, dict[str, Any]]) -> None:
    schedule = json.loads((walk[0] / "unrolled" / "schedule.json").read_text())
    values, width = schedule["values"], 16
    sent = [
        (s["value"], s["source"], s["target"]) for s in schedule["steps"] if not s["program"] and s["microbatch"] == 0
    ]
    activations = [(source, target) for name, source, target in sent if values[name]["shape"] == [8, width]]
    assert sorted(activations) == [(0, 1), (1, 0), (1, 2), (2, 1), (2, 3), (3, 2)]
    assert [(source, target) for name, source, target in sent if values[name]["shape"] == [48, width]] == [(3, 0)]
    assert all(schedule["steps"][k]["program"] for k in (-1, -2))
    once = [s for s in schedule["steps"] if s["microbatch"] < 0 and not s["program"]]
    assert [(s["source"], s["target"]) for s in once if sorted(values[s["value"]]["shape"]) == [width, 48]] == [(0, 3)]
    # Tokens, the key of dropout to three stages and the tied weight come first.
    assert all(len(values[s["value"]]["shape"]) == 0 for s in once[5:])


def test_scanned_layers_have_a_loop_and_their_rows_on_each_stage(walk: tuple[Path, dict[str, Any]]) -> None:
    found = walk[1]["scanned"]
    assert found["places"] == [list(range(8))] * 2
    assert found["shapes"] == [[32, 4, 16], [4, 16, 32]]
    assert all(found["used"])
    folder = walk[0] / "scanned"
    schedule = json.loads((folder / "schedule.json").read_text())
    parted = [array for array in schedule["arguments"] if len(array["values"]) > 1]
    assert [array["path"] for array in parted if "params" in array["path"]] == [
        "params['layers']['down']", "params['layers']['up']"
    ]  # fmt: skip
    assert {tuple(array["stages"]) for array in parted} == {(0, 1)}
    values = schedule["values"]
    assert values[parted[0]["values"][0]]["shape"] == [32, 2, 16]
    sent = [s for s in schedule["steps"] if not s["program"] and s["microbatch"] == 0]
    shapes = [(s["source"], s["target"], values[s["value"]]["shape"]) for s in sent]
    assert shapes.count((0, 1, [4, 16])) == shapes.count((1, 0, [4, 16])) == 1
    for name in ("forward_0", "forward_1", "backward_0", "backward_1"):
        text = (folder / f"{name}.mlir").read_text()  # with a loop over its rows, in which is that of threefry
        assert text.count("stablehlo.while") == 2 and "tensor<2x16x32xf32>" in text
        given, left = next(line for line in text.splitlines() if "@main(" in line).split(" -> (")
        assert "tensor<32x2x16xf32>" in given  # the weight as the user keeps it, no copy in the loop's order
        left_as = re.findall(r"sdy.sharding = (.*?\]>)", left)
        donated = re.findall(r"sdy.sharding = ([^>]*>), tf.aliasing_output = (\d+)", given)
        assert [axes for axes, _ in donated] == [left_as[int(number)] for _, number in donated]
        assert (len(donated) > 2) == name.startswith("backward")


def test_stages_round_as_much_as_the_whole_step(walk: tuple[Path, dict[str, Any]]) -> None:
    """Gradients of bf16 weights, whose microbatches are added up in another order, against those of f32."""
    whole, staged = walk[1]["narrow"]
    assert whole > 1e-3 and 0.7 * whole < staged < 1.3 * whole


def test_all_programs_are_also_one_of_mpmd(walk: tuple[Path, dict[str, Any]]) -> None:
    text = (walk[0] / "unrolled" / "pipeline.mpmd.mlir").read_text()
    assert text.count("mpmd.fragment_call") > 4 * 8
    assert '<"stage_3" : <["pipe"=1, "data"=2]>>' in text
    assert "func.func public @main" in text


@pytest.mark.parametrize(("stages", "microbatches"), [(1, 3), (2, 2), (2, 5), (4, 2), (4, 16)])
def test_1f1b_runs_each_once_behind_what_it_needs_and_keeps_few(stages: int, microbatches: int) -> None:
    order = list(one_f_one_b(stages, microbatches))
    place = {item: number for number, item in enumerate(order)}
    assert len(order) == len(place) == 2 * stages * microbatches
    for phase, stage, m in order:
        before = [(phase, stage - 1, m)] if phase == FORWARD else [(phase, stage + 1, m), (FORWARD, stage, m)]
        assert all(place[item] < place[phase, stage, m] for item in before if item in place)
        ahead = sum(1 if p == FORWARD else -1 for p, s, _ in order[: place[phase, stage, m] + 1] if s == stage)
        assert ahead <= stages - stage
    assert order[-1] == (BACKWARD, 0, microbatches - 1)


@cache
def unrolled(normed: bool = False) -> str:
    def loss(params: Any, x: Any) -> Any:
        for w in params:
            x = jnp.tanh(x @ w)
            x = x - jnp.mean(x, 0) if normed else x
        return jnp.mean(x**2)

    step = jax.jit(lambda params, x: jax.tree.map(lambda w, g: w - g, params, jax.grad(loss)(params, x)))
    return str(step.lower([arg(8, 8)] * 4, arg(16, 8)).as_text(debug_info=True))


@pytest.mark.parametrize(
    ("arguments", "normed", "what"),
    [
        (("-o", "stages/"), False, "-o: a folder is for the programs of a pipeline's stages"),
        (("-o", "stages/", "--pipeline", "2:4", "--format", "hlo"), False, "leave out --format"),
        (("-o", "other/", "--pipeline", "2:4"), False, "other/ has other files than those of an earlier output"),
        (("-o", "step.mlir", "--pipeline", "2:4"), False, "give a folder, -o stages/"),
        (("-o", "stages/", "--pipeline", "rows:4"), False, "no mesh axis 'rows' to have stages on"),
        (("-o", "stages/", "--pipeline", "8:4"), False, "4 layers have no 8 equal parts"),
        (
            ("-o", "stages/", "--pipeline", "pipe", "--pin", "x=pipe"),
            False,
            "stages are over pipe, and so is --pin",
        ),
        (("-o", "stages/", "--pipeline", "pipe", "--strategy", "fsdp:pipe"), False, "and so is --strategy fsdp:pipe"),
        (("-o", "stages/", "--pipeline", "2:5"), False, "f32[16,8] has no 5 equal parts"),
        (
            ("-o", "stages/", "--pipeline", "2:4"),
            True,
            "cannot be run in 4 microbatches with the same numbers: subtract",
        ),
    ],
)
def test_what_cannot_be_written_is_one_error(
    arguments: tuple[str, ...],
    normed: bool,
    what: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("model.mlir").write_text(unrolled(normed))
    Path("other").mkdir()
    Path("other/mine.txt").write_text("")
    shape = "pipe=8" if "8:4" in arguments else "pipe=2,data=4"
    asked = ["--mesh", "v5e-8", "--mesh-shape", shape, "--strategy", "data-parallel", *arguments]
    assert run(["partition", "model.mlir", *asked]) == 2
    assert what in " ".join(capsys.readouterr().err.split())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.mlir", "other"]


@pytest.mark.parametrize(
    ("added", "path", "inputs"),
    [
        (("stages/mine.txt",), "stages/", ()),
        (("stages/schedule.json",), "stages/", ()),
        (("stages/forward_0.mlir/mine.txt",), "stages/", ()),
        ((), "stages/", ("stages/forward_0.mlir",)),
        ((), ".", ()),
        ((), "..", ()),
        (("mine.txt",), "mine.txt/", ()),
    ],
)
def test_a_folder_replaces_only_files_of_an_earlier_output(
    added: tuple[str, ...], path: str, inputs: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    files = {"schedule.json": json.dumps({"files": ["schedule.json", "forward_0.mlir"]}).encode()}
    write_folder(Target("-o", "stages/", "schedule.json"), files)
    check_targets([Target("-o", "stages/", "schedule.json")], ["model.mlir", "-"])
    for name in added:
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text("{}")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(UsageError):
        check_targets([Target("-o", path, "schedule.json")], inputs)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_a_folder_stays_when_its_replacement_is_interrupted(
    error: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, rename = Target("-o", str(tmp_path / "stages"), "schedule.json"), Path.rename
    write_folder(target, {"schedule.json": b'{"files": ["schedule.json"], "earlier": 1}'})

    def interrupted(path: Path, new: Path) -> Path:
        if new.name == "stages" and b"earlier" not in (path / "schedule.json").read_bytes():
            raise error
        return rename(path, new)

    monkeypatch.setattr(Path, "rename", interrupted)
    with pytest.raises((KeyboardInterrupt, UsageError)):
        write_folder(target, {"schedule.json": b"{}"})
    assert b"earlier" in (tmp_path / "stages" / "schedule.json").read_bytes()
    assert [path.name for path in tmp_path.iterdir()] == ["stages"]


def test_pins_hold_in_the_programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("model.mlir").write_text(unrolled())
    asked = ["--mesh", "v5e-8", "--mesh-shape", "pipe=2,data=4", "--pipeline", "2:4", "--pin", "params[2]=None,data"]
    assert run(["partition", "model.mlir", *asked, "--quiet", "-o", "stages/"]) == 0
    schedule = json.loads(Path("stages/schedule.json").read_text())
    assert set(schedule["files"]) == {path.name for path in Path("stages").iterdir()}
    of_arguments = [schedule["values"][a["values"][0]]["sharding"] for a in schedule["arguments"]]
    assert of_arguments[2] == [[], ["data"]]
    assert of_arguments[3] != [[], ["data"]]


@pytest.mark.parametrize(
    ("reduced", "divided"),
    [
        (lambda w: jax.lax.reduce(w, 0.0, jax.lax.add, (0, 1)), True),
        (lambda w: jax.lax.reduce(w, -jnp.inf, jax.lax.max, (0, 1)), True),
        (lambda w: jax.lax.reduce(w, 1.0, jax.lax.add, (0, 1)), False),
        (lambda w: jax.lax.reduce(w, 0.0, jax.lax.max, (0, 1)), False),
        (lambda w: jax.lax.reduce(w, 0.0, lambda a, b: a + 2 * b, (0, 1)), False),
    ],
)
def test_stages_reduce_their_rows_only_from_the_neutral_element(reduced: Any, divided: bool) -> None:
    module = source_of(reduced, arg(4, 8)).module
    function, stack = xla.main_function(module), SimpleNamespace(shapes={(4, 8): 0}, layers=4)
    block = function.entry_block
    with module.context, xla.ir.Location.unknown():
        LayerLoops(block, function, {}, cast("Any", stack), stages=2).run()
    names = [op.operation.name for op in block.operations]
    assert names.count("stablehlo.concatenate") == (0 if divided else 1)


def accumulated(*loops: int) -> str:
    """Gradients that the user's own loops add up, one in the other, which count in 64 bits."""

    def loss(params: Any, x: Any) -> Any:
        for w in params:
            x = jnp.tanh(x @ w)
        return jnp.mean(x**2)

    def step(params: Any, x: Any) -> Any:
        def summed(total: Any, rows: Any) -> tuple[Any, None]:
            if rows.ndim > 2:
                return jax.lax.scan(summed, total, rows)[0], None
            return jax.tree.map(jnp.add, total, jax.grad(loss)(params, rows)), None

        gradients = summed(jax.tree.map(jnp.zeros_like, params), x.reshape(*loops, -1, 8))[0]
        return jax.tree.map(lambda w, g: w - g, params, gradients)

    with jax.enable_x64(True):
        return str(jax.jit(step).lower([arg(8, 8)] * 4, arg(16, 8)).as_text(debug_info=True))


@pytest.mark.parametrize("loops", [(4,), (2, 2)])
def test_microbatches_of_the_program_are_those_of_the_stages(
    loops: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("model.mlir").write_text(accumulated(*loops))
    asked = ["--mesh", "v5e-8", "--mesh-shape", "pipe=2,data=4", "--strategy", "data-parallel", "--pipeline", "2:4"]
    code = run(["partition", "model.mlir", *asked, "--quiet", "-o", "stages/"])
    if len(loops) > 1:
        assert (code, Path("stages").exists()) == (2, False)
        assert "no loop over all microbatches" in capsys.readouterr().err
        return
    assert code == 0
    schedule = json.loads(Path("stages/schedule.json").read_text())
    assert {"forward_0", "forward_1", "backward_0", "backward_1"} <= {p["name"] for p in schedule["programs"]}
    assert schedule["values"]["microbatch"]["dtype"] == "i64"
    assert "func.func @number_3() -> tensor<i64>" in Path("stages/pipeline.mpmd.mlir").read_text()
    assert "stablehlo.while" not in Path("stages/forward_0.mlir").read_text()
