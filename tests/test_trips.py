"""Trip counts of loops, read from the counters that `lax.scan`, `fori_loop` and plain `while_loop` leave behind."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from programs import arg, program_of, source_of, source_of_text

from toast_cli import xla
from toast_cli.ask_xla.child import Failure
from toast_cli.ask_xla.compile import compile_for, virtual_devices
from toast_cli.ask_xla.hlo_text import computations, graphs, run_counts
from toast_cli.base.errors import UsageError
from toast_cli.frontend import Source
from toast_cli.pipeline import partition
from toast_cli.request import Request

X = arg(8, 8)


def said(source: Source) -> list[str]:
    """What notices assume, without the place in this file and the option that says better."""
    pattern = re.compile(r"(.*) \(test_trips\.py:.*\); --runs says how often")
    return [match[1] if (match := pattern.fullmatch(notice)) else notice for notice in source.notices]


def counted(start: int, keep: Callable[[Any], Any], step: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A `while` over a counter beside one array."""

    def run(x: Any) -> Any:
        return lax.while_loop(lambda s: keep(s[0]), lambda s: (step(s[0]), jnp.sin(s[1])), (jnp.int32(start), x))[1]

    return run


def scanned(x: Any) -> Any:
    return lax.scan(lambda carry, row: (carry + row, carry * row), jnp.zeros(8), x)


# name, function of one f32[8,8], trip counts of its loops from the outside in
LOOPS: list[tuple[str, Callable[[Any], Any], list[int]]] = [
    ("scan over rows", scanned, [8]),
    ("scan without inputs", lambda x: lax.scan(lambda c, _: (c @ c, None), x, None, length=5)[0], [5]),
    ("scan backwards", lambda x: lax.scan(lambda c, r: (c + r, c), x[0], x, reverse=True), [8]),
    ("scan unrolled by 2", lambda x: lax.scan(lambda c, r: (c + r, None), x[0], x, unroll=2)[0], [4]),
    ("fori_loop up", lambda x: lax.fori_loop(0, 7, lambda i, c: c @ c, x), [7]),
    ("fori_loop from 3", lambda x: lax.fori_loop(3, 10, lambda i, c: c * i, x), [7]),
    ("while up by 3", counted(0, lambda i: i < 10, lambda i: i + 3), [4]),  # 0 3 6 9
    ("while up, <=", counted(0, lambda i: i <= 9, lambda i: i + 3), [4]),
    ("while that never runs", counted(5, lambda i: i < 2, lambda i: i + 1), [0]),
    ("while down", counted(10, lambda i: i > 0, lambda i: i - 1), [10]),
    ("while down by 4, >=", counted(10, lambda i: i >= 2, lambda i: i - 4), [3]),  # 10 6 2
    ("while, bound on the left", counted(0, lambda i: lax.gt(jnp.int32(6), i), lambda i: 2 + i), [3]),
    ("while, !=", counted(2, lambda i: i != 8, lambda i: i + 2), [3]),
    (
        "nested",
        lambda x: lax.fori_loop(0, 3, lambda i, c: lax.fori_loop(0, 4, lambda j, d: d @ d, c), x),
        [3, 4],
    ),
    (
        "nested with the inner bound outside both",
        lambda x: lax.scan(lambda c, r: (lax.fori_loop(0, 6, lambda j, d: d + r, c), None), x[0], x)[0],
        [8, 6],
    ),
]


def twice(x: Any) -> Any:
    """The second loop runs as often as the first has, as the gradient of a loop of TensorFlow does: 0, 3, 6, 9 is four
    rounds up to 12."""
    rounds, y = lax.while_loop(lambda s: s[0] < 10, lambda s: (s[0] + 3, jnp.sin(s[1])), (jnp.int32(0), x))
    return lax.fori_loop(0, rounds, lambda i, c: c @ c, y)


LOOPS += [
    ("as far as an earlier loop", twice, [4, 12]),
    ("two bounds", counted(0, lambda i: (i < 9) & (i < 5), lambda i: i + 1), [5]),
    ("until a length", counted(3, lambda i: ~(i == 10), lambda i: i + 1), [7]),
    ("until one of two", counted(3, lambda i: ~((i >= 30) | (i == 10)), lambda i: i + 1), [7]),
    ("not not", counted(3, lambda i: ~(~(i < 5)), lambda i: i + 1), [2]),
]

POSITION = arg(dtype="int32")
# name, function of one f32[8,8] and the position at which it starts, trips
FROM_A_POSITION: list[tuple[str, Callable[[Any, Any], Any], int]] = [
    ("up to 8 further", lambda x, i: lax.fori_loop(i, i + 8, lambda i, c: c * i, x), 8),
    ("from 2 further", lambda x, i: lax.fori_loop(i + 2, 8 + i, lambda i, c: c * i, x), 6),
    ("back by 5", lambda x, i: lax.while_loop(lambda s: s[0] > i - 5, lambda s: (s[0] - 1, s[1] * 2), (i, x))[1], 5),
    ("in a loop", lambda x, i: lax.fori_loop(0, 3, lambda j, c: lax.fori_loop(i, i + 4, lambda k, d: d @ d, c), x), 4),
]

# Loops whose counts depend on data, or on something the pattern does not know.
UNKNOWN: list[tuple[str, Callable[[Any], Any]]] = [
    ("until small", lambda x: lax.while_loop(lambda c: jnp.sum(c) > 1.0, lambda c: c / 2, x)),
    ("doubling", counted(1, lambda i: i < 100, lambda i: i * 2)),
    ("never true again", counted(0, lambda i: i < 10, lambda i: i - 1)),
    ("missed by !=", counted(1, lambda i: i != 8, lambda i: i + 2)),
    ("bound from data", lambda x: lax.fori_loop(0, x[0, 0].astype(int), lambda i, c: c + 1, x)),
]


@pytest.mark.parametrize(("run", "trips"), [case[1:] for case in LOOPS], ids=[case[0] for case in LOOPS])
def test_the_count_is_read_from_the_counter(run: Callable[[Any], Any], trips: list[int]) -> None:
    source = source_of(run, X)
    loops = source.program.loops
    assert [loop.trips_known for loop in loops] == [True] * len(trips)
    assert [loop.trips for loop in loops] == trips
    assert source.notices == ()


def rows(most: Callable[[Any], Any], first: int = 0) -> Callable[[Any, Any], Any]:
    """A loop over blocks of keys, as many as row i of blocks of queries needs."""
    return lambda i, y: lax.fori_loop(first, most(i), lambda _, z: jnp.sin(z), y)


# Bounds that follow from the counter of the loop around: trips, the mean over i = 0 … 5.
FROM_THE_OUTER_COUNTER: dict[str, tuple[Callable[[Any], Any], float]] = {
    "causal": (lambda x: lax.fori_loop(0, 6, rows(lambda i: i + 1), x), 3.5),  # 1 2 3 4 5 6
    "causal, at most 4": (lambda x: lax.fori_loop(0, 6, rows(lambda i: jnp.minimum(4, i + 1)), x), 3),  # 1 2 3 4 4 4
    "the same from 1": (lambda x: lax.fori_loop(0, 6, rows(lambda i: jnp.minimum(4, i + 1), 1), x), 2),  # 0 1 2 3 3 3
    "blocks of another size": (lambda x: lax.fori_loop(0, 6, rows(lambda i: (2 * i + 3) // 4), x), 1.5),  # 0 1 1 2 2 3
    "scanned row numbers": (lambda x: lax.map(lambda i: rows(lambda i: i + 1)(i, x), jnp.arange(6)), 3.5),
    "two loops apart": (
        lambda x: lax.fori_loop(0, 6, lambda i, y: lax.fori_loop(0, 2, lambda _, z: rows(lambda _: i)(i, z), y), x),
        2.5,
    ),
}


@pytest.mark.parametrize(("run", "trips"), FROM_THE_OUTER_COUNTER.values(), ids=FROM_THE_OUTER_COUNTER)
def test_a_bound_that_counts_with_the_loop_around_gives_a_mean(run: Callable[[Any], Any], trips: float) -> None:
    source = source_of(run, X)
    assert (source.program.loops[-1].trips, source.program.loops[-1].trips_known) == (trips, True)
    assert source.notices == ()


@pytest.mark.parametrize("first", [0, 1])
def test_a_bound_that_is_the_smaller_of_two_numbers_is_at_most_the_constant(first: int) -> None:
    loops = source_of(lambda x, n: rows(lambda i: jnp.minimum(4, i + 1), first)(n, x), X, POSITION).program.loops
    assert [(loop.trips, loop.trips_known) for loop in loops] == [(4 - first, False)]


def test_nested_bounds_are_followed_a_few_steps() -> None:
    """Each of 40 bounds is the smaller of the two before it: a walk over all ways back would not end."""

    def run(x: Any, i: Any) -> Any:
        bounds = [jnp.minimum(i, 9), jnp.minimum(i, 8)]
        for _ in range(40):
            bounds.append(jnp.minimum(bounds[-1], bounds[-2]))
        return lax.fori_loop(0, bounds[-1], lambda _, c: jnp.sin(c), x)

    assert [loop.trips_known for loop in source_of(run, X, POSITION).program.loops] == [False]


@pytest.mark.parametrize(("run", "trips"), [case[1:] for case in FROM_A_POSITION], ids=[c[0] for c in FROM_A_POSITION])
def test_a_count_is_read_between_two_unknown_numbers(run: Callable[[Any, Any], Any], trips: int) -> None:
    source = source_of(run, X, POSITION)
    assert source.program.loops[-1].trips == trips
    assert source.notices == ()


def test_a_counter_from_an_unknown_number_counts_at_most_from_zero() -> None:
    source = source_of(lambda x, i: lax.fori_loop(i, 32, lambda i, c: c @ c, x), X, POSITION)
    assert [(loop.trips, loop.trips_known) for loop in source.program.loops] == [(32, False)]
    assert said(source) == ["each loop of unknown length is taken to run as often as it can at most"]


def test_a_decoding_loop_runs_at_most_to_its_length() -> None:
    """Until a length is reached or all sequences are finished, as text is generated."""

    def generate(x: Any) -> Any:
        def going(state: Any) -> Any:
            return ~((state[0] == 12) | jnp.all(state[1] > 9.0))

        return lax.while_loop(going, lambda s: (s[0] + 1, s[1] + x), (jnp.int32(4), x))[1]

    source = source_of(generate, X)
    assert [(loop.trips, loop.trips_known) for loop in source.program.loops] == [(8, False)]


def test_one_of_two_conditions_gives_no_count() -> None:
    """`a | b` goes on while one of them holds, and so does `~(~a & ~b)`."""
    either = counted(0, lambda i: (i < 10) | (i * i < 200), lambda i: i + 1)
    assert [loop.trips_known for loop in source_of(either, X).program.loops] == [False]


@pytest.mark.parametrize("run", [case[1] for case in UNKNOWN], ids=[case[0] for case in UNKNOWN])
def test_an_unknown_count_is_one_and_said_so(run: Callable[[Any], Any]) -> None:
    source = source_of(run, X)
    assert [(loop.trips, loop.trips_known) for loop in source.program.loops] == [(1, False)]
    assert said(source) == ["each loop of unknown length is taken to run once"]


def test_ops_run_as_often_as_all_loops_around_them_together() -> None:
    program = program_of(
        lambda x: lax.fori_loop(0, 3, lambda i, c: lax.fori_loop(0, 4, lambda j, d: d @ d, c) + jnp.sin(c), x), X
    )
    assert [op.trips for op in program.ops if op.name == "stablehlo.dot_general"] == [12.0]
    assert [op.trips for op in program.ops if op.name == "stablehlo.sine"] == [3.0]
    assert [loop.parent for loop in program.loops] == [-1, 0]
    outer, inner = program.loops
    assert outer.first < inner.first < inner.last <= outer.last


# Where a bound comes from: operations that hold a constant, and what they are written as.
CONSTANTS = {
    "stablehlo": "%n = stablehlo.constant dense<32> : tensor<i32>",
    "sdy": "%n = sdy.constant dense<32> : tensor<i32>",
    "chlo": "%n = chlo.constant dense<32> : tensor<i32>",
    "arith": "%n = arith.constant dense<32> : tensor<i32>",
    "behind a conversion": "%m = sdy.constant dense<32> : tensor<i64>\n"
    "%n = stablehlo.convert %m : (tensor<i64>) -> tensor<i32>",
}


@pytest.mark.parametrize("bound", CONSTANTS.values(), ids=CONSTANTS)
def test_constants_of_every_dialect_are_bounds(bound: str) -> None:
    text = f"""
    func.func @main(%x: tensor<4xf32>) -> tensor<4xf32> {{
      {bound}
      %zero = sdy.constant dense<0> : tensor<i32>
      %loop:2 = stablehlo.while(%i = %zero, %a = %x) : tensor<i32>, tensor<4xf32>
      cond {{
        %c = stablehlo.compare LT, %i, %n : (tensor<i32>, tensor<i32>) -> tensor<i1>
        stablehlo.return %c : tensor<i1>
      }} do {{
        %one = sdy.constant dense<1> : tensor<i32>
        %k = stablehlo.add %i, %one : tensor<i32>
        %d = stablehlo.sine %a : tensor<4xf32>
        stablehlo.return %k, %d : tensor<i32>, tensor<4xf32>
      }}
      return %loop#1 : tensor<4xf32>
    }}
    """
    assert [loop.trips for loop in source_of_text(text).program.loops] == [32]


def test_a_bound_that_an_outer_loop_carries_unchanged_is_known() -> None:
    text = """
    func.func @main(%x: tensor<4xf32>) -> tensor<4xf32> {
      %zero = stablehlo.constant dense<0> : tensor<i32>
      %one = stablehlo.constant dense<1> : tensor<i32>
      %three = stablehlo.constant dense<3> : tensor<i32>
      %five = stablehlo.constant dense<5> : tensor<i32>
      %outer:3 = stablehlo.while(%i = %zero, %n = %five, %a = %x) : tensor<i32>, tensor<i32>, tensor<4xf32>
      cond {
        %c = stablehlo.compare LT, %i, %three : (tensor<i32>, tensor<i32>) -> tensor<i1>
        stablehlo.return %c : tensor<i1>
      } do {
        %inner:3 = stablehlo.while(%j = %zero, %m = %n, %b = %a) : tensor<i32>, tensor<i32>, tensor<4xf32>
        cond {
          %c = stablehlo.compare LT, %j, %m : (tensor<i32>, tensor<i32>) -> tensor<i1>
          stablehlo.return %c : tensor<i1>
        } do {
          %k = stablehlo.add %j, %one : tensor<i32>
          %d = stablehlo.sine %b : tensor<4xf32>
          stablehlo.return %k, %m, %d : tensor<i32>, tensor<i32>, tensor<4xf32>
        }
        %k = stablehlo.add %i, %one : tensor<i32>
        stablehlo.return %k, %n, %inner#2 : tensor<i32>, tensor<i32>, tensor<4xf32>
      }
      return %outer#2 : tensor<4xf32>
    }
    """
    assert [loop.trips for loop in source_of_text(text).program.loops] == [3, 5]


@pytest.mark.parametrize("both", [jnp.logical_and, jnp.bitwise_and])
def test_a_loop_that_may_end_early_counts_as_the_most_it_can_be(both: Callable[[Any, Any], Any]) -> None:
    def until_small(x: Any) -> Any:
        def going(s: Any) -> Any:
            return both(s[0] < 50, jnp.sum(s[1]) > 1.0)

        return lax.while_loop(going, lambda s: (s[0] + 1, s[1] / 2), (jnp.int32(10), x))[1]

    source = source_of(until_small, X)
    assert [(loop.trips, loop.trips_known) for loop in source.program.loops] == [(40, False)]
    assert said(source) == ["each loop of unknown length is taken to run as often as it can at most"]
    assert any(op.detail == "add" for op in source.program.ops)  # what decides is not dead


def several(x: Any, n: Any) -> Any:
    """A loop, and a conditional in it, that data decide."""
    return lax.while_loop(
        lambda c: jnp.sum(c) > 1.0, lambda c: lax.switch(n, [jnp.sin, jnp.cos, lambda x: x @ x], c), x
    )


def test_what_is_assumed_of_branches_is_said() -> None:
    source = source_of(several, X, POSITION)
    assert [op.trips for op in source.program.ops if op.name == "stablehlo.cosine"] == [pytest.approx(1 / 3)]
    assert said(source)[1:] == ["each branch of a conditional is taken to run equally often"]


def test_the_user_says_how_often_loops_and_branches_run() -> None:
    source = source_of(several, X, POSITION, runs=("*=1,2,5", "test_trips.py:*=40"))
    runs = {op.name: op.trips for op in source.program.ops if op.name in ("stablehlo.sine", "stablehlo.cosine")}
    assert runs == {"stablehlo.sine": 40 * 1 / 8, "stablehlo.cosine": 40 * 2 / 8}
    assert source.notices == ()
    again = source_of_text(source.module.operation.get_asm(enable_debug_info=True))  # as it is written
    assert [op.trips for op in again.program.ops] == [op.trips for op in source.program.ops]


def test_a_branch_that_never_runs_takes_no_time() -> None:
    def either(x: Any) -> Any:
        return lax.cond(x[0, 0] > 0.0, lambda x: jnp.sin(x @ x.T), lambda x: x, x)

    text = jax.jit(either).lower(jax.ShapeDtypeStruct((1024, 1024), jnp.float32)).as_text()
    seconds = [
        partition(Request("m.mlir", "v4-8", content=text.encode(), runs=runs)).report.predicted
        for runs in (("*=0,1",), ("*=1,0",))
    ]
    assert seconds[1].compute_seconds < seconds[0].compute_seconds


# An entry of `--runs`, and what is wrong with it.
WRONG = {
    "40": '--runs: "40" does not say how often something runs',
    "*=often": '--runs: "*=often" does not say how often something runs',
    "*=-1": '--runs: "*=-1" does not say how often something runs',
    "*=0,0,0": '--runs: "*=0,0,0" does not say how often something runs',
    "*=1,2": '--runs: "*=1,2" fits no loop or conditional of the program',
    "train.py*=3": '--runs: "train.py*=3" fits no loop or conditional of the program',
}


@pytest.mark.parametrize(("entry", "message"), WRONG.items(), ids=WRONG)
def test_an_entry_that_says_nothing_is_an_error(entry: str, message: str) -> None:
    with pytest.raises(UsageError) as error:
        source_of(several, X, POSITION, runs=(entry,))
    assert str(error.value).startswith(message)
    assert ("(3 numbers)" in str(error.value)) == ("fits" in message)


# -- trip counts of loops in what XLA makes of a program


Loop = Callable[[Any, Any], Any]


def until(length: int, start: int, step: int = 1) -> Loop:
    """A loop that ends early once an element is large, as decoding does."""

    def run(x: Any, n: Any) -> Any:
        going = lambda s: (s[0] < length) & (s[1][0, 0] < 1e3)  # noqa: E731
        return lax.while_loop(going, lambda s: (s[0] + step, s[1] @ s[1]), (jnp.int32(start), x))[1]

    return run


# What makes a loop, by the rows of its square matrix -> products of such matrices in one run.
LOOP_TEXTS: list[tuple[int, Loop, int]] = [
    (4, lambda x, n: lax.scan(lambda c, _: (c @ c, None), x, None, length=11)[0], 11),
    (6, lambda x, n: lax.fori_loop(3, 11, lambda i, c: c @ c, x), 8),
    (8, until(50, 3), 47),  # 50 is its most, which a condition of several parts does not say
    (10, until(14, 0, step=3), 5),  # 0 3 6 9 12
    (12, lambda x, n: lax.fori_loop(n, n + 7, lambda i, c: c @ c, x), 7),  # from an unknown number
    (14, lambda x, n: lax.fori_loop(0, 3, lambda i, c: lax.fori_loop(0, 4, lambda j, d: d @ d, c), x), 12),
]


def test_loops_run_as_often_as_the_program_says() -> None:
    def run(n: Any, *arrays: Any) -> Any:
        return [loop(x, n) for (_, loop, _), x in zip(LOOP_TEXTS, arrays, strict=True)]

    source = source_of(run, arg(dtype=jnp.int32), *(arg(rows, rows) for rows, _, _ in LOOP_TEXTS))
    text = compile_for(xla.write_bytecode(source.module), "stablehlo", virtual_devices(2))
    assert not isinstance(text, Failure), text
    products = {
        node.sizes[0]: graph.runs
        for graph in graphs(text.hlo_text)
        for node in graph.nodes.values()
        if node.opcode == "dot"
    }
    assert products == {4 * rows * rows: float(count) for rows, _, count in LOOP_TEXTS}


WHILE = """HloModule loop

%condition (c: (f32[4], s32[])) -> pred[] {
  %c = (f32[4]{0}, s32[]) parameter(0)
  %i = s32[] get-tuple-element(%c), index=1
  %bound = s32[] constant(11)
  CONDITION
}

%body (b: (f32[4], s32[])) -> (f32[4], s32[]) {
  ROOT %b = (f32[4]{0}, s32[]) parameter(0)
}

ENTRY %main (a: (f32[4], s32[])) -> (f32[4], s32[]) {
  %a = (f32[4]{0}, s32[]) parameter(0)
  ROOT %w = (f32[4]{0}, s32[]) while(%a), condition=%condition, body=%bodySAID
}
"""
GOES = "ROOT %go = pred[] compare(%i, %bound), direction=LT"
STATED, KNOWN = ', frontend_attributes={toast.runs="5"}', ', backend_config={"known_trip_count":{"n":"3"}}'


@pytest.mark.parametrize(
    ("condition", "said", "trips"),
    [
        (GOES, "", 11),  # XLA's own loops count from 0
        (GOES, STATED, 5),
        (GOES, KNOWN, 3),
        (GOES, STATED + KNOWN, 3),  # the compiler took some of them out of the loop
        (f"%masked = s32[4]{{0}} broadcast(%bound), dimensions={{}}\n  {GOES}", "", 1),  # a size of uneven shards
        (f"%other = s32[] constant(7)\n  {GOES}", "", 1),
    ],
)
def test_who_says_how_often_a_loop_runs(condition: str, said: str, trips: int) -> None:
    bodies, entry = computations(WHILE.replace("CONDITION", condition).replace("SAID", said))
    assert run_counts(bodies, entry)[0]["body"] == trips
