"""`toast verify`: promises beside what XLA compiles. Differential: a true report agrees, a false one does not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from emitted import emit_shardy
from programs import Case, arg, evaluator_of, round_mesh, source_of_text
from sweeps import sweep

from toast_cli.ask_xla import verdict
from toast_cli.ask_xla.child import Failure
from toast_cli.ask_xla.compile import collectives_after_partitioning, estimated_cycles
from toast_cli.ask_xla.numbers import compare_numbers
from toast_cli.cli.app import run
from toast_cli.hardware import load_spec
from toast_cli.report.model import read_report

ROOT = Path(__file__).parents[1]
MLP = ROOT / "sample_models" / "mlp_tiny.mlir"


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A partitioned program whose batch is split, and its report."""
    folder = tmp_path_factory.mktemp("verify")
    program, report = folder / "out.mlir", folder / "report.json"
    arguments = ["partition", str(MLP), "--mesh", "h100-8", "--iterations", "40", "--quiet"]
    pins = ["--pin", "batch['x']=data+model", "--pin", "*['w']=data"]
    assert run([*arguments, *pins, "-o", str(program), "--json", str(report)]) == 0
    return program, report


def test_a_true_report_agrees(written: tuple[Path, Path], tmp_path: Path) -> None:
    program, report = written
    verdict = tmp_path / "verdict.json"
    checked = ["--report", str(report), "--against", str(MLP), "--json", str(verdict)]
    assert run(["verify", str(program), "--compiler", "cpu", *checked]) == 0
    facts = json.loads(verdict.read_text())
    assert facts["schema"] == "toast.verify/1"
    outcomes = {part["name"]: part["outcome"] for part in facts["parts"]}
    assert outcomes == {"numbers": "agreed", "collectives": "agreed", "memory": "unchecked"}


def altered(report: Path, folder: Path, change: Callable[[dict[str, Any]], list[dict[str, Any]]]) -> Path:
    """The report with every collective replaced by what `change` makes of it."""
    facts = json.loads(report.read_text())
    facts["collectives"] = [new for one in facts["collectives"] for new in change(one)]
    other = folder / "altered.json"
    other.write_text(json.dumps(facts))
    return other


FALSE: dict[str, tuple[Callable[[dict[str, Any]], list[dict[str, Any]]], str]] = {
    "nothing was promised": (lambda one: [], "more than promised"),
    "half was promised": (lambda one: [one | {"bytes": one["bytes"] // 2}], "more than promised"),
    "twice was promised": (lambda one: [one, one], "of the promised are missing"),
    "another axis was promised": (lambda one: [one | {"axes": ["model"]}], "more than promised"),
    "another kind was promised": (lambda one: [one | {"kind": "all-to-all"}], "more than promised"),
}


@pytest.mark.parametrize("name", FALSE)
def test_a_false_report_does_not_agree(
    written: tuple[Path, Path], tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    program, report = written
    change, said = FALSE[name]
    changed = str(altered(report, tmp_path, change))
    assert run(["verify", str(program), "--compiler", "cpu", "--report", changed]) == 1
    output = " ".join(capsys.readouterr().out.split())
    assert said in output
    assert "collectives that differ" in output and "mlp.py:" in output


def test_too_little_to_judge(tmp_path: Path) -> None:
    """One all-reduce of 256 bytes that was not promised."""
    original, program, report = tmp_path / "in.mlir", tmp_path / "out.mlir", tmp_path / "report.json"
    original.write_text(SUMS)
    pins = ["--pin", "arg0=-,data", "--pin", "arg1=data,-", "--iterations", "20"]
    assert (
        run(
            [
                "partition",
                str(original),
                "--mesh",
                "h100-8",
                "--quiet",
                *pins,
                "-o",
                str(program),
                "--json",
                str(report),
            ]
        )
        == 0
    )
    verify = ["verify", str(program), "--compiler", "cpu", "--report"]
    assert run([*verify, str(report)]) == 0
    assert run([*verify, str(altered(report, tmp_path, lambda one: []))]) == 2


SUMS = """
func.func @main(%x: tensor<8x4096xf32>, %y: tensor<4096x8xf32>, %z: tensor<8xcomplex<f32>>) -> (tensor<8x8xf32>, tensor<8xcomplex<f32>>) {
  %0 = stablehlo.dot_general %x, %y, contracting_dims = [1] x [0] : (tensor<8x4096xf32>, tensor<4096x8xf32>) -> tensor<8x8xf32>
  %1 = stablehlo.multiply %z, %z : tensor<8xcomplex<f32>>
  return %0, %1 : tensor<8x8xf32>, tensor<8xcomplex<f32>>
}
"""  # noqa: E501


def test_sums_in_another_order_are_equal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    original, program, report = tmp_path / "in.mlir", tmp_path / "out.mlir", tmp_path / "report.json"
    original.write_text(SUMS)
    pins = ["--pin", "arg0=-,data", "--pin", "arg1=data,-", "--iterations", "20"]
    saved = ["-o", str(program), "--json", str(report)]
    assert run(["partition", str(original), "--mesh", "h100-8", "--quiet", *pins, *saved]) == 0
    capsys.readouterr()
    checked = ["--report", str(report), "--against", str(original)]
    assert run(["verify", str(program), "--compiler", "cpu", *checked]) == 0
    said = capsys.readouterr().out
    assert (
        "all 2 results are equal; largest error 0.0e+00" not in said
    )  # rounded otherwise, so the tolerance was needed
    assert "of the 1.00 KiB that each device sends" in said or "each device sends are as promised" in said


def test_another_program_has_other_numbers(written: tuple[Path, Path], tmp_path: Path) -> None:
    text = MLP.read_text()
    assert "stablehlo.subtract" in text
    changed = tmp_path / "changed.mlir"
    changed.write_text(text.replace("stablehlo.subtract", "stablehlo.add"))
    assert run(["verify", str(written[0]), "--against", str(changed)]) == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--compiler", "tpu"], "--mesh v4-32"),
        (["--compiler", "gpu"], "--mesh h100-8"),
        (["--compiler", "tpu", "--mesh", "h100-8"], "cannot compile for H100"),
        (["--compiler", "gpu", "--mesh", "v4-32"], "cannot compile for v4"),
        (["--report", str(MLP)], "is not JSON"),
        (["--report", "nowhere.json"], "no such file"),
    ],
)
def test_what_is_missing_is_said(
    written: tuple[Path, Path], arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["verify", str(written[0]), *arguments]) == 2
    assert said in capsys.readouterr().err


def test_the_machine_stands_in_the_report(written: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    machine = read_report(str(written[1])).promises.machine
    other = "gpu" if load_spec(machine).chip.platform == "tpu" else "tpu"
    assert run(["verify", str(written[0]), "--report", str(written[1]), "--compiler", other]) == 2
    assert f"--mesh {machine}: --compiler {other} cannot compile for" in capsys.readouterr().err


def test_promises_are_read(written: tuple[Path, Path]) -> None:
    promises = read_report(str(written[1])).promises
    assert promises.axes == {"data": 4, "model": 2}
    assert promises.fits
    assert promises.argument_bytes > 0


def test_cycles_count_loops() -> None:
    text = "\n".join(
        [
            "HloModule m",
            "",
            "ENTRY %main (p: f32[8]) -> f32[8] {",
            '  %a = f32[8] fusion(%p), backend_config={"estimated_cycles":"100"}',
            '  ROOT %b = f32[8] fusion(%a), backend_config={"estimated_cycles":"20"}',
            "}",
        ]
    )
    assert estimated_cycles(text) == 120


@pytest.mark.children
def test_linear_algebra_runs() -> None:
    """What JAX leaves to LAPACK finds its handlers in the child."""

    def factors(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        square = x @ x.T + 64 * jnp.eye(x.shape[0])
        return jnp.linalg.cholesky(square), jnp.linalg.svd(square, compute_uv=False)

    program = jax.jit(factors).lower(jnp.zeros((16, 8))).as_text().encode()
    errors = compare_numbers(program, program, 2)
    assert not isinstance(errors, Failure), errors
    assert [e.error for e in errors] == [0.0, 0.0]


def test_a_callback_into_python_cannot_run() -> None:
    def doubled(x: jax.Array) -> jax.Array:
        return jax.pure_callback(lambda v: np.asarray(v) * 2, jax.ShapeDtypeStruct((4,), np.float32), x)

    program = jax.jit(doubled).lower(jnp.zeros((4,))).as_text().encode()
    answer = compare_numbers(program, program, 2)
    assert isinstance(answer, Failure) and not answer.aborted
    assert "calls back into Python" in answer.reason


# -- what JAX leaves to LAPACK and cuSOLVER is partitioned in the child as in the user's process: a batch of matrices
# may be split


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_a_batch_of_cholesky_factors_stays_split(platform: str) -> None:
    traced = jax.jit(jnp.linalg.cholesky).trace(arg(8, 16, 16))
    source = source_of_text(traced.lower(lowering_platforms=(platform,)).as_text(debug_info=True))
    case = Case(source, evaluator_of(source, round_mesh(data=4, model=2)))
    plan = (case.shard("a.0", "data"),)
    content = emit_shardy(case.source, case.lowered(plan))
    assert case.collectives(plan) == []
    assert collectives_after_partitioning(content, "stablehlo", {"data": 4, "model": 2}) == []


# -- `toast partition --verify`: the verdict under the report, and its exit code


MODELS = Path(__file__).parents[1] / "sample_models"
SAMPLE = str(MODELS / "block_tiny.mlirbc.zst")
BLOCK = ["partition", SAMPLE, "--mesh", "v4-32", "--strategy", "megatron", "--iterations", "1"]


@pytest.mark.parametrize("form", sweep(["stablehlo", "hlo"], "stablehlo"))
def test_megatron_agrees(form: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Two all-reduces per block and direction, as promised, in either form; nothing is written."""
    assert run([*BLOCK, "--verify", "cpu", "--format", form]) == 0
    said = capsys.readouterr().out
    assert said.index("-o OUT writes the sharded program") < said.index(
        "verdict of XLA: agreed (CPU partitioner; --verify tpu asks the real one)"
    )
    assert "all 74 results are equal" in said
    assert "all-reduce  data+model  64.0 KiB  ×8  64.0 KiB  ×8" in said


def test_disagreement_is_an_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """XLA finds nothing of what was promised; the program is written all the same."""
    monkeypatch.setattr(verdict, "collectives_after_partitioning", lambda *_: [])
    monkeypatch.setattr(verdict, "check_numbers", lambda *_: verdict.CheckedPart("numbers", "agreed", ""))
    program = tmp_path / "out.mlir"
    assert run([*BLOCK, "--verify", "cpu", "--quiet", "-o", str(program)]) == 1
    _, line = capsys.readouterr().out.splitlines()
    assert line.startswith(
        "XLA disagreed (CPU partitioner; --verify tpu asks the real one); "
        "collectives: each device sends 0 B: 120 KiB of the promised are missing"
    )
    assert program.exists()


REFUSED = [
    (["--verify", "gpu"], "--verify gpu cannot compile for v4", "use --verify tpu"),
    (
        ["--verify", "cpu", "--format", "specs"],
        "specs is not a program that XLA can check",
        "--format stablehlo or hlo",
    ),
    (["--verify", "cup"], "cup", "cpu"),
]


@pytest.mark.parametrize(("options", "said", "hint"), REFUSED)
def test_what_cannot_be_verified(options: list[str], said: str, hint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*BLOCK, *options]) == 2
    error = capsys.readouterr().err
    assert said in error and hint in error
