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

In: HLO text of one device's program, a mesh, the clock rate. Out: seconds of computing, of all communication,
and of the part of it that nothing hides. Collectives carry no estimate in XLA's text: their time is that of
`price.collectives`.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from toast_cli.ask_xla.collectives import (
    BETWEEN_SLICES,
    CHANNEL,
    HIDDEN_REDUCE_SCATTER,
    MeshShape,
    Sent,
    collective_of,
)
from toast_cli.ask_xla.hlo_text import Node, Nodes, array_bytes, called, computations, cycles_of

# A hand-written kernel, for which the compiler estimates no cycles: at least it reads and writes its arrays.
_KERNEL = 'custom_call_target="tpu_custom_call"'
# Asynchronous transfers, and how the type of an array says that it is in on-chip memory.
_TRANSFERS = frozenset({"copy-start", "slice-start", "dynamic-slice-start", "dynamic-update-slice-start"})
_ON_CHIP = "S(1)"
_ARRAYS = re.compile(r"[a-z]\w*\[[\d,]*\](?:\{[^}]*\})?")

# kind, bytes of the result on one device, mesh axes by name -> seconds.
SecondsOf = Callable[[str, float, tuple[str, ...]], float]


@dataclass(frozen=True, slots=True)
class ScheduledTime:
    """Seconds of one run on one device.

    Attributes:
        compute_seconds: compute by the compiler's estimate, and waiting for device memory.
        communication_seconds: all collectives, one after the
            other. exposed_seconds: the part of the communication for which the cores wait.
    """

    compute_seconds: float
    communication_seconds: float
    exposed_seconds: float

    @property
    def step_seconds(self) -> float:
        """Compute plus exposed communication."""
        return self.compute_seconds + self.exposed_seconds


def scheduled_time(
    text: str,
    axis_names: tuple[str, ...],
    axis_sizes: tuple[int, ...],
    clock_hertz: float,
    memory_bytes_per_second: float,
    seconds_of: SecondsOf,
) -> ScheduledTime:
    """Simulates a scheduled module; each loop's body is simulated once and multiplied by its trip count.

    Args:
        text: of `compiled.as_text()`. clock_hertz: cycles a second of the compute cores; 0 if the compiler estimates no
            cycles.
    """
    bodies, entry = computations(text)
    mesh = MeshShape(axis_names, axis_sizes)
    return _Walk(text, bodies, mesh, clock_hertz, memory_bytes_per_second, seconds_of).time_of(entry)


@dataclass(slots=True)
class _Clocks:
    """cores, links: seconds since the computation began. begun: name of an asynchronous start -> when it ends. compute,
    communication: seconds summed over the computation and all that it calls."""

    cores: float = 0.0
    compute: float = 0.0
    communication: float = 0.0
    links: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    begun: dict[str, float] = field(default_factory=dict)
    # Seconds that kernels use the device memory; those after which it has done all transfers, kernels aside; those
    # after which it has done each.
    used: float = 0.0
    queued: float = 0.0
    fetched: dict[str, float] = field(default_factory=dict)

    def fetch(self, name: str, seconds: float) -> None:
        """Begins a transfer between device memory and on-chip memory behind all that have begun."""
        self.queued = max(self.queued, self.cores - self.used) + seconds
        self.fetched[name] = self.queued

    def send(self, axes: Iterable[str], seconds: float) -> float:
        """Occupies the links of these axes as soon as they are free; returns the time when the transfer ends."""
        start = max([self.cores, *(self.links[axis] for axis in axes)])
        for axis in axes:
            self.links[axis] = start + seconds
        return start + seconds

    def wait_for(self, name: str) -> float:
        """Makes the cores wait for an asynchronous operation; those that are neither collectives nor transfers take no
        time here. Returns the seconds for which they wait for device memory."""
        self.cores = max(self.cores, self.begun.pop(name, 0.0))
        waited = max(0.0, self.fetched.pop(name, 0.0) + self.used - self.cores)
        self.cores += waited
        return waited


@dataclass(frozen=True, slots=True)
class _Spread:
    """A collective spread over fusions; first, last: names of the fusions that start it and wait for it."""

    collective: Sent
    first: str
    last: str


@dataclass
class _Walk:
    """Times of the computations of one module, each computed once."""

    text: str
    bodies: dict[str, Nodes]
    mesh: MeshShape
    clock_hertz: float
    memory_bytes_per_second: float
    seconds_of: SecondsOf
    _known: dict[str, ScheduledTime] = field(default_factory=dict)
    _in_fusion: dict[str, list[tuple[str, Sent]]] = field(default_factory=dict)
    # Computation -> channels of the collectives that are spread over fusions of computations that call it.
    _around: dict[str, frozenset[str]] = field(default_factory=dict)

    def time_of(self, name: str) -> ScheduledTime:
        if name not in self._known:
            self._known[name] = ScheduledTime(0.0, 0.0, 0.0)  # guards against cycles in malformed text
            self._known[name] = self._walked(name)
        return self._known[name]

    def _walked(self, name: str) -> ScheduledTime:
        nodes = self.bodies.get(name, {})
        clocks = _Clocks()
        around = self._around.get(name, frozenset())
        spread = {channel: parts for channel, parts in self._spread(nodes).items() if channel not in around}
        for node in nodes.values():
            if node.opcode.endswith("-done"):
                for operand in node.operands[:1]:
                    clocks.compute += clocks.wait_for(operand)
                continue
            busy = cycles_of(node.rest) / self.clock_hertz if self.clock_hertz else 0.0
            if not busy and _KERNEL in node.rest and self.clock_hertz:
                busy = self._memory_bytes(node, nodes) / self.memory_bytes_per_second
            if node.opcode in _TRANSFERS and _ON_CHIP in node.kind:
                moved = min(node.sizes[:2], default=0)  # source and destination; a context follows
                clocks.fetch(node.name, moved / self.memory_bytes_per_second)
            sent = collective_of(node, name, self.text, self.mesh)
            if sent is not None:
                end = self._send(sent, clocks)
                if node.opcode.endswith("-start") or node.opcode == BETWEEN_SLICES:
                    clocks.begun[node.name] = end
                else:
                    clocks.cores = end
            for channel, parts in spread.items():
                if parts.first == node.name:
                    clocks.begun[channel] = self._send(parts.collective, clocks)
            clocks.compute += busy
            clocks.cores += busy
            clocks.used += min(busy, self._memory_bytes(node, nodes) / self.memory_bytes_per_second) if busy else 0.0
            for channel, parts in spread.items():
                if parts.last == node.name:
                    clocks.wait_for(channel)
            if node.opcode == "fusion":
                continue  # its cycles are on its own line, its collectives are already counted
            for inner, times in called(node, nodes, self.bodies):
                self._around.setdefault(inner, around | spread.keys())
                part = self.time_of(inner)
                clocks.cores += times * part.step_seconds
                clocks.compute += times * part.compute_seconds
                clocks.communication += times * part.communication_seconds
        end = max([clocks.cores, *clocks.begun.values()])
        return ScheduledTime(clocks.compute, clocks.communication, max(0.0, end - clocks.compute))

    def _memory_bytes(self, node: Node, nodes: Nodes) -> float:
        """Bytes of device memory that a kernel reads and writes."""
        body = self.bodies.get(node.called("calls"), {})
        parameters = {int(inner.inside): inner.name for inner in body.values() if inner.opcode == "parameter"}
        total = _off_chip_bytes(node.kind)
        for number, operand in enumerate(node.operands):
            size = _off_chip_bytes(nodes[operand].kind) if operand in nodes else 0
            users = [inner for inner in body.values() if size and parameters.get(number) in inner.operands]
            cut = users and all(inner.opcode == "dynamic-slice" for inner in users)
            total += sum(sum(inner.sizes) for inner in users) if cut else size
        return total

    def _send(self, collective: Sent, clocks: _Clocks) -> float:
        """Adds a collective to the seconds and occupies its links; returns the time when it ends."""
        kind, axes, sizes = collective
        seconds = self.seconds_of(kind, sum(sizes), axes)  # arrays that are sent together share the latency
        clocks.communication += seconds
        return clocks.send(axes, seconds)

    def _spread(self, nodes: Nodes) -> dict[str, _Spread]:
        """Collectives inside fusions, by channel."""
        spread: dict[str, _Spread] = {}
        for node in nodes.values():
            inner = node.called("calls") if node.opcode == "fusion" else ""
            for channel, collective in [] if inner.startswith(HIDDEN_REDUCE_SCATTER) else self._fused(inner):
                begun = spread.get(channel, _Spread(collective, node.name, node.name))
                spread[channel] = replace(begun, last=node.name)
        return spread

    def _fused(self, name: str) -> list[tuple[str, Sent]]:
        """The collectives in a fused computation, each with its channel."""
        if name not in self._in_fusion:
            self._in_fusion[name] = [
                (channel[1], sent)
                for node in self.bodies.get(name, {}).values()
                if node.opcode != "fusion" and (channel := CHANNEL.search(node.rest))
                if (sent := collective_of(node, name, self.text, self.mesh))
            ]
        return self._in_fusion[name]


def _off_chip_bytes(kind: str) -> int:
    """Bytes of the arrays of a type that are in device memory."""
    return sum(sum(array_bytes(array)) for array in _ARRAYS.findall(kind) if _ON_CHIP not in array)
