"""Lists the hand-written kernels that a plan shards, for people: their call sites and the equivalent lines of JAX.

Enters: a `Source` and a `PartitionedProgram`. Leaves: a `Constraint` for each sharded kernel, in program order, without
duplicates. Kernels of a gradient follow from those of the forward pass, and have no line if these are listed.
"""

from __future__ import annotations

from toast_cli.emit.constraints import Constraint
from toast_cli.emit.snippet import snippet, spec_text, words
from toast_cli.emit.specs import boundary_specs
from toast_cli.frontend.name_stack import BACKWARD, pass_of
from toast_cli.frontend.places import users_frame
from toast_cli.frontend.source import Source
from toast_cli.plan.partitioned import PartitionedProgram
from toast_cli.plan.sharding import Sharding, axes_of
from toast_cli.program.model import Value

KERNEL = "kernel"


def kernel_lines(source: Source, lowered: PartitionedProgram) -> list[Constraint]:
    """One line per kernel. Its operands and results are the kernel's, without integer indices and masks, and without
    unused results."""
    program = source.program
    found: dict[tuple[str, str], Constraint] = {}
    split = [
        number
        for number, op in enumerate(program.ops)
        if op.kernel is not None and _is_split(lowered, number, op.operands)
    ]
    forward = [number for number in split if pass_of(source.name_stack(number)) != BACKWARD]
    for number in forward or split:
        op = program.ops[number]
        ways_in = [
            _spec(lowered.required.get((number, k), lowered.shardings[value]), lowered)
            for k, value in enumerate(op.operands)
            if _holds_numbers(program.values[value])
        ]
        made = [value for value in op.results if program.users[value] and _holds_numbers(program.values[value])]
        ways_out = [_spec(lowered.computed.get(value, lowered.shardings[value]), lowered) for value in made[:1]]
        line = (
            f"jax.shard_map({_function(source, number)}, mesh=mesh, in_specs=({', '.join(ways_in)}), "
            f"out_specs={', '.join(ways_out) or 'P()'}, check_vma=False)"
        )
        place = source.location(number)
        one = Constraint(KERNEL, place, str(program.values[(made or op.operands)[0]]), "", 1, line)
        found.setdefault((place, line), one)
    return list(found.values())


def emit_python(source: Source, lowered: PartitionedProgram) -> bytes:
    """The module for Python, with the kernels' lines in comments: shardings of arguments and results do not determine
    them."""
    lines = [f"# {words(one.location)}\n#     {words(one.line)}\n" for one in kernel_lines(source, lowered)]
    head = (
        "\n# XLA runs these kernels whole on every device unless the program calls them like this:\n" if lines else ""
    )
    return (snippet(boundary_specs(source, lowered)) + head + "".join(lines)).encode()


def _is_split(lowered: PartitionedProgram, number: int, operands: tuple[int, ...]) -> bool:
    return any(axes_of(lowered.required.get((number, k), lowered.shardings[value])) for k, value in enumerate(operands))


def _holds_numbers(value: Value) -> bool:
    return bool(value.shape) and not value.dtype.startswith(("i", "ui"))


def _spec(sharding: Sharding, lowered: PartitionedProgram) -> str:
    return spec_text(tuple(tuple(lowered.axis_names[axis] for axis in axes) or None for axes in sharding))


def _function(source: Source, number: int) -> str:
    """The function that the user's code calls there; the kernel's name if the location does not tell."""
    stack = source.stack(number)
    at = users_frame(stack)
    called = stack[at - 1].function.removesuffix(".__call__") if at else ""
    kernel = source.program.ops[number].kernel
    return called or (kernel.name if kernel is not None else "")
