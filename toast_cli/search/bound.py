"""A lower bound on the step time of every plan that starts with a given one; see `exact`."""

from __future__ import annotations

from math import prod

from toast_cli.cost.collectives import collective_seconds
from toast_cli.cost.compute import kernel_seconds
from toast_cli.cost.fusion import PRODUCTS, materialised
from toast_cli.cost.items import WorkItem, work_items
from toast_cli.plan.decisions import Plan
from toast_cli.plan.iteration import Iteration
from toast_cli.plan.problem import Problem


class LowerBound:
    """`bound(plan)`: seconds no plan that begins with `plan` can beat."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._work = work_items(problem, materialised(problem.program, problem.free))
        self._memo: dict[tuple[int, Plan], Iteration] = {}

    def __call__(self, plan: Plan) -> float:
        return sum(self._item(work, self._iteration(work.pattern, plan)) for work in self._work)

    def moved(self, plan: Plan, child: Plan) -> bool:
        """Whether any op is split differently under `child`: if not, the decision did nothing and nothing it leads to is new."""
        patterns = range(len(self._problem.patterns))
        return any(self._iteration(p, plan) != self._iteration(p, child) for p in patterns)

    def _iteration(self, pattern: int, plan: Plan) -> Iteration:
        roles = frozenset([self._problem.patterns[pattern].role])
        key = (pattern, self._problem.relevant(plan, self._problem.pattern_groups[pattern], roles))
        found = self._memo.get(key)
        if found is None:
            found = self._memo[key] = self._problem.iterate(pattern, key[1])
        return found

    def _item(self, work: WorkItem, iteration: Iteration) -> float:
        sizes = self._problem.mesh.sizes
        spent = {axis for axes in iteration.slot_axes for axis in axes}
        ways = prod(sizes)
        mesh = self._problem.mesh
        reads = sum(read for read, _, _ in (*work.operands, *work.results))
        passes = max(max((t for _, t, _ in work.operands), default=0.0), sum(t for _, t, _ in work.results))
        vector = sum(flops for _, _, flops in (*work.operands, *work.results))
        product = work.flops if work.name in PRODUCTS else 0.0
        seconds = kernel_seconds(
            mesh.chip,
            work.dtype,
            product / ways,
            (vector + work.flops - product) / ways,
            (reads + passes) / ways,
            work.kernels,
        )
        unspent = prod(sizes[a] for a in range(len(sizes)) if a not in spent)
        for k, size in enumerate(work.whole_bytes):
            over = tuple(a for a in iteration.reduced if a not in iteration.scattered[k])
            if over:
                local = size / prod(sizes[a] for axes in iteration.computed[k] for a in axes) / unspent
                share = min(work.reduction_shares, default=1.0)
                seconds += 0.5 * share * collective_seconds(mesh, "all-reduce", local, over)
        return seconds * work.runs
