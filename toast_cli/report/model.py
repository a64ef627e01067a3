"""`Report`: the facts of one run, without their rendering; as JSON of schema "toast.report/1", written and read.

Field names are the JSON names and are stable: add fields, never rename. Bytes are per device unless the name says
otherwise; seconds are seconds.
"""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from math import prod
from typing import Any

from toast_cli.base.errors import InputError
from toast_cli.base.files import read_json, typed
from toast_cli.hardware.spec import MOST_DEVICES, written_shape
from toast_cli.plan import partitioned
from toast_cli.plan.partitioned import CollectiveFacts as CollectiveFacts
from toast_cli.plan.partitioned import ConstraintFacts as ConstraintFacts
from toast_cli.price.memory_fit import NO as NO
from toast_cli.price.memory_fit import UNSURE as UNSURE
from toast_cli.price.memory_fit import YES as YES
from toast_cli.price.memory_fit import fit_of

SCHEMA = "toast.report/1"

# Per dimension of an array, the mesh axis names that split it, major to minor.
DimensionAxes = list[list[str]]


@dataclass(frozen=True)
class ProgramFacts:
    path: str
    name: str
    ops: int
    values: int
    arguments: int
    parameter_bytes: int  # all arguments together, unsharded
    flops: float  # one run, whole machine, loops counted
    parted: bool = False  # True if the plan is for the rewritten program, see `Program.parted`
    microbatches: int = 1  # microbatches in the program that the plan is for
    recompute: str = ""  # what its backward pass computes again and the user's program does not
    offload: str = ""  # what it keeps in host memory and the user's program does not
    rewritten: list[str] = field(default_factory=list)  # these three in words: "in 2 microbatches"
    dims: dict[str, int] = field(default_factory=dict)  # symbolic dimension -> its size

    @property
    def title(self) -> str:
        """The name, with the sizes of symbolic dimensions: `train_step (b=256, s=4096)`."""
        return f"{self.name} ({written_shape(self.dims).replace(',', ', ')})" if self.dims else self.name


@dataclass(frozen=True)
class MeshFacts:
    name: str
    chip: str
    devices: int
    axes: dict[str, int]
    networks: dict[str, int] = field(default_factory=dict)  # axis -> slices or hosts that it runs across, if several
    hour_price: float = 0.0  # of all chips, in the user's currency; 0 if it is unknown


@dataclass(frozen=True)
class DecisionFacts:
    kind: str  # "shard" or "replicate"
    target: str  # class group ("batch") or argument group ("weights")
    axis: str
    sides: dict[str, int]  # resolution group -> chosen side
    classes: int  # dimension classes in the group (shard), arguments in it (replicate)
    size: int  # elements along the largest of them; 0 for replicate
    text: str  # in words
    # Class group: ops that have it are left out. "sum over it": those that sum over its own; "look up rows of tables".
    unless: str = ""
    only: str = ""  # class group: ops that do not have it are left out
    choices: list[str] = field(default_factory=list)  # [sides] which dimension of which array each of them splits


@dataclass(frozen=True)
class PlanFacts:
    decisions: list[DecisionFacts]
    summary: str
    tactics: list[str] = field(default_factory=list)  # as asked for: "fsdp:data"
    fixed: int = 0  # number of decisions, from the first on, that come from them
    strategy: str = ""  # the known strategy that was preferred to the fastest plan, if it is one
    why: str = ""  # compares the plan with the fastest known strategy that fits, in sentences; empty if it is one


@dataclass(frozen=True)
class LiveValue:
    """One array alive at the peak."""

    name: str  # argument path, or the op that makes it
    type: str
    bytes: int
    location: str
    role: str  # "argument", "temporary", "gathered", "partial", "carry", "inside" (see `price.cost.Alive`)


@dataclass(frozen=True)
class PredictedFacts:
    step_seconds: float  # expected, with the compiler's overlap of compute and communication
    compute_seconds: float
    communication_seconds: float
    peak_bytes: int
    argument_bytes: int
    limit_bytes: int
    fits: bool
    mfu: float
    step_seconds_lower: float = 0.0  # with all kinds of collectives asynchronous
    peak_location: str = ""
    live_at_peak: list[LiveValue] = field(default_factory=list)
    tokens_per_second: float = 0.0  # of all devices together; 0 if the number of tokens is unknown
    host_bytes: int = 0  # peak bytes of one device's arrays in the host's memory
    transfer_seconds: float = 0.0  # of transfers between the two memories, which overlap with compute
    peak_error: float = 0.0  # nine of ten programs of this kind need at most this fraction more than `peak_bytes`
    hfu: float = 0.0  # as `mfu`, including rematerialisation
    step_seconds_upper: float = 0.0  # with nothing overlapped; 0: as `step_seconds`
    step_price: float = 0.0  # in the user's currency; 0 if the price of a chip is unknown, as the next
    million_price: float = 0.0  # of a million tokens, of samples where a program has no tokens; 0 if neither is known
    priced: str = ""  # what a million of costs that: "tokens" or "samples"
    samples_per_second: float = 0.0  # of all devices together; 0 if no input has a batch
    cache_token_bytes: float = 0.0  # of caches of keys and values on a device, for each token of all sequences
    sequences: int = 0  # about how many sequences surely fit with such caches; 0 without caches
    tokens_in_turn: int = 0  # of each sequence, made one after the other by a loop of the step; 0 without such a loop
    fit: str = field(default="", init=False)  # "yes", "unsure" (the limit is within that error) or "no"

    def __post_init__(self) -> None:
        object.__setattr__(self, "fit", fit_of(self.peak_bytes, self.limit_bytes, self.peak_error))


@dataclass(frozen=True)
class BaselineFacts:
    """A known strategy. axes: the strategy with its mesh axes, as `--strategy` takes it, if others than the mesh's
    order suit it better; mesh: the shape of the mesh if it is not the plan's."""

    step_seconds: float
    peak_bytes: int
    fits: bool
    compute_seconds: float = 0.0
    communication_seconds: float = 0.0
    axes: str = ""
    mesh: dict[str, int] = field(default_factory=dict)


def strategy_label(name: str, axes: str, mesh: Mapping[str, int]) -> str:
    """A strategy's name in tables: `fsdp:model,data on data=4,model=2`."""
    return f"{axes or name} on {written_shape(mesh)}" if mesh else axes or name


@dataclass(frozen=True)
class ArgumentFacts:
    index: int
    name: str
    type: str
    donated: bool
    sharding: DimensionAxes


@dataclass(frozen=True)
class ResultFacts:
    index: int
    name: str
    type: str
    sharding: DimensionAxes


@dataclass(frozen=True)
class GroupFacts:
    name: str
    classes: int
    size: int
    members: list[str]  # a few arguments that have it


@dataclass(frozen=True)
class LineFacts:
    """Time of one line of the source in one module, all layers together."""

    module: str
    location: str
    seconds: float  # kernels and collectives
    communication_seconds: float  # the collectives' part
    mostly: str  # the kind of kernel or collective that takes most of it
    share: float  # of all kernels and collectives of a step


@dataclass(frozen=True)
class AnalysisFacts:
    classes: int
    groups: int
    conflicts: int
    components: int
    resolution_groups: int
    group_list: list[GroupFacts] = field(default_factory=list)
    replicated_ops: dict[str, int] = field(default_factory=dict)  # op that toast cannot split -> how many
    notes: list[str] = field(
        default_factory=list
    )  # unknown trip counts, dropped shardings, reshapes that do not line up


@dataclass(frozen=True)
class SearchFacts:
    algorithm: str
    seed: int
    seconds: float
    evaluations: int
    best_found_at: int  # evaluation number
    stopped: str = ""  # why it ended: "budget", "iterations", "interrupted", "plateau"


@dataclass(frozen=True)
class BoundFacts:
    figure: str  # "peak_memory", "communication[data]"
    limit: float  # seconds or bytes
    value: float  # of the plan
    holds: bool


@dataclass(frozen=True)
class GoalFacts:
    minimised: list[str] = field(default_factory=lambda: ["step_time"])  # the most important first
    bounds: list[BoundFacts] = field(default_factory=list)  # those asked for, besides device memory


@dataclass(frozen=True)
class ConfirmedPlanFacts:
    """One compiled plan. Compiled figures are null if there is no compiled program."""

    name: str  # "search", "search 2", or a strategy
    predicted_step_seconds: float
    predicted_peak_bytes: int
    outcome: str  # "compiled", "out of memory", "refused", "timed out", "not compiled"
    reason: str  # why there is no compiled program
    step_seconds: float | None
    compute_seconds: float | None
    exposed_seconds: float | None  # communication that the compiled schedule does not hide
    peak_bytes: int | None
    fits: bool | None
    compile_seconds: float = 0.0
    cached: bool = False


@dataclass(frozen=True)
class ConfirmationFacts:
    compiler: str
    chosen: str | None  # name of the plan taken; null where no compiled plan fits
    plans: list[ConfirmedPlanFacts]
    seconds: float
    rejected: bool = False  # no compiled program fits, so that none is written

    @property
    def taken(self) -> ConfirmedPlanFacts | None:
        """The plan taken; None where no compiled plan fits."""
        return next((row for row in self.plans if row.name == self.chosen), None)


@dataclass(frozen=True)
class TriedSizeFacts:
    """A size of a symbolic dimension, with the figures of a short search's plan; 0 where there is no plan."""

    size: int
    step_seconds: float = 0.0
    peak_bytes: int = 0
    rate: float = 0.0  # tokens a second of all devices together, or samples where a program has no tokens
    why: str = ""  # why it does not surely fit, or breaks a bound; empty if neither


@dataclass(frozen=True)
class SizesFacts:
    """The largest size of a symbolic dimension that surely fits (`--dim b=max`)."""

    symbol: str
    size: int
    text: str  # in words, with the next size and why it does not fit
    beyond: str  # that part alone: `b=256 needs 33.9 GiB of 29.7 GiB`
    tried: list[TriedSizeFacts]


@dataclass(frozen=True)
class MemberFacts:
    """One of several programs under one sharding of the arguments that they share."""

    program: str
    runs: int  # for one run of the first program
    step_seconds: float
    alone_seconds: float  # its step in a plan for this program only
    kept_bytes: int  # on a device: its own arguments, which stay while the others run


@dataclass(frozen=True)
class TogetherFacts:
    """Several programs under one sharding of the arguments that they share (`--with`)."""

    shared: int  # number of arguments that all programs have
    seconds: float  # of all runs of all programs, for one run of the first
    alone_seconds: float  # the same with a plan for each program by itself
    programs: list[MemberFacts]


@dataclass(frozen=True)
class Report:
    program: ProgramFacts
    mesh: MeshFacts
    plan: PlanFacts
    predicted: PredictedFacts
    baselines: dict[str, BaselineFacts]
    collectives: list[CollectiveFacts]
    arguments: list[ArgumentFacts]
    results: list[ResultFacts]
    analysis: AnalysisFacts
    search: SearchFacts
    timings: dict[str, float]
    constraints: list[ConstraintFacts] = field(
        default_factory=list
    )  # of the StableHLO that was written, in program order
    goal: GoalFacts = field(default_factory=GoalFacts)
    confirmation: ConfirmationFacts | None = None
    time_by_line: list[LineFacts] = field(default_factory=list)  # those that take longest
    sizes: SizesFacts | None = None  # where the largest size of a symbolic dimension was asked for
    together: TogetherFacts | None = None  # where the program is planned together with others
    schema: str = SCHEMA

    def __getitem__(self, key: str) -> Any:
        """An entry of `to_json()`: `report["predicted"]["step_seconds"]`."""
        return self.to_json()[key]

    @property
    def fit(self) -> str:
        """The plan's fit in memory, by the compiler's figures if available: "yes", "unsure" or "no"."""
        confirmed = self.confirmation
        if confirmed is None or (confirmed.chosen is None and not confirmed.rejected):
            return self.predicted.fit
        if confirmed.taken is None:
            return NO
        return self.predicted.fit if confirmed.taken.peak_bytes is None else YES

    @property
    def met(self) -> bool:
        """True if the plan fits, or may fit, and keeps all requested bounds."""
        return self.fit != NO and all(bound.holds for bound in self.goal.bounds)

    @property
    def promises(self) -> partitioned.Promises:
        """The figures that XLA's are compared with."""
        mesh, cost = self.mesh, self.predicted
        sizes = (cost.peak_bytes, cost.argument_bytes, cost.limit_bytes)
        return partitioned.Promises(
            mesh.axes, self.collectives, *sizes, cost.fits, mesh.name, cost.host_bytes, cost.fit
        )

    def to_json(self) -> dict[str, Any]:
        """The report as JSON-serialisable data, `schema` first."""
        facts = asdict(self)
        return {"schema": facts.pop("schema"), **facts}


# ---------------------------------------------------------------- JSON
# A report as JSON: a `Report` goes in and bytes come out; a stored file goes in and its `Report` comes out.


def to_bytes(report: Report) -> bytes:
    """UTF-8 JSON, indented, with a final newline. NaN and infinity are written as null."""
    return write_json(report.to_json())


def write_json(facts: Any) -> bytes:
    return (json.dumps(_finite(facts), indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode(
        "utf-8", "backslashreplace"
    )


def read_report(path: str) -> Report:
    """The stored report at `path`. Raises InputError, with the missing or wrong field, for other files."""
    facts = read_json(path, _REMAKE)
    schema = facts.get("schema") if isinstance(facts, dict) else None
    if schema != SCHEMA:
        stated = f'schema "{schema}"' if isinstance(schema, str) else "no schema"
        raise InputError(f'is not a report of schema "{SCHEMA}": it has {stated}', where=path, hint=_REMAKE)
    try:
        report: Report = typed(Report, facts, "the report")
    except ValueError as error:
        raise InputError(str(error), where=path, hint=_REMAKE) from None
    sizes = report.mesh.axes.values()
    if not sizes or min(sizes) < 1 or prod(sizes) > MOST_DEVICES:
        raise InputError(f"mesh.axes is {reprlib.repr(report.mesh.axes):.40}", where=path, hint=_REMAKE)
    return report


def is_report(path: str) -> bool:
    """True if the file at `path` holds a report, of any version of the schema."""
    return str(_facts(path).get("schema")).startswith(f"{SCHEMA.partition('/')[0]}/")


def same_facts(path: str, report: Report) -> bool:
    """True if the file at `path` holds this report, apart from durations and the program's path."""
    return _lasting(_facts(path)) == _lasting(json.loads(to_bytes(report)))


def _facts(path: str) -> dict[str, Any]:
    """The JSON object in the file; empty if there is none."""
    try:
        facts = read_json(path, "")
    except InputError:
        return {}
    return facts if isinstance(facts, dict) else {}


def _lasting(facts: dict[str, Any]) -> dict[str, Any]:
    lasting = {key: value for key, value in facts.items() if key != "timings"}
    for part, key in (("search", "seconds"), ("program", "path")):
        if isinstance(lasting.get(part), dict):
            lasting[part] = {name: value for name, value in lasting[part].items() if name != key}
    return lasting


_REMAKE = "make one with `toast partition --json FILE`"


def _finite(facts: Any) -> Any:
    if isinstance(facts, dict):
        return {key: _finite(value) for key, value in facts.items()}
    if isinstance(facts, list | tuple):
        return [_finite(value) for value in facts]
    return None if isinstance(facts, float) and not math.isfinite(facts) else facts
