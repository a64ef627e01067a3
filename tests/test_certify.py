"""Certificates: a proven lower bound beside the plan, and MCTS against what is proven to be the best."""

from __future__ import annotations

import json
import multiprocessing
import threading
from dataclasses import replace
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from programs import SAMPLES, arg, case_of, round_mesh, sample

from toast_cli.cli import main
from toast_cli.evaluate.evaluator import Evaluator
from toast_cli.hardware import load_spec
from toast_cli.plan.patterns import make_problem
from toast_cli.plan.problem import Problem
from toast_cli.search import solver
from toast_cli.search.exact import Bound, Deadline, Known, bound, certify
from toast_cli.search.incumbent import SearchResult
from toast_cli.search.objective import PRICE
from toast_cli.search.run import Settings, run_search

UNBOUNDED = 1e6  # seconds: no test depends on the clock


def path_of(name: str) -> str:
    return next(str(path) for path in SAMPLES.iterdir() if path.name.startswith(f"{name}."))


MLP = path_of("mlp_tiny")


def problem(name: str, spec: str, limit_bytes: int | None = None, **shape: int) -> Problem:
    source, dimensions = sample(name)
    return make_problem(source.program, dimensions, load_spec(spec).mesh(shape or None, limit_bytes))


@cache
def searched(name: str) -> SearchResult:
    return run_search(Evaluator(problem(name, "v4-32", data=8, model=2)), Settings(evaluations=500))


@cache
def certified_on_two_axes(name: str) -> SearchResult:
    return certify(Evaluator(problem(name, "v4-32", data=8, model=2)), searched(name), UNBOUNDED)


@cache
def full_bound() -> Bound:
    return bound(problem("mlp_tiny", "v4-32", data=8, model=2), Deadline(UNBOUNDED))


def test_no_search_beats_the_certificate_of_another() -> None:
    evaluator = Evaluator(problem("mlp_tiny", "v4-32", data=8, model=2))
    poor = run_search(evaluator, Settings(evaluations=3))
    certified = certify(evaluator, poor, UNBOUNDED)
    assert 0.0 < certified.lower_bound <= searched("mlp_tiny").cost.step_seconds * (1.0 + 1e-6)
    assert replace(certified, seconds=poor.seconds, lower_bound=0.0, proven=False) == poor


def test_mcts_reaches_the_proven_optimum_on_two_axes() -> None:
    evaluator = Evaluator(problem("mlp_tiny", "v4-32", data=8, model=2))
    proven = certified_on_two_axes("mlp_tiny")
    assert proven.proven
    assert priced(run_search(evaluator, Settings(seed=1, evaluations=500))) <= priced(proven) * 1.0001


def test_what_is_left_out_does_not_change_the_bound() -> None:
    of = problem("mlp_tiny", "v4-32", data=8, model=2)
    found, full = searched("mlp_tiny"), full_bound()
    quick = bound(of, Deadline(UNBOUNDED), Known(priced(found), priced(found)))
    assert quick.seconds == pytest.approx(full.seconds, rel=PRICE / 2)
    assert full.seconds < priced(found)


def recurrent(w: jax.Array, xs: jax.Array) -> jax.Array:
    def loss(w: jax.Array) -> jax.Array:
        return jnp.sum(jax.lax.scan(lambda state, x: (jnp.tanh(state @ w + x), None), xs[0], xs)[0])

    return w - 0.1 * jax.grad(loss)(w)


def test_sums_of_loops_have_a_bound() -> None:
    """A recurrence adds up gradients from step to step, which it may carry as they are: they are completed behind it at
    the soonest."""
    of = case_of(recurrent, arg(64, 64), arg(10, 2**14, 64), mesh=round_mesh(data=8, model=2))
    certified = certify(of.evaluator, run_search(of.evaluator, Settings(evaluations=500)), UNBOUNDED)
    cost = certified.cost
    assert cost.communication_seconds > 1e-4
    assert cost.compute_seconds + 0.5 * cost.communication_seconds <= certified.lower_bound <= cost.step_seconds


def test_gradients_that_nobody_takes_in_pieces_are_reduced_whole() -> None:
    """Two gradients of one matrix, which 63 rows and columns keep whole: their sum is all-reduced. Where uses could
    take pieces of it a reduce-scatter of half the time would do."""

    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        return w - jax.grad(lambda w: jnp.sum(jnp.sin(jnp.sin(x @ w) @ w)))(w)

    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((63, 63), (2**20, 63))]
    case = case_of(step, *shapes, mesh=round_mesh(data=4))
    found = run_search(case.evaluator, Settings(evaluations=200))
    least = bound(case.problem, Deadline(UNBOUNDED)).seconds
    assert found.cost.communication_seconds > 2e-4
    assert least == pytest.approx(found.cost.step_seconds, abs=1e-5)


def test_what_is_faster_by_less_than_its_decisions_are_worth_is_no_better() -> None:
    """Nothing is split, and reductions of a thousandth of the step would be faster in sixteen pieces."""
    certified = certified_on_two_axes("ssm_tiny")
    assert certified.plan == ()
    assert 0.99 * certified.cost.step_seconds <= certified.lower_bound
    assert certified.cost.step_seconds > certified.lower_bound
    assert certified.proven


def priced(result: SearchResult) -> float:
    """Seconds with what each decision must gain: what searches compare."""
    return result.cost.step_seconds * (1.0 + PRICE * len(result.plan))


def test_nothing_is_proven_where_nothing_fits() -> None:
    """The bound does not know about memory."""
    tight = Evaluator(problem("mlp_tiny", "v4-32", limit_bytes=2**14, data=8, model=2))
    certified = certify(tight, run_search(tight, Settings(evaluations=200)))
    assert not certified.proven
    assert not certified.fits
    assert certified.lower_bound > 0.0


def test_meshes_of_many_axes_have_no_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("toast_cli.search.exact.MOST_SPLITS", 10)
    small = Evaluator(problem("mlp_tiny", "v4-32", data=8, model=2))
    certified = certify(small, run_search(small, Settings(evaluations=100)))
    assert certified.lower_bound == 0.0
    assert not certified.proven


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("itx_decode_tiny", "if nothing overlaps, no sharding of the arrays is faster"),
        ("mlp_tiny", "if nothing overlaps, no plan is better: 0.05"),  # what a decision has to gain
    ],
)
def test_the_report_says_what_is_proven(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, model: str, said: str
) -> None:
    report = tmp_path / "report.json"
    arguments = ["partition", path_of(model), "--mesh", "v4-32", "--certify", "--iterations", "500"]
    assert main([*arguments, "--json", str(report)]) == 0
    assert f"proof      {said}" in capsys.readouterr().out
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
    monkeypatch.setattr(solver, "_solve", lambda program: threading.Event().wait())
    looks = [False, False, True]
    of = problem("mlp_tiny", "v4-32", data=16)
    assert bound(of, Deadline(1000.0, lambda: looks.pop(0) if looks else True)).seconds == 0.0
    assert looks == []
    assert not multiprocessing.active_children()
