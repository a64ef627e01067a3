"""Describes the sides of a decision's conflicts. Enters: source, problem, a decision. Leaves: a line each.

Attention scores `[batch, heads, seq, seq]` have one dimension twice, and a mesh axis can split only one of the two. A
decision chooses one by a number, its side; the text names the array, the dimension and the place in the source.
"""

from __future__ import annotations

from dataclasses import dataclass

from toast_cli.dimensions.model import SlotKind
from toast_cli.frontend.source import Source
from toast_cli.plan.decisions import ASIDE, Shard
from toast_cli.plan.problem import Problem


@dataclass(frozen=True)
class Sight:
    """The op that shows a conflict best: the one with the most arithmetic of those with a large array.

    Attributes:
        op: its number. array: type of the array that has the dimension twice; "" if no array has it twice, but the op
            sums over one of the two and keeps the other.
        names: side -> its name there: the number of the array's dimension, or what the op does with it.
    """

    op: int
    array: str
    names: dict[int, str]

    def called(self, side: int) -> str:
        """`f32[1,4,128,128].2`, or what the op does with the dimension; `neither` dimension for `ASIDE`."""
        if side == ASIDE:
            return f"neither dimension of {self.array}" if self.array else "nothing"
        name = self.names.get(side, "one of the two")
        return f"{self.array}.{name}" if self.array and side in self.names else name


def side_texts(source: Source, problem: Problem, decision: Shard) -> list[str]:
    """[conflicts of the decision's group] the dimension that the decision splits there, `f32[1,4,128,128].2
    (layers.py:49 attention)`; dimensions count from 0, as in `params['w'].0`."""
    resolutions = problem.dimensions.groups[decision.group].resolutions
    texts = []
    for resolution, side in zip(resolutions, decision.sides, strict=False):
        seen = sight(problem, resolution)
        place = (source.location(seen.op) or problem.program.ops[seen.op].name).split(" (")[0]
        texts.append(f"{seen.called(side)} ({place})")
    return texts


def sight(problem: Problem, resolution: int) -> Sight:
    """The op that shows a conflict best: one whose array has both dimensions, else an op with both, else one with
    either."""
    program, dimensions = problem.program, problem.dimensions
    found: list[tuple[tuple[int, float, int, int], Sight]] = []
    for number, strands in dimensions.strands.items():
        sides = {k: strand.side for k, strand in enumerate(strands) if strand and strand.resolution == resolution}
        if not sides:
            continue
        op, form = program.ops[number], dimensions.forms[number]
        for value, dims in zip(op.operands + op.results, form.operands + form.results, strict=True):
            names = {
                sides[slot]: str(d) for d, slots in reversed([*enumerate(dims)]) for slot in slots if slot in sides
            }
            if len(names) > 1:
                of = program.values[value]
                found.append(((1, op.flops, of.bytes, -number), Sight(number, str(of), names)))
        summed = {
            side: "what is summed over" if form.kinds[slot] == SlotKind.REDUCTION else "what is kept"
            for slot, side in sides.items()
        }
        found.append(((min(len(sides), 2) - 2, op.flops, 0, -number), Sight(number, "", summed)))
    return max(found, key=lambda one: one[0])[1]
