"""What the backward pass reads is computed again, or kept where it was computed again: the same numbers, how much is
saved and computed, and when it is chosen."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checking import toast
from jax import lax
from programs import arg, source_of
from run_here import run_program
from sweeps import sweep

from toast_cli import xla
from toast_cli.ask_xla.confirm import Compiled
from toast_cli.ask_xla.numbers import input_sets, relative_error
from toast_cli.candidates import fitting
from toast_cli.candidates.variants import Variant, search_variants
from toast_cli.frontend import Source, load
from toast_cli.pipeline import partition
from toast_cli.request import Recompute, Request
from toast_cli.rewrite import kept_bytes, with_microbatches, with_recompute
from toast_cli.rewrite.block_graph import BlockGraph, least_kept
from toast_cli.rewrite.recompute import EqualValues, Lifetimes, checkpoints

Tree = dict[str, Any]
ALL, CHEAP, BATCHED = Recompute.all, Recompute.all_but_products, Recompute.all_but_weight_products
LAYERS = 3


def step(loss: Callable[..., Any]) -> Callable[..., Any]:
    def run(params: Tree, *inputs: Any) -> Any:
        value, gradients = jax.value_and_grad(loss)(params, *inputs)
        return jax.tree.map(lambda w, d: w - 0.1 * d, params, gradients), value

    return run


def block(x: Any, w: Tree) -> Any:
    """Attention with one head, and an MLP."""
    n = x / jnp.sqrt(1e-3 + jnp.mean(x * x, -1, keepdims=True))
    scores = jnp.einsum("bqd,bkd->bqk", n @ w["q"], n @ w["k"])
    scores = jnp.where(jnp.tril(jnp.ones((x.shape[1], x.shape[1]), bool)), scores, -1e9)
    x = x + jnp.einsum("bqk,bkd->bqd", jax.nn.softmax(scores), n)
    return x + jax.nn.gelu(x @ w["i"]) @ w["o"]


def decoder(*, scanned: bool, wrap: Callable[..., Any] = lambda f: f, reverse: bool = False) -> Callable[..., Any]:
    def loss(p: Tree, tokens: Any) -> Any:
        x = p["e"][tokens]
        if scanned:
            x, _ = lax.scan(lambda x, w: (wrap(block)(x, w), None), x, p["l"], reverse=reverse)
        else:
            for n in range(LAYERS):
                x = wrap(block)(x, jax.tree.map(lambda w, n=n: w[n], p["l"]))
        return -jnp.mean(jax.nn.log_softmax(x @ p["e"].T)[..., 0])

    return loss


def perceptron(p: Tree, x: Any) -> Any:
    """Its gradients save two arrays a layer in every version of JAX; tanh's save one or two."""
    for n in range(len(p["a"])):
        y = x @ p["a"][n]
        x = x + (y * jnp.sin(y)) @ p["b"][n]
    return jnp.mean(x * x)


def dropped(p: Tree, x: Any) -> Any:
    for n in range(6):
        kept = jax.random.bernoulli(jax.random.fold_in(jax.random.key(1), n), 0.5, (x.shape[0], 32))
        x = x + (jnp.tanh(x @ p["a"][n]) * kept) @ p["b"][n]
    return jnp.mean(x * x)


def images(p: Tree, x: Any) -> Any:
    for n in range(3):
        y = lax.conv_general_dilated(x, p["k"][n], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        y = (y - y.mean((0, 1, 2))) / jnp.sqrt(1e-3 + y.var((0, 1, 2)))
        x = x + jax.nn.relu(y)
    return jnp.mean(x * x)


def recurrent(p: Tree, x: Any) -> Any:
    """The index of the time step is read too."""

    def cell(h: Any, it: Any) -> Any:
        n, x = it
        gate = jax.nn.sigmoid(x @ p["g"] + h @ p["h"] + n / 5)
        return gate * jnp.tanh(x @ p["a"] + h @ p["b"]) + (1 - gate) * h, None

    h, _ = lax.scan(cell, jnp.zeros((x.shape[1], 16)), (jnp.arange(x.shape[0], dtype=jnp.float32), x))
    return jnp.mean(h * h)


def waves(p: Tree, x: Any) -> Any:
    """Layers pass on complex numbers."""

    def layer(z: Any, w: Tree) -> Any:
        z = z + jnp.sin(z) * (1 + 2j)
        return lax.complex(jnp.tanh((z.real + z.imag) @ w["a"]) @ w["b"], z.real), None

    return jnp.mean(jnp.abs(lax.scan(layer, lax.complex(x, x), p)[0]) ** 2)


WEIGHTS = {
    "e": arg(32, 16),
    "l": {"q": arg(LAYERS, 16, 12), "k": arg(LAYERS, 16, 12), "i": arg(LAYERS, 16, 64), "o": arg(LAYERS, 64, 16)},
}
TOKENS = arg(8, 24, dtype=jnp.int32)
DENSE = {"a": arg(6, 16, 32), "b": arg(6, 32, 16)}
PROGRAMS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "unrolled": (step(decoder(scanned=False)), (WEIGHTS, TOKENS)),
    "scanned": (step(decoder(scanned=True)), (WEIGHTS, TOKENS)),
    "scanned from the last": (step(decoder(scanned=True, reverse=True)), (WEIGHTS, TOKENS)),
    "perceptron": (step(perceptron), (DENSE, arg(40, 16))),
    "dropout": (step(dropped), (DENSE, arg(40, 16))),
    "images": (step(images), ({"k": arg(3, 3, 3, 8, 8)}, arg(4, 12, 12, 8))),
    "waves": (step(waves), (DENSE, arg(40, 16))),
    "recurrent": (step(recurrent), ({name: arg(16, 16) for name in "ghab"}, arg(5, 8, 16))),
}


def same_numbers(before: Source, after: Source) -> bool:
    inputs = input_sets(before.module, 1, 1)[0]
    shapes = [tuple(kind.shape) for kind in xla.main_function(before.module).type.results]
    programs = [xla.write_bytecode(one.module) for one in (before, after)]
    first, second = (run_program(one, inputs, shapes, 1, shardy=True) for one in programs)
    return max(relative_error(a, b) for a, b in zip(first, second, strict=True)) < 1e-5


def rewritten(source: Source, policy: Recompute) -> Source:
    found = with_recompute(source, policy)
    assert isinstance(found, Source), found
    assert found.program.recompute == policy
    return found


def products(source: Source) -> float:
    return sum(op.trips for op in source.program.ops if op.kind.matrix_unit)


def saved_bytes(source: Source) -> int:
    """The most that is alive at a time between a reader and a later reader of it, in the entry function."""
    graph = BlockGraph(xla.main_function(source.module).entry_block)
    alive = np.zeros(len(graph.operations) + 1, dtype=np.int64)
    for value in graph.place:
        readers = graph.readers.get(value, [0])
        alive[graph.place[value] : readers[-1]] += graph.size(value)
    return int(alive.max())


@pytest.mark.parametrize(
    ("name", "policy"),
    sweep(
        product(PROGRAMS, Recompute),
        *product(("scanned",), Recompute),
        *((name, list(Recompute)[number % 3]) for number, name in enumerate(PROGRAMS) if "scan" not in name),
        ("scanned from the last", BATCHED),
    ),
)
def test_numbers_are_the_same_and_less_is_saved(name: str, policy: Recompute) -> None:
    run, shapes = PROGRAMS[name]
    source = source_of(run, *shapes)
    found = rewritten(source, policy)
    assert same_numbers(source, found)
    assert saved_bytes(found) < 0.85 * saved_bytes(source)
    again = policy is ALL or (policy is BATCHED and name.startswith(("unrolled", "scanned")))
    assert (products(found) > products(source)) == again


def stacked(source: Source) -> list[str]:
    """What loops stack up for other loops, by type."""
    program = source.program
    carried = {op.results[0] for op in program.ops if op.name == "toast.carry"}
    return sorted(
        str(program.values[op.operands[1]])
        for op in program.ops
        if op.name == "stablehlo.dynamic_update_slice" and op.operands[0] in carried and op.loop == 0
    )


def test_a_scan_stacks_up_inputs_of_layers_or_products() -> None:
    source = source_of(*(PROGRAMS["scanned"][0], *PROGRAMS["scanned"][1]))
    assert stacked(rewritten(source, ALL)) == ["f32[1,8,24,16]"]
    # q, k, scores, what the MLP multiplies, and the two sums that make the layer's input and the MLP's
    kept = ["f32[1,8,24,12]"] * 2 + ["f32[1,8,24,16]"] * 2 + ["f32[1,8,24,24]", "f32[1,8,24,64]"]
    assert stacked(rewritten(source, CHEAP)) == kept
    assert stacked(rewritten(source, BATCHED)) == [
        *kept[:3],
        kept[-1],
    ]  # scores, and the sum behind them, are made again


@pytest.mark.parametrize("policy", Recompute)
def test_the_program_is_the_same_each_time(policy: Recompute) -> None:
    source = source_of(*(PROGRAMS["scanned"][0], *PROGRAMS["scanned"][1]))
    assert len({str(rewritten(source, policy).module) for _ in range(2)}) == 1


def test_what_is_made_again_is_read_as_it_is() -> None:
    """And not as a part of a stack that there no longer is."""
    program = rewritten(source_of(*(PROGRAMS["scanned"][0], *PROGRAMS["scanned"][1])), ALL).program
    makers = [program.ops[number] for number in program.producer]
    for op in program.ops:
        if op.name == "stablehlo.reshape" and makers[op.operands[0]].name == "stablehlo.broadcast_in_dim":
            before, shape = makers[op.operands[0]].operands[0], program.values[op.results[0]].shape
            assert program.values[before].shape != shape


@pytest.mark.parametrize(("kept", "scanned"), [("dots_saveable", False), ("dots_with_no_batch_dims_saveable", True)])
def test_what_a_program_recomputes_is_kept(kept: str, scanned: bool) -> None:
    """As JAX's policy would have it."""
    full = source_of(step(decoder(scanned=scanned, wrap=jax.checkpoint)), WEIGHTS, TOKENS)
    policy = getattr(jax.checkpoint_policies, kept)
    dots = source_of(step(decoder(scanned=scanned, wrap=lambda f: jax.checkpoint(f, policy=policy))), WEIGHTS, TOKENS)
    found = rewritten(full, CHEAP if kept == "dots_saveable" else BATCHED)
    assert same_numbers(full, found)
    assert products(found) == products(dots) < products(full)


@pytest.mark.parametrize(
    "neutral", [lambda x, zero: x - zero, lambda x, zero: zero + x, lambda x, zero: x * (zero + 1)]
)
def test_numbers_that_change_nothing_do_not_hide_what_is_recomputed(neutral: Callable[..., Any]) -> None:
    """The forward loop carries the zeros, and the backward loop makes them: a norm of Flax subtracts no mean so."""

    def layer(x: Any, w: Any) -> Any:
        zero = jnp.zeros(x.shape[:-1])[..., None]
        x = jnp.tanh(jnp.tanh(neutral(x, zero) @ w) @ w)
        return x, None

    full = source_of(step(lambda p, x: jnp.mean(lax.scan(jax.checkpoint(layer), x, p)[0])), arg(3, 16, 16), arg(8, 16))
    found = rewritten(full, BATCHED)
    assert same_numbers(full, found)
    assert (products(full), products(found)) == (3 * 8, 3 * 6)


def test_a_batch_in_parts_recomputes_too() -> None:
    for name in ("perceptron", "scanned"):
        run, shapes = PROGRAMS[name]
        source = source_of(run, *shapes)
        found = with_microbatches(rewritten(source, ALL), 4)
        assert isinstance(found, Source), found
        assert found.program.recompute == ALL and found.program.microbatches == 4
        assert same_numbers(source, found)


def test_a_program_without_a_backward_pass_has_nothing_to_recompute() -> None:
    found = with_recompute(source_of(decoder(scanned=False), WEIGHTS, TOKENS), ALL)
    assert isinstance(found, str) and "saves nothing" in found


def test_random_bits_are_kept() -> None:
    def loss(p: Tree, key: Any, x: Any) -> Any:
        for n in range(6):
            key, bits = lax.rng_bit_generator(key, (x.shape[0], 32), dtype=jnp.uint32)
            x = x + jnp.where(bits > 2**30, jnp.tanh(x @ p["a"][n]), 0) @ p["b"][n]
        return jnp.mean(x * x)

    found = rewritten(source_of(step(loss), DENSE, arg(4, dtype=jnp.uint32), arg(64, 16)), ALL)
    assert sum(op.name == "stablehlo.rng_bit_generator" for op in found.program.ops) == 6


TWO_LOOPS = """
func.func @main(%n: tensor<i32>, %x: tensor<2x2xf32>) -> (tensor<2x2xf32>, tensor<2x2xf32>, tensor<2x2xf32>) {{
  %one = stablehlo.constant dense<1> : tensor<i32>
  %0:3 = stablehlo.while(%i = %one, %a = %x, %b = %x) : tensor<i32>, tensor<2x2xf32>, tensor<2x2xf32>
    cond {{ %c = stablehlo.compare LT, %i, %n : (tensor<i32>, tensor<i32>) -> tensor<i1>
           stablehlo.return %c : tensor<i1> }}
    do {{ %j = stablehlo.add %i, %one : tensor<i32>
         %s = stablehlo.multiply %a, %a : tensor<2x2xf32>
         %r = stablehlo.add %s, %b : tensor<2x2xf32>
         stablehlo.return %j, %r, %b : tensor<i32>, tensor<2x2xf32>, tensor<2x2xf32> }}
  %1:3 = stablehlo.while(%i = %one, %a = %x, %b = %x) : tensor<i32>, tensor<2x2xf32>, tensor<2x2xf32>
    cond {{ %c = stablehlo.compare LT, %i, %n : (tensor<i32>, tensor<i32>) -> tensor<i1>
           stablehlo.return %c : tensor<i1> }}
    do {{ %j = stablehlo.add %i, %one : tensor<i32>
         %s = stablehlo.multiply %a, %a : tensor<2x2xf32>
         %r = stablehlo.add %s, %{second} : tensor<2x2xf32>
         stablehlo.return %j, %r, %b : tensor<i32>, tensor<2x2xf32>, tensor<2x2xf32> }}
  %2 = stablehlo.broadcast_in_dim %x, dims = {dims} : (tensor<2x2xf32>) -> tensor<2x2xf32>
  %3 = stablehlo.reshape %2 : (tensor<2x2xf32>) -> tensor<2x2xf32>
  return %0#1, %1#1, %3 : tensor<2x2xf32>, tensor<2x2xf32>, tensor<2x2xf32>
}}"""


@pytest.mark.parametrize(("second", "dims", "equal"), [("b", [0, 1], True), ("s", [1, 0], False)])
def test_which_values_are_equal(second: str, dims: list[int], equal: bool) -> None:
    """Two loops, and an array that a broadcast reshapes, or transposes."""
    module = xla.parse_module(xla.make_context(), TWO_LOOPS.format(second=second, dims=dims).encode())
    values = EqualValues()
    *operations, last = (view.operation for view in xla.main_function(module).entry_block.operations)
    for operation in operations:
        values.number(operation)
    first, other, turned = last.operands
    assert (values.of(other) == first) == (values.of(turned) == xla.main_function(module).arguments[1]) == equal


def test_the_fewest_bytes_are_kept() -> None:
    # 0 is there, 1 = f(0) cannot be made again, 2 = g(1) is large, 3 = h(2) is needed
    chain = ((), None, (1,), (2,))
    assert least_kept(chain, (9, 4, 8, 6), (3,)) == {1}
    assert least_kept(chain, (9, 7, 8, 6), (3,)) == {3}
    assert least_kept(chain, (9, 6, 8, 6), (3,)) == {3}  # of equal ones the last
    assert least_kept(((), (0,), (1,), (2,)), (9, 4, 8, 6), (3,)) == set()
    assert least_kept((None, (0,), (0,)), (5, 4, 4), (1, 2)) == {0}


def test_what_a_policy_keeps_is_known_before_it_is_written() -> None:
    """Of all layers but the last, which is not computed again, the product with 40 x 32 numbers."""
    kept = kept_bytes(source_of(*(PROGRAMS["perceptron"][0], *PROGRAMS["perceptron"][1])))
    assert (kept[CHEAP], kept[BATCHED], kept[ALL]) == (5 * 4 * 40 * 32, 5 * 4 * 40 * 32, 0)
    assert kept[None] > 2 * kept[CHEAP]  # that, and what is computed from it
    assert not kept_bytes(source_of(*(PROGRAMS["scanned"][0], *PROGRAMS["scanned"][1])))  # loops have stacks


def test_cuts_are_between_layers() -> None:
    """Four layers of three operations: an input of 1 byte, and 10 bytes that the backward pass reads."""
    made = np.arange(12)
    last = np.array([1, 2, 3] * 4) + np.repeat(np.arange(0, 12, 3), 3)
    sizes = np.array([10, 10, 1] * 4)
    lives = Lifetimes(made, last, sizes == 10, sizes)
    assert checkpoints(lives, 12) == ((3, 6, 9), 3 + 20)


POLICY = "all-but-weight-products"  # the cheapest that makes the program below fit


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A program of which nearly all memory holds what is saved, and of one example."""
    return write_deep(tmp_path_factory.mktemp("deep"), 3)


def write_deep(folder: Path, layers: int) -> str:
    path = folder / "deep.mlir"
    shapes = {"a": arg(layers, 128, 4096), "b": arg(layers, 4096, 128)}
    run = jax.jit(step(perceptron), donate_argnums=0).lower(shapes, arg(65536, 128))
    path.write_text(run.as_text(debug_info=True))
    return str(path)


def report_of(program: str, tmp_path: Path, *options: str) -> tuple[int, dict[str, Any]]:
    report = tmp_path / "report.json"
    mesh = ["--mesh", "v5e-8", "--mesh-shape", "x=8", "--quiet", "--json", str(report)]
    code = toast("partition", program, *mesh, *options)
    return code, json.loads(report.read_bytes())


def is_rewritten(report: dict[str, Any]) -> bool:
    """Whether the program recomputes or runs in microbatches; which is cheaper depends on how JAX lowers it."""
    return bool(report["program"]["recompute"]) or report["program"]["microbatches"] > 1


@pytest.fixture(scope="module")
def bound(deep: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Four fifths of the memory that the program needs as it is written."""
    code, written = report_of(deep, tmp_path_factory.mktemp("written"), "--iterations", "12")
    assert code == 0 and written["program"]["recompute"] == ""
    return f"{int(0.8 * written['predicted']['peak_bytes'])}B"


def test_it_is_chosen_where_nothing_else_fits(deep: str, bound: str, tmp_path: Path) -> None:
    fast, limit = ["--iterations", "12"], ["--memory-limit", bound]
    assert report_of(deep, tmp_path, *fast, *limit, "--fit", "as-written")[0] == 3
    code, found = report_of(deep, tmp_path, *fast, *limit)
    assert code == 0 and is_rewritten(found)
    notes = found["analysis"]["notes"]
    assert any(note.startswith(("made to fit: --recompute", "made to fit: --microbatches")) for note in notes)


def test_it_is_chosen_where_a_bound_on_memory_does_not_hold(deep: str, bound: str, tmp_path: Path) -> None:
    code, found = report_of(deep, tmp_path, "--iterations", "12", "--subject-to", f"peak_memory<={bound}")
    assert code == 0 and is_rewritten(found) and found["predicted"]["peak_bytes"] <= int(bound[:-1])


def test_a_bound_on_time_that_no_variant_keeps_is_said(deep: str, bound: str, tmp_path: Path) -> None:
    limit = ["--memory-limit", bound, "--subject-to", "step_time<=1us"]
    code, found = report_of(deep, tmp_path, "--iterations", "12", *limit)
    assert code == 3 and any("breaks a --subject-to bound" in note for note in found["analysis"]["notes"])


def test_a_policy_that_is_expected_to_keep_too_much_is_not_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def noted(source: Source, policy: Recompute) -> Source | str:
        tried.append(policy)
        return with_recompute(source, policy)

    tried: list[Recompute] = []
    monkeypatch.setattr(fitting, "with_recompute", noted)
    monkeypatch.setattr(fitting, "kept_bytes", lambda source: {None: 100, CHEAP: 99, BATCHED: 99, ALL: 0})
    request = Request(write_deep(tmp_path, 6), "v5e-8", mesh_shape="x=8", iterations=12, memory_limit=400 * 2**20)
    assert partition(request, annotated=False).report.program.recompute == ALL and tried == [ALL]


class Refuses:
    """A compiler for which programs fit if they recompute."""

    label, identity, knows_memory, partitioner = "XLA:TPU", ("test",), True, None

    def judge(self, content: bytes, timeout_seconds: float) -> Compiled:
        fits = b"optimization_barrier" in content
        return Compiled("compiled", "", 1e-3, peak_bytes=1) if fits else Compiled("out of memory", "exceeds HBM")


def test_it_is_chosen_where_the_compiler_refuses_and_asked_about(
    deep: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("toast_cli.candidates.ask_compiler.compiler_for", lambda spec, name: lambda mesh: Refuses())
    fast = ["--iterations", "12"]
    code, found = report_of(deep, tmp_path, *fast, "--confirm", "2")
    assert code == 0 and found["program"]["recompute"] == POLICY and found["confirmation"]["chosen"]
    code, found = report_of(deep, tmp_path, *fast, "--confirm", "1", "--fit", "as-written")
    assert code == 3 and found["confirmation"]["rejected"]


class RefusesAll(Refuses):
    """A compiler for which nothing fits."""

    def judge(self, content: bytes, timeout_seconds: float) -> Compiled:
        return Compiled("out of memory", "exceeds HBM")


def test_where_the_compiler_refuses_all_variants_the_report_says_what_was_tried(
    deep: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("toast_cli.candidates.ask_compiler.compiler_for", lambda spec, name: lambda mesh: RefusesAll())
    code, found = report_of(deep, tmp_path, "--iterations", "12", "--confirm", "1")
    assert code == 3 and found["confirmation"]["rejected"]
    assert found["program"]["recompute"] or found["program"]["microbatches"] > 1


@pytest.mark.parametrize("number", [1, 4])
def test_a_search_that_the_user_ends_is_followed_by_no_other(
    number: int, deep: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fourth search is the longer look at a variant that nearly fits."""

    def ended(*arguments: Any) -> list[Variant]:
        (found,) = search_variants(*arguments)
        searched.append(found)
        assert len(searched) <= number, "another variant is searched"
        stopped = "interrupted" if len(searched) == number else found.result.stopped
        return [replace(found, result=replace(found.result, stopped=stopped))]

    searched: list[Variant] = []
    monkeypatch.setattr("toast_cli.candidates.fitting.search_variants", ended)
    request = Request(deep, "v5e-8", iterations=12, memory_limit=150 * 2**20)
    found = partition(request, annotated=False)
    assert len(searched) == number and found.result.stopped == "interrupted"


class RefusesOneVariant(Refuses):
    """A compiler for which programs fit only if they are in more than two parts."""

    def judge(self, content: bytes, timeout_seconds: float) -> Compiled:
        source = load("written.mlir", content=content)
        fits = max((loop.trips for loop in source.program.loops), default=1) > 2
        return Compiled("compiled", "", 1e-3, peak_bytes=1) if fits else Compiled("out of memory", "exceeds HBM")


def test_a_variant_that_the_compiler_refuses_is_followed_by_another_of_the_program_as_written(
    deep: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(
        "toast_cli.candidates.ask_compiler.compiler_for", lambda spec, name: lambda mesh: RefusesOneVariant()
    )
    monkeypatch.setattr(fitting, "with_recompute", lambda source, policy: "nothing recomputed, please")
    limit = ["--iterations", "12", "--memory-limit", "350MiB"]
    code, first = report_of(deep, tmp_path, *limit)
    assert code == 0 and first["program"]["microbatches"] == 2
    code, found = report_of(deep, tmp_path, *limit, "--confirm", "1")
    assert code == 0 and found["program"]["microbatches"] == 4
    assert sum(note.startswith("made to fit") for note in found["analysis"]["notes"]) == 1


def test_parts_are_tried_without_recomputing_where_both_do_not_go_together(
    deep: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def alone(source: Source, parts: int) -> Source | str:
        return "nothing recomputed, please" if source.program.recompute else with_microbatches(source, parts)

    monkeypatch.setattr(fitting, "with_microbatches", alone)
    code, found = report_of(deep, tmp_path, "--iterations", "12", "--memory-limit", "200MiB")
    assert code == 0 and found["program"]["recompute"] == "" and found["program"]["microbatches"] > 1


def test_products_are_kept_where_that_is_faster(tmp_path: Path) -> None:
    def loss(p: Tree, x: Any) -> Any:
        layer = jax.checkpoint(lambda x, w: (x + jnp.tanh(jnp.tanh(x @ w["a"]) @ w["b"]), None))
        return jnp.mean(lax.scan(layer, x, p)[0] ** 2)

    path = tmp_path / "full.mlir"
    shapes = {"a": arg(6, 2048, 2048), "b": arg(6, 2048, 2048)}
    path.write_text(jax.jit(step(loss), donate_argnums=0).lower(shapes, arg(2**16, 2048)).as_text())
    _, written = report_of(str(path), tmp_path, "--iterations", "12")
    code, found = report_of(str(path), tmp_path, "--iterations", "12", "--fit", "fastest")
    assert code == 0 and found["program"]["recompute"] == "all-but-weight-products"
    assert found["program"]["flops"] < 0.9 * written["program"]["flops"]
    assert found["predicted"]["step_seconds"] < 0.95 * written["predicted"]["step_seconds"]


def test_saved_plans_and_reports_say_it(deep: str, tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    _, first = report_of(deep, tmp_path, "--recompute", "all", "--iterations", "20", "--save-plan", str(plan))
    code, again = report_of(deep, tmp_path, "--plan", str(plan))
    assert code == 0 and again["program"]["recompute"] == "all"
    assert again["predicted"]["step_seconds"] == first["predicted"]["step_seconds"]
    assert toast("explain", deep, "--mesh", "v5e-8", "--report", str(tmp_path / "report.json"), "--quiet") == 0
    _, less = report_of(deep, tmp_path, "--plan", str(plan), "--recompute", "all-but-products")
    assert less["program"]["recompute"] == "all-but-products"


def test_a_saved_plan_is_taken_where_there_is_nothing_to_recompute(deep: str, tmp_path: Path) -> None:
    plan, own = tmp_path / "plan.json", tmp_path / "own.mlir"
    report_of(deep, tmp_path, "--recompute", "all", "--iterations", "20", "--save-plan", str(plan))
    own.write_text(
        jax.jit(perceptron).lower({"a": arg(3, 128, 4096), "b": arg(3, 4096, 128)}, arg(65536, 128)).as_text()
    )
    code, found = report_of(str(own), tmp_path, "--plan", str(plan))
    assert code == 0 and found["program"]["recompute"] == ""
    assert any("nothing to recompute" in note for note in found["analysis"]["notes"])


def test_what_cannot_be_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "forward.mlir"
    path.write_text(jax.jit(decoder(scanned=True)).lower(WEIGHTS, TOKENS).as_text())
    assert toast("partition", str(path), "--mesh", "v5e-8", "--recompute", "all", "--quiet") == 2
    assert "nothing to recompute" in capsys.readouterr().err
