"""Pipeline stages: their price by hand, in all forms of a stack, and what is refused."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from programs import LINK_BYTES_PER_SECOND, arg, evaluator_of, round_mesh, source_of
from report_sample import make_report

from toast_cli.base.errors import UsageError
from toast_cli.candidates.stage_plans import StageOptions, best_stages
from toast_cli.cli.app import run
from toast_cli.frontend import Source
from toast_cli.hardware import Mesh, load_spec, parse_shape
from toast_cli.pipeline import Outcome, plan_given
from toast_cli.price.cost import Cost
from toast_cli.price.pipelines import (
    CIRCULAR,
    GPIPE,
    ONE_F_ONE_B,
    PricedPipeline,
    StageRequest,
    parse_stages,
    pipelines,
    stage_mesh,
)
from toast_cli.program.stack import LAYERS, find_stack
from toast_cli.report.command_tables import row_of, rows_table
from toast_cli.report.comparison import PIPELINE, compare, with_contender, with_pipeline
from toast_cli.report.style import make_console, render
from toast_cli.report.terminal import print_report
from toast_cli.request import Request
from toast_cli.tactics import parse_tactics
from toast_cli.tactics.strategies import priced_strategy

LAYERS_OF_ALL, BATCH, WIDTH = 8, 4096, 256


def layer(x: Any, w: Any) -> Any:
    return x + jnp.tanh(x @ w["up"]) @ w["down"]


@cache
def trained(form: str = "scanned", batch: int = BATCH, width: int = WIDTH, layers: int = LAYERS_OF_ALL) -> Source:
    """A step of a stack of residual layers with momentum. form: "scanned", "transposed" (layers are the second
    dimension of weights), "unrolled", "repeated" (two microbatches of its own) or "forward"."""
    remade = jax.checkpoint(layer)

    def loss(params: Any, x: Any) -> Any:
        if form == "unrolled":
            for w in params:
                x = remade(x, w)
        else:
            stacked = jax.tree.map(lambda w: jnp.moveaxis(w, 1, 0), params) if form == "transposed" else params
            x = lax.scan(lambda y, w: (remade(y, w), None), x, stacked)[0]
        return jnp.mean(x**2)

    def gradients(params: Any, x: Any) -> Any:
        if form != "repeated":
            return jax.grad(loss)(params, x)
        zeros = jax.tree.map(jnp.zeros_like, params)
        add = lambda sums, part: (jax.tree.map(jnp.add, sums, jax.grad(loss)(params, part)), None)  # noqa: E731
        return lax.scan(add, zeros, x.reshape(2, -1, width))[0]

    def step(params: Any, moments: Any, x: Any) -> Any:
        moments = jax.tree.map(lambda m, g: 0.9 * m + g, moments, gradients(params, x))
        return jax.tree.map(lambda w, m: w - 0.1 * m - 0.01 * w, params, moments), moments

    one = {"up": (width, width), "down": (width, width)}
    if form == "unrolled":
        params: Any = [{name: arg(*shape) for name, shape in one.items()}] * layers
    elif form == "transposed":
        params = {name: arg(shape[0], layers, shape[1]) for name, shape in one.items()}
    else:
        params = {name: arg(layers, *shape) for name, shape in one.items()}
    if form == "forward":
        return source_of(loss, params, arg(batch, width))
    return source_of(step, params, params, arg(batch, width), donate=(0, 1))


def priced(
    source: Source, mesh: Mesh, microbatches: int, schedule: str = ONE_F_ONE_B, repeats: int = 1, inside: str = ""
) -> PricedPipeline:
    """A pipeline over the mesh's first axis."""
    request = StageRequest(axis=mesh.names[0], microbatches=microbatches)
    planned = best_stages(source, mesh, request, StageOptions(state=parse_tactics(strategy=inside or "fsdp").state))
    assert planned is not None
    found = pipelines(planned.evaluator, planned.plan, planned.stack, mesh, (0, mesh.sizes[0]))
    return next(p for p in found if (p.schedule, p.repeats) == (schedule, repeats))


@pytest.mark.parametrize(
    ("stages", "microbatches", "schedule", "repeats", "bubble"),
    [
        (2, 8, ONE_F_ONE_B, 1, 1),
        (4, 8, ONE_F_ONE_B, 1, 3),
        (8, 16, GPIPE, 1, 7),
        (4, 8, CIRCULAR, 2, 3 / 2),
        (8, 16, ONE_F_ONE_B, 1, 7),
        (4, 8, ONE_F_ONE_B, 2, 3 / 2),
        (2, 32, CIRCULAR, 4, 1 / 4),
    ],
)
def test_the_bubble_is_that_of_the_textbook(
    stages: int, microbatches: int, schedule: str, repeats: int, bubble: float
) -> None:
    """In microbatches: S - 1, or (S - 1) / R where a stage has R parts."""
    found = priced(trained(), round_mesh(stage=stages), microbatches, schedule, repeats)
    one = found.microbatch_seconds
    assert found.idle_seconds == pytest.approx(bubble * one, rel=0.06)  # the last stage has the loss
    update = found.cost.compute_seconds - microbatches * one
    weights = 2 * LAYERS_OF_ALL * WIDTH * WIDTH * 4 / stages
    # It reads gradients, moments and weights, writes two of them, and may pass over them once more. The first stage
    # also turns the examples into microbatches.
    turned = 2 * BATCH * WIDTH * 4
    assert 5 * weights <= 1e9 * update - turned <= 8 * weights
    assert found.cost.step_seconds == pytest.approx(
        microbatches * one + found.idle_seconds + update + found.cost.communication_seconds
    )


def test_transfers_and_the_activations_that_wait() -> None:
    """A hop takes [B / M, width] of f32 over one link. GPipe waits for M + S - 1 of them each way, 1F1B for
    S R - 1; it keeps S microbatches of M, and S + (S - 1) / R with R parts a stage."""
    stages, microbatches = 4, 8
    mesh = round_mesh(stage=stages)
    hop = BATCH / microbatches * WIDTH * 4 / LINK_BYTES_PER_SECOND
    fast, plain, circular, interleaved = (
        priced(trained(), mesh, microbatches, *which)
        for which in ((ONE_F_ONE_B, 1), (GPIPE, 1), (CIRCULAR, 2), (ONE_F_ONE_B, 2))
    )
    assert fast.cost.communication_seconds == pytest.approx(2 * (stages - 1) * hop)
    assert plain.cost.communication_seconds == pytest.approx(2 * (microbatches + stages - 1) * hop)
    assert circular.cost.communication_seconds == pytest.approx(2 * (2 * microbatches + stages - 1) * hop)
    assert interleaved.cost.communication_seconds == pytest.approx(2 * (2 * stages - 1) * hop)
    assert circular.idle_seconds == interleaved.idle_seconds == pytest.approx(plain.idle_seconds / 2)
    layer_inputs = BATCH * WIDTH * 4 * LAYERS_OF_ALL / stages  # of all microbatches
    waiting = (microbatches - stages) / microbatches * layer_inputs
    assert plain.cost.peak_bytes - fast.cost.peak_bytes == pytest.approx(waiting, rel=1e-3)
    more = (stages - 1) / 2 / microbatches * layer_inputs
    assert interleaved.cost.peak_bytes - fast.cost.peak_bytes == pytest.approx(more, rel=1e-3)
    weights_and_moments, examples = 2 * 2 * LAYERS_OF_ALL * WIDTH * WIDTH * 4 / stages, BATCH * WIDTH * 4
    assert fast.cost.argument_bytes == weights_and_moments + examples


@pytest.mark.parametrize(("inside", "passes"), [("data-parallel", 2), ("fsdp", 3)])
def test_gradients_are_reduced_and_weights_gathered_in_each_microbatch(inside: str, passes: int) -> None:
    """A pass sends 3 / 4 of the layers of a stage, which has half of them: an all-reduce is two; FSDP gathers twice and
    reduce-scatters."""
    layers, mesh = 6, round_mesh(stage=2, data=4)  # 6 are no 4 equal parts, so that FSDP splits another dimension
    few, many = (priced(trained(layers=layers), mesh, number, inside=inside).cost for number in (2, 8))
    one_pass = layers * 2 * WIDTH * WIDTH * 4 / 2 * 3 / 4 / LINK_BYTES_PER_SECOND
    assert many.communication_seconds - few.communication_seconds == pytest.approx(6 * passes * one_pass, rel=0.1)


@pytest.mark.parametrize("form", ["transposed", "unrolled", "repeated"])
def test_every_form_of_a_stack_has_about_the_same_price(form: str) -> None:
    """Against the same form on one device, which runs all layers, and is no pipeline."""
    mesh, number = round_mesh(stage=4), 2 if form == "repeated" else 8
    costs = [
        (priced(trained(kind), mesh, number).cost, evaluator_of(trained(kind), mesh).exact_cost(()))
        for kind in ("scanned", form)
    ]
    (scanned, other) = (c.compute_seconds / w.compute_seconds for c, w in costs)
    stack = find_stack(trained(form).program)
    assert stack.layers == LAYERS_OF_ALL
    assert stack.owner({trained(form).program.values[next(iter(stack.weights))].shape}) == LAYERS
    assert other == pytest.approx(scanned, rel=0.25)


def test_a_scale_that_is_added_to_one_and_decayed_belongs_to_its_layer() -> None:
    """What is made of weights alone may stand in front of all layers."""

    def step(layers: Any, x: Any) -> Any:
        def loss(layers: Any) -> Any:
            y = x
            for w in layers:
                y = y + jnp.tanh((y * (1 + w["scale"])) @ w["up"])
            return jnp.mean(y**2)

        decayed = jax.tree.map(lambda w: 0.999 * w, layers)
        return jax.tree.map(lambda w, g: w - 0.1 * g, decayed, jax.grad(loss)(layers))

    stack = find_stack(source_of(step, [{"scale": arg(WIDTH), "up": arg(WIDTH, WIDTH)}] * 8, arg(BATCH, WIDTH)).program)
    assert (stack.layers, len(stack.weights)) == (8, 16)
    assert [stack.program.values[value].shape for value in stack.handed] == [(BATCH, WIDTH)]


def test_the_dimension_of_the_layers_is_the_one_that_the_loop_takes_rows_of() -> None:
    """Not the first one of that size: a decoder may have as many heads as layers."""
    assert find_stack(trained("transposed", width=8, layers=8).program).shapes == {(8, 8, 8): 1}


@pytest.mark.parametrize(
    ("stages", "repeats", "measured"),
    # 32 and 16 microbatches of Marin's 67B on 64 H100 take 3.476 and 1.93 s, 64 and 32 of its L24 on 32 take 21.32 and
    # 11.2 s: with the update, the bubble takes as long as so many microbatches.
    [(8, 2, 3.9), (4, 1, 3.2)],
)
def test_the_bubble_and_the_update_are_those_of_published_runs(stages: int, repeats: int, measured: float) -> None:
    def seconds(microbatches: int) -> float:
        source = trained("scanned", 16384 * microbatches, 8192, 16)
        mesh = load_spec(f"h100:{stages}").mesh({"gpu": stages})
        return priced(source, mesh, microbatches, ONE_F_ONE_B, repeats).cost.step_seconds

    each = (seconds(32) - seconds(16)) / 16
    assert seconds(16) / each - 16 == pytest.approx(measured, rel=0.1)


# Machine, mesh shape, tokens of all devices, width, pipeline over the first axis, whether it is faster than FSDP, as
# in published runs: within a host FSDP is first (marin-community/marin#6532: 63.5 against 135.6 ms on v6e-8, PR 6534:
# 1.01 against 2.20 s on 8 H100); pipelines are where few tokens meet many weights on a chip (AI-Hypercomputer/maxtext
# PR 1687: half of FSDP's step on v6e-8) or where FSDP crosses a slow network (marin PR 6534: 1.22 times faster).
ORDERS = [
    ("v6e-8", "data=8", 8 * 4096, 1024, False),
    ("h100:8", "data=8", 64 * 4096, 4096, False),
    ("v6e-8", "data=8", 8 * 512, 8192, True),
    ("4xv6e-8", "slice=4,data=8", 32 * 1024, 8192, True),
]


@pytest.mark.parametrize(("machine", "shape", "tokens", "width", "wins"), ORDERS)
def test_pipelines_win_where_published_runs_say(machine: str, shape: str, tokens: int, width: int, wins: bool) -> None:
    sizes = parse_shape(shape)
    source, mesh = trained("scanned", tokens, width, 16), load_spec(machine).mesh(sizes)
    found = best_stages(source, mesh, StageRequest(axis=next(iter(sizes))))
    assert found is not None and len(found.priced.cost.axis_seconds) == len(sizes)  # for bounds on one axis
    fsdp = priced_strategy(evaluator_of(source, mesh), "fsdp").cost.step_seconds
    assert (found.priced.cost.step_seconds < fsdp) == wins


@pytest.mark.parametrize(
    ("machine", "shape", "axis", "stages", "links"),
    [
        ("4xv5e-64", "slice=4,data=64", 0, 4, []),
        ("4xv5e-64", "slice=4,data=64", 0, 2, [("network", 2)]),
        ("4xv5e-64", "data=256", 0, 4, [("line", 8), ("line", 8)]),
        ("h100:32", "data=8,model=4", 0, 4, [("switch", 2)]),
        ("v5e-256", "data=256", 0, 4, [("ring", 16), ("line", 4)]),
    ],
)
def test_a_stage_has_the_mesh_without_the_outermost_links(
    machine: str, shape: str, axis: int, stages: int, links: list[tuple[str, int]]
) -> None:
    mesh = load_spec(machine).mesh(parse_shape(shape))
    found = stage_mesh(mesh, axis, stages)
    assert [(link.kind, link.size) for link in found.axes[axis].links] == links
    assert found.devices * stages == mesh.devices


@pytest.mark.parametrize("text", ["", "0", "1", "4:", "4:1", "4:x", ":4", "4:8:2", "-4", "slice=4"])
def test_a_request_that_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"--pipeline: cannot read .*4:16"):
        parse_stages(text)


@pytest.mark.parametrize(
    ("text", "form", "why"),
    [
        ("rows", "scanned", "no mesh axis 'rows' to have stages on; this mesh has stage=16, data=6"),
        ("5", "scanned", "no mesh axis has 5 equal parts; this mesh has"),
        ("16", "scanned", "8 layers have no 16 equal parts; give 2, 4, 8 stages"),
        ("3", "scanned", "8 layers have no 3 equal parts"),
        ("4:3", "scanned", r"the batch cannot be run in 3 microbatches .* f32\[4096,256\] has no 3 equal parts"),
        ("4:8", "repeated", "the program has 2 microbatches of its own; give --pipeline 4:2"),
        ("4", "forward", "no stack of equal layers with a backward pass; stages need a training step"),
    ],
)
def test_impossible_pipelines_are_refused_with_what_to_try(text: str, form: str, why: str) -> None:
    mesh = round_mesh(stage=16, data=6)
    with pytest.raises(UsageError, match=f"--pipeline: .*{why}"):
        best_stages(trained(form), mesh, parse_stages(text))
    assert best_stages(trained(form), mesh, None) is None


@cache
def outcome() -> Outcome:
    request = Request("step.mlir", "2xv5e-4", mesh_shape="slice=2,data=4", iterations=5, pipeline="2:8")
    return plan_given(request, source=trained())


def test_the_report_and_the_sweep_have_a_row_and_a_line() -> None:
    report = outcome().report
    stream = io.StringIO()
    print_report(report, stream, width=120)
    text = stream.getvalue()
    assert re.search(r"\n  pipeline 2:8 over slice +\d", text)
    assert re.search(r"a pipeline is slower: 2 stages over slice with 8 microbatches, \w+,.* idle", text, re.DOTALL)
    row = row_of("step.mlir", "2xv5e-4", report, 0.0)
    assert row.pipeline_seconds == report.baselines[PIPELINE].step_seconds > report.predicted.step_seconds
    console = make_console(io.StringIO(), width=160)
    assert "pipeline" in render([rows_table([row, replace(row, pipeline_seconds=None)], 160)], console)


def test_a_comparison_has_the_row_and_never_takes_it() -> None:
    of = outcome()
    found = with_contender(compare(of.evaluator, of.report, [of.result.plan]), None, of.pipeline, of.evaluator)
    (row,) = [one for one in found.contenders if one.kind == PIPELINE]
    assert (row.label, row.best) == ("pipeline 2:8 over slice", False)
    assert row.step_seconds == of.report.baselines[PIPELINE].step_seconds


@pytest.mark.parametrize(
    ("times", "fits", "plan_fits", "says"),
    [
        (0.9, True, True, "a pipeline is faster: 4 stages over slice with 16 microbatches, 1F1B, fsdp inside"),
        (1.05, True, True, "a pipeline comes near"),
        (1.05, False, True, ""),
        (1.2, True, True, ""),
        (1.2, True, False, "a pipeline fits, without one the program does not"),
    ],
)
def test_unasked_a_report_mentions_what_is_near_or_fits(times: float, fits: bool, plan_fits: bool, says: str) -> None:
    report = make_report()
    peak = report.predicted.limit_bytes // 2
    predicted = replace(report.predicted, peak_bytes=peak if plan_fits else 3 * peak)
    report = replace(report, predicted=replace(predicted, fits=plan_fits))
    cost = Cost(times * predicted.step_seconds, 0.0, peak if fits else 3 * peak, 0)
    notes = with_pipeline(report, PricedPipeline(4, 16, ONE_F_ONE_B, 1, "slice", "fsdp", 0.1, 0.1, cost, fits), False)
    assert says in notes.analysis.notes[0]
    assert (PIPELINE in notes.baselines) == bool(says)


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (("--pipeline", "2", "-o", "stages.mlir"), "the programs of stages are several files"),
        (("--strategy", "pipeline"), "hint: give --pipeline STAGES"),
    ],
)
def test_what_cannot_be_had_is_an_error(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], what: str
) -> None:
    assert run(["partition", "step.mlir", "--mesh", "2xv5e-4", *arguments]) == 2
    assert what in capsys.readouterr().err
