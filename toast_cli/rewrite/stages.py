"""Cuts a step into programs of pipeline stages: a forward and a backward program for each stage, which run once for
each microbatch, and programs that run once in a step (conversions of weights, the optimizer).

The step is a loop over microbatches, the user's or that of `rewrite.microbatches`, with a sharding on every value. Ops
of the loop that read layers' weights for the first time, all that leads to them, and what the source locations say of
ops behind them, are the forward pass. Each is on the highest stage of what it reads, and so hands values on to higher
stages only. All other ops of the loop are the
backward pass. Each is on the highest stage at which the forward values that it reads are, but not above a backward
value that it reads, and so hands values on to lower stages only. Results are right wherever an op is: placement decides
only what is sent. Ops that depend on weights alone, or on inputs alone, run wherever they are read.

Outside the loop, an op is on the stage of the largest array that it reads. Where values go back and forth (each stage
needs the norm of all gradients), a stage has several programs, one after the other.

Sums over microbatches are right because the batch is split so: ops that see several examples and are no sums over them
are refused (see `rewrite.batch_split`), and a mean is a sum of examples that are divided by a constant.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import numpy as np

from toast_cli import xla
from toast_cli.emit.annotations import full_annotations
from toast_cli.emit.minimal import reduced_behind_transposes
from toast_cli.emit.misread import in_regions
from toast_cli.emit.shardy import CONSTRAINT, ShardyNotation, annotated, read_sharding, written
from toast_cli.frontend.known_numbers import known_numbers
from toast_cli.frontend.places import FORWARD as FORWARD_PASS
from toast_cli.frontend.places import name_stack_of, pass_of
from toast_cli.frontend.source import Source
from toast_cli.frontend.trips import trip_count
from toast_cli.hardware import Mesh
from toast_cli.plan.decisions import Plan
from toast_cli.plan.partitioned import PartitionedProgram
from toast_cli.plan.sharding import Sharding
from toast_cli.price.evaluator import Evaluator
from toast_cli.price.pipelines import PricedPipeline
from toast_cli.program.model import Program
from toast_cli.program.ops import BARRIER, BROADCAST_IN_DIM, RESHAPE, TRANSPOSE, WHILE
from toast_cli.program.roles import INPUTS, argument_roles
from toast_cli.program.stack import Stack
from toast_cli.rewrite.block_graph import clone
from toast_cli.rewrite.layer_loops import Divided, LayerLoops
from toast_cli.rewrite.stage_files import (
    AFTER,
    BACKWARD,
    BEFORE,
    FORWARD,
    INDEX,
    ScheduleStep,
    StagedArray,
    StagedProgram,
    StageProgram,
    StageValue,
    refusal,
)
from toast_cli.xla import ir


def staged_program(planned: StagePlan) -> StagedProgram:
    """The programs of a plan of stages. Raises UsageError, at `--pipeline`, for a program that cannot be cut."""
    source, stack, priced, mesh = planned.source, planned.stack, planned.priced, planned.evaluator.problem.mesh
    stages, axis = priced.stages, mesh.names.index(priced.axis)
    module, shardings = _annotated(source, planned.evaluator.lowered(planned.plan))
    block = xla.main_function(module).entry_block
    loops = [op.operation for op in block.operations if op.operation.name == WHILE]
    loops = [op for op in loops if trip_count(op) == priced.microbatches]
    if not loops:
        raise refusal(f"the program has no loop over all {priced.microbatches} microbatches")
    loop = max(loops, key=lambda op: len(xla.operations_in(op)))
    if stack.scanned:
        with module.context, ir.Location.unknown():
            divided = LayerLoops(block, loop, shardings, stack, stages).run()
    else:
        arguments, results = ([([v], 0) for v in vs] for vs in (block.arguments, xla.terminator(block).operands))
        places = zip(source.program.arguments, block.arguments, strict=True)
        stage_of = {v: stack.weights[a.value] * stages // stack.layers for a, v in places if a.value in stack.weights}
        divided = Divided(loop, arguments, results, stage_of)
    staged = _Cut(source.program, module, shardings, divided, priced, mesh).run()
    sizes = [stages * n if k == axis else n for k, n in enumerate(mesh.sizes)]
    numbers = np.arange(stages * mesh.devices).reshape(sizes)
    devices = tuple(tuple(map(int, part.flat)) for part in np.split(numbers, stages, axis))
    return replace(staged, axis=priced.axis, mesh=dict(zip(mesh.names, sizes, strict=True)), devices=devices)


def _annotated(source: Source, lowered: PartitionedProgram) -> tuple[Any, dict[Any, Sharding]]:
    """A copy of a program's module with a sharding on every value, and the shardings of its values."""
    shardings: dict[Any, Sharding] = {}
    with in_regions(source, lowered) as (rewritten, plan):
        plan = reduced_behind_transposes(rewritten, plan)
        notation = ShardyNotation(source.module, plan.axis_names, plan.axis_sizes)
        with annotated(source.module, full_annotations(rewritten, plan), notation):
            module = source.module.operation.clone()
            for old, new in zip(xla.operations_in(source.module), xla.operations_in(module), strict=True):
                for value, twin in zip(_made_by(old), _made_by(new), strict=True):
                    if old.name == CONSTRAINT:
                        shardings[twin] = read_sharding(old.attributes["sharding"], plan.axis_names)
                    elif value in rewritten.numbers:
                        shardings[twin] = plan.shardings[rewritten.numbers[value]]
    return module, shardings


def _made_by(operation: Any) -> list[Any]:
    """Results of an operation, and arguments of its regions."""
    return [*operation.results, *(value for r in operation.regions for block in r for value in block.arguments)]


@dataclass(frozen=True)
class StagePlan:
    """A plan of stages. source: in a loop over microbatches. evaluator: of that on the mesh of a stage."""

    source: Source
    evaluator: Evaluator
    plan: Plan
    stack: Stack
    priced: PricedPipeline


@dataclass(eq=False)
class _Fragment:
    """A program in the making. wanted: values that it makes for others, in order. members: ops. inputs: values."""

    phase: str
    stage: int
    level: int = 0
    wanted: dict[Any, None] = field(default_factory=dict)
    members: list[Any] = field(default_factory=list)
    inputs: list[Any] = field(default_factory=list)

    @property
    def name(self) -> str:
        return f"{self.phase}_{self.stage}" + (f"_{self.level}" if self.level else "")


class _Cut:
    """One cut of a module, which it changes. Values are those of the module; a sum over microbatches has four: the
    loop's operand, the argument of its body, the next value that this hands on, and the loop's result."""

    def __init__(
        self, program: Program, module: Any, shardings: dict[Any, Sharding], divided: Divided, priced: PricedPipeline,
        mesh: Mesh,
    ) -> None:  # fmt: skip
        self._module, self._shardings, self._program, self._divided = module, shardings, program, divided
        self._stages, self._microbatches = priced.stages, priced.microbatches
        self._axes = dict(zip(mesh.names, mesh.sizes, strict=True))
        self._notation = ShardyNotation(module, mesh.names, mesh.sizes)
        block = xla.main_function(module).entry_block
        outer = [op.operation for op in block.operations]
        self._arguments = [value for values, _ in divided.arguments for value in values]
        self._results = [value for values, _ in divided.results for value in values]
        self._loop, self._body = divided.loop, divided.loop.regions[1].blocks[0]
        self._index: Any = None
        self._carried: dict[Any, int] = {}  # argument of the loop's body -> its number
        self._names: dict[Any, str] = {}
        self._find_carried()
        for op in outer:  # each reader of a number has its own broadcast, so that numbers are sent
            if op.name == BROADCAST_IN_DIM and not op.operands[0].type.rank:
                for use in list(op.result.uses)[1:]:
                    copy = op.clone(ip=ir.InsertionPoint(use.owner))
                    use.owner.operands[use.operand_number] = copy.results[0]
                    self._shardings[copy.results[0]] = self._sharding(op.result)
        outer = [op.operation for op in block.operations]  # with what that adds
        inner = [op.operation for op in self._body.operations]
        self._yields = list(inner[-1].operands)
        self._reads = {op: list(dict.fromkeys(v for _, _, v in xla.outer_operands([op]))) for op in (*outer, *inner)}
        # Ops of the body that nothing reads any more do not count.
        live = self._leading_to(map(self._owner, (*self._results, *self._yields)))
        self._reads[self._loop] = [*self._loop.operands, *(v for op in inner if op in live for v in self._reads[op])]
        needed = self._leading_to([self._loop])
        live |= needed
        # Ops before the loop, in it and behind it, without terminators.
        early = [op for op in outer if op in needed and op != self._loop]
        late = [op for op in outer if op in live and op not in needed]
        self._parts = (early, [op for op in inner if op in live], late)
        self._part = {op: number for number, ops in enumerate(self._parts) for op in ops}
        self._order = {op: number for number, op in enumerate(self._part)}
        self._users: dict[Any, list[Any]] = defaultdict(list)
        for op in self._part:
            for value in self._reads[op]:
                self._users[value].append(op)
        # Arguments that a value depends on, as bits; those that are inputs, and those that follow training.
        self._roots = {value: 1 << number for number, value in enumerate(self._arguments)}
        names, roles = argument_roles(program)
        inputs = {
            v for role, (vs, _) in zip(roles, divided.arguments, strict=True) if names[role] == INPUTS for v in vs
        }
        self._inputs = sum(self._roots[value] for value in inputs)
        counters = [v for v in self._arguments if isinstance(v.type.element_type, ir.IntegerType)]  # also random keys
        self._weights = sum(self._roots.values()) & ~sum(self._roots[v] for v in {*inputs, *counters})
        self._layers = divided.stage_of
        # Stage of weights of layers and of what depends on these alone; in the end of all that is made once.
        self._stage: dict[Any, int] = dict(self._layers)
        self._home: dict[Any, _Fragment] = {}  # of ops that only one program has
        self._fragments: dict[tuple[str, int, int], _Fragment] = {}
        self._source: dict[Any, int] = {}  # value with one home -> stage
        self._sent: dict[Any, set[int]] = defaultdict(set)  # value -> stages that it is sent to

    def run(self) -> StagedProgram:
        """Places ops, then finds, from the last program to the first, what each makes and reads."""
        for op in self._parts[0]:
            self._inherit(op)
            self._stage.update(dict.fromkeys(op.results, max(self._fixed(op))) if self._fixed(op) else {})
        self._roots.update({argument: 0 for argument in (self._index, *self._carried) if argument is not None})
        self._place_body()
        self._place_once(self._parts[0], BEFORE)
        for number in self._carried.values():
            self._stage[self._loop.results[number]] = self._home_of_sum(number).stage
            self._roots[self._loop.results[number]] = self._roots[self._yields[number]]
        self._place_once(self._parts[2], AFTER)
        return self._assembled()

    def _find_carried(self) -> None:
        """Finds the loop's counter and the sums that it carries, whose first and next value get ops of their own.
        Readers of what the loop hands on unchanged read what that is. Barriers that bind several values go: forward and
        backward pass are different programs."""
        last = xla.terminator(self._body)
        for number, argument in enumerate(self._body.arguments):
            handed, first, result = last.operands[number], self._loop.operands[number], self._loop.results[number]
            if handed == argument:
                argument.replace_all_uses_with(first)
                result.replace_all_uses_with(first)
            elif self._index is None and _counts_up(first, argument, handed):
                self._index, self._names[argument] = argument, INDEX
            else:
                self._carried[argument] = number
                for user, value in ((self._loop, first), (last, handed)):
                    maker = None if isinstance(value, ir.BlockArgument) else value.owner.operation
                    if maker is None or maker.block != user.block or len(list(value.uses)) > 1:
                        (user.operands[number],) = xla.create(BARRIER, [value], [value.type], {}, user)
                        self._shardings[user.operands[number]] = self._sharding(value)
                sum_values = (argument, self._loop.operands[number], last.operands[number], result)
                self._names.update(dict.fromkeys(sum_values, f"sum_{number}"))
                sharded = max(map(self._sharding, sum_values), key=lambda axes: sum(map(len, axes)))
                self._shardings.update(dict.fromkeys(sum_values, sharded))  # one, for its next value takes its buffer
        for operation in [op.operation for op in self._body.operations]:
            if operation.name == BARRIER and len(operation.operands) > 1:
                for result, operand in zip(operation.results, operation.operands, strict=True):
                    result.replace_all_uses_with(operand)
                operation.erase()

    # -- placing ops --------------------------------------------------------------------------------------------------

    def _owner(self, value: Any) -> Any:
        """The op that makes a value; None for arguments, and for sums after the loop."""
        owner = None if isinstance(value, ir.BlockArgument) else value.owner.operation
        return None if owner is None or owner == self._loop else owner

    def _leading_to(self, ops: Iterable[Any]) -> set[Any]:
        """Ops, and all those that make what they read."""
        ancestors, waiting = set[Any](), [*ops]
        while waiting:
            op = waiting.pop()
            if op is not None and op not in ancestors:
                ancestors.add(op)
                waiting += map(self._owner, self._reads[op])
        return ancestors

    def _inherit(self, op: Any) -> int:
        """The roots of an op's results."""
        roots = 0
        for value in self._reads[op]:
            roots |= self._roots[value]
        self._roots.update(dict.fromkeys(op.results, roots))
        return roots

    def _fixed(self, op: Any) -> list[int]:
        """Stages of the weights that an op reads, also through ops on weights alone."""
        return [self._stage[value] for value in self._reads[op] if value in self._stage]

    def _place_body(self) -> None:
        """Gives each op of the loop that depends on inputs and weights its stage and pass, and each weight that is no
        layer's the first stage that reads it."""
        placed: list[Any] = []
        first: dict[Any, Any] = {}  # weight of a layer -> the first op that reads it and inputs
        for op in self._parts[1]:
            roots, fixed = self._inherit(op), self._fixed(op)
            if (roots & self._inputs and roots & self._weights) or len({*fixed}) > 1:
                placed.append(op)
                read = [self._roots[value] for value in self._reads[op] if value in self._stage]
                for number, argument in enumerate(self._arguments) if read else ():
                    if argument in self._layers and any(roots >> number & 1 for roots in read):
                        first.setdefault(argument, op)
            elif fixed:
                self._stage.update(dict.fromkeys(op.results, fixed[0]))
        own = set(placed)
        forward = self._leading_to(first.values()) & own
        for op in placed:  # the head, and the loss
            makers = {maker for maker in map(self._owner, self._reads[op]) if maker in own}
            if makers and makers <= forward and pass_of(name_stack_of(str(op.location))) == FORWARD_PASS:
                forward.add(op)
        stages, present = self._place_forward([op for op in placed if op in forward])
        lowest: dict[Any, int] = {}  # value of the backward pass -> its stage
        for op in placed:
            if op not in forward:
                most = min((lowest[v] for v in self._reads[op] if v in lowest), default=self._stages - 1)
                places = [present[v] for v in self._reads[op] if v in present] + [{k} for k in self._fixed(op)]
                highest = max(map(max, places), default=most)
                stages[op] = max(set(range(most + 1)).intersection(*places), default=min(most, highest))
                lowest.update(dict.fromkeys(op.results, stages[op]))
        others: dict[Any, int] = {}
        for op, stage in stages.items():
            self._home[op] = self._fragment(FORWARD if op in forward else BACKWARD, stage)
            roots = 0
            for value in self._reads[op]:
                roots |= 0 if value in present or value in lowest else self._roots[value] & self._weights
            for number, argument in enumerate(self._arguments) if roots else ():
                if roots >> number & 1 and argument not in self._layers:
                    others[argument] = min(stage, others.get(argument, stage))
        self._stage.update(others)

    def _place_forward(self, ops: list[Any]) -> tuple[dict[Any, int], dict[Any, set[int]]]:
        """Stages of the ops of the forward pass, and stages that have their values. First each is on the highest stage
        of what it reads. Then those that need only what is sent anyway move to the stage that reads them (a norm in
        front of a layer)."""
        stages: dict[Any, int] = {}
        possible: dict[Any, set[int]] = {}  # value -> stages that have it, or can make it of what is sent

        def stages_with() -> dict[Any, set[int]]:
            present = {result: {stages[op]} for op in ops for result in op.results}
            for op in ops:
                for value in self._reads[op]:
                    present.get(value, set()).add(stages[op])
            return present

        for op in ops:
            makers = [stages[maker] for maker in map(self._owner, self._reads[op]) if maker in stages]
            stages[op] = max([*self._fixed(op), *makers], default=0)
        present = stages_with()
        for op in ops:
            places = [possible[v] for v in self._reads[op] if v in possible] + [{k} for k in self._fixed(op)]
            shared = set(range(self._stages)).intersection(*places)
            possible.update({result: shared | present[result] for result in op.results})
        for op in reversed(ops):
            users = (stages[user] for result in op.results for user in self._users[result] if user in stages)
            later = min(users, default=max(set.intersection(*(possible[result] for result in op.results))))
            if later > stages[op] and all(later in possible[result] for result in op.results):
                stages[op] = later
        return stages, stages_with()

    def _place_once(self, ops: Sequence[Any], phase: str) -> None:
        """Gives each op outside the loop that depends on weights its stage: that of the largest array that it reads,
        the first where it joins numbers of several stages, else that of an op that reads it."""
        placed: dict[Any, int] = {}
        for _ in range(2):
            for op in ops:
                self._inherit(op)
                weights = [v for v in self._reads[op] if self._roots[v] & self._weights]
                arrays = [v for v in weights if v.type.rank and v in self._stage]
                if arrays:
                    placed[op] = self._stage[max(arrays, key=lambda v: prod(v.type.shape))]
                elif any(result.type.rank for result in op.results):
                    continue
                elif weights and all(v in self._stage for v in weights):
                    placed[op] = self._stage[weights[0]] if len({*self._fixed(op)}) == 1 else 0
                self._stage.update(dict.fromkeys(op.results if op in placed else (), placed.get(op, 0)))
            for op in reversed(ops):
                if op not in placed and any(self._roots[result] & self._weights for result in op.results):
                    users = (user for result in op.results for user in self._users[result])
                    placed[op] = next((placed[user] for user in users if user in placed), 0)
                    self._stage.update(dict.fromkeys(op.results, placed[op]))
                for value in self._reads[op] if op in placed else ():
                    if self._roots[value] & self._weights:  # also a moment, which its weight's update reads
                        self._stage.setdefault(value, placed[op])
        levels: dict[Any, int] = {}
        for op in (op for op in ops if op in placed):
            read = [maker for maker in map(self._owner, self._reads[op]) if maker in levels]
            levels[op] = max((levels[m] + (placed[m] != placed[op]) for m in read), default=0)
        for op in reversed([*levels]):  # as late as what reads it allows
            later = [user for result in op.results for user in self._users[result] if user in levels]
            levels[op] = min((levels[u] - (placed[u] != placed[op]) for u in later), default=levels[op])
        self._home.update({op: self._fragment(phase, placed[op], level) for op, level in levels.items()})

    def _fragment(self, phase: str, stage: int, level: int = 0) -> _Fragment:
        return self._fragments.setdefault((phase, stage, level), _Fragment(phase, stage, level))

    def _home_of_sum(self, number: int) -> _Fragment:
        """The program that adds to a sum."""
        return self._home.get(self._owner(self._yields[number])) or self._fragment(BACKWARD, 0)

    # -- what programs exchange ---------------------------------------------------------------------------------------

    def _assembled(self) -> StagedProgram:
        """The programs: the members of each are what its wanted values need."""
        ends = {value: self._want(value, 0) for value in self._results}
        for number in self._carried.values():
            self._home_of_sum(number).wanted[self._yields[number]] = None
            self._send(self._loop.operands[number], self._home_of_sum(number).stage)
        order: list[_Fragment] = []
        for fragment in self._last_first():
            order.insert(0, fragment)
            self._complete(fragment)
            for value in fragment.inputs:
                if value not in self._carried:
                    self._send(value, fragment.stage)
                elif self._home_of_sum(self._carried[value]) is not fragment:
                    reason = "several programs read what one microbatch hands to the next"
                    raise refusal(reason, self._yields[self._carried[value]].owner.location)
        exchanged = dict.fromkeys(v for fragment in order for v in (*fragment.inputs, *fragment.wanted))
        homes = {v: self._source.get(v, self._stage.get(v, 0)) for v in self._arguments}

        def array(
            path: str, divided: tuple[list[Any], int], stages: Mapping[Any, int], *, donated: bool
        ) -> StagedArray:
            names, places = zip(*((self._name(v), stages[v]) for v in divided[0]), strict=True)
            return StagedArray(path, names, places, divided[1], donated)

        arguments = zip(self._program.arguments, self._divided.arguments, strict=True)
        results = zip(self._program.results, self._divided.results, strict=True)
        return StagedProgram(
            xla.module_name(self._module), "", {}, self._axes, (), self._microbatches, "1F1B",
            {self._name(v): self._value(v) for v in (*self._arguments, *exchanged)},
            tuple(self._programs(order)),
            tuple(array(origin.path, vs, homes, donated=origin.donated) for origin, vs in arguments),
            tuple(array(origin.path, vs, ends, donated=False) for origin, vs in results),
            tuple(self._steps(order)),
        )  # fmt: skip

    def _last_first(self) -> Iterator[_Fragment]:
        """The programs in an order in which each comes before those whose values it reads."""
        for phase in (AFTER, BACKWARD, FORWARD, BEFORE):
            for level in sorted({level for name, _, level in self._fragments if name == phase}, reverse=True):
                for stage in range(self._stages) if phase == BACKWARD else reversed(range(self._stages)):
                    fragment = self._fragments.get((phase, stage, level))
                    if fragment is not None and fragment.wanted:
                        yield fragment

    def _want(self, value: Any, stage: int) -> int:
        """Has a value made, for this stage if it may be made on any; returns the stage where it is."""
        owner = self._owner(value)
        if owner is None:
            return self._source.setdefault(value, self._stage.get(value, stage))
        if owner in self._home:
            self._home[owner].wanted[value] = None
            return self._source.setdefault(value, self._home[owner].stage)
        phase = (BEFORE, BACKWARD, AFTER)[self._part[owner]]
        levels = [level for name, place, level in self._fragments if (name, place) == (phase, stage)]
        self._fragment(phase, stage, min(levels, default=0)).wanted[value] = None
        return stage

    def _send(self, value: Any, stage: int) -> None:
        """Has a value on a stage, from where it is made."""
        if value != self._index and self._want(value, stage) != stage:
            self._sent[value].add(stage)

    def _complete(self, fragment: _Fragment) -> None:
        """Finds what a program computes and reads. It computes what has no home in its part of the step, constants,
        broadcasts in the loop, and weights in another order, which the compiler reads where they are."""
        part = {BEFORE: 0, AFTER: 2}.get(fragment.phase, 1)
        members, inputs, waiting = set[Any](), dict[Any, None](), list(fragment.wanted)
        while waiting:
            value = waiting.pop()
            owner = self._owner(value)
            home = self._home.get(owner)
            free = owner is not None and home is None and (self._part[owner] == part or not self._roots[value])
            spread = False
            if home is not None and self._part[owner] == 0:  # its elements stay on their device
                same = owner.name == CONSTRAINT and self._sharding(owner.operands[0]) == self._sharding(owner.result)
                spread = same or owner.name in (RESHAPE, TRANSPOSE)
            elif home is not None and self._part[owner] == part == 1:
                spread = owner.name == BROADCAST_IN_DIM
            if not (free or spread or home is fragment):
                inputs[value] = None
            elif owner not in members:
                members.add(owner)
                waiting += self._reads[owner]
        fragment.members = sorted(members, key=self._order.__getitem__)
        fragment.inputs = list(inputs)

    def _steps(self, order: list[_Fragment]) -> Iterator[ScheduleStep]:
        """The schedule."""
        named = {(fragment.phase, fragment.stage): fragment for fragment in order}

        def run(fragment: _Fragment, microbatch: int = -1) -> Iterator[ScheduleStep]:
            yield ScheduleStep(microbatch, fragment.name)
            yield from send(fragment.wanted, microbatch)

        def send(values: Sequence[Any] | Mapping[Any, None], microbatch: int = -1) -> Iterator[ScheduleStep]:
            for value in values:
                for target in sorted(self._sent.get(value, ())):
                    yield ScheduleStep(microbatch, value=self._name(value), source=self._source[value], target=target)

        yield from send(self._arguments)
        for fragment in order:
            if fragment.phase == BEFORE:
                yield from run(fragment)
        for phase, stage, microbatch in one_f_one_b(self._stages, self._microbatches):
            if (phase, stage) in named:
                yield from run(named[phase, stage], microbatch)
        yield from send(list(self._loop.results))
        for fragment in order:
            if fragment.phase == AFTER:
                yield from run(fragment)

    # -- the programs -------------------------------------------------------------------------------------------------

    def _name(self, value: Any) -> str:
        return self._names.setdefault(value, f"value_{len(self._names)}")

    def _sharding(self, value: Any) -> Sharding:
        sharding: Sharding = self._shardings.get(value, ((),) * value.type.rank)
        return sharding

    def _value(self, value: Any) -> StageValue:
        shape, dtype = xla.shape_and_element_type(value.type) or ((), "token")
        each = value == self._index or (self._part.get(self._owner(value)) == 1 and value not in self._yields)
        names = list(self._axes)
        return StageValue(
            shape, dtype, tuple([tuple([names[a] for a in axes]) for axes in self._sharding(value)]), each
        )

    def _programs(self, order: list[_Fragment]) -> Iterator[StageProgram]:
        """The programs in order. A sum's next value takes its buffer, and results that of donated arguments like them
        which nothing reads later."""
        last = {(value, fragment.stage): fragment for fragment in order for value in fragment.inputs}
        kinds = {value: (value.type, self._sharding(value)) for fragment in order for value in fragment.wanted}
        pairs = zip(self._program.arguments, self._divided.arguments, strict=True)
        donated_inputs = {v for argument, (vs, _) in pairs if argument.donated for v in vs} - {*self._results}
        for fragment in order:
            reused = {v: self._yields[self._carried[v]] for v in fragment.inputs if v in self._carried}
            for value in fragment.inputs if fragment.phase in (BEFORE, AFTER) else ():
                is_last = last[value, fragment.stage] is fragment
                if value in donated_inputs and self._source[value] == fragment.stage and is_last:
                    like = (value.type, self._sharding(value))
                    fitting = [v for v in fragment.wanted if kinds[v] == like and v not in reused.values()]
                    reused.update(zip([value], fitting, strict=False))
            outputs = list(fragment.wanted)
            donated = {fragment.inputs.index(value): outputs.index(result) for value, result in reused.items()}
            yield StageProgram(
                fragment.name, fragment.stage, fragment.phase, tuple(map(self._name, fragment.inputs)),
                tuple(map(self._name, outputs)), tuple(sorted(donated)), *self._texts(fragment, outputs, donated),
            )  # fmt: skip

    def _texts(self, fragment: _Fragment, outputs: list[Any], donated: Mapping[int, int]) -> tuple[bytes, str]:
        """A program's members on arguments, as a module and as a function of MPMD."""
        inputs = fragment.inputs
        marks = [
            [f"sdy.sharding = {self._notation.of_value(self._sharding(v))}" for v in vs] for vs in (inputs, outputs)
        ]
        for argument, result in donated.items():
            marks[0][argument] += f", tf.aliasing_output = {result} : i32"
        kinds = [
            ", ".join(f"{v.type} {{{mark}}}" for v, mark in zip(values, marked, strict=True))
            for values, marked in zip((inputs, outputs), marks, strict=True)
        ]
        meshes = "".join(
            str(op) for op in self._module.regions[0].blocks[0].operations if op.operation.name == "sdy.mesh"
        )
        counts = f"mhlo.num_partitions = {self._notation.devices} : i32, mhlo.num_replicas = 1 : i32"
        declared = f"func.func private @main({kinds[0]}) -> ({kinds[1]})"
        text = f"module @{fragment.name} attributes {{{counts}}} {{ {meshes} {declared} }}"
        module = xla.parse_module(self._module.context, text)
        with module.context, ir.Location.unknown():
            function = list(module.body.operations)[-1].operation
            function.attributes["sym_visibility"] = ir.StringAttr.get("public")
            block = function.regions[0].blocks.append(*[value.type for value in inputs])
            twins, end = dict(zip(inputs, block.arguments, strict=True)), ir.InsertionPoint(block)
            clone(fragment.members, twins, end)
            ir.Operation.create("func.return", operands=[twins[value] for value in outputs], ip=end)
            module.operation.verify()
            text_of_program = written(module, binary=False)
            function.attributes["sym_name"] = ir.StringAttr.get(fragment.name)
            function.attributes["mesh_shape"] = self._notation.mesh
            return text_of_program, str(function)


def one_f_one_b(stages: int, microbatches: int) -> Iterator[tuple[str, int, int]]:
    """(pass, stage, microbatch) of 1F1B, each behind those that it needs: stage s of S starts with S - s forward
    passes, then a backward pass and a forward pass follow each other."""
    queues: list[list[tuple[str, int]]] = []
    for stage in range(stages):
        first = min(microbatches, stages - stage)
        queue = [(FORWARD, m) for m in range(first)]
        for m in range(microbatches):
            queue += [(BACKWARD, m)] + [(FORWARD, m + first)] * (m + first < microbatches)
        queues.append(queue)
    done: set[tuple[str, int, int]] = set()
    while any(queues):
        for stage, queue in enumerate(queues):
            phase, m = queue[0] if queue else ("", 0)
            needed = {(FORWARD, stage - 1, m)} if phase == FORWARD else {(FORWARD, stage, m), (BACKWARD, stage + 1, m)}
            if queue and all(step in done or not 0 <= step[1] < stages for step in needed):
                done.add((phase, stage, m))
                queue.pop(0)
                yield phase, stage, m


def _counts_up(first: Any, argument: Any, following: Any) -> bool:
    """True for the counter 0, 1, 2, … of a loop."""
    numbers = [known_numbers(first), *(known_numbers(following, {argument: np.array(k)}) for k in (0, 5))]
    return [None if n is None or n.size != 1 else int(n.flat[0]) for n in numbers] == [0, 1, 6]
