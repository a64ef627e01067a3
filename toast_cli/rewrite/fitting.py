"""Chooses program rewrites where no plan fits, or where one is faster.

In: the best `Variant` of a program, and a search of other programs. Out: the best `Variant` of all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import inf

from toast_cli.errors import UsageError
from toast_cli.frontend import Source
from toast_cli.price.cost import Cost
from toast_cli.program.model import Program
from toast_cli.program.quantities import format_bytes
from toast_cli.program.roles import WEIGHTS, argument_roles
from toast_cli.program.values import is_transfer, recomputed_parts
from toast_cli.request import Offload, Recompute
from toast_cli.rewrite import batch_parts, with_microbatches, with_offload, with_recompute
from toast_cli.rewrite.variants import PARTED, Variant

# Plans that tell about how long a variant's step is and how much memory it needs: the best plan of another variant, the
# strategies, and what local search makes of the best of these.
GLANCE = 60
# A variant that needs at most this much of the memory at a glance is searched with so many plans.
_NEAR, _LONGER = 1.1, 500
# Plans with which the chosen variant is searched, at most. They begin at a good one.
LAST = 1500
# A variant is left out where it would need more of the memory than this if microbatches divided all but arguments and
# sums of gradients.
_HOPELESS = 1.1
# More microbatches are tried while twice as many need at most this share of the memory.
_WORTH_MORE = 0.98

# Offloading variants that are tried, at most.
_OFFLOADED = 3

# Searches a variant of the program from the plan of another one: at most so many plans, or to the end.
Search = Callable[[Source, Variant, int | None], Variant]


def made_to_fit(best: Variant, search: Search, room: float = inf, last: int | None = LAST) -> Variant:
    """The variant with rematerialisation, microbatches, offloading, several of these or none, that fits in memory and
    is best by the user's goal: one that surely fits, unless one that may not fit is much faster (see
    `memory_fit.RISK`). A notice states its gain, and what surely fits in its place. If none fits, returns `best`, which
    does not fit either, with a notice that says why.

    Args:
        room: bytes that a plan may need where that is less than the memory limit: a compiler refused `best`.
        last: plans with which the chosen variant is searched, at most; None: as many as the program as written.
    """
    if best.result.stopped == "interrupted":
        return best
    refused, room = room < inf, min(room, best.allowed_bytes)  # a compiler refused `best`, whatever is predicted
    trials = _Trials(best, search, min(room, best.surely_fitting_bytes))
    sure = trials.fitting()
    sure += trials.offloading(min((one.result.cost.step_seconds for one in sure), default=inf))
    whys = list(trials.whys)
    if not sure and not trials.interrupted:
        trials.room = room
        trials.fitting()
    trials.room = room
    reference = best.evaluator.cost(())

    def reward(one: Variant) -> float:
        return one.reward(one.result.plan, one.result.cost, reference)

    taken = max(filter(trials.fits, trials.tried[refused:]), key=reward, default=None)
    if taken is None or (taken is best and not sure):
        what = "cannot be made to fit" if taken is None else "cannot be made to fit for sure"
        notice = f"{what}: {'; '.join(dict.fromkeys(whys if taken is best else trials.whys))}"
        best = replace(best, source=replace(best.source, notices=(notice, *best.source.notices)))
        return _interrupted(best) if trials.interrupted else best
    if taken is not best:
        if taken.result.stopped == "iterations" and not trials.interrupted:
            whole = search(taken.source, taken, last)
            taken = whole if trials.fits(whole) else taken
        taken = _noted(taken, "made to fit", taken, best, "the best plan as written")
    if sure and not taken.surely_fits:
        taken = _noted(taken, "surely fits", max(sure, key=reward), taken, "this plan")
    return _interrupted(taken) if trials.interrupted else taken


def _interrupted(variant: Variant) -> Variant:
    """The variant, so that no further search follows it."""
    return replace(variant, result=replace(variant.result, stopped="interrupted"))


class _Trials:
    """Tries variants of a program: one of the rematerialisation policies and a number of microbatches.

    Attributes:
        room: bytes that a variant may need. tried: variants so far. whys: why those that do not fit do not.
        interrupted: whether the user ended it.
    """

    def __init__(self, best: Variant, search: Search, room: float) -> None:
        self._source, self._search, self._last = best.source, search, best
        self.room, self.tried = room, [best]
        self.whys: list[str] = []
        self.interrupted = False
        self._looked: dict[tuple[int, int], Variant | None] = {}  # number of a policy, of microbatches -> its variant
        self._programs: dict[int, Source | None] = {0: best.source}  # number of a policy -> the program under it
        self._costs: dict[int, Cost] = {0: best.result.cost}  # number of a policy -> cost without microbatches
        program = best.source.program
        self._policies = _policies(program)
        names, roles = argument_roles(program)
        sizes = [
            (names[role], program.values[it.value].bytes) for it, role in zip(program.arguments, roles, strict=True)
        ]
        weights = sum(size for name, size in sizes if name == WEIGHTS)
        self._sums = 1.0 + weights / max(1, sum(size for _, size in sizes))  # arguments and gradients, over arguments

    def fits(self, one: Variant) -> bool:
        return one.result.fits and one.result.cost.peak_bytes <= self.room

    def fitting(self) -> list[Variant]:
        """Variants that fit: with the fewest microbatches with which any does, and with the next number of them those
        that recompute less."""
        parts, least = batch_parts(self._source), inf
        numbers = (1,) if isinstance(parts, str) else (1, *parts)
        for before, number, following in zip((1, *numbers), numbers, (*numbers[1:], None), strict=False):
            one = self._of_least_memory(number)
            if one is not None and self.fits(one[1]):
                return self._faster(one, number, following)
            if one is None:
                continue
            peak, ratio = one[1].result.cost.peak_bytes, number / before
            if peak <= self.room:
                self.whys.append(f"with {options_of(one[1].source)} it breaks a --subject-to bound")
                return []
            self.whys.append(f"it needs {format_bytes(peak)} with {options_of(one[1].source)}")
            at_best = (ratio * peak - least) / (ratio - 1) if least < inf else 0.0  # linear in the size of a part
            if self.interrupted or peak > _WORTH_MORE * least or at_best > _NEAR * self.room:
                return []
            least = peak if number > 1 else inf
        if isinstance(parts, str):
            self.whys.append(f"--microbatches: {parts}")
        elif least == inf and not any("--microbatches" in why for why in self.whys):
            needed = min(self._expected_bytes(k, numbers[-1]) for k in self._costs)
            self.whys.append(f"with --microbatches {numbers[-1]} it would need about {format_bytes(needed)}")
        return []

    def _of_least_memory(self, number: int) -> tuple[int, Variant] | None:
        """The policy that needs least memory with so many microbatches, and its variant; None if none is near."""
        policies = [k for k in range(len(self._policies)) if number > 1 or k]
        for k in sorted(policies, key=lambda k: (k not in self._costs, self._expected_bytes(k, number), -k)):
            if self._expected_bytes(k, number) <= _HOPELESS * self.room:
                one = self._looked_at(k, number)
                if one is None:
                    continue
                near = one.result.cost.peak_bytes <= _NEAR * self.room
                if near and not self.fits(one) and not self.interrupted:
                    one = self._looked[k, number] = self._searched(one.source, one, _LONGER) or one
                return k, one
        return None

    def _faster(self, first: tuple[int, Variant], number: int, following: int | None) -> list[Variant]:
        """The variants that fit, where `first` is the first that does: also those with as many microbatches that
        recompute less, down to the first that does not fit, and those with the next number of microbatches that
        recompute still less, from the first that is not slower."""
        found = [first[1]]
        lightest = first[0]
        for k in range(first[0] - 1, -1 if number > 1 else 0, -1):
            one = None if self.interrupted else self._looked_at(k, number)
            if one is not None and not self.fits(one):
                break
            if one is not None:
                found, lightest = [*found, one], k
        for k in range(lightest) if following else ():
            one = None if self.interrupted else self._looked_at(k, following or number)
            if one is not None and one.result.cost.step_seconds >= min(it.result.cost.step_seconds for it in found):
                break
            if one is not None and self.fits(one):
                return [*found, one]
        return found

    def _looked_at(self, k: int, number: int) -> Variant | None:
        """The variant under a policy with so many microbatches, after a few plans; None if there is none."""
        if (k, number) not in self._looked:
            self._looked[k, number] = self._glanced_at(k, number)
        return self._looked[k, number]

    def _glanced_at(self, k: int, number: int) -> Variant | None:
        program = self._program(k)
        if program is None:
            return None
        variant = program if number == 1 else with_microbatches(program, number)
        if isinstance(variant, str):
            self.whys.append(f"{options_of(program)} --microbatches {number}: {variant}".strip())
            return None
        one = self._searched(variant, self._last)
        if one is not None:
            self._last = one
            if number == 1:
                self._costs[k] = one.result.cost
        return one

    def _searched(self, variant: Source, like: Variant, plans: int = GLANCE) -> Variant | None:
        """The `Variant` found with so many plans; None if what the user asks for does not apply to it."""
        try:
            one = self._search(variant, like, plans)
        except UsageError as error:
            self.whys.append(f"{options_of(variant)}: {error.where}: {error.what}")
            return None
        self.interrupted = one.result.stopped == "interrupted"
        self.tried.append(one)
        return one

    def offloading(self, seconds: float) -> list[Variant]:
        """A variant that fits only because it offloads residuals, with a step of less than `seconds`, if there is one:
        a tried one that does not fit, those with the shortest step first."""
        chip = self._last.evaluator.problem.mesh.chip
        if chip.platform != "tpu" or not chip.host_bytes_per_second or self.interrupted:
            return []
        tried = [one for one in self.tried if not self.fits(one) and one.result.cost.step_seconds < seconds]
        found: list[Variant] = []
        for like in sorted(tried, key=lambda one: one.result.cost.step_seconds):
            variant = with_offload(like.source, Offload.residuals)
            if isinstance(variant, str) or self._least_transfer_seconds(variant) > seconds:
                continue
            one = self._searched(variant, like)
            if one is None:
                continue
            found.append(one)
            self.whys.append(f"it needs {format_bytes(one.result.cost.peak_bytes)} with {options_of(variant)}")
            if self.interrupted or len(found) == _OFFLOADED:
                break
        return [one for one in found if self.fits(one)]

    def _least_transfer_seconds(self, source: Source) -> float:
        """Seconds of a program's transfers where all arrays are split over all devices."""
        program, mesh = source.program, self._last.evaluator.problem.mesh
        moved = sum(op.trips * program.values[op.results[0]].bytes for op in program.ops if is_transfer(op))
        return moved / mesh.devices / mesh.chip.host_bytes_per_second

    def _program(self, k: int) -> Source | None:
        policy = self._policies[k]
        if k not in self._programs and policy is not None:
            made = with_recompute(self._source, policy)
            self._programs[k] = None if isinstance(made, str) else made
            if isinstance(made, str):
                self.whys.append(f"--recompute {policy}: {made}")
        return self._programs[k]

    def _expected_bytes(self, k: int, parts: int) -> float:
        """About the least peak under a policy with so many microbatches: arguments, the sums of gradients, and a part
        of the rest. A policy that is not searched yet may need as little as any other."""
        if k not in self._costs:
            return 0.0 if parts == 1 else min(self._expected_bytes(known, parts) for known in self._costs)
        arguments, peak = self._costs[k].argument_bytes, self._costs[k].peak_bytes
        return peak if parts == 1 else self._sums * arguments + (peak - arguments) / parts


def _policies(program: Program) -> tuple[Recompute | None, ...]:
    """The rematerialisation policies to try, the least recomputation first."""
    kinds = zip(program.ops, recomputed_parts(program), strict=True)
    already = any(part and op.kind.matrix_unit for op, part in kinds)  # the other policies would keep products
    return (None, Recompute.all) if already else (None, *Recompute)


def made_faster(best: Variant, search: Search) -> Variant:
    """The variant that keeps products with weights and recomputes all else, if it fits and is faster; else `best`. What
    attention computes for each pair of tokens is so large that XLA gains nothing by keeping it."""
    program = best.source.program
    if program.recompute or program.microbatches > 1:
        return best
    variant = with_recompute(best.source, Recompute.all_but_weight_products)
    found = best if isinstance(variant, str) else search(variant, best, None)
    reference = best.evaluator.cost(())
    worth, known = (one.reward(one.result.plan, one.result.cost, reference) for one in (found, best))
    return _noted(found, "made faster", found, best, "the best plan as written") if worth >= known + PARTED else best


def options_of(source: Source) -> str:
    """The command-line options that select this variant of the user's program."""
    program = source.program
    options = {
        "--recompute": program.recompute,
        "--microbatches": program.microbatches if program.microbatches > 1 else "",
        "--offload": program.offload,
    }
    return " ".join(f"{name} {value}" for name, value in options.items() if value)


def _noted(variant: Variant, what: str, of: Variant, against: Variant, name: str) -> Variant:
    """The variant with a notice that states the gain of a variant (`of`) over another one."""
    cost, before = of.result.cost, against.result.cost
    slower, more = cost.step_seconds / before.step_seconds - 1.0, cost.peak_bytes - before.peak_bytes
    size = f"{'+' if more > 0 else '-'}{format_bytes(abs(more))}"
    notice = f"{what}: {options_of(of.source)}: {slower:+.0%} step time, {size} per device, against {name}"
    return replace(variant, source=replace(variant.source, notices=(notice, *variant.source.notices)))
