"""Shardy's notation: `sdy.mesh`, `sdy.sharding`, `sdy.sharding_constraint`.

Enters: a `Source`, a `LoweredPlan` and `Marks`. Leaves: the bytes of a StableHLO file.
"""

from __future__ import annotations

from math import prod
from typing import Any

from toast_cli.emit.annotate import Undo, annotated, put
from toast_cli.emit.marks import Marks
from toast_cli.frontend.source import Source
from toast_cli.plan.layout import Layout
from toast_cli.plan.lowered import LoweredPlan
from toast_cli.xla import ir, sdy, write_bytecode


def write_shardy(source: Source, lowered: LoweredPlan, marks: Marks, *, binary: bool = False) -> bytes:
    """The program with these marks on it; the module of `source` is as before afterwards."""
    notation = ShardyNotation(source.module, lowered.axis_names, lowered.axis_sizes)
    with annotated(source.module, marks, notation, prod(lowered.axis_sizes)):
        if binary:
            return write_bytecode(source.module)
        text: str = source.module.operation.get_asm(enable_debug_info=True)
        return text.encode()


class ShardyNotation:
    """Shardings over one mesh symbol; each different layout is built once."""

    attribute = "sdy.sharding"

    def __init__(self, module: Any, axis_names: tuple[str, ...], axis_sizes: tuple[int, ...]) -> None:
        self._context = module.context
        self._axis_names = axis_names
        axes = ", ".join(f"{quoted(name)}={size}" for name, size in zip(axis_names, axis_sizes, strict=True))
        self._mesh = ir.Attribute.parse(f"#sdy.mesh<[{axes}]>", self._context)
        symbols = {op.attributes["sym_name"].value for op in module.body.operations if "sym_name" in op.attributes}
        self._existing = [
            op for op in module.body.operations if op.operation.name == "sdy.mesh" and fits(op, axis_names)
        ]
        names = ("mesh", *(f"mesh_{k}" for k in range(len(symbols))))
        self._symbol = (
            self._existing[0].attributes["sym_name"].value
            if self._existing
            else next(name for name in names if name not in symbols)
        )
        self._values: dict[tuple[Layout, frozenset[int]], Any] = {}
        self._operations: dict[tuple[Layout, ...], Any] = {}

    def prepare(self, module: Any, undo: Undo) -> None:
        """Declares the mesh. Manual regions bring one along, perhaps with some of our axes only: ours takes its place."""
        for mesh in self._existing:
            put(mesh.operation, "mesh", self._mesh, undo)
        if not self._existing:
            added = ir.Operation.create(
                "sdy.mesh",
                attributes={"sym_name": ir.StringAttr.get(self._symbol, self._context), "mesh": self._mesh},
                loc=ir.Location.unknown(self._context),
                ip=ir.InsertionPoint.at_block_begin(module.body),
            )
            undo.append(added.erase)

    def _text(self, layout: Layout, open: frozenset[int] = frozenset()) -> str:
        dimensions = (
            "{?}" if d in open else "{" + ", ".join(quoted(self._axis_names[axis]) for axis in axes) + "}"
            for d, axes in enumerate(layout)
        )
        return f"<@{self._symbol}, [{', '.join(dimensions)}]>"

    def of_value(self, layout: Layout, open: frozenset[int] = frozenset()) -> Any:
        if (layout, open) not in self._values:
            self._values[layout, open] = ir.Attribute.parse(f"#sdy.sharding{self._text(layout, open)}", self._context)
        return self._values[layout, open]

    def of_operation(self, layouts: tuple[Layout, ...]) -> Any:
        if layouts not in self._operations:
            text = ", ".join(map(self._text, layouts))
            self._operations[layouts] = ir.Attribute.parse(f"#sdy.sharding_per_value<[{text}]>", self._context)
        return self._operations[layouts]

    def constraint(
        self, value: Any, layout: Layout, location: Any, where: Any, open: frozenset[int] = frozenset()
    ) -> list[Any]:
        return [
            ir.Operation.create(
                "sdy.sharding_constraint",
                results=[value.type],
                operands=[value],
                attributes={"sharding": self.of_value(layout, open)},
                loc=location,
                ip=where,
            )
        ]


def fits(mesh: Any, axis_names: tuple[str, ...]) -> bool:
    """Whether a mesh in the program, with devices in their own order, has no axes but ours."""
    attribute = sdy.MeshAttr(mesh.attributes["mesh"])
    return not list(attribute.device_ids) and {sdy.MeshAxisAttr(axis).name for axis in attribute.axes} <= set(
        axis_names
    )


def quoted(name: str) -> str:
    """A mesh axis name as MLIR writes it."""
    return '"' + name.replace("\\", "\\\\").replace('"', '\\"') + '"'
