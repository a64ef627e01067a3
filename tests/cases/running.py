"""Plans, writes, compiles and runs a situation; what is wrong with the outcome, in sentences."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from copy import copy
from dataclasses import replace
from functools import cache, cached_property, lru_cache
from math import prod
from pathlib import Path
from typing import Any

from emitted import shardy_annotations
from programs import evaluator_of, round_mesh

from cases import SITUATIONS
from cases.model import Situation
from toast_cli import xla
from toast_cli.ask_xla.collectives import partitioned_collectives
from toast_cli.ask_xla.compile import Dialect, as_stablehlo
from toast_cli.ask_xla.numbers import (
    Runs,
    for_cpu,
    input_sets,
    narrowest_float,
    new_versions,
    own_devices,
    result_errors,
    result_types,
    shake,
    type_name,
)
from toast_cli.ask_xla.verdict import compare_traffic
from toast_cli.emit import write
from toast_cli.emit.hlo import with_dense_products
from toast_cli.emit.misread import ops_in_regions
from toast_cli.emit.regions.rules import RULES
from toast_cli.emit.shardy import Undo, write_shardy
from toast_cli.frontend.source import Source
from toast_cli.plan.decisions import Plan
from toast_cli.plan.partitioned import PartitionedProgram
from toast_cli.program.ops import BARRIER, BLOCK_SCALED_DOT
from toast_cli.report.build import build_report
from toast_cli.report.html.pages import run_page
from toast_cli.report.html.pictures import pictures
from toast_cli.report.model import Report
from toast_cli.report.step import trace
from toast_cli.search.run import Settings, run_search

FORMS = ("stablehlo", "hlo")
REGIONS = "regions"  # no format of toast: see `in_own_regions`
MESHES = {"4x2": {"data": 4, "model": 2}, "8": {"all": 8}}
PLANS = 20  # looked at in a search
SMALL_BYTES = 64  # a number or two for each device: losses, counts


# Clients of XLA never end their threads, so all programs share one for each number of devices.
devices_of = cache(xla.cpu_devices)


class Whole:
    """A situation's program as it is, and what it makes of its inputs."""

    def __init__(self, situation: Situation) -> None:
        self.situation = situation
        self.source = situation.source()

    @cached_property
    def wide(self) -> Any:
        """The module, on f32 where it computes in anything narrower."""
        module = self.source.module
        return for_cpu(module, module)[0]

    @cached_property
    def runs(self) -> tuple[list[list[Any]], Runs, Runs]:
        """Inputs of two runs, their results, and those of shaken inputs."""
        devices = devices_of(own_devices(self.wide))
        executable = xla.compile_program(xla.write_bytecode(self.wide), devices, shardy=True)
        inputs = input_sets(self.wide, 0, 2)
        shaken = [shake(one, self.narrowest, 0) for one in inputs]
        return inputs, *(self.outcome(executable, devices, one) for one in (inputs, shaken))

    @cached_property
    def narrowest(self) -> str:
        return narrowest_float(xla.element_types(self.wide))

    def outcome(self, executable: Any, devices: list[Any], inputs: list[list[Any]]) -> Runs:
        shapes = [shape for shape, _ in result_types(self.wide)]
        results = [xla.execute(executable, devices, one, shapes) for one in inputs]
        state = {k: [inputs[0][n] for n in numbers] for k, numbers in new_versions(self.wide).items()}
        return Runs(results, state)


class Planned:
    """A program with a plan for a mesh: the best that a search of so many plans finds."""

    def __init__(self, whole: Whole, axes: dict[str, int], plans: int = PLANS) -> None:
        self.whole, self.axes = whole, axes
        self.evaluator = evaluator_of(self.whole.source, round_mesh(**axes))
        self.result = run_search(self.evaluator, Settings(evaluations=plans))

    def under(self, plan: Plan) -> Planned:
        """The same program with another plan."""
        other = copy(self)
        other.__dict__.pop("report", None)
        other.result = replace(self.result, plan=plan, cost=self.evaluator.exact_cost(plan))
        return other

    @cached_property
    def report(self) -> Report:
        return build_report(self.whole.source, self.evaluator, self.result, "mcts", 0)

    def read_pages(self) -> None:
        """Writes the page and the trace of the run."""
        source = self.whole.source
        run_page(self.report, pictures(source, self.evaluator, self.result))
        trace(source, self.evaluator, self.result)

    def written(self, form: str) -> bytes:
        source, lowered = self.whole.source, self.evaluator.lowered(self.result.plan)
        return in_own_regions(source, lowered) if form == REGIONS else write(source, lowered, form).content

    def wrong_with(self, form: str) -> Iterator[str]:
        """What XLA does otherwise than was promised."""
        content = self.written(form)
        dialect: Dialect = "hlo" if form == "hlo" else "stablehlo"
        program = dense(as_stablehlo(content, dialect))
        if not self.whole.situation.compiles:
            return
        devices = devices_of(prod(self.axes.values()))
        with tempfile.TemporaryDirectory() as folder:
            settings: dict[str, str | bool] = {
                "xla_dump_to": folder, "xla_dump_hlo_as_text": True, "xla_dump_large_constants": True,
                "xla_dump_hlo_pass_re": "^spmd-partitioning$",
            }  # fmt: skip
            executable = xla.compile_program(program, devices, shardy=dialect != "hlo", settings=settings)
            (dump,) = Path(folder).glob("*after_spmd-partitioning*")
            text = dump.read_text()
        yield from self._traffic(text)
        if self.whole.situation.runs:
            module = xla.parse_module(self.whole.source.module.context, program)
            _, split = for_cpu(self.whole.source.module, module)
            if split is not module:
                executable = xla.compile_program(xla.write_bytecode(split), devices, shardy=dialect != "hlo")
            yield from self._numbers(executable, devices)

    def _traffic(self, text: str) -> Iterator[str]:
        found = partitioned_collectives(text, tuple(self.axes), tuple(self.axes.values()))
        promised = [one.as_written() for one in self.report.collectives]
        compared = compare_traffic(promised, found, self.axes)
        whole = max(compared.promised_bytes, compared.compiled_bytes)
        if max(compared.extra_bytes, compared.missing_bytes) > max(0.05 * whole, SMALL_BYTES):
            for one in compared.differences:
                axes = "+".join(one.axes)
                yield f"{one.side}: {one.kind} over {axes} of {one.bytes} bytes x {one.count:g} {one.place}"

    def _numbers(self, executable: Any, devices: list[Any]) -> Iterator[str]:
        inputs, expected, shaken = self.whole.runs
        found = self.whole.outcome(executable, devices, inputs)
        types = [type_name(*kind) for kind in result_types(self.whole.wide)]
        for error in result_errors(types, self.whole.narrowest, expected, shaken, found):
            if error.wrong:
                yield f"result {error.index} differs by {error.error:.1e}, {error.allowed:.0e} may be rounding"


def in_own_regions(source: Source, lowered: PartitionedProgram) -> bytes:
    """StableHLO in which each op that has a local rule is in a manual region."""
    rules = {*RULES, "chlo.top_k"} - {BARRIER}  # its arrays are ops of their own in a `Program`
    numbers = [number for number, op in enumerate(source.program.ops) if op.name in rules and op.operands]
    with Undo() as undo:
        there, rest = ops_in_regions(source, lowered, numbers, undo)
        return write_shardy(there, rest, shardy_annotations(there, rest))


def dense(program: bytes) -> bytes:
    """StableHLO without products that XLA:CPU does not have."""
    if b"ragged_dot" not in program and BLOCK_SCALED_DOT.encode() not in program:
        return program
    return xla.write_bytecode(with_dense_products(xla.parse_module(xla.make_context(), program)))


@lru_cache(maxsize=4)
def whole(name: str) -> Whole:
    return Whole(SITUATIONS[name])


@lru_cache(maxsize=4)
def planned(name: str, mesh: str) -> Planned:
    return Planned(whole(name), MESHES[mesh])
