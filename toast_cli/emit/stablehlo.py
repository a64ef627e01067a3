"""Writes StableHLO that Shardy partitions as planned, checks it, and lists its constraints for people.

XLA keeps shardings on arguments, results and constraints, and drops those on other operations
(docs/explanation/emitting.md), so constraints carry all intermediate shardings.
"""

from __future__ import annotations

from dataclasses import dataclass

from toast_cli.base.errors import UsageError
from toast_cli.emit.annotations import Annotations, boundary_annotations, full_annotations
from toast_cli.emit.minimal import choose_annotations, ops_astray, reduced_behind_transposes
from toast_cli.emit.misread import in_regions
from toast_cli.emit.shardy import write_shardy, written
from toast_cli.emit.specs import boundary_specs, entry_text, named_axes, snippet, spec_text, words
from toast_cli.frontend.formats import BYTECODE
from toast_cli.frontend.places import BACKWARD, pass_of, users_frame
from toast_cli.frontend.source import Source
from toast_cli.kernels.paged import operands_of_function
from toast_cli.plan.partitioned import ConstraintFacts, PartitionedProgram
from toast_cli.plan.sharding import Sharding, axes_of
from toast_cli.program.model import PAGED, Value
from toast_cli.program.quantities import format_plural
from toast_cli.xla import ir, make_context, parse_module

ANNOTATE = ("minimal", "full", "arguments")


@dataclass(frozen=True)
class Written:
    """A file's content, the constraints in it, and notes on deviations from the plan."""

    content: bytes
    constraints: tuple[ConstraintFacts, ...] = ()
    notes: tuple[str, ...] = ()


def write_checked(source: Source, lowered: PartitionedProgram, *, binary: bool, annotate: str) -> Written:
    """The program as StableHLO text (or MLIR bytecode) that partitions as in `lowered`, read again and checked, with
    its constraints. annotate: see `toast_cli.emit.write`."""
    kernels = kernel_lines(source, lowered)
    with in_regions(source, lowered) as (source, lowered):
        lowered = reduced_behind_transposes(source, lowered)
        annotations, note, settled = choose(source, lowered, annotate)
        content = write_shardy(source, lowered, annotations, binary=binary)
        notes = (note, check_note(source, lowered, annotations, content, settled=settled))
        facts = (*kernels, *constraints_of(source, lowered, annotations))
        return Written(content, facts, tuple(filter(None, notes)))


def choose(source: Source, lowered: PartitionedProgram, annotate: str) -> tuple[Annotations, str, bool]:
    """The annotations to write; a note if they are not those requested, as few constraints do not suffice; and True if
    propagation from them is known to reproduce the plan. Raises `UsageError` for another value of `annotate`."""
    if annotate == "full":
        return full_annotations(source, lowered), "", False
    if annotate == "arguments":
        return boundary_annotations(source, lowered), "", False
    if annotate != "minimal":
        raise UsageError(f"unknown value {annotate!r}", where="--annotate", hint=f"choose from {', '.join(ANNOTATE)}")
    try:
        choice = choose_annotations(source, lowered)
    except ir.MLIRError:  # a program that Shardy's passes refuse; XLA may still take it
        note = "Shardy's propagation refuses the program, so every value is constrained"
        return full_annotations(source, lowered), note, False
    note = "few constraints do not reproduce the plan, so every value is constrained" if choice.astray else ""
    return choice.annotations, note, not choice.astray


def check_note(
    source: Source, lowered: PartitionedProgram, annotations: Annotations, content: bytes, *, settled: bool = False
) -> str:
    """A note on the file for the report; empty if it is the annotated program, and all shardings are as planned.

    settled: True if propagation from `annotations` is known to reproduce the plan.
    """
    if not reads_back(content):
        return "the written program is another one when it is read again; report this as a bug"
    try:
        astray = [] if settled else ops_astray(source, lowered, annotations)
    except ir.MLIRError:
        return "the written program could not be checked: Shardy's propagation refuses it"
    if not astray:
        return ""
    first = next(filter(None, map(source.location, astray)), f"op {astray[0]}")
    return f"sharding in the output differs from the plan for {format_plural(len(astray), 'value')}, first at {first}"


def reads_back(content: bytes) -> bool:
    """True if a file, text or bytecode, is the module that it was written from: read and written again, it has the same
    bytes."""
    try:
        module = parse_module(make_context(), content)
    except (ir.MLIRError, RuntimeError):
        return False
    return written(module, binary=content.startswith(BYTECODE)) == content


# ---------------------------------------------------------------- constraints for people

UNCONSTRAINED = "P.UNCONSTRAINED"

KERNEL = "kernel"


def constraints_of(source: Source, lowered: PartitionedProgram, annotations: Annotations) -> list[ConstraintFacts]:
    """The constraints in `annotations`, without the shardings of arguments and results."""
    program = source.program
    paths = {argument.value: argument.path for argument in program.arguments}
    facts: list[tuple[int, ConstraintFacts]] = []

    def add(place: str, op: int, value: int, sharding: Sharding, uses: int, open: frozenset[int] = frozenset()) -> None:
        line = constraint_line(sharding, lowered.axis_names, open)
        spec, kind = _spec(sharding, lowered.axis_names), str(program.values[value])
        by_product = place == "definition" and program.ops[op].kind.contraction
        explicit = f"out_sharding={spec}" if by_product else f"x = jax.sharding.reshard(x, {spec})"
        facts.append(
            (op, ConstraintFacts(place, source.location(op), kind, paths.get(value, ""), uses, line, explicit))
        )

    for constraint in annotations.constraints:
        if not isinstance(constraint.handle, ir.BlockArgument):  # inside a loop it repeats the loop result's constraint
            value = source.numbers[constraint.handle]
            add("definition", program.producer[value], value, constraint.shardings[-1], len(program.users[value]))
    for reshard in annotations.reshards:
        for sharding, open in reshard.steps:
            add("use", reshard.edges[0][0], reshard.value, sharding, len(reshard.edges), open)
    return [fact for _, fact in sorted(facts, key=lambda item: item[0])]


def constraint_line(sharding: Sharding, axis_names: tuple[str, ...], open: frozenset[int] = frozenset()) -> str:
    """The line to paste. An open dimension is left to the compiler."""
    return f"x = jax.lax.with_sharding_constraint(x, {_spec(sharding, axis_names, open)})"


def _spec(sharding: Sharding, axis_names: tuple[str, ...], open: frozenset[int] = frozenset()) -> str:
    """`P("data", None)`; open dimensions are unconstrained."""
    entries = [
        UNCONSTRAINED if d in open else entry_text(axes) for d, axes in enumerate(named_axes(sharding, axis_names))
    ]
    return f"P({', '.join(entries)})"


def kernel_lines(source: Source, lowered: PartitionedProgram) -> list[ConstraintFacts]:
    """One line per kernel. Its operands are those of the function that calls it where `kernels` knows that, or else the
    kernel's without integer indices and masks; its results are without unused ones."""
    program, names = source.program, lowered.axis_names
    facts: dict[tuple[str, str], ConstraintFacts] = {}
    split = [
        number
        for number, op in enumerate(program.ops)
        if op.kernel is not None
        and any(axes_of(lowered.required.get((number, k), lowered.shardings[v])) for k, v in enumerate(op.operands))
    ]
    forward = [number for number in split if pass_of(source.name_stack(number)) != BACKWARD]
    for number in forward or split:
        op = program.ops[number]
        if op.kernel and op.kernel.kind == PAGED and not operands_of_function(op.kernel):
            continue  # its own package calls it in a `shard_map` by heads
        numbers = [k for k, value in enumerate(op.operands) if _holds_numbers(program.values[value])]
        in_specs = [
            spec_text(named_axes(lowered.required.get((number, k), lowered.shardings[op.operands[k]]), names))
            for k in (op.kernel and operands_of_function(op.kernel)) or numbers
        ]
        results = [value for value in op.results if program.users[value] and _holds_numbers(program.values[value])]
        out_specs = [spec_text(named_axes(lowered.computed.get(v, lowered.shardings[v]), names)) for v in results[:1]]
        line = (
            f"jax.shard_map({_function(source, number)}, mesh=mesh, in_specs=({', '.join(in_specs)}), "
            f"out_specs={', '.join(out_specs) or 'P()'}, check_vma=False)"
        )
        place = source.location(number)
        fact = ConstraintFacts(KERNEL, place, str(program.values[(results or op.operands)[0]]), "", 1, line)
        facts.setdefault((place, line), fact)
    return list(facts.values())


def emit_python(source: Source, lowered: PartitionedProgram) -> bytes:
    """The module for Python, with the kernels' lines in comments: shardings of arguments and results do not determine
    them, nor what toast rewrote in the program."""
    lines = [f"# {words(kernel.location)}\n#     {words(kernel.line)}\n" for kernel in kernel_lines(source, lowered)]
    head = (
        "\n# XLA runs these kernels whole on every device unless the program calls them like this:\n" if lines else ""
    )
    rewritten = "; ".join(source.program.rewritten)
    notice = (
        f"# These are shardings of the program {rewritten}: the program as written needs more.\n" if rewritten else ""
    )
    return (notice + snippet(boundary_specs(source, lowered)) + head + "".join(lines)).encode()


def _holds_numbers(value: Value) -> bool:
    return bool(value.shape) and not value.dtype.startswith(("i", "ui"))


def _function(source: Source, number: int) -> str:
    """The function that the user's code calls there; the kernel's name if the location does not tell."""
    stack = source.stack(number)
    frame = users_frame(stack)
    called = stack[frame - 1].function.removesuffix(".__call__") if frame else ""
    kernel = source.program.ops[number].kernel
    return called or (kernel.name if kernel is not None else "")
