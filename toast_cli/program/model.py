"""`Program`: one flat list of ops over numbered values, with every op's sharding rule.

Calls and composites are already inlined. Regions (`while`, `case`, `if`) are flattened in program order; values enter
and leave them through ops of our own, each an identity for dimensions, so that nothing downstream needs a special case:

* `toast.argument` (no operands, one result): an argument of the entry function.
* `toast.carry` (operands: the value a loop starts with, the value each iteration yields; one result): the value a
  `while` carries. Condition argument, body argument and loop result are all this one value. A value that a loop only
  passes through unchanged is no carry at all: inside and after the loop it *is* the value outside.
* `toast.join` (operands: what each branch yields; one result): a result of `case` or `if`.
* `toast.result` (one operand, no results): a result of the entry function.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property, wraps
from math import prod
from typing import Any, Concatenate, ParamSpec, TypeVar

from toast_cli.program.ops import CUSTOM_CALL, DOT_GENERAL, OP_KINDS, OpKind, kind_of

T = TypeVar("T")
Subject = TypeVar("Subject")
Facts = ParamSpec("Facts")
# A dimension is an ordered product of factors, major to minor; () for a dimension without factors.
DimFactors = tuple[int, ...]
# Per dimension of one operand or result.
ValueFactors = tuple[DimFactors, ...]

# Bits per element; complex numbers count both parts, sub-byte types are packed. Unknown element types count as 32.
DTYPE_BITS = {
    "pred": 8, "i1": 8, "i2": 2, "i4": 4, "i8": 8, "i16": 16, "i32": 32, "i64": 64,
    "ui2": 2, "ui4": 4, "ui8": 8, "ui16": 16, "ui32": 32, "ui64": 64,
    "f4E2M1FN": 4, "f6E2M3FN": 6, "f6E3M2FN": 6, "f8E3M4": 8, "f8E4M3": 8, "f8E4M3B11FNUZ": 8, "f8E4M3FN": 8,
    "f8E4M3FNUZ": 8, "f8E5M2": 8, "f8E5M2FNUZ": 8, "f8E8M0FNU": 8, "bf16": 16, "f16": 16, "f32": 32, "f64": 64,
    "complex<f32>": 64, "complex<f64>": 128, "token": 0,
}  # fmt: skip
_NUMPY_NAMES = {
    "i1": "bool",
    "bf16": "bfloat16",
    "pred": "bool",
    "complex<f32>": "complex64",
    "complex<f64>": "complex128",
}


def dtype_of(element: str) -> Any:
    """NumPy's type of an MLIR element type: `bf16` -> bfloat16, `ui8` -> uint8, `f8E4M3FN` -> float8_e4m3fn."""
    import ml_dtypes
    import numpy as np

    name = _NUMPY_NAMES.get(element)
    if name is None and element.startswith(("i", "ui")):
        name = element.replace("i", "int", 1)
    elif name is None:
        bits, _, digits = element[1:].partition("E")
        name = f"float{bits}_e{digits.lower()}" if digits else f"float{bits}"
    return np.dtype(getattr(ml_dtypes, name, name))


@dataclass(frozen=True, slots=True)
class Rule:
    """An op's sharding rule, as in Shardy: e.g. `([i, k], [k, j])->([i, j]) reduction={k}`.

    Factors are numbered; `sizes[f]` is the number of elements along factor f. Factors not named in one of the first
    three sets pass through. Rules are dictionary keys for every op, so the hash is stored.
    """

    sizes: tuple[int, ...]
    operands: tuple[ValueFactors, ...]
    results: tuple[ValueFactors, ...]
    reduction: frozenset[int] = frozenset()
    need_replication: frozenset[int] = frozenset()
    permutation: frozenset[int] = frozenset()
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        rest = self.reduction, self.need_replication, self.permutation
        object.__setattr__(self, "_hash", hash((self.sizes, self.operands, self.results, *rest)))

    def __hash__(self) -> int:
        return self._hash

    @property
    def only_scales(self) -> bool:
        """For a contraction: whether it sums over nothing and all dimensions of one operand are in the other."""
        first, second = self._occupied
        nothing_added = all(self.sizes[factor] <= 1 for factor in self.reduction)
        return nothing_added and bool(first or second) and (first <= second or second <= first)

    @property
    def with_vector(self) -> bool:
        """For a contraction: whether all dimensions of one operand are in the other."""
        first, second = self._occupied
        return first <= second or second <= first

    @property
    def _occupied(self) -> tuple[set[int], set[int]]:
        """(factors of more than one element of the first operand, of the second)."""
        first, second = ({f for dim in dims for f in dim if self.sizes[f] > 1} for dims in self.operands[:2])
        return first, second


def factors_of(*arrays: ValueFactors) -> list[set[int]]:
    """[arrays] the factors along the dimensions of each."""
    return [{factor for factors in dims for factor in factors} for dims in arrays]


@dataclass(frozen=True, slots=True)
class Value:
    """One array: `shape` in elements, `dtype` as MLIR prints the element type (`f32`, `bf16`, `i1`, …); how many
    `elements` and `bytes` follows."""

    shape: tuple[int, ...]
    dtype: str
    elements: int = field(init=False, repr=False, compare=False)
    bytes: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        elements = prod(self.shape)
        object.__setattr__(self, "elements", elements)
        object.__setattr__(self, "bytes", (elements * self.bits + 7) // 8)

    @property
    def bits(self) -> int:
        """Bits of one element."""
        return DTYPE_BITS.get(self.dtype, 32)

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


@dataclass(frozen=True, slots=True)
class Window:
    """A windowed dimension: each of `outputs` elements of the result depends on a window of the first operand's
    dimension; windows are `stride` apart.

    First, `dilation` - 1 holes are inserted between the operand's `inputs` elements, and `low` elements are padded in
    front (or cut off, if negative). A window has `size` elements, `spread` apart. kernel_dim: the dimension of the
    second operand that they are multiplied with, or -1.
    """

    operand_dim: int
    result_dim: int
    inputs: int
    outputs: int
    size: int = 1
    stride: int = 1
    low: int = 0
    dilation: int = 1
    spread: int = 1
    kernel_dim: int = -1


@dataclass(frozen=True, slots=True)
class ManualCollective:
    """The communication of one op of a manual region.

    Attributes:
        kind: "all-reduce" and the like. groups: device numbers of each communicating group; empty if all devices form
            one; for a collective-permute, (source, target) pairs. pairs: whether groups are such pairs.
        place: location of the op, as the module has it.
    """

    kind: str
    groups: tuple[tuple[int, ...], ...]
    place: str

    @property
    def pairs(self) -> bool:
        return self.kind == "collective-permute"


PAGED = "paged"  # the kind of a kernel of paged attention


@dataclass(frozen=True, slots=True)
class HandWritten:
    """A hand-written kernel (Pallas, cuDNN, Triton) that is one op of a program.

    Attributes:
        name: the author's name of the kernel. kind: "mosaic", "cudnn", "paged", or "" if unknown. products:
        matrix-unit flops of one run, on unsharded shapes; a multiply-add counts 2. vector: other flops.
        bytes: read from memory and written to it, without on-chip traffic.
        axes: [factors of the op's rule] axis of the kernel's grid that a factor belongs to, -1 for none; for cuDNN
            attention, dimension of its scores. Factors beyond the end of the tuple stay whole.
        parameters: with which its package lowers a kernel of paged attention. tokens: that it computes.
        aliases: (result, operand) of each result that is written into an operand's buffer.
    """

    name: str
    kind: str = ""
    products: float = 0.0
    vector: float = 0.0
    bytes: float = 0.0
    axes: tuple[int, ...] = ()
    parameters: tuple[tuple[str, float | bool | tuple[int, ...]], ...] = ()
    tokens: int = 0
    aliases: tuple[tuple[int, int], ...] = ()

    @property
    def flops(self) -> float:
        return self.products + self.vector

    @property
    def only_multiplies(self) -> bool:
        """Whether it is known to do little besides products (attention has its softmax): products of groups of rows."""
        return self.kind != "" and self.vector < 0.005 * self.products


@dataclass(frozen=True)
class ManualRegion:
    """The per-device program of a manual region (`shard_map`).

    Attributes:
        axes: names of the mesh axes over which it is manual, as in the module.
        body: the region as a program, on local shapes. exchanges: op of the body that communicates -> its exchange.
    """

    axes: tuple[str, ...]
    body: Program
    exchanges: dict[int, ManualCollective]


@dataclass(frozen=True, slots=True)
class Op:
    """One op. `operands` and `results` are value numbers; the op's own number is its place in `Program.ops`.

    Attributes:
        name: dialect name (`stablehlo.dot_general`) or one of the four of our own.
        rule: its factors; a rule without factors means the op is computed whole on every device.
        trips: how often it runs in one run of the program (the product of the trip counts of the loops around it; a
            branch out of n counts 1/n, or as the user says).
        loop: number in `Program.loops` of the innermost loop around it, -1 outside loops.
        flops: arithmetic operations on the unsharded shapes, one run; a fused multiply-add counts 2.
        detail: distinguishes ops of one name (a custom call's target, a reduction's body op); else empty.
        kind: properties of all ops of this name, or of custom calls of this target if the table has it; for a
            contraction that contracts nothing, see `OpKind.scaling`.
        windows: its dimensions along which a result element reads a neighbourhood, or an element at another position.
        opaque: it has no sharding rule; it is computed whole on every device, and the report lists it.
        branches: numbers of the branches of `case` and `if` around it, within its loop, outermost first; operand k of a
            `toast.join` is read in the k-th branch from the last of them on.
        region: the body, for a manual region.
        one_device: it runs on one device, which sends its results to the others (a host callback). kernel: properties
        of a hand-written kernel. repeats: an earlier op around it computes the same, with which XLA merges it.
    """

    name: str
    operands: tuple[int, ...]
    results: tuple[int, ...]
    rule: Rule
    trips: float = 1.0
    loop: int = -1
    flops: float = 0.0
    detail: str = ""
    opaque: bool = False
    windows: tuple[Window, ...] = ()
    branches: tuple[int, ...] = ()
    region: ManualRegion | None = field(default=None, repr=False, compare=False)
    one_device: bool = False
    kernel: HandWritten | None = None
    repeats: bool = field(default=False, compare=False)
    kind: OpKind = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        scaling = self.name == DOT_GENERAL and self.rule.only_scales
        target = self.name == CUSTOM_CALL and self.detail in OP_KINDS
        object.__setattr__(self, "kind", kind_of(self.detail if target else self.name, scaling))

    @property
    def in_place(self) -> tuple[tuple[int, int], ...]:
        """(result, operand) of each result that can be written into an operand's buffer."""
        if self.kernel is not None:
            return self.kernel.aliases
        if self.region is not None:
            arguments = self.region.body.arguments
            return tuple((a.aliased_result, k) for k, a in enumerate(arguments) if a.aliased_result >= 0)
        return ((0, 0),) if self.kind.in_place and self.operands else ()

    @property
    def multiplies_by_vector(self) -> bool:
        """Whether it is a (batched) matrix-vector contraction, which XLA:TPU computes elementwise with a sum, in the
        operands' type."""
        return self.name == DOT_GENERAL and self.rule.with_vector


@dataclass(frozen=True, slots=True)
class Loop:
    """A `while`: ops [first, last) of the program are its carries, condition and body.

    `trips` is its own trip count, or its mean; `trips_known` is False if it depends on data and the user does not say
    it; then `trips` is an upper bound, or 1 if there is none.
    """

    parent: int
    first: int
    last: int
    trips: float
    trips_known: bool

    def __contains__(self, op: int) -> bool:
        """Whether an op is in it, or in a loop in it."""
        return self.first <= op < self.last


@dataclass(frozen=True, slots=True)
class Argument:
    """An argument of the entry function, in order. `path` is its path in the user's tree, if known (`params['w']`).

    Attributes:
        aliased_result: number of the result that reuses this argument's buffer; -1 for none.
        dimension_names: [dimensions] the user's names ("embed"), "" for none; empty if there are none at all.
        annotated_axes: [dimensions] mesh axis that the program itself splits it over, "" for none; empty likewise.
        on_host: it is in host memory.
        used_in: for an argument without a path, its first reader in a named module (`encoder/attention/dot_general`);
            else empty.
    """

    value: int
    path: str
    donated: bool = False
    aliased_result: int = -1
    dimension_names: tuple[str, ...] = ()
    annotated_axes: tuple[str, ...] = ()
    on_host: bool = False
    used_in: str = ""

    @property
    def label(self) -> str:
        """Its name in reports; empty if unknown."""
        return self.path or self.used_in


@dataclass(frozen=True, slots=True)
class Result:
    """A result of the entry function, in order. `path` as in `jax.result_info`, else empty."""

    value: int
    path: str


def once(function: Callable[Concatenate[Subject, Facts], T]) -> Callable[Concatenate[Subject, Facts], T]:
    """Memoises a function of a subject, such as a program, and of further hashable facts, once per subject and facts;
    callers must not mutate the answer."""
    name = f"{function.__module__}.{function.__qualname__}"

    @wraps(function)
    def remembered(subject: Subject, /, *facts: Facts.args, **named: Facts.kwargs) -> T:
        memo = subject.__dict__.setdefault(name, {})  # where `cached_property` keeps its own
        key = facts, tuple(named.items())
        if key not in memo:
            memo[key] = function(subject, *facts, **named)
        answer: T = memo[key]
        return answer

    return remembered


class Recompute(StrEnum):
    """Rematerialisation policies, the least recomputation first; comments give the names in
    `jax.checkpoint_policies`."""

    all_but_products = "all-but-products"  # dots_saveable
    all_but_weight_products = "all-but-weight-products"  # dots_with_no_batch_dims_saveable
    all = "all"  # nothing_saveable


class Offload(StrEnum):
    """What is kept in host memory while it is not needed."""

    residuals = "residuals"
    optimizer_state = "optimizer-state"
    all = "all"


@dataclass(frozen=True)
class Program:
    """A whole program; see the module docstring for how control flow is written.

    Attributes:
        parted: it differs from the user's program: fused products are split (see `rewrite.fused_products`).
        microbatches: number of parts of its batch (see `microbatches`); 1 as the user wrote it. recompute: values that
        its backward pass rematerialises and the user's does not, a `Recompute`. offload: what it keeps in host
        memory and the user's does not, an `Offload`.
    """

    name: str
    ops: tuple[Op, ...]
    values: tuple[Value, ...]
    arguments: tuple[Argument, ...]
    results: tuple[Result, ...]
    loops: tuple[Loop, ...] = ()
    parted: bool = False
    microbatches: int = 1
    recompute: str = ""
    offload: str = ""

    @property
    def rewritten(self) -> list[str]:
        """How toast changed what the user's program computes, and where it keeps it, in words: "in 2 microbatches"."""
        host = "residuals and optimizer state" if self.offload == "all" else self.offload.replace("-", " ")
        return [
            *([f"in {self.microbatches} microbatches"] if self.microbatches > 1 else []),
            *([f"{self.recompute.replace('-', ' ')} recomputed"] if self.recompute else []),
            *([f"{host} offloaded"] if host else []),
        ]

    @cached_property
    def producer(self) -> list[int]:
        """[values] number of the op that defines each value."""
        producers = [-1] * len(self.values)
        for number, op in enumerate(self.ops):
            for value in op.results:
                producers[value] = number
        return producers

    @cached_property
    def users(self) -> list[list[tuple[int, int]]]:
        """[values] (op number, operand position) of each use, in program order."""
        uses: list[list[tuple[int, int]]] = [[] for _ in self.values]
        for number, op in enumerate(self.ops):
            for position, value in enumerate(op.operands):
                uses[value].append((number, position))
        return uses

    @cached_property
    def flops(self) -> float:
        """Arithmetic operations of one run, loops counted."""
        return sum(op.flops * op.trips for op in self.ops)

    def multiplied_type(self, op: Op) -> str:
        """The element type that a product or convolution multiplies: the wider one of its two operands'."""
        return max((self.values[v].dtype for v in op.operands[:2]), key=lambda dtype: DTYPE_BITS.get(dtype, 32))

    @cached_property
    def source_op_count(self) -> int:
        """Ops of the program proper, without the four kinds of our own."""
        return sum(not op.name.startswith("toast.") for op in self.ops)
