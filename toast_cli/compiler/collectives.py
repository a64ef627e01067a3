"""Collectives as the compiler makes them: in which type they move, which become others, which are combined, and which
nothing waits for.

In: a program, and local shapes. Out: bytes and latencies of its collectives; for reduce-scatters see
`reduce_scatter`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Sequence
from math import prod

from toast_cli.compiler.profile import CompilerProfile
from toast_cli.hardware.model import Mesh
from toast_cli.program.model import DTYPE_BITS, Program
from toast_cli.program.ops import ADD, ARGUMENT, BROADCAST_IN_DIM, CARRY, CONVERT, SELECT
from toast_cli.program.regions import loop_at
from toast_cli.program.sums import read_behind

LANES = 128  # elements in a row of a tile


class Narrowing:
    """The bits of a program's floating-point elements that collectives move; all of them without this pass.

    XLA:TPU puts a conversion to a narrower type before the collective it follows, and looks through ops that only move
    data; a product of f32, which it computes in one bf16 pass unless told otherwise, counts as such a conversion, but
    not one with a vector, which it computes as a multiplication and a sum, in f32. (libtpu 0.0.42.1 does so with
    all-gathers, all-to-alls, permutes and all-reduces, and not with reduce-scatters.)
    """

    def __init__(self, program: Program, profile: CompilerProfile) -> None:
        self._program, self._narrows, self._product_bits = program, "narrowing" in profile.passes, profile.product_bits
        self._bits = [DTYPE_BITS.get(value.dtype, 32) for value in program.values]
        self._floating = [value.dtype.startswith(("f", "bf")) for value in program.values]
        self._needed = list(self._bits)
        for value in reversed(range(len(program.values))):
            if program.users[value]:
                self._needed[value] = max(self._read(value, op) for op, _ in program.users[value])

    def of_value(self, value: int) -> float:
        """Fraction of a value's bits that its readers need, at most 1."""
        return self._needed[value] / self._bits[value] if self._bits[value] else 1.0

    def of_use(self, value: int, op: int) -> float:
        """Fraction of a value's bits that one reader needs, at most 1."""
        return self._read(value, op) / self._bits[value] if self._bits[value] else 1.0

    def _read(self, value: int, number: int) -> int:
        op, whole = self._program.ops[number], self._bits[value]
        if not (self._narrows and self._floating[value]):
            return whole
        if op.kind.matrix_unit:
            narrows = self._program.values[value].dtype == "f32" and not op.multiplies_by_vector
            return self._product_bits if narrows else whole
        results = [v for v in op.results if self._floating[v]]
        if op.name == CONVERT and results:
            return min(whole, *(self._needed[v] for v in results))
        if op.kind.rearranges or op.name == SELECT:
            return max((self._needed[v] for v in results), default=whole)
        return whole


def gathered_part(profile: CompilerProfile, program: Program, value: int, dims: Collection[int]) -> float:
    """Fraction, at most 1, of a value that its all-gather moves. dims: its split dimensions.

    Instead of a broadcast, or an elementwise function of one, its operand is gathered and broadcast afterwards, also
    along dimensions of that operand (libtpu 0.0.42.1; the gradients of splash attention read such arrays).
    """
    part, found = 1.0, set(dims)
    while "broadcast-gathers" in profile.passes:
        op = program.ops[program.producer[value]]
        if op.name == BROADCAST_IN_DIM:
            place = {factors: d for d, factors in enumerate(op.rule.operands[0]) if factors}
            read = [place.get(op.rule.results[0][d]) for d in found]
            if None in read:
                break
            found = {d for d in read if d is not None}
            part *= program.values[op.operands[0]].elements / max(1, program.values[value].elements)
        elif not (op.kind.elementwise and len(op.operands) == 1):
            break
        value = op.operands[0]
    return part


def stays_gather(profile: CompilerProfile, shape: tuple[int, ...], shards: int) -> bool:
    """Whether the chip's compiler keeps an all-gather of an array of that shape from that many shards.

    That of a vector in pieces of less than a row of a tile becomes an all-reduce of the local piece padded with zeros
    (libtpu 0.0.42.1 for slices of v4, v5e, v5p and v6e).
    """
    return "small-gathers" not in profile.passes or len(shape) != 1 or shape[0] // shards >= LANES


def stays_slice_gather(profile: CompilerProfile, mesh: Mesh, axes: tuple[int, ...], size: float) -> bool:
    """Whether the chip's compiler keeps an all-gather over `axes` whose result has `size` bytes on each device.

    Over all devices of a large slice it becomes an all-reduce of the local piece padded with zeros, which uses all
    links at once. `python benchmarks/gathers.py` compiles gathers by libtpu 0.0.42.1: from 64 devices on, not of 32; on
    v4 and v5p of every size that was tried (64 MiB), on v5e and v6e for results of up to 16 MiB before narrowing.
    """
    limits = profile.slice_gathers
    return (
        "slice-gathers" not in profile.passes
        or mesh.devices < limits.devices
        or prod(mesh.sizes[axis] for axis in axes) < mesh.devices
        or size > limits.bytes
        or any(link.kind not in ("ring", "line") for axis in axes for link in mesh.axes[axis].links)
    )


def reductions_each(program: Program, value: int, profile: CompilerProfile) -> float:
    """Number of all-reduces per computation of a value: 1, or 1 / trips if they are moved behind the loop.

    XLA:TPU moves an all-reduce after the loop if its result is only read through slices or views that are added to
    carries (its while-loop-all-reduce-code-motion): the gradients of an LSTM's weights, of which one product makes all
    gates. Gradients that are accumulated whole are carried partial in the emitted program (see `plan.accumulation`).
    Seen in a Flax LSTM compiled by libtpu 0.0.42.1 for v5e: 7 ms of communication in place of 194.
    """
    loop = program.ops[program.producer[value]].loop
    if loop < 0 or "reduction-motion" not in profile.passes or not _is_only_added_up(program, value, loop):
        return 1.0
    return 1.0 / max(1, program.loops[loop].trips)


def _is_only_added_up(program: Program, value: int, loop: int) -> bool:
    """Whether a loop only adds a value, and views of it, to its carries."""
    users = program.users[value]
    for number, position in users:
        op = program.ops[number]
        if op.loop != loop or len(op.results) != 1:
            return False
        (result,) = op.results
        if op.name == ADD and len(op.operands) == 2:
            if not _is_carried_on(program, op.operands[1 - position], result):
                return False
        elif not op.kind.view or not _is_only_added_up(program, result, loop):
            return False
    return bool(users)


def _is_carried_on(program: Program, before: int, after: int) -> bool:
    """Whether `after` is the yield of the carry `before`, and the body uses neither for anything else."""
    maker = program.producer[before]
    if program.ops[maker].name != CARRY or program.users[after] != [(maker, 1)]:
        return False
    return len(program.users[before]) - len(read_behind(program, before)) == 1


def early_values(program: Program, free: tuple[bool, ...], profile: CompilerProfile) -> list[bool]:
    """[values] whether each follows from arguments and constants by elementwise work and data movement alone.

    Such values (weights, converted or sliced) are available when the step begins: their gathers can overlap with
    everything before their first reader. Without the pass `overlap` no value is early or late.
    """
    early = [False] * len(program.values)
    if "overlap" not in profile.passes:
        return early
    carries = {op.results[0] for op in program.ops if op.name == CARRY}  # a loop's counter is one that is early
    found = -1
    while found != len(carries):
        found = len(carries)
        for op in program.ops:
            known = op.name == ARGUMENT or (op.kind.fusible and all(early[v] for v in op.operands))
            for value in op.results:
                early[value] = known or free[value] or value in carries
        carries = {v for v in carries if all(early[o] for o in program.ops[program.producer[v]].operands)}
    return early


def late_values(program: Program, profile: CompilerProfile) -> list[bool]:
    """[values] whether no product is computed from each, through loops as well.

    Such values (gradients on their way into the optimiser) are needed only when the step ends: their reductions can
    overlap with everything after them. Collectives of other values are on the critical path.
    """
    if "overlap" not in profile.passes:
        return [False] * len(program.values)
    late = [True] * len(program.values)
    changed = True
    while changed:  # one more pass for each loop a value is carried through; values only change from late to not late
        changed = False
        for op in reversed(program.ops):
            if op.kind.matrix_unit or not all(late[v] for v in op.results):
                for value in op.operands:
                    if late[value]:
                        late[value] = False
                        changed = changed or op.name == CARRY
    return late


# What an op reduces over, its loop and branches, whether nothing waits for it, number of reductions before it.
_Place = tuple[Hashable | None, int, tuple[int, ...], bool, int]


def combined_shares(
    program: Program, over: Sequence[Hashable | None], late: Sequence[bool], profile: CompilerProfile
) -> list[float]:
    """[ops] share of each reduction in the collective it is combined into, ignoring size limits; 1 if it is not
    combined, 0 if it is combined with all that nothing waits for.

    XLA merges collectives of one kind, type and group, none of which needs another's result, into one of about
    `CompilerProfile.combined_bytes`, within one computation (not across a loop's iterations). Outside of loops all that
    nothing waits for become one (XLA:TPU made one of 20 all-reduces of 128 KiB, and one of 12 of 4 MiB). Other
    all-reduces are combined if they are on one level: over the same dimensions, with equally many reductions on the
    longest paths to them, counting late ones separately (both sums of a batch normalisation; the gradients of a layer
    in a loop over layers). Of a ResNet's 105 all-reduces on v5e-16 XLA:TPU makes 27. Reduce-scatters that something
    waits for, or in loops, stay alone: those of a GRU's three gates do.

    Args:
        over: [ops] what an op reduces over, and how; None if it does not reduce. late: [ops] whether nothing waits for
            it.
    """
    if "reduction-combining" not in profile.passes:
        return [1.0] * len(program.ops)
    producer = program.producer
    before = [0] * len(program.ops)  # [ops] reductions of the same lateness on the longest path to it, itself included
    places: dict[int, _Place] = {}
    for number, op in enumerate(program.ops):
        longest, last, one = 0, late[number], over[number]
        for value in op.operands:
            maker = producer[value]  # may be a later op, for a carry; counts as 0 then
            if before[maker] > longest and late[maker] == last:
                longest = before[maker]
        before[number] = longest if one is None else longest + 1
        if one is not None:
            places[number] = one, loop_at(program, number, 0), op.branches, last, before[number]
    level = Counter(places.values())
    # Loop-carried sums are reduced after their loops, although the carry itself reduces nothing.
    at_end = [last and loop_at(program, number, 0) < 0 for number, last in enumerate(late)]
    return [0.0 if at_end[n] else 1.0 / level[places[n]] if n in places else 1.0 for n in range(len(program.ops))]


def latency_part(kind: str, size: float, share: float, profile: CompilerProfile) -> float:
    """Fraction of a collective's latency that a reduction of `size` bytes pays, given its share in the combined
    collective, whose size is limited.

    Args:
        kind: of the collective. share: see `combined_shares`.
    """
    if "reduction-combining" not in profile.passes or (share and kind != "all-reduce"):
        return 1.0
    return min(1.0, max(share, size / profile.combined_bytes))
