"""Properties of ops: one row per op, and the only such table.

In: a dialect name. Out: its `OpKind`, which `Op.kind` holds. All code that needs a group of ops (elementwise
ops, views, ops of the matrix unit) uses a property of it. Code that treats a single op specially names that op.

Sources: StableHLO's specification for elementwise ops and ops that only move elements; XLA's `HloCostAnalysis` for ops
without arithmetic and transcendental ones; Shardy's pass `sdy-constant-or-scalar-splitter` for ops recomputed for each
use (a test checks that).
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property

ADD = "stablehlo.add"
BARRIER = "stablehlo.optimization_barrier"
BLOCK_SCALED_DOT = "__op$block_scaled_dot"  # target of a custom call
BROADCAST_IN_DIM = "stablehlo.broadcast_in_dim"
CASE = "stablehlo.case"
CONCATENATE = "stablehlo.concatenate"
CONSTANT = "stablehlo.constant"
CONVERT = "stablehlo.convert"
CONVOLUTION = "stablehlo.convolution"
CUSTOM_CALL = "stablehlo.custom_call"
DIVIDE = "stablehlo.divide"
DOT_GENERAL = "stablehlo.dot_general"
DYNAMIC_SLICE = "stablehlo.dynamic_slice"
DYNAMIC_UPDATE_SLICE = "stablehlo.dynamic_update_slice"
EXPONENTIAL = "stablehlo.exponential"
FFT = "stablehlo.fft"
GATHER = "stablehlo.gather"
IF = "stablehlo.if"
IOTA = "stablehlo.iota"
MANUAL_REGION = "sdy.manual_computation"
MULTIPLY = "stablehlo.multiply"
PAD = "stablehlo.pad"
RAGGED_DOT = "chlo.ragged_dot"
RAGGED_ALL_TO_ALL = "ragged_all_to_all"  # target of a custom call
REDUCE = "stablehlo.reduce"
REVERSE = "stablehlo.reverse"
RESHAPE = "stablehlo.reshape"
RNG = "stablehlo.rng"
SCATTER = "stablehlo.scatter"
SELECT = "stablehlo.select"
SLICE = "stablehlo.slice"
SQUARE = "chlo.square"
SUBTRACT = "stablehlo.subtract"
TRANSPOSE = "stablehlo.transpose"
WHILE = "stablehlo.while"

# Bodies that devices can reduce with.
REDUCERS = ("add", "multiply", "maximum", "minimum", "and", "or")

# Ops of our own, for values that enter and leave the program and its regions; see `toast_cli.program.model`.
ARGUMENT = "toast.argument"
CARRY = "toast.carry"
JOIN = "toast.join"
RESULT = "toast.result"


@dataclass(frozen=True, eq=False)
class OpKind:
    """Properties of all ops of one name.

    Attributes:
        name: dialect name.
        source: it makes its result from attributes alone (a constant, an iota).
        elementwise: an element of the result depends on the elements at the same place of its operands, and on scalars.
        transcendental: an elementwise function that a chip evaluates in its transcendental unit.
        division: an elementwise op that takes several steps of the vector unit.
        polynomial: an elementwise function that no chip has in hardware; XLA evaluates a polynomial of dozens of steps.
        positive: positive operands make a positive result.
        rearranges: the elements of the result are elements of the operands, at other places or repeated; XLA computes
            it where it is read.
        view: it rearranges one array in a way that is known before the program runs; it pads and reverses nothing.
        identity: its result is its operand.
        contraction, convolution: it runs on a chip's matrix unit.
        scaling: a contraction that contracts nothing and multiplies each element of one operand with one of the other:
            XLA turns it into a multiplication (only `kind_of` sets it).
        lookup: it reads or updates rows that computed indices select (gather, scatter).
        reduction: it combines elements along dimensions with a body of its own.
        takes_part: it reads only as much of its first operand as its result has.
        in_place: XLA lets its result reuse the buffer of its first operand.
        updates: it writes a part of its first operand, as much as its update has.
        computes_operands: its kernel fuses the computation of its operands; implied for further ops, see
            `fuses_operands`.
        no_arithmetic: it counts no flops; implied for further ops, see `computes_nothing`.
        per_device: it communicates, or its result depends on the device.
        replicated: XLA computes it whole on every device from whole operands.
        windowed: an element of its result depends on a window of its first operand, see `Op.windows`.
    """

    name: str
    source: bool = False
    elementwise: bool = False
    transcendental: bool = False
    division: bool = False
    polynomial: bool = False
    positive: bool = False
    rearranges: bool = False
    view: bool = False
    identity: bool = False
    contraction: bool = False
    convolution: bool = False
    scaling: bool = False
    lookup: bool = False
    reduction: bool = False
    takes_part: bool = False
    in_place: bool = False
    updates: bool = False
    computes_operands: bool = False
    no_arithmetic: bool = False
    per_device: bool = False
    replicated: bool = False
    windowed: bool = False

    @cached_property
    def matrix_unit(self) -> bool:
        """Whether it runs on a chip's matrix unit."""
        return self.contraction or self.convolution

    @cached_property
    def heavy(self) -> bool:
        """Whether it is evidence for the role of a dimension: contractions, convolutions and look-ups."""
        return self.matrix_unit or self.lookup

    @cached_property
    def view_or_convert(self) -> bool:
        """Whether XLA reads it in place: it rearranges one array or reads it as another type."""
        return self.view or self.name in (CONVERT, "stablehlo.bitcast_convert")

    @cached_property
    def fusible(self) -> bool:
        """Whether XLA can compute it inside the kernels that read it."""
        return self.elementwise or self.rearranges or self.scaling or self.name in (CONSTANT, IOTA)

    @cached_property
    def fuses_operands(self) -> bool:
        """Whether its kernel fuses the computation of its operands."""
        return self.matrix_unit or self.fusible or self.computes_operands

    @cached_property
    def rematerialised(self) -> bool:
        """Whether Shardy recomputes it for each use if its operands are made from constants alone."""
        return self.elementwise or (self.view and self.name != TRANSPOSE)

    @cached_property
    def computes_nothing(self) -> bool:
        """Whether it counts no flops."""
        return self.source or self.rearranges or self.identity or self.no_arithmetic

    def __reduce__(self) -> tuple[object, ...]:
        return kind_of, (self.name, self.scaling)


_ROWS = """
stablehlo.constant                  source
stablehlo.iota                      source
stablehlo.dynamic_iota              source
stablehlo.create_token              source
sdy.constant                        source
sdy.sharding_constraint             identity
chlo.constant                       source

stablehlo.abs                       elementwise positive
stablehlo.add                       elementwise positive
stablehlo.and                       elementwise
stablehlo.atan2                     elementwise transcendental
stablehlo.bitcast_convert           elementwise no_arithmetic
stablehlo.cbrt                      elementwise transcendental positive
stablehlo.ceil                      elementwise
stablehlo.clamp                     elementwise positive
stablehlo.compare                   elementwise
stablehlo.complex                   elementwise no_arithmetic
stablehlo.convert                   elementwise positive
stablehlo.cosine                    elementwise transcendental
stablehlo.count_leading_zeros       elementwise
stablehlo.divide                    elementwise division positive
stablehlo.exponential               elementwise transcendental positive
stablehlo.exponential_minus_one     elementwise transcendental positive
stablehlo.floor                     elementwise
stablehlo.imag                      elementwise no_arithmetic
stablehlo.is_finite                 elementwise
stablehlo.log                       elementwise transcendental
stablehlo.log_plus_one              elementwise transcendental positive
stablehlo.logistic                  elementwise transcendental positive
stablehlo.map                       elementwise
stablehlo.maximum                   elementwise positive
stablehlo.minimum                   elementwise positive
stablehlo.multiply                  elementwise positive
stablehlo.negate                    elementwise
stablehlo.not                       elementwise
stablehlo.or                        elementwise
stablehlo.popcnt                    elementwise
stablehlo.power                     elementwise transcendental positive
stablehlo.real                      elementwise no_arithmetic
stablehlo.reduce_precision          elementwise positive
stablehlo.remainder                 elementwise division
stablehlo.round_nearest_afz         elementwise
stablehlo.round_nearest_even        elementwise
stablehlo.rsqrt                     elementwise transcendental positive
stablehlo.select                    elementwise positive
stablehlo.shift_left                elementwise
stablehlo.shift_right_arithmetic    elementwise
stablehlo.shift_right_logical       elementwise
stablehlo.sign                      elementwise
stablehlo.sine                      elementwise transcendental
stablehlo.sqrt                      elementwise transcendental positive
stablehlo.subtract                  elementwise
stablehlo.tan                       elementwise transcendental
stablehlo.tanh                      elementwise transcendental positive
stablehlo.uniform_dequantize        elementwise
stablehlo.uniform_quantize          elementwise
stablehlo.xor                       elementwise

stablehlo.broadcast                 rearranges view positive
stablehlo.broadcast_in_dim          rearranges view positive
stablehlo.concatenate               rearranges positive
stablehlo.dynamic_slice             rearranges takes_part positive
stablehlo.pad                       rearranges windowed
stablehlo.reshape                   rearranges view positive
stablehlo.reverse                   rearranges positive
stablehlo.slice                     rearranges view takes_part positive windowed
stablehlo.transpose                 rearranges view positive
stablehlo.dynamic_broadcast_in_dim  rearranges
stablehlo.dynamic_pad               rearranges
stablehlo.dynamic_reshape           rearranges
stablehlo.real_dynamic_slice        rearranges takes_part

stablehlo.optimization_barrier      identity in_place
stablehlo.dynamic_update_slice      in_place updates computes_operands no_arithmetic
stablehlo.gather                    lookup takes_part no_arithmetic
stablehlo.dynamic_gather            lookup takes_part no_arithmetic
stablehlo.torch_index_select        lookup takes_part no_arithmetic
stablehlo.scatter                   lookup in_place updates

stablehlo.dot                       contraction
stablehlo.dot_general               contraction
stablehlo.einsum                    contraction
stablehlo.convolution               convolution windowed
stablehlo.dynamic_conv              convolution
stablehlo.unary_einsum
chlo.ragged_dot                     contraction
__op$block_scaled_dot               contraction

stablehlo.reduce                    reduction computes_operands
stablehlo.reduce_window             reduction windowed
stablehlo.select_and_scatter        reduction windowed
chlo.scan                           reduction

stablehlo.batch_norm_grad
stablehlo.batch_norm_inference
stablehlo.batch_norm_training
stablehlo.cholesky
stablehlo.fft
stablehlo.rng
stablehlo.rng_bit_generator
stablehlo.sort
stablehlo.triangular_solve
chlo.top_k

stablehlo.all_gather                per_device no_arithmetic
stablehlo.all_reduce                per_device reduction
stablehlo.all_to_all                per_device no_arithmetic
stablehlo.collective_broadcast      per_device no_arithmetic
stablehlo.collective_permute        per_device no_arithmetic
stablehlo.collective_reduce         per_device reduction
stablehlo.cross-replica-sum         per_device reduction
stablehlo.reduce_scatter            per_device reduction
stablehlo.partition_id              per_device replicated no_arithmetic
stablehlo.replica_id                per_device replicated no_arithmetic

stablehlo.after_all                 replicated no_arithmetic
stablehlo.get_dimension_size        replicated no_arithmetic
stablehlo.set_dimension_size        no_arithmetic
stablehlo.async_done                no_arithmetic
stablehlo.async_start               no_arithmetic
stablehlo.case                      no_arithmetic
stablehlo.composite                 no_arithmetic
stablehlo.custom_call               no_arithmetic
stablehlo.get_tuple_element         no_arithmetic
stablehlo.if                        no_arithmetic
stablehlo.infeed                    no_arithmetic
stablehlo.outfeed                   no_arithmetic
stablehlo.recv                      no_arithmetic
stablehlo.return                    no_arithmetic
stablehlo.send                      no_arithmetic
stablehlo.tuple                     no_arithmetic
stablehlo.while                     no_arithmetic

toast.argument                      no_arithmetic
toast.carry                         in_place no_arithmetic
toast.join                          no_arithmetic
toast.result                        no_arithmetic

chlo._asin_acos_kernel              elementwise transcendental
chlo.acos                           elementwise transcendental
chlo.acosh                          elementwise transcendental
chlo.asin                           elementwise transcendental
chlo.asin_acos_kernel               elementwise transcendental
chlo.asinh                          elementwise transcendental
chlo.atan                           elementwise transcendental
chlo.atanh                          elementwise transcendental
chlo.bessel_i1e                     elementwise transcendental polynomial
chlo.conj                           elementwise
chlo.constant_like                  elementwise no_arithmetic
chlo.cosh                           elementwise transcendental
chlo.digamma                        elementwise transcendental polynomial
chlo.erf                            elementwise transcendental polynomial
chlo.erf_inv                        elementwise transcendental polynomial
chlo.erfc                           elementwise transcendental polynomial
chlo.erfcx                          elementwise transcendental polynomial
chlo.is_inf                         elementwise
chlo.is_neg_inf                     elementwise
chlo.is_pos_inf                     elementwise
chlo.lgamma                         elementwise transcendental polynomial
chlo.lgamma_scaled                  elementwise transcendental polynomial
chlo.log_sigmoid                    elementwise transcendental
chlo.mulhi                          elementwise
chlo.next_after                     elementwise
chlo.polygamma                      elementwise transcendental polynomial
chlo.sinh                           elementwise transcendental
chlo.square                         elementwise positive
chlo.tan                            elementwise transcendental
chlo.zeta                           elementwise transcendental polynomial
"""


def _read_rows() -> dict[str, OpKind]:
    words = {field.name for field in fields(OpKind)} - {"name"}
    kinds: dict[str, OpKind] = {}
    for line in _ROWS.split("\n"):
        if not line:
            continue
        name, *row = line.split()
        assert name not in kinds and words.issuperset(row), line
        kinds[name] = OpKind(name, **dict.fromkeys(row, True))
    return kinds


OP_KINDS = _read_rows()
_SCALING = OpKind(DOT_GENERAL, scaling=True)
_BROADCASTING = "chlo.broadcast_"


def kind_of(name: str, scaling: bool = False) -> OpKind:
    """The kind of the op of a dialect name. An op without a row has no properties, except that Shardy's ops count no
    flops.

    `chlo.broadcast_add` and the like have the kind of the op without the prefix. scaling: it is a contraction that only
    scales.
    """
    if scaling:
        return _SCALING
    kind = OP_KINDS.get(name)
    if kind is not None:
        return kind
    if name.startswith(_BROADCASTING):
        short = name.removeprefix(_BROADCASTING)
        return OP_KINDS.get(f"stablehlo.{short}") or OP_KINDS.get(f"chlo.{short}") or OpKind(name)
    return OpKind(name, no_arithmetic=name.startswith("sdy."))
