"""Explains what a step saves from its forward to its backward pass: bytes, and what it would cost to compute it again
or to keep it in host memory. In: a study. Out: an explanation."""

from __future__ import annotations

import re
from collections import defaultdict

import numpy as np

from toast_cli.cost.model import Alive
from toast_cli.explain.model import Explanation, Item
from toast_cli.explain.study import Study
from toast_cli.folding import NamedArray, fold
from toast_cli.plan.sharding import shards
from toast_cli.program.host_memory import is_transfer
from toast_cli.program.model import Program
from toast_cli.program.ops import ARGUMENT, CARRY, DYNAMIC_UPDATE_SLICE
from toast_cli.program.rematerialised import remade_values
from toast_cli.program.roles import INPUTS, WEIGHTS, argument_roles, carried_results
from toast_cli.quantities import format_bytes

_LISTED = 40
# Between the loops of the forward and the backward pass at least this fraction of what is alive within them is alive.
_NEAR = 0.8
_RANDOM = frozenset({"stablehlo.rng", "stablehlo.rng_bit_generator"})


def explain_saved(study: Study) -> Explanation:
    """The arrays in device memory that the backward pass reads of the forward pass; alike ones are one row."""
    program = study.problem.program
    if not _has_backward_pass(study):
        return study.explanation("saved memory", ["The program has no backward pass to save anything for."])
    turn = _turn(program)
    alive = study.evaluator.alive_at(study.plan, turn)
    saved = [one for one in alive if one.role in ("temporary", "carry") and _is_made(program, one.value, turn)]
    costs = _Costs(study, [one.value for one in saved])
    names = [costs.place(one.value) for one in saved]
    rows = fold(
        [
            NamedArray(name, (str(program.values[one.value]), one.bytes, re.sub(r"\d+", "*", name)))
            for one, name in zip(saved, names, strict=True)
        ]
    )
    items = [costs.item(row.pattern, [saved[k] for k in row.members]) for row in rows]
    items.sort(key=lambda item: -item.bytes)
    total = sum(one.bytes for one in saved)
    sentences = [
        f"The forward pass saves {format_bytes(total)} for the backward pass on each device; memory peaks at "
        f"{format_bytes(study.cost.peak_bytes)}."
    ]
    if any(item.costs for item in items):
        sentences.append(
            "recompute: seconds a step to compute the array again from the others (--recompute); offload: seconds of "
            "transfers to host memory and back, which overlap with compute (--offload)."
        )
    return study.explanation("saved memory", sentences, listed="saved for the backward pass", items=items[:_LISTED])


def _has_backward_pass(study: Study) -> bool:
    """True if a program updates weights, or JAX's names say that an op is from a backward pass."""
    program = study.problem.program
    names, roles = argument_roles(program)
    updated = carried_results(program)
    if any(names[role] == WEIGHTS and updated[n] >= 0 for n, role in enumerate(roles)):
        return True
    return any("transpose(" in study.source.name_stack(op) for op in range(len(program.ops)))


def _turn(program: Program) -> int:
    """The first op of the backward pass: where arrays with earlier and later readers take the most bytes."""
    names, roles = argument_roles(program)
    weights = {
        program.values[a.value].shape for a, role in zip(program.arguments, roles, strict=True) if names[role] != INPUTS
    }
    change, remade = np.zeros(len(program.ops) + 1, dtype=np.int64), remade_values(program)
    last = len(program.ops) - len(program.results)
    for number, value in enumerate(program.values):
        readers = [op for op, _ in program.users[number] if op < last]
        if len(readers) > 1 and value.shape not in weights and not remade[number]:
            change[readers[0] + 1] += value.bytes
            change[readers[-1] + 1] -= value.bytes
    alive = np.cumsum(change)[:-1]
    near = map(int, np.flatnonzero(alive >= _NEAR * alive.max()))
    return min(near, key=lambda op: (len(_loops_around(program, op)), -alive[op], -op))


def _loops_around(program: Program, op: int) -> list[int]:
    found, loop = [], program.ops[op].loop
    while loop >= 0:
        found.append(loop)
        loop = program.loops[loop].parent
    return found


def _is_made(program: Program, value: int, turn: int) -> bool:
    """True if the forward pass computes an array; a loop around both passes does not finish what it carries."""
    maker = program.ops[program.producer[value]]
    if remade_values(program)[value]:  # zeros to which gradients are added
        return False
    return program.producer[value] < turn and not (maker.name == CARRY and program.loops[maker.loop].last >= turn)


class _Costs:
    """Seconds to compute saved arrays again, and to transfer them. saved: the values."""

    def __init__(self, study: Study, saved: list[int]) -> None:
        self._study, self._program = study, study.problem.program
        self._remade = remade_values(self._program)
        self._slices = {value: self._slice(value) for value in saved}
        self._kept = set(self._slices.values()) | set(saved)
        self._seconds: dict[int, float] = defaultdict(float)  # op -> of its kernels
        for use in study.evaluator.kernels(study.plan):
            for op in use.ops:
                self._seconds[op] += use.seconds / len(use.ops)

    def item(self, place: str, members: list[Alive]) -> Item:
        """A row of arrays that are alike."""
        size, rate = sum(one.bytes for one in members), self._study.problem.mesh.chip.host_bytes_per_second
        costs = {"offload": 2.0 * size / rate} if rate else {}
        again = [self._recompute(one.value) for one in members]
        if all(again):
            costs = {"recompute": sum(filter(None, again)), **costs}
        text = str(self._program.values[members[0].value])
        return Item(text, place, len(members), bytes=round(size), costs=costs)

    def place(self, value: int) -> str:
        """Where an array, or each slice of a stack, is computed."""
        maker = self._program.producer[self._slices[value]]
        place = self._study.place(maker)
        return f"carried from layer to layer, {place}" if self._program.ops[maker].name == CARRY else place

    def _slice(self, value: int) -> int:
        """The value itself; if a loop stacks it, one iteration's slice, before it is reshaped for that."""
        program = self._program
        if program.ops[program.producer[value]].name == CARRY:
            writers = (program.ops[op] for op, position in program.users[value] if not position)
            value = next((op.operands[1] for op in writers if op.name == DYNAMIC_UPDATE_SLICE), value)
        while (maker := program.ops[program.producer[value]]).operands and self._is_view(value):
            value = maker.operands[0]
        return value

    def _is_view(self, value: int) -> bool:
        maker = self._program.ops[self._program.producer[value]]
        before = [self._program.values[v].elements for v in maker.operands[:1]]
        return (maker.kind.view or is_transfer(maker)) and before == [self._program.values[value].elements]

    def _recompute(self, value: int) -> float | None:
        """Seconds to compute an array again from the other saved ones; None if that is impossible, or if it is what the
        layers pass on."""
        program, wanted = self._program, self._slices[value]
        home = program.ops[program.producer[wanted]].loop
        makers, read, stack = set[int](), {wanted}, [wanted]
        while stack:
            one = stack.pop()
            number = program.producer[one]
            op = program.ops[number]
            known = op.name in (ARGUMENT, CARRY) or op.loop != home or (one in self._kept and one != wanted)
            if known and not self._remade[one]:
                read.add(one)
            elif not known and number not in makers:
                if op.name in _RANDOM:
                    return None
                makers.add(number)
                stack += op.operands
        if not makers:
            return None
        made = {result for number in makers for result in program.ops[number].results}
        rate, trips = self._study.problem.mesh.chip.memory_bytes_per_second, program.ops[max(makers)].trips
        traffic = trips * sum(map(self._local_bytes, read)) / rate
        sent = sum(use.seconds * self._study.share_of_values(use, made) for use in self._study.collectives)
        return max(sum(self._seconds[number] for number in makers), traffic) + sent

    def _local_bytes(self, value: int) -> float:
        sharding, sizes = self._study.lowered.shardings[value], self._study.problem.mesh.sizes
        return self._program.values[value].bytes / shards(sharding, sizes)
