"""Chooses levers: where no plan fits in memory, or where one makes the step faster.

Enters: the best `Reading` of a program, and a search of other programs. Leaves: the best `Reading` of all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from math import inf

from toast_cli.cost.model import Cost
from toast_cli.frontend import Source
from toast_cli.levers import batch_parts, with_microbatches, with_recompute
from toast_cli.program.recomputed import recomputed_parts
from toast_cli.quantities import format_bytes
from toast_cli.readings import PARTED, Reading
from toast_cli.request import Recompute

# More microbatches are tried while twice as many need at most this share of the memory.
_WORTH_MORE = 0.98


def made_to_fit(best: Reading, search: Callable[[Source], Reading], room: float = inf) -> Reading:
    """The variant with rematerialisation, microbatches, or both that fits in memory and is best by the user's goal. If
    none fits, returns `best`, which does not fit either, with a notice that says why.

    The number of microbatches is the smallest with which the most rematerialising program fits, or twice that.

    Args:
        room: bytes that a plan may need where that is less than the memory limit: a compiler refused `best`.
    """
    source, before = best.source, best.result.cost
    reference = best.evaluator.cost(())

    def fits(one: Reading) -> bool:
        return one.result.fits and one.result.cost.peak_bytes <= room

    def first_fit(programs: list[Source], number: int) -> list[Reading]:
        """The first of these programs that fits with this number of microbatches, if any."""
        found = (_in_parts(program, number, search) for program in programs)
        return list(islice((one for one in found if isinstance(one, Reading) and fits(one)), 1))

    programs, whys = _recomputing(source)
    least = before.peak_bytes
    for number in (1, *batch_parts(source))[len(programs) == 1 :]:
        last = _in_parts(programs[-1], number, search)
        if isinstance(last, str) and len(programs) > 1:  # some programs run in parts only if nothing is recomputed
            whys.append(f"{_options(programs[-1])} {last}")
            programs, least = programs[:1], before.peak_bytes
            last = _in_parts(source, number, search)
        if isinstance(last, str):
            whys.append(last)
            break
        cost = last.result.cost
        if fits(last):
            fitting = [last, *first_fit(programs[number == 1 : -1], number), *first_fit(programs[:-1], 2 * number)]
            taken = max(fitting, key=lambda one: one.reward(one.result.plan, one.result.cost, reference))
            return _noted(taken, "made to fit", before)
        whys.append(f"it needs {format_bytes(cost.peak_bytes)} with {_options(last.source)}")
        if cost.peak_bytes > _WORTH_MORE * least or last.result.stopped == "interrupted":
            break
        least = cost.peak_bytes
    notice = f"not made to fit: {'; '.join(whys) or 'no input has a batch'}"
    return replace(best, source=replace(source, notices=(notice, *source.notices)))


def _recomputing(source: Source) -> tuple[list[Source], list[str]]:
    """The program under each rematerialisation policy, the least recomputation first; and why others are left out."""
    kinds = zip(source.program.ops, recomputed_parts(source.program), strict=True)
    already = any(part and op.kind.matrix_unit for op, part in kinds)  # then it keeps no products
    programs, whys = [source], []
    for policy in [Recompute.all] if already else Recompute:
        found = with_recompute(source, policy)
        if isinstance(found, str):
            whys.append(f"--recompute {policy}: {found}")
        else:
            programs.append(found)
    return programs, whys


def _in_parts(source: Source, number: int, search: Callable[[Source], Reading]) -> Reading | str:
    found = source if number == 1 else with_microbatches(source, number)
    return f"--microbatches {number}: {found}" if isinstance(found, str) else search(found)


def made_faster(best: Reading, search: Callable[[Source], Reading]) -> Reading:
    """The variant that keeps matrix products and recomputes cheap ops, if it fits and is faster; else `best`."""
    program = best.source.program
    if program.recompute or program.microbatches > 1:
        return best
    kinds = (with_recompute(best.source, p) for p in (Recompute.all_but_products, Recompute.all_but_weight_products))
    found = [search(one) for one in kinds if isinstance(one, Source)]
    fitting = [one for one in found if one.result.fits]
    fastest = min(fitting, key=lambda one: one.result.cost.step_seconds, default=best)
    if fastest.result.cost.step_seconds > (1.0 - PARTED) * best.result.cost.step_seconds:
        return best
    return _noted(fastest, "made faster", best.result.cost)


def _options(source: Source) -> str:
    """The command-line options that select this variant of the user's program."""
    program = source.program
    recompute = f"--recompute {program.recompute}" if program.recompute else ""
    return f"{recompute} --microbatches {program.microbatches}".strip() if program.microbatches > 1 else recompute


def _noted(reading: Reading, what: str, before: Cost) -> Reading:
    """The variant with a notice that states its gain over the best plan of the program as written."""
    cost = reading.result.cost
    slower, more = cost.step_seconds / before.step_seconds - 1.0, cost.peak_bytes - before.peak_bytes
    size = f"{'+' if more > 0 else '-'}{format_bytes(abs(more))}"
    notice = (
        f"{what}: {_options(reading.source)}: {slower:+.0%} step time, {size} per device, "
        "against the best plan as written"
    )
    return replace(reading, source=replace(reading.source, notices=(notice, *reading.source.notices)))
