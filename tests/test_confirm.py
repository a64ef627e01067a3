"""The compiler has the last word: who is asked, who is chosen, what is kept."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from checking import toast
from programs import source_of_text

from toast_cli.ask_xla.confirm import Compiled, Confirmation, ConfirmedRow, Confirmer, PlanToCompile, compiled_cost
from toast_cli.base.files import DiskCache, key_of
from toast_cli.dimensions import analyse
from toast_cli.hardware import load_spec
from toast_cli.plan.decisions import Plan, Shard
from toast_cli.plan.problem import make_problem
from toast_cli.price.cost import Cost
from toast_cli.price.evaluator import Evaluator

TEXT = """
func.func @main(%x: tensor<64x32xf32>, %w: tensor<32x64xf32>) -> tensor<64x64xf32> {
  %0 = stablehlo.dot_general %x, %w, contracting_dims = [1] x [0] : (tensor<64x32xf32>, tensor<32x64xf32>) -> tensor<64x64xf32>
  return %0 : tensor<64x64xf32>
}
"""  # noqa: E501
LIMIT = 1000
A, B, C, D = (((Shard(group, axis),)) for group, axis in ((0, 0), (1, 0), (0, 1), (1, 1)))


@dataclass
class Table:
    """A compiler that looks its answers up. `asked`: plans in the order in which they came."""

    answers: dict[Plan, Compiled]
    label: str = "table"
    identity: tuple[object, ...] = ("table",)
    knows_memory: bool = True
    asked: list[Plan] = field(default_factory=list)

    def judge(self, content: bytes, timeout_seconds: float) -> Compiled:
        plan = next(plan for plan in self.answers if repr(plan).encode() == content)
        self.asked.append(plan)
        return self.answers[plan]


def took(compute: float, exposed: float = 0.0, peak: int = 10) -> Compiled:
    return Compiled("compiled", "", compute, exposed, exposed, peak)


TOO_LARGE, REFUSED = Compiled("out of memory", "exceeds"), Compiled("refused", "Check failed")


def candidate(name: str, plan: Plan, step: float = 1.0, peak: float = 10.0) -> PlanToCompile:
    return PlanToCompile(name, plan, Cost(step, 0.0, peak, 5.0))


@pytest.fixture(scope="module")
def evaluator() -> Evaluator:
    source = source_of_text(TEXT)
    mesh = load_spec("v4-32").mesh({"data": 8, "model": 2}, LIMIT)
    return Evaluator(make_problem(source.program, analyse(source.program), mesh))


def confirmed(
    evaluator: Evaluator, table: Table, cache: DiskCache[Compiled] | None = None, **options: object
) -> Confirmation:
    listed = options.pop("listed", None) or [candidate(f"plan {k}", plan) for k, plan in enumerate(table.answers)]
    asked = Confirmer(evaluator, lambda p: repr(p).encode(), table, cache=cache or DiskCache(None, Compiled), **options)  # type: ignore[arg-type]
    return asked.confirm(listed)  # type: ignore[arg-type]


# what the compiler says of A, B and C -> which is taken
CHOICES = {
    "the fastest": ([took(3.0), took(1.0, 0.5), took(1.0, 1.0)], 1),
    "the fastest that fits": ([took(3.0), took(1.0, peak=LIMIT + 1), took(2.0)], 2),
    "not what runs out of memory": ([TOO_LARGE, REFUSED, took(9.0)], 2),
    "the first of equals": ([took(1.0), took(1.0), took(1.0)], 0),
    "none": ([TOO_LARGE, took(1.0, peak=LIMIT + 1), REFUSED], None),
}


@pytest.mark.parametrize("name", CHOICES)
def test_the_compiler_chooses(evaluator: Evaluator, name: str) -> None:
    answers, expected = CHOICES[name]
    found = confirmed(evaluator, Table(dict(zip((A, B, C), answers, strict=True))))
    assert found.chosen == expected
    assert found.rejected is (expected is None)


def test_a_compiler_that_says_nothing_rejects_nothing(evaluator: Evaluator) -> None:
    found = confirmed(evaluator, Table({A: REFUSED, B: REFUSED}))
    assert found.chosen is None
    assert not found.rejected


def test_plans_written_alike_are_compiled_once(evaluator: Evaluator) -> None:
    table = Table({A: took(1.0)})
    found = confirmed(evaluator, table, listed=[candidate("search", A), candidate("fsdp", A)])
    assert table.asked == [A]
    assert [row.candidate.name for row in found.rows] == ["search"]


def test_what_is_clearly_slower_is_not_compiled(evaluator: Evaluator) -> None:
    table = Table({A: took(1.3), B: took(1.0), C: took(1.0)})
    listed = [candidate("search", A, 1.3), candidate("search 2", B), candidate("fsdp", C, 1.3)]
    found = confirmed(evaluator, table, listed=listed, defers=True)
    assert table.asked == [A, B]  # the search's own plan always is
    assert (found.rows[2].compiled, found.rows[2].why) == (None, "predicted to be 1.30 times as slow as the best")


def test_what_was_set_aside_is_compiled_where_the_model_was_wrong_about_the_best(evaluator: Evaluator) -> None:
    table = Table({A: took(3.0), B: took(2.0), C: took(1.0)})
    listed = [candidate("search", A), candidate("fsdp", B, 6.0), candidate("megatron", C, 10.0)]
    found = confirmed(evaluator, table, listed=listed, defers=True)
    assert table.asked == [A, B]  # 3 s instead of 1: what is thought to take 6 may take 2, but what 10 does not
    assert found.chosen == 1
    assert [row.why for row in found.rows[:2]] == ["", ""]
    assert "10.00 times as slow" in found.rows[2].why


def test_no_time_left_is_said(evaluator: Evaluator) -> None:
    table = Table({A: took(1.0)})
    found = confirmed(evaluator, table, seconds=0.0)
    assert (table.asked, found.chosen, found.rows) == ([], None, ())


def test_answers_are_kept(evaluator: Evaluator, tmp_path: Path) -> None:
    table, cache = Table({A: took(1.0), B: REFUSED}), DiskCache(tmp_path / "cache", Compiled)
    confirmed(evaluator, table, cache)
    found = confirmed(evaluator, table, cache)
    assert table.asked == [A, B]
    assert [row.compiled.cached for row in found.rows if row.compiled] == [True, True]
    table.identity = ("table", "another version")
    confirmed(evaluator, table, cache)
    assert table.asked == [A, B, A, B]


def test_a_damaged_entry_counts_as_none(tmp_path: Path) -> None:
    cache, key = DiskCache(tmp_path, Compiled), key_of(b"program", "compiler")
    cache.store(key, took(1.0))
    assert cache.find(key) is not None
    for damaged in ("", "[]", "{", '{"outcome": 1, "nonsense": 2}'[:-1]):
        (tmp_path / f"{key}.json").write_text(damaged)
        assert cache.find(key) is None


def test_a_compilation_that_ran_out_of_time_is_asked_again(evaluator: Evaluator, tmp_path: Path) -> None:
    table, cache = Table({A: Compiled("timed out")}), DiskCache(tmp_path, Compiled)
    confirmed(evaluator, table, cache)
    confirmed(evaluator, table, cache)
    assert table.asked == [A, A]


def test_overlap_is_predicted_where_the_compiler_has_no_cycles() -> None:
    """It lists 2 s of collectives where 4 s were predicted, a quarter of them exposed: 0.5 s beside 1 s of compute."""
    thought = PlanToCompile("search", A, Cost(1.0, 4.0, 10.0, 5.0, exposed_seconds=1.0))
    row = ConfirmedRow(thought, Compiled("compiled", "", None, 2.0, 2.0, None))
    assert (row.exposed_seconds, row.step_seconds) == (0.5, 1.5)
    assert compiled_cost(row).step_seconds == 1.5
    scheduled = ConfirmedRow(thought, Compiled("compiled", "", 3.0, 2.0, 0.25, None))
    assert scheduled.step_seconds == 3.25


def test_from_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("TOAST_CACHE", "on")
    program, report = tmp_path / "dot.mlir", tmp_path / "report.json"
    program.write_text(TEXT)
    words = [
        "partition",
        str(program),
        "--mesh",
        "v4-32",
        "--confirm",
        "1",
        "--confirm-with",
        "cpu",
        "--json",
        str(report),
    ]
    assert toast(*words) == 0
    facts = json.loads(report.read_text())["confirmation"]
    assert facts["plans"][0]["name"] == "search"
    assert facts["plans"][0]["outcome"] == "compiled"
    assert facts["chosen"]
    assert any((tmp_path / "cache" / "toast" / "compiled").iterdir())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--confirm-with", "cpu"], "--confirm N"),
        (["--confirm", "2", "--confirm-with", "gpu"], "cannot compile for v4"),
        (["--confirm", "-1"], "--confirm"),
    ],
)
def test_what_cannot_be_confirmed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    program = tmp_path / "dot.mlir"
    program.write_text(TEXT)
    assert toast("partition", str(program), "--mesh", "v4-32", *words) == 2
    assert said in capsys.readouterr().err
