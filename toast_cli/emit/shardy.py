"""Shardy StableHLO: `sdy.mesh`, `sdy.sharding`, `sdy.sharding_constraint`."""

from __future__ import annotations

from typing import Any

from toast_cli.plan.layout import Layout
from toast_cli.xla import ir


class ShardyNotation:
    """Shardings over one mesh symbol; each different layout is built once."""

    attribute = "sdy.sharding"

    def __init__(self, module: Any, axis_names: tuple[str, ...], axis_sizes: tuple[int, ...]) -> None:
        self._context = module.context
        self._axis_names = axis_names
        self._mesh_text = mesh_text(axis_names, axis_sizes)
        self._mesh = mesh_symbol(module)
        self._values: dict[Layout, Any] = {}
        self._operations: dict[tuple[Layout, ...], Any] = {}

    def declare(self, module: Any) -> list[Any]:
        mesh = ir.Operation.create(
            "sdy.mesh",
            attributes={
                "sym_name": ir.StringAttr.get(self._mesh, self._context),
                "mesh": ir.Attribute.parse(f"#sdy.mesh<{self._mesh_text}>", self._context),
            },
            loc=ir.Location.unknown(self._context),
            ip=ir.InsertionPoint.at_block_begin(module.body),
        )
        return [mesh]

    def _text(self, layout: Layout) -> str:
        dimensions = ("{" + ", ".join(quoted(self._axis_names[axis]) for axis in axes) + "}" for axes in layout)
        return f"<@{self._mesh}, [{', '.join(dimensions)}]>"

    def of_value(self, layout: Layout) -> Any:
        if layout not in self._values:
            self._values[layout] = ir.Attribute.parse(f"#sdy.sharding{self._text(layout)}", self._context)
        return self._values[layout]

    def of_operation(self, layouts: tuple[Layout, ...]) -> Any:
        if layouts not in self._operations:
            text = ", ".join(map(self._text, layouts))
            self._operations[layouts] = ir.Attribute.parse(f"#sdy.sharding_per_value<[{text}]>", self._context)
        return self._operations[layouts]

    def constraint(self, value: Any, layout: Layout, location: Any, where: Any) -> Any:
        return ir.Operation.create(
            "sdy.sharding_constraint",
            results=[value.type],
            operands=[value],
            attributes={"sharding": self.of_value(layout)},
            loc=location,
            ip=where,
        )


def mesh_text(axis_names: tuple[str, ...], axis_sizes: tuple[int, ...]) -> str:
    """The mesh as Shardy prints it: `["data"=8, "model"=2]`."""
    return "[" + ", ".join(f"{quoted(name)}={size}" for name, size in zip(axis_names, axis_sizes, strict=True)) + "]"


def mesh_symbol(module: Any) -> str:
    """A symbol for the mesh that the module does not use yet: `mesh` where free (manual regions bring meshes of their own)."""
    taken = {op.attributes["sym_name"].value for op in module.body.operations if "sym_name" in op.attributes}
    return next(name for name in ("mesh", *(f"mesh_{k}" for k in range(len(taken) + 1))) if name not in taken)


def quoted(name: str) -> str:
    """A mesh axis name as MLIR writes it."""
    return '"' + name.replace("\\", "\\\\").replace('"', '\\"') + '"'
