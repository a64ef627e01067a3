"""Options are declared once: what derives from the declarations, and what has to say the same."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import typer

from toast_cli.api import plan as api
from toast_cli.base.errors import UsageError
from toast_cli.cli.app import app
from toast_cli.request import DEFAULTS, OPTIONS, Effort, Request, make_request
from toast_cli.search.run import PLANS

BARE = Request("model.mlir", "v4-32")


def commands() -> dict[str, Any]:
    """Name -> command, as the option parser knows it."""
    group: Any = typer.main.get_command(app)
    return dict(group.commands)


def test_there_is_a_budget_for_every_effort() -> None:
    assert set(PLANS) == set(Effort)


def test_partition_has_every_option() -> None:
    flags = {flag for parameter in commands()["partition"].params for flag in parameter.opts}
    assert {option.flag for option in OPTIONS.values()} <= flags


@pytest.mark.parametrize("name", ["partition", "sweep", "check", "explain", "compare"])
def test_commands_say_of_an_option_what_is_declared(name: str) -> None:
    own = {
        ("sweep", "--memory-limit"),
        ("sweep", "--jobs"),
        ("check", "--jobs"),
        ("compare", "--strategy"),
        ("sweep", "--seed"),
        ("sweep", "--mesh-shape"),
    }
    declared = {option.flag: option for option in OPTIONS.values()}
    found = 0
    for parameter in commands()[name].params:
        for flag in set(parameter.opts) & declared.keys() - {flag for command, flag in own if command == name}:
            help = str(getattr(parameter, "help", ""))
            assert help.startswith(declared[flag].help.removesuffix(".")), flag
            found += 1
    assert found >= 8


def test_the_python_interface_has_every_option_with_its_default() -> None:
    parameters = inspect.signature(api.partition).parameters
    assert {name: one.default for name, one in parameters.items() if one.default is not one.empty} == DEFAULTS


@pytest.mark.parametrize(
    ("given", "field", "value"),
    [
        ({"budget": "500ms"}, "budget_seconds", 0.5),
        ({"memory_limit": "2GiB"}, "memory_limit", 2**31),
        ({"memory-limit": "2GiB"}, "memory_limit", 2**31),
        ({"effort": "high"}, "effort", "high"),
        ({"effort": Effort.high}, "effort", "high"),
        ({"pin": ["w=data"]}, "pins", ("w=data",)),
        ({"seed": "3"}, "seed", 3),
        ({"confirm": 2, "confirm_budget": "10s"}, "confirm_seconds", 10.0),
        ({"quiet": True, "output": "x.mlir"}, "effort", "medium"),
        ({"seed": None}, "seed", 0),
    ],
)
def test_values_are_read_as_declared(given: dict[str, Any], field: str, value: object) -> None:
    assert getattr(make_request("model.mlir", "v4-32", given), field) == value


def test_nothing_given_is_the_bare_request() -> None:
    assert make_request("model.mlir", "v4-32", {}) == BARE


@pytest.mark.parametrize(
    ("given", "where"),
    [
        ({"effort": "much"}, "--effort"),
        ({"iterations": 0}, "--iterations"),
        ({"budget": "0s"}, "--budget"),
        ({"memory_limit": "much"}, "--memory-limit"),
        ({"plan": "p.json", "strategy": "fsdp"}, "--plan"),
        ({"confirm_budget": "1s"}, "--confirm-budget"),
    ],
)
def test_what_cannot_be_read_is_told_at_its_flag(given: dict[str, Any], where: str) -> None:
    with pytest.raises(UsageError) as error:
        make_request("model.mlir", "v4-32", given)
    assert error.value.where == where
