"""Drawings in SVG that no plotting library has: arrays cut into tiles, and the mesh. Facts in, markup out."""

from __future__ import annotations

from html import escape
from math import prod

from toast_cli.folding import NamedArray, fold
from toast_cli.program.paths import slash_path
from toast_cli.quantities import format_bytes, format_plural, format_sharding, type_bytes
from toast_cli.report.html import frame
from toast_cli.report.model import ArgumentFacts, DimensionAxes, Report

# Colours of mesh axes, in order, distinguishable for the colour-blind (Okabe and Ito, "Color universal design", 2008).
AXIS_COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00")
_WIDTH, _HEIGHT = 56, 36
_MOST_LINES = 32

_SHOWN = 16  # rows that are not folded away


def axis_colours(axes: dict[str, int]) -> dict[str, str]:
    """Mesh axis -> colour."""
    return {name: AXIS_COLOURS[number % len(AXIS_COLOURS)] for number, name in enumerate(axes)}


def tile(shape: list[int], sharding: DimensionAxes, axes: dict[str, int]) -> str:
    """An array as a rectangle, its last two sharded dimensions cut into shards; the first device's shard is filled.

    Cuts have the colour of the mesh axis that makes them; a replicated array is one grey piece.
    """
    colours = axis_colours(axes)
    split = [dim for dim, names in enumerate(sharding) if names][-2:]
    # The last dimension is horizontal, the one before it vertical.
    last = split[-1] if split and (len(split) > 1 or split[-1] == len(shape) - 1) else None
    rows = next((dim for dim in split if dim != last), None)
    columns = last
    pieces = []
    ways = {dim: prod(axes[name] for name in sharding[dim]) for dim in split}
    wide = ways.get(columns, 1) if columns is not None else 1
    high = ways.get(rows, 1) if rows is not None else 1
    first = columns if columns is not None else rows
    fill = colours[sharding[first][0]] if first is not None else "var(--faint)"
    pieces.append(
        f'<rect x="1" y="1" width="{(_WIDTH - 2) / wide:.2f}" height="{(_HEIGHT - 2) / high:.2f}" '
        f'fill="{fill}" opacity=".45"/>'
    )
    if columns is not None:
        pieces += _cuts(sharding[columns], axes, colours, upright=True)
    if rows is not None:
        pieces += _cuts(sharding[rows], axes, colours, upright=False)
    frame = f'<rect x="1" y="1" width="{_WIDTH - 2}" height="{_HEIGHT - 2}" fill="none" stroke="var(--faint)"/>'
    label = " by ".join(map(str, shape)) or "scalar"
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" height="{_HEIGHT}" role="img" '
        f'aria-label="{escape(label)}">'
        f"{''.join(pieces)}{frame}</svg>"
    )


def _cuts(names: list[str], axes: dict[str, int], colours: dict[str, str], *, upright: bool) -> list[str]:
    """Lines between the pieces of one dimension: the first axis's thick, each further axis's thinner between them."""
    lines = []
    ways = 1
    length = (_WIDTH if upright else _HEIGHT) - 2
    for depth, name in enumerate(names):
        before, ways = ways, ways * axes[name]
        if ways > _MOST_LINES:
            break
        for k in range(1, ways):
            if k * before % ways:
                at = 1 + length * k / ways
                ends = (
                    f'x1="{at:.2f}" x2="{at:.2f}" y1="1" y2="{_HEIGHT - 1}"'
                    if upright
                    else f'y1="{at:.2f}" y2="{at:.2f}" x1="1" x2="{_WIDTH - 1}"'
                )
                lines.append(f'<line {ends} stroke="{colours[name]}" stroke-width="{max(0.6, 2 - depth)}"/>')
    return lines


def mesh_grid(axes: dict[str, int]) -> str:
    """The devices as a grid: the last axis to the right, the others downwards, device 0 filled; axes in their
    colours."""
    sizes = list(axes.items())
    (across, columns), downs = sizes[-1], sizes[:-1]
    rows = prod(size for _, size in downs)
    side = max(6, min(26, 480 // max(columns, 1), 260 // max(rows, 1)))
    colours = axis_colours(axes)
    shown_rows, shown_columns = min(rows, 43), min(columns, 80)
    width, height = shown_columns * side + 2, shown_rows * side + 2
    cells = "".join(
        f'<rect x="{1 + c * side}" y="{1 + r * side}" width="{side - 2}" height="{side - 2}" rx="2" '
        f'fill="{colours[across]}" opacity="{0.3 + 0.6 * (r * columns + c == 0)}"/>'
        for r in range(shown_rows)
        for c in range(shown_columns)
    )
    label = " by ".join(f"{name} {size}" for name, size in sizes)
    return (
        f'<svg viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img" '
        f'aria-label="{escape(label)}">{cells}</svg>'
    )


def arguments(report: Report) -> str:
    """The largest patterns, and the others folded away."""
    entries = [
        NamedArray(slash_path(one.name) or f"#{one.index}", (one.type, format_sharding(one.sharding)))
        for one in report.arguments
    ]
    folded = [(row.pattern, len(row.members), report.arguments[row.members[0]]) for row in fold(entries)]
    folded.sort(key=lambda row: -row[1] * type_bytes(row[2].type))
    rows = [_row(pattern, count, one, report.mesh.axes) for pattern, count, one in folded]
    if not rows:
        return ""
    colours = axis_colours(report.mesh.axes)
    legend = " ".join(axis_badge(name, colours) for name in report.mesh.axes)
    shown, rest = rows[:_SHOWN], rows[_SHOWN:]
    if len(rest) == 1:
        shown, rest = rows, []
    more = frame.fold(f"{format_plural(len(rest), 'smaller pattern')}", _table(rest)) if rest else ""
    return f"<p>cut by {legend}</p>{_table(shown)}{more}"


def axis_badge(name: str, colours: dict[str, str]) -> str:
    """The name of a mesh axis on its colour."""
    return f"<span class='axis' style='background:{colours[name]}'>{escape(name)}</span>"


def _table(rows: list[str]) -> str:
    return frame.table(("", "argument", "", "type", "sharding", "whole", "on each device"), rows, (5, 6))


def _row(pattern: str, count: int, one: ArgumentFacts, axes: dict[str, int]) -> str:
    whole = type_bytes(one.type) * count
    pieces = prod(axes[name] for names in one.sharding for name in names)
    drawing = tile(_shape(one.type), one.sharding, axes) if pieces > 1 else ""
    sharding = escape(format_sharding(one.sharding)) if pieces > 1 else "<span class='faint'>whole</span>"
    return (
        f"<tr><td>{drawing}</td><td class='wide'><code>{escape(pattern)}</code></td>"
        f"<td class='n'>{f'× {count}' if count > 1 else ''}</td><td><code>{escape(one.type)}</code></td>"
        f"<td>{sharding}</td><td class='n'>{format_bytes(whole)}</td>"
        f"<td class='n'>{format_bytes(whole / pieces)}</td></tr>"
    )


def _shape(type_: str) -> list[int]:
    """`f32[16,8]` -> [16, 8]."""
    inside = type_.partition("[")[2].rstrip("]")
    return [int(size) for size in inside.split(",")] if inside else []
