"""Residuals of loops over layers, and optimizer state, rest in host memory: the same numbers, what is moved, and how it
is said."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from checking import toast
from jax import lax
from programs import arg, evaluator_of, source_of
from test_recompute import ALL, DENSE, PROGRAMS, TOKENS, WEIGHTS, decoder, rewritten, same_numbers, step

from toast_cli.candidates.variants import Variant, search_variants
from toast_cli.frontend import Source
from toast_cli.hardware import load_spec
from toast_cli.program.roles import optimizer_state
from toast_cli.program.values import TO_DEVICE, TO_HOST, is_transfer, on_host
from toast_cli.request import Offload
from toast_cli.rewrite import with_microbatches, with_offload

Tree = dict[str, Any]


def offloaded(source: Source, what: Offload = Offload.residuals) -> Source:
    found = with_offload(source, what)
    assert isinstance(found, Source), found
    assert found.program.offload == what
    return found


def moves(source: Source) -> int:
    return sum(is_transfer(op) for op in source.program.ops)


def momentum(p: Tree, m: Tree, x: Any) -> Any:
    """Two moments and a count, as Adam has them; the gradients of a scan over layers."""

    def loss(p: Tree) -> Any:
        return jnp.mean(lax.scan(lambda x, w: (x + jnp.tanh(x @ w["a"]) @ w["b"], None), x, p)[0] ** 2)

    value, g = jax.value_and_grad(loss)(p)
    count = m["count"] + 1
    first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, m["first"], g)
    second = jax.tree.map(lambda m, g: 0.99 * m + 0.01 * g * g, m["second"], g)
    new = jax.tree.map(lambda p, a, b: p - 0.1 * a / (jnp.sqrt(b) + 1e-3) / count, p, first, second)
    return new, {"first": first, "second": second, "count": count}, value


STATE = {"first": DENSE, "second": DENSE, "count": arg(dtype=jnp.int32)}
ADAM = (momentum, (DENSE, STATE, arg(40, 16)))


@pytest.mark.parametrize("name", ["scanned", "scanned from the last", "recurrent"])
def test_numbers_are_the_same(name: str) -> None:
    run, shapes = PROGRAMS[name]
    source = source_of(run, *shapes)
    assert same_numbers(source, offloaded(source))
    again = offloaded(rewritten(source, ALL))
    assert same_numbers(source, again) and again.program.recompute == ALL


def test_inputs_of_layers_are_in_host_memory() -> None:
    run, shapes = PROGRAMS["scanned"]
    source = offloaded(rewritten(source_of(run, *shapes), ALL))
    assert moves(source) == 2
    stacks = {str(source.program.values[value]) for value in on_host(source.program)}
    assert "f32[3,8,24,16]" in stacks
    assert all(shape in ("f32[3,8,24,16]", "f32[1,8,24,16]", "f32[8,24,16]") for shape in stacks)
    assert any("the layer's input" in notice and "pinned_host" in notice for notice in source.notices)


def test_parts_of_a_batch_are_offloaded_one_by_one() -> None:
    run, shapes = PROGRAMS["scanned"]
    source = source_of(run, *shapes)
    parts = with_microbatches(rewritten(source, ALL), 4)
    assert isinstance(parts, Source)
    found = offloaded(parts)
    assert same_numbers(source, found) and found.program.microbatches == 4
    assert "f32[3,2,24,16]" in {str(found.program.values[value]) for value in on_host(found.program)}


def test_complex_numbers_stay() -> None:
    run, shapes = PROGRAMS["waves"]
    found = offloaded(source_of(run, *shapes))
    assert not any(found.program.values[value].dtype.startswith("c") for value in on_host(found.program))


def test_small_stacks_stay() -> None:
    def loss(p: Tree, x: Any) -> Any:
        def layer(x: Any, w: Tree) -> Any:
            y = jnp.tanh(x @ w["a"])
            return x + (y * jnp.tanh(jnp.mean(y))) @ w["b"], None

        return jnp.mean(lax.scan(layer, x, p)[0] ** 2)

    found = offloaded(source_of(step(loss), DENSE, arg(400, 16)))
    shapes = {found.program.values[value].shape for value in on_host(found.program)}
    assert (6, 400, 32) in shapes and (6,) not in shapes


def test_moments_are_in_host_memory() -> None:
    source = source_of(*(ADAM[0], *ADAM[1]))
    paths = [source.program.arguments[n].path for n in optimizer_state(source.program)]
    assert paths == ["m['first']['a']", "m['first']['b']", "m['second']['a']", "m['second']['b']"]
    found = offloaded(source, Offload.optimizer_state)
    assert same_numbers(source, found)
    assert [one.path for one in found.program.arguments if one.on_host] == paths
    assert moves(found) == 8
    assert moves(offloaded(source, Offload.all)) == 8 + moves(offloaded(source))
    assert any("m/first/a" in notice and "with_memory_kind" in notice for notice in found.notices)


def test_moments_are_on_the_device_during_the_backward_loop() -> None:
    """XLA:TPU starts the transfers in front of it, to hide them."""
    source = offloaded(source_of(*(ADAM[0], *ADAM[1])), Offload.optimizer_state)
    program = source.program
    lives = evaluator_of(source, load_spec("v5e-4").mesh({"data": 4})).items.lives
    backward = max(loop.first for loop in program.loops)
    arriving = [op.results[0] for op in program.ops if op.detail == TO_DEVICE]
    leaving = [op.operands[0] for op in program.ops if op.detail == TO_HOST]
    assert len(arriving) == len(leaving) == 4
    assert all(lives.intervals[value][0][0] == 2 * backward for value in arriving)
    assert all(lives.intervals[value][-1][1] == lives.end for value in leaving if lives.intervals[value])


def test_a_cache_is_no_optimizer_state() -> None:
    def decode(w: Any, cache: Any, x: Any) -> Any:
        cache = lax.dynamic_update_slice(cache, x @ w, (0, 0))
        return cache, cache @ w

    found = with_offload(source_of(decode, arg(16, 16), arg(64, 16), arg(1, 16)), Offload.all)
    assert isinstance(found, str) and "no loop over layers" in found and "optimizer state" in found


def test_what_the_program_offloads_itself_is_left_alone() -> None:
    once = offloaded(source_of(*(ADAM[0], *ADAM[1])), Offload.all)
    assert isinstance(with_offload(once, Offload.all), str)


@pytest.fixture(scope="module")
def adam(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("adam") / "step.mlir"
    path.write_text(jax.jit(ADAM[0], donate_argnums=(0, 1)).lower(*ADAM[1]).as_text(debug_info=True))
    return path


MESH = ["--mesh", "v5e-8", "--mesh-shape", "x=8", "--quiet"]


@pytest.mark.parametrize("form", ["stablehlo", "hlo"])
def test_what_is_moved_is_written(adam: Path, tmp_path: Path, form: str) -> None:
    """XLA:CPU runs what is written."""
    report, out = str(tmp_path / "report.json"), tmp_path / "out"
    options = ["--strategy", "fsdp", "--offload", "all", "--json", report, "--format", form, "-o", str(out)]
    assert toast("partition", str(adam), *MESH, *options) == 0
    text = out.read_text()
    if form == "hlo":
        assert text.splitlines()[0].count("S(5)") == 8
    else:
        assert text.count('_xla_buffer_placement = "pinned_host"') == text.count('_xla_buffer_placement = "device"')
        assert text.count('memory_kind = "pinned_host"') == 8
    assert toast("verify", str(out), "--report", report, "--against", str(adam), "--compiler", "cpu", "--quiet") == 0


def test_saved_plans_and_reports_say_it(adam: Path, tmp_path: Path) -> None:
    report, plan = tmp_path / "report.json", tmp_path / "plan.json"

    def program(*options: str) -> Tree:
        assert toast("partition", str(adam), *MESH, "--json", str(report), *options) == 0
        facts = json.loads(report.read_bytes())
        assert facts["predicted"]["host_bytes"] > 0
        return facts["program"]

    assert program("--strategy", "fsdp", "--offload", "all", "--save-plan", str(plan))["offload"] == "all"
    assert program("--plan", str(plan))["offload"] == "all"
    assert program("--plan", str(plan), "--offload", "residuals")["offload"] == "residuals"
    assert toast("explain", str(adam), "--mesh", "v5e-8", "--report", str(report), "--quiet") == 0


def test_it_is_chosen_where_nothing_else_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers that take a mean over the batch cannot run in parts. Ctrl-C ends the trials."""

    def loss(p: Tree, x: Any) -> Any:
        def layer(x: Any, w: Tree) -> Any:
            y = jnp.tanh(x @ w["a"])
            return x + (y - jnp.mean(y, 0)) @ w["b"], None

        return jnp.mean(lax.scan(layer, x, p)[0] ** 2)

    program, report = tmp_path / "step.mlir", tmp_path / "report.json"
    shapes = {"a": arg(64, 512, 512), "b": arg(64, 512, 512)}
    program.write_text(jax.jit(step(loss), donate_argnums=0).lower(shapes, arg(65536, 512)).as_text())
    options = ["partition", str(program), *MESH, "--iterations", "20", "--json", str(report)]
    assert toast(*options, "--recompute", "all") == 0
    peak = json.loads(report.read_bytes())["predicted"]["peak_bytes"]
    assert toast(*options, "--memory-limit", f"{peak // 2}B") == 0
    found = json.loads(report.read_bytes())
    assert found["program"]["offload"] == "residuals" and found["program"]["microbatches"] == 1
    made = "made to fit: --recompute all --offload residuals"
    assert any(note.startswith(made) for note in found["analysis"]["notes"])
    trials = 0

    def interrupted(variants: Any, space: Any, *rest: Any) -> list[Variant]:
        nonlocal trials
        found = search_variants(variants, space, *rest)
        offloads = bool(variants[0](space.meshes[0]).program.offload)
        trials += offloads
        return [replace(it, result=replace(it.result, stopped="interrupted")) for it in found] if offloads else found

    monkeypatch.setattr("toast_cli.candidates.fitting.search_variants", interrupted)
    toast(*options, "--memory-limit", f"{peak // 2}B")
    assert trials == 1


def test_what_cannot_be_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "forward.mlir"
    path.write_text(jax.jit(decoder(scanned=True)).lower(WEIGHTS, TOKENS).as_text())
    assert toast("partition", str(path), "--mesh", "v5e-8", "--offload", "residuals", "--quiet") == 2
    assert "nothing to offload" in capsys.readouterr().err
