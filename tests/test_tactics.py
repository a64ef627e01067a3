"""Tactics: what each decides, on which programs, how users ask for them, and how they and the search share a plan."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest
from programs import SAMPLES, round_mesh, sample

from toast_cli.base.errors import InputError, ToastError, UsageError
from toast_cli.cli.app import run
from toast_cli.plan.decision_space import decision_space
from toast_cli.plan.decisions import Plan, Replicate, Shard
from toast_cli.plan.problem import Problem, make_problem
from toast_cli.price.evaluator import Evaluator
from toast_cli.report.words import summary
from toast_cli.search.run import Settings, run_search
from toast_cli.tactics import TACTICS, DoesNotApply, Look, applicable, parse_tactics, strategies, strategy
from toast_cli.tactics.model import effective
from toast_cli.tactics.requests import read_tactics
from toast_cli.tactics.strategies import STRATEGIES

MESH = round_mesh(data=4, model=2)
SMALL = {
    path.name.split(".")[0]: path for path in sorted(SAMPLES.iterdir()) if "_tiny" in path.name and path.suffix != ".py"
}


@cache
def problem(name: str) -> Problem:
    source, dimensions = sample(name)
    return make_problem(source.program, dimensions, MESH)


def split(of: Problem, plan: Plan) -> set[tuple[str, str]]:
    """(role or name of the dimension, axis) of each split."""
    groups = of.dimensions.groups
    return {(groups[d.group].role or groups[d.group].name, of.mesh.names[d.axis]) for d in plan if isinstance(d, Shard)}


def kept(of: Problem, plan: Plan) -> set[tuple[str, str]]:
    return {(of.roles[d.role], of.mesh.names[d.axis]) for d in plan if isinstance(d, Replicate)}


# tactic -> samples it must apply to, and samples it must not
SUITS: dict[str, tuple[set[str], set[str]]] = {
    "data-parallel": (
        {"t2b_tiny", "vit_tiny", "itx_decode_tiny", "moe_tiny", "mlp_tiny", "resnet50_tiny", "scan_tiny", "rnn_tiny",
         "unet_tiny"},
        {"gns_tiny", "long_tiny", "block_tiny"},
    ),
    "fsdp": (set(SMALL), set()),
    "zero2": (set(SMALL) - {"itx_decode_tiny", "itx_prefill_tiny"}, set()),
    "zero1": (set(SMALL) - {"itx_decode_tiny", "itx_prefill_tiny"}, set()),
    "megatron": (set(SMALL), set()),
    "sequence": ({"t2b_tiny", "long_tiny", "block_tiny", "moe_tiny"}, {"mlp_tiny", "resnet50_tiny", "gns_tiny"}),
    "context": ({"t2b_tiny", "long_tiny", "itx_decode_tiny"}, {"mlp_tiny", "gns_tiny"}),
    "expert": ({"moe_tiny"}, set(SMALL) - {"moe_tiny"}),
    "edge": ({"gns_tiny"}, set(SMALL) - {"gns_tiny"}),
    "vocabulary": ({"t2b_tiny", "itx_decode_tiny", "scan_tiny"}, {"mlp_tiny", "vit_tiny", "gns_tiny", "resnet50_tiny"}),
    "spatial": ({"unet_tiny"}, {"t2b_tiny", "gns_tiny", "mlp_tiny"}),
}  # fmt: skip


@pytest.mark.parametrize("name", SUITS)
def test_a_tactic_applies_where_it_makes_sense_and_says_why_not_elsewhere(name: str) -> None:
    suits, does_not = SUITS[name]
    for model in suits:
        of = problem(model)
        assert effective(of, tuple(TACTICS[name].decide(Look(of, (0,))))) or effective(
            of, tuple(TACTICS[name].decide(Look(of, (1,))))
        ), model
    for model in does_not:
        with pytest.raises(DoesNotApply, match="no dimension of the program looks like"):
            list(TACTICS[name].decide(Look(problem(model), (1,))))


# requests -> splits they must make, splits they must not, arguments kept whole; all on t2b_tiny
ASKED: list[tuple[list[str], set[tuple[str, str]], set[tuple[str, str]], set[tuple[str, str]]]] = [
    (["data-parallel:data"], {("batch", "data")}, {("embed", "data"), ("batch", "model")}, set()),
    (["fsdp:data"], {("batch", "data"), ("embed", "data")}, {("embed", "model")}, set()),
    (["zero3:data"], {("batch", "data"), ("embed", "data")}, {("embed", "model")}, set()),
    (["hsdp:data,model"], {("batch", "data"), ("batch", "model"), ("embed", "model")}, {("embed", "data")}, set()),
    (["hsdp"], {("batch", "data"), ("batch", "model"), ("embed", "model")}, {("embed", "data")}, set()),
    (["zero1:data"], {("batch", "data"), ("embed", "data")}, set(), {("weights", "data")}),
    (["megatron:model"], {("heads", "model"), ("ff", "model"), ("vocab", "model")},
     {("embed", "model"), ("batch", "model")}, set()),
    (["megatron:model", "sequence"], {("heads", "model"), ("seq", "model")}, {("seq", "data")}, set()),
    (["fsdp", "megatron"], {("batch", "data"), ("ff", "model")}, {("batch", "model")}, set()),
    (["fsdp:data,model"], {("batch", "data"), ("batch", "model")}, set(), set()),
    (["vocabulary:model"], {("vocab", "model")}, {("ff", "model")}, set()),
]  # fmt: skip


@pytest.mark.parametrize(("requests", "present", "absent", "whole"), ASKED, ids=[" ".join(row[0]) for row in ASKED])
def test_tactics_decide_what_their_names_say(
    requests: list[str], present: set[tuple[str, str]], absent: set[tuple[str, str]], whole: set[tuple[str, str]]
) -> None:
    of = parse_tactics(requests).state(problem("t2b_tiny"))
    found = split(of, of.fixed)
    assert present <= found
    assert not absent & found
    assert kept(of, of.fixed) == whole


SHORT = [
    ("dp", "data-parallel"), ("ddp x tp", "data-parallel x megatron"), ("cp", "context"),
    ("fsdp:data+tp:model", "fsdp:data+megatron:model"), ("fsdp x cp", "fsdp x context"),
]  # fmt: skip


@pytest.mark.parametrize(("short", "name"), SHORT)
def test_short_names(short: str, name: str) -> None:
    of = problem("t2b_tiny")
    assert strategy(of, short) == strategy(of, name)
    tactics = [short] if " x " not in short and "+" not in short else []
    assert parse_tactics(tactics).state(of).fixed == parse_tactics([name] if tactics else []).state(of).fixed


def test_experts_have_a_short_name() -> None:
    assert strategy(problem("moe_tiny"), "fsdp+ep") == strategy(problem("moe_tiny"), "fsdp+expert")


def test_short_names_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["tactics"]) == 0
    listed = capsys.readouterr().out
    assert all(f"(also: {names})" in listed for names in ("dp, ddp", "tp", "ep", "cp"))


def test_the_sequence_comes_last_and_experts_first_whatever_the_order_asked_for() -> None:
    of = problem("moe_tiny")
    plan = parse_tactics(["sequence:model", "data-parallel:data", "expert:data"]).state(of).fixed
    roles = [of.dimensions.groups[d.group].role for d in plan if isinstance(d, Shard)]
    assert roles[:2] == ["experts", "batch"]
    assert set(roles[2:]) == {"seq"}
    (experts, *_) = plan
    assert isinstance(experts, Shard)
    assert of.dimensions.groups[experts.unless].role == "seq"  # tokens that are still in sequence stay with the batch


def test_experts_over_an_axis_of_their_own_have_it_everywhere() -> None:
    plan = parse_tactics(["data-parallel:data", "expert:model"]).state(problem("moe_tiny")).fixed
    assert all(d.unless < 0 for d in plan if isinstance(d, Shard))


def test_expert_parallelism_with_the_batch_moves_tokens_in_all_to_alls() -> None:
    evaluator = Evaluator(problem("moe_tiny"))
    plan = strategy(evaluator.problem, "data-parallel:data+expert:data")
    assert "all-to-all" in {use.kind for use in evaluator.collectives(plan)}


def test_effective_plans_cost_what_the_whole_ones_do() -> None:
    of = problem("t2b_tiny")
    look = Look(of, (0, 1))
    whole = of.canonical((*look.split("data"), *look.split("weights")))
    short = effective(of, whole)
    assert len(short) < len(whole)
    assert Evaluator(of).exact_cost(short) == Evaluator(of).exact_cost(whole)


# ---------------------------------------------------------------- with the search


def test_what_a_tactic_decides_stays_and_the_search_completes_it() -> None:
    of = parse_tactics(["data-parallel:data"]).state(problem("t2b_tiny"))
    result = run_search(Evaluator(of), Settings(evaluations=150))
    assert result.plan[: len(of.fixed)] == of.fixed
    assert {d.axis for d in result.plan[len(of.fixed) :]} >= {1}
    free = run_search(Evaluator(problem("t2b_tiny")), Settings(evaluations=150))
    assert free.cost.step_seconds <= result.cost.step_seconds * 1.01


def test_search_names_the_only_axes_left_to_the_search() -> None:
    of = parse_tactics(["data-parallel:data", "search:model"]).state(problem("t2b_tiny"))
    result = run_search(Evaluator(of), Settings(evaluations=60))
    assert {d.axis for d in result.plan[len(of.fixed) :]} == {1}
    alone = parse_tactics(["search:model"]).state(problem("t2b_tiny"))
    assert {d.axis for d in run_search(Evaluator(alone), Settings(evaluations=60)).plan} == {1}


# requests -> arguments that the search may still keep whole, by axis; all on t2b_tiny
LEFT_OPEN: list[tuple[list[str], set[tuple[str, str]]]] = [
    ([], {("weights", "data"), ("state", "data"), ("weights", "model"), ("state", "model")}),
    (["data-parallel:data"], {("weights", "data"), ("state", "data"), ("weights", "model"), ("state", "model")}),
    (["fsdp:data"], {("weights", "model"), ("state", "model")}),
    (["zero2:data"], {("weights", "data"), ("weights", "model"), ("state", "model")}),  # decided by the tactic itself
    (["fsdp:data", "megatron:model"], set()),
]


@pytest.mark.parametrize(("requests", "whole"), LEFT_OPEN, ids=[" ".join(row[0]) for row in LEFT_OPEN])
def test_the_search_keeps_nothing_whole_that_a_tactic_splits_at_rest(
    requests: list[str], whole: set[tuple[str, str]]
) -> None:
    of = parse_tactics(requests).state(problem("t2b_tiny"))
    assert kept(of, decision_space(of).choices) == whole
    arguments = {of.op_pattern[number] for number in range(len(of.program.arguments))}
    for rest in decision_space(of).rests:
        assert all(of.choice(one, of.fixed) == of.choice(one, (*of.fixed, rest)) for one in arguments)


def test_a_faster_plan_that_keeps_weights_whole_does_not_take_back_what_fsdp_splits() -> None:
    of = parse_tactics(["fsdp:data"]).state(problem("itx_decode_tiny"))
    plan = run_search(Evaluator(of), Settings(evaluations=60)).plan
    assert plan[: len(of.fixed)] == of.fixed
    assert ("weights", "data") not in kept(of, plan)
    whole = of.canonical((*plan, Replicate(of.roles.index("weights"), 0)))
    assert Evaluator(of).cost(whole).step_seconds < Evaluator(of).cost(plan).step_seconds


def test_a_strategy_leaves_nothing_to_the_search() -> None:
    of = parse_tactics(strategy="fsdp+megatron").state(problem("t2b_tiny"))
    result = run_search(Evaluator(of), Settings(evaluations=60))
    assert result.plan == of.fixed
    assert result.evaluations <= 2
    assert of.fixed == strategies(problem("t2b_tiny"))["fsdp x megatron"]


@pytest.mark.parametrize("name", SMALL)
def test_every_strategy_is_a_plan_or_says_why_not(name: str) -> None:
    of = problem(name)
    plans, reasons = applicable(of)
    assert set(plans) | set(reasons) == set(STRATEGIES)
    assert {"fsdp", "megatron"} <= set(plans) | {n for n, why in reasons.items() if why.startswith("here the same")}
    assert len(set(plans.values())) == len(plans)
    assert all(plan == of.canonical(plan) for plan in plans.values())
    assert all(why for why in reasons.values())


# ---------------------------------------------------------------- how they are asked for

WRONG: list[tuple[list[str], str | None, str, str]] = [
    (["fsdq:data"], None, "unknown tactic 'fsdq'", 'did you mean "fsdp"?'),
    (["fsdp:date"], None, "unknown mesh axis 'date'", "data, model"),
    (["fsdp:"], None, "cannot read the axes", "fsdp:data"),
    (["fsdp:data,data"], None, "cannot read the axes", "fsdp:data"),
    ([""], None, "cannot read ''", "NAME:AXIS"),
    (["search"], None, "search takes the axes", "search:model"),
    (["fsdp:data", "megatron:model", "data-parallel"], None, "has no mesh axis left", "data-parallel:model"),
    (["expert:model"], None, "expert does not apply: no dimension of the program looks like experts", "toast tactics"),
    (["context:data"], None, "context does not apply", "toast tactics"),
    (["fsdp:data"], "megatron", "--strategy is a whole plan", "--tactic or --strategy"),
    ([], "fsdp+fsdq", "unknown tactic 'fsdq'", "fsdp"),
    ([], "fsdp+search:model", "leaves nothing to the search", "--tactic"),
    ([], "fsdp+megatron+data-parallel", "has no mesh axis left", ":model"),
]


@pytest.mark.parametrize(("tactics", "whole", "what", "hint"), WRONG, ids=[f"{a} {b}" for a, b, _, _ in WRONG])
def test_what_cannot_be_had_says_why(tactics: list[str], whole: str | None, what: str, hint: str) -> None:
    of = problem("mlp_tiny")
    with pytest.raises(ToastError) as error:
        requests = parse_tactics(tactics, whole)
        requests.check_axes([of.mesh.names])
        requests.state(of)
    assert what in error.value.what
    assert hint in error.value.hint


def test_an_axis_that_does_not_divide_is_said() -> None:
    source, dimensions = sample("mlp_tiny")
    of = make_problem(source.program, dimensions, round_mesh(data=7))
    with pytest.raises(UsageError, match="cannot be split 7 ways over data"):
        parse_tactics(["data-parallel:data"]).state(of)


# ---------------------------------------------------------------- tactics of one's own

YAML = """\
tactics:
  wide:
    about: the batch, and hidden widths
    steps:
      - split: [batch, ff]
      - keep: weights
  tail:
    place: last
    steps:
      - split: seq
  both:
    - use: data-parallel
    - split: vocab
"""
PYTHON = """\
from toast_cli.tactics import Tactic

def decide(look):
    return [*look.split("batch"), *look.keep("weights")]

wide = Tactic("wide", "the batch", decide)
broken = Tactic("broken", "", lambda look: look.nothing())
odd = Tactic("odd", "", lambda look: ["batch"])
"""


def test_a_yaml_file_defines_tactics(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(YAML)
    of = problem("t2b_tiny")
    plan = parse_tactics([f"{path}:wide:data"]).state(of).fixed
    assert split(of, plan) == {("batch", "data"), ("ff", "data")}
    assert kept(of, plan) == {("weights", "data")}
    assert split(of, parse_tactics([f"{path}:both:model"]).state(of).fixed) == {("batch", "model"), ("vocab", "model")}
    tail = parse_tactics([f"{path}:tail:data", "data-parallel:data"]).state(of).fixed
    assert [of.dimensions.groups[d.group].role for d in tail if isinstance(d, Shard)] == ["batch", "seq"]


def test_a_python_file_defines_tactics(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(PYTHON)
    of = problem("t2b_tiny")
    plan = parse_tactics([f"{path}:wide:data"]).state(of).fixed
    assert split(of, plan) == {("batch", "data")}
    assert kept(of, plan) == {("weights", "data")}
    with pytest.raises(InputError, match="tactic 'broken' failed: AttributeError"):
        parse_tactics([f"{path}:broken:data"]).state(of)
    with pytest.raises(InputError, match="tactic 'odd' decided 'batch'"):
        parse_tactics([f"{path}:odd:data"]).state(of)


FILES: list[tuple[str, str, str, str]] = [
    ("a.yaml", "", "a.yaml: is empty", "docs/howto/tactics.md"),
    ("a.yaml", "rules: {}", 'a.yaml:1: unknown key "rules"', "tactics"),
    ("a.yaml", "tactics:\n  x:\n    step: []\n", 'a.yaml:3: unknown key "step"', "steps"),
    ("a.yaml", "tactics:\n  x:\n    about: y\n", "a.yaml:3: x has no steps", "split"),
    ("a.yaml", "tactics:\n  x:\n    - splitt: batch\n", 'a.yaml:3: unknown key "splitt"', "split"),
    ("a.yaml", "tactics:\n  x:\n    - {split: batch, keep: weights}\n", "a.yaml:3: a step has 2 keys", "one of"),
    ("a.yaml", "tactics:\n  x:\n    place: middle\n    steps: []\n", 'tactics.x.place is "middle"', "first"),
    ("a.yaml", "tactics: [", "not valid YAML", ""),
    ("a.py", "x = 1\n", "defines no tactics", "Tactic("),
    ("a.py", "raise ValueError('no')\n", "cannot be run: ValueError: no", ""),
    ("a.py", "def f(:\n", "a.py:1: cannot be run: SyntaxError", ""),
]


@pytest.mark.parametrize(("name", "text", "what", "hint"), FILES, ids=[f"{n} {t[:30]!r}" for n, t, _, _ in FILES])
def test_a_file_that_is_wrong_says_where(tmp_path: Path, name: str, text: str, what: str, hint: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ToastError) as error:
        read_tactics(str(path))
    assert what in f"{Path(error.value.where).name}: {error.value.what}"
    assert hint in error.value.hint


@pytest.mark.parametrize(
    ("step", "what", "hint"),
    [
        ("split: bach", "unknown dimension 'bach'", 'did you mean "batch"?'),
        ("keep: everything", "unknown arguments 'everything'", "weights, state"),
        ("use: fsdq", "unknown tactic 'fsdq'", "fsdp"),
    ],
)
def test_words_in_a_file_that_mean_nothing_say_where(tmp_path: Path, step: str, what: str, hint: str) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(f"tactics:\n  x:\n    - {step}\n")
    with pytest.raises(ToastError) as error:
        parse_tactics([f"{path}:x:data"]).state(problem("t2b_tiny"))
    assert error.value.where == f"{path}:3"
    assert what in error.value.what
    assert hint in error.value.hint


def test_a_python_file_runs_only_when_it_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.py").write_text(f"import pathlib; pathlib.Path({str(tmp_path / 'ran')!r}).touch()\n" + PYTHON)
    assert run(["tactics"]) == 0
    assert not (tmp_path / "ran").exists()
    assert run(["tactics", "--file", str(tmp_path / "mine.py")]) == 0
    assert (tmp_path / "ran").exists()
    assert "wide" in capsys.readouterr().out


# ---------------------------------------------------------------- commands


def test_the_report_says_which_decisions_come_from_tactics(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    options = ["--tactic", "fsdp:data", "--tactic", "search:model", "--iterations", "60", "--json", str(report)]
    assert run(["partition", str(SMALL["mlp_tiny"]), "--mesh", "v4-32", *options]) == 0
    facts = json.loads(report.read_text())["plan"]
    assert facts["tactics"] == ["fsdp:data", "search:model"]
    assert 0 < facts["fixed"] <= len(facts["decisions"])
    assert {d["axis"] for d in facts["decisions"][: facts["fixed"]]} == {"data"}
    assert {d["axis"] for d in facts["decisions"][facts["fixed"] :]} <= {"model"}
    assert f"decisions 1 to {facts['fixed']} from fsdp:data" in capsys.readouterr().out


def test_a_strategy_is_reported_as_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["partition", str(SMALL["mlp_tiny"]), "--mesh", "v4-32", "--strategy", "fsdp+megatron"]) == 0
    out = capsys.readouterr().out
    assert "from fsdp, megatron" in out
    assert "none, since a strategy was given" in out


def test_a_tactic_that_does_not_apply_ends_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["partition", str(SMALL["mlp_tiny"]), "--mesh", "v4-32", "--tactic", "expert:data"]) == 2
    err = capsys.readouterr().err
    assert "expert does not apply: no dimension of the program looks like experts" in err
    assert "toast tactics PROGRAM" in err


def test_shapes_on_which_a_tactic_does_not_apply_are_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    options = [
        "--mesh",
        "v4-32",
        "--mesh-shape",
        "auto",
        "--tactic",
        "data-parallel:data",
        "--tactic",
        "megatron:model",
    ]
    assert run(["partition", str(SMALL["mlp_tiny"]), *options, "--iterations", "40", "--quiet"]) == 0
    assert "data (8): data-parallel" in capsys.readouterr().out


def test_tactics_says_what_applies(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["tactics", str(SMALL["moe_tiny"]), "--mesh", "v4-32", "--json", "-"]) == 0
    facts = json.loads(capsys.readouterr().out)
    by_name = {one["name"]: one for one in facts["tactics"]}
    assert by_name["expert"]["axes"] == ["data", "model"]
    assert by_name["expert"]["decides"] == ["experts"]
    assert by_name["edge"]["axes"] == []
    assert "looks like edges" in by_name["edge"]["reason"]
    assert "fsdp x megatron" in facts["strategies"]


def test_tactics_needs_program_and_mesh_together(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["tactics", str(SMALL["moe_tiny"])]) == 2
    assert "give both" in capsys.readouterr().err


# strategy -> what the summary must say of weights and of axes left alone, and what it must not
SAID: list[tuple[str, list[str], list[str]]] = [
    ("data-parallel", ["weights and state replicated"], ["not used", "ZeRO"]),
    ("data-parallel:data", ["weights and state replicated", "model (2): not used"], ["data (4): not used"]),
    ("fsdp", ["data x model (8): FSDP"], ["replicated", "not used"]),
    ("fsdp+megatron", ["data (4): FSDP"], ["replicated", "not used"]),
    ("megatron:model", ["data (4): not used"], ["replicated"]),
]


@pytest.mark.parametrize(("name", "present", "absent"), SAID, ids=[row[0] for row in SAID])
def test_the_summary_tells_of_whole_weights_and_idle_axes(name: str, present: list[str], absent: list[str]) -> None:
    of = problem("t2b_tiny")
    text = summary(of, strategy(of, name))
    assert all(words in text for words in present), text
    assert not any(words in text for words in absent), text


def test_an_idle_axis_is_remarked_on_with_the_reason(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["partition", str(SMALL["t2b_tiny"]), "--mesh", "v4-32", "--strategy", "fsdp:data"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "mesh axis model (2) is not used: no tactic uses it, and the search was not allowed to" in shown
    options = ["--subject-to", "communication[model]<=0", "--tactic", "data-parallel:data", "--iterations", "60"]
    assert run(["partition", str(SMALL["mlp_tiny"]), "--mesh", "v4-32", *options]) == 0
    assert "mesh axis model (2) is not used: splitting over it pays nowhere" in capsys.readouterr().out


def test_a_cache_that_rests_by_the_batch_is_used_as_it_rests() -> None:
    """Decoding has no optimizer's state, and tensor parallelism gathers no weights: nothing is ZeRO."""
    of = problem("itx_decode_tiny")
    for name in ("data-parallel", "megatron", "data-parallel x megatron"):
        assert "ZeRO" not in summary(of, strategy(of, name)), name
    assert summary(of, strategy(of, "megatron")) == "data x model (8): tensor-parallel (heads, ff, vocab_2, vocab)"
    assert summary(of, strategy(of, "fsdp")) == "data x model (8): FSDP"


def test_strategies_are_called_as_people_call_them() -> None:
    of = problem("t2b_tiny")
    assert {name: summary(of, strategy(of, name)) for name in STRATEGY_NAMES} == STRATEGY_NAMES


def test_all_kinds_over_an_axis_are_named() -> None:
    of = problem("t2b_tiny")
    number = {group.name: k for k, group in enumerate(of.dimensions.groups)}
    plan = Shard(number["ff"], 0), Shard(number["batch"], 0), Shard(number["heads"], 1)
    kinds = "data (4): data-parallel and tensor-parallel (ff); model (2): tensor-parallel (heads)"
    assert summary(of, of.canonical(plan)) == kinds


STRATEGY_NAMES = {
    "data-parallel": "data x model (8): data-parallel; weights and state replicated",
    "zero2": "data x model (8): data-parallel with sharded state (ZeRO-2); weights replicated",
    "fsdp": "data x model (8): FSDP",
    "megatron": "data x model (8): tensor-parallel (heads, ff, vocab)",
    "context": "data x model (8): context-parallel (seq); weights and state replicated",
    "fsdp x megatron": "data (4): FSDP; model (2): tensor-parallel (heads, ff, vocab)",
    "fsdp x context": "data (4): FSDP; model (2): context-parallel (seq)",
}
