"""Step time of a compiled module, read off its schedule: which collectives hide behind computation, and which do not.

A module that XLA has scheduled lists its instructions in the order in which they run. `scheduled_time` walks through
that order with two clocks: one for the compute cores, moved on by the compiler's own `estimated_cycles`, and one for
each mesh axis' links, moved on by the collectives. A synchronous collective stops the cores until it is done. An
asynchronous one (`…-start`) occupies its links from then on, and the cores stop at its `…-done` only for what is left
of it. The bodies of windowed contractions (XLA:TPU's loops of a permute and a piece of the product) are such pairs
within a loop, so they need no rule of their own. XLA:TPU also spreads one collective over several fusions
(`%async_collective_fusion…`), each of which carries an instruction of the same channel: the first of them starts it,
the last one waits for it. Where some of these fusions are in a loop and others around it, it is one collective that
runs beside the loop, and not one for each trip.

Enters: HLO text of one device's program, a mesh, the clock rate. Leaves: seconds of computing, of all communication,
and of the part of it that nothing hides. Collectives carry no estimate in XLA's text: their time is that of
`cost.collectives`.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from math import prod

from toast_cli.verify.collectives import (
    HIDDEN_REDUCE_SCATTER,
    OPCODES,
    callee,
    kind_of,
    mesh_axes,
    result_sizes,
    without_padding,
)
from toast_cli.verify.hlo_text import Instruction, array_bytes, called, computations, cycles_of, parse_line

_NAME = re.compile(r"^\s+(?:ROOT )?%?([^\s=]+) = ")
_CALLS = re.compile(r"calls=%?([^\s,]+)")
_CHANNEL = re.compile(r"channel_id=(\d+)")
_OPERAND = re.compile(r"%([\w.\-]+)")

# kind, bytes of the result on one device, mesh axes by name -> seconds.
SecondsOf = Callable[[str, float, tuple[str, ...]], float]


@dataclass(frozen=True, slots=True)
class ScheduledTime:
    """Seconds of one run on one device.

    Attributes:
        compute_seconds: compute by the compiler's estimate. communication_seconds: all collectives, one after the
            other. exposed_seconds: the part of the communication for which the cores wait. by_kind: the kind of a
            collective -> seconds of all its runs. bytes_by_kind: the same in bytes of results on one device.
    """

    compute_seconds: float
    communication_seconds: float
    exposed_seconds: float
    by_kind: dict[str, float] = field(default_factory=dict)
    bytes_by_kind: dict[str, float] = field(default_factory=dict)

    @property
    def step_seconds(self) -> float:
        """Compute plus exposed communication."""
        return self.compute_seconds + self.exposed_seconds


def scheduled_time(
    text: str, axis_names: tuple[str, ...], axis_sizes: tuple[int, ...], clock_hertz: float, seconds_of: SecondsOf
) -> ScheduledTime:
    """Simulates a scheduled module; each loop's body is simulated once and multiplied by its trip count.

    Args:
        text: of `compiled.as_text()`. clock_hertz: cycles a second of the compute cores; 0 if the compiler estimates no
            cycles.
    """
    bodies, entry = computations(text)
    return _Walk(text, bodies, axis_names, axis_sizes, clock_hertz, seconds_of).time_of(entry)


@dataclass(slots=True)
class _Clocks:
    """cores, links: seconds since the computation began. begun: name of an asynchronous start -> when it ends."""

    cores: float = 0.0
    links: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    begun: dict[str, float] = field(default_factory=dict)

    def send(self, axes: Iterable[str], seconds: float) -> float:
        """Occupies the links of these axes as soon as they are free; returns the time when the transfer ends."""
        start = max([self.cores, *(self.links[axis] for axis in axes)])
        for axis in axes:
            self.links[axis] = start + seconds
        return start + seconds

    def wait_for(self, name: str) -> None:
        """Makes the cores wait for an asynchronous operation; operations other than collectives (a copy) take no time
        here."""
        self.cores = max(self.cores, self.begun.pop(name, 0.0))


# Kind, axes by name, bytes of each array in the result on one device.
_Collective = tuple[str, tuple[str, ...], tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class _Spread:
    """A collective spread over fusions; first, last: indices of the fusions that start it and wait for it."""

    collective: _Collective
    first: int
    last: int


@dataclass(slots=True)
class _Total:
    """Seconds and bytes summed over a computation and all that it calls."""

    compute: float = 0.0
    communication: float = 0.0
    by_kind: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    bytes_by_kind: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    def add(self, part: ScheduledTime, times: float) -> None:
        self.compute += times * part.compute_seconds
        self.communication += times * part.communication_seconds
        for kind, seconds in part.by_kind.items():
            self.by_kind[kind] += times * seconds
        for kind, size in part.bytes_by_kind.items():
            self.bytes_by_kind[kind] += times * size


class _Walk:
    """Times of the computations of one module, each computed once."""

    def __init__(
        self,
        text: str,
        bodies: dict[str, list[str]],
        axis_names: tuple[str, ...],
        axis_sizes: tuple[int, ...],
        clock_hertz: float,
        seconds_of: SecondsOf,
    ) -> None:
        self._text, self._bodies = text, bodies
        self._names, self._sizes = axis_names, axis_sizes
        self._clock, self._seconds_of = clock_hertz, seconds_of
        self._known: dict[str, ScheduledTime] = {}
        self._in_fusion: dict[str, list[tuple[str, _Collective]]] = {}
        # Computation -> channels of the collectives that are spread over fusions of computations that call it.
        self._around: dict[str, frozenset[str]] = {}

    def time_of(self, name: str) -> ScheduledTime:
        if name not in self._known:
            self._known[name] = ScheduledTime(0.0, 0.0, 0.0)  # guards against cycles in malformed text
            self._known[name] = self._walked(name)
        return self._known[name]

    def _walked(self, name: str) -> ScheduledTime:
        lines = self._bodies.get(name, [])
        clocks, total = _Clocks(), _Total()
        around = self._around.get(name, frozenset())
        spread = {channel: sent for channel, sent in self._spread(lines).items() if channel not in around}
        for place, line in enumerate(lines):
            parsed = parse_line(line)
            if parsed is None:
                continue
            result, opcode, rest = parsed
            if opcode.endswith("-done"):
                for operand in _OPERAND.findall(rest)[:1]:
                    clocks.wait_for(operand)
                continue
            busy = cycles_of(line) / self._clock if self._clock else 0.0
            hidden_scatter = f"calls=%{HIDDEN_REDUCE_SCATTER}" in rest
            if hidden_scatter or (opcode in OPCODES and opcode != "fusion"):
                end = self._send(self._collective(name, result, opcode, rest), clocks, total)
                if opcode.endswith("-start"):
                    clocks.begun[_instruction_name(line)] = end
                else:
                    clocks.cores = end
            for channel, sent in spread.items():
                if sent.first == place:
                    clocks.begun[channel] = self._send(sent.collective, clocks, total)
            total.compute += busy
            clocks.cores += busy
            for channel, sent in spread.items():
                if sent.last == place:
                    clocks.wait_for(channel)
            if opcode == "fusion":
                continue  # its cycles are on its own line, its collectives are already counted
            for inner, times in called(line, lines, self._bodies):
                self._around.setdefault(inner, around | spread.keys())
                part = self.time_of(inner)
                clocks.cores += times * part.step_seconds
                total.add(part, times)
        end = max([clocks.cores, *clocks.begun.values()])
        return ScheduledTime(
            total.compute,
            total.communication,
            max(0.0, end - total.compute),
            dict(total.by_kind),
            dict(total.bytes_by_kind),
        )

    def _send(self, collective: _Collective, clocks: _Clocks, total: _Total) -> float:
        """Adds a collective to the total and occupies its links; returns the time when it ends."""
        kind, axes, sizes = collective
        seconds = self._seconds_of(kind, sum(sizes), axes)  # arrays that are sent together share the latency
        total.by_kind[kind] += seconds
        total.bytes_by_kind[kind] += sum(sizes)
        total.communication += seconds
        return clocks.send(axes, seconds)

    def _spread(self, lines: list[str]) -> dict[str, _Spread]:
        """Collectives inside fusions, by channel, with the indices in `lines` of the first and the last fusion that has
        them."""
        found: dict[str, _Spread] = {}
        for place, line in enumerate(lines):
            parsed = parse_line(line)
            if parsed is None or parsed[1] != "fusion":
                continue
            for inner in _CALLS.findall(parsed[2]):
                if inner.startswith(HIDDEN_REDUCE_SCATTER):
                    continue
                for channel, collective in self._fused(inner):
                    known = found.get(channel)
                    first = known.first if known else place
                    found[channel] = _Spread(known.collective if known else collective, first, place)
        return found

    def _fused(self, name: str) -> list[tuple[str, _Collective]]:
        """The collectives in a fused computation, each with its channel."""
        if name not in self._in_fusion:
            self._in_fusion[name] = [
                (channel[1], self._collective(name, parsed[0], parsed[1], parsed[2]))
                for line in self._bodies.get(name, [])
                if (parsed := parse_line(line))
                and parsed[1] in OPCODES - {"fusion"}
                and (channel := _CHANNEL.search(line))
            ]
        return self._in_fusion[name]

    def _collective(self, computation: str, result: str, opcode: str, rest: str) -> _Collective:
        """Kind, axes and bytes of the results of a collective instruction."""
        instruction = Instruction(opcode, array_bytes(result), rest, computation, 1.0, 1.0)
        kind = kind_of(instruction) or opcode
        axes = mesh_axes(instruction, self._text, self._names, self._sizes, prod(self._sizes))
        sizes = result_sizes(kind, opcode, instruction.sizes)
        if opcode == "fusion":
            around = prod(size for name, size in zip(self._names, self._sizes, strict=True) if name in axes)
            sizes = without_padding(sizes, callee(instruction, self._text), around)
        return kind, axes, sizes


def _instruction_name(line: str) -> str:
    found = _NAME.match(line)
    return found[1] if found else ""
