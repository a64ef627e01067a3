"""The whole tool on tiny sample programs: the report's facts agree with each other and with what was asked for."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from math import prod

import pytest
from programs import SAMPLES
from sweeps import sweep

from toast_cli.base.errors import InputError, SpecError, ToastError, UsageError
from toast_cli.pipeline import Outcome, partition
from toast_cli.plan.lower import lower
from toast_cli.program.values import remade_values
from toast_cli.report.model import SCHEMA
from toast_cli.request import Request

PROGRAMS = ("mlp_tiny", "gns_tiny", "moe_tiny", "scan_tiny", "itx_decode_tiny", "resnet50_tiny")


def path_of(name: str) -> str:
    return str(next(p for p in SAMPLES.iterdir() if p.name.split(".")[0] == name and p.suffix != ".py"))


# On the tiny twins plans lie close together: most of their time is the fixed time of kernels.
EVALUATIONS = 60


def request(name: str, **options: object) -> Request:
    return replace(Request(path_of(name), "v4-32", iterations=EVALUATIONS), **options)  # type: ignore[arg-type]


@cache
def outcome(name: str, mesh: str = "v4-32") -> Outcome:
    return partition(request(name, mesh=mesh))


# What the JSON report promised to hold, for good (fields may be added).
PROMISED = {
    "": {"schema", "program", "mesh", "plan", "predicted", "baselines", "collectives", "arguments", "results",
         "analysis",
         "search", "timings"},
    "program": {"path", "name", "ops", "values", "arguments", "parameter_bytes", "flops"},
    "mesh": {"name", "chip", "devices", "axes"},
    "plan": {"decisions", "summary"},
    "predicted": {"step_seconds", "compute_seconds", "communication_seconds", "peak_bytes", "argument_bytes",
                  "limit_bytes", "fits",
                  "mfu"},
    "analysis": {"classes", "groups", "conflicts", "components", "resolution_groups"},
    "search": {"algorithm", "seed", "seconds", "evaluations", "best_found_at"},
}  # fmt: skip
PROMISED_OF_EACH = {
    "collectives": {"kind", "axes", "bytes", "count", "seconds", "location"},
    "arguments": {"index", "name", "type", "donated", "sharding"},
    "results": {"index", "name", "type", "sharding"},
}


@pytest.mark.parametrize("name", sweep(PROGRAMS, "mlp_tiny", "moe_tiny", "itx_decode_tiny"))
def test_the_json_report_holds_what_it_promises(name: str) -> None:
    facts = json.loads(json.dumps(outcome(name).report.to_json()))
    assert facts["schema"] == SCHEMA == "toast.report/1"
    for section, keys in PROMISED.items():
        assert keys <= set(facts[section] if section else facts)
    for section, keys in PROMISED_OF_EACH.items():
        assert all(keys <= set(row) for row in facts[section])
    for baseline in facts["baselines"].values():
        assert {"step_seconds", "peak_bytes", "fits"} <= set(baseline)
    assert {"unsharded", "fsdp", "megatron"} <= set(facts["baselines"])
    assert all(seconds >= 0 for seconds in facts["timings"].values())


@pytest.mark.parametrize("name", sweep(PROGRAMS, "mlp_tiny", "moe_tiny", "itx_decode_tiny"))
def test_figures_agree_with_each_other(name: str) -> None:
    report = outcome(name).report
    predicted = report.predicted
    both = predicted.compute_seconds + predicted.communication_seconds
    assert predicted.step_seconds_upper == pytest.approx(both)
    least = max(predicted.compute_seconds, predicted.communication_seconds)
    assert least <= predicted.step_seconds_lower <= predicted.step_seconds <= predicted.step_seconds_upper
    assert sum(c.seconds for c in report.collectives) == pytest.approx(predicted.communication_seconds)
    assert predicted.fits == (predicted.peak_bytes <= predicted.limit_bytes)
    assert predicted.argument_bytes <= predicted.peak_bytes
    # The largest few of what is alive at the peak.
    assert sum(v.bytes for v in predicted.live_at_peak) <= predicted.peak_bytes + len(predicted.live_at_peak)
    unsharded = report.baselines["unsharded"]
    assert unsharded.communication_seconds == 0.0
    assert predicted.step_seconds <= unsharded.step_seconds
    flops_at_peak = 275e12 * report.mesh.devices * predicted.step_seconds  # a v4 chip, bf16
    assert predicted.hfu == pytest.approx(report.program.flops / flops_at_peak, rel=1e-3)
    assert 0 < predicted.mfu <= predicted.hfu


@pytest.mark.parametrize("name", sweep(PROGRAMS, "mlp_tiny", "moe_tiny", "itx_decode_tiny"))
def test_the_search_is_not_worse_than_any_expert_plan_that_fits(name: str) -> None:
    report = outcome(name).report
    best = min(b.step_seconds for b in report.baselines.values() if b.fits)
    assert report.predicted.step_seconds <= best * 1.01


@pytest.mark.parametrize("name", sweep(PROGRAMS, "mlp_tiny", "moe_tiny", "itx_decode_tiny"))
def test_the_program_is_described_as_it_is(name: str) -> None:
    found = outcome(name)
    report, program = found.report, found.source.program
    assert report.program.arguments == len(report.arguments) == len(program.arguments)
    assert len(report.results) == len(program.results)
    assert report.program.parameter_bytes == sum(program.values[a.value].bytes for a in program.arguments)
    assert report.mesh.devices == prod(report.mesh.axes.values()) == 16
    assert report.analysis.groups == len(found.problem.dimensions.groups)
    assert all(fact.text for fact in report.plan.decisions)
    assert len(report.plan.decisions) == len(found.result.plan)
    assert report.search.evaluations <= EVALUATIONS


@pytest.mark.parametrize("name", sweep(PROGRAMS, "mlp_tiny", "moe_tiny", "itx_decode_tiny"))
def test_shardings_name_axes_once_and_divide(name: str) -> None:
    found = outcome(name)
    report, program = found.report, found.source.program
    sizes = report.mesh.axes
    arrays = [a.value for a in program.arguments] + [r.value for r in program.results]
    for fact, value in zip([*report.arguments, *report.results], arrays, strict=True):
        shape = program.values[value].shape
        assert len(fact.sharding) == len(shape)
        used = [axis for dim in fact.sharding for axis in dim]
        assert len(set(used)) == len(used)
        assert all(
            size % prod(sizes[axis] for axis in dim) == 0 for size, dim in zip(shape, fact.sharding, strict=True)
        )
    for argument, fact in zip(program.arguments, report.arguments, strict=True):
        if argument.aliased_result >= 0:
            assert report.results[argument.aliased_result].sharding == fact.sharding


def test_the_same_request_gives_the_same_report() -> None:
    one, two = (partition(request("mlp_tiny", seed=11)).report for _ in range(2))
    assert replace(one, timings={}, search=replace(one.search, seconds=0.0)) == replace(
        two, timings={}, search=replace(two.search, seconds=0.0)
    )
    assert one.search.seed == 11


def test_pins_are_respected() -> None:
    options = ("*['layers'][0]['w']=None,data", "batch['x']=data,model")
    report = partition(request("mlp_tiny", pins=options)).report
    shardings = {a.name: a.sharding for a in report.arguments}
    assert shardings["params['layers'][0]['w']"] == [[], ["data"]]
    assert shardings["batch['x']"] == [["data"], ["model"]]
    results = {r.name: r.sharding for r in report.results}
    assert results["result[0]['layers'][0]['w']"] == [[], ["data"]]


def test_a_memory_limit_is_respected() -> None:
    free = outcome("mlp_tiny").report.predicted
    limit = int(free.peak_bytes * 0.97)
    found = partition(request("mlp_tiny", memory_limit=limit, fit="as-written")).report.predicted
    assert found.limit_bytes == limit
    assert found.fits and found.peak_bytes <= limit


def test_when_nothing_fits_the_report_says_so() -> None:
    report = partition(request("mlp_tiny", memory_limit=2**10)).report
    assert not report.predicted.fits
    assert report.predicted.peak_bytes > report.predicted.limit_bytes == 2**10
    assert report.predicted.live_at_peak
    assert not any(b.fits for b in report.baselines.values())
    assert report.predicted.peak_bytes <= min(b.peak_bytes for b in report.baselines.values())


def test_the_mesh_shape_can_be_given() -> None:
    report = partition(request("mlp_tiny", mesh_shape="x=4,y=4")).report
    assert report.mesh.axes == {"x": 4, "y": 4}


def test_the_mesh_shape_can_be_left_to_the_search() -> None:
    report = partition(request("mlp_tiny", mesh_shape="auto", iterations=200)).report
    assert prod(report.mesh.axes.values()) == 16
    assert report.predicted.fits
    assert report.predicted.step_seconds <= outcome("mlp_tiny").report.predicted.step_seconds * 1.01


def test_one_device_needs_no_plan() -> None:
    report = partition(request("mlp_tiny", mesh_shape="data=16,model=1")).report
    assert "model" not in {fact.axis for fact in report.plan.decisions}


# options, kind of error, what it says
MISTAKES: list[tuple[dict[str, object], type[ToastError], str]] = [
    ({"effort": "psychic"}, UsageError, "choose from medium"),
    ({"mesh": "v4-33"}, SpecError, "v4-32"),
    ({"mesh_shape": "data=3"}, SpecError, "16"),
    ({"pins": ("nobody=data",)}, UsageError, "no argument or result matches"),
    ({"program": "no/such/file.mlir"}, InputError, "no/such/file.mlir"),
]


@pytest.mark.parametrize(("options", "kind", "says"), MISTAKES)
def test_mistakes_are_errors_with_a_hint(options: dict[str, object], kind: type[ToastError], says: str) -> None:
    with pytest.raises(kind) as caught:
        partition(request("mlp_tiny", **options))
    assert says in str(caught.value)


def test_stages_are_told_and_timed() -> None:
    told: list[str] = []
    found = partition(request("mlp_tiny"), lambda stage, *_: told.append(stage))
    assert list(dict.fromkeys(told)) == ["spec", "load", "analyse", "search", "report"]
    assert set(found.report.timings) == set(told)


def test_a_report_and_a_file_share_what_a_plan_means() -> None:
    tiny = outcome("mlp_tiny")
    plan = tiny.result.plan
    lowered = tiny.evaluator.lowered(plan)
    assert tiny.evaluator.lowered(plan) is lowered
    assert lowered == lower(tiny.problem, plan)
    assert tiny.evaluator.lowered(()) == lower(tiny.problem, ())


def test_what_is_worked_out_once_is_worked_out_for_each_program() -> None:
    program = outcome("mlp_tiny").source.program
    other = replace(program, name="another")
    assert remade_values(program) is remade_values(program)
    assert remade_values(other) == remade_values(program) and remade_values(other) is not remade_values(program)


@pytest.mark.parametrize(("narrow", "peak"), [("i8", 394e12), ("bf16", 197e12), ("f32", 197e12)])
def test_narrow_products_count_against_the_peak_of_their_type(narrow: str, peak: float) -> None:
    """Of a v5e chip: 394 trillion operations a second on eight bits, 197 on sixteen."""
    out = "i32" if narrow == "i8" else narrow
    x, w, y = f"tensor<8192x4096x{narrow}>", f"tensor<4096x4096x{narrow}>", f"tensor<8192x4096x{out}>"
    text = f"""func.func @main(%x: {x}, %w: {w}) -> {y} {{
      %0 = stablehlo.dot_general %x, %w, contracting_dims = [1] x [0] : ({x}, {w}) -> {y}
      return %0 : {y}
    }}"""
    outcome = partition(Request("p.mlir", "v5e-16", iterations=50, content=text.encode()))
    facts = outcome.report.predicted
    flops = 2.0 * 8192 * 4096 * 4096
    assert facts.mfu == pytest.approx(flops / (16 * peak * facts.step_seconds), rel=1e-3)
    assert facts.mfu <= 1.0


def test_a_program_of_constants_alone_has_a_plan() -> None:
    text = b"""func.func @main() -> tensor<4xf32> {
      %c = stablehlo.constant dense<1.0> : tensor<4xf32>
      return %c : tensor<4xf32> }"""
    report = partition(Request("constant.mlir", "v5e-8", iterations=10, content=text), annotated=False).report
    assert report.fit == "yes" and report.plan.decisions == []
