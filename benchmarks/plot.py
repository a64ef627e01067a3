"""Predicted against compiled, as an SVG drawn without any library: logarithmic axes, the diagonal, and a band of ± 20
%.
"""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from math import ceil, floor, log10

Point = tuple[float, float, str, bool]  # compiled, predicted, what it is, whether of the test set

SIDE, MARGIN = 420, 56
BAND = 1.2


def scatter(title: str, unit: str, points: Iterable[Point]) -> str:
    """The file's content; every point tells on hovering what it is."""
    shown = [p for p in points if p[0] > 0 and p[1] > 0]
    values = [value for p in shown for value in p[:2]] or [1.0]
    low, high = floor(log10(min(values) / 1.05)), ceil(log10(max(values) * 1.05))

    def at(value: float) -> float:
        return (log10(value) - low) / (high - low) * SIDE

    def place(compiled: float, predicted: float) -> tuple[float, float]:
        return MARGIN + at(compiled), MARGIN + SIDE - at(predicted)

    def line(start: tuple[float, float], end: tuple[float, float], style: str) -> str:
        (x1, y1), (x2, y2) = place(*start), place(*end)
        return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" {style}/>'

    size, first, last = SIDE + 2 * MARGIN, 10.0**low, 10.0**high
    middle = f'text-anchor="middle" transform="rotate(-90 16 {size / 2})"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size} {size}" font-family="sans-serif" font-size="12">',
        f'<rect width="{size}" height="{size}" fill="#fff"/>',
        f'<text x="{size / 2}" y="24" text-anchor="middle" font-size="14">{escape(title)}</text>',
        f'<text x="{size / 2}" y="{size - 14}" text-anchor="middle">compiled, {escape(unit)}</text>',
        f'<text x="16" y="{size / 2}" {middle}>predicted, {escape(unit)}</text>',
        f'<rect x="{MARGIN}" y="{MARGIN}" width="{SIDE}" height="{SIDE}" fill="none" stroke="#888"/>',
        line((first, first), (last, last), 'stroke="#444"'),
        line((first, first * BAND), (last / BAND, last), 'stroke="#aaa" stroke-dasharray="4 3"'),
        line((first * BAND, first), (last, last / BAND), 'stroke="#aaa" stroke-dasharray="4 3"'),
    ]
    for power in range(low, high + 1):
        (x, y), text = place(10.0**power, 10.0**power), f"{10.0**power:g}"
        parts.append(f'<text x="{x:.1f}" y="{MARGIN + SIDE + 16}" text-anchor="middle">{text}</text>')
        parts.append(f'<text x="{MARGIN - 6}" y="{y + 4:.1f}" text-anchor="end">{text}</text>')
    for compiled, predicted, name, test in shown:
        x, y = place(compiled, predicted)
        style = 'fill="#c2410c"' if test else 'fill="none" stroke="#1d4ed8"'
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" {style}><title>{escape(name)}</title></circle>')
    legend = MARGIN + 16
    for row, style, word in ((0, 'fill="#c2410c"', "test"), (18, 'fill="none" stroke="#1d4ed8"', "fit")):
        parts.append(
            f'<circle cx="{legend}" cy="{legend + row}" r="4" {style}/>'
            f'<text x="{legend + 10}" y="{legend + row + 4}">{word}</text>'
        )
    return "\n".join([*parts, "</svg>"]) + "\n"
