"""Lists the constraints of a written program for people: their places and the equivalent lines of JAX.

In: a `Source`, a `PartitionedProgram` and the `Annotations` that were written. Out: `ConstraintFacts`, in
program order.
"""

from __future__ import annotations

from toast_cli.emit.annotations import Annotations
from toast_cli.emit.specs import boundary_specs, entry_text, snippet, spec_text, words
from toast_cli.frontend.name_stack import BACKWARD, pass_of
from toast_cli.frontend.places import users_frame
from toast_cli.frontend.source import Source
from toast_cli.plan.partitioned import PartitionedProgram
from toast_cli.plan.sharding import Sharding, axes_of
from toast_cli.program.model import Value
from toast_cli.promised import ConstraintFacts
from toast_cli.xla import ir

UNCONSTRAINED = "P.UNCONSTRAINED"

KERNEL = "kernel"


def constraints_of(source: Source, lowered: PartitionedProgram, annotations: Annotations) -> list[ConstraintFacts]:
    """The constraints in `annotations`, without the shardings of arguments and results."""
    program = source.program
    paths = {argument.value: argument.path for argument in program.arguments}
    found: list[tuple[int, ConstraintFacts]] = []

    def add(place: str, op: int, value: int, sharding: Sharding, uses: int, open: frozenset[int] = frozenset()) -> None:
        line = constraint_line(sharding, lowered.axis_names, open)
        spec, kind = _spec(sharding, lowered.axis_names), str(program.values[value])
        by_product = place == "definition" and program.ops[op].kind.contraction
        explicit = f"out_sharding={spec}" if by_product else f"x = jax.sharding.reshard(x, {spec})"
        found.append(
            (op, ConstraintFacts(place, source.location(op), kind, paths.get(value, ""), uses, line, explicit))
        )

    for constraint in annotations.constraints:
        if not isinstance(constraint.handle, ir.BlockArgument):  # inside a loop it repeats the loop result's constraint
            value = source.numbers[constraint.handle]
            add("definition", program.producer[value], value, constraint.shardings[-1], len(program.users[value]))
    for reshard in annotations.reshards:
        for sharding, open in reshard.steps:
            add("use", reshard.edges[0][0], reshard.value, sharding, len(reshard.edges), open)
    return [one for _, one in sorted(found, key=lambda item: item[0])]


def constraint_line(sharding: Sharding, axis_names: tuple[str, ...], open: frozenset[int] = frozenset()) -> str:
    """The line to paste. An open dimension is left to the compiler."""
    return f"x = jax.lax.with_sharding_constraint(x, {_spec(sharding, axis_names, open)})"


def _spec(sharding: Sharding, axis_names: tuple[str, ...], open: frozenset[int] = frozenset()) -> str:
    """`P("data", None)`; open dimensions are unconstrained."""
    entries = [
        UNCONSTRAINED if d in open else entry_text(tuple(axis_names[a] for a in axes) or None)
        for d, axes in enumerate(sharding)
    ]
    return f"P({', '.join(entries)})"


def kernel_lines(source: Source, lowered: PartitionedProgram) -> list[ConstraintFacts]:
    """One line per kernel. Its operands and results are the kernel's, without integer indices and masks, and without
    unused results."""
    program = source.program
    found: dict[tuple[str, str], ConstraintFacts] = {}
    split = [
        number
        for number, op in enumerate(program.ops)
        if op.kernel is not None and _is_split(lowered, number, op.operands)
    ]
    forward = [number for number in split if pass_of(source.name_stack(number)) != BACKWARD]
    for number in forward or split:
        op = program.ops[number]
        in_specs = [
            _kernel_spec(lowered.required.get((number, k), lowered.shardings[value]), lowered)
            for k, value in enumerate(op.operands)
            if _holds_numbers(program.values[value])
        ]
        made = [value for value in op.results if program.users[value] and _holds_numbers(program.values[value])]
        out_specs = [_kernel_spec(lowered.computed.get(value, lowered.shardings[value]), lowered) for value in made[:1]]
        line = (
            f"jax.shard_map({_function(source, number)}, mesh=mesh, in_specs=({', '.join(in_specs)}), "
            f"out_specs={', '.join(out_specs) or 'P()'}, check_vma=False)"
        )
        place = source.location(number)
        one = ConstraintFacts(KERNEL, place, str(program.values[(made or op.operands)[0]]), "", 1, line)
        found.setdefault((place, line), one)
    return list(found.values())


def emit_python(source: Source, lowered: PartitionedProgram) -> bytes:
    """The module for Python, with the kernels' lines in comments: shardings of arguments and results do not determine
    them, nor what toast rewrote in the program."""
    lines = [f"# {words(one.location)}\n#     {words(one.line)}\n" for one in kernel_lines(source, lowered)]
    head = (
        "\n# XLA runs these kernels whole on every device unless the program calls them like this:\n" if lines else ""
    )
    rewritten = "; ".join(source.program.rewritten)
    notice = (
        f"# These are shardings of the program {rewritten}: the program as written needs more.\n" if rewritten else ""
    )
    return (notice + snippet(boundary_specs(source, lowered)) + head + "".join(lines)).encode()


def _is_split(lowered: PartitionedProgram, number: int, operands: tuple[int, ...]) -> bool:
    return any(axes_of(lowered.required.get((number, k), lowered.shardings[value])) for k, value in enumerate(operands))


def _holds_numbers(value: Value) -> bool:
    return bool(value.shape) and not value.dtype.startswith(("i", "ui"))


def _kernel_spec(sharding: Sharding, lowered: PartitionedProgram) -> str:
    return spec_text(tuple(tuple(lowered.axis_names[axis] for axis in axes) or None for axes in sharding))


def _function(source: Source, number: int) -> str:
    """The function that the user's code calls there; the kernel's name if the location does not tell."""
    stack = source.stack(number)
    at = users_frame(stack)
    called = stack[at - 1].function.removesuffix(".__call__") if at else ""
    kernel = source.program.ops[number].kernel
    return called or (kernel.name if kernel is not None else "")
