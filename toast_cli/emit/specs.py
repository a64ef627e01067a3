"""PartitionSpecs of arguments and results as plain data, and as JSON.

Enters: a `Source` and a `PartitionedProgram`. Leaves: `BoundarySpecs`; its JSON has schema "toast.specs/1".
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from toast_cli.emit.marks import result_shardings
from toast_cli.frontend.source import Source
from toast_cli.plan.partitioned import PartitionedProgram
from toast_cli.plan.sharding import Sharding

SCHEMA = "toast.specs/1"

# Per dimension the mesh axes that split it, major to minor, or None.
NamedAxes = tuple[tuple[str, ...] | None, ...]


@dataclass(frozen=True)
class NamedSpec:
    """PartitionSpec of one argument or result. `name` is its path in the user's tree
    (`params['w']`), empty if unknown."""

    name: str
    spec: NamedAxes


@dataclass(frozen=True)
class BoundarySpecs:
    """All arguments and results of a program in order, on a mesh of these axes."""

    program: str
    axes: dict[str, int]
    arguments: tuple[NamedSpec, ...]
    results: tuple[NamedSpec, ...]


def emit_specs(source: Source, lowered: PartitionedProgram) -> bytes:
    """The specs as JSON, one array a line."""
    specs = boundary_specs(source, lowered)
    head = {"schema": SCHEMA, "program": specs.program, "mesh": {"axes": specs.axes}}
    lists = {"arguments": specs.arguments, "results": specs.results}
    fields = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in head.items()]
    for key, named in lists.items():
        lines = ",\n  ".join(json.dumps(entry(k, one)) for k, one in enumerate(named))
        fields.append(f"{json.dumps(key)}: [\n  {lines}\n ]" if named else f"{json.dumps(key)}: []")
    return ("{\n " + ",\n ".join(fields) + "\n}\n").encode()


def entry(index: int, named: NamedSpec) -> dict[str, Any]:
    """One argument or result in JSON."""
    spec = [None if axes is None else list(axes) for axes in named.spec]
    return {"index": index, "name": named.name, "spec": spec}


def boundary_specs(source: Source, lowered: PartitionedProgram) -> BoundarySpecs:
    """The specs of a lowered plan."""
    program = source.program

    def spec(sharding: Sharding) -> NamedAxes:
        return tuple(tuple(lowered.axis_names[axis] for axis in axes) or None for axes in sharding)

    return BoundarySpecs(
        program.name,
        dict(zip(lowered.axis_names, lowered.axis_sizes, strict=True)),
        tuple(NamedSpec(argument.path, spec(lowered.shardings[argument.value])) for argument in program.arguments),
        tuple(
            NamedSpec(result.path, spec(sharding))
            for result, sharding in zip(program.results, result_shardings(source, lowered), strict=True)
        ),
    )
