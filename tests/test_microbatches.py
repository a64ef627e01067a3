"""The step with its batch in parts: the same numbers, the op that forbids it, and when it is chosen."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from checking import toast
from jax import lax
from programs import arg, source_of, source_of_text
from run_here import run_program

from toast_cli import xla
from toast_cli.ask_xla.numbers import input_sets, relative_error
from toast_cli.candidates.fitting import by_reason
from toast_cli.frontend import Source
from toast_cli.pipeline import partition
from toast_cli.price.memory_fit import RISK
from toast_cli.request import Request
from toast_cli.rewrite import batch_parts, with_microbatches

Params = dict[str, Any]
DENSE = {"a": arg(16, 32), "b": arg(32, 8)}


def step(loss: Callable[..., Any]) -> Callable[..., Any]:
    def run(params: Params, *inputs: Any) -> Any:
        value, gradients = jax.value_and_grad(loss)(params, *inputs)
        return jax.tree.map(lambda w, d: w - 0.1 * d, params, gradients), value

    return run


def dense(p: Params, x: Any, y: Any) -> Any:
    return jnp.mean((jnp.tanh(x @ p["a"]) @ p["b"] - y) ** 2)


def normalised(p: Params, x: Any, y: Any) -> Any:
    h = x @ p["a"]
    return jnp.mean(((h - h.mean(0)) @ p["b"] - y) ** 2)


def contrastive(p: Params, x: Any, y: Any) -> Any:
    return -jnp.mean(jnp.diag(jax.nn.log_softmax((x @ p["a"]) @ (y @ p["b"]).T)))


def waves(p: Params, x: Any, y: Any) -> Any:
    return jnp.mean((jnp.abs(lax.complex(x @ p["a"], x @ p["a"]) * (1 + 2j) + 1j) @ p["b"] - y) ** 2)


def dropped(p: Params, x: Any, y: Any) -> Any:
    kept = jax.random.bernoulli(jax.random.key(1), 0.5, (x.shape[0], 32))
    return jnp.mean(((x @ p["a"]) * kept @ p["b"] - y) ** 2)


def recurrent(p: Params, x: Any) -> Any:
    last, _ = lax.scan(lambda h, x: (jnp.tanh(x @ p["a"] + h @ p["b"]), None), jnp.zeros((x.shape[1], 32)), x)
    return jnp.mean(last**2)


def decoder(p: Params, tokens: Any) -> Any:
    """Layers in a scan, each recomputed; the mean is over the tokens that count."""
    mask = jnp.tril(jnp.ones((8, 8), bool))

    def layer(x: Any, w: Params) -> Any:
        scores = jnp.where(mask, jnp.einsum("bqd,bkd->bqk", x @ w["q"], x), -1e9)
        x = x + jnp.einsum("bqk,bkd->bqd", jax.nn.softmax(scores), x)
        return x + jax.nn.relu(x @ w["i"]) @ w["o"], None

    x, _ = lax.scan(jax.checkpoint(layer), p["e"][tokens[:, :-1]], p["l"])
    logits = jax.nn.log_softmax((x @ p["e"].T).astype(jnp.float32))
    likelihoods = jnp.take_along_axis(logits, tokens[:, 1:, None], -1)[..., 0]
    counts = tokens[:, 1:] > 1
    return -jnp.sum(likelihoods * counts) / jnp.sum(counts)


def barred(p: Params, x: Any, y: Any) -> Any:
    """A recomputed layer that reads something alike for all examples, and computes more of it behind its barrier."""
    n, width = x.shape
    scale = jnp.broadcast_to(jnp.sin(jnp.arange(width, dtype=jnp.float32)), (n, width))

    def layer(h: Any, scale: Any, turned: Any) -> Any:
        mean = jnp.mean(scale @ p["a"], -1, keepdims=True)
        both = jnp.concatenate([scale[:, 4:], jnp.pad(turned.T, ((0, 0), (0, 4)))[:, -8:-4]], -1)
        return jnp.tanh(h * both @ p["a"]) @ (p["b"] @ jnp.ones((8, 16))) + mean * turned.T.reshape(n, width)

    for _ in range(2):
        x = jax.checkpoint(layer)(x, scale, jnp.cos(scale).T)
    return jnp.mean((x[:, :8] - y) ** 2)


def dropped_in_layers(impl: str = "threefry2x32", merged: bool = False, unrolled: bool = False) -> Any:
    """Layers with dropout by a key each; the backward pass draws the same numbers again."""

    def loss(p: Params, x: Any) -> Any:
        def layer(x: Any, w: Any) -> Any:
            h = jax.nn.relu(x @ w[0])
            h = h.reshape(-1, h.shape[-1]) if merged else h
            return (h * jax.random.bernoulli(w[1], 0.5, h.shape)).reshape(x.shape), None

        keys = jax.random.split(jax.random.key(7, impl=impl), 3)
        x, _ = lax.scan(jax.checkpoint(layer), x, (p["w"], keys), unroll=3 if unrolled else 1)
        return jnp.mean(x**2)

    return step(loss)


def rescaled(p: Params, x: Any) -> Any:
    """Layers with random factors, divided by their mean over the whole batch."""

    def layer(x: Any, w: Any) -> Any:
        kept = jax.random.bernoulli(w[1], 0.5, x.shape)
        return jnp.tanh(x @ w[0]) * kept / jnp.mean(kept), None

    return jnp.mean(lax.scan(layer, x, (p["w"], jax.random.split(jax.random.key(7), 3)))[0] ** 2)


def by_example(p: Params, x: Any) -> Any:
    """Layers that know the number of each example, as a complex and as a real number."""
    places = jnp.arange(16)

    def layer(x: Any, w: Any) -> Any:
        row = jnp.abs(lax.iota(jnp.complex64, 16) * (1 + 2j)) + places[::-1] / 10
        return jnp.tanh((x + row[:, None]) @ w), None

    return jnp.mean(lax.scan(layer, x, p["w"])[0] ** 2)


def scan_of_scans(p: Params, x: Any) -> Any:
    """Groups of layers, with a sum that shrinks from group to group."""

    def layer(x: Any, w: Any) -> Any:
        return jnp.tanh(x @ w), None

    def group(state: Any, ws: Any) -> Any:
        x, total = state
        x, _ = lax.scan(jax.checkpoint(layer), x, ws)
        return (x, total * 0.5 + jnp.sum(x, 0)), None

    (x, total), _ = lax.scan(group, (x, jnp.zeros(16)), p["w"])
    return jnp.mean(x**2) + jnp.sum(total)


STACK = {"w": arg(3, 16, 16)}
LAYERS = {"q": arg(3, 16, 16), "i": arg(3, 16, 64), "o": arg(3, 64, 16)}


def scanned_by_its_maximum(p: Any, x: Any) -> Any:
    """Layers that read the largest number of the batch, so that it cannot be divided."""
    return lax.scan(lambda x, w: (jnp.tanh(x @ w) / (1.0 + jnp.max(jnp.abs(x))), None), x, p)[0]


def overwritten(p: Any, x: Any, row: int, part: tuple[int, int]) -> Any:
    return lax.dynamic_update_slice(x @ p, jnp.ones(part), (row, 0))


SAME = {
    "dense": (step(dense), (DENSE, arg(16, 16), arg(16, 8))),
    "dropout": (step(dropped), (DENSE, arg(16, 16), arg(16, 8))),
    "complex constants": (step(waves), (DENSE, arg(16, 16), arg(16, 8))),
    "alike for all behind barriers": (step(barred), (DENSE, arg(16, 16), arg(16, 8))),
    "results with examples": (lambda p, x: jnp.tanh(x @ p["a"]) @ p["b"], (DENSE, arg(16, 16))),
    "each example with each": (step(contrastive), ({"a": arg(16, 8), "b": arg(16, 8)}, arg(16, 16), arg(16, 16))),
    "batch second": (step(recurrent), ({"a": arg(16, 32), "b": arg(32, 32)}, arg(5, 16, 16))),
    "scanned decoder": (step(decoder), ({"e": arg(32, 16), "l": LAYERS}, arg(16, 9, dtype=jnp.int32))),
    "a loop over the whole of another input": (
        step(lambda p, x, y: dense(p, x, scanned_by_its_maximum(jnp.eye(8)[None], y))),
        (DENSE, arg(16, 16), arg(16, 8)),
    ),
    "complex": (
        lambda p, x: jnp.sum(lax.scan(lambda x, w: (x @ w + 2j, None), x + 0j, p)[0], 0),
        (arg(3, 16, 16, dtype=jnp.complex64), arg(16, 16)),
    ),
    "a branch by a sum of inputs": (
        step(lambda p, x, y: lax.cond(jnp.sum(y) > 3, lambda: dense(p, x, y), lambda: dense(p, -x, y))),
        (DENSE, arg(16, 16), arg(16, 8)),
    ),
    "a column overwritten": (lambda p, x: overwritten(p, x, 0, (16, 1)), (arg(16, 8), arg(16, 16))),
    "dropout in a scan, examples and tokens as one": (dropped_in_layers(merged=True), (STACK, arg(16, 4, 16))),
    "dropout in a scan by a bit generator": (dropped_in_layers("unsafe_rbg"), (STACK, arg(16, 4, 16))),
    "dropout in layers one after the other": (dropped_in_layers(unrolled=True), (STACK, arg(16, 4, 16))),
    "random factors and their mean": (step(rescaled), (STACK, arg(16, 16))),
    "a Fourier transform of each example": (
        step(lambda p, x, y: dense(p, jnp.abs(jnp.fft.fft(x)), y)),
        (DENSE, arg(16, 16), arg(16, 8)),
    ),
    "numbers of examples in a scan": (step(by_example), (STACK, arg(16, 16))),
    "a scan of scans": (step(scan_of_scans), ({"w": arg(2, 3, 16, 16)}, arg(16, 16))),
}
WITHOUT_SUMS = ("results with examples", "a column overwritten")
REFUSED = {
    "rows overwritten by their number": (
        lambda p, x, i: (x @ p).at[i].add(1.0),
        (arg(16, 8), arg(16, 16), arg(16, dtype=jnp.int32)),
        "scatter",
    ),
    "a row overwritten": (lambda p, x: overwritten(p, x, 5, (1, 8)), (arg(16, 8), arg(16, 16)), "dynamic_update_slice"),
    "layers of the whole batch": (
        step(lambda p, x, y: jnp.mean((scanned_by_its_maximum(p, x) - y) ** 2)),
        (arg(3, 16, 16), arg(16, 16), arg(16, 16)),
        "reduce at",
    ),
    "a Fourier transform along the batch": (
        step(lambda p, x, y: dense(p, jnp.abs(jnp.fft.fft(x @ p["a"] @ p["a"].T, axis=0)), y)),
        (DENSE, arg(16, 16), arg(16, 8)),
        "fft at",
    ),
    "statistics of the batch": (step(normalised), (DENSE, arg(16, 16), arg(16, 8)), "subtract at"),
    "odd": (step(dense), (DENSE, arg(15, 16), arg(15, 8)), "no 4 equal parts"),
}


@pytest.mark.parametrize("name", SAME)
def test_numbers_are_the_same(name: str) -> None:
    run, shapes = SAME[name]
    source = source_of(run, *shapes)
    found = with_microbatches(source, 4)
    assert isinstance(found, Source), found
    assert found.program.microbatches == 4 and any(loop.trips == 4 for loop in found.program.loops)
    inputs = input_sets(source.module, 1, 1)[0]
    shapes = [tuple(kind.shape) for kind in xla.main_function(source.module).type.results]
    programs = [xla.write_bytecode(one.module) for one in (source, found)]
    whole, parts = (run_program(one, inputs, shapes, 1, shardy=True) for one in programs)
    assert max(relative_error(a, b) for a, b in zip(whole, parts, strict=True)) < 1e-5
    assert any("added up" in notice for notice in found.notices) == (name not in WITHOUT_SUMS)


@pytest.mark.parametrize(("batch", "parts"), [(12, [2, 4, 12]), (15, [3, 15]), (8, [2, 4, 8]), (7, [7])])
def test_numbers_of_parts_divide_the_batch(batch: int, parts: list[int]) -> None:
    assert batch_parts(source_of(step(dense), DENSE, arg(batch, 16), arg(batch, 8))) == parts


def test_numbers_of_parts_are_those_of_the_dimension_that_is_a_batch() -> None:
    run, (shapes, _) = SAME["batch second"]
    assert batch_parts(source_of(run, shapes, arg(5, 6, 16))) == [2, 6]


def test_what_is_alike_for_all_examples_is_made_in_the_loop() -> None:
    """The causal mask, which the layers' loop reads for the whole batch, and the zeros that it begins with."""
    run, shapes = SAME["scanned decoder"]
    found = with_microbatches(source_of(run, *shapes), 4)
    assert isinstance(found, Source)
    program = found.program
    outer = next(number for number, loop in enumerate(program.loops) if loop.trips == 4)
    entering = {op.operands[0] for op in program.ops if op.name == "toast.carry" and op.loop == outer}
    large = [program.values[v].shape for v in entering if program.ops[program.producer[v]].name == "stablehlo.reshape"]
    assert (4, 4, 8, 8) not in large
    within = (op for op in program.ops if op.name == "toast.carry" and program.loops[op.loop].parent == outer)
    starts = [program.ops[program.producer[op.operands[0]]] for op in within]
    zeros = [op.loop for op in starts if op.name in ("stablehlo.broadcast_in_dim", "stablehlo.constant")]
    assert zeros and set(zeros) == {outer}


@pytest.mark.parametrize("unrolled", [False, True])
def test_random_bits_are_made_for_one_part_at_a_time(unrolled: bool) -> None:
    found = with_microbatches(source_of(dropped_in_layers(unrolled=unrolled), STACK, arg(16, 4, 16)), 4)
    assert isinstance(found, Source)
    mixed = [line.rpartition(" : ")[2] for line in str(found.module).splitlines() if "stablehlo.xor" in line]
    assert "tensor<4x4x16xui32>" in mixed and "tensor<16x4x16xui32>" not in mixed


def printed(p: Params, x: Any, y: Any) -> Any:
    """Prints something of the weights, which is before the loop, and the loss, which is behind it."""
    jax.debug.print("{}", jnp.sum(p["a"]))
    loss = dense(p, x, y)
    jax.debug.print("{}", loss)
    return loss


def printed_in_layers(p: Params, x: Any) -> Any:
    def layer(x: Any, w: Any) -> Any:
        jax.debug.print("{}", jnp.sum(x))
        return jnp.tanh(x @ w), None

    return jnp.mean(lax.scan(layer, x, p["w"])[0] ** 2)


def test_what_is_printed_once_is_still_printed_once() -> None:
    found = with_microbatches(source_of(step(printed), DENSE, arg(16, 16), arg(16, 8)), 4)
    assert isinstance(found, Source)
    printing = [op for op in found.program.ops if op.name == "stablehlo.custom_call"]
    assert len(printing) == 2 and {op.trips for op in printing} == {1}
    refused = with_microbatches(source_of(step(printed_in_layers), STACK, arg(16, 16)), 4)
    assert isinstance(refused, str) and "reads a sum over the whole batch" in refused


@pytest.mark.parametrize("name", REFUSED)
def test_the_op_that_forbids_it_is_named(name: str) -> None:
    run, shapes, said = REFUSED[name]
    found = with_microbatches(source_of(run, *shapes), 4)
    assert isinstance(found, str) and said in found


def test_gradients_of_narrow_types_are_added_up_in_f32() -> None:
    shapes = jax.tree.map(lambda a: arg(*a.shape, dtype=jnp.bfloat16), (DENSE, arg(16, 16), arg(16, 8)))
    found = with_microbatches(source_of(step(dense), *shapes), 4)
    assert isinstance(found, Source)
    carried = [found.program.values[op.results[0]] for op in found.program.ops if op.name == "toast.carry"]
    assert {str(value) for value in carried} == {"i32[]", "f32[]", "f32[16,32]", "f32[32,8]"}


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_gradients_of_layers_are_added_up_row_by_row(dtype: Any) -> None:
    """Where the layers' loop makes them. The loops only carry the sum of all layers, and write its rows."""

    def loss(p: Params, x: Any) -> Any:
        return jnp.mean(lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, p["w"])[0] ** 2)

    found = with_microbatches(source_of(jax.grad(loss), {"w": arg(3, 16, 16, dtype=dtype)}, arg(8, 16, dtype=dtype)), 4)
    assert isinstance(found, Source)
    program = found.program
    made = {
        (op.name.rpartition(".")[2], str(program.values[v])) for op in program.ops if op.loop >= 0 for v in op.results
    }
    assert ("add", "f32[1,16,16]") in made
    stacks = {name for name, value in made if value == "f32[3,16,16]"} - {"carry"}
    assert stacks == {"dynamic_update_slice"}


OUTSIDE = """
func.func @main(%x: tensor<4x3xf32>, %y: tensor<8xf32>) -> (tensor<4x3xf32>, tensor<8xf32>) {
  %none = stablehlo.constant dense<0.0> : tensor<4x3xf32>
  %c0 = stablehlo.constant dense<0> : tensor<i32>
  %c1 = stablehlo.constant dense<1> : tensor<i32>
  %c4 = stablehlo.constant dense<4> : tensor<i32>
  %made:2 = stablehlo.while(%i = %c0, %stack = %none) : tensor<i32>, tensor<4x3xf32> cond {
    %more = stablehlo.compare LT, %i, %c4 : (tensor<i32>, tensor<i32>) -> tensor<i1>
    stablehlo.return %more : tensor<i1>
  } do {
    %row = stablehlo.dynamic_slice %x, %i, %c0, sizes = [1, 3]
      : (tensor<4x3xf32>, tensor<i32>, tensor<i32>) -> tensor<1x3xf32>
    %next = stablehlo.dynamic_update_slice %stack, %row, %i, %c0
      : (tensor<4x3xf32>, tensor<1x3xf32>, tensor<i32>, tensor<i32>) -> tensor<4x3xf32>
    %j = stablehlo.add %i, %c1 : tensor<i32>
    stablehlo.return %j, %next : tensor<i32>, tensor<4x3xf32>
  }
  %added:2 = stablehlo.while(%i = %c0, %sum = %none) : tensor<i32>, tensor<4x3xf32> cond {
    %more = stablehlo.compare LT, %i, %c4 : (tensor<i32>, tensor<i32>) -> tensor<i1>
    stablehlo.return %more : tensor<i1>
  } do {
    %next = stablehlo.add %sum, %made#1 : tensor<4x3xf32>
    %j = stablehlo.add %i, %c1 : tensor<i32>
    stablehlo.return %j, %next : tensor<i32>, tensor<4x3xf32>
  }
  %z = stablehlo.tanh %y : tensor<8xf32>
  return %added#1, %z : tensor<4x3xf32>, tensor<8xf32>
}
"""


def test_a_stack_that_is_made_before_the_loop_is_added_whole() -> None:
    found = with_microbatches(source_of_text(OUTSIDE), 2)
    assert isinstance(found, Source)
    stacks = [op for op in found.program.ops if op.name == "stablehlo.dynamic_update_slice" and op.loop >= 0]
    assert sorted(str(found.program.values[op.operands[1]]) for op in stacks) == ["f32[1,3]", "f32[1,4]"]


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A program whose activations are much larger than its weights."""
    path = tmp_path_factory.mktemp("wide") / "wide.mlir"
    shapes = ({"a": arg(128, 4096), "b": arg(4096, 128)}, arg(131072, 128), arg(131072, 128))
    path.write_text(jax.jit(step(dense), donate_argnums=0).lower(*shapes).as_text(debug_info=True))
    return str(path)


def test_it_is_chosen_only_where_nothing_else_fits(wide: str, tmp_path: Path) -> None:
    report, out = tmp_path / "report.json", tmp_path / "out.mlir"
    options = ["--mesh", "v5e-8", "--mesh-shape", "x=8", "--fit", "auto", "--iterations", "20", "--quiet"]

    def run(limit: int) -> tuple[int, dict[str, Any]]:
        code = toast("partition", wide, *options, "--memory-limit", f"{limit}B", "--json", str(report), "-o", str(out))
        return code, json.loads(report.read_bytes())

    code, written = run(2**33)
    assert code == 0 and written["program"]["microbatches"] == 1
    code, rewritten = run(int(0.7 * written["predicted"]["peak_bytes"]))
    assert code == 0 and rewritten["program"]["microbatches"] > 1
    assert any(note.startswith("made to fit: --microbatches") for note in rewritten["analysis"]["notes"])
    out.unlink()
    code, stopped = run(2**16)
    assert code == 3 and stopped["program"]["microbatches"] == 1 and not out.exists()
    assert any(note.startswith("cannot be made to fit") for note in stopped["analysis"]["notes"])


def test_options_that_fail_for_one_reason_share_it() -> None:
    whys = [
        "--recompute all: it saves nothing",
        "it needs 2 GiB",
        "--recompute some: it saves nothing",
        "it needs 2 GiB",
    ]
    assert by_reason(whys) == "--recompute all, --recompute some: it saves nothing; it needs 2 GiB"


@pytest.mark.parametrize(
    ("share", "risk", "microbatches", "notice"),
    [
        (1 / 1.1, RISK, 2, "made to fit: --microbatches 2: +"),  # the plan as written exceeds the limit by 10 %
        (1.1, RISK, 2, "made to fit: --microbatches 2: +"),  # it may not fit, and what surely fits is hardly slower
        (1.1, 0.0, 1, "surely fits: --microbatches 2: +"),
    ],
)
def test_a_plan_that_may_not_fit_gives_way_to_one_that_surely_does(
    share: float, risk: float, microbatches: int, notice: str, wide: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("toast_cli.search.incumbent.RISK", risk)
    request = Request(wide, "v5e-8", "x=8", iterations=20)
    peak = partition(request, annotated=False).report.predicted.peak_bytes
    report = partition(replace(request, memory_limit=int(share * peak)), annotated=False).report
    assert report.program.microbatches == microbatches
    assert report.fit == ("yes" if microbatches > 1 else "unsure")
    assert any(note.startswith(notice) for note in report.analysis.notes)


def test_a_plan_for_a_rewritten_program_says_so_everywhere(
    wide: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = [wide, "--mesh", "v5e-8", "--mesh-shape", "x=8", "--memory-limit", "500MiB", "--iterations", "20"]
    shardings, table = tmp_path / "shardings.py", tmp_path / "sweep.csv"

    def said(command: str, *more: str, code: int = 0) -> str:
        assert toast(command, *options, *more) == code
        return " ".join(capsys.readouterr().out.split())  # lines are as long as the program's path lets them be

    assert "FSDP; in 2 microbatches" in said("partition", "--quiet", "--strategy", "fsdp")
    assert "in 2 microbatches" in said("partition", "-o", str(shardings)).rpartition("wrote")[2]
    assert shardings.read_text().startswith("# These are shardings of the program in 2 microbatches: ")
    assert "in 2 microbatches" in said("check")
    assert "FAILED fits" in said("check", "--fit", "as-written", code=1)
    assert "in 2 microbatches" in said("sweep", "--csv", str(table))
    assert "in 2 microbatches" in table.read_text()
    assert "★" not in said("sweep", "--fit", "as-written", code=3)


def test_a_saved_plan_and_a_report_say_how_many_parts(wide: str, tmp_path: Path) -> None:
    plan, report = tmp_path / "plan.json", tmp_path / "report.json"
    mesh = ["--mesh", "v5e-8", "--mesh-shape", "x=8", "--quiet"]
    options = ["--microbatches", "4", "--iterations", "20", "--save-plan", str(plan), "--json", str(report)]
    assert toast("partition", wide, *mesh, *options) == 0
    first = json.loads(report.read_bytes())
    assert toast("partition", wide, *mesh, "--plan", str(plan), "--json", str(report)) == 0
    again = json.loads(report.read_bytes())
    assert again["program"]["microbatches"] == 4
    assert again["predicted"]["step_seconds"] == first["predicted"]["step_seconds"]
    assert toast("explain", wide, "--mesh", "v5e-8", "--report", str(report), "--quiet") == 0


def test_a_number_that_cannot_be_is_an_error(wide: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert toast("partition", wide, "--mesh", "v5e-8", "--microbatches", "3", "--quiet") == 2
    assert "no 3 equal parts" in capsys.readouterr().err


def test_a_saved_plan_whose_parts_cannot_be_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program, plan = tmp_path / "square.mlir", tmp_path / "plan.json"
    program.write_text(jax.jit(lambda w: w @ w).lower(arg(64, 64)).as_text())
    mesh, facts = ["--mesh", "v5e-8", "--quiet"], {"schema": "toast.plan/1", "program": "", "axes": {"x": 8}}
    plan.write_text(json.dumps(facts | {"decisions": [], "microbatches": 4}))
    assert toast("partition", str(program), *mesh, "--plan", str(plan)) == 2
    said = capsys.readouterr().err
    assert f"error: {plan}: the batch cannot be run in 4 microbatches" in said and "--microbatches 1" in said
    assert toast("partition", str(program), *mesh, "--plan", str(plan), "--microbatches", "1") == 0
    plan.write_text(json.dumps(facts | {"decisions": [], "microbatches": 0}))
    assert toast("partition", str(program), *mesh, "--plan", str(plan)) == 2
    assert "the plan is damaged: microbatches is 0" in capsys.readouterr().err
