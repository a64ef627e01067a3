"""The stored figures of compiled and measured programs beside the models; needs no compiler."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from statistics import median

import pytest
from programs import SAMPLES

from benchmarks import gpu_times
from benchmarks.calibrate import failed, peak_bytes, read_points
from benchmarks.calibrate_memory import TABLE, needed
from benchmarks.calibration import (
    END,
    START,
    error_table,
    errors,
    predict,
    tightened,
    told,
    verdicts,
    write_page,
    yardstick,
)
from benchmarks.common import Row
from benchmarks.corpus import PROGRAMS, SLICES, load_case, restore, store
from benchmarks.golden import cases, main
from benchmarks.gpu_timer import _executable, _timed, covered, measured
from benchmarks.gpu_times import add, op_cases, predicted_ops, stored, without_donation
from benchmarks.published.__main__ import predicted
from benchmarks.published.runs import RUNS, Decoder, Policy, Run
from toast_cli.ask_xla.child import Failure
from toast_cli.frontend import load
from toast_cli.hardware import load_spec
from toast_cli.pipeline import partition
from toast_cli.plan.decisions import Replicate, Shard
from toast_cli.price.evaluator import Evaluator
from toast_cli.request import Request

# Programs that are lowered again in a second or two each.
QUICK = ("itx_decode", "t2b_1")


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[Row]:
    points = [point for point in read_points(TABLE) if point["program"] in QUICK]
    found, stale = predict(points, tmp_path_factory.mktemp("programs"))
    # Some may go stale when plans come to mean something else; when most have, the table is to be made again.
    assert stale <= len(points) / 2
    return found


def test_peaks_are_as_near_to_the_compiled_ones_as_documented(rows: list[Row]) -> None:
    measured = errors("quick", rows)
    assert measured["median"] <= 0.10
    assert sum(abs(row["error"]) <= 0.20 for row in rows) >= 0.75 * len(rows)


def test_arguments_are_exact(tmp_path: Path) -> None:
    points = [point for point in read_points() if point["program"] == "itx_decode" and "argument_bytes" in point]
    for point in points:
        problem = load_case("itx_decode", point["slice"], tmp_path).problem
        predicted = Evaluator(problem).cost(restore(point["decisions"])).argument_bytes
        assert predicted == pytest.approx(point["argument_bytes"], rel=2e-3)
    assert points


def test_verdicts_are_the_compilers(rows: list[Row]) -> None:
    agreed, _, wrong = verdicts(rows)
    assert agreed >= 0.95 * len(rows)
    assert wrong == 0


def test_the_table_is_of_the_corpus() -> None:
    points, asked = read_points(), read_points(TABLE)
    assert points and asked
    for point in [*points, *asked]:
        assert point["slice"] in SLICES
        assert point["program"] in PROGRAMS
    assert all("failed" in point or peak_bytes(point) > 0 for point in points)
    assert all("failed" in point or point["needed_bytes"] > 0 for point in asked)


def test_plans_are_stored_as_plain_lists() -> None:
    plan = (Shard(3, 0, (1, 0)), Shard(2, 1, (), 5), Replicate(0, 1))
    assert restore(store(plan)) == plan


def test_what_does_not_fit_is_stored_with_the_compilers_figures() -> None:
    used = failed(Failure("RESOURCE_EXHAUSTED: ... Used 19.50G of 15.75G hbm. Exceeded hbm capacity by 3.75G."))
    assert used == {"exhausted": [round(19.5 * 2**30), round(15.75 * 2**30)]}
    early = "the total memory required for HLO temporaries (2.50G) exceeds available HBM (64.00M)."
    assert failed(Failure(early)) == {"exhausted": [round(2.5 * 2**30), 64 * 2**20]}
    assert failed(Failure("Check failed: x")) == {"failed": "Check failed: x"}


def test_what_the_compiler_says_it_needs() -> None:
    said = "the total memory required for HLO temporaries (1.76G) exceeds available HBM (64.00M)."
    assert needed(said) == {"needed_bytes": round(1.76 * 2**30)}
    assert "failed" in needed("Check failed: x")


def row(error: float, split: str = "test", **more: object) -> Row:
    return {"program": "p", "slice": "v4-8", "plan": "fsdp", "split": split, "error": error,
            "needed_gib": 1.0, "predicted_gib": 1 + error, "usable_gib": 30.0, "peak_error": 0.2} | more  # fmt: skip


def test_errors_are_summed_up_by_split_and_program() -> None:
    table = error_table([row(0.1), row(-0.3), row(0.2, "fit")])
    assert [(r["name"], r["points"]) for r in table] == [("fit", 1), ("test", 2), ("p", 3)]
    assert table[1]["median"] == pytest.approx(0.2)
    assert table[1]["worst"] == -0.3


@pytest.mark.parametrize(
    ("needed_gib", "predicted_gib", "expected"),
    [
        (20.0, 29.0, (1, 0, 0)),  # fits, as predicted
        (33.0, 33.0, (1, 0, 0)),  # does not, as predicted
        (33.0, 29.9, (0, 1, 0)),  # does not, but the prediction is near the limit and comes with a remark
        (33.0, 10.0, (0, 0, 1)),
        (31.0, 10.0, (0, 0, 0)),  # over by less than 5 %
        (20.0, 33.0, (0, 0, 0)),
    ],
)
def test_verdicts(needed_gib: float, predicted_gib: float, expected: tuple[int, int, int]) -> None:
    assert verdicts([row(0.0, needed_gib=needed_gib, predicted_gib=predicted_gib)]) == expected


def test_tighter_limits_are_what_plans_need_on_average() -> None:
    found = tightened([row(0.0, needed_gib=size) for size in (1.0, 2.0, 6.0)] + [row(0.0, program="alone")])
    assert [r["usable_gib"] for r in found] == [3.0, 3.0, 3.0]


def test_the_yardstick_beside_full_compiles() -> None:
    point = {"program": "p", "slice": "s", "fingerprint": "f"}
    full = point | {"argument_bytes": 4, "output_bytes": 2, "alias_bytes": 2, "temp_bytes": 6, "peak_bytes": 8}
    assert yardstick([point | {"needed_bytes": 9}], [full, full | {"fingerprint": "g"}]) == [(9 / 8, 0.9)]


def test_tables_go_between_the_markers(tmp_path: Path) -> None:
    page = tmp_path / "cost-model.md"
    page.write_text(f"before\n{START}\nold\n{END}\nafter\n")
    write_page(page, [row(0.1)], told([row(0.1)], 2, [(1.0, 0.5)]))
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith("after\n")
    assert (
        "old" not in text
        and "| test | 1 | 10.0% |" in text
        and "2 more are left out" in text
        and "1 full compiles" in text
    )
    assert (tmp_path / "memory.svg").read_text().count("<circle") == 3


# -- what a GPU took beside what is predicted, and the two ends of measuring


FAMILIES = {"matmul": 0.12, "products": 0.16, "elementwise": 0.1, "reduction": 0.05}  # largest median error of each


def test_ops_take_what_is_predicted() -> None:
    """Products and what memory decides; `docs/accuracy.md` says what is not predicted well."""
    chosen = [row for row in stored() if row["program"].split()[0] in FAMILIES]
    rows = predicted_ops(chosen)
    assert len(rows) > 20
    for family, most in FAMILIES.items():
        assert median(abs(row["error"]) for row in rows if row["family"] == family) < most, family


def test_the_table_holds_what_can_be_predicted() -> None:
    names = {row["program"] for row in stored()}
    assert all(name in op_cases() or name.partition(".")[0] in ("corpus", "real", "nothing") for name in names)


def test_the_quickest_of_each_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_times, "TABLE", tmp_path / "times.jsonl")
    row = dict.fromkeys(gpu_times.FIELDS, 0) | {"program": "a", "chip": "NVIDIA H100 80GB HBM3", "compile_seconds": 1.0}
    add(
        [row | {"seconds": 2.0}, row | {"seconds": 1.0}, row | {"seconds": 3.0}, {"program": "b", "error": "too large"}]
    )
    add([row | {"seconds": 1.5}])
    (kept,) = stored()
    assert (kept["chip"], kept["seconds"]) == ("H100", 1.0)
    assert "compile_seconds" not in kept
    add([row | {"seconds": 2.0, "device_seconds": 1.9}, row | {"seconds": 2.5, "device_seconds": 1.8}])
    add([row | {"seconds": 1.0}])
    (kept,) = stored()
    assert (kept["seconds"], kept["device_seconds"]) == (2.5, 1.8)
    assert "b: too large" in capsys.readouterr().err


def test_what_the_profiler_saw_counts_and_not_the_host() -> None:
    (row, *_) = [row for row in stored() if row["program"] in op_cases() and row.get("device_seconds", 0.0) > 1e-5]
    (seen,) = predicted_ops([row | {"seconds": 1.0}])
    assert seen["measured"] == pytest.approx(1e6 * row["device_seconds"])
    assert predicted_ops([row | {"device_seconds": 1e-6}]) == []
    unseen = {key: value for key, value in row.items() if key != "device_seconds"}
    assert predicted_ops([unseen | {"seconds": 5e-5}]) == []  # starting it takes most of that
    (whole,) = predicted_ops([unseen | {"seconds": 1.0}])
    assert whole["measured"] == pytest.approx(1e6)


def test_kernels_side_by_side_count_once() -> None:
    assert covered([(5.0, 6.0), (0.0, 2.0), (1.0, 3.0), (1.5, 2.5)]) == 4.0


def test_an_exported_program_runs_again_and_again() -> None:
    """On whatever jax finds here; a donated array could be used once."""
    sample = SAMPLES / "block_tiny.mlirbc.zst"
    assert any(argument.donated for argument in load(str(sample)).program.arguments)
    row = measured("block_tiny", *_timed(lambda: _executable(without_donation(sample)), time.monotonic() + 1e6))
    assert row["seconds"] > 0.0, row
    assert json.loads(json.dumps(row)) == row


def test_what_cannot_be_compiled_is_told_and_what_comes_too_late_is_left() -> None:
    late = time.monotonic() - 1.0
    assert _timed(lambda: 1, late) is None
    assert "deserialize" in measured("garbage", *_timed(lambda: _executable(b"garbage"), late + 1e6))["error"]


# -- the published runs: their steps can be built and are predicted as they were run


SMALL = Decoder(layers=2, model=256, heads=2, kv_heads=2, ff=512, vocab=512)


def test_a_run_is_there_once() -> None:
    assert len({(run.name, run.mesh) for run in RUNS}) == len(RUNS)


@pytest.mark.parametrize(
    ("mesh", "kept", "offloaded"),
    [("v5e-4", ("input", "q"), True), ("h100:4", "minimal", False)],
)
def test_a_small_step_is_predicted(mesh: str, kept: Policy, offloaded: bool) -> None:
    run = Run("small", SMALL, mesh, "data=4", "fsdp:data", 8, 256, kept, 1.0, "this test", offloaded=offloaded)
    row = predicted(run)
    assert row["fits"] == "yes" and 0 < row["mfu"] < row["hfu"]


def test_attention_of_cudnn_is_kept() -> None:
    """Nothing is computed again where everything is kept, and layers are not a scan."""
    run = Run("small", replace(SMALL, gated=False), "h100:4", "data=4", "fsdp:data", 8, 256, "all", 1.0, "this test",
              scanned=False)  # fmt: skip
    row = predicted(run)
    assert row["mfu"] == pytest.approx(row["hfu"], rel=0.02)


@pytest.mark.parametrize(("mesh", "sustained"), [("a100-80:4", 0.93), ("h100:4", 0.82), ("v5e-4", 1.0)])
def test_products_of_a_run_take_as_long_as_the_clock_of_its_chip_lets_them(mesh: str, sustained: float) -> None:
    """A chip at its power limit lowers its clock: `sustained` of its figures."""
    spec = load_spec(mesh)
    assert spec.chip.sustained == sustained
    text = """func.func @main(%x: tensor<8192x8192xbf16>, %y: tensor<8192x8192xbf16>) -> tensor<8192x8192xbf16> {
      %0 = stablehlo.dot_general %x, %y, contracting_dims = [1] x [0] : (tensor<8192x8192xbf16>, tensor<8192x8192xbf16>) -> tensor<8192x8192xbf16>
      return %0 : tensor<8192x8192xbf16>
    }"""  # noqa: E501
    problem = partition(Request("p.mlir", mesh, iterations=1, content=text.encode())).problem
    at_peak = replace(problem.mesh, chip=replace(problem.mesh.chip, sustained=1.0))
    seconds, brief = (Evaluator(one).cost(()).compute_seconds for one in (problem, replace(problem, mesh=at_peak)))
    assert brief / seconds == pytest.approx(sustained, rel=0.01)


# -- the recorder of plans, reports and written files: the same twice, and every difference told


def record(file: Path, *words: str) -> Path:
    assert main(["record", str(file), "--quick", "--only", *words]) == 0
    return file


def changed(file: Path, old: str, new: str) -> Path:
    """A copy of a record with other words in it."""
    text = file.read_text()
    assert old in text
    other = file.with_name("changed.json")
    other.write_text(text.replace(old, new))
    return other


def test_a_record_is_the_same_twice_and_a_difference_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, two = (record(tmp_path / name, "mlp_tiny", "fsdp") for name in ("one.json", "two.json"))
    assert one.read_bytes() == two.read_bytes()
    assert main(["compare", str(one), str(two)]) == 0
    facts = json.loads(one.read_text())["cases"]["mlp_tiny v4-32 fsdp"]
    assert facts["plan"]["tactics"] == ["fsdp"] and set(facts["emitted"]) == {"plan", "stablehlo"}
    assert "seconds" not in facts["search"] and "timings" not in facts
    capsys.readouterr()
    for old, new, expected in (
        (facts["emitted"]["stablehlo"], "0123", "\nmlp_tiny v4-32 fsdp\n    emitted.stablehlo: differs\n"),
        (repr(facts["predicted"]["compute_seconds"]), "1e-3", "predicted.compute_seconds: "),
        ('"kind":"all-gather"', '"kind":"all-to-all"', "- kind=all-gather axes="),
        ('"mlp_tiny v4-32 fsdp"', '"mlp_tiny v4-32 zero2"', "only before: mlp_tiny v4-32 fsdp\nonly after: mlp_tiny"),
    ):
        assert main(["compare", str(one), str(changed(one, old, new))]) == 1
        assert expected in capsys.readouterr().out


def test_the_quick_list_is_part_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parents[1] / "sample_models")
    names, quick = ([case.name for case in cases(quick=quick)] for quick in (False, True))
    assert len(set(names)) == len(names) and set(quick) < set(names)
    assert {name.split()[0] for name in quick} == {name.split()[0] for name in names if "_tiny" in name}
