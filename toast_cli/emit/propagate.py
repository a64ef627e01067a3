"""Runs Shardy's own propagation in-process on a copy of the module.

In: a `Source`, a `PartitionedProgram` and candidate `Annotations`. Out: the propagated sharding of every value and of
every reshard.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any

from toast_cli.emit.annotate import annotated
from toast_cli.emit.annotations import Annotations, constrainable_values
from toast_cli.emit.shardy import ShardyNotation
from toast_cli.frontend.source import Source
from toast_cli.plan.partitioned import PartitionedProgram
from toast_cli.plan.sharding import Sharding
from toast_cli.xla import ir, operations_in, run_passes, sdy

# The passes of `sdy-propagation-pipeline` that decide shardings; its clean-up passes would double the time.
QUICK = (
    "symbol-dce,sdy-remove-size-one-axes,sdy-constant-or-scalar-splitter,symbol-dce,sdy-manual-axes-cleanup,sdy-add-data-flow-edges,"
    "sdy-apply-sharding-constraints,sdy-sharding-group-import,sdy-user-priority-propagate,func.func(sdy-sink-data-flow-edges)"
)
WHOLE = "sdy-propagation-pipeline"

VALUES, RESHARD = "toast.values", "toast.reshard"
# Stands for a sub-axis that Shardy created; no plan has them.
PART_OF_AXIS = -1


@dataclass(frozen=True)
class Propagated:
    """`values`: value number -> sharding, if the value still exists. `reshards`: number in `Annotations.reshards` ->
    sharding.

    Axes of size 1 are left out.
    """

    values: dict[int, Sharding]
    reshards: dict[int, Sharding]


class Propagation:
    """Runs propagation on copies of one module; use inside `numbered`."""

    def __init__(self, source: Source, lowered: PartitionedProgram) -> None:
        self._source = source
        self._lowered = lowered
        self._shardings: dict[Any, tuple[Sharding, ...]] = {}
        self._numbers: dict[Any, tuple[int, ...]] = {}

    def run(self, annotations: Annotations, pipeline: str = QUICK) -> Propagated:
        """All shardings after propagation from these annotations."""
        source, lowered = self._source, self._lowered
        notation = NumberingNotation(source, lowered, annotations)
        with annotated(source.module, annotations, notation, prod(lowered.axis_sizes)):
            copy = source.module.operation.clone()
        return self.propagate(copy, pipeline)

    def propagate(self, module: Any, pipeline: str = QUICK) -> Propagated:
        """All shardings after propagation in a module whose operations are numbered; the module is changed."""
        run_passes(module, pipeline)
        values: dict[int, Sharding] = {}
        reshards: dict[int, Sharding] = {}

        for operation in operations_in(module):
            attributes = operation.attributes
            if (numbers := attributes.get(VALUES)) is not None:
                values.update(self._value_shardings(numbers, attributes.get("sdy.sharding")))
            elif (number := attributes.get(RESHARD)) is not None:
                (reshards[ir.IntegerAttr(number).value],) = self._read(attributes["sharding"])
        return Propagated(values, reshards)

    def _value_shardings(self, attribute: Any, sharding: Any) -> Iterator[tuple[int, Sharding]]:
        numbers = self._numbers.get(attribute)
        if numbers is None:
            numbers = self._numbers[attribute] = tuple(ir.DenseI64ArrayAttr(attribute))
        found = self._read(sharding) if sharding is not None else None
        for k, number in enumerate(numbers):
            if number >= 0:
                yield number, found[k] if found else ((),) * len(self._lowered.shardings[number])

    def _read(self, attribute: Any) -> tuple[Sharding, ...]:
        """The shardings in a sharding of one or of several values, without axes of size 1."""
        if attribute not in self._shardings:
            several = sdy.TensorShardingPerValueAttr.isinstance(attribute)
            parts = sdy.TensorShardingPerValueAttr(attribute).shardings if several else [attribute]
            names, sizes = self._lowered.axis_names, self._lowered.axis_sizes
            self._shardings[attribute] = tuple(without_units(read_sharding(part, names), sizes) for part in parts)
        return self._shardings[attribute]


class NumberingNotation(ShardyNotation):
    """Shardy's notation with a number on every reshard."""

    def __init__(self, source: Source, lowered: PartitionedProgram, annotations: Annotations) -> None:
        super().__init__(source.module, lowered.axis_names, lowered.axis_sizes)
        self._numbers = constraint_numbers(annotations)

    def constraint(
        self, value: Any, sharding: Sharding, location: Any, where: Any, open: frozenset[int] = frozenset()
    ) -> list[Any]:
        added = super().constraint(value, sharding, location, where, open)
        number = next(self._numbers)
        if number >= 0:
            added[-1].attributes[RESHARD] = ir.IntegerAttr.get(ir.IntegerType.get_signless(64), number)
        return added


def constraint_numbers(annotations: Annotations) -> Iterator[int]:
    """For each constraint in the order of writing, the number of the reshard that it ends; -1 for constraints and for
    intermediate shardings."""
    for constraint in annotations.constraints:
        yield from [-1] * len(constraint.shardings)
    for number, reshard in enumerate(annotations.reshards):
        yield from [-1] * len(reshard.through)
        yield number


@contextmanager
def numbered(source: Source, lowered: PartitionedProgram) -> Iterator[None]:
    """While the block runs, each operation carries the value numbers of its results (see `value_numbers`)."""
    operations = value_numbers(source, lowered)
    with source.module.context:
        for operation, numbers in operations.items():
            operation.attributes[VALUES] = ir.DenseI64ArrayAttr.get(numbers)
    try:
        yield
    finally:
        for operation in operations:
            del operation.attributes[VALUES]


def value_numbers(source: Source, lowered: PartitionedProgram) -> dict[Any, list[int]]:
    """Operation -> the value number of each of its results (-1: none), for values whose sharding the plan decides;
    others propagate freely."""
    operations: dict[Any, list[int]] = defaultdict(list)
    for value in constrainable_values(source, lowered):
        handle = source.definitions[value]
        numbers = operations[handle.owner.operation]
        numbers += [-1] * (handle.result_number + 1 - len(numbers))
        numbers[handle.result_number] = value
    return operations


def read_sharding(attribute: Any, axis_names: tuple[str, ...]) -> Sharding:
    """A `#sdy.sharding` as a sharding."""

    def number(axis: Any) -> int:
        reference = sdy.AxisRefAttr(axis)
        return axis_names.index(reference.name) if reference.sub_axis_info is None else PART_OF_AXIS

    dimensions = sdy.TensorShardingAttr(attribute).dimension_shardings
    return tuple(tuple(number(axis) for axis in sdy.DimensionShardingAttr(d).axes) for d in dimensions)


def without_units(sharding: Sharding, axis_sizes: tuple[int, ...]) -> Sharding:
    """The sharding without axes of size 1."""
    return tuple(tuple(axis for axis in axes if axis < 0 or axis_sizes[axis] > 1) for axes in sharding)
