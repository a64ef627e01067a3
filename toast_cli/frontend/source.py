"""`Source`: a program read in, both as an MLIR module (for emit) and as a `Program` (for everything else); also made
of a rewritten module of the same program.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import Any

from toast_cli import xla
from toast_cli.base.errors import InputError
from toast_cli.base.units import printable
from toast_cli.frontend.attributes import copy_splats, merge_scalars
from toast_cli.frontend.places import TEXT, Frame, frames_of, name_stack_of, place_text
from toast_cli.frontend.reader import read_program
from toast_cli.frontend.shardings import Annotation
from toast_cli.kernels.describe import describe_kernels, drop_descriptions
from toast_cli.kernels.table import Table
from toast_cli.program.model import Program
from toast_cli.program.ops import WHILE
from toast_cli.xla import ir, operations_in

TEXT_FORMATS = ("stablehlo", "hlo-text")


@dataclass(frozen=True)
class Use:
    """A use of a value in the MLIR module: operand number `operand` of `operation`."""

    operation: Any  # ir.Operation
    operand: int


@dataclass(frozen=True)
class Source:
    """A normalised module (one entry function, calls and composites inlined) and the Program read from it.

    Attributes:
        path: as the user gave it. format: "stablehlo", "bytecode", "portable", "jax.export", "hlo-text", "hlo-proto".
        module: ir.Module. Emit annotates it in place, serialises it and takes the annotations off again.
        program: its flat view.
        definitions: [values] ir.Value that stands for each value in the module: a block argument of `main`, an op
            result, or, for a carried value, the result of the `while`; for a join the result of the `case`/`if`.
        operations: [ops] ir.Operation that each op stands for (the `while` of a carry, the terminator of a result).
        uses: (op, operand position) -> where in the module, for the ops of our own kinds.
        annotations: shardings the program states and we keep: its manual regions' always, the rest on request.
        notices: what was changed or assumed on the way in, one sentence each (dropped shardings, unknown trip counts).
        kernels: what the user says of hand-written ones.
        own_mesh: axes of the mesh for which the program states shardings, with their sizes; see `Normalised`.
        sizes: symbolic dimension of the user's program -> the size that it has here.
        also: further values of the module that stand for a value of the program, and its number.
    """

    path: str
    format: str
    module: Any
    program: Program
    definitions: list[Any]
    operations: list[Any]
    uses: dict[tuple[int, int], tuple[Any, int]]
    annotations: tuple[Annotation, ...] = ()
    notices: tuple[str, ...] = ()
    kernels: Table | None = None
    own_mesh: tuple[tuple[str, int], ...] = ()
    sizes: dict[str, int] = field(default_factory=dict)
    also: dict[Any, int] = field(default_factory=dict)

    @cached_property
    def numbers(self) -> dict[Any, int]:
        """Value of the module -> its number in the program. What a loop carries, or passes on unchanged, has the same
        number in the loop and behind it."""
        numbers = {handle: value for value, handle in enumerate(self.definitions)} | self.also
        for loop in xla.walk_ops(self.module, WHILE):
            condition, body = (region.blocks[0] for region in loop.regions)
            for k, yielded in enumerate(xla.terminator(body).operands):
                value = numbers.get(loop.operands[k] if yielded == body.arguments[k] else loop.results[k])
                if value is not None:
                    numbers.update(dict.fromkeys((loop.results[k], body.arguments[k], condition.arguments[k]), value))
        return numbers

    def use(self, op: int, position: int) -> Use:
        """The use of operand `position` of program op `op` in the module (a `while` init, a
        terminator's operand, …)."""
        operation, operand = self.uses.get((op, position), (self.operations[op], position))
        return Use(operation, operand)

    def location(self, op: int, inside: str = "") -> str:
        """Source location of a program op, `model.py:123 function (name stack)`; empty if the program records none. See
        `toast_cli.frontend.places`. inside: location of an op within it, to show instead (see `ManualCollective`)."""
        return place_text(inside or self._place(op), self.text_file)

    def stack(self, op: int) -> tuple[Frame, ...]:
        """Every frame of a program op's location, the innermost first."""
        return frames_of(self._place(op), self.text_file)

    @cached_property
    def _place(self) -> Callable[[int], str]:
        """Op -> its location as text, which takes long to print."""
        return cache(lambda op: str(self.operations[op].location))

    @property
    def text_file(self) -> str:
        """The file that locations without a file name refer to; `TEXT` if it is not this one."""
        return self.path if self.format in TEXT_FORMATS else TEXT

    def name_stack(self, op: int) -> str:
        """The name stack of a program op, `jit(f)/layer_0/mul`; empty if its location has none."""
        return printable(name_stack_of(self._place(op)))


def read_source(
    path: str, form: str, module: Any, notices: tuple[str, ...] = (), annotations: tuple[Annotation, ...] = ()
) -> Source:
    """The Source of a normalised module. Populates Shardy's rules, reads them and removes them again."""
    xla.run_passes(module, "func.func(sdy-populate-op-sharding-rules)")
    function = next((op for op in module.body.operations if op.operation.name == "func.func"), None)
    if function is None:
        raise InputError("the module has no function", where=path, hint="save the module that jax.jit(f).lower() gives")
    try:
        program, reader = read_program(function, printable(xla.module_name(module)))
    except InputError as error:
        place = f"{path}: {error.where}" if error.where and not error.where.startswith(path) else error.where or path
        raise InputError(error.what, where=place, hint=error.hint) from None
    if not program.ops:
        raise InputError("the program computes nothing", where=path, hint="save a function that returns something")
    xla.remove_sharding_rules(module)
    drop_descriptions(module)
    return Source(
        path,
        form,
        module,
        program,
        reader.definitions,
        reader.operations,
        reader.uses,
        annotations,
        notices + tuple(reader.notices),
    )


# ---------------------------------------------------------------- of a rewritten module
# Makes a `Source` from a rewritten module of the same program.


def read_rewritten(source: Source, operation: Any, *added: str, **facts: Any) -> Source:
    """The source with a rewritten copy of its module, whose arguments are the same.

    Args:
        added: sentences for reports about the rewriting. facts: fields of the program that record it.
    """
    module = xla.parse_module(source.module.context, xla.write_bytecode(operation))
    merge_scalars(module)
    copy_splats(module)
    describe_kernels(module, source.kernels)
    rewritten = read_source(source.path, source.format, module)
    arguments = tuple(
        replace(new, dimension_names=old.dimension_names, annotated_axes=old.annotated_axes)
        for new, old in zip(rewritten.program.arguments, source.program.arguments, strict=True)
    )
    recorded = {name: getattr(source.program, name) for name in ("parted", "microbatches", "recompute", "offload")}
    program = replace(rewritten.program, arguments=arguments, **(recorded | facts))
    notices = (*source.notices, *added)
    fields = {name: getattr(source, name) for name in ("kernels", "sizes")}
    return replace(rewritten, program=program, notices=notices, **fields)


def read_from_outside(operations: Collection[Any]) -> list[Any]:
    """Values that operations, or those in their regions, read and do not make."""
    return list(dict.fromkeys(value for _, _, value in xla.outer_operands(operations)))


def made_by(operations: Iterable[Any]) -> set[Any]:
    """Results of operations and of those in their regions, and arguments of the regions."""
    within = [inner for operation in operations for inner in operations_in(operation)]
    results = {value for inner in within for value in inner.results}
    return results | {
        value for inner in within for region in inner.regions for block in region for value in block.arguments
    }


def retyped(kind: Any, shape: tuple[int, ...]) -> Any:
    """The type of arrays of another shape."""
    return ir.RankedTensorType.get(shape, kind.element_type)
