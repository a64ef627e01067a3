"""What the benchmarks share: the stored sample programs, and one list of rows shown as a table and written as JSON."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

FOLDER = Path(__file__).resolve().parents[1] / "sample_models"
ENDINGS = (".mlirbc.zst", ".stablehlo.zst", ".mlir")

Row = dict[str, Any]


def stored_programs() -> dict[str, Path]:
    """Name -> file of every stored sample model, by name."""
    files = [path for path in sorted(FOLDER.iterdir()) if path.name.endswith(ENDINGS)]
    return {path.name.split(".")[0]: path for path in files}


def is_tiny(name: str) -> bool:
    return name.endswith("_tiny")


def choose(names: Sequence[str], *, tiny: bool = True) -> dict[str, Path]:
    """The stored programs of these names, and files by their path; without names all that are stored, the tiny twins
    only if `tiny`."""
    files = {Path(name).name.split(".")[0]: Path(name) for name in names if Path(name).is_file()}
    known, names = stored_programs(), [name for name in names if not Path(name).is_file()]
    unknown = [name for name in names if name not in known]
    if unknown:
        raise SystemExit(f"no sample {', '.join(unknown)}; there are {', '.join(known)}")
    wanted = names if names or files else [name for name in known if tiny or not is_tiny(name)]
    return {name: path for name, path in known.items() if name in wanted} | files


def table_options(description: str | None, what: str) -> tuple[list[str], Path | None]:
    """What a benchmark of published figures is asked for: the names of its rows, none for all, and the page to write.
    No device is looked for: nothing runs, and looking for TPUs takes long."""
    import jax

    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar=what, help="all where none is named")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="puts the table into a page of the documentation")
    options = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    return options.names, options.write


def note(text: str) -> None:
    """A line on stderr about where a long benchmark is."""
    print(text, file=sys.stderr, flush=True)


def show(title: str, columns: dict[str, str], rows: Sequence[Row], styles: dict[str, str] | None = None) -> None:
    """Prints rows as a table. `columns`: heading -> format with the row's fields, as in `"{seconds:.2f}"`."""
    table = Table(title=title, title_justify="left", box=None, header_style="bold", pad_edge=False)
    for place, heading in enumerate(columns):
        table.add_column(heading, justify="right" if place else "left", no_wrap=True)
    for row in rows:
        cells = cells_of(columns, row)
        table.add_row(*cells, style=(styles or {}).get(str(row.get("verdict", ""))))
    console = Console()
    if not console.is_terminal:
        console = Console(width=200)
    console.print(table, soft_wrap=True)


def cells_of(columns: dict[str, str], row: Row) -> list[str]:
    """A row's fields as the columns have them; a dash for what was not measured (nan)."""
    return [re.sub(r"[+-]?nan\b%?", "–", form.format_map(row)) for form in columns.values()]


def markdown_table(columns: dict[str, str], rows: Sequence[Row], *, words: int = 1) -> list[str]:
    """Lines of a Markdown table: the first `words` columns to the left, figures to the right."""
    words = min(words, len(columns))
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * words + "--:|" * (len(columns) - words)]
    return lines + ["| " + " | ".join(cells_of(columns, row)) + " |" for row in rows]


def put_between(page: Path, start: str, end: str, lines: Sequence[str]) -> None:
    """Writes lines between two markers of a page of the documentation."""
    before, _, rest = page.read_text(encoding="utf-8").partition(start)
    text = "\n".join([before + start, *lines, end + rest.partition(end)[2]])
    page.write_text(text, encoding="utf-8")


def write_json(path: str | None, content: Any) -> None:
    """Writes the facts behind the tables; `-` is stdout, None nowhere."""
    text = json.dumps(content, indent=1)
    if path == "-":
        print(text)
    elif path is not None:
        Path(path).write_text(text + "\n")


def spearman(one: Sequence[float], other: Sequence[float]) -> float:
    """Correlation of ranks, 1.0 where all values of a side are equal."""
    from scipy.stats import spearmanr  # heavy

    if len(set(one)) == 1 or len(set(other)) == 1:
        return 1.0
    return float(spearmanr(one, other).statistic)
