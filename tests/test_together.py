"""Several programs on the same chips under one sharding of the arguments that they share (`--with`)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import toast_cli as toast
from toast_cli.base.errors import UsageError
from toast_cli.cli import main
from toast_cli.request import parse_with

BF16 = jnp.bfloat16
WIDTH, ROWS, LIMIT = 1024, 64, "5MiB"
MESH = ("--mesh", "v4-8", "--mesh-shape", "data=4", "--memory-limit", LIMIT, "--iterations", "60")


def array(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, BF16)


WEIGHT = array(WIDTH, 4 * WIDTH)


def there(w: Any, x: jax.Array) -> jax.Array:
    """Best with columns of the weight split, for results that are split likewise."""
    return x @ w


def back(w: Any, cache: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Best with rows of the weight split."""
    return cache + 1, x @ w.T


@pytest.fixture(scope="module")
def lowered() -> dict[str, Any]:
    cache = array(WIDTH, WIDTH)
    return {
        "there": jax.jit(there).lower(WEIGHT, array(ROWS, WIDTH)),
        "back": jax.jit(back, donate_argnums=1).lower(WEIGHT, cache, array(ROWS, 4 * WIDTH)),
    }


@pytest.fixture(scope="module")
def folder(lowered: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("programs")
    for name, one in lowered.items():
        (folder / f"{name}.mlir").write_text(one.as_text(debug_info=True))
    return folder


def planned_together(folder: Path, out: Path, runs: int) -> dict[str, Any]:
    """Reports of both programs, where `back` runs so often."""
    out.mkdir()
    programs = (str(folder / "there.mlir"), "--with", f"{folder / 'back.mlir'}:{runs}")
    assert main(["partition", *programs, *MESH, "-o", str(out), "--json", f"{out}/", "--quiet"]) == 0
    assert sorted(path.name for path in out.iterdir()) == ["back.json", "back.mlir", "there.json", "there.mlir"]
    return {name: json.loads((out / f"{name}.json").read_text()) for name in ("there", "back")}


@pytest.fixture(scope="module")
def reports(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return planned_together(folder, tmp_path_factory.mktemp("often") / "out", 500)


def sharding_of_weight(report: Any) -> Any:
    return next(one["sharding"] for one in report["arguments"] if one["name"] == "w")


def test_the_program_that_runs_often_decides(folder: Path, reports: dict[str, Any], tmp_path: Path) -> None:
    assert sharding_of_weight(reports["there"]) == sharding_of_weight(reports["back"]) == [["data"], []]
    seldom = planned_together(folder, tmp_path / "out", 1)
    assert sharding_of_weight(seldom["there"]) == sharding_of_weight(seldom["back"])


def test_the_table_adds_up(reports: dict[str, Any]) -> None:
    facts = reports["back"]["together"]
    assert facts == reports["there"]["together"]
    assert facts["shared"] == 1
    there, back = facts["programs"]
    assert (there["runs"], back["runs"]) == (1, 500)
    assert facts["seconds"] == pytest.approx(there["step_seconds"] + 500 * back["step_seconds"])
    assert back["step_seconds"] == pytest.approx(back["alone_seconds"], rel=0.05)
    assert there["step_seconds"] > 1.05 * there["alone_seconds"]


def test_what_a_program_keeps_is_taken_off_the_others_memory(reports: dict[str, Any]) -> None:
    there, back = reports["back"]["together"]["programs"]
    limit = 5 * 2**20
    assert back["kept_bytes"] >= 2 * WIDTH * WIDTH / 4  # the cache on one of four devices
    assert reports["there"]["predicted"]["limit_bytes"] == pytest.approx(limit - back["kept_bytes"], abs=1)
    assert reports["back"]["predicted"]["limit_bytes"] == pytest.approx(limit - there["kept_bytes"], abs=1)


def test_in_python(lowered: dict[str, Any]) -> None:
    options = {"mesh_shape": {"data": 4}, "memory_limit": LIMIT, "iterations": 60}
    plans = toast.partition_together(lowered, mesh="v4-8", runs={"back": 500}, **options)
    assert list(plans) == ["there", "back"]
    assert plans["there"].in_specs()[0] == plans["back"].in_specs()[0]
    with pytest.raises(UsageError, match="no program 'often'"):
        toast.partition_together(lowered, mesh="v4-8", runs={"often": 2})


WRONG = (
    # --with and other options; what the error says
    (("{back}:0",), "runs 0 times"),
    (("{back}", "-o", "out.mlir"), "this is a folder"),
    (("{back}", "--with", "{back}", "-o", "out"), "two programs are called back"),
    (("{back}", "--pipeline", "2"), "one program is planned so"),
    (("{other}",), "share no argument"),
)


@pytest.mark.parametrize(("options", "message"), WRONG)
def test_bad_input_is_one_error(
    folder: Path, options: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "other.mlir").write_text(jax.jit(lambda y: y @ y).lower(array(64, 64)).as_text(debug_info=True))
    paths = {name: str(folder / f"{name}.mlir") for name in ("back", "other")}
    text = [option.format(**paths) for option in options]
    extra = ["-o", str(folder / "out")] if "out" in text else []
    assert main(["partition", str(folder / "there.mlir"), *MESH, "--with", *text, *extra]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("error: ") == 1


@pytest.mark.parametrize(
    ("text", "expected"),
    [("a.mlir", ("a.mlir", 1)), ("a.mlir:64", ("a.mlir", 64)), ("c:/a.mlir", ("c:/a.mlir", 1)), ("a:b:2", ("a:b", 2))],
)
def test_runs_stand_behind_a_colon(text: str, expected: tuple[str, int]) -> None:
    assert parse_with(text) == expected
