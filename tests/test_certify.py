"""Certificates: a proven lower bound beside the plan, and MCTS against what is proven to be the best."""

from __future__ import annotations

import json
import multiprocessing
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from programs import SAMPLES, sample

from toast_cli.cli import main
from toast_cli.evaluate.evaluator import Evaluator
from toast_cli.hardware import load_spec
from toast_cli.plan.patterns import make_problem
from toast_cli.plan.problem import Problem
from toast_cli.search import SearchResult, selection, solver
from toast_cli.search.certify import certify
from toast_cli.search.objective import PRICE
from toast_cli.search.run import run_search

UNBOUNDED = 1e6  # seconds: no test depends on the clock
MLP = next(str(path) for path in SAMPLES.iterdir() if path.name.startswith("mlp_tiny."))


def problem(name: str, spec: str, limit_bytes: int | None = None, **shape: int) -> Problem:
    source, dimensions = sample(name)
    return make_problem(source.program, dimensions, load_spec(spec).mesh(shape or None, limit_bytes))


@pytest.mark.parametrize("name", ["mlp_tiny", "ssm_tiny"])
def test_no_search_beats_the_certificate_of_another(name: str) -> None:
    evaluator = Evaluator(problem(name, "v4-32", data=8, model=2))
    poor = run_search(evaluator, "mcts", 0, 3)
    certified = certify(evaluator, poor, UNBOUNDED)
    good = run_search(evaluator, "mcts", 1, 2000)
    assert 0.0 < certified.lower_bound <= good.cost.step_seconds * (1.0 + 1e-6)
    assert replace(certified, seconds=poor.seconds, lower_bound=0.0, proven=False) == poor


@pytest.mark.parametrize(("name", "spec"), [("mlp_tiny", "v4-32"), ("mlp_tiny", "h100-8")])
def test_mcts_reaches_the_proven_optimum_on_two_axes(name: str, spec: str) -> None:
    evaluator = Evaluator(problem(name, spec, data=4 if spec == "h100-8" else 8, model=2))
    proven = certify(evaluator, run_search(evaluator, "mcts", 0), UNBOUNDED)
    assert proven.proven
    optimum = priced(proven)
    assert all(priced(run_search(evaluator, "mcts", seed)) <= optimum * 1.0001 for seed in range(1, 3))


def priced(result: SearchResult) -> float:
    """Seconds with what each decision must gain: what searches compare."""
    return result.cost.step_seconds * (1.0 + PRICE * len(result.plan))


def test_nothing_is_proven_where_nothing_fits() -> None:
    """The bound does not know about memory."""
    tight = Evaluator(problem("mlp_tiny", "v4-32", limit_bytes=2**14, data=8, model=2))
    certified = certify(tight, run_search(tight, "mcts", 0, 200))
    assert not certified.proven
    assert not certified.fits
    assert certified.lower_bound > 0.0


def test_meshes_of_many_axes_have_no_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("toast_cli.search.selection.MOST_SPLITS", 10)
    small = Evaluator(problem("mlp_tiny", "v4-32", data=8, model=2))
    certified = certify(small, run_search(small, "mcts", 0, 100))
    assert certified.lower_bound == 0.0
    assert not certified.proven


def test_the_report_says_what_is_proven(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    arguments = ["partition", MLP, "--mesh", "v4-32", "--certify"]
    assert main([*arguments, "--json", str(report)]) == 0
    assert "proof      no sharding of the arrays is faster" in capsys.readouterr().out
    facts = json.loads(report.read_text())
    assert facts["search"]["proven"] is True
    bound, step = facts["search"]["lower_bound_seconds"], facts["predicted"]["step_seconds"]
    assert bound <= step * (1.0 + 1e-6) <= bound * 1.006
    assert "certify" in facts["timings"]


def test_only_step_times_are_proven(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["partition", MLP, "--mesh", "v4-32", "--certify", "--minimise", "peak_memory"]) == 2
    assert "--certify" in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore:os.fork")  # other tests of this process may have started jax
def test_the_solver_ends_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not look at signals, so it is a process that is ended at the first look that says so."""
    monkeypatch.setattr(solver, "may_fork", lambda: True)
    monkeypatch.setattr(solver, "_solved", lambda program: threading.Event().wait())
    looks = [False, False, True]
    assert selection.least_seconds(problem("mlp_tiny", "v4-32", data=16), 1000.0, asked=lambda: looks.pop(0)) == 0.0
    assert looks == []
    assert not multiprocessing.active_children()
