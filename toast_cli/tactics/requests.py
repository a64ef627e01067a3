"""Parses the tactics that users request (`--tactic fsdp:data`, `--strategy 'fsdp x megatron'`) into fixed decisions.

Decisions of tactics are fixed: they come first in every plan, and no search undoes them. The search completes the plan
on all axes, or only on AXIS with `search:AXIS`; a strategy leaves nothing to search. A strategy without axes gets its
best ones.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from toast_cli.errors import UsageError
from toast_cli.evaluate.evaluator import Evaluator
from toast_cli.plan.problem import Problem
from toast_cli.tactics.assignments import best_plan, plans_by_axes
from toast_cli.tactics.files import find_in_file
from toast_cli.tactics.model import Tactic
from toast_cli.tactics.named import SEARCH, find_tactic
from toast_cli.tactics.placing import TacticRequest, compose, place

_REQUEST = re.compile(r"(?:(?P<file>.+\.(?:ya?ml|py)):)?(?P<name>[^:]+?)(?::(?P<axes>[^:]*))?")
_PARTS = re.compile(r"\s*\+\s*|\s+[x×]\s+")
_SEARCH_IT = Tactic(SEARCH, "what the search finds", lambda look: ())


@dataclass(frozen=True)
class TacticRequests:
    """The requests of `--tactic` and `--strategy`. complete: nothing is left to the search."""

    requests: tuple[TacticRequest, ...] = ()
    complete: bool = False

    def check_axes(self, meshes: Sequence[Sequence[str]]) -> None:
        """Raises UsageError unless some mesh (given by its axis names) has all requested axes."""
        named = {axis: request for request in self.requests for axis in request.axes or ()}
        known = list(dict.fromkeys(name for names in meshes for name in names))
        for axis, request in named.items():
            if axis not in known:
                raise UsageError(
                    f"unknown mesh axis {axis!r} in {request.text!r}",
                    where=request.option,
                    hint=f"this mesh has {', '.join(known)}",
                )
        if not any(set(named) <= set(names) for names in meshes):
            raise UsageError(f"no mesh shape has all of {', '.join(named)}", where="--mesh-shape")

    def suit(self, names: Sequence[str]) -> bool:
        """Whether a mesh with these axes has all requested ones."""
        return all(axis in names for request in self.requests for axis in request.axes or ())

    def state(self, problem: Problem, like: Evaluator | None = None) -> Problem:
        """The problem with the decisions of the tactics fixed. like: see `Evaluator`.

        Raises UsageError for a tactic that does not apply, and says why.
        """
        if not self.requests:
            return problem
        if self.complete:
            fixed = best_plan(problem, plans_by_axes(problem, self.requests), like)
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
    requests = tuple(_request(text, "--strategy") for text in parts_of(strategy))
    if any(request.is_search for request in requests):
        raise UsageError(
            "a strategy leaves nothing to the search", where="--strategy", hint="give --tactic search:AXIS"
        )
    return TacticRequests(requests, complete=True)


def parts_of(strategy: str) -> list[str]:
    """The tactics that a strategy names: `fsdp:data+megatron:model`."""
    return _PARTS.split(strategy.strip())


def file_of(text: str) -> str | None:
    """The file that one tactic of `--tactic` or `--strategy` comes from; None for a built-in tactic."""
    matched = _REQUEST.fullmatch(text.strip())
    return None if matched is None else matched["file"]


def _request(text: str, option: str) -> TacticRequest:
    matched = _REQUEST.fullmatch(text.strip())
    if matched is None:
        raise UsageError(f"cannot read {text!r}", where=option, hint="write NAME:AXIS, e.g. fsdp:data")
    name, axes = matched["name"].strip(), matched["axes"]
    if matched["file"]:
        tactic = find_in_file(matched["file"], name)
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
