"""Every kind of op, split along each dimension it can be, in every form: numbers and collectives are as promised."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

import pytest
from cases import SITUATIONS
from cases.model import Situation
from cases.running import FORMS, MESHES, REGIONS, Planned, Whole
from jaxlib.mlir.dialects import stablehlo
from op_kinds import OPS, TEXTS

from toast_cli.emit.regions.rules import RULES
from toast_cli.plan.decision_space import decision_space
from toast_cli.plan.decisions import Plan, Shard
from toast_cli.plan.sharding import Sharding

SPLIT = {name: Situation(*OPS[name]) if name in OPS else Situation(TEXTS[name]) for name in (*OPS, *TEXTS)}
# What they hold is in no manual region.
ALIKE = frozenset(
    """elementwise of CHLO; bits; fewer bits; functions of one number; functions of two; bits of integers;
    parts of complex numbers; older operations; functions of CHLO""".replace("\n   ", "").split("; ")
)
assert SPLIT.keys() >= ALIKE
# Ops that no program here or in the corpus holds.
UNTRIED = {
    "all_gather all_to_all collective_broadcast collective_permute": "by hand",
    "collective_reduce cross-replica-sum reduce_scatter": "by hand",
    "async_start async_done send recv": "between programs, which nothing can run here",
    "tuple get_tuple_element": "taken apart when a program is read: test_normalise",
    "uniform_quantize uniform_dequantize": "refused: test_older_text",
    "unary_einsum": "XLA does not translate it",
    "set_dimension_size dynamic_conv dynamic_gather": "of unknown sizes, which are refused",
}


@lru_cache(maxsize=2)
def planned(name: str) -> Planned:
    return Planned(Whole(SPLIT[name]), MESHES["4x2"], plans=1)


def plans(at: Planned) -> list[Plan]:
    """Each dimension class over an axis of 4, and two of them over axes of 4 and 2; those that do something else."""
    choices = [d for d in decision_space(at.evaluator.problem).choices if isinstance(d, Shard)]
    single = [(d,) for d in choices if d.axis == 0]
    pairs: list[Plan] = [
        (*one, two) for one in single for two in choices if two.axis == 1 and two.group != one[0].group
    ]
    found: dict[tuple[tuple[Sharding, ...], tuple[object, ...]], Plan] = {}
    for plan in (*single, *pairs[:2]):
        lowered = at.evaluator.lowered(plan)
        found.setdefault((tuple(lowered.shardings), tuple(lowered.required.items())), plan)
    return list(found.values())


def trials() -> list[Any]:
    """(op, form, how many plans, None for all): `make test` compiles one of each form."""
    forms = (*FORMS, REGIONS)
    pairs = [(name, form) for name in SPLIT for form in ("stablehlo", REGIONS) if form != REGIONS or name not in ALIKE]
    one = [pytest.param(name, form, 1, id=f"{name}, {form}, 1") for name, form in pairs]
    thorough = pytest.mark.thorough
    every = [pytest.param(name, form, None, marks=thorough, id=f"{name}, {form}") for name in SPLIT for form in forms]
    return one + every


@pytest.mark.parametrize(("name", "form", "many"), trials())
def test_as_promised_however_it_is_split(name: str, form: str, many: int | None) -> None:
    at = planned(name)
    tried = plans(at)[::-1][:many]  # those over two axes first
    assert {plan: found for plan in tried if (found := list(at.under(plan).wrong_with(form)))} == {}


def test_every_op_of_stablehlo_is_tried() -> None:
    tried = {
        name for one in (*SPLIT.values(), *SITUATIONS.values()) for name in re.findall(r"stablehlo\.\w+", one.text)
    }
    known = {kind.OPERATION_NAME for kind in vars(stablehlo).values() if hasattr(kind, "OPERATION_NAME")}
    untried = {f"stablehlo.{name}" for names in UNTRIED for name in names.split()}
    assert known - tried == untried & known  # a jaxlib has the ops of its version


# Tried in tests/test_ragged_dots.py.
ELSEWHERE = {"chlo.ragged_dot", "__op$block_scaled_dot"}


def test_every_local_rule_is_tried() -> None:
    untried = set(RULES) - ELSEWHERE
    for one in (*SPLIT.values(), *SITUATIONS.values()):
        if any(name in one.text for name in untried):
            untried -= {op.name for op in one.source().program.ops}
    assert not untried
