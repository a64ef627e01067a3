"""`verify`: compares a partitioned program's predicted figures with XLA's: numbers, collectives, memory.

Numbers run on virtual CPU devices; collectives and memory come from the chosen compiler: without real chips to compile
for, collectives are those that the partitioner adds. A part that cannot be checked says why.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import prod
from typing import Any, Literal

from toast_cli import xla
from toast_cli.ask_xla.child import Failure
from toast_cli.ask_xla.collectives import CompiledCollective, collectives_in
from toast_cli.ask_xla.compile import (
    Answer,
    CompilationTarget,
    Dialect,
    collectives_after_partitioning,
    compile_for,
    target_of,
)
from toast_cli.ask_xla.numbers import compare_numbers, excess
from toast_cli.base.errors import InputError, MissingExtraError, UsageError
from toast_cli.frontend import content_of, load
from toast_cli.frontend.convert import refuse_left_out
from toast_cli.frontend.formats import read_bytes
from toast_cli.frontend.loading import parse
from toast_cli.frontend.places import op_path
from toast_cli.frontend.shardings import meshes_of
from toast_cli.hardware import Spec
from toast_cli.hardware.model import group_size
from toast_cli.plan.partitioned import CollectiveFacts, Promises
from toast_cli.program.quantities import format_bytes

SCHEMA = "toast.verify/1"
VerdictOutcome = Literal["agreed", "disagreed", "unchecked"]

# A difference in traffic above this fraction of the promised is a disagreement …
TRAFFIC_TOLERANCE = 0.05
# … unless it is this small on each device.
SMALL_BYTES = 4096


@dataclass(frozen=True)
class CheckedPart:
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
    parts: list[CheckedPart]
    unasked: str = ""

    @property
    def outcome(self) -> VerdictOutcome:
        """Disagreed if any part did, unchecked if none could be checked."""
        outcomes = {part.outcome for part in self.parts}
        return "disagreed" if "disagreed" in outcomes else "agreed" if "agreed" in outcomes else "unchecked"

    def to_json(self) -> dict[str, Any]:
        return {"schema": SCHEMA, "outcome": self.outcome, **asdict(self)}


@dataclass(frozen=True)
class Judge:
    """target: the machine to compile for; None for virtual CPU devices. unasked: for those, how to use the chips' own
    compiler, or why it cannot be used; empty if the chips are unknown. by_name: the user chose this compiler."""

    target: CompilationTarget | None = None
    unasked: str = ""
    by_name: bool = False


def choose_judge(spec: Spec | None, choice: str | None, option: str) -> Judge:
    """The compiler that checks a program for this machine.

    Args:
        spec: None if the machine is unknown. choice: "cpu" or the platform of `spec`; None for the default.
        option: the command-line option that selects a compiler.

    Raises `MissingExtraError` or `UsageError` if the user asks for the chips' own compiler and it cannot be used.
    """
    if spec is None:
        return Judge(by_name=choice is not None)
    how = f"{option} {spec.chip.platform} asks the real one"
    try:
        target = target_of(spec, None if choice == "cpu" else choice, option)
    except (MissingExtraError, UsageError) as error:
        if choice not in (None, "cpu"):
            raise
        return Judge(None, how if isinstance(error, MissingExtraError) else error.what, choice is not None)
    return Judge(None, how, True) if choice == "cpu" else Judge(target, "", choice is not None)


def partitioned_program(path: str, axes: dict[str, int] | None) -> tuple[bytes, Dialect, dict[str, int]]:
    """Content, form and mesh of a program that `toast partition -o` wrote.

    `axes` is the mesh of its report; without it, the program's own `sdy.mesh` is used. Raises `InputError` if there is
    neither.
    """
    content = read_bytes(path)
    kind, module = parse(content, path)
    refuse_left_out(module, path)
    if kind.startswith("hlo"):
        if axes is None:
            raise InputError(
                "HLO text does not name its mesh", where=path, hint="give the report written with it: --report FILE"
            )
        return content, "hlo", axes
    if axes is None:
        meshes = [mesh for mesh in meshes_of(module).values() if mesh]
        if not meshes:
            raise InputError("the program has no sdy.mesh", where=path, hint="verify what `toast partition -o` wrote")
        axes = dict(max(meshes, key=lambda mesh: len(dict(mesh))))
    return xla.write_bytecode(module), "stablehlo", axes


def original_bytes(path: str, dims: Sequence[str] = ()) -> bytes:
    """The original program as MLIR bytecode, normalised as `toast partition` does. dims: sizes of symbolic
    dimensions."""
    module = load(path, content=content_of(path, dims)).module
    refuse_left_out(module, path)
    return xla.write_bytecode(module)


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
        compiled = compile_for(program, form, target)
        compiled_collectives: list[CompiledCollective] | Failure
        if not isinstance(compiled, Failure):
            compiled_collectives = collectives_in(compiled.hlo_text, tuple(axes), tuple(axes.values()))
        else:
            compiled_collectives = compiled
            if not judge.by_name and not out_of_memory(compiled):
                unasked = f"XLA:{target.platform.upper()} did not compile it: {compiled.reason}"
                target = None
        memory = check_memory(compiled, promises)
    # XLA:TPU takes collectives between slices apart into several inside them and one between them.
    if target is None or (target.slices > 1 and not isinstance(compiled_collectives, Failure)):
        compiled_collectives = collectives_after_partitioning(program, form, axes)
        promises = promises and replace(
            promises, collectives=[promise.as_written() for promise in promises.collectives]
        )
    if target is None:
        memory = CheckedPart(
            "memory", "unchecked", "only a compiler for the real chips can judge it: --compiler tpu or gpu"
        )
    parts = [check_collectives(compiled_collectives, axes, promises), memory]
    if original is not None:
        parts.insert(0, check_numbers(original, program, form, prod(axes.values())))
    return Verdict(target.label if target else "cpu", parts, unasked)


def check_numbers(original: bytes, program: bytes, form: Dialect, devices: int) -> CheckedPart:
    """Compares both programs' results for the same seeded inputs on virtual CPU devices, within rounding errors."""
    errors = compare_numbers(original, program, devices, form=form)
    if isinstance(errors, Failure):
        return CheckedPart("numbers", "unchecked", f"could not run: {errors.reason}")
    wrong = [e for e in errors if e.wrong]
    facts = {"results": len(errors), "wrong": [asdict(e) for e in wrong]}
    if not errors:
        return CheckedPart("numbers", "unchecked", "the program has no results", facts)
    worst = max(errors, key=lambda e: excess(e.error, e.allowed))
    facts["worst"] = asdict(worst)
    if wrong:
        text = (
            f"{len(wrong)} of {len(errors)} results differ: the {worst.what} of result {worst.index} ({worst.type}) by "
            f"{worst.error:.1e} of its size, {worst.allowed:.0e} may be rounding"
        )
        return CheckedPart("numbers", "disagreed", text, facts)
    if not any(e.looks for e in errors):
        return CheckedPart("numbers", "unchecked", "rounding alone changes every result by half its size", facts)
    which = "the one result is" if len(errors) == 1 else f"all {len(errors)} results are"
    text = f"{which} equal; largest error {worst.error:.1e}, {worst.allowed:.0e} may be rounding"
    return CheckedPart("numbers", "agreed", text, facts)


def check_collectives(
    compiled: list[CompiledCollective] | Failure, axes: dict[str, int], promises: Promises | None
) -> CheckedPart:
    """Compares the collectives of the compiled module with the promised ones."""
    if isinstance(compiled, Failure):
        outcome: VerdictOutcome = "disagreed" if out_of_memory(compiled) else "unchecked"
        return CheckedPart("collectives", outcome, f"did not compile: {compiled.reason}")
    compared = compare_traffic(promises.collectives if promises else [], compiled, axes)
    facts = {"collectives": [asdict(row) for row in compared.rows]}
    if promises is None:
        text = f"{len(compiled)} in the compiled program; promises are in the report (--report)"
        return CheckedPart("collectives", "unchecked", text, facts)
    facts["differences"] = [asdict(difference) for difference in compared.differences]
    return CheckedPart("collectives", *judged_traffic(compared), facts)


def judged_traffic(compared: TrafficComparison) -> tuple[VerdictOutcome, str]:
    """The verdict on a comparison, and its reason."""
    larger = max(compared.promised_bytes, compared.compiled_bytes)
    if not larger:
        return "agreed", "none promised, none compiled"
    largest = max(compared.extra_bytes, compared.missing_bytes)
    if largest <= TRAFFIC_TOLERANCE * larger:
        return (
            "agreed",
            f"{100 * compared.share:.1f} % of the {format_bytes(larger)} that each device sends are as promised",
        )
    if largest < SMALL_BYTES:
        return "unchecked", f"too small to judge: each device sends {format_bytes(larger)} a step"
    excesses = [
        f"{format_bytes(size)} {word}" for size, word in (
            (compared.extra_bytes, "more than promised"), (compared.missing_bytes, "of the promised are missing"),
        ) if size > TRAFFIC_TOLERANCE * larger
    ]  # fmt: skip
    return "disagreed", f"each device sends {format_bytes(compared.compiled_bytes)}: {' and '.join(excesses)}"


def check_memory(compiled: Answer | Failure, promises: Promises | None) -> CheckedPart:
    """Compares the peak memory of the real chips' compiler with the promised one."""
    if isinstance(compiled, Failure):
        promised_to_fit = promises is not None and promises.fit != "no"
        return CheckedPart(
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
        return CheckedPart(
            "memory", "unchecked", f"peak {format_bytes(peak)}; the promise is in the report (--report)", facts
        )
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
    return CheckedPart("memory", "agreed" if fits == (promises.fit != "no") else "disagreed", text, facts)


def out_of_memory(failure: Failure) -> bool:
    return "RESOURCE_EXHAUSTED" in failure.reason or "exceeds available" in failure.reason


# ---------------------------------------------------------------- collectives
# An all-gather or reduce-scatter over several axes is compared as one after the other over single axes. A promised
# all-reduce of which each device keeps a piece may be compiled as a reduce-scatter: it sends less, and counts as
# promised.

Key = tuple[str, tuple[str, ...]]  # kind, axes
Flow = CompiledCollective  # whose location is a report's: `model.py:12 (bwd mlp/dot)`
Counts = dict[tuple[int, str], float]  # (bytes, line) -> runs
OnlyIn = Literal["extra", "missing"]
# Sums closer than this are equal: padding and combined scalars cause such differences.
_SAME = 0.01


@dataclass(frozen=True)
class Traffic:
    """Collectives of one kind over the same axes: bytes of results per device and how many, promised and compiled."""

    axes: tuple[str, ...]
    kind: str
    promised_bytes: float
    promised_count: float
    compiled_bytes: float
    compiled_count: float


@dataclass(frozen=True)
class TrafficDifference:
    """Equal collectives that are on one side only. `sent_bytes`: the bytes that each device sends in all of them."""

    side: OnlyIn
    kind: str
    axes: tuple[str, ...]
    bytes: int
    count: float
    place: str
    sent_bytes: float


@dataclass(frozen=True)
class TrafficComparison:
    """`rows` and `differences`, the largest first. Bytes are what each device sends in one step."""

    rows: list[Traffic]
    differences: list[TrafficDifference]
    promised_bytes: float
    compiled_bytes: float
    extra_bytes: float
    missing_bytes: float

    @property
    def share(self) -> float:
        """Fraction of the larger of promised and compiled bytes that agrees in kind and axes."""
        larger = max(self.promised_bytes, self.compiled_bytes)
        return 1.0 - max(self.extra_bytes, self.missing_bytes) / larger if larger else 1.0


def compare_traffic(
    promised: Iterable[CollectiveFacts], compiled: Iterable[CompiledCollective], mesh: dict[str, int]
) -> TrafficComparison:
    """Compares promised and compiled collectives on a mesh (axis -> size)."""
    order = list(mesh)
    sides: tuple[dict[Key, list[Flow]], dict[Key, list[Flow]]] = (defaultdict(list), defaultdict(list))
    flows = (
        [CompiledCollective(p.kind, tuple(p.axes), p.bytes, p.count, "", p.location) for p in promised],
        [replace(c, location=place_of(c)) for c in compiled],
    )
    for side, flows_of_side in zip(sides, flows, strict=True):
        for flow in flows_of_side:
            axes = tuple(sorted(flow.axes, key=lambda axis: order.index(axis) if axis in order else len(order)))
            for step in one_axis_steps(replace(flow, axes=axes), mesh):
                side[key_of(step)].append(step)
    scatter_as_compiled(*sides, mesh)
    rows, differences = [], []
    totals = dict.fromkeys(("promised", "compiled", "extra", "missing"), 0.0)
    for key in dict.fromkeys([*sides[0], *sides[1]]):
        if not sides[0][key] and not sides[1][key]:
            continue
        promised_flows, compiled_flows = sides[0][key], sides[1][key]
        sums = [
            (sum(f.bytes * f.count for f in flows), sum(f.count for f in flows))
            for flows in (promised_flows, compiled_flows)
        ]
        rows.append(Traffic((promised_flows or compiled_flows)[0].axes, key[0], *sums[0], *sums[1]))
        sent = [sum(sent_bytes(f, mesh) for f in flows) for flows in (promised_flows, compiled_flows)]
        totals["promised"] += sent[0]
        totals["compiled"] += sent[1]
        totals["extra"] += max(0.0, sent[1] - sent[0])
        totals["missing"] += max(0.0, sent[0] - sent[1])
        if abs(sent[0] - sent[1]) > _SAME * max(sent):
            differences += unmatched(promised_flows, compiled_flows, mesh)
    return TrafficComparison(
        sorted(rows, key=lambda row: -max(row.promised_bytes, row.compiled_bytes)),
        sorted(differences, key=lambda difference: -difference.sent_bytes),
        totals["promised"], totals["compiled"], totals["extra"], totals["missing"],
    )  # fmt: skip


def scatter_as_compiled(promised: dict[Key, list[Flow]], compiled: dict[Key, list[Flow]], mesh: dict[str, int]) -> None:
    """Turns promised all-reduces that were compiled as reduce-scatters into reduce-scatters."""
    runs: dict[tuple[Key, int], float] = defaultdict(float)  # compiled and not promised
    for side, sign in ((compiled, 1), (promised, -1)):
        for key, flows in side.items():
            for flow in flows:
                runs[key, flow.bytes] += sign * flow.count
    for key in [key for key in promised if key[0] == "all-reduce"]:
        for flow in [flow for flow in promised[key] if runs[key, flow.bytes] <= -flow.count]:
            scattered = replace(flow, kind="reduce-scatter", bytes=flow.bytes // group_size(flow.axes, mesh))
            steps = [(key_of(step), step) for step in one_axis_steps(scattered, mesh)]
            if all(runs[place, step.bytes] >= flow.count for place, step in steps):
                promised[key].remove(flow)
                runs[key, flow.bytes] += flow.count
                for place, step in steps:
                    promised[place].append(step)
                    runs[place, step.bytes] -= step.count


def key_of(flow: Flow) -> Key:
    """Collectives with equal keys, kind and axes, are compared together."""
    return flow.kind, flow.axes


def place_of(collective: CompiledCollective) -> str:
    """The source location in a report's notation."""
    path = op_path(collective.name)
    return f"{collective.location} ({path})" if collective.location and path else collective.location or path


def one_axis_steps(flow: Flow, mesh: dict[str, int]) -> Iterator[Flow]:
    """An all-gather or reduce-scatter over several axes as one step per axis; other collectives as they are."""
    if flow.kind not in ("all-gather", "reduce-scatter") or len(flow.axes) < 2:
        yield flow
        return
    rest = prod(mesh.get(axis, 1) for axis in flow.axes)
    for axis in flow.axes:
        inner = rest // mesh.get(axis, 1)
        # In a reduce-scatter the first axis' step has the largest result; an all-gather ends with the first axis.
        size = (
            flow.bytes * inner
            if flow.kind == "reduce-scatter"
            else flow.bytes * rest // prod(mesh.get(a, 1) for a in flow.axes)
        )
        yield replace(flow, axes=(axis,), bytes=size)
        rest = inner


def sent_bytes(flow: Flow, mesh: dict[str, int]) -> float:
    """Bytes that each device sends in all runs of a collective over n devices, in rings.

    An all-reduce of b bytes sends 2b(n-1)/n, a reduce-scatter to b bytes b(n-1), an all-gather or all-to-all to b bytes
    b(n-1)/n.
    """
    n = group_size(flow.axes, mesh)
    factor = {
        "all-reduce": 2 * (n - 1) / n, "reduce-scatter": n - 1.0, "all-gather": (n - 1) / n, "all-to-all": (n - 1) / n,
    }.get(flow.kind, 1.0)  # fmt: skip
    return flow.bytes * flow.count * factor


def unmatched(promised: list[Flow], compiled: list[Flow], mesh: dict[str, int]) -> list[TrafficDifference]:
    """The collectives of one kind and axes that remain when equal ones are removed from both lists: first those of one
    source line, then those of one size."""
    left: tuple[Counts, Counts] = (defaultdict(float), defaultdict(float))
    places: dict[tuple[int, str], str] = {}
    for side, flows in zip(left, (promised, compiled), strict=True):
        for flow in flows:
            line = flow.location.partition(" ")[0]
            side[flow.bytes, line] += flow.count
            places.setdefault((flow.bytes, line), flow.location)
    for key in list(left[0]):
        remove_common(left[0], left[1], key, key)
    for key in list(left[0]):
        for other in [k for k in left[1] if k[0] == key[0]]:
            remove_common(left[0], left[1], key, other)
    example = (promised or compiled)[0]
    sides: tuple[tuple[OnlyIn, Counts], ...] = (("missing", left[0]), ("extra", left[1]))
    return [
        TrafficDifference(side, example.kind, example.axes, size, count, places[size, line],
                   sent_bytes(replace(example, bytes=size, count=count), mesh))
        for side, counts in sides
        for (size, line), count in counts.items()
        if count > 1e-6
    ]  # fmt: skip


def remove_common(first: Counts, second: Counts, key: tuple[int, str], match: tuple[int, str]) -> None:
    """Removes the common count from both sides."""
    common = min(first[key], second[match])
    first[key] -= common
    second[match] -= common
