"""Removes the shardings that a program already holds, and returns them.

In: the entry function without calls. Out: the same function without shardings, and the shardings as `Kept`
records. Two kinds stay in the module: manual regions (`sdy.manual_computation`), whose boundary is always returned as
pins, and the placement of an operation on one single device, as host callbacks have it.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from toast_cli.frontend import attributes as foreign
from toast_cli.frontend.annotations import (
    FRONTEND,
    GSPMD,
    RULE,
    SDY,
    AnnotatedSharding,
    Meshes,
    annotated_shardings,
    check_rank,
    meshes_of,
    one_sharding,
    tensor_sharding,
    value_shardings,
    without_shardings,
)
from toast_cli.frontend.diagnostics import place_of
from toast_cli.inputs import whole_number
from toast_cli.xla import ADVANCE, SKIP, ir, sdy

MANUAL_REGION = "sdy.manual_computation"
# Operations and custom calls that only state a sharding or placement; each returns its first operand.
MOVES = frozenset(
    {
        "sdy.sharding_constraint",
        "sdy.reshard",
        "sdy.propagation_barrier",
        "sdy.data_flow_edge",
        "sdy.all_gather",
        "sdy.all_slice",
        "sdy.all_to_all",
        "sdy.collective_permute",
        "sdy.all_reduce",
        "sdy.reduce_scatter",
        "sdy.replicated_to_unreduced",
        "sdy.sharded_to_unreduced",
        "Sharding",
        "xla.sdy.FuncResultSharding",
        "xla.sdy.PropagationBarrier",
    }
)
# Operations that group values for sharding and have no result.
GROUPINGS = frozenset({"sdy.sharding_group", "xla.sdy.ShardingGroup"})
_UNSPECIFIED = re.compile(r"unspecified_dims=\[([\d,]*)\]")

PARTITIONS, REPLICATED = "mhlo.num_partitions", "{replicated}"
OperandOfOp = tuple[Any, int]
# A value, the uses of it that are concerned, and its name in messages.
Subject = tuple[Any, tuple[OperandOfOp, ...], str]


@dataclass(frozen=True)
class Kept:
    """One sharding that the program states.

    Attributes:
        value: the ir.Value it speaks of.
        sharding: in the program's own terms; `toast_cli.frontend.constraints` translates to a mesh.
        uses: (operation, operand number) of the uses it is limited to; empty when it holds for the value itself.
        origin: who states it: `argument 3`, `result 0`, `model.py:12:4`.
    """

    value: Any
    sharding: AnnotatedSharding
    uses: tuple[OperandOfOp, ...]
    origin: str


@dataclass
class Findings:
    """The removed statements: constraints, pins of manual regions, and their number.

    argument_axes: argument (by number) -> per dimension the one mesh axis that splits it, or "".
    """

    kept: list[Kept] = field(default_factory=list)
    pins: list[Kept] = field(default_factory=list)
    count: int = 0
    argument_axes: dict[int, tuple[str, ...]] = field(default_factory=dict)


def take_shardings(module: Any, function: Any, path: str) -> Findings:
    """Removes the shardings from the function and returns them."""
    with module.context, ir.Location.unknown():
        taker = _Taker(meshes_of(module), path, _of_one_device(module))
        taker.boundary(function)
        taker.body(function)
    findings = taker.findings
    return replace(
        findings, kept=list(map(_of_what_is_used, findings.kept)), pins=list(map(_of_what_is_used, findings.pins))
    )


def _of_one_device(module: Any) -> bool:
    attributes = module.operation.attributes
    return PARTITIONS in attributes and str(attributes[PARTITIONS]).partition(" ")[0] == "1"


def _of_what_is_used(kept: Kept) -> Kept:
    """The record with the value that its uses read now: the constraint between them, and its result, is erased."""
    if not kept.uses:
        return kept
    operation, operand = kept.uses[0]
    return replace(kept, value=operation.operands[operand])


class _Taker:
    """Walks one function; used once.

    one_device: the program was lowered for one device, so "replicated" carries no information (JAX 0.4.20 writes it for
    every argument).
    """

    def __init__(self, meshes: Meshes, path: str, one_device: bool) -> None:
        self.findings = Findings()
        self._one_device = one_device
        self._meshes = meshes
        self._path = path
        self._records: dict[Any, list[int]] = defaultdict(list)  # value -> places in `findings.kept`
        self._annotated: dict[Any, AnnotatedSharding] = {}  # value -> the first sharding stated for it as a whole

    def _record(self, value: Any, sharding: AnnotatedSharding, uses: tuple[OperandOfOp, ...], origin: str) -> None:
        self.findings.count += 1
        if sharding.single_device:
            return
        if not uses:
            self._annotated.setdefault(value, sharding)
        self._records[value].append(len(self.findings.kept))
        self.findings.kept.append(Kept(value, sharding, uses, origin))

    def boundary(self, function: Any) -> None:
        """Takes the shardings of the function's arguments and results. A result is a use of the returned value."""
        block = function.entry_block
        end = block.operations[len(block.operations) - 1].operation
        arguments: list[Subject] = [(value, (), f"argument {k}") for k, value in enumerate(block.arguments)]
        results: list[Subject] = [(value, ((end, k),), f"result {k}") for k, value in enumerate(end.operands)]
        self._boundary_attributes(function.operation, "arg_attrs", arguments)
        numbers = {value: k for k, value in enumerate(block.arguments)}
        for kept in self.findings.kept:
            if kept.sharding.axes is not None:
                axes = tuple(found[0] if found and len(found) == 1 else "" for found in kept.sharding.axes)
                self.findings.argument_axes[numbers[kept.value]] = axes
        self._boundary_attributes(function.operation, "res_attrs", results)

    def _boundary_attributes(self, function: Any, name: str, subjects: list[Subject]) -> None:
        if name not in function.attributes:
            return
        cleaned = []
        for entry, (value, uses, origin) in zip(function.attributes[name], subjects, strict=True):
            attributes = {item.name: item.attr for item in entry}
            place = partial(_at, self._path, origin)
            sharding = one_sharding(annotated_shardings(attributes, self._meshes, place), _rank(value), place)
            if sharding is not None and not (self._one_device and sharding.gspmd == REPLICATED):
                self._record(value, sharding, uses, origin)
            cleaned.append(ir.DictAttr.get(without_shardings(attributes, place)))
        function.attributes[name] = ir.ArrayAttr.get(cleaned)

    def body(self, function: Any) -> None:
        """Takes attributes of operations first, then sharding constraints, in program order."""
        moves: list[Any] = []
        stating: list[Any] = []

        def visit(operation: Any) -> Any:
            kind = kind_of(operation)
            if kind == MANUAL_REGION:
                self._manual_region(operation)
                return SKIP
            if kind in MOVES or kind in GROUPINGS:
                moves.append(operation)
            else:
                attributes = operation.attributes
                if SDY in attributes or GSPMD in attributes or FRONTEND in attributes:
                    stating.append(operation)
            return ADVANCE

        function.operation.walk(visit, ir.WalkOrder.PRE_ORDER)
        for operation in stating:
            self._stating(operation)
        for operation in moves:
            self._move(operation)

    def _stating(self, operation: Any) -> None:
        """Takes the shardings in an operation's attributes, which are those of its results."""
        attributes = {name: operation.attributes[name] for name in operation.attributes}
        place = partial(place_of, operation, self._path)
        shardings = annotated_shardings(attributes, self._meshes, place)
        placed = any(sharding.single_device for sharding in shardings)
        if not placed:
            for result, sharding in zip(operation.results, shardings, strict=False):
                check_rank(sharding, _rank(result), place)
                self._record(result, sharding, (), place())
        cleaned = without_shardings(attributes, place, keep_placement=placed)
        for name in (SDY, GSPMD, FRONTEND, RULE):
            if name in cleaned:
                operation.attributes[name] = cleaned[name]
            elif name in attributes:
                del operation.attributes[name]

    def _move(self, operation: Any) -> None:
        """Erases a constraint: records its sharding, and replaces its result by its operand."""
        if kind_of(operation) in GROUPINGS:
            self.findings.count += 1
            operation.erase()
            return
        value, result = operation.operands[0], operation.results[0]
        found = self._annotated_by(operation)
        if found is None:
            self.findings.count += 1
        else:
            differs = value in self._annotated and self._annotated[value] != found
            self._record(value, found, real_uses(result) if differs else (), place_of(operation, self._path))
        for number in self._records.pop(result, ()):  # the result's shardings move to its replacement
            self.findings.kept[number] = replace(self.findings.kept[number], value=value)
            self._records[value].append(number)
        result.replace_all_uses_with(value)
        operation.erase()

    def _annotated_by(self, operation: Any) -> AnnotatedSharding | None:
        """The sharding that a constraint states; None if it states none."""
        for name in ("sharding", "out_sharding"):
            if name in operation.attributes:
                place = partial(place_of, operation, self._path)
                attribute = foreign.of_kind(operation.attributes[name], name, sdy.TensorShardingAttr, place)
                return one_sharding([tensor_sharding(attribute, self._meshes)], _rank(operation.results[0]), place)
        attributes = {name: operation.attributes[name] for name in operation.attributes}
        place = partial(place_of, operation, self._path)
        found = annotated_shardings(attributes, self._meshes, place)
        sharding = one_sharding(found, _rank(operation.results[0]), place)
        return None if sharding is None else replace(sharding, open_dims=unspecified_dims(attributes))

    def _manual_region(self, operation: Any) -> None:
        """Records the boundary of a manual region: the shardings of its operands and results."""
        origin = f"the manual region at {place_of(operation, self._path)}"
        needed = value_shardings(operation.attributes["in_shardings"], self._meshes)
        for k, (value, sharding) in enumerate(zip(operation.operands, needed, strict=True)):
            self.findings.pins.append(Kept(value, sharding, ((operation, k),), origin))
        made = value_shardings(operation.attributes["out_shardings"], self._meshes)
        for value, sharding in zip(operation.results, made, strict=True):
            self.findings.pins.append(Kept(value, sharding, (), origin))


def kind_of(operation: Any) -> str:
    """The operation's name, or a custom call's target."""
    if operation.name == "stablehlo.custom_call":
        target = operation.attributes["call_target_name"]
        return foreign.string_value(target, "call_target_name", lambda: place_of(operation, ""))
    return str(operation.name)


def real_uses(value: Any) -> tuple[OperandOfOp, ...]:
    """Uses of a value by operations that are not erased."""
    uses = ((use.owner.operation, int(use.operand_number)) for use in value.uses)
    return tuple(use for use in uses if kind_of(use[0]) not in MOVES | GROUPINGS)


def unspecified_dims(attributes: dict[str, Any]) -> frozenset[int]:
    """Dimensions that a `Sharding` custom call leaves open, as it says in its backend config."""
    if "backend_config" not in attributes or not isinstance(attributes["backend_config"], ir.StringAttr):
        return frozenset()
    found = _UNSPECIFIED.search(foreign.text(attributes, "backend_config", lambda: "") or "")
    numbers = map(whole_number, found[1].split(",")) if found else ()
    return frozenset(number for number in numbers if number is not None)


def _rank(value: Any) -> int:
    return int(value.type.rank) if isinstance(value.type, ir.RankedTensorType) else 0


def _at(path: str, origin: str) -> str:
    return f"{path}: {origin}"
