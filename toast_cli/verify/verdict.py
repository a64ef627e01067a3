"""`verify`: what was promised for a partitioned program beside what XLA makes of it.

Enters: the bytes of the program, perhaps the original and the report written with it. Leaves: a `Verdict` of three parts. Numbers run on virtual
CPU devices; collectives and memory come from whichever compiler was asked for. A part that cannot be checked says why.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import asdict, dataclass, field
from math import prod
from typing import Any, Literal

from toast_cli.report.format import format_bytes
from toast_cli.report.model import CollectiveFacts
from toast_cli.verify.ahead import AheadFacts, Target, compile_ahead
from toast_cli.verify.child import Failure
from toast_cli.verify.collectives import Collective, collectives_in
from toast_cli.verify.compile import CompiledFacts, Form, compile_on_cpu
from toast_cli.verify.errors import excess
from toast_cli.verify.numbers import compare_numbers
from toast_cli.verify.promises import Promises

SCHEMA = "toast.verify/1"
Outcome = Literal["agreed", "disagreed", "unchecked"]

# More traffic than this beyond what was promised, per kind and axes together, is a disagreement.
TRAFFIC_TOLERANCE = 0.10
SMALL_BYTES = 1 << 20


@dataclass(frozen=True)
class Part:
    """One thing checked. `text` says it in a sentence; `facts` holds the figures."""

    name: str
    outcome: Outcome
    text: str
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Traffic:
    """Collectives over the same axes: bytes of results per device and how many, promised and compiled, by kind."""

    axes: tuple[str, ...]
    kind: str
    promised_bytes: float
    promised_count: float
    compiled_bytes: float
    compiled_count: float
    example: str


@dataclass(frozen=True)
class Verdict:
    compiler: str
    parts: list[Part]

    @property
    def outcome(self) -> Outcome:
        """Disagreed if any part did, unchecked if none could be checked."""
        outcomes = {part.outcome for part in self.parts}
        return "disagreed" if "disagreed" in outcomes else "agreed" if "agreed" in outcomes else "unchecked"

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "compiler": self.compiler,
            "outcome": self.outcome,
            "parts": [asdict(p) for p in self.parts],
        }


def verify(
    program: bytes,
    form: Form,
    axes: dict[str, int],
    original: bytes | None,
    promises: Promises | None,
    target: Target | None,
) -> Verdict:
    """Checks a partitioned program.

    Args:
        axes: the mesh it was partitioned for. original: StableHLO bytes of the program it came from, for the numbers.
        promises: of the report written with it. target: a machine to compile for; None for virtual CPU devices.
    """
    devices = prod(axes.values())
    compiled: CompiledFacts | AheadFacts | Failure
    if target is None:
        compiled = compile_on_cpu(program, form, devices, shardy=form == "stablehlo")
    else:
        compiled = compile_ahead(program, form, target, shardy=form == "stablehlo")
    parts = [check_collectives(compiled, axes, promises), check_memory(compiled, promises, target)]
    if original is not None:
        parts.insert(0, check_numbers(original, program, form, devices))
    return Verdict(target.label if target else "cpu", parts)


def check_numbers(original: bytes, program: bytes, form: Form, devices: int) -> Part:
    """Same seeded inputs to both programs on virtual CPU devices, results within what rounding explains."""
    errors = compare_numbers(original, program, devices, form=form, shardy=form == "stablehlo")
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
    text = f"{_all(len(errors))} equal; largest error {worst.error:.1e}, {worst.allowed:.0e} may be rounding"
    return Part("numbers", "agreed", text, facts)


def _all(results: int) -> str:
    return "the one result is" if results == 1 else f"all {results} results are"


def check_collectives(
    compiled: CompiledFacts | AheadFacts | Failure, axes: dict[str, int], promises: Promises | None
) -> Part:
    """Collectives of the compiled module beside the promised ones."""
    if isinstance(compiled, Failure):
        return Part(
            "collectives",
            "disagreed" if out_of_memory(compiled) else "unchecked",
            f"did not compile: {compiled.reason}",
        )
    found = collectives_in(compiled.hlo_text, tuple(axes), tuple(axes.values()))
    table = traffic(found, promises.collectives if promises else [])
    facts = {"collectives": [asdict(row) for row in table]}
    if promises is None:
        return Part(
            "collectives",
            "unchecked",
            f"{len(found)} in the compiled program; promises are in the report (--report)",
            facts,
        )
    # XLA:CPU has no 16-bit arithmetic and widens bf16 arrays, collectives included.
    allowed = 2.0 if isinstance(compiled, CompiledFacts) and "bf16[" in compiled.hlo_text else 1.0
    extra = [
        key for key, (promised, actual) in wire_bytes(table, axes).items()
        if actual > allowed * promised * (1 + TRAFFIC_TOLERANCE) + SMALL_BYTES
    ]  # fmt: skip
    if extra:
        return Part(
            "collectives",
            "disagreed",
            f"more traffic than promised over {', '.join('+'.join(key) for key in extra)}",
            facts,
        )
    return Part("collectives", "agreed", "no more traffic than promised over any axis", facts)


def traffic(found: list[Collective], promised: list[CollectiveFacts]) -> list[Traffic]:
    """One row per kind and set of axes, the largest first."""
    sums: dict[tuple[str, tuple[str, ...]], list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0, 0.0])
    examples: dict[tuple[str, tuple[str, ...]], str] = {}
    for fact in promised:
        key = (fact.kind, tuple(sorted(fact.axes)))
        sums[key][0] += fact.bytes * fact.count
        sums[key][1] += fact.count
        examples.setdefault(key, fact.location)
    for use in found:
        key = (use.kind, tuple(sorted(use.axes)))
        sums[key][2] += use.bytes * use.count
        sums[key][3] += use.count
        examples.setdefault(key, use.name)
    rows = [Traffic(axes, kind, f[0], f[1], f[2], f[3], examples[kind, axes]) for (kind, axes), f in sums.items()]
    return sorted(rows, key=lambda row: -max(row.promised_bytes, row.compiled_bytes))


def wire_bytes(table: list[Traffic], axes: dict[str, int]) -> dict[tuple[str, ...], tuple[float, float]]:
    """Per set of axes, bytes each device sends in rings, promised and compiled.

    An all-reduce of b bytes over n devices sends 2b(n-1)/n, an all-gather to b bytes b(n-1)/n, a reduce-scatter to b bytes b(n-1): so it does
    not matter in which of two equivalent forms a compiler writes a reduction (XLA:CPU knows no reduce-scatter).
    """
    sent: dict[tuple[str, ...], list[float]] = defaultdict(lambda: [0.0, 0.0])
    for row in table:
        n = prod(axes.get(axis, 1) for axis in row.axes) or 1
        factor = {
            "all-reduce": 2 * (n - 1) / n,
            "reduce-scatter": float(n - 1),
            "all-gather": (n - 1) / n,
            "all-to-all": (n - 1) / n,
        }
        for side, size in enumerate((row.promised_bytes, row.compiled_bytes)):
            reduced = row.kind == "reduce-scatter" and side == 0  # promised as one half, allowed as a whole all-reduce
            sent[row.axes][side] += size * factor.get(row.kind, 1.0) * (2.0 if reduced else 1.0)
    return {key: (promised, compiled) for key, (promised, compiled) in sent.items()}


def check_memory(
    compiled: CompiledFacts | AheadFacts | Failure, promises: Promises | None, target: Target | None
) -> Part:
    """Peak memory as the compiler assigns buffers; only a compiler for the real chip can judge it."""
    if isinstance(compiled, Failure):
        outcome: Outcome = (
            "disagreed" if out_of_memory(compiled) and promises is not None and promises.fits else "unchecked"
        )
        return Part("memory", outcome, compiled.reason)
    peak = compiled.argument_bytes + compiled.output_bytes - compiled.alias_bytes + compiled.temp_bytes
    facts: dict[str, Any] = {
        "argument_bytes": compiled.argument_bytes, "temp_bytes": compiled.temp_bytes, "peak_bytes": peak, "compile_seconds": compiled.seconds,
    }  # fmt: skip
    if isinstance(compiled, AheadFacts) and compiled.cycles:
        facts["cycles"] = compiled.cycles
    if promises is None:
        return Part("memory", "unchecked", f"peak {format_bytes(peak)}; the promise is in the report (--report)", facts)
    facts |= {
        "predicted_peak_bytes": promises.peak_bytes, "predicted_argument_bytes": promises.argument_bytes, "limit_bytes": promises.limit_bytes,
    }  # fmt: skip
    text = f"peak {format_bytes(peak)}, predicted {format_bytes(promises.peak_bytes)} of {format_bytes(promises.limit_bytes)}"
    if target is None:
        return Part("memory", "unchecked", f"{text}; a CPU compiler cannot judge it", facts)
    fits = peak <= promises.limit_bytes
    text += "" if fits else ": out of memory"
    return Part("memory", "agreed" if fits == promises.fits else "disagreed", text, facts)


def out_of_memory(failure: Failure) -> bool:
    return "RESOURCE_EXHAUSTED" in failure.reason or "exceeds available" in failure.reason
