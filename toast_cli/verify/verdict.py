"""`verify`: compares a partitioned program's predicted figures with XLA's.

In: the bytes of the program, perhaps the original and the report written with it. Out: a `Verdict` of three
parts. Numbers run on virtual CPU devices; collectives and memory come from the chosen compiler: without real chips to
compile for, collectives are those that the partitioner adds. A part that cannot be checked says why.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from math import prod
from typing import Any, Literal

from toast_cli.promised import Promises
from toast_cli.quantities import format_bytes
from toast_cli.verify.ahead import AheadFacts, Dialect, Judge, compile_ahead
from toast_cli.verify.child import Failure
from toast_cli.verify.collectives import CompiledCollective, collectives_in
from toast_cli.verify.errors import excess
from toast_cli.verify.numbers import compare_numbers
from toast_cli.verify.partitioned import collectives_after_partitioning
from toast_cli.verify.traffic import TrafficComparison, compare_traffic

SCHEMA = "toast.verify/1"
VerdictOutcome = Literal["agreed", "disagreed", "unchecked"]

# A difference in traffic above this fraction of the promised is a disagreement …
TRAFFIC_TOLERANCE = 0.05
# … unless it is this small on each device.
SMALL_BYTES = 4096


@dataclass(frozen=True)
class Part:
    """One check. `text` is a sentence; `facts` holds the figures."""

    name: str
    outcome: VerdictOutcome
    text: str
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Verdict:
    """compiler: `cpu` for XLA's partitioner on virtual CPU devices, or the machine compiled for. unasked: for `cpu`,
    how to use the chips' own compiler, or why it cannot be used."""

    compiler: str
    parts: list[Part]
    unasked: str = ""

    @property
    def outcome(self) -> VerdictOutcome:
        """Disagreed if any part did, unchecked if none could be checked."""
        outcomes = {part.outcome for part in self.parts}
        return "disagreed" if "disagreed" in outcomes else "agreed" if "agreed" in outcomes else "unchecked"

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "compiler": self.compiler,
            "unasked": self.unasked,
            "outcome": self.outcome,
            "parts": [asdict(p) for p in self.parts],
        }


def verify(
    program: bytes,
    form: Dialect,
    axes: dict[str, int],
    original: bytes | None,
    promises: Promises | None,
    judge: Judge,
) -> Verdict:
    """Checks a partitioned program.

    Args:
        axes: the mesh it was partitioned for. original: StableHLO bytes of the program it came from, for the numbers.
        promises: of the report written with it. judge: the compiler for collectives and memory. If the user did not
            choose the chips' own compiler and it fails, XLA's partitioner on the CPU is used.
    """
    target, unasked = judge.target, judge.unasked
    if target is not None:
        compiled = compile_ahead(program, form, target, shardy=form == "stablehlo")
        found: list[CompiledCollective] | Failure
        if not isinstance(compiled, Failure):
            found = collectives_in(compiled.hlo_text, tuple(axes), tuple(axes.values()))
        else:
            found = compiled
            if not judge.by_name and not out_of_memory(compiled):
                unasked = f"XLA:{target.platform.upper()} did not compile it: {compiled.reason}"
                target = None
        memory = check_memory(compiled, promises)
    # XLA:TPU takes collectives between slices apart into several inside them and one between them.
    if target is None or (target.slices > 1 and not isinstance(found, Failure)):
        found = collectives_after_partitioning(program, form, axes)
        promises = promises and replace(promises, collectives=[one.as_written() for one in promises.collectives])
    if target is None:
        memory = Part("memory", "unchecked", "only a compiler for the real chips can judge it: --compiler tpu or gpu")
    parts = [check_collectives(found, axes, promises), memory]
    if original is not None:
        parts.insert(0, check_numbers(original, program, form, prod(axes.values())))
    return Verdict(target.label if target else "cpu", parts, unasked)


def check_numbers(original: bytes, program: bytes, form: Dialect, devices: int) -> Part:
    """Compares both programs' results for the same seeded inputs on virtual CPU devices, within rounding errors."""
    errors = compare_numbers(original, program, devices, form=form)
    if isinstance(errors, Failure):
        return Part("numbers", "unchecked", f"could not run: {errors.reason}")
    wrong = [e for e in errors if e.wrong]
    facts = {"results": len(errors), "wrong": [asdict(e) for e in wrong]}
    if not errors:
        return Part("numbers", "unchecked", "the program has no results", facts)
    worst = max(errors, key=lambda e: excess(e.error, e.allowed))
    facts["worst"] = asdict(worst)
    if wrong:
        text = (
            f"{len(wrong)} of {len(errors)} results differ: the {worst.what} of result {worst.index} ({worst.type}) by "
            f"{worst.error:.1e} of its size, {worst.allowed:.0e} may be rounding"
        )
        return Part("numbers", "disagreed", text, facts)
    if not any(e.looks for e in errors):
        return Part("numbers", "unchecked", "rounding alone changes every result by half its size", facts)
    which = "the one result is" if len(errors) == 1 else f"all {len(errors)} results are"
    text = f"{which} equal; largest error {worst.error:.1e}, {worst.allowed:.0e} may be rounding"
    return Part("numbers", "agreed", text, facts)


def check_collectives(
    found: list[CompiledCollective] | Failure, axes: dict[str, int], promises: Promises | None
) -> Part:
    """Compares the collectives of the compiled module with the promised ones."""
    if isinstance(found, Failure):
        outcome: VerdictOutcome = "disagreed" if out_of_memory(found) else "unchecked"
        return Part("collectives", outcome, f"did not compile: {found.reason}")
    compared = compare_traffic(promises.collectives if promises else [], found, axes)
    facts = {"collectives": [asdict(row) for row in compared.rows]}
    if promises is None:
        text = f"{len(found)} in the compiled program; promises are in the report (--report)"
        return Part("collectives", "unchecked", text, facts)
    facts["differences"] = [asdict(difference) for difference in compared.differences]
    return Part("collectives", *judged_traffic(compared), facts)


def judged_traffic(compared: TrafficComparison) -> tuple[VerdictOutcome, str]:
    """The verdict on a comparison, and its reason."""
    whole = max(compared.promised_bytes, compared.compiled_bytes)
    if not whole:
        return "agreed", "none promised, none compiled"
    largest = max(compared.extra_bytes, compared.missing_bytes)
    if largest <= TRAFFIC_TOLERANCE * whole:
        return (
            "agreed",
            f"{100 * compared.share:.1f} % of the {format_bytes(whole)} that each device sends are as promised",
        )
    if largest < SMALL_BYTES:
        return "unchecked", f"too small to judge: each device sends {format_bytes(whole)} a step"
    kept = [
        f"{format_bytes(size)} {word}" for size, word in (
            (compared.extra_bytes, "more than promised"), (compared.missing_bytes, "of the promised are missing"),
        ) if size > TRAFFIC_TOLERANCE * whole
    ]  # fmt: skip
    return "disagreed", f"each device sends {format_bytes(compared.compiled_bytes)}: {' and '.join(kept)}"


def check_memory(compiled: AheadFacts | Failure, promises: Promises | None) -> Part:
    """Compares the peak memory of the real chips' compiler with the promised one."""
    if isinstance(compiled, Failure):
        promised_to_fit = promises is not None and promises.fit != "no"
        return Part(
            "memory", "disagreed" if out_of_memory(compiled) and promised_to_fit else "unchecked", compiled.reason
        )
    peak = compiled.device_bytes
    facts: dict[str, Any] = {
        "argument_bytes": compiled.argument_bytes,
        "temp_bytes": compiled.temp_bytes,
        "peak_bytes": peak,
        "compile_seconds": compiled.seconds,
    }
    if compiled.host_bytes:
        facts["host_bytes"] = compiled.host_bytes
    if compiled.cycles:
        facts["cycles"] = compiled.cycles
    if promises is None:
        return Part("memory", "unchecked", f"peak {format_bytes(peak)}; the promise is in the report (--report)", facts)
    facts |= {
        "predicted_peak_bytes": promises.peak_bytes,
        "predicted_argument_bytes": promises.argument_bytes,
        "limit_bytes": promises.limit_bytes,
    }
    if promises.host_bytes:
        facts["predicted_host_bytes"] = promises.host_bytes
    text = (
        f"peak {format_bytes(peak)}, predicted {format_bytes(promises.peak_bytes)} of "
        f"{format_bytes(promises.limit_bytes)}"
    )
    fits = peak <= promises.limit_bytes
    text += "" if fits else ": out of memory"
    return Part("memory", "agreed" if fits == (promises.fit != "no") else "disagreed", text, facts)


def out_of_memory(failure: Failure) -> bool:
    return "RESOURCE_EXHAUSTED" in failure.reason or "exceeds available" in failure.reason
