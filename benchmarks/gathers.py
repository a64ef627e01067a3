"""What XLA:TPU makes of all-gathers of weights, over a whole slice and over a part of it: all-gathers or all-reduces.

One row for each specification, set of axes and size: what is compiled for a product with a weight that is stored in
pieces and gathered for it, and what the pass `slice-gathers` says (see `price/compiled_collectives.py`). Exits with 1
where they differ. Needs the extra `tpu`; no device.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import Row, note, show, write_json
from benchmarks.unsliced import said
from toast_cli.ask_xla.child import Failure
from toast_cli.ask_xla.compile import compile_for, target_of
from toast_cli.hardware import load_spec
from toast_cli.hardware.model import Mesh
from toast_cli.price.compiled_collectives import stays_slice_gather
from toast_cli.price.profiles import find_profile

MESHES = ("v5e-16", "v5e-256", "v4-32", "v4-128", "v5p-64", "v6e-64")
MIB = (2, 16, 18, 64)
COLUMNS = {
    "mesh": "{mesh}", "over": "{over}", "MiB": "{mib}", "compiled": "{compiled}", "pass": "{said}", "": "{verdict}",
}  # fmt: skip
WIDTH = 1024  # columns of the weight, two bytes each


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mesh", nargs="*", default=MESHES, help="specifications of meshes with axes `data` and `model`")
    parser.add_argument("--mib", type=int, nargs="+", default=MIB, help="of the weight")
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args(arguments)
    rows: list[Row] = []
    for mesh in options.mesh:
        for over in (("data", "model"), ("data",)):
            for mib in options.mib:
                rows.append(measure(mesh, over, mib))
                note("{mesh} over {over}, {mib} MiB: {compiled}, {said} by the pass".format_map(rows[-1]))
    show("all-gathers of a weight as compiled", COLUMNS, rows, {"differs": "red"})
    write_json(options.json, rows)
    return 1 if any(row["verdict"] for row in rows) else 0


def measure(name: str, over: tuple[str, ...], mib: int) -> Row:
    """One row."""
    spec = load_spec(name)
    mesh = spec.mesh(None)
    facts = compile_for(text_of(mesh, over, mib * 2**20 // (2 * WIDTH)).encode(), "stablehlo", target_of(spec))
    found = "" if isinstance(facts, Failure) else facts.hlo_text
    compiled = re.search(r" (all-gather|all-reduce)(-start)?\(", found)
    axes = tuple(mesh.names.index(axis) for axis in over)
    stays = stays_slice_gather(find_profile(mesh.chip), mesh, axes, mib * 2**20)
    row: Row = {
        "mesh": Path(name).stem, "over": "+".join(over), "mib": mib, "compiled": compiled[1] if compiled else "nothing",
        "said": "all-gather" if stays else "all-reduce",
    }  # fmt: skip
    return {**row, "verdict": "" if row["compiled"] == row["said"] else "differs"}


def text_of(mesh: Mesh, over: tuple[str, ...], rows: int) -> str:
    """The program as StableHLO."""
    sep = '", "'
    axes = ", ".join(f'"{name}"={size}' for name, size in zip(mesh.names, mesh.sizes, strict=True))
    given, weight, out = f"tensor<4096x{rows}xbf16>", f"tensor<{rows}x{WIDTH}xbf16>", f"tensor<4096x{WIDTH}xbf16>"
    pieces, everywhere = (said(f'[{{"{sep.join(names)}"}}, {{}}]') for names in (over, mesh.names))
    return f"""module @gathered {{
  sdy.mesh @mesh = <[{axes}]>
  func.func public @main(%x: {given} {everywhere}, %w: {weight} {pieces}) -> ({out} {everywhere}) {{
    %0 = sdy.sharding_constraint %w <@mesh, [{{}}, {{}}]> : {weight}
    %1 = stablehlo.dot_general %x, %0, contracting_dims = [1] x [0] : ({given}, {weight}) -> {out}
    return %1 : {out}
  }}
}}
"""


if __name__ == "__main__":
    sys.exit(main())
