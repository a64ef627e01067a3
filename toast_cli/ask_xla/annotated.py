"""Prices a step under the program's own shardings: what the user has today, beside toast's plan.

XLA itself propagates and partitions the shardings (`with_sharding_constraint`, `in_shardings`, explicit mode,
`shard_map`), in a child process, for virtual CPU devices; its output is the program of one device with all collectives
in it, and is priced like any other.
"""

from __future__ import annotations

import os
import re
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from math import inf
from typing import Any

from toast_cli.ask_xla.child import Failure
from toast_cli.ask_xla.collectives import CompiledCollective, name_and_place, partitioned_collectives
from toast_cli.ask_xla.compile import Answer, collectives_after_partitioning, compile_for, virtual_devices
from toast_cli.ask_xla.confirm import collective_time, seconds_on
from toast_cli.ask_xla.hlo_text import array_bytes, graphs, places
from toast_cli.base.errors import ToastError
from toast_cli.dimensions import analyse
from toast_cli.frontend import Source, load
from toast_cli.frontend.constraints import KINDS, significant
from toast_cli.frontend.loading import parse
from toast_cli.frontend.places import Frame, frames_of
from toast_cli.frontend.shardings import called_name, mesh_axes, read_tiling
from toast_cli.hardware import Mesh, Spec
from toast_cli.plan.problem import make_problem
from toast_cli.plan.reshard import is_even, waypoints
from toast_cli.plan.sharding import Sharding, axes_of
from toast_cli.price.cost import ITSELF, CollectiveUse, Cost
from toast_cli.price.evaluator import Evaluator
from toast_cli.program.model import Program
from toast_cli.xla import walk_ops

# Shardy's name of a manual region's body; once partitioned, it is an ordinary function.
_BODY = "manual_computation_body"
_ONE_KIND = {"reduce-scatter": "all-reduce"}


Axes = tuple[tuple[str, ...], ...]  # [dimensions] mesh axes that split each, major to minor


@dataclass(frozen=True)
class Rematerialisation:
    """An array that is resharded from `start` to `end`; None for a sharding that no mesh axes express.

    Attributes:
        type, shape: of the whole array. bytes: of the whole, which every device holds for a moment. count: in one step,
            loops counted. name, place: the op that makes it, and its `model.py:12`.
    """

    type: str
    shape: tuple[int, ...]
    bytes: int
    start: Axes | None
    end: Axes | None
    count: float
    name: str
    place: str


@dataclass(frozen=True)
class AsAnnotated:
    """Attributes: mesh: of the shardings. collectives: as the partitioner writes them, each with the seconds of all its
    runs, the most expensive first. rematerialised: arrays that it rematerialises fully. partitioned: the program of one
    device that these figures belong to."""

    mesh: Mesh
    cost: Cost
    collectives: tuple[tuple[CompiledCollective, float], ...]
    rematerialised: tuple[Rematerialisation, ...]
    partitioned: Answer


def annotated_mesh(source: Source, spec: Spec, mesh: Mesh) -> Mesh | None:
    """The mesh that the program's shardings are for, on the same machine as `mesh`; None if it has no shardings or they
    are for another number of devices. Shardings that name no axes refer to `mesh` itself."""
    own = significant(source.own_mesh)
    if not own or own == significant(zip(mesh.names, mesh.sizes, strict=True)):
        return mesh if own else None
    if own[0][0] == "":
        return mesh if own[0][1] == mesh.devices else None
    try:
        stated = spec.mesh(dict(own), mesh.limit_bytes)
    except ToastError:  # axes that fit no dimensions of the machine
        return None
    return stated if stated.devices == mesh.devices else None


def priced(answer: Answer, mesh: Mesh, through: Collection[str] = ()) -> AsAnnotated | Failure:
    """Prices the program of one device: compute and memory by the cost model, communication by its collectives.
    through: see `hlo_text.places`."""
    try:
        program = load("as annotated", content=answer.hlo_text.replace(_BODY, "body").encode()).program
    except ToastError as error:  # XLA has ops of its own that toast cannot read
        return Failure(f"its program was not read: {error.what}")
    alone = replace(mesh, axes=tuple(replace(axis, size=1, links=()) for axis in mesh.axes))
    evaluator = Evaluator(make_problem(program, analyse(program), alone))
    sent = partitioned_collectives(answer.hlo_text, mesh.names, mesh.sizes, through)
    timed = [(c, collective_time(mesh, c)) for c in sent]
    communication, uses = sum(seconds for _, seconds in timed), _uses(program, timed, mesh)
    elsewhere = communication - sum(use.seconds for use in uses)
    cost = replace(
        evaluator.exact_cost(()),
        communication_seconds=communication,
        exposed_seconds=evaluator.exposed_beside((), uses) + elsewhere,
    )
    return AsAnnotated(
        mesh,
        cost,
        tuple(sorted(timed, key=lambda pair: -pair[1])),
        tuple(rematerialisations(answer, mesh.names, mesh.sizes, through)),
        answer,
    )


def _uses(program: Program, timed: Sequence[tuple[CompiledCollective, float]], mesh: Mesh) -> list[CollectiveUse]:
    """The collectives where they are in the program of one device. Each kind's seconds are divided among its ops by
    bytes; all-reduces and reduce-scatters are one kind, since a compiler makes one of the other. An op that reduces
    several arrays counts as several, since a backend combines collectives only after it has overlapped them."""
    seconds, axes = defaultdict[str, float](float), defaultdict[str, set[int]](set)
    for collective, spent in timed:
        seconds[_ONE_KIND.get(collective.kind, collective.kind)] += spent
        unknown = not set(collective.axes) <= set(mesh.names)  # groups that are not along axes may be anywhere
        over = [axis for axis, name in enumerate(mesh.names) if unknown or name in collective.axes]
        axes[_ONE_KIND.get(collective.kind, collective.kind)].update(over)
    sites = []
    for number, op in enumerate(program.ops):
        kind = KINDS.get(op.name, "")
        for operand, result in zip(op.operands, op.results, strict=False) if kind else ():
            sites.append((_ONE_KIND.get(kind, kind), number, op.trips, operand, program.values[result].bytes))
    weight = defaultdict[str, float](float)
    for kind, _, trips, _, size in sites:
        weight[kind] += trips * size
    return [
        CollectiveUse(
            kind, tuple(sorted(axes[kind])), size, trips, seconds[kind] * trips * size / weight[kind], number, operand,
            False, (kind, size), ITSELF,
        )
        for kind, number, trips, operand, size in sites
        if weight[kind]
    ]  # fmt: skip


def in_background(content: bytes, mesh: Mesh, timeout_seconds: float) -> Callable[[], AsAnnotated | str]:
    """Partitions in a background thread. The returned function waits for it, and prices in the caller's thread; it
    returns the reason if there is no answer."""
    answers: list[Answer | Failure] = []
    target = virtual_devices(mesh.devices)

    def work() -> None:
        answers.append(compile_for(content, "any", target, timeout_seconds=timeout_seconds))

    thread = threading.Thread(target=work, daemon=True)
    thread.start()

    def answer() -> AsAnnotated | str:
        thread.join()
        reply = answers[0] if answers else Failure("it was interrupted", aborted=True)
        own = reply if isinstance(reply, Failure) else priced(reply, mesh)
        return own.reason if isinstance(own, Failure) else own

    return answer


# ---------------------------------------------------------------- involuntary rematerialisation
# Finds involuntary full rematerialisations: arrays that XLA's partitioner gathers on every device because it has no
# better way to reshard them. It warns of each ("[SPMD] Involuntary full rematerialization").

_WARNING = re.compile(
    r"nvoluntary full rematerialization\. The compiler cannot go from sharding (\{.*?\}) to (\{.*?\}) efficiently "
    r"for HLO operation %?\S+ = (\w+)\[([\d,]*)\](.*?)\. As the last resort"
)


def rematerialisations(
    answer: Answer, axis_names: tuple[str, ...], axis_sizes: tuple[int, ...], through: Collection[str] = ()
) -> list[Rematerialisation]:
    """The rematerialisations that the partitioner warned of, the largest first. through: see `places`."""
    frames = places(answer.hlo_text, through)
    runs: dict[tuple[str, str], float] = {}
    for graph in graphs(answer.hlo_text):
        for node in graph.nodes.values():
            key = name_and_place(node.rest, frames)
            runs[key] = max(graph.runs, runs.get(key, 0.0))
    alike: Counter[Rematerialisation] = Counter()
    for warned in _WARNING.finditer(answer.log):
        start, end, element, extents, rest = warned.groups()
        local = tuple(int(extent) for extent in extents.split(",") if extent)
        devices = read_tiling(start)
        tiles = devices.shape[:-1] if devices is not None and devices.ndim == len(local) + 1 else (1,) * len(local)
        lies, needed = (mesh_axes(text, len(local), axis_names, axis_sizes) for text in (start, end))
        shape = tuple(extent * parts for extent, parts in zip(local, tiles, strict=True))
        sizes = array_bytes(f"{element}[{','.join(map(str, shape))}]")
        name, place = name_and_place(rest, frames)
        array = Rematerialisation(element, shape, sum(sizes), lies, needed, runs.get((name, place), 1.0), name, place)
        alike[array] += 1
    arrays = [replace(array, count=array.count * times) for array, times in alike.items()]
    return sorted(arrays, key=lambda array: -array.bytes * array.count)


# ---------------------------------------------------------------- helpers that state constraints

# Shardy's operations, and GSPMD's custom calls, that only state a sharding.
CONSTRAINTS = ("sdy.sharding_constraint", "sdy.reshard", "Sharding")
OPERATIONS = ("sdy.sharding_constraint", "sdy.reshard", "stablehlo.custom_call")

Frames = tuple[Frame, ...]  # the user's own frames, the innermost first


def helpers(content: bytes, where: str) -> frozenset[str]:
    """`model.py:9` of each line that states constraints for several callers and is the only such line of its function:
    a helper, whose constraints are attributed to its callers."""
    stacks, places = _stacks(parse(content, where)[1]), frozenset[str]()
    while more := _helpers(stacks, places):
        places |= more
    return places


def _stacks(module: Any) -> list[Frames]:
    """The user's stack frames of each constraint."""
    return [
        tuple(frame for frame in frames_of(str(operation.location)) if frame.is_users)
        for operation in walk_ops(module, *OPERATIONS)
        if called_name(operation) in CONSTRAINTS
    ]


def _helpers(stacks: list[Frames], skipped: frozenset[str]) -> frozenset[str]:
    lines: dict[tuple[str, str], set[str]] = defaultdict(set)  # of each function
    callers: dict[str, set[str]] = defaultdict(set)
    for stack in stacks:
        seen = [frame for frame in stack if frame.place not in skipped]
        for inner in seen[:1]:
            lines[inner.path, inner.function].add(inner.place)
            callers[inner.place].update(frame.place for frame in seen[1:2])
    return frozenset(
        place for places in lines.values() if len(places) == 1 for place in places if len(callers[place]) > 1
    )


# ---------------------------------------------------------------- intermediate shardings


@dataclass(frozen=True)
class Mend:
    """through: the intermediate shardings. direct_seconds, seconds: of one reshard as XLA does it directly, and through
    those."""

    through: tuple[Sharding, ...]
    direct_seconds: float
    seconds: float


def mend(array: Rematerialisation, mesh: Mesh) -> Mend | None:
    """The fastest intermediate shardings; None if none is faster than the direct reshard, or if no mesh axes express
    the shardings."""
    if array.start is None or array.end is None:
        return None
    start, end = (_numbered(axes, mesh) for axes in (array.start, array.end))
    ways = [(), *_between(start, end, mesh, array.shape)]
    with ThreadPoolExecutor(max(1, min(len(ways), os.cpu_count() or 1))) as pool:
        direct, *others = pool.map(lambda through: _route_seconds(array, [start, *through, end], mesh), ways)
    mends = [Mend(through, direct, seconds) for through, seconds in zip(ways[1:], others, strict=True)]
    return min((way for way in mends if way.seconds < direct), key=lambda way: way.seconds, default=None)


def _between(start: Sharding, end: Sharding, mesh: Mesh, shape: tuple[int, ...]) -> list[tuple[Sharding, ...]]:
    """Candidates: toast's own route; the common axes of both; the end's axes plus the start's other axes; and vice
    versa."""
    shared = tuple(_common(a, b) for a, b in zip(start, end, strict=True))
    candidates = [waypoints(start, end, mesh.sizes, shape), (shared,), (_more(end, start),), (_more(start, end),)]
    even = [
        way
        for way in dict.fromkeys(candidates)
        if way and all(is_even(sharding, shape, mesh.sizes) for sharding in way)
    ]
    return [through for through in even if not {start, end} & {*through}]


def _common(first: tuple[int, ...], second: tuple[int, ...]) -> tuple[int, ...]:
    """The common prefix of two axis lists."""
    same = [a == b for a, b in zip(first, second, strict=False)]
    return first[: same.index(False)] if False in same else first[: len(same)]


def _more(first: Sharding, second: Sharding) -> Sharding:
    """The sharding, with the axes of the other that it does not use."""
    used = axes_of(first)
    return tuple((*a, *(axis for axis in b if axis not in used)) for a, b in zip(first, second, strict=True))


def _numbered(axes: Axes, mesh: Mesh) -> Sharding:
    return tuple(tuple(mesh.names.index(name) for name in names) for names in axes)


def _route_seconds(array: Rematerialisation, way: Sequence[Sharding], mesh: Mesh) -> float:
    """Seconds of communication per device along a route, as XLA partitions it; infinite if it fails."""
    axes = dict(zip(mesh.names, mesh.sizes, strict=True))
    moved = collectives_after_partitioning(_program(array, way, mesh).encode(), "stablehlo", axes)
    return (
        inf
        if isinstance(moved, Failure)
        else sum(each.count * seconds_on(mesh, each.kind, each.bytes, each.axes) for each in moved)
    )


def _program(array: Rematerialisation, way: Sequence[Sharding], mesh: Mesh) -> str:
    element = array.type.replace("pred", "i1").replace("s", "i") if array.type[0] in "ps" else array.type
    kind = f"tensor<{'x'.join(map(str, (*array.shape, element)))}>"
    axes = ", ".join(f'"{name}"={size}' for name, size in zip(mesh.names, mesh.sizes, strict=True))

    def written(sharding: Sharding) -> str:
        parts = ["{" + ", ".join(f'"{mesh.names[axis]}"' for axis in dim) + "}" for dim in sharding]
        return f"<@mesh, [{', '.join(parts)}]>"

    steps = "".join(
        f"  %{k} = sdy.sharding_constraint %{k - 1} {written(step)} : {kind}\n" for k, step in enumerate(way[1:], 1)
    )
    first, last = written(way[0]), written(way[-1])
    return (
        f"module attributes {{mhlo.num_partitions = {mesh.devices} : i32}} {{\n  sdy.mesh @mesh = <[{axes}]>\n"
        f"  func.func public @main(%0: {kind} {{sdy.sharding = #sdy.sharding{first}}}) -> "
        f"({kind} {{sdy.sharding = #sdy.sharding{last}}}) {{\n{steps}  return %{len(way) - 1} : {kind}\n  }}\n}}\n"
    )
