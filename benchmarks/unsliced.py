"""What XLA:TPU makes of an array that two products take pieces of: cycles of all kernels of a small program.

The array is elementwise work on an argument, is made whole on each device along an axis of four, and is read by two
products: both take the same quarter of it, or different ones, or one takes all of it. For comparison it is made in
quarters. See `price/compilation.py`. Needs the extra `tpu`; no device.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import Row, note, show, write_json
from toast_cli.ask_xla.child import Failure
from toast_cli.ask_xla.compile import compile_for, estimated_cycles, target_of
from toast_cli.hardware import load_spec

WORK = {
    "exp, tanh": ("exponential %x", "tanh %0"),
    "multiply, add": ("multiply %x, %x", "add %0, %x"),
    "negate, abs": ("negate %x", "abs %0"),
}
ROWS, SIDES, ALL = '[{"data"}, {}, {"model"}, {}]', '[{"data"}, {}, {}, {"model"}]', '[{"data"}, {}, {}, {}]'
# How the array is made, and how either product takes it.
CASES = {
    "other pieces": (ALL, ROWS, SIDES),
    "a piece and all": (ALL, ROWS, ALL),
    "one piece": (ALL, ROWS, ROWS),
    "made in pieces": (ROWS, ROWS, ROWS),
}
ARRAY, OTHER = "tensor<16x12x512x512xbf16>", "tensor<16x12x512x64xbf16>"
COLUMNS = {"work": "{work}", "mesh": "{mesh}", **{case: f"{{{case}:.1f}}" for case in CASES}}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mesh", nargs="*", default=["v5e-16"], help="specs of 16 chips")
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args(arguments)
    rows: list[Row] = []
    for mesh in options.mesh:
        for work in WORK:
            rows.append({"work": work, "mesh": mesh} | {case: microseconds(work, case, mesh) for case in CASES})
            note(f"{rows[-1]}")
    show("microseconds of all kernels, by what the two products take", COLUMNS, rows)
    write_json(options.json, rows)
    return 0


def microseconds(work: str, case: str, mesh: str) -> float:
    """Of one run on one device, by the compiler's cycles; nan where it compiles nothing."""
    spec = load_spec(mesh)
    facts = compile_for(text_of(work, case).encode(), "stablehlo", target_of(spec))
    if isinstance(facts, Failure):
        return float("nan")
    return 1e6 * estimated_cycles(facts.hlo_text) / spec.mesh(None).chip.clock_hertz


def text_of(work: str, case: str) -> str:
    """The program as StableHLO."""
    first, second = WORK[work]
    made, *taken = CASES[case]
    types = f"({ARRAY}, {OTHER}) -> {OTHER}"
    return f"""module @unsliced {{
  sdy.mesh @mesh = <["data"=4, "model"=4]>
  func.func public @main(
    %x: {ARRAY} {said(ALL)}, %k: {OTHER} {said(ALL)}
  ) -> ({OTHER} {said(ROWS)}, {OTHER} {said(ROWS)}) {{
    %0 = stablehlo.{first} : {ARRAY}
    %1 = stablehlo.{second} : {ARRAY}
    %y = sdy.sharding_constraint %1 <@mesh, {made}> : {ARRAY}
    %a = sdy.sharding_constraint %y <@mesh, {taken[0]}> : {ARRAY}
    %b = sdy.sharding_constraint %y <@mesh, {taken[1]}> : {ARRAY}
    %r = stablehlo.dot_general %a, %k, batching_dims = [0, 1] x [0, 1], contracting_dims = [3] x [2] : {types}
    %s = stablehlo.dot_general %b, %k, batching_dims = [0, 1] x [0, 1], contracting_dims = [2] x [2] : {types}
    return %r, %s : {OTHER}, {OTHER}
  }}
}}
"""


def said(sharding: str) -> str:
    return f"{{sdy.sharding = #sdy.sharding<@mesh, {sharding}>}}"


if __name__ == "__main__":
    sys.exit(main())
