"""Prices a step under the program's own shardings.

In: a program's content, and the mesh that its shardings are for. Out: `AsAnnotated`, or the reason why there is
none. XLA's partitioner does the work, in a child process, for virtual CPU devices; its output is the program of one
device with all collectives in it.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from toast_cli.confirm.compilers import seconds_on
from toast_cli.cost.model import ITSELF, CollectiveUse, Cost
from toast_cli.dimensions import analyse
from toast_cli.errors import ToastError
from toast_cli.evaluate.evaluator import Evaluator
from toast_cli.frontend import Source, load
from toast_cli.frontend.constraints import significant
from toast_cli.frontend.exchanges import KINDS
from toast_cli.hardware import Mesh, Spec
from toast_cli.plan.patterns import make_problem
from toast_cli.program.model import Program
from toast_cli.verify.child import Failure
from toast_cli.verify.collectives import CompiledCollective
from toast_cli.verify.partitioned import Partitioned, after_partitioning
from toast_cli.verify.rematerialised import Rematerialisation, rematerialisations
from toast_cli.verify.sums import partitioned_collectives

# Shardy's name of a manual region's body; once partitioned, it is an ordinary function.
_BODY = "manual_computation_body"
_ONE_KIND = {"reduce-scatter": "all-reduce"}


@dataclass(frozen=True)
class AsAnnotated:
    """Attributes: mesh: of the shardings. collectives: as the partitioner writes them, each with the seconds of all its
    runs, the most expensive first. rematerialised: arrays that it rematerialises fully. partitioned: the program of one
    device that these figures belong to."""

    mesh: Mesh
    cost: Cost
    collectives: tuple[tuple[CompiledCollective, float], ...]
    rematerialised: tuple[Rematerialisation, ...]
    partitioned: Partitioned


def annotated_mesh(source: Source, spec: Spec, mesh: Mesh) -> Mesh | None:
    """The mesh that the program's shardings are for, on the same machine as `mesh`; None if it has no shardings or they
    are for another number of devices. Shardings that name no axes refer to `mesh` itself."""
    own = significant(source.own_mesh)
    if not own or own == significant(zip(mesh.names, mesh.sizes, strict=True)):
        return mesh if own else None
    if own[0][0] == "":
        return mesh if own[0][1] == mesh.devices else None
    try:
        found = spec.mesh(dict(own), mesh.limit_bytes)
    except ToastError:  # axes that fit no dimensions of the machine
        return None
    return found if found.devices == mesh.devices else None


def as_annotated(content: bytes, mesh: Mesh, through: Collection[str] = ()) -> AsAnnotated | Failure:
    """Partitions a program in any format by its own shardings, and prices the result."""
    found = after_partitioning(content, "any", mesh.devices)
    return found if isinstance(found, Failure) else priced(found, mesh, through)


def priced(found: Partitioned, mesh: Mesh, through: Collection[str] = ()) -> AsAnnotated | Failure:
    """Prices the program of one device: compute and memory by the cost model, communication by its collectives.
    through: see `hlo_text.places`."""
    try:
        program = load("as annotated", content=found.text.replace(_BODY, "body").encode()).program
    except ToastError as error:  # XLA has ops of its own that toast cannot read
        return Failure(f"its program was not read: {error.what}")
    alone = replace(mesh, axes=tuple(replace(axis, size=1, links=()) for axis in mesh.axes))
    evaluator = Evaluator(make_problem(program, analyse(program), alone))
    sent = partitioned_collectives(found.text, mesh.names, mesh.sizes, through)
    timed = [(one, _seconds(one, mesh)) for one in sent]
    communication, uses = sum(seconds for _, seconds in timed), _uses(program, timed, mesh)
    elsewhere = communication - sum(use.seconds for use in uses)
    cost = replace(
        evaluator.exact_cost((), learn=False),
        communication_seconds=communication,
        exposed_seconds=evaluator.exposed_beside((), uses) + elsewhere,
    )
    return AsAnnotated(
        mesh,
        cost,
        tuple(sorted(timed, key=lambda one: -one[1])),
        tuple(rematerialisations(found, mesh.names, mesh.sizes, through)),
        found,
    )


def _uses(program: Program, timed: Sequence[tuple[CompiledCollective, float]], mesh: Mesh) -> list[CollectiveUse]:
    """The collectives where they are in the program of one device. Each kind's seconds are divided among its ops by
    bytes; all-reduces and reduce-scatters are one kind, since a compiler makes one of the other. An op that reduces
    several arrays counts as several, since a backend combines collectives only after it has overlapped them."""
    seconds, axes = defaultdict[str, float](float), defaultdict[str, set[int]](set)
    for one, spent in timed:
        seconds[_ONE_KIND.get(one.kind, one.kind)] += spent
        unknown = not set(one.axes) <= set(mesh.names)  # groups that are not along axes may be anywhere
        over = [axis for axis, name in enumerate(mesh.names) if unknown or name in one.axes]
        axes[_ONE_KIND.get(one.kind, one.kind)].update(over)
    found = []
    for number, op in enumerate(program.ops):
        kind = KINDS.get(op.name, "")
        for operand, result in zip(op.operands, op.results, strict=False) if kind else ():
            found.append((_ONE_KIND.get(kind, kind), number, op.trips, operand, program.values[result].bytes))
    weight = defaultdict[str, float](float)
    for kind, _, trips, _, size in found:
        weight[kind] += trips * size
    return [
        CollectiveUse(
            kind, tuple(sorted(axes[kind])), size, trips, seconds[kind] * trips * size / weight[kind], number, operand,
            False, (kind, size), ITSELF,
        )
        for kind, number, trips, operand, size in found
        if weight[kind]
    ]  # fmt: skip


def _seconds(one: CompiledCollective, mesh: Mesh) -> float:
    # Compilers combine small collectives later, but not those of different iterations of a loop.
    return one.count * seconds_on(mesh, one.kind, one.bytes, one.axes, combined=one.count <= 1)


def in_background(content: bytes, mesh: Mesh, timeout_seconds: float) -> Callable[[], AsAnnotated | str]:
    """Partitions in a background thread. The returned function waits for it, and prices in the caller's thread; it
    returns the reason if there is no answer."""
    answers: list[Partitioned | Failure] = []

    def work() -> None:
        answers.append(after_partitioning(content, "any", mesh.devices, timeout_seconds=timeout_seconds))

    thread = threading.Thread(target=work, daemon=True)
    thread.start()

    def answer() -> AsAnnotated | str:
        thread.join()
        found = answers[0] if answers else Failure("it was interrupted", aborted=True)
        own = found if isinstance(found, Failure) else priced(found, mesh)
        return own.reason if isinstance(own, Failure) else own

    return answer
