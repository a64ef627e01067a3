"""Asks XLA:TPU how much memory each point of the corpus of `corpus.py` needs, and stores it in `data/memory.jsonl`.

Needs libtpu and no TPU. A full compile (`calibrate.py`) takes minutes and hands out memory freely where there is
plenty: it fills gaps badly, so what it assigns can be twice what is alive at once. Given next to no memory instead, the
compiler goes as far as its schedule, adds up what that needs, says so ("the total memory required for HLO temporaries
(1.76G) exceeds available HBM") and stops: a second or two. It is told to start saving memory (rematerialisation, a
thriftier schedule) only where it would on the real chip. `python benchmarks/calibrate_memory.py` adds the points that
the table lacks, one JSON line each: `program`, `slice`, `plan`, `decisions` and `fingerprint` as in `programs.jsonl`,
and

* `needed_bytes`: what one device needs, arguments and results included, as the compiler says; to three or four digits.
* `astray`: values that Shardy takes elsewhere than planned. `seconds`: of asking. `failed`: why there is no figure.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.calibrate import Point, astray_values, failed, fill, options_of
from benchmarks.corpus import Loaded
from toast_cli import xla
from toast_cli.ask_xla.child import Failure
from toast_cli.ask_xla.compile import target_of
from toast_cli.emit import write
from toast_cli.hardware import Chip
from toast_cli.plan.decisions import Plan
from toast_cli.plan.lower import lower

TABLE = Path(__file__).resolve().parent / "data" / "memory.jsonl"
GIVEN_MIB = 64  # less than any point needs
SAVING_FROM = 95  # percent of its memory from which on XLA:TPU saves memory, by its own default


def main(arguments: list[str] | None = None) -> int:
    options = options_of(__doc__, TABLE).parse_args(arguments)
    return fill(options, lambda loaded, plan, _: measure(loaded, plan), summary)


def summary(point: Point) -> str:
    """One line about a point, for people who wait."""
    found = point.get("needed_bytes")
    said = f"{found / 2**30:.3f} GiB" if found else point["failed"]
    return f"{point['program']} {point['slice']} {point['plan']}: {said}, {point['seconds']} s"


def measure(loaded: Loaded, plan: Plan) -> Point:
    """What XLA:TPU needs for a plan."""
    written = write(loaded.source, lower(loaded.problem, plan), "bytecode")
    target = target_of(loaded.spec)
    devices = xla.tpu_devices(target.topology, target.megacore)[: target.devices]
    start = time.monotonic()
    try:
        xla.compile_ahead(written.content, devices, shardy=True, options=starved_options(loaded.spec.chip))
        told: Point = {"failed": f"compiles in {GIVEN_MIB} MiB"}
    except RuntimeError as error:
        told = needed(str(error))
    return told | {"astray": astray_values(written), "seconds": round(time.monotonic() - start, 1)}


def needed(said: str) -> Point:
    """The figure in what the compiler said."""
    point = failed(Failure(said))
    return {"needed_bytes": point["exhausted"][0]} if "exhausted" in point else point


def starved_options(chip: Chip) -> dict[str, str]:
    """Options that leave next to no memory, and have it saved only where the whole chip's would be short."""
    percent = round(SAVING_FROM * (chip.memory_bytes - chip.reserved_bytes) / 2**20 / GIVEN_MIB)
    return {
        "xla_tpu_max_hbm_size_mib": str(GIVEN_MIB),
        "xla_jf_rematerialization_percent_shared_memory_limit": str(percent),
        "xla_tpu_scheduler_percent_shared_memory_limit": str(percent),
    }


if __name__ == "__main__":
    sys.exit(main())
