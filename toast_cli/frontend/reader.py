"""Reads a normalised MLIR module into a `Program`.

In: a module whose one function `main` has no calls, with Shardy's rules populated. Out: a `Source`. Regions of
`while`, `case` and `if` are flattened in program order as `toast_cli.program.model` describes; a manual region is one
op that holds a program of its own; bodies of reductions and sorts are not read.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any

from toast_cli import xla
from toast_cli.base.errors import InputError
from toast_cli.base.units import printable
from toast_cli.frontend import attributes as foreign
from toast_cli.frontend.attributes import is_placed, place_of
from toast_cli.frontend.constraints import devices_of, exchanges_of, leaves_axes, manual_axes
from toast_cli.frontend.places import place_text
from toast_cli.frontend.rules import (
    STATED_OTHERWISE,
    ShardyRules,
    bitwise_reduction_rule,
    concatenation_rule,
    free_rule,
    identity_rule,
    op_flops,
    partitioner_rule,
    ragged_rule,
    region_rule,
    replicated_rule,
    table_rule,
    windows_of,
)
from toast_cli.frontend.shardings import FRONTEND
from toast_cli.frontend.trips import stated_runs, trip_count, trip_limit
from toast_cli.kernels.describe import hand_written
from toast_cli.kernels.table import suggestion
from toast_cli.program.model import Argument, Loop, ManualRegion, Op, Program, Result, Value
from toast_cli.program.ops import (
    ARGUMENT,
    BARRIER,
    CARRY,
    CASE,
    CONCATENATE,
    CONSTANT,
    CUSTOM_CALL,
    IF,
    JOIN,
    MANUAL_REGION,
    OP_KINDS,
    RAGGED_DOT,
    REDUCE,
    RESULT,
    RNG,
    SCATTER,
    WHILE,
    kind_of,
)
from toast_cli.program.roles import with_donated_buffers
from toast_cli.program.values import TO_DEVICE, TO_HOST, only_moves, updated_in_place, with_unsharded_sums
from toast_cli.xla import call_target, terminator

Shape = tuple[int, ...]
_NUMBERED = re.compile(r"(?:p|param|parameter|arg|args|Arg)?[_.]?\d*\.\d+")  # no name that a function can have
# Ops that are no repetitions: random numbers, calls, barriers, and constants, some of which Python cannot read.
_APART = (CUSTOM_CALL, RNG, BARRIER, CONSTANT)
# Custom calls of XLA itself, of its libraries, and of Python callbacks.
_OF_XLA = re.compile(r"__|xla|lapack|mhlo\.|SPMD|Sharding|X64|cu_|hip_")
CONSTRAINT = "sdy.sharding_constraint"
BITWISE = ("and", "or", "xor")
# Reading recurses once per loop or branch. Programs nest a handful of them.
MAX_DEPTH = 100
SHOWN = 3  # places in a notice
# Bytes of an array that no plan of any machine could make fit; sums of larger ones would overflow.
MOST_BYTES = 2**53


class Reader:
    """Builds the lists of one Program; used once.

    `uses` and `operations` map the operands and ops of the Program to the module.
    """

    def __init__(self) -> None:
        self.ops: list[Op] = []
        self.values: list[Value] = []
        self.loops: list[Loop] = []
        self.definitions: list[Any] = []  # [values] ir.Value
        self.operations: list[Any] = []  # [ops] ir.Operation the op stands for (for its location and its operands)
        self.uses: dict[tuple[int, int], tuple[Any, int]] = {}  # only where not simply (operations[op], position)
        self.notices: list[str] = []
        self.numbers: dict[Any, int] = {}  # ir.Value -> value number
        self._types: dict[Any, Value] = {}  # ir.Type -> Value
        self._rules = ShardyRules()
        self.unknown: dict[str, str] = {}  # target of a custom call -> the `--kernels` line that would state its rule
        self._unsure: dict[str, list[str]] = defaultdict(list)  # assumption on how often something runs -> places
        self._depth = 0  # of the block that is being read
        self._within: tuple[int, ...] = ()  # enclosing branches, within its loop
        self._branches_read = 0
        self._in_region = False
        self._deciding: list[int] = []  # values that decide, from data, if a loop goes on or which branch runs

    # -- values and ops ------------------------------------------------------------------------------------------

    def _define(self, handle: Any) -> int:
        number = len(self.values)
        kind = handle.type
        if kind not in self._types:
            self._types[kind] = read_type(kind)
        self.values.append(self._types[kind])
        self.definitions.append(handle)
        self.numbers[handle] = number
        return number

    def _add(self, op: Op, operation: Any) -> int:
        self.ops.append(replace(op, branches=self._within) if self._within else op)
        self.operations.append(operation)
        return len(self.ops) - 1

    def _shapes(self, numbers: tuple[int, ...]) -> list[Shape]:
        return [self.values[n].shape for n in numbers]

    # -- the walk ------------------------------------------------------------------------------------------------

    def read(self, owner: Any, block: Any) -> None:
        """Reads arguments, body and results of the entry function or a manual region, which has this one block."""
        for argument in block.arguments:
            number = self._define(argument)
            self._add(Op(ARGUMENT, (), (number,), free_rule(self.values[number].shape)), owner)
        self._block(block, 1.0, -1)
        end = terminator(block)
        for position, operand in enumerate(end.operands):
            number = self.numbers[operand]
            rule = identity_rule(self.values[number].shape, 1, 0)
            op = self._add(Op(RESULT, (number,), (), rule), end)
            self.uses[op, 0] = (end, position)

    def _block(self, block: Any, trips: float, loop: int) -> None:
        """Adds the ops of a block. trips: how often it runs in one run of the program. loop: the one around it."""
        self._depth += 1
        if self._depth > MAX_DEPTH:
            what = f"loops and branches are nested more than {MAX_DEPTH} deep"
            raise InputError(what, where=place_of(block.owner.operation, ""), hint="is the file intact?")
        for view in block.operations:
            operation = view.operation
            name = operation.name
            if name == WHILE:
                self._while(operation, trips, loop)
            elif name in (CASE, IF):
                self._branches(operation, trips, loop)
            elif name == BARRIER:
                self._barrier(operation, trips, loop)
            elif name == CONSTRAINT and self._in_region:  # JAX adds one to every op, mostly an open one
                self.numbers[operation.results[0]] = self.numbers[operation.operands[0]]
            elif name not in ("stablehlo.return", "func.return", "sdy.return"):
                self._plain(operation, name, trips, loop)
        self._depth -= 1

    def _plain(self, operation: Any, name: str, trips: float, loop: int) -> None:
        """Adds the op of an operation that is no control flow: its rule, FLOPs, windows, manual region and kernel."""
        numbers = self.numbers
        operands = tuple([numbers[o] for o in operation.operands])
        results = tuple([self._define(r) for r in operation.results])
        attributes = operation.attributes
        detail, kernel = "", None
        if name == CUSTOM_CALL:
            kernel = hand_written(attributes)
            detail = transfer_of(operation) or printable(call_target(operation))
        elif name in (SCATTER, REDUCE, "stablehlo.all_reduce", "stablehlo.reduce_window"):
            detail = _body_op(operation)
        shapes, result_shapes = self._shapes(operands), self._shapes(results)
        of_region = kernel is not None and self._in_region  # kernels cannot use axes left to the partitioner
        if "sdy.sharding_rule" in attributes and not kind_of(name).replicated and not of_region:
            rule = self._rules.read(attributes["sdy.sharding_rule"])
            unsharded = len(rule.need_replication) == len(rule.sizes)  # such as eigh of a single matrix
            opaque = unsharded and name == CUSTOM_CALL and any(prod(s) > 1 for s in shapes + result_shapes)
            if name in STATED_OTHERWISE:
                rule = partitioner_rule(rule, name, shapes[0], result_shapes[0])
            elif name == CONCATENATE:
                rule = concatenation_rule(rule)
            elif detail in BITWISE and self.values[results[0]].dtype != "i1":
                rule = bitwise_reduction_rule(rule)
        else:
            ragged = ragged_rule(operation) if name == RAGGED_DOT else None
            stated = ragged or table_rule(name, detail, shapes, result_shapes)
            rule = stated or replicated_rule(tuple(map(len, shapes)), tuple(map(len, result_shapes)))
            unsharded = stated is None and name != MANUAL_REGION  # a region is computed in shards
            familiar = kernel is not None or is_placed(operation) or _OF_XLA.match(detail)
            opaque = unsharded and any(prod(s) > 1 for s in shapes + result_shapes)
            if opaque and name == CUSTOM_CALL and not familiar:
                arrays = ([self.values[v] for v in side] for side in (operands, results))
                self.unknown.setdefault(detail, suggestion(detail, *arrays))
        kind_name = detail if detail in OP_KINDS else name
        flops = op_flops(operation, kind_name, shapes, result_shapes, rule) if kernel is None else kernel.flops
        region = None
        if name == MANUAL_REGION:
            region = self._region(operation)
            if leaves_axes(operation):
                rule = region_rule(region.body)
            flops = region.body.flops * devices_of(operation)
        windows = windows_of(operation, name, shapes, result_shapes)
        bound = name == CUSTOM_CALL and "sdy.sharding" in attributes
        alone = bound and any(list(result.uses) for result in operation.results)
        op = Op(
            name, operands, results, rule, trips, loop, flops, detail, opaque, windows, region=region, one_device=alone,
            kernel=kernel,
        )  # fmt: skip
        self._add(op, operation)

    def _region(self, operation: Any) -> ManualRegion:
        """The computation of a manual region on each device."""
        reader = Reader()
        reader._depth, reader._in_region = self._depth, True
        reader.read(operation, operation.regions[0].blocks[0])
        reader.drop_dead_ops()
        reader.find_repeats()
        for assumed, places in reader._unsure.items():
            self._unsure[assumed] += places
        values = [op.results[0] for op in reader.ops if op.name == ARGUMENT]
        outputs = [op.operands[0] for op in reader.ops if op.name == RESULT]
        body = Program(
            operation.name,
            tuple(reader.ops),
            tuple(reader.values),
            tuple(Argument(value, "", donated=True) for value in values),
            tuple(Result(value, "") for value in outputs),
            tuple(reader.loops),
        )
        replaced = {updated_in_place(body, value): k for k, value in enumerate(outputs)}
        arguments = tuple(replace(a, aliased_result=replaced.get(a.value, -1)) for a in body.arguments)
        body = replace(body, arguments=arguments)
        return ManualRegion(manual_axes(operation), body, exchanges_of(reader.ops, reader.operations))

    def _barrier(self, operation: Any, trips: float, loop: int) -> None:
        """Adds one op per operand: values that share a barrier may have different shardings."""
        for position, (operand, result) in enumerate(zip(operation.operands, operation.results, strict=True)):
            value = self._define(result)
            rule = identity_rule(self.values[value].shape, 1, 1)
            op = self._add(Op(operation.name, (self.numbers[operand],), (value,), rule, trips, loop), operation)
            self.uses[op, 0] = (operation, position)

    def _while(self, operation: Any, trips: float, loop: int) -> None:
        """Adds a loop: a carry for each value that the body changes, then the ops of the condition and of the body.

        The carry is added before the body, which defines the value that it yields: that operand is -1 until then.
        """
        condition, body = (region.blocks[0] for region in operation.regions)
        end = terminator(body)
        count = trip_count(operation)
        stated, number = stated_runs(operation), len(self.loops)
        times = stated[0] if count is None and stated else count
        is_known = times is not None
        if times is None:
            limit = trip_limit(operation)
            times = 1 if limit is None else limit
            assumed = "once" if limit is None else "as often as it can at most"
            self._unsure[f"each loop of unknown length is taken to run {assumed}"].append(_place(operation))
        self.loops.append(Loop(loop, len(self.ops), -1, times, is_known))
        inner = trips * times
        yielded = list(end.operands)
        carries: list[tuple[int, int]] = []  # (op number of the carry, position)
        for k, init in enumerate(operation.operands):
            handles = (operation.results[k], body.arguments[k], condition.arguments[k])
            if yielded[k] == body.arguments[k]:  # loop-invariant: one value outside and inside
                value = self.numbers[init]
            else:
                value = self._define(handles[0])
                rule = identity_rule(self.values[value].shape, 2, 1)
                op = self._add(Op(CARRY, (self.numbers[init], -1), (value,), rule, 1.0, number), operation)
                self.uses[op, 0] = (operation, k)
                self.uses[op, 1] = (end, k)
                carries.append((op, k))
            for handle in handles:
                self.numbers[handle] = value
        around, self._within = self._within, ()
        self._block(condition, inner, number)
        if count is None:
            self._deciding.append(self.numbers[terminator(condition).operands[0]])
        self._block(body, inner, number)
        self._within = around
        for op, k in carries:
            start = self.ops[op].operands[0]
            self.ops[op] = replace(self.ops[op], operands=(start, self.numbers[yielded[k]]), trips=inner)
        self.loops[number] = replace(self.loops[number], last=len(self.ops))

    def _branches(self, operation: Any, trips: float, loop: int) -> None:
        """Adds the ops of all branches one after the other, then a join for each result of the conditional."""
        blocks = [region.blocks[0] for region in operation.regions]
        self._deciding.append(self.numbers[operation.operands[0]])
        around, first = self._within, self._branches_read
        self._branches_read += len(blocks)
        stated = stated_runs(operation)
        if stated is None:
            self._unsure["each branch of a conditional is taken to run equally often"].append(_place(operation))
        weights = stated or [1.0] * len(blocks)
        for k, block in enumerate(blocks):
            self._within = (*around, first + k)
            self._block(block, trips * weights[k] / sum(weights), loop)
        self._within = (*around, first)
        ends = list(map(terminator, blocks))
        for k, result in enumerate(operation.results):
            operands = tuple(self.numbers[end.operands[k]] for end in ends)
            value = self._define(result)
            rule = identity_rule(self.values[value].shape, len(operands), 1)
            op = self._add(Op(JOIN, operands, (value,), rule, trips / len(blocks), loop), operation)
            for position, end in enumerate(ends):
                self.uses[op, position] = (end, k)
        self._within = around

    def assumptions(self) -> list[str]:
        """Notices about what depends on data: how often loops and branches run, and where to say better."""
        return [
            f"{assumed} ({', '.join(distinct[:SHOWN])}{', …' if len(distinct) > SHOWN else ''}); --runs says how often"
            for assumed, places in self._unsure.items()
            for distinct in [list(dict.fromkeys(places))]
        ]

    def drop_dead_ops(self) -> None:
        """Removes ops whose results are not needed, as the compiler will."""
        needed = [False] * len(self.values)
        for value in self._deciding:
            needed[value] = True
        kept = [False] * len(self.ops)
        changed = True
        while changed:  # a second round only if a loop carries something
            changed = False
            for number in range(len(self.ops) - 1, -1, -1):
                op = self.ops[number]
                if not kept[number] and (
                    not op.results
                    or op.name == ARGUMENT
                    or any(needed[v] for v in op.results)
                    or is_placed(self.operations[number])
                ):
                    kept[number] = True
                    for v in op.operands:
                        needed[v] = True
                    changed = changed or op.name == CARRY
        places = [0]
        for keep in kept:
            places.append(places[-1] + keep)
        self.uses = {(places[n], k): use for (n, k), use in self.uses.items() if kept[n]}
        self.loops = [replace(loop, first=places[loop.first], last=places[loop.last]) for loop in self.loops]
        self.ops = [op for op, keep in zip(self.ops, kept, strict=True) if keep]
        self.operations = [operation for operation, keep in zip(self.operations, kept, strict=True) if keep]

    def find_repeats(self) -> None:
        """Marks the ops before which another one computes the same. Ops that have regions do not count."""
        # What an op computes, but for its attributes -> the first such op and its results; and with them -> results.
        alike: dict[Any, tuple[Any, tuple[int, ...]]] = {}
        computed: dict[Any, tuple[int, ...]] = {}
        compared: set[Any] = set()  # keys of `alike` whose first op is in `computed`
        first: dict[int, int] = {}  # value -> the first equal one
        for number, (op, operation) in enumerate(zip(self.ops, self.operations, strict=True)):
            key = op.name, tuple([first.get(v, v) for v in op.operands]), op.loop, op.branches
            before = alike.setdefault(key, (operation, op.results))
            # Reading attributes takes a while: only where all else is equal.
            if before[1] is op.results or op.name in _APART or len(operation.regions):
                continue
            new = [(operation, op.results)] if key in compared else [before, (operation, op.results)]
            compared.add(key)
            for candidate, results in new:
                types = tuple(self.values[v] for v in results)
                earlier = computed.setdefault((key, types, tuple(candidate.attributes.items())), results)
            first.update(zip(op.results, earlier, strict=True))
            if earlier is not op.results:
                self.ops[number] = replace(op, repeats=True)


def read_type(kind: Any) -> Value:
    """An MLIR type as a `Value`; a token counts as a scalar. Raises `InputError` for an array whose bytes overflow."""
    shaped = xla.shape_and_element_type(kind)
    value = Value((), "token") if shaped is None else Value(*shaped)
    if value.bytes > MOST_BYTES:
        hint = "is a size wrong? --dim gives sizes to symbolic dimensions"
        raise InputError(f"the array {value} is larger than any machine's memory", hint=hint)
    return value


def _body_op(operation: Any) -> str:
    """Name of the op (`add`, `maximum`) if a reduction's body is one op of its two arguments; else empty."""
    block = operation.regions[0].blocks[0]
    inside = [op.operation for op in block.operations]
    if len(inside) != 2 or len(block.arguments) != 2 or set(inside[0].operands) != set(block.arguments):
        return ""
    return str(inside[0].name.removeprefix("stablehlo."))


def _place(operation: Any) -> str:
    return place_text(str(operation.location)) or "a place without a name"


def read_program(function: Any, name: str) -> tuple[Program, Reader]:
    """The Program of one normalised entry function, and the reader, which maps it to the module."""
    reader = Reader()
    try:
        reader.read(function.operation, function.entry_block)
    except KeyError as error:
        raise InputError(f"a value is used before it is defined ({error})", hint="is the module valid MLIR?") from error
    arguments = read_arguments(function)
    outputs = [op.operands[0] for op in reader.ops if op.name == RESULT]
    paths = [
        printable(foreign.text(attributes, "jax.result_info", partial("result {}".format, index)) or "")
        for index, attributes in enumerate(_each(function, "res_attrs", len(outputs)))
    ]
    results = tuple(Result(value, path) for value, path in zip(outputs, paths, strict=True))
    reader.notices += reader.assumptions()
    for kernel, line in reader.unknown.items():
        reader.notices.append(f"if you know how {kernel} is split: --kernels FILE with {line}")
    reader.drop_dead_ops()
    reader.find_repeats()
    program = Program(name, tuple(reader.ops), tuple(reader.values), arguments, results, tuple(reader.loops))
    return with_donated_buffers(with_unsharded_sums(only_moves(program))), reader


def read_arguments(function: Any) -> tuple[Argument, ...]:
    """Path, donation, aliasing and memory of each argument of the entry function."""
    handles, results = list(function.arguments), len(function.type.results)
    paths = argument_paths([printable(xla.location_name(handle.location)) for handle in handles])
    arguments = []
    for index, attributes in enumerate(_each(function, "arg_attrs", len(handles))):
        place = partial("argument {}".format, index)
        alias = foreign.integer(attributes, "tf.aliasing_output", place, least=0, most=results - 1)
        donated = alias is not None or "jax.buffer_donor" in attributes
        on_host = is_host(foreign.text(attributes, "mhlo.memory_kind", place))
        arguments.append(Argument(index, paths[index], donated, -1 if alias is None else alias, on_host=on_host))
    return tuple(arguments)


def is_host(kind: str | None) -> bool:
    """True if a memory kind of JAX (`device`, `pinned_host`, `unpinned_host`) is host memory."""
    return kind is not None and kind.endswith("_host")


def transfer_of(operation: Any) -> str:
    """XLA's name for a JAX custom call that moves an array to another memory; empty for other operations."""
    if call_target(operation) != "annotate_device_placement":
        return ""
    kind = foreign.text(foreign.entries(operation.attributes, FRONTEND, str), "_xla_buffer_placement", str)
    return TO_HOST if is_host(kind) else TO_DEVICE if kind == "device" else ""


def argument_paths(names: list[str]) -> list[str]:
    """The user's names of arguments; empty for an argument without one.

    PyTorch/XLA and HLO number arguments (`p12.34`, `Arg_3.4`); TensorFlow calls each of them `XLA_Args`.
    """
    count, paths = Counter(names), restored_paths(names)
    return [
        "" if count[name] > 1 or _NUMBERED.fullmatch(name) else path for name, path in zip(names, paths, strict=True)
    ]


def _each(function: Any, name: str, count: int) -> list[Any]:
    """The dictionary of each argument or result; empty ones if the function has none."""
    attributes = function.attributes
    return list(attributes[name]) if name in attributes else [{}] * count


# ---------------------------------------------------------------- paths from HLO names
# Restores paths of arguments from HLO names: XLA replaces each sign that is no letter, digit or underscore by `_`.
#
# XLA appends a number to every name. A dot right behind the argument's own name cannot be distinguished from an
# underscore in it: `state.params['w']` comes back as `state_params['w']`.

_NUMBER = re.compile(r"\.\d+$")
_WORDS = r"[A-Za-z0-9]+(?:_[A-Za-z0-9]+)*"
_ARGUMENT = re.compile(rf"(?=[A-Za-z]){_WORDS}")
# A key, an index, or an attribute in HLO's form, and its restored form.
_STEPS = (
    (re.compile(rf"__({_WORDS})__"), "['{}']"),
    (re.compile(r"_(\d+)_"), "[{}]"),
    (re.compile(rf"(?<=_)_(?=[A-Za-z])({_WORDS})"), ".{}"),
)
MOST = 400  # names longer than this are left as they are


def restored_paths(names: list[str]) -> list[str]:
    """The paths that names were made from; a name without one stays. Returns the names unchanged if they are not HLO's
    or if two paths would be equal."""
    if not all(_NUMBER.search(name) for name in names):
        return names
    bare = [_NUMBER.sub("", name) for name in names]
    paths = [restored_path(short) or name for short, name in zip(bare, names, strict=True)]
    return paths if len(set(paths)) == len(set(names)) else names


def restored_path(name: str) -> str | None:
    """The path that a name was made from; None if there is none."""
    match = _ARGUMENT.match(name) if len(name) <= MOST else None
    ends = [] if match is None else [end for end in range(match.end(), 0, -1) if _ARGUMENT.fullmatch(name, 0, end)]
    dead: set[int] = set()
    return next((name[:end] + rest for end in ends if (rest := _steps(name, end, dead)) is not None), None)


def _steps(name: str, start: int, dead: set[int]) -> str | None:
    """The path of the name from `start` on; None if it cannot be restored. dead: positions known to fail."""
    if start == len(name):
        return ""
    if start in dead:
        return None
    for pattern, form in _STEPS:
        for end in range(len(name), start, -1):
            match = pattern.fullmatch(name, start, end)
            if match and (rest := _steps(name, end, dead)) is not None:
                return form.format(match[1]) + rest
    dead.add(start)
    return None
