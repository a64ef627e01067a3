"""Tactics that users request (`--tactic fsdp:data`, `--strategy 'fsdp x megatron'`, their own in files), as fixed
decisions on mesh axes.

Decisions of tactics are fixed: they come first in every plan, and no search undoes them. The search completes the plan
on all axes, or only on AXIS with `search:AXIS`; a strategy leaves nothing to search. A strategy without axes gets its
best ones.
"""

from __future__ import annotations

import re
import runpy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import inf, prod

from toast_cli.base.errors import InputError, ToastError, UsageError
from toast_cli.base.files import TEXT_BYTES, read_file, text_of
from toast_cli.base.yamltree import YamlValue, nearest, read_yaml
from toast_cli.hardware.model import Axis, Mesh
from toast_cli.plan.decisions import Decision, Plan, Replicate, Shard
from toast_cli.plan.problem import Problem
from toast_cli.plan.saved import unmirrored
from toast_cli.price.cost import Cost
from toast_cli.price.evaluator import Evaluator
from toast_cli.tactics.model import SEARCH, Decide, DoesNotApply, Look, Tactic, effective, find_tactic

_REQUEST = re.compile(r"(?:(?P<file>.+\.(?:ya?ml|py)):)?(?P<name>[^:]+?)(?::(?P<axes>[^:]*))?")
_PARTS = re.compile(r"\s*\+\s*|\s+[x×]\s+")
_SEARCH_IT = Tactic(SEARCH, "what the search finds", lambda look: ())


@dataclass(frozen=True)
class TacticRequests:
    """The requests of `--tactic` and `--strategy`. complete: nothing is left to the search."""

    requests: tuple[TacticRequest, ...] = ()
    complete: bool = False

    @property
    def axes(self) -> dict[str, TacticRequest]:
        """Mesh axes that the user names -> the tactic."""
        return {axis: request for request in self.requests for axis in request.axes or ()}

    def check_axes(self, meshes: Sequence[Sequence[str]]) -> None:
        """Raises UsageError unless some mesh (given by its axis names) has all requested axes."""
        named = self.axes
        axis_names = list(dict.fromkeys(name for names in meshes for name in names))
        for axis, request in named.items():
            if axis not in axis_names:
                raise UsageError(
                    f"unknown mesh axis {axis!r} in {request.text!r}",
                    where=request.option,
                    hint=f"this mesh has {', '.join(axis_names)}",
                )
        if not any(set(named) <= set(names) for names in meshes):
            raise UsageError(f"no mesh shape has all of {', '.join(named)}", where="--mesh-shape")

    def suit(self, names: Sequence[str]) -> bool:
        """Whether a mesh with these axes has all requested ones."""
        return self.axes.keys() <= set(names)

    def state(self, problem: Problem) -> Problem:
        """The problem with the decisions of the tactics fixed.

        Raises UsageError for a tactic that does not apply, and says why.
        """
        if not self.requests:
            return problem
        if self.complete:
            plans = plans_by_axes(problem, self.requests)
            fixed = (
                next(iter(plans.values())) if len(plans) == 1 else best_assignment(Evaluator(problem), "", plans).plan
            )
        else:
            fixed = problem.canonical(compose(problem, place(self.requests, problem.mesh)))
        open_axes = {axis for request in self.requests if request.is_search for axis in request.axes or ()}
        closed = frozenset(
            k for k, name in enumerate(problem.mesh.names) if self.complete or (open_axes and name not in open_axes)
        )
        return replace(problem, fixed=fixed, closed=closed)


def parse_tactics(tactics: Sequence[str] = (), strategy: str | None = None) -> TacticRequests:
    """The requests of the options. Raises ToastError for unknown names and files."""
    if strategy is None:
        return TacticRequests(tuple(_request(text, "--tactic") for text in tactics))
    if tactics:
        raise UsageError("--strategy is a whole plan", where="--tactic", hint="give --tactic or --strategy")
    if strategy.strip() == "pipeline":
        raise UsageError("a pipeline is priced beside a plan", where="--strategy", hint="give --pipeline STAGES")
    requests = tuple(_request(text, "--strategy") for text in _PARTS.split(strategy.strip()))
    if any(request.is_search for request in requests):
        raise UsageError(
            "a strategy leaves nothing to the search", where="--strategy", hint="give --tactic search:AXIS"
        )
    return TacticRequests(requests, complete=True)


def _request(text: str, option: str) -> TacticRequest:
    matched = _REQUEST.fullmatch(text.strip())
    if matched is None:
        raise UsageError(f"cannot read {text!r}", where=option, hint="write NAME:AXIS, e.g. fsdp:data")
    name, axes = matched["name"].strip(), matched["axes"]
    if matched["file"]:
        tactics = read_tactics(matched["file"])
        if name not in tactics:
            raise InputError(f"has no tactic {name!r}", where=matched["file"], hint=nearest(name, tactics))
        tactic = tactics[name]
    else:
        tactic = _SEARCH_IT if name == SEARCH else find_tactic(name, option)
    names = None if axes is None else tuple(part.strip() for part in axes.split(","))
    if names is not None and ("" in names or len(set(names)) < len(names)):
        raise UsageError(
            f"cannot read the axes of {text!r}", where=option, hint="write e.g. fsdp:data or fsdp:data,model"
        )
    if tactic is _SEARCH_IT and names is None:
        raise UsageError("search takes the axes it may use", where=option, hint="write e.g. search:model")
    return TacticRequest(tactic, names, text.strip(), option)


# ---------------------------------------------------------------- placing on axes
_HINT = "`toast tactics PROGRAM --mesh SPEC` shows what applies, and why not"


@dataclass(frozen=True)
class TacticRequest:
    """A requested tactic, and the names of its mesh axes; None where the user left them out."""

    tactic: Tactic
    axes: tuple[str, ...] | None
    text: str
    option: str

    @property
    def is_search(self) -> bool:
        return self.tactic.name == SEARCH


Placed = tuple[tuple[TacticRequest, tuple[int, ...]], ...]  # each request and its axes (numbers)


def needs_axes(requests: Sequence[TacticRequest]) -> list[int]:
    """Indices of the requests without axes, except companions, which take the axes of the preceding request."""
    return [k for k, request in enumerate(requests) if request.axes is None and not (request.tactic.companion and k)]


def fastest_first(mesh: Mesh, axes: Iterable[int]) -> tuple[int, ...]:
    """The axes by their slowest link. The first communicates most: a sum over several shrinks on each for the next."""
    return tuple(sorted(axes, key=lambda a: -min([link.bytes_per_second for link in mesh.axes[a].links], default=inf)))


def place(requests: Sequence[TacticRequest], mesh: Mesh, shares: Mapping[int, tuple[int, ...]] | None = None) -> Placed:
    """Each request and its axes (numbers), the fastest first.

    Args:
        shares: index of a request -> its axes. By default, the first request without axes takes the remaining axes,
            except the last ones, of which each later request takes one.
    """
    names, shares = mesh.names, shares or {}
    axes: list[tuple[int, ...] | None] = [
        None if request.axes is None else fastest_first(mesh, map(names.index, request.axes)) for request in requests
    ]
    axes = [shares.get(k, share) for k, share in enumerate(axes)]
    own = [k for k in needs_axes(requests) if axes[k] is None]
    left = [a for a in range(len(names)) if not any(own_axes and a in own_axes for own_axes in axes)]
    if len(own) > len(left):
        request = requests[own[len(left)]]
        raise UsageError(
            f"{request.text!r} has no mesh axis left: the mesh has {', '.join(names)}", where=request.option,
            hint=f"say which, e.g. {request.text}:{names[-1]}",
        )  # fmt: skip
    first = len(left) - len(own) + 1
    for order, k in enumerate(own):
        axes[k] = fastest_first(mesh, left[:first]) if order == 0 else (left[first + order - 1],)
    placed: list[tuple[TacticRequest, tuple[int, ...]]] = []
    for k, request in enumerate(requests):
        own_axes = axes[k]
        placed.append((request, placed[k - 1][1] if own_axes is None else own_axes))
    return tuple(placed)


def compose(problem: Problem, placed: Placed) -> Plan:
    """The combined decisions of the requests, in order of priority. Raises UsageError for one that does not apply."""
    batch = {k for k, group in enumerate(problem.dimensions.groups) if group.role == "batch"}
    looks = [Look(problem, tuple(a for a in axes if problem.mesh.sizes[a] > 1)) for _, axes in placed]
    busy: set[int] = set()
    for (request, _), look in zip(placed, looks, strict=True):
        if request.tactic.place >= 0:
            busy.update(d.axis for d in _decided(request, look) if isinstance(d, Shard) and d.group in batch)
    parts: list[tuple[int, list[Decision]]] = []
    for (request, _), look in zip(placed, looks, strict=True):
        parts.append((request.tactic.place, _decided(request, replace(look, busy=frozenset(busy)))))
    ordered = [decision for _, decisions in sorted(parts, key=lambda part: part[0]) for decision in decisions]
    plan = effective(problem, tuple(ordered))
    if not plan and prod(problem.mesh.sizes) > 1 and any(not request.is_search for request, _ in placed):
        text = ", ".join(request.text for request, _ in placed)
        raise UsageError(f"{text}: nothing in the program changes by it", where=placed[0][0].option, hint=_HINT)
    return plan


def _decided(request: TacticRequest, look: Look) -> list[Decision]:
    if not look.axes:
        return []
    try:
        return list(request.tactic.decide(look))
    except DoesNotApply as why:
        raise UsageError(f"{request.tactic.name} does not apply: {why}", where=request.option, hint=_HINT) from None


# ---------------------------------------------------------------- choosing the axes
# A strategy with all its axes, as `--strategy` takes it (`fsdp:gpu,node`; empty: as without axes) -> plan.
PlansByAxes = dict[str, Plan]


@dataclass(frozen=True)
class PricedStrategy:
    """A strategy on its best axes: plans that fit in memory come first, then the fastest wins.

    Attributes:
        axes: see `PlansByAxes`.
        mesh: the mesh of the plan.
    """

    name: str
    axes: str
    plan: Plan
    cost: Cost
    mesh: Mesh

    @property
    def label(self) -> str:
        """Its name in tables."""
        return self.axes or self.name

    @property
    def fits(self) -> bool:
        return self.cost.peak_bytes <= self.mesh.limit_bytes

    @property
    def rank(self) -> tuple[bool, float]:
        """Smaller is better."""
        return not self.fits, self.cost.step_seconds


def best_assignment(evaluator: Evaluator, name: str, plans: PlansByAxes) -> PricedStrategy:
    """The best of a strategy's plans, at least one; of equal ones, the first."""
    mesh, axes = evaluator.problem.mesh, {plan: text for text, plan in plans.items()}

    def priced(plan: Plan, cost: Cost) -> PricedStrategy:
        return PricedStrategy(name, axes[plan], plan, cost, mesh)

    return priced(*evaluator.best(axes, lambda plan, cost: priced(plan, cost).rank))


def plans_by_axes(problem: Problem, requests: Sequence[TacticRequest]) -> PlansByAxes:
    """The plans of a strategy, each once: first that on all axes as tactics take them in the mesh's order.

    Raises UsageError where it applies to no axes, with the reason for the first assignment.
    """
    if problem.mirrored is not None:  # strategies do not depend on un-mirrored groups
        alike, parts = problem.mirrored
        return {
            text: problem.canonical(unmirrored(plan, parts)) for text, plan in plans_by_axes(alike, requests).items()
        }
    plans: PlansByAxes = {}
    why: UsageError | None = None
    for number, placed in enumerate(assignments(problem, requests)):
        try:
            plan = compose(problem, placed)
        except UsageError as error:
            why = why or error
            continue
        narrow = _narrowed(problem, placed, plan)
        named = {_text(problem, placed) if number else "": plan}
        if narrow != placed:
            named[_text(problem, narrow)] = compose(problem, narrow)
        for text, each in named.items():
            plan = problem.canonical(each)
            if plan not in plans.values():
                plans[text] = plan
    if not plans and why is not None:
        raise why
    return plans


def assignments(problem: Problem, requests: Sequence[TacticRequest]) -> Iterator[Placed]:
    """Every way to distribute the mesh's axes over the tactics that have none: all axes, at least one for each tactic.

    A tactic takes its axes the fastest first, then in the user's order or the largest first. A companion takes them in
    the same order or the other way round: an all-to-all alone moves the last axis of a dimension (from tokens to
    experts), others need a permute too. Equal axes are permuted only if the program or the user names axes.
    """
    mesh, names = problem.mesh, problem.mesh.names
    given = {name for request in requests for name in request.axes or ()}
    free = [a for a, axis in enumerate(mesh.axes) if axis.size > 1 and axis.name not in given]
    own = needs_axes(requests)
    companions = [k for k, request in enumerate(requests) if k - 1 in own and request.axes is None and k not in own]
    if len(own) > len(free):
        yield place(requests, mesh)
        return
    seen: set[object] = set()
    ways = product((True, False), (False, True), product(own, repeat=len(free)) if own else [()])
    for fastest, turned, owners in ways:
        if set(owners) != set(own):
            continue
        shares: dict[int, tuple[int, ...]] = {}
        for k, request in enumerate(requests):
            if request.axes is not None:
                shares[k] = tuple(map(names.index, request.axes))
            elif k in own:
                share = (a for a, owner in zip(free, owners, strict=True) if owner == k)
                shares[k] = tuple(sorted(share, key=lambda a: 0 if fastest else -mesh.sizes[a]))
            if fastest and k in shares:
                shares[k] = fastest_first(mesh, shares[k])
        shares |= {k: shares[k - 1][::-1] for k in companions if turned and len(shares[k - 1]) > 1}
        key = tuple(
            tuple(names[a] if problem.names_axes else _kind(mesh.axes[a]) for a in share) for share in shares.values()
        )
        if key not in seen:
            seen.add(key)
            yield place(requests, mesh, shares)


def _narrowed(problem: Problem, placed: Placed, plan: Plan) -> Placed:
    """The tactics that split the batch, on those of the axes left to them that split it in this plan: FSDP then keeps
    weights whole over an axis for which the batch is too small."""
    groups = problem.dimensions.groups
    filled = {d.axis for d in plan if isinstance(d, Shard) and groups[d.group].role == "batch"}
    return tuple(
        (request, tuple(a for a in axes if a in filled) if request.axes is None and filled & {*axes} else axes)
        for request, axes in placed
    )


def _kind(axis: Axis) -> object:
    """A key that is equal for interchangeable axes."""
    return axis.size, tuple((k.kind, k.size, k.bytes_per_second, k.latency_seconds, k.stride) for k in axis.links)


def _text(problem: Problem, placed: Placed) -> str:
    """The assignment as text, such as `fsdp:gpu,node + expert`; a companion takes the axes of the tactic before it."""
    parts: list[str] = []
    before: tuple[int, ...] | None = None
    for request, axes in placed:
        over = ",".join(problem.mesh.names[a] for a in axes)
        parts.append(request.text if request.axes is not None or axes == before else f"{request.text}:{over}")
        before = axes
    return " + ".join(parts)


# ---------------------------------------------------------------- tactics in files
# A Python file is run when the user names it, and only then.

_PLACES = {"first": -1, "given": 0, "last": 1}
_STEPS = ("split", "keep", "use")


def read_tactics(path: str) -> dict[str, Tactic]:
    """The tactics of a file, by name. Raises ToastError with the line that cannot be read."""
    text = text_of(read_file(path, TEXT_BYTES), path, InputError)
    return _from_python(path) if path.endswith(".py") else _from_yaml(text, path)


def _from_yaml(text: str, path: str) -> dict[str, Tactic]:
    if not text.strip():
        raise InputError("is empty", where=path, hint="see docs/howto/tactics.md for what belongs in it")
    top = read_yaml(text, path).section("tactics")
    if "tactics" not in top:
        raise InputError("has no tactics", where=path, hint="write them under the key tactics")
    return {name: _read_tactic(name, entry, path) for name, entry in top["tactics"].mapping().items()}


def _read_tactic(name: str, entry: YamlValue, path: str) -> Tactic:
    """A tactic from its entry: `steps` alone, or a mapping with `about`, `place` and `steps`."""
    if entry.is_sequence:
        return Tactic(name, "", _decided_by_steps(entry), source=path)
    keys = entry.section("about", "place", "steps")
    if "steps" not in keys:
        raise entry.error(f"{name} has no steps", "list them: split, keep or use")
    place = _PLACES[keys["place"].choice(_PLACES)] if "place" in keys else 0
    about = keys["about"].scalar("one line of text") if "about" in keys else ""
    return Tactic(name, about, _decided_by_steps(keys["steps"]), place, source=path)


def _decided_by_steps(steps: YamlValue) -> Decide:
    """The function that a list of steps stands for.

    Unknown words raise an error only when it runs on a program, since they may name its dimensions.
    """
    read: list[tuple[str, list[str], YamlValue]] = []
    for step in steps.items():
        keys = step.section(*_STEPS)
        if len(keys) != 1:
            raise step.error(f"a step has {len(keys)} keys", "one of split, keep, use each")
        ((kind, words),) = keys.items()
        read.append((kind, [word.scalar("a name") for word in words.items()], step))

    def decide(look: Look) -> list[Decision]:
        decisions: list[Decision] = []
        for kind, words, step in read:
            try:
                decisions += {"split": look.split, "keep": look.keep, "use": look.use}[kind](*words)
            except ToastError as error:
                raise step.error(error.what, error.hint) from None
        return decisions

    return decide


def _from_python(path: str) -> dict[str, Tactic]:
    try:
        values = runpy.run_path(path)
    except ToastError:
        raise
    except (Exception, SystemExit) as error:
        where = f"{path}:{error.lineno}" if isinstance(error, SyntaxError) else path
        raise InputError(f"cannot be run: {type(error).__name__}: {error}", where=where) from None
    tactics = {
        value.name: _guarded(value, path) for value in values.values() if isinstance(value, Tactic) and not value.source
    }
    if not tactics:
        raise InputError(
            "defines no tactics",
            where=path,
            hint='e.g. mine = Tactic("mine", "what it does", lambda look: look.split("batch"))',
        )
    return tactics


def _guarded(tactic: Tactic, path: str) -> Tactic:
    """The same tactic, whose exceptions are reported as errors in the file."""

    def decide(look: Look) -> list[Decision]:
        try:
            decisions = list(tactic.decide(look))
        except (ToastError, DoesNotApply):
            raise
        except (Exception, SystemExit) as error:
            raise InputError(f"tactic {tactic.name!r} failed: {type(error).__name__}: {error}", where=path) from None
        wrong = next((d for d in decisions if not isinstance(d, Shard | Replicate)), None)
        if wrong is not None:
            raise InputError(
                f"tactic {tactic.name!r} decided {wrong!r}",
                where=path,
                hint="return what look.split and look.keep give",
            )
        return decisions

    return Tactic(tactic.name, tactic.about, decide, tactic.place, tactic.companion, path)
