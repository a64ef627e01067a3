"""Chooses the variant of a program whose plan is taken: as the user wrote it, or rewritten so that it fits in memory.

A rewrite is a rematerialisation policy and a number of microbatches, and on TPUs the offloading of residuals beside it.
`Candidates` tries rewrites in one order: the fewest microbatches first, and with as many of them the most recomputation
first. The next one tried is the first that is expected to need little enough memory, recomputes less than all that fit,
and follows none with as many microbatches that does not fit. The trials end with the number of microbatches after the
first with which one fits. Of all that fit, the best by the user's goal is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from math import inf

from toast_cli.base.errors import UsageError
from toast_cli.candidates.variants import (
    PARTED,
    Progress,
    Reading,
    SearchSpace,
    Variant,
    analysed,
    search_variants,
)
from toast_cli.frontend import Source
from toast_cli.plan.saved import saved_plan
from toast_cli.price.cost import Cost
from toast_cli.program.model import Program
from toast_cli.program.quantities import format_bytes
from toast_cli.program.roles import WEIGHTS, argument_roles
from toast_cli.program.values import is_transfer, recomputed_parts
from toast_cli.request import Effort, Fit, Offload, Recompute
from toast_cli.rewrite import batch_parts, kept_bytes, with_microbatches, with_offload, with_recompute
from toast_cli.search.run import PLANS

# Plans with which a variant is searched, at medium effort: at first (the best plan of another variant, the strategies,
# and what local search makes of the best of these); where it nearly fits; and where it is chosen.
_GLANCE, _LONGER, _LAST = 60, 500, 1500
# A variant nearly fits if it needs at most this much of the memory. It is not tried if it is expected to need more.
_NEAR = 1.1
# Offloading variants that are tried, at most.
_OFFLOADED = 3
# Where a compiler refuses a rewritten program, the next one needs at most this fraction of its predicted memory. That
# many follow, at most.
_LESS, ATTEMPTS = 0.95, 3


class Candidates:
    """The variants of a program that a run looks at, each with the best plan of its search.

    Attributes:
        rewrites: whether toast may rewrite the program. room: bytes that a variant may need. tried: variants that are
            searched, the user's own first. whys: why those that do not fit do not. interrupted: whether the user ended
            a search.
    """

    def __init__(self, variants: Sequence[Reading], space: SearchSpace, tell: Progress) -> None:
        request = space.request
        chosen = space.saved or request.microbatches or request.recompute or request.offload
        self.rewrites = request.fit != Fit.as_written and not chosen
        self._space, self._tell = space, tell
        self._own, *self._others = search_variants(variants, replace(space, gives_up=self.rewrites), tell)
        self._source, self._last = self._own.source, self._own
        self.room, self._limit = inf, inf
        self.tried, self.whys = [self._own], list[str]()
        self.interrupted = self._own.result.stopped == "interrupted"
        self._refused = set[str]()  # options of variants that a compiler refused
        self._policies = _policies(self._source.program)
        self._programs: dict[int, Source | None] = {0: self._source}  # number of a policy -> the program under it
        self._looked: dict[tuple[int, int], Variant | None] = {}  # number of a policy, of microbatches -> its variant
        # number of a policy -> number of microbatches -> cost
        self._costs: dict[int, dict[int, Cost]] = {0: {1: self._own.result.cost}}

    def best(self, decides: Callable[[Variant], bool]) -> tuple[Variant, list[Variant]]:
        """The variant that is best by prediction, and others that a compiler may prefer.

        decides: whether a compiler will say if a variant fits; the program is then not rewritten yet.
        """
        best = self._own
        if self.rewrites and not best.surely_fits and not decides(best):
            best = self._made_to_fit()
        if best.result.stopped == "hopeless":
            best = self._search(best.source, best, None)
        if self.rewrites and self._space.request.fit == Fit.fastest and best.result.fits and not _ended(best):
            best = self._made_faster(best)
        return best, self._others if options_of(best.source) == options_of(self._source) else []

    def lighter_than(self, refused: Variant) -> Variant:
        """The best variant that needs less memory than one that a compiler refused; that one, with a notice that says
        why, if there is none."""
        options = options_of(refused.source)
        self._refused.add(options)
        self._limit = min(self._limit, refused.surely_fitting_bytes)
        if options:
            self._limit = min(self._limit, _LESS * refused.result.cost.peak_bytes)
        lighter = self._made_to_fit()
        if lighter.evaluator is not self._own.evaluator:
            return lighter
        notices = tuple(dict.fromkeys((*lighter.source.notices, *refused.source.notices)))
        return replace(refused, source=replace(refused.source, notices=notices))

    def _search(self, source: Source, like: Variant, plans: int | None) -> Variant:
        """A variant's best plan: of so many with medium effort on the mesh of `like`, or of as many as the user asks
        for on all meshes. The plan of `like` is tried first."""
        space, request = self._space, self._space.request
        meshes = space.meshes
        if plans is not None:
            most, effort = request.iterations or PLANS[request.effort], PLANS[request.effort] / PLANS[Effort.medium]
            meshes, plans = [like.evaluator.problem.mesh], min(int(effort * plans), most)
            request = replace(request, iterations=plans)
        evaluator = like.evaluator if source is like.source else None
        start = saved_plan(like.evaluator.problem, like.result.plan)
        space = SearchSpace(request, meshes, space.tactics, start=start, known=evaluator)
        return search_variants([analysed(lambda: source)], space, self._tell)[0]

    def _made_to_fit(self) -> Variant:
        """The variant that fits in `_limit` and is best by the user's goal: one that surely fits, unless one that may
        not fit is much faster (see `memory_fit.RISK`). A notice states its gain, and what surely fits in its place. If
        none fits, the user's own, which does not fit either, with a notice that says why."""
        own, allowed = self._own, min(self._limit, self._own.allowed_bytes)
        if self.interrupted:
            return own
        self.room = min(allowed, own.surely_fitting_bytes)
        sure = self._fitting()
        sure += self._offloading(min((v.result.cost.step_seconds for v in sure), default=inf))
        whys = list(self.whys)
        if not sure and not self.interrupted:
            self.room = allowed
            self._fitting()
        self.room = allowed
        reference = own.evaluator.cost(())

        def reward(variant: Variant) -> float:
            return variant.reward(variant.result.plan, variant.result.cost, reference)

        open_to_choice = [v for v in self.tried if options_of(v.source) not in self._refused]
        best = max(filter(self._fits, open_to_choice), key=reward, default=None)
        if best is None or (best is own and not sure):
            verdict = "cannot be made to fit" if best is None else "cannot be made to fit for sure"
            notice = f"{verdict}: {by_reason(whys if best is own else self.whys)}"
            own = replace(own, source=replace(own.source, notices=(notice, *own.source.notices)))
            return self._as_ended(own)
        if best is not own:
            if best.result.stopped == "iterations" and not self.interrupted:
                longer = self._search(best.source, best, _LAST if len(self._space.meshes) == 1 else None)
                best = longer if self._fits(longer) else best
            best = _noted(best, "made to fit", best, own, "the best plan as written")
        if sure and not best.surely_fits:
            best = _noted(best, "surely fits", max(sure, key=reward), best, "this plan")
        return self._as_ended(best)

    def _as_ended(self, variant: Variant) -> Variant:
        """The variant, so that no further search follows it if the user ended one."""
        return replace(variant, result=replace(variant.result, stopped="interrupted")) if self.interrupted else variant

    def _fits(self, variant: Variant) -> bool:
        return variant.result.fits and variant.result.cost.peak_bytes <= self.room

    def _fitting(self) -> list[Variant]:
        """Variants that fit, after trying rewrites in the order that this file's docstring tells."""
        fit: list[Variant] = []
        lightest, least = len(self._policies), inf
        for number in self._numbers():
            is_last = bool(fit)
            for k in reversed(range(number == 1, lightest)):
                if _in_words(self._policies[k] or "", number, "") in self._refused:
                    break
                near = self._expected_bytes(k, number) <= _NEAR * self.room
                variant = self._looked_at(k, number, patient=not fit) if near and not self.interrupted else None
                if variant is not None and self._fits(variant):
                    fit, lightest = [*fit, variant], k
                elif variant is not None and fit:
                    break
                elif variant is not None:
                    peak = variant.result.cost.peak_bytes
                    if peak <= self.room:
                        self.whys.append(f"with {options_of(variant.source)} it breaks a --subject-to bound")
                        return []
                    self.whys.append(f"it needs {format_bytes(peak)} with {options_of(variant.source)}")
                    if peak >= least:  # more microbatches do not help
                        return []
                    least = peak if number > 1 else inf
                    break
            more = (self._expected_bytes(k, 2 * number) for k in range(lightest))
            if is_last or self.interrupted or (fit and min(more, default=inf) > _NEAR * self.room):
                return fit
        if not fit and isinstance(self._batch_parts, str):
            self.whys.append(f"--microbatches: {self._batch_parts}")
        elif not fit and least == inf and not any("--microbatches" in why for why in self.whys):
            needed = min(self._expected_bytes(k, number) for k in self._costs)
            self.whys.append(f"with --microbatches {number} it would need about {format_bytes(needed)}")
        return fit

    def _numbers(self) -> Iterator[int]:
        """Numbers of microbatches to try."""
        yield 1
        yield from () if isinstance(self._batch_parts, str) else self._batch_parts

    @cached_property
    def _batch_parts(self) -> Sequence[int] | str:
        return batch_parts(self._source)

    def _looked_at(self, k: int, number: int, *, patient: bool) -> Variant | None:
        """The variant under a policy with so many microbatches, after a few plans; None if there is none.

        patient: whether more plans follow if it nearly fits.
        """
        if (k, number) not in self._looked:
            self._looked[k, number] = self._glanced_at(k, number)
        variant = self._looked[k, number]
        nearly = variant is not None and not self._fits(variant) and variant.result.cost.peak_bytes <= _NEAR * self.room
        if variant is not None and nearly and patient and not self.interrupted:
            variant = self._looked[k, number] = self._searched(variant.source, variant, _LONGER) or variant
        return variant

    def _glanced_at(self, k: int, number: int) -> Variant | None:
        program = self._program(k)
        if program is None:
            return None
        variant = program if number == 1 else with_microbatches(program, number)
        if isinstance(variant, str):
            self.whys.append(f"{options_of(program)} --microbatches {number}: {variant}".strip())
            return None
        searched = self._searched(variant, self._last)
        if searched is not None:
            self._last = searched
            self._costs.setdefault(k, {})[number] = searched.result.cost
        return searched

    def _searched(self, variant: Source, like: Variant, plans: int = _GLANCE) -> Variant | None:
        """The `Variant` found with so many plans; None if what the user asks for does not apply to it."""
        try:
            searched = self._search(variant, like, plans)
        except UsageError as error:
            self.whys.append(f"{options_of(variant)}: {error.where}: {error.what}")
            return None
        self.interrupted = _ended(searched)
        self.tried.append(searched)
        return searched

    def _program(self, k: int) -> Source | None:
        policy = self._policies[k]
        if k not in self._programs and policy is not None:
            rewritten = with_recompute(self._source, policy)
            self._programs[k] = None if isinstance(rewritten, str) else rewritten
            if isinstance(rewritten, str):
                self.whys.append(f"--recompute {policy}: {rewritten}")
        return self._programs[k]

    def _expected_bytes(self, k: int, number: int) -> float:
        """About the least peak under a policy with so many microbatches. It is linear in the size of a microbatch:
        through the peaks with the last two numbers of them, or if there are none, arguments, sums of gradients and a
        part of the rest. A policy that is not searched yet needs more than those that recompute more, by its share of
        what these save; if there are none, it may need as little as any other."""
        costs = self._costs.get(k, {})
        if number in costs:
            return costs[number].peak_bytes
        if 1 not in costs:
            expected = {j: self._expected_bytes(j, number) for j, measured in self._costs.items() if 1 in measured}
            lighter = [j for j in expected if j > k]
            if not lighter:
                return 0.0 if number == 1 else min(expected.values())
            least, residual_bytes = max(expected[j] for j in lighter), self._kept
            own, few, more = (residual_bytes.get(self._policies[j], 0) for j in (0, min(lighter), k))
            share = (more - few) / (own - few) if few < more <= own else 0.0
            return least + share * max(0.0, expected[0] - expected[min(lighter)])
        split = sorted(set(costs) - {1})
        if len(split) > 1:
            (few, more), (peak, lower) = split[-2:], (costs[n].peak_bytes for n in split[-2:])
            fixed = (more * lower - few * peak) / (more - few)
            return fixed + more * (lower - fixed) / number
        return self._sums * costs[1].argument_bytes + (costs[1].peak_bytes - costs[1].argument_bytes) / number

    @cached_property
    def _kept(self) -> dict[Recompute | None, int]:
        return kept_bytes(self._source)

    @cached_property
    def _sums(self) -> float:
        """Bytes of arguments and of the sums of gradients, over those of arguments."""
        program = self._source.program
        names, roles = argument_roles(program)
        sizes = [(names[role], program.values[a.value].bytes) for a, role in zip(program.arguments, roles, strict=True)]
        weights = sum(size for name, size in sizes if name == WEIGHTS)
        return 1.0 + weights / max(1, sum(size for _, size in sizes))

    def _offloading(self, seconds: float) -> list[Variant]:
        """A variant that fits only because it offloads residuals, with a step of less than `seconds`, if there is one:
        a tried one that does not fit, those with the shortest step first."""
        mesh = self._own.evaluator.problem.mesh
        chip, devices = mesh.chip, mesh.devices
        if chip.platform != "tpu" or not chip.host_bytes_per_second or self.interrupted:
            return []
        tried = [v for v in self.tried if not self._fits(v) and v.result.cost.step_seconds < seconds]
        offloaded: list[Variant] = []
        for like in sorted(tried, key=lambda v: v.result.cost.step_seconds):
            variant = with_offload(like.source, Offload.residuals)
            if isinstance(variant, str):
                continue
            values, transfers = variant.program.values, filter(is_transfer, variant.program.ops)
            moved = sum(op.trips * values[op.results[0]].bytes for op in transfers) / devices  # where all are split
            if moved / chip.host_bytes_per_second > seconds:
                continue
            candidate = self._searched(variant, like)
            if candidate is None:
                continue
            offloaded.append(candidate)
            self.whys.append(f"it needs {format_bytes(candidate.result.cost.peak_bytes)} with {options_of(variant)}")
            if self.interrupted or len(offloaded) == _OFFLOADED:
                break
        return [v for v in offloaded if self._fits(v)]

    def _made_faster(self, best: Variant) -> Variant:
        """The variant that keeps products with weights and recomputes all else, if it fits and is faster; else `best`.
        What attention computes for each pair of tokens is so large that XLA gains nothing by keeping it."""
        program = best.source.program
        if program.recompute or program.microbatches > 1:
            return best
        variant = with_recompute(best.source, Recompute.all_but_weight_products)
        faster = best if isinstance(variant, str) else self._search(variant, best, None)
        reference = best.evaluator.cost(())
        reward, best_reward = (v.reward(v.result.plan, v.result.cost, reference) for v in (faster, best))
        return (
            _noted(faster, "made faster", faster, best, "the best plan as written")
            if reward >= best_reward + PARTED
            else best
        )


def _ended(variant: Variant) -> bool:
    """True if the user ended the search."""
    return variant.result.stopped == "interrupted"


def _policies(program: Program) -> tuple[Recompute | None, ...]:
    """The rematerialisation policies to try, the least recomputation first."""
    kinds = zip(program.ops, recomputed_parts(program), strict=True)
    already = any(part and op.kind.matrix_unit for op, part in kinds)  # the other policies would keep products
    return (None, Recompute.all) if already else (None, *Recompute)


def by_reason(whys: Iterable[str]) -> str:
    """Reasons as one text, where `--a: why` and `--b: why` are `--a, --b: why`."""
    by_why: dict[str, list[str]] = {}
    for text in whys:
        options, _, why = text.partition(": ") if text.startswith("--") else ("", "", text)
        by_why.setdefault(why, []).extend([options] if options and options not in by_why.get(why, ()) else [])
    return "; ".join(f"{', '.join(options)}: {why}" if options else why for why, options in by_why.items())


def options_of(source: Source) -> str:
    """The command-line options that select this variant of the user's program."""
    return _in_words(source.program.recompute, source.program.microbatches, source.program.offload)


def _in_words(recompute: str, microbatches: int, offload: str) -> str:
    options = {
        "--recompute": recompute,
        "--microbatches": microbatches if microbatches > 1 else "",
        "--offload": offload,
    }
    return " ".join(f"{name} {value}" for name, value in options.items() if value)


def _noted(variant: Variant, verdict: str, of: Variant, against: Variant, name: str) -> Variant:
    """The variant with a notice that states the gain of a variant (`of`) over another one."""
    cost, before = of.result.cost, against.result.cost
    slower, more = cost.step_seconds / before.step_seconds - 1.0, cost.peak_bytes - before.peak_bytes
    size = f"{'+' if more > 0 else '-'}{format_bytes(abs(more))}"
    notice = f"{verdict}: {options_of(of.source)}: {slower:+.0%} step time, {size} per device, against {name}"
    return replace(variant, source=replace(variant.source, notices=(notice, *variant.source.notices)))
