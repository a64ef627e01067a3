"""Plans saved, read back and carried over to the same program, a changed one and another mesh."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from programs import Case, arg, case_of, round_mesh
from random_programs import cases, plans

from toast_cli.base.errors import InputError
from toast_cli.cli import main
from toast_cli.hardware import load_spec
from toast_cli.pipeline import choose_meshes
from toast_cli.plan.decision_space import decision_space
from toast_cli.plan.decisions import Plan, Replicate
from toast_cli.plan.saved import SavedPlan, apply_plan, carried_over, read_plan, save_plan
from toast_cli.request import Request

SAMPLES = Path(__file__).parent.parent / "sample_models"
N, D, F = 8, 16, 64


def loss(p: Any, x: Any) -> Any:
    for layer in p["layers"]:
        x = x + jax.nn.relu(x @ layer["up"]) @ layer["down"]
    return jnp.sum(x**2)


def sgd(p: Any, x: Any) -> Any:
    return jax.tree.map(lambda w, g: w - 0.1 * g, p, jax.grad(loss)(p, x))


def renamed(weights: Any, tokens: Any) -> Any:
    return sgd(weights, tokens)


def normed(p: Any, x: Any) -> Any:
    return sgd(p, x / jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True)))


def train(layers: int = 2, n: int = N, d: int = D, f: int = F, step: Callable[..., Any] = sgd, **sizes: int) -> Case:
    weights = {"layers": [{"down": arg(f, d), "up": arg(d, f)} for _ in range(layers)]}
    return case_of(step, weights, arg(n, d), donate=(0,), mesh=round_mesh(**(sizes or {"data": 4, "model": 2})))


def fsdp_megatron(case: Case, weights: str = "p", batch: str = "x") -> Plan:
    up = f"{weights}['layers'][0]['up']"
    shards = (case.shard(f"{batch}.0", "data"), case.shard(f"{up}.1", "model"), case.shard(f"{up}.0", "data"))
    return case.problem.canonical((*shards, case.replicate("weights", "data")))


def saved(case: Case, plan: Plan, folder: Path) -> SavedPlan:
    path = folder / "plan.json"
    path.write_bytes(save_plan(case.problem, plan))
    return read_plan(str(path))


@settings(max_examples=30)
@given(st.data())
def test_the_same_program_gets_the_same_plan(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    case = data.draw(cases())
    plan = data.draw(plans(case.problem))
    again, notes = carried_over(case.problem, saved(case, plan, tmp_path_factory.getbasetemp()))
    assert again == plan
    assert [note for note in notes if "changes nothing" not in note] == []


@pytest.mark.parametrize(
    ("change", "names", "notes"),
    [
        ({}, ("p", "x"), []),
        ({"layers": 5}, ("p", "x"), []),
        ({"step": normed}, ("p", "x"), []),
        ({"step": renamed}, ("weights", "tokens"), []),
        ({"n": 32}, ("p", "x"), ["batch had 8 elements and has 32"]),
        ({"data": 2, "model": 4}, ("p", "x"), ["data was 4 devices and is 2", "model was 2 devices and is 4"]),
        ({"model": 2, "data": 4}, ("p", "x"), []),
        ({"n": 6}, ("p", "x"), ["over data) changes nothing here: 6 elements, 4 ways", "had 8 elements and has 6"]),
    ],
    ids=["same", "deeper", "normed", "renamed", "larger-batch", "other-sizes", "other-order", "indivisible"],
)
def test_a_changed_program(tmp_path: Path, change: dict[str, Any], names: tuple[str, str], notes: list[str]) -> None:
    case, changed = train(), train(**change)
    plan, said = carried_over(changed.problem, saved(case, fsdp_megatron(case), tmp_path))
    assert changed.problem.canonical(plan) == fsdp_megatron(changed, *names)
    assert len(said) == len(notes) and all(note in line for note, line in zip(notes, said, strict=True))


def attention(p: Any, x: Any) -> Any:
    q, k, v = (jnp.einsum("btd,dhk->bthk", x, p[name]) for name in ("wq", "wk", "wv"))
    scores = jax.nn.softmax(jnp.einsum("bthk,bshk->bhts", q, k))
    return jnp.einsum("bhts,bshk->bthk", scores, v)


def test_sides_of_conflicts_come_along(tmp_path: Path) -> None:
    weights = {name: arg(16, 4, 8) for name in ("wq", "wk", "wv")}
    case, changed = (case_of(attention, weights, arg(batch, 32, 16)) for batch in (4, 8))
    plan = (case.shard("x.1", "data", side=1), case.shard("p['wq'].1", "model"))
    assert plan[0].sides == (1,)
    again, _ = carried_over(changed.problem, saved(case, plan, tmp_path))
    assert again == (changed.shard("x.1", "data", side=1), changed.shard("p['wq'].1", "model"))


def test_where_a_decision_holds_comes_along(tmp_path: Path) -> None:
    case, changed = train(), train(layers=5)
    only, unless = ({scope: "p['layers'][0]['up'].1"} for scope in ("only", "unless"))
    plan, again = ((of.shard("x.0", "data", **only), of.shard("x.0", "model", **unless)) for of in (case, changed))
    assert carried_over(changed.problem, saved(case, plan, tmp_path)) == (again, [])


def test_what_has_no_counterpart_is_left_out(tmp_path: Path) -> None:
    case = train()
    other = case_of(lambda a: jnp.cumsum(a, axis=0), arg(5, 7), mesh=round_mesh(data=4))
    plan, notes = carried_over(other.problem, saved(case, fsdp_megatron(case), tmp_path))
    assert [type(decision).__name__ for decision in plan] == ["Replicate"]
    assert [note.partition(" is left out: ")[2] for note in notes] == [
        "nothing here is like batch (x.0)",
        "nothing here is like embed (p/layers/*/down.1, p/layers/*/up.0)",
        "this mesh has data",
    ]


def test_nothing_is_left_to_search_unless_asked(tmp_path: Path) -> None:
    case = train()
    plan = fsdp_megatron(case)
    applied = apply_plan(case.problem, saved(case, plan, tmp_path))
    assert applied.fixed == plan and decision_space(applied).choices == ()
    whole = apply_plan(case.problem, saved(case, plan, tmp_path), complete=True)
    kept_whole = Replicate(case.problem.roles.index("weights"), 1)  # would take back that the plan stores weights split
    assert decision_space(whole).choices == tuple(d for d in decision_space(case.problem).choices if d != kept_whole)


WRONG = [
    ("not json", "is not JSON"),
    ("[]", 'is not a plan of schema "toast.plan/1"'),
    ('{"schema": "toast.report/1"}', 'is not a plan of schema "toast.plan/1"'),
    ('{"schema": "toast.plan/1"}', "the plan is damaged"),
    ('{"schema": "toast.plan/1", "program": "m", "axes": {"data": "8"}, "decisions": []}', "axes.data is '8'"),
    ('{"schema": "toast.plan/1", "program": "m", "axes": [], "decisions": []}', "the plan is damaged"),
    ('{"schema": "toast.plan/1", "program": "m", "axes": {}, "decisions": [3]}', "the plan is damaged"),
    (
        '{"schema": "toast.plan/1", "program": "m", "axes": {}, "decisions": [{"axis": "data", "group": null, '
        '"unless": null, "sides": [], "arguments": "", "places": []}]}',
        "a decision is about no dimension and no arguments",
    ),
]


@pytest.mark.parametrize(("text", "what"), WRONG)
def test_files_that_are_no_plans(tmp_path: Path, text: str, what: str) -> None:
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(InputError) as caught:
        read_plan(str(path))
    assert what in caught.value.what and caught.value.where.startswith(str(path)) and "--save-plan" in caught.value.hint


def test_a_file_that_is_not_there() -> None:
    with pytest.raises(InputError, match=r"nowhere\.json: no such file"):
        read_plan("nowhere.json")


# On the command line


def test_a_plan_goes_from_run_to_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    program = str(SAMPLES / "moe_tiny.mlirbc.zst")
    options = ["--mesh", "v4-32", "--iterations", "10", "--quiet"]
    assert (
        main(["partition", program, *options, "--tactic", "expert:data", "--save-plan", "p.json", "--json", "a.json"])
        == 0
    )
    assert main(["partition", program, *options, "--plan", "p.json", "--json", "b.json", "--save-plan", "q.json"]) == 0
    first, second = (json.loads(Path(name).read_text()) for name in ("a.json", "b.json"))
    assert first["plan"]["decisions"] == second["plan"]["decisions"] != []
    assert first["predicted"] == second["predicted"]
    assert second["search"]["algorithm"] == "plan"
    assert Path("p.json").read_bytes() == Path("q.json").read_bytes()
    capsys.readouterr()
    assert main(["check", program, *options, "--plan", "p.json"]) == 0
    other = str(SAMPLES / "mlp_tiny.mlir")
    assert main(["partition", other, "--mesh", "v4-32", "--plan", "p.json", "--verbose"]) == 0
    out = capsys.readouterr().out
    assert "p.json: decision 1 (experts over data) is left out: nothing here is like experts" in " ".join(out.split())
    assert "search     none, since a saved plan was given" in out
    assert main(["partition", other, "--mesh", "v4-32", "--plan", "p.json", "--quiet"]) == 0
    said = capsys.readouterr()
    assert said.out.count("\n") == 1
    assert said.err.startswith("note: p.json: decision 1 (experts over data) is left out: nothing here is like experts")


@pytest.mark.parametrize(
    ("mesh", "shape", "expected"),
    [
        ("v4-32", None, {"data": 4, "model": 4}),
        ("v4-32", "data=2,model=8", {"data": 2, "model": 8}),
        ("v4.yaml", None, {"x": 16}),  # a file with axes
        ("v4-64", None, {"data": 8, "model": 4}),  # more devices
    ],
)
def test_a_plan_brings_its_mesh_shape_to_a_named_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mesh: str, shape: str | None, expected: dict[str, int]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("v4.yaml").write_text("chip: v4\ntopology: {torus: [2, 2, 4]}\naxes: {x: 16}\n")
    plan = SavedPlan("m", {"data": 4, "model": 4}, ())
    (chosen,) = choose_meshes(load_spec(mesh), Request("m.mlir", mesh, shape), plan)
    assert dict(zip(chosen.names, chosen.sizes, strict=True)) == expected


def test_explain_says_what_of_a_plan_does_not_carry_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    program = str(SAMPLES / "mlp_tiny.mlir")
    options = [program, "--mesh", "v4-32", "--quiet"]
    assert main(["partition", *options, "--strategy", "data-parallel", "--save-plan", "p.json"]) == 0
    assert main(["explain", *options, "--plan", "p.json", "--mesh-shape", "data=4,model=4"]) == 0
    assert "note: p.json: mesh axis data was 16 devices and is 4\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ("--complete", "--complete adds to a saved plan"),
        ("--plan p.json --strategy fsdp", "--plan: is a plan already"),
        ("--plan p.json --tactic fsdp:data", "--plan: is a plan already"),
        ("--plan p.json", "p.json: no such file"),
    ],
)
def test_options_that_make_no_sense(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], options: str, what: str
) -> None:
    monkeypatch.chdir(tmp_path)
    program = str(SAMPLES / "mlp_tiny.mlir")
    assert main(["partition", program, "--mesh", "v4-32", *options.split()]) == 2
    assert what in capsys.readouterr().err
