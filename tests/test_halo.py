"""What crosses between devices when a dimension with windows is split, by hand and as XLA does it; every op, split."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from cases import SITUATIONS
from cases.model import Situation
from cases.running import FORMS, MESHES, REGIONS, Planned, Whole
from emitted import emit_shardy
from jax import lax
from jaxlib.mlir.dialects import stablehlo
from op_kinds import OPS, TEXTS
from programs import Case, arg, case_of, round_mesh
from run_here import run_program
from test_features import DEVICES, partitioned, together

from toast_cli import xla
from toast_cli.ask_xla.numbers import input_sets, relative_error
from toast_cli.emit.regions.rules import RULES
from toast_cli.plan.decision_space import decision_space
from toast_cli.plan.decisions import Plan, Shard
from toast_cli.plan.reshard import WindowRead, exchanged, neighbours
from toast_cli.plan.sharding import Sharding
from toast_cli.program.model import Window
from toast_cli.program.ops import SLICE

ROWS = 64

# name, window of one dimension, shards, elements in each permute (None: gathered)
HALOS: list[tuple[str, Window, int, tuple[int, ...] | None]] = [
    # Device k has rows 16k to 16k + 16 and needs 16k - 1 to 16k + 17.
    ("three wide", Window(0, 0, 64, 64, size=3, low=1), 4, (1, 1)),
    # 16k - 3 to 16k + 19.
    ("seven wide", Window(0, 0, 64, 64, size=7, low=3), 4, (3, 3)),
    # One in front, nothing behind: 16k - 1 to 16k + 16.
    ("two wide, padded in front", Window(0, 0, 64, 64, size=2, low=1), 4, (1,)),
    # 8 results each, two rows apart: 16k to 16k + 14 + 3.
    ("three wide, every other", Window(0, 0, 64, 32, size=3, stride=2), 4, (1,)),
    # 16k to 16k + 16: all its own.
    ("two wide, every other", Window(0, 0, 64, 32, size=2, stride=2), 4, ()),
    # Elements of a window two apart, five wide: 16k - 2 to 16k + 18.
    ("three wide, two apart", Window(0, 0, 64, 64, size=3, low=2, spread=2), 4, (2, 2)),
    # Two halos of a whole shard and one of half on each side.
    ("wider than a shard", Window(0, 0, 64, 64, size=21, low=10), 16, (2, 4, 4, 4, 4, 2)),
    # Holes between rows: 128 results of 64 rows, 32 each. Results 32k to 32k + 32 read stretched rows 32k - 1 to 32k +
    # 33, so rows 16k to 16k + 17.
    ("stretched to twice as many", Window(0, 0, 64, 128, size=3, low=1, dilation=2), 4, (1,)),
    # Rows 4 to 64 - 4 of 64: device k has 14 and needs 14k + 4 to 14k + 18; so the first lacks two, and the last is
    # short by two in front.
    ("a slice of the middle", Window(0, 0, 64, 56, low=-4), 4, (2, 2)),
    # The second half, 2 rows each: 32 + 2k to 34 + 2k. Devices 8 to 15 have four each, that is two devices' part.
    # Device 15 keeps its second half. First each sends what comes first, rows 0 to 2 of four; devices 8 to 14 then 2 to
    # 4.
    ("a slice far from home", Window(0, 0, 64, 32, low=-32), 16, (2, 2)),
    # Everything from the last device, one row to each.
    ("a slice that everybody needs a piece of", Window(0, 0, 64, 4, low=-60), 4, (1, 1, 1)),
    # As wide as everything: 31 before and 32 behind.
    ("wider than what is left", Window(0, 0, 64, 64, size=64, low=31), 4, None),
    # Eight in front: device k makes 18 rows, 18k - 8 to 18k + 10 of the operand: the first two need nothing, the others
    # 6, 4 and 2 from the left.
    ("a padding in front", Window(0, 0, 64, 72, low=8), 4, (6,)),
]


def widths(window: Window, shards: int, *, summed: bool = False) -> tuple[int, ...] | None:
    """Elements in each permute."""
    found = exchanged(window, shards, summed=summed)
    return None if found is None else tuple(permute.last - permute.first for permute in found)


@pytest.mark.parametrize(("window", "shards", "expected"), [h[1:] for h in HALOS], ids=[h[0] for h in HALOS])
def test_worked_out(window: Window, shards: int, expected: tuple[int, ...] | None) -> None:
    assert widths(window, shards) == expected


def test_where_the_kernel_is_split_too() -> None:
    """The gradient of a 7-wide stride-2 kernel: 24 rows, 12 of the incoming gradient 2 apart, padded 2 and 3. Device k
    has rows 12k to 12k + 12 and 6 of the gradient; for 7 results it needs 12k - 2 to 12k - 2 + 10 + 1 + 6.
    """
    window = Window(0, 0, 24, 7, size=12, low=2, spread=2, kernel_dim=0)
    assert widths(window, 2, summed=True) == (2, 3)


# ---------------------------------------------------------------- as compiled


def convolution(size: int, padding: Any = "SAME", **how: Any) -> tuple[Any, tuple[Any, ...]]:
    def run(x: Any, w: Any) -> Any:
        return lax.conv_general_dilated(x, w, padding=padding, dimension_numbers=("NHWC", "HWIO", "NHWC"), **how)

    return run, (arg(2, ROWS, 8, 4), arg(size, 3, 4, 4))


def twice_convolved(*sizes: int) -> tuple[Any, tuple[Any, ...]]:
    """What one convolution has been sent, the other need not be sent again."""

    def run(x: Any, v: Any, w: Any) -> Any:
        one, other = (
            lax.conv_general_dilated(x, k, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")) for k in (v, w)
        )
        return one * jnp.sin(other)

    return run, (arg(2, ROWS, 8, 4), *(arg(size, 3, 4, 4) for size in sizes))


def convolved(x: Any, w: Any, stride: int) -> Any:
    return lax.conv_general_dilated(x, w, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def kernel_gradient(size: int, stride: int) -> tuple[Any, tuple[Any, ...]]:
    run, shapes = convolution(size, window_strides=(stride, 1))
    return lambda x, w: jax.grad(lambda w: jnp.sum(run(x, w) ** 2))(w), shapes


def pooling(size: int, stride: int) -> tuple[Any, tuple[Any, ...]]:
    def run(x: Any) -> Any:
        return lax.reduce_window(x, 0.0, lax.add, (1, size, 1, 1), (1, stride, 1, 1), "SAME")

    return run, (arg(2, ROWS, 8, 4),)


def of_rows(run: Callable[[Any], Any]) -> tuple[Any, tuple[Any, ...]]:
    return run, (arg(2, ROWS, 8),)


COMPILED: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "three wide": convolution(3, window_strides=(1, 1)),
    "seven wide": convolution(7, window_strides=(1, 1)),
    "two wide": convolution(2, window_strides=(1, 1)),
    "every other": convolution(7, window_strides=(2, 1)),
    "two apart": convolution(5, window_strides=(1, 1), rhs_dilation=(2, 1)),
    "wider than a shard": convolution(41, window_strides=(1, 1)),
    "stretched": convolution(3, ((1, 2), (1, 1)), window_strides=(1, 1), lhs_dilation=(2, 1)),
    "gradient of a kernel": kernel_gradient(5, 1),
    "gradient of a kernel, every other": kernel_gradient(7, 2),
    "one wide": convolution(1, padding=((0, 0), (1, 1)), window_strides=(1, 1)),
    "read by two": twice_convolved(3, 5),
    "read by two alike": twice_convolved(3, 3),
    "read by two, one halo alike": twice_convolved(3, 4),
    "pooling": pooling(3, 2),
    "pooling in blocks": pooling(4, 4),
    "a slice of the middle": of_rows(lambda x: lax.slice_in_dim(x, 4, ROWS - 4, axis=1)),
    "the second half": of_rows(lambda x: lax.slice_in_dim(x, ROWS // 2, ROWS, axis=1)),
    "a slice of a quarter": of_rows(lambda x: lax.slice_in_dim(x, 0, ROWS // 4, axis=1)),
    "every other row": of_rows(lambda x: lax.slice_in_dim(x, 0, ROWS, 2, axis=1)),
    "two slices from afar": of_rows(lambda x: x[:, ROWS // 2 :] + x[:, ROWS // 2 :] * x[:, : ROWS // 2]),
    "two slices of everything": of_rows(lambda x: (x[:, 1::2], x[:, : ROWS - 2 : 2])),
    "a padding in front": of_rows(lambda x: jnp.pad(x, ((0, 0), (8, 0), (0, 0)))),
    "a padding on both sides": of_rows(lambda x: jnp.pad(x, ((0, 0), (4, 4), (0, 0)))),
    "a roll": of_rows(lambda x: jnp.roll(x, 3, 1)),
    "a roll by more than a shard": of_rows(lambda x: jnp.roll(x, -ROWS // 4 - 3, 1)),
    "roll and way back": of_rows(jax.grad(lambda x: jnp.sum(jnp.sin(jnp.roll(jnp.cos(x), 3, 1))))),
    "a causal shift": of_rows(lambda x: jnp.pad(x, ((0, 0), (1, 0), (0, 0)))[:, :-1]),
}


def split(name: str) -> tuple[Case, Any]:
    run, shapes = COMPILED[name]
    case = case_of(run, *shapes)
    places = [("x.1", "data"), ("x.0", "model")] if name.startswith("gradient") else [("x.1", "data")]
    return case, tuple(case.shard(*place) for place in places)


@pytest.mark.parametrize("name", COMPILED)
def test_as_compiled(name: str, tmp_path: Path) -> None:
    """Predicted are the collectives that the partitioner puts in, and the numbers stay."""
    case, plan = split(name)
    content = emit_shardy(case.source, case.lowered(plan))
    predicted = together([(kind, axes, round(size), count) for kind, axes, size, count in case.collectives(plan)])
    assert predicted == partitioned(case, content, tmp_path, shardy=True)
    assert numbers_stay(case, content)


def odd_attention(qkv: Any, out: Any, x: Any, y: Any) -> Any:
    """Queries, keys and values side by side, their widths no multiple of the mesh: each slice of them is sent."""
    q, k, v = (part.reshape(*x.shape[:2], 6, -1) for part in jnp.split(x @ qkv, 3, -1))
    scores = jax.nn.softmax(jnp.einsum("bshk,bthk->bhst", q, k), -1)
    return jnp.mean((x + jnp.einsum("bhst,bthk->bshk", scores, v).reshape(x.shape) @ out - y) ** 2)


def test_what_is_made_of_neighbours_pieces_stays_there(tmp_path: Path) -> None:
    """XLA's propagation takes it elsewhere in larger programs, and back by all-to-alls, where Shardy's does not."""
    width = 36
    arrays = (arg(width, 3 * width), arg(width, width), *[arg(12, 20, width)] * 2)
    gradient = jax.grad(odd_attention, (0, 1))
    case = case_of(lambda qkv, out, x, y: gradient(qkv, out, x, y), *arrays)
    plan = (case.shard("x.0", "data"), case.shard("qkv.1", "model"), case.shard("out.0", "model"))
    lowered = case.lowered(plan)
    beside = {op for one in lowered.collectives if one.reason == "neighbours" for op, _ in one.uses}
    assert sum(case.program.ops[op].name == SLICE for op in beside) == 2  # the first is where it was
    predicted = together([(kind, axes, round(size), count) for kind, axes, size, count in case.collectives(plan)])
    assert predicted == partitioned(case, emit_shardy(case.source, lowered), tmp_path, shardy=True)


def numbers_stay(case: Case, content: bytes) -> bool:
    """Whether the partitioned program gives what the whole one gives."""
    inputs = input_sets(case.source.module, 1, 1)[0]
    shapes = [case.program.values[r.value].shape for r in case.program.results]
    whole = run_program(xla.write_bytecode(case.source.module), inputs, shapes, 1, shardy=True)
    parts = run_program(content, inputs, shapes, DEVICES, shardy=True)
    return all(relative_error(a, b) < 1e-5 for a, b in zip(whole, parts, strict=True))


# Where XLA would add up more than there is, if the plan did not leave space whole: of a convolution and its kernel's
# gradient.
OVERLAPPING = {
    "nothing else split": [("x.1", "data")],
    "more devices hold a piece": [("x.1", "model")],
    "the kernel's outputs split too": [("x.1", "data"), ("w.3", "model")],
    "the kernel's inputs split too": [("x.1", "data"), ("w.2", "model")],
    "the batch split too": [("x.1", "data"), ("x.0", "model")],
    "both dimensions of space": [("x.1", "data"), ("x.2", "model")],
}


@pytest.mark.parametrize("places", OVERLAPPING.values(), ids=OVERLAPPING)
def test_no_piece_counts_twice(places: list[tuple[str, str]]) -> None:
    """Also where the kernel's gradient has more inputs than outputs, and fewer."""

    def step(x: Any, w: Any) -> Any:
        def loss(w: Any) -> Any:
            return jnp.sum(
                lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")) ** 2
            )

        return w - 0.1 * jax.grad(loss)(w)

    kernels = arg(3, 3, 4, 4), arg(3, 3, 4, 32), arg(3, 3, 32, 4)
    for kernel in kernels if len(places) == 1 else kernels[1:]:
        case = case_of(step, arg(2, 16, 8, kernel.shape[2]), kernel)
        plan = tuple(case.shard(*place) for place in places)
        assert numbers_stay(case, emit_shardy(case.source, case.lowered(plan)))


# Plans for a mesh of three axes, found by trying plans at random, which gave wrong gradients while space and kernel
# could be split together.
THREE_AXES = [
    "x.2=c w.3=b x.0=a",
    "v.3=b x.0=c x.1=c x.3=a x.2=a",
    "x.1=a x.0=b",
    "x.1=a x.2=b x.0=c",
    "x.1=a x.3=b v.3=c",
]


@pytest.mark.parametrize("words", THREE_AXES)
def test_no_piece_counts_twice_in_two_layers(words: str) -> None:
    def step(x: Any, w: Any, v: Any) -> Any:
        def loss(w: Any, v: Any) -> Any:
            y = x
            for kernel, stride in ((w, 1), (v, 2)):
                y = convolved(jax.nn.relu(y), kernel, stride)
            return jnp.sum(y**2)

        return [p - 0.1 * g for p, g in zip((w, v), jax.grad(loss, argnums=(0, 1))(w, v), strict=True)]

    case = case_of(step, arg(4, 16, 16, 8), arg(3, 3, 8, 16), arg(3, 3, 16, 8), mesh=round_mesh(a=2, b=2, c=2))
    plan = tuple(case.shard(*word.split("=")) for word in words.split())
    assert numbers_stay(case, emit_shardy(case.source, case.lowered(plan)))


def test_of_a_corner_only_what_is_read_is_sent_on() -> None:
    """The first 4 of 64 rows, and 4 of 32 columns, one and two on each device: rows of 16 columns are sent first, and
    of the one row that a device then has, two columns."""
    read = WindowRead((Window(0, 0, 64, 4), Window(1, 1, 32, 4)), ((0,), (1,)), ())
    sent = [exchange for exchange, _ in neighbours(64 * 32 * 4, [read], (4, 2))]
    assert [(one.axes, one.bytes) for one in sent] == [((0,), 64)] * 3 + [((1,), 8)]


# -- every kind of op, split along each dimension it can be, in every form: numbers and collectives are as promised


SPLIT = {name: Situation(*OPS[name]) if name in OPS else Situation(TEXTS[name]) for name in (*OPS, *TEXTS)}
# What they hold is in no manual region.
ALIKE = frozenset(
    """elementwise of CHLO; bits; fewer bits; functions of one number; functions of two; bits of integers;
    parts of complex numbers; older operations; functions of CHLO""".replace("\n   ", "").split("; ")
)
assert SPLIT.keys() >= ALIKE
# Ops that no program here or in the corpus holds.
UNTRIED = {
    "all_gather all_to_all collective_broadcast collective_permute": "by hand",
    "collective_reduce cross-replica-sum reduce_scatter": "by hand",
    "async_start async_done send recv": "between programs, which nothing can run here",
    "tuple get_tuple_element": "taken apart when a program is read: test_normalise",
    "uniform_quantize uniform_dequantize": "refused: test_older_text",
    "unary_einsum": "XLA does not translate it",
    "set_dimension_size dynamic_conv dynamic_gather": "of unknown sizes, which are refused",
}


@lru_cache(maxsize=2)
def planned(name: str) -> Planned:
    return Planned(Whole(SPLIT[name]), MESHES["4x2"], plans=1)


def plans(at: Planned) -> list[Plan]:
    """Each dimension class over an axis of 4, and two of them over axes of 4 and 2; those that do something else."""
    choices = [d for d in decision_space(at.evaluator.problem).choices if isinstance(d, Shard)]
    single = [(d,) for d in choices if d.axis == 0]
    pairs: list[Plan] = [
        (*one, two) for one in single for two in choices if two.axis == 1 and two.group != one[0].group
    ]
    found: dict[tuple[tuple[Sharding, ...], tuple[object, ...]], Plan] = {}
    for plan in (*single, *pairs[:2]):
        lowered = at.evaluator.lowered(plan)
        found.setdefault((tuple(lowered.shardings), tuple(lowered.required.items())), plan)
    return list(found.values())


def trials() -> list[Any]:
    """(op, form, how many plans, None for all): `make test` compiles one of each form."""
    forms = (*FORMS, REGIONS)
    pairs = [(name, form) for name in SPLIT for form in ("stablehlo", REGIONS) if form != REGIONS or name not in ALIKE]
    one = [pytest.param(name, form, 1, id=f"{name}, {form}, 1") for name, form in pairs]
    thorough = pytest.mark.thorough
    every = [pytest.param(name, form, None, marks=thorough, id=f"{name}, {form}") for name in SPLIT for form in forms]
    return one + every


@pytest.mark.parametrize(("name", "form", "many"), trials())
def test_as_promised_however_it_is_split(name: str, form: str, many: int | None) -> None:
    at = planned(name)
    tried = plans(at)[::-1][:many]  # those over two axes first
    assert {plan: found for plan in tried if (found := list(at.under(plan).wrong_with(form)))} == {}


def test_every_op_of_stablehlo_is_tried() -> None:
    tried = {
        name for one in (*SPLIT.values(), *SITUATIONS.values()) for name in re.findall(r"stablehlo\.\w+", one.text)
    }
    known = {kind.OPERATION_NAME for kind in vars(stablehlo).values() if hasattr(kind, "OPERATION_NAME")}
    untried = {f"stablehlo.{name}" for names in UNTRIED for name in names.split()}
    assert known - tried == untried & known  # a jaxlib has the ops of its version


# Tried in tests/test_ragged_dots.py.
ELSEWHERE = {"chlo.ragged_dot", "__op$block_scaled_dot"}


def test_every_local_rule_is_tried() -> None:
    untried = set(RULES) - ELSEWHERE
    for one in (*SPLIT.values(), *SITUATIONS.values()):
        if any(name in one.text for name in untried):
            untried -= {op.name for op in one.source().program.ops}
    assert not untried
