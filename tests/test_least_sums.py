"""What completing sums takes at least, against what it takes under plans."""

from __future__ import annotations

import numpy as np
import pytest
from programs import sample

from toast_cli.compiler.profiles import find_profile
from toast_cli.cost.corrections import NO_CORRECTIONS
from toast_cli.evaluate.items import make_items
from toast_cli.evaluate.pricing import Pricer
from toast_cli.hardware import load_spec
from toast_cli.plan.patterns import make_problem
from toast_cli.search.least_sums import LeastSums
from toast_cli.search.moves import Moves


@pytest.mark.parametrize("name", ["rnn_tiny", "ssm_tiny", "scan_tiny", "mlp_tiny"])
@pytest.mark.parametrize("spec", ["v4-32", "h100-8"])
def test_no_plan_completes_sums_sooner(name: str, spec: str) -> None:
    source, dimensions = sample(name)
    problem = make_problem(source.program, dimensions, load_spec(spec).mesh(None))
    items = make_items(problem, find_profile(problem.mesh.chip))
    pricer, moves, rng = Pricer(problem, items, NO_CORRECTIONS, {}), Moves(problem), np.random.default_rng(0)
    taken = 0.0
    for _ in range(12):
        plan = problem.fixed
        for _ in range(int(rng.integers(1, 6))):
            possible = moves.after(plan)
            plan = problem.canonical((*plan, *possible[int(rng.integers(len(possible)))]))
        lowered = {number: problem.op_sharding(number, plan) for number in range(len(problem.patterns))}
        sums = LeastSums(problem, items, pricer, lambda use, at=lowered: {at[use[0]].operands[use[1]]})
        least = sum(min(seconds for _, seconds in sums.options(*each)) for each in lowered.items())
        seconds = sum(use.seconds for item in items.sums for use in pricer.sum_collectives(item, lowered))
        assert least <= seconds * (1.0 + 1e-9) + 1e-15
        taken = max(taken, least)
    assert taken > 0.0
