"""Facts about a program before any decision. In: a `Source` and its `Dimensions`. Out: facts, and their
rendering.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from toast_cli.dimensions import Dimensions
from toast_cli.frontend.source import Source
from toast_cli.frontend.symbolic import Symbols
from toast_cli.program.model import Op, Program
from toast_cli.program.names import slash_path
from toast_cli.program.ops import ARGUMENT
from toast_cli.program.quantities import (
    format_bytes,
    format_count,
    format_flops,
    format_percent,
    format_plural,
)
from toast_cli.report import style
from toast_cli.report.words import path_patterns

SCHEMA = "toast.inspection/1"
_SHORT = 12
_PLACES = 3  # places of a conflict that are named


@dataclass(frozen=True)
class OpCount:
    """Ops of one name. flops: of one run of the program, loops counted. whole: ops without a sharding rule."""

    name: str
    count: int
    flops: float
    whole: bool


@dataclass(frozen=True)
class LoopFacts:
    location: str
    trips: float
    trips_known: bool
    ops: int
    depth: int


@dataclass(frozen=True)
class ClassFacts:
    """A dimension class. size: elements along the largest. members: all argument dimensions known to be in it."""

    name: str
    role: str
    size: int
    classes: int
    members: list[str]


@dataclass(frozen=True)
class ConflictFacts:
    """A class that occurs twice in an array: the number of `sides` to choose from, the same in all `components` that
    look alike."""

    name: str
    components: int
    values: int
    sides: int
    locations: list[str]


@dataclass(frozen=True)
class SymbolFacts:
    """A symbolic dimension: the size it was given (0: none), and the places of arguments where it stands."""

    name: str
    size: int
    places: list[str]


@dataclass(frozen=True)
class TensorFacts:
    type: str
    bytes: int
    count: int
    name: str
    location: str


@dataclass(frozen=True)
class Inspection:
    """Facts about a program; bytes are of whole arrays."""

    path: str
    format: str
    name: str
    ops: int
    values: int
    arguments: int
    argument_bytes: int
    donated_bytes: int
    results: int
    flops: float
    op_kinds: list[OpCount]
    loops: list[LoopFacts]
    classes: list[ClassFacts]
    conflicts: list[ConflictFacts]
    tensors: list[TensorFacts]
    notices: list[str]
    symbols: list[SymbolFacts] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return {"schema": SCHEMA, **asdict(self)}


def inspect_program(source: Source, dimensions: Dimensions, symbols: Symbols | None = None) -> Inspection:
    """The facts. symbols: the symbolic dimensions of the file."""
    program = source.program
    sizes = {a.value: program.values[a.value].bytes for a in program.arguments}
    return Inspection(
        source.path, source.format, program.name, program.source_op_count, len(program.values), len(program.arguments),
        sum(sizes[a.value] for a in program.arguments), sum(sizes[a.value] for a in program.arguments if a.donated),
        len(program.results), program.flops, _op_kinds(program), _loops(source),
        [ClassFacts(g.name, g.role, g.size, len(g.classes), list(g.members)) for g in dimensions.groups],
        _conflicts(source, dimensions), _tensors(source), list(source.notices),
        symbol_facts(symbols or {}, source.sizes),
    )  # fmt: skip


def symbol_facts(symbols: Symbols, sizes: Mapping[str, int]) -> list[SymbolFacts]:
    return [SymbolFacts(name, sizes.get(name, 0), places) for name, places in symbols.items()]


def _op_kinds(program: Program) -> list[OpCount]:
    ops: dict[str, list[Op]] = defaultdict(list)
    for op in program.ops:
        if not op.name.startswith("toast."):
            ops[f"{op.name} @{op.detail}" if op.name == "stablehlo.custom_call" and op.detail else op.name].append(op)
    kinds = [
        OpCount(name, len(alike), sum(op.flops * op.trips for op in alike), all(op.opaque for op in alike))
        for name, alike in ops.items()
    ]
    return sorted(kinds, key=lambda kind: (-kind.flops, -kind.count, kind.name))


def _loops(source: Source) -> list[LoopFacts]:
    loops = source.program.loops

    def depth(number: int) -> int:
        return 0 if loops[number].parent < 0 else 1 + depth(loops[number].parent)

    return [
        LoopFacts(source.location(loop.first), loop.trips, loop.trips_known, loop.last - loop.first, depth(number))
        for number, loop in enumerate(loops)
    ]


def _conflicts(source: Source, dimensions: Dimensions) -> list[ConflictFacts]:
    places: dict[int, Counter[str]] = defaultdict(Counter)
    for number, strands in dimensions.strands.items():
        for resolution in {strand.resolution for strand in strands if strand is not None}:
            places[resolution][_line(source, number)] += 1
    return [
        ConflictFacts(
            dimensions.groups[conflict.group].name, conflict.components, conflict.values, conflict.sides,
            [place for place, _ in places[number].most_common()],
        )
        for number, conflict in enumerate(dimensions.resolutions)
    ]  # fmt: skip


def _line(source: Source, op: int) -> str:
    """`model.py:75`; the op's name if the program has no locations."""
    return source.location(op).split(" (")[0] or _plain(source.program.ops[op].name)


def _plain(name: str) -> str:
    """An op's name without its dialect; toast's own are `argument`, `carry`, `join`, `result`."""
    return name.removeprefix("stablehlo.").removeprefix("toast.")


def _tensors(source: Source) -> list[TensorFacts]:
    """Arrays by type and maker's place, those with the most total bytes first."""
    program = source.program
    paths = {a.value: a.label for a in program.arguments}
    values_by_place: dict[tuple[str, str, str], list[int]] = defaultdict(list)
    for number, op in enumerate(program.ops):
        location = "" if op.name == ARGUMENT else _line(source, number)
        for value in op.results:
            name = paths.get(value, "") or _plain(op.name)
            values_by_place[str(program.values[value]), name, location].append(value)
    tensors = [
        TensorFacts(type_, program.values[values[0]].bytes, len(values), name, location)
        for (type_, name, location), values in values_by_place.items()
    ]
    return sorted(tensors, key=lambda tensor: (-tensor.bytes, -tensor.count, tensor.name))[:200]


def blocks(inspection: Inspection, verbose: bool) -> list[RenderableType]:
    """The sections of the terminal's output; lists are cut off without `verbose`."""
    limit = None if verbose else _SHORT
    head = style.table([("", "left"), ("", "fold")])
    donated = f", {format_bytes(inspection.donated_bytes)} of them donated" if inspection.donated_bytes else ""
    head.add_row(
        Text("program", style.LABEL),
        f"{inspection.name} ({inspection.format}): {format_plural(inspection.ops, 'op')}, "
        f"{format_plural(inspection.arguments, 'argument')} of "
        f"{format_bytes(inspection.argument_bytes)}{donated}, {format_flops(inspection.flops)} a step",
    )
    for notice in inspection.notices:
        head.add_row(Text("note", style.LABEL), notice)
    sections = [
        symbol_table(inspection.symbols) if inspection.symbols else None,
        _op_table(inspection, limit),
        _loop_table(inspection, limit),
        _class_table(inspection, limit),
        _conflict_table(inspection),
        _tensor_table(inspection, limit),
    ]
    return [head, *(block for section in sections if section is not None for block in (Text(), section))]


def symbol_table(symbols: Sequence[SymbolFacts], constraints: Sequence[str] = ()) -> RenderableType:
    """The symbolic dimensions with their sizes and places, the file's constraints, and how to give missing sizes."""
    rows = [(s.name, f"{s.size:,}" if s.size else "-", ", ".join(map(slash_path, s.places))) for s in symbols]
    drawn = style.table([("", "left"), ("size", "right"), ("argument[dimension]", "fold")], rows)
    give = " ".join(f"--dim {s.name}=SIZE" for s in symbols if not s.size)
    notes = [f"the file's constraints: {', '.join(constraints)}"] if constraints else []
    notes += [f"give each a size: {give}"] if give else []
    return style.section("symbolic dimensions", drawn, *(Text(line, style.LABEL) for line in notes))


def _listed(
    title: str, heads: Sequence[tuple[str, str]], rows: Sequence[Sequence[str]], limit: int | None, noun: str
) -> RenderableType | None:
    """A section with the first rows, and the number of the others; None without rows."""
    if not rows:
        return None
    hidden = len(rows) - limit if limit is not None else 0
    return style.section(title, style.table(heads, rows[:limit]), *style.more(hidden, f"more {noun}"))


def _op_table(inspection: Inspection, limit: int | None) -> RenderableType | None:
    rows = [
        (
            kind.name,
            format_count(kind.count),
            format_flops(kind.flops) if kind.flops else "",
            format_percent(kind.flops / inspection.flops) if inspection.flops and kind.flops else "",
            "cannot be split: every device computes it whole" if kind.whole else "",
        )
        for kind in inspection.op_kinds
    ]
    heads = [("", "left"), ("count", "right"), ("arithmetic", "right"), ("", "right"), ("", "fold")]
    return _listed("ops", heads, rows, limit, "kind")


def _loop_table(inspection: Inspection, limit: int | None) -> RenderableType | None:
    rows = [
        (
            f"{loop.trips:,}" if loop.trips_known else f"unknown, taken as {loop.trips:,}",
            format_count(loop.ops),
            f"{'  ' * loop.depth}{loop.location}",
        )
        for loop in inspection.loops
    ]
    heads = [("runs", "right"), ("ops", "right"), ("at", "fold")]
    return _listed("loops", heads, rows, limit, "loop")


def _class_table(inspection: Inspection, limit: int | None) -> RenderableType | None:
    rows = [
        (group.name, f"{group.size:,}", f"{group.classes:,}", ", ".join(path_patterns(group.members)))
        for group in inspection.classes
    ]
    title = "dimensions that toast can split; those on one line are always split together"
    heads = [("", "left"), ("size", "right"), ("count", "right"), ("array.dimension", "fold")]
    return _listed(title, heads, rows, limit, "group")


def _conflict_table(inspection: Inspection) -> RenderableType | None:
    rows = []
    for conflict in inspection.conflicts:
        rest = len(conflict.locations) - _PLACES
        more = f" and {format_plural(rest, 'more place')}" if rest > 0 else ""
        places = ", ".join(conflict.locations[:_PLACES]) + more
        rows.append((conflict.name, str(conflict.sides), f"{conflict.components:,}", f"{conflict.values:,}", places))
    heads = [("", "left"), ("choices", "right"), ("places", "right"), ("arrays", "right"), ("at", "fold")]
    title = "conflicts: an array has the dimension twice, and a mesh axis can split only one of the two"
    return _listed(title, heads, rows, None, "conflict")


def _tensor_table(inspection: Inspection, limit: int | None) -> RenderableType | None:
    rows = [
        (
            format_bytes(tensor.bytes),
            tensor.type,
            style.times(tensor.count),
            tensor.name if tensor.location else slash_path(tensor.name),
            tensor.location,
        )
        for tensor in inspection.tensors
    ]
    heads = [("", "right"), ("", "left"), ("", "right"), ("", "fold"), ("made at", "fold")]
    return _listed("largest arrays, unsharded", heads, rows, limit, "kind")
