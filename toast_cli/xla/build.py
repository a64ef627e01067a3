"""Makes StableHLO operations at one place in a module. Types and constants are cached."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from math import inf
from typing import Any, Self

import numpy as np

from toast_cli.xla.native import ir

Shape = tuple[int, ...]
INDEX = "i32"


class Builder:
    """Inserts new operations one after the other at `ip`, an insertion point, with a location."""

    def __init__(self, context: Any) -> None:
        self.context = context
        self.ip: Any = None
        self.location: Any = ir.Location.unknown(context)
        self._types: dict[tuple[str, Shape], Any] = {}
        self._elements: dict[str, Any] = {}
        self._channels = 0

    @classmethod
    def before(cls, operation: Any) -> Self:
        """A builder in front of an operation, with its location."""
        build = cls(operation.context)
        build.ip, build.location = ir.InsertionPoint(operation), operation.location
        return build

    @contextmanager
    def at(self, ip: Any, location: Any = None) -> Iterator[None]:
        """New operations go to `ip` while the block runs."""
        before = self.ip, self.location
        self.ip, self.location = ip, location or self.location
        try:
            yield
        finally:
            self.ip, self.location = before

    # -- types and attributes -------------------------------------------------------------------------------------

    def element(self, dtype: str) -> Any:
        """The MLIR type of one element."""
        if dtype not in self._elements:
            self._elements[dtype] = ir.Type.parse(dtype, self.context)
        return self._elements[dtype]

    def type(self, dtype: str, shape: Shape) -> Any:
        """The type of an array, or of a token."""
        kind = self._types.get((dtype, shape))
        if kind is None:
            if dtype == "token":
                kind = ir.Type.parse("!stablehlo.token", self.context)
            else:
                kind = ir.RankedTensorType.get(shape, self.element(dtype), loc=ir.Location.unknown(self.context))
            self._types[dtype, shape] = kind
        return kind

    def i64(self, number: int) -> Any:
        return ir.IntegerAttr.get(ir.IntegerType.get_signless(64, self.context), number)

    def i64s(self, numbers: Iterable[int]) -> Any:
        return ir.DenseI64ArrayAttr.get(list(numbers), self.context)

    def table(self, rows: Sequence[Sequence[int]]) -> Any:
        """A matrix of integers."""
        array = np.array(rows, np.int64).reshape(len(rows), -1)
        return ir.DenseElementsAttr.get(array, context=self.context)

    def channel(self) -> Any:
        """The handle of a new channel between devices."""
        self._channels += 1
        return ir.Attribute.parse(f"#stablehlo.channel_handle<handle = {self._channels}, type = 1>", self.context)

    # -- operations -----------------------------------------------------------------------------------------------

    def make(
        self, name: str, operands: Sequence[Any], results: Sequence[Any], regions: int = 0, **attributes: Any
    ) -> Any:
        """One operation of StableHLO."""
        return ir.Operation.create(
            f"stablehlo.{name}",
            results=list(results),
            operands=list(operands),
            attributes=attributes,
            regions=regions,
            loc=self.location,
            ip=self.ip,
        )

    def one(self, name: str, operands: Sequence[Any], kind: Any, **attributes: Any) -> Any:
        """The only result of a new operation."""
        return self.make(name, operands, [kind], **attributes).results[0]

    def constant(self, value: float | bool, dtype: str, shape: Shape = ()) -> Any:
        """A splat constant."""
        kind = self.type(dtype, shape)
        if dtype.startswith("complex"):  # Python knows no attribute of complex numbers
            part = _part_of(dtype)
            return self.one("complex", [self.constant(value, part, shape), self.constant(0, part, shape)], kind)
        return self.one(
            "constant", [], kind, value=ir.Attribute.parse(f"dense<{_literal(value, dtype)}> : {kind}", self.context)
        )

    def numbers(self, values: Sequence[int], dtype: str = INDEX) -> Any:
        """A vector of integers."""
        kind = self.type(dtype, (len(values),))
        text = f"dense<[{', '.join(map(str, values))}]> : {kind}"
        return self.one("constant", [], kind, value=ir.Attribute.parse(text, self.context))

    def unary(self, name: str, operand: Any) -> Any:
        return self.one(name, [operand], operand.type)

    def binary(self, name: str, left: Any, right: Any) -> Any:
        return self.one(name, [left, right], left.type)

    def compare(self, direction: str, left: Any, right: Any) -> Any:
        """Compares integers."""
        kind = self.type("i1", tuple(left.type.shape))
        word = ir.Attribute.parse(f"#stablehlo<comparison_direction {direction}>", self.context)
        return self.one("compare", [left, right], kind, comparison_direction=word)

    def select(self, mask: Any, yes: Any, no: Any) -> Any:
        return self.one("select", [mask, yes, no], yes.type)

    def convert(self, value: Any, dtype: str) -> Any:
        kind = self.type(dtype, tuple(value.type.shape))
        return value if kind == value.type else self.one("convert", [value], kind)

    def reshape(self, value: Any, shape: Shape) -> Any:
        kind = self.like(value, shape)
        return value if value.type == kind else self.one("reshape", [value], kind)

    def transpose(self, value: Any, order: Sequence[int]) -> Any:
        if list(order) == sorted(order):
            return value
        shape = tuple(value.type.shape[dim] for dim in order)
        return self.one("transpose", [value], self.like(value, shape), permutation=self.i64s(order))

    def broadcast(self, value: Any, shape: Shape, dims: Sequence[int] = ()) -> Any:
        return self.one("broadcast_in_dim", [value], self.like(value, shape), broadcast_dimensions=self.i64s(dims))

    def slice(
        self, value: Any, starts: Sequence[int], limits: Sequence[int], strides: Sequence[int] | None = None
    ) -> Any:
        steps = strides or [1] * len(starts)
        shape = tuple(-(-(b - a) // s) for a, b, s in zip(starts, limits, steps, strict=True))
        return self.one(
            "slice",
            [value],
            self.like(value, shape),
            start_indices=self.i64s(starts),
            limit_indices=self.i64s(limits),
            strides=self.i64s(steps),
        )

    def slice_dim(self, value: Any, dim: int, start: int, limit: int) -> Any:
        """Slices one dimension from `start` to `limit`."""
        shape = tuple(value.type.shape)
        if (start, limit) == (0, shape[dim]):
            return value
        starts, limits = [0] * len(shape), list(shape)
        starts[dim], limits[dim] = start, limit
        return self.slice(value, starts, limits)

    def parted(self, value: Any) -> Any:
        """[2, ...] the real and imaginary parts of complex numbers."""
        shape = tuple(value.type.shape)
        kind = self.type(_part_of(str(value.type.element_type)), shape)
        parts = [self.one(part, [value], kind) for part in ("real", "imag")]
        return self.concatenate([self.reshape(part, (1, *shape)) for part in parts], 0)

    def joined(self, parts: Any) -> Any:
        """The complex numbers with these parts; the inverse of `parted`."""
        shape = tuple(parts.type.shape)[1:]
        real, imaginary = (self.reshape(self.slice_dim(parts, 0, index, index + 1), shape) for index in (0, 1))
        return self.one("complex", [real, imaginary], self.type(f"complex<{parts.type.element_type}>", shape))

    def pad(
        self, value: Any, fill: Any, low: Sequence[int], high: Sequence[int], interior: Sequence[int] | None = None
    ) -> Any:
        holes = interior or [0] * len(low)
        shape = tuple(
            a + b + n + max(n - 1, 0) * h
            for n, a, b, h in zip(value.type.shape, low, high, holes, strict=True)
        )  # fmt: skip
        return self.one(
            "pad",
            [value, fill],
            self.like(value, shape),
            edge_padding_low=self.i64s(low),
            edge_padding_high=self.i64s(high),
            interior_padding=self.i64s(holes),
        )

    def concatenate(self, values: Sequence[Any], dim: int) -> Any:
        if len(values) == 1:
            return values[0]
        shape = list(values[0].type.shape)
        shape[dim] = sum(value.type.shape[dim] for value in values)
        return self.one("concatenate", values, self.like(values[0], tuple(shape)), dimension=self.i64(dim))

    def dynamic_slice(self, value: Any, starts: Sequence[Any], shape: Shape) -> Any:
        return self.one("dynamic_slice", [value, *starts], self.like(value, shape), slice_sizes=self.i64s(shape))

    def row(self, value: Any, index: Any, dim: int) -> Any:
        """[…, 1, …] the part of an array at an index along a dimension."""
        zero = self.constant(0, str(index.type.element_type))
        starts = [index if d == dim else zero for d in range(value.type.rank)]
        return self.dynamic_slice(value, starts, tuple(1 if d == dim else n for d, n in enumerate(value.type.shape)))

    def iota(self, dtype: str, shape: Shape, dim: int) -> Any:
        return self.one("iota", [], self.type(dtype, shape), iota_dimension=self.i64(dim))

    def sum(self, value: Any, dims: Sequence[int]) -> Any:
        """The sum over dimensions."""
        shape = tuple(size for dim, size in enumerate(value.type.shape) if dim not in dims)
        zero, kind = self.constant(0, str(value.type.element_type)), self.like(value, shape)
        return self._combined("reduce", [value, zero], kind, "add", dimensions=self.i64s(dims))

    def like(self, value: Any, shape: Shape) -> Any:
        """The type of an array of this shape with the elements of `value`."""
        return self.type(str(value.type.element_type), shape)

    # -- collectives ----------------------------------------------------------------------------------------------

    def all_gather(self, value: Any, dim: int, groups: Sequence[Sequence[int]]) -> Any:
        shape = list(value.type.shape)
        shape[dim] *= len(groups[0])
        kind, dim_attribute = self.like(value, tuple(shape)), self.i64(dim)
        return self.one("all_gather", [value], kind, all_gather_dim=dim_attribute, **self._among(groups))

    def all_to_all(self, value: Any, split: int, concat: int, groups: Sequence[Sequence[int]]) -> Any:
        shape, count = list(value.type.shape), len(groups[0])
        shape[split] //= count
        shape[concat] *= count
        return self.one(
            "all_to_all",
            [value],
            self.like(value, tuple(shape)),
            split_dimension=self.i64(split),
            concat_dimension=self.i64(concat),
            split_count=self.i64(count),
            replica_groups=self.table(groups),
            channel_handle=self.channel(),
        )

    def permute(self, value: Any, pairs: Sequence[tuple[int, int]]) -> Any:
        """Sends each sender's value to its receiver; other devices get zeros."""
        return self.one(
            "collective_permute",
            [value],
            value.type,
            source_target_pairs=self.table(pairs),
            channel_handle=self.channel(),
        )

    def all_reduce(self, value: Any, reducer: str, groups: Sequence[Sequence[int]]) -> Any:
        return self._combined("all_reduce", [value], value.type, reducer, **self._among(groups))

    def barrier(self, value: Any) -> Any:
        """The value behind an optimization barrier."""
        return self.one("optimization_barrier", [value], value.type)

    def reduce_scatter(self, value: Any, reducer: str, dim: int, groups: Sequence[Sequence[int]]) -> Any:
        """A reduce-scatter. XLA:TPU refuses it for complex numbers, so their parts are stacked
        and scattered together."""
        if str(value.type.element_type).startswith("complex"):
            return self.joined(self.reduce_scatter(self.parted(value), reducer, dim + 1, groups))
        shape = list(value.type.shape)
        shape[dim] //= len(groups[0])
        kind, dim_attribute = self.like(value, tuple(shape)), self.i64(dim)
        return self._combined(
            "reduce_scatter", [value], kind, reducer, scatter_dimension=dim_attribute, **self._among(groups)
        )

    def _among(self, groups: Sequence[Sequence[int]]) -> dict[str, Any]:
        """The attributes of a collective among groups of devices."""
        table, everywhere = self.table(groups), ir.UnitAttr.get(self.context)
        return {"replica_groups": table, "channel_handle": self.channel(), "use_global_device_ids": everywhere}

    def _combined(self, name: str, operands: Sequence[Any], kind: Any, reducer: str, **attributes: Any) -> Any:
        """The only result of a new operation that combines elements of its first operand with a reducer."""
        operation = self.make(name, operands, [kind], regions=1, **attributes)
        scalars = [self.like(operands[0], ())] * 2
        self.body(operation.regions[0], scalars, lambda a, b: [self.binary(reducer, a, b)])
        return operation.results[0]

    def body(self, region: Any, kinds: Sequence[Any], write: Callable[..., list[Any]]) -> None:
        """Fills a region with one block: `write` takes its arguments and returns its results."""
        block = ir.Block.create_at_start(region, list(kinds), [self.location] * len(kinds))
        with self.at(ir.InsertionPoint(block)):
            self.make("return", write(*block.arguments), [])


# Bits of minus infinity; the sign bit is the first one.
_MINUS_INFINITY = {"bf16": (0xFF80, 16), "f16": (0xFC00, 16), "f32": (0xFF800000, 32), "f64": (0xFFF0 << 48, 64)}


def _part_of(dtype: str) -> str:
    """The element type of a complex number's parts."""
    return dtype.removeprefix("complex<").removesuffix(">")


def identity(reducer: str, dtype: str) -> float | None:
    """The neutral element of a reducer; None if there is none."""
    if reducer in ("add", "or"):
        return 0
    if reducer == "multiply":
        return 1
    if dtype in _MINUS_INFINITY:
        least, most = -inf, inf
    elif dtype == "i1" or dtype.startswith("ui"):
        least, most = 0, 2 ** int(dtype.lstrip("ui")) - 1
    elif dtype.startswith("i"):
        most = 2 ** (int(dtype[1:]) - 1) - 1
        least = -1 - most
    else:
        return None
    return least if reducer == "maximum" else -1 if reducer == "and" and least < 0 else most


def _literal(value: float | bool, dtype: str) -> str:
    if dtype in _MINUS_INFINITY and abs(value) == inf:
        bits, width = _MINUS_INFINITY[dtype]
        return hex(bits if value < 0 else bits - (1 << (width - 1)))
    if dtype == "i1":
        return "true" if value else "false"
    return str(int(value)) if dtype.lstrip("u").startswith("i") else f"{float(value):.17e}"
