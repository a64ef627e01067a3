"""The available compilers: XLA:TPU or XLA:GPU ahead of time for the real chips, or XLA's partitioner on virtual CPU
devices.

In: the bytes of a written program. Out: `Compiled`. Everything is compiled in child processes; a crash or a
timeout of the compiler is a verdict, not an error.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from importlib import metadata
from math import prod
from typing import Protocol

from toast_cli.compiler.collectives import latency_part
from toast_cli.compiler.profiles import find_profile
from toast_cli.confirm.model import Compiled
from toast_cli.cost.collectives import KINDS, collective_seconds
from toast_cli.hardware import Axis, Mesh
from toast_cli.verify.ahead import AheadFacts, CompilationTarget, compile_ahead
from toast_cli.verify.child import Failure
from toast_cli.verify.partitioned import collectives_after_partitioning
from toast_cli.verify.schedule import scheduled_time
from toast_cli.verify.verdict import out_of_memory

_COMPILER_PACKAGES = ("jaxlib", "libtpu", "jax-cuda12-pjrt", "jax-cuda13-pjrt")


class Compiler(Protocol):
    """A compiler for StableHLO programs."""

    @property
    def label(self) -> str: ...

    @property
    def identity(self) -> tuple[object, ...]:
        """Everything besides the program that its answers depend on."""

    def judge(self, content: bytes, timeout_seconds: float) -> Compiled: ...


@dataclass(frozen=True)
class Partitioner:
    """XLA's partitioner on virtual CPU devices, or that of the compiler for a target: lists the collectives within
    seconds. Time and memory remain predictions."""

    mesh: Mesh
    target: CompilationTarget | None = None

    @property
    def label(self) -> str:
        return "XLA's partitioner"

    @property
    def identity(self) -> tuple[object, ...]:
        return ("partitioner", self.target, _versions(), _links(self.mesh))

    def judge(self, content: bytes, timeout_seconds: float) -> Compiled:
        start = time.monotonic()
        axes = dict(zip(self.mesh.names, self.mesh.sizes, strict=True))
        found = collectives_after_partitioning(
            content, "stablehlo", axes, target=self.target, timeout_seconds=timeout_seconds
        )
        seconds = time.monotonic() - start
        if isinstance(found, Failure):
            return _failed(found, seconds, timeout_seconds)
        by_kind: dict[str, float] = {}
        for one in found:
            # Compilers combine small collectives later, but not those of different iterations of a loop.
            spent = one.count * seconds_on(self.mesh, one.kind, one.bytes, one.axes, combined=one.count <= 1)
            by_kind[one.kind] = by_kind.get(one.kind, 0.0) + spent
        total = sum(by_kind.values())
        return Compiled("compiled", "", None, total, total, None, by_kind, seconds)


@dataclass(frozen=True)
class AheadOfTime:
    """XLA:TPU or XLA:GPU for a machine that need not be present: memory, collectives, and from XLA:TPU cycles and the
    schedule."""

    mesh: Mesh
    target: CompilationTarget

    @property
    def label(self) -> str:
        return f"XLA:{self.target.platform.upper()} {self.target.label}"

    @property
    def identity(self) -> tuple[object, ...]:
        return (self.target, _versions(), _links(self.mesh), self.mesh.chip.clock_hertz)

    def judge(self, content: bytes, timeout_seconds: float) -> Compiled:
        start = time.monotonic()
        facts = compile_ahead(content, "stablehlo", self.target, timeout_seconds=timeout_seconds)
        seconds = time.monotonic() - start
        if isinstance(facts, Failure):
            return _failed(facts, seconds, timeout_seconds)
        return self._read(facts, seconds)

    def _read(self, facts: AheadFacts, seconds: float) -> Compiled:
        mesh = _split_at_networks(self.mesh) if self.target.slices > 1 else self.mesh
        clock = mesh.chip.clock_hertz if facts.cycles else 0.0
        found = scheduled_time(
            facts.hlo_text,
            mesh.names,
            mesh.sizes,
            clock,
            lambda kind, size, axes: seconds_on(mesh, kind, size, axes),
        )
        return Compiled(
            "compiled",
            "",
            found.compute_seconds if clock else None,
            found.communication_seconds,
            # Without cycles, the overlap of communication and compute is unknown.
            found.exposed_seconds if clock else found.communication_seconds,
            facts.device_bytes,
            found.by_kind,
            seconds,
        )


def _split_at_networks(mesh: Mesh) -> Mesh:
    """The mesh with each axis that a network divides as two: XLA:TPU takes collectives between slices apart."""
    axes = []
    for axis in mesh.axes:
        for links in (
            tuple(link for link in axis.links if link.kind == "network"),
            tuple(link for link in axis.links if link.kind != "network"),
        ):
            if links:
                name = axis.name if len(links) == len(axis.links) else f"{axis.name} over {links[0].kind}"
                axes.append(Axis(name, prod(link.size for link in links), links))
    return replace(mesh, axes=tuple(axes))


def seconds_on(mesh: Mesh, kind: str, size: float, axes: tuple[str, ...], *, combined: bool = False) -> float:
    """Seconds of one collective of a compiled program. Devices that form no mesh axes count as the whole mesh."""
    if kind not in KINDS:
        return 0.0
    numbers = tuple(mesh.names.index(axis) for axis in axes if axis in mesh.names)
    if len(numbers) < len(axes):
        numbers = tuple(range(len(mesh.names)))
    part = latency_part(kind, size, 0.0, find_profile(mesh.chip)) if combined else 1.0
    return collective_seconds(mesh, kind, size, numbers, latency_part=part)


def _failed(failure: Failure, seconds: float, timeout_seconds: float) -> Compiled:
    if out_of_memory(failure):
        return Compiled("out of memory", failure.reason, compile_seconds=seconds)
    timed_out = failure.aborted and seconds >= timeout_seconds
    return Compiled("timed out" if timed_out else "refused", failure.reason, compile_seconds=seconds)


def _versions() -> tuple[str, ...]:
    found = []
    for package in _COMPILER_PACKAGES:
        try:
            found.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            continue
    return tuple(found)


def _links(mesh: Mesh) -> tuple[object, ...]:
    return tuple((axis.name, axis.size, axis.links) for axis in mesh.axes)
