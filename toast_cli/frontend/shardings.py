"""Shardings that a program already holds.

Enters: the entry function without calls. Leaves: the same function without shardings, and what they said as `Kept` records. Two
kinds of statement stay in the module: manual regions (`sdy.manual_computation`), whose boundary is always returned as pins, and
the placement of an operation on one single device, as host callbacks have it.

A record's axes are those of the program's own mesh, or a GSPMD string that names no axes; `constraints_on` translates to a mesh.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from toast_cli.errors import InputError
from toast_cli.frontend.diagnostics import place_of
from toast_cli.frontend.gspmd import MANUAL, MAXIMAL, REPLICATED, mesh_axes, read_tiling, split_shardings
from toast_cli.xla import ir, sdy

SDY, GSPMD, FRONTEND, FRONTEND_SDY = "sdy.sharding", "mhlo.sharding", "mhlo.frontend_attributes", "xla.sdy.sharding"
MANUAL_REGION = "sdy.manual_computation"
# Operations that change where a value lies and nothing else; as far as numbers go each is its first operand.
MOVES = frozenset(
    f"sdy.{name}"
    for name in (
        *("sharding_constraint", "reshard", "propagation_barrier", "data_flow_edge", "all_gather", "all_slice", "all_to_all"),
        *("collective_permute", "all_reduce", "reduce_scatter", "replicated_to_unreduced", "sharded_to_unreduced"),
    )
)  # fmt: skip
MOVING_CALLS = frozenset({"Sharding", "xla.sdy.FuncResultSharding", "xla.sdy.PropagationBarrier"})
GROUPINGS = frozenset({"sdy.sharding_group", "xla.sdy.ShardingGroup"})

# Per dimension: the axes that split it, major to minor; () for "whole", None for "open".
Axes = tuple[tuple[str, ...] | None, ...]
MeshAxes = tuple[tuple[str, int], ...]
Use = tuple[Any, int]


@dataclass(frozen=True)
class Kept:
    """One sharding that the program states.

    Attributes:
        value: the ir.Value it speaks of.
        uses: (operation, operand number) of the uses it is limited to; empty when it holds for the value itself.
        axes: per dimension, in names of the program's own mesh; None when `gspmd` says it.
        mesh: axes of that mesh with their sizes, in order.
        gspmd: XLA's notation, which names no axes. open_dims: dimensions it leaves open.
        origin: who states it: `argument 3`, `result 0`, `model.py:12:4`.
    """

    value: Any
    uses: tuple[Use, ...] = ()
    axes: Axes | None = None
    mesh: MeshAxes = ()
    gspmd: str = ""
    open_dims: frozenset[int] = frozenset()
    origin: str = ""


@dataclass
class Findings:
    """What one walk over a function found."""

    kept: list[Kept] = field(default_factory=list)
    pins: list[Kept] = field(default_factory=list)
    count: int = 0  # statements removed from the module


def take_shardings(module: Any, function: Any, path: str) -> Findings:
    """Removes the shardings from the function and returns them. Call this once calls are inlined and tuples are gone."""
    taker = _Taker(module, path)
    with module.context:
        taker.boundary(function)
        moves = taker.operations(function)
        for move in moves:
            taker.move(move)
    return taker.findings


def constraints_on(
    kept: tuple[Kept, ...], names: tuple[str, ...], sizes: tuple[int, ...]
) -> tuple[list[tuple[Kept, Axes]], list[str]]:
    """The records in axes of a mesh, and a notice for each kind that cannot be expressed there.

    Raises `InputError` when a record names an axis that the mesh does not have, or has with another size.
    """
    found: list[tuple[Kept, Axes]] = []
    untranslated: list[Kept] = []
    target = dict(zip(names, sizes, strict=True))
    for record in kept:
        if record.axes is not None:
            check_axes(record, target)
            found.append((record, record.axes))
            continue
        tiling = read_tiling(record.gspmd)
        translated = mesh_axes(tiling, ir.ShapedType(record.value.type).rank, names, sizes) if tiling else None
        if translated is None:
            untranslated.append(record)
        else:
            dims = tuple(None if d in record.open_dims and not axes else axes for d, axes in enumerate(translated))
            found.append((record, dims))
    notices = []
    if untranslated:
        example = untranslated[0]
        notices.append(
            f"{len(untranslated)} of the program's shardings do not lie along the axes of this mesh and are left out "
            f"(first: {example.gspmd} of {example.origin})"
        )
    return found, notices


def check_axes(record: Kept, target: dict[str, int]) -> None:
    """Raises `InputError` when a record uses an axis that `target` (name -> size) does not have at the same size."""
    sizes = dict(record.mesh)
    for axis in {axis for axes in record.axes or () for axis in axes or ()}:
        if target.get(axis) != sizes[axis]:
            shape = ",".join(f"{name}={size}" for name, size in record.mesh)
            has = f"has it with size {target[axis]}" if axis in target else "has no such axis"
            raise InputError(
                f"the sharding of {record.origin} uses mesh axis {axis!r} (size {sizes[axis]}), but the mesh {has}",
                hint=f"try --mesh-shape {shape}, or drop the program's shardings",
            )


class _Taker:
    """Walks one function; used once."""

    def __init__(self, module: Any, path: str) -> None:
        self.findings = Findings()
        self._path = path
        self._meshes = {
            ir.StringAttr(op.attributes["sym_name"]).value: mesh_of(op.attributes["mesh"])
            for op in (view.operation for view in module.body.operations)
            if op.name == "sdy.mesh"
        }
        self._pinned: dict[Any, Axes | str] = {}  # value -> what has been said of it
        self._tensors: dict[Any, tuple[Axes, MeshAxes]] = {}  # sdy.sharding attribute -> what it says

    # -- the entry's boundary ------------------------------------------------------------------------------------

    def boundary(self, function: Any) -> None:
        """Arguments, then results, in order."""
        block = function.entry_block
        terminator = block.operations[len(block.operations) - 1].operation
        self._boundary_list(function, "arg_attrs", lambda k: (block.arguments[k], (), f"argument {k}"))
        self._boundary_list(
            function, "res_attrs", lambda k: (terminator.operands[k], ((terminator, k),), f"result {k}")
        )

    def _boundary_list(self, function: Any, name: str, subject: Callable[[int], tuple[Any, tuple[Use, ...], str]]) -> None:
        attributes = function.operation.attributes
        if name not in attributes:
            return
        cleaned = []
        for k, entry in enumerate(attributes[name]):
            said = {item.name: item.attr for item in entry}
            statement = self._statement(said)
            if statement is not None:
                value, uses, origin = subject(k)
                self._record(value, uses, statement[0], frozenset(), origin)
            cleaned.append(ir.DictAttr.get({key: attr for key, attr in said.items() if key not in (SDY, GSPMD)}))
        attributes[name] = ir.ArrayAttr.get(cleaned)

    # -- operations ----------------------------------------------------------------------------------------------

    def operations(self, function: Any) -> list[Any]:
        """Takes attributes off operations and pins from manual regions; returns the operations that only move values."""
        moves: list[Any] = []
        stated: list[Any] = []

        def visit(operation: Any) -> Any:
            name = operation.name
            if name == MANUAL_REGION:
                self._region(operation)
                return ir.WalkResult.SKIP
            if name in MOVES or name in GROUPINGS:
                moves.append(operation)
            elif name == "stablehlo.custom_call" and call_target(operation) in MOVING_CALLS | GROUPINGS:
                moves.append(operation)
            else:
                attributes = operation.attributes
                if SDY in attributes or GSPMD in attributes or FRONTEND in attributes:
                    stated.append(operation)
            return ir.WalkResult.ADVANCE

        function.regions[0].blocks[0].owner.operation.walk(visit, ir.WalkOrder.PRE_ORDER)
        for operation in stated:
            self._operation(operation)
        return moves

    def _operation(self, operation: Any) -> None:
        """An operation that carries the shardings of its results."""
        attributes = operation.attributes
        said = {name: attributes[name] for name in (SDY, GSPMD, FRONTEND) if name in attributes}
        statement = self._statement(said)
        if statement is not None and statement[0] != MAXIMAL:
            for result, what in zip(operation.results, statement, strict=False):
                self._record(result, (), what, frozenset(), place_of(operation, self._path))
        for name in (SDY, GSPMD, FRONTEND):
            if name not in said:
                continue
            if name not in cleaned_attributes(said, statement):
                del attributes[name]
            else:
                attributes[name] = cleaned_attributes(said, statement)[name]

    def move(self, operation: Any) -> None:
        """A constraint: what it says is recorded, its users read the operand."""
        if operation.name in GROUPINGS or not len(operation.results):
            operation.erase()
            self.findings.count += 1
            return
        statement = self._move_statement(operation)
        value, result = operation.operands[0], operation.results[0]
        if statement is not None:
            uses: tuple[Use, ...] = ()
            if self._pinned.get(value, statement) != statement:
                uses = tuple((use.owner.operation, use.operand_number) for use in result.uses if not is_move(use.owner))
            open_dims = unspecified_dims(operation)
            self._record(value, uses, statement, open_dims, place_of(operation, self._path))
        else:
            self.findings.count += 1
        result.replace_all_uses_with(value)
        operation.erase()
