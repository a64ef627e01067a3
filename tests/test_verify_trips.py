"""Trip counts read off compiled loops."""

from __future__ import annotations

import pytest

from toast_cli.ask_xla.hlo_text import computations, run_counts

LOOP = """HloModule loop

%condition (c: (f32[4], s32[])) -> pred[] {{
  %c = (f32[4]{{0}}, s32[]) parameter(0)
  %i = s32[] get-tuple-element(%c), index=1
  %bound = s32[] constant({bound})
  ROOT %go = pred[] compare({operands}), direction={direction}
}}

%body (b: (f32[4], s32[])) -> (f32[4], s32[]) {{
  %b = (f32[4]{{0}}, s32[]) parameter(0)
  %x = f32[4]{{0}} get-tuple-element(%b), index=0
  %i.1 = s32[] get-tuple-element(%b), index=1
  %by = s32[] constant({by})
  %next = s32[] {move}(%i.1, %by)
  %kept = s32[] copy(%next)
  ROOT %all = (f32[4]{{0}}, s32[]) tuple(%x, %kept)
}}

ENTRY %main (a: f32[4], n: s32[]) -> f32[4] {{
  %a = f32[4]{{0}} parameter(0)
  %n = s32[] parameter(1)
  %start = s32[] {start}
  %init = (f32[4]{{0}}, s32[]) tuple(%a, %start)
  ROOT %w = (f32[4]{{0}}, s32[]) while(%init), condition=%condition, body=%body
}}
"""
UP = {"bound": 11, "operands": "%i, %bound", "direction": "LT", "by": 1, "move": "add", "start": "constant(0)"}


@pytest.mark.parametrize(
    ("change", "trips"),
    [
        ({}, 11),
        ({"start": "constant(3)"}, 8),
        ({"start": "constant(-3)", "direction": "LE"}, 15),
        ({"by": 4}, 3),
        ({"operands": "%bound, %i", "direction": "GT"}, 11),
        ({"bound": -1, "direction": "GT", "by": 1, "move": "subtract", "start": "constant(7)"}, 8),
        ({"bound": 0, "direction": "GE", "by": -2, "start": "constant(7)"}, 4),
        ({"start": "constant(20)"}, 0),
        ({"start": "copy(%n)"}, 11),  # unknown start: the one constant stands for the count
    ],
)
def test_trips_of_a_counter(change: dict[str, str | int], trips: int) -> None:
    bodies, entry = computations(LOOP.format_map(UP | change))
    assert run_counts(bodies, entry)[0]["body"] == trips


def test_a_size_that_shards_are_masked_with_is_no_count() -> None:
    masked = "  %all_of_it = s32[4]{0} broadcast(%bound), dimensions={}\n  ROOT %go = pred[] compare(%i, %limit),"
    text = LOOP.format_map(UP | {"start": "copy(%n)"}).replace("  ROOT %go = pred[] compare(%i, %bound),", masked)
    bodies, entry = computations(text)
    assert run_counts(bodies, entry)[0]["body"] == 1


def test_a_condition_of_several_parts_says_the_most_there_can_be() -> None:
    text = LOOP.format_map(UP).replace(
        "  ROOT %go = pred[] compare(%i, %bound), direction=LT",
        """  %early = pred[] compare(%i, %bound), direction=LT
  %most = s32[] constant(70)
  %other = pred[] compare(%i, %most), direction=LT
  %both = pred[] and(%early, %other)
  %going = pred[] get-tuple-element(%c), index=2
  ROOT %go = pred[] and(%both, %going)""",
    )
    bodies, entry = computations(text)
    assert run_counts(bodies, entry)[0]["body"] == 11


@pytest.mark.parametrize(
    ("start", "offset", "trips"), [("copy(%n)", 8, 8), ("add(%n, %two)", 8, 6), ("negate(%n)", 8, 8)]
)
def test_trips_between_two_sums_with_one_unknown_number(start: str, offset: int, trips: int) -> None:
    """The bound is an element that the body passes on; the last start is another number, so that the condition's one
    constant is taken."""
    text = (
        LOOP.format_map(UP | {"start": start, "operands": "%i, %end", "bound": offset})
        .replace("(f32[4], s32[])", "(f32[4], s32[], s32[])")
        .replace("(f32[4]{0}, s32[])", "(f32[4]{0}, s32[], s32[])")
        .replace(
            "  ROOT %go", "  %m = s32[] get-tuple-element(%c), index=2\n  %end = s32[] add(%m, %bound)\n  ROOT %go"
        )
        .replace("tuple(%x, %kept)", "tuple(%x, %kept, %m.1)")
        .replace("  %by =", "  %m.1 = s32[] get-tuple-element(%b), index=2\n  %by =")
        .replace("  %start =", "  %two = s32[] constant(2)\n  %start =")
        .replace("tuple(%a, %start)", "tuple(%a, %start, %n)")
    )
    bodies, entry = computations(text)
    assert run_counts(bodies, entry)[0]["body"] == trips


def test_a_loop_that_runs_as_often_as_an_earlier_one() -> None:
    """The gradient of a loop counts from 0 to what that has counted to (TensorFlow): 0, 2, …, 12 is 7 rounds, and then
    as many as fit below 14."""
    text = LOOP.format_map(UP | {"by": 2, "bound": 13})
    text = text.replace("  ROOT %w =", "  %w =").replace(
        "body=%body\n}",
        """body=%body
  %until = s32[] get-tuple-element(%w), index=1
  %zero = s32[] constant(0)
  %more = (s32[], s32[]) tuple(%zero, %until)
  ROOT %v = (s32[], s32[]) while(%more), condition=%later_condition, body=%later
}""",
    )
    later = """%later_condition (c: (s32[], s32[])) -> pred[] {
  %d = (s32[], s32[]) parameter(0)
  %k = s32[] get-tuple-element(%d), index=0
  %bound = s32[] get-tuple-element(%d), index=1
  ROOT %go = pred[] compare(%bound, %k), direction=GT
}

%later (b: (s32[], s32[])) -> (s32[], s32[]) {
  %e = (s32[], s32[]) parameter(0)
  %k.1 = s32[] get-tuple-element(%e), index=0
  %bound.1 = s32[] get-tuple-element(%e), index=1
  %one = s32[] constant(1)
  %next.1 = s32[] add(%k.1, %one)
  ROOT %all.1 = (s32[], s32[]) tuple(%next.1, %bound.1)
}

ENTRY"""
    bodies, entry = computations(text.replace("ENTRY", later))
    counts, _ = run_counts(bodies, entry)
    assert (counts["body"], counts["later"]) == (7, 14)


@pytest.mark.parametrize(
    ("condition", "trips"),
    [
        ("  %is = pred[] compare(%i, %bound), direction=EQ\n  ROOT %go = pred[] not(%is)", 8),
        ("  ROOT %go = pred[] compare(%i, %bound), direction=NE", 8),
        (
            "  %is = pred[] compare(%i, %bound), direction=GE\n  %same = pred[] copy(%is)\n"
            "  %all = pred[] custom-call(%i)\n  %or = pred[] or(%same, %all)\n  ROOT %go = pred[] not(%or)",
            8,
        ),
        (  # the counter runs behind what is compared
            "  %two = s32[] constant(2)\n  %at = s32[] add(%i, %two)\n"
            "  %is = pred[] compare(%at, %bound), direction=EQ\n  ROOT %go = pred[] not(%is)",
            6,
        ),
        (  # one of two conditions is enough to go on: the one constant stands for the count
            "  %is = pred[] compare(%i, %bound), direction=LT\n  %more = pred[] custom-call(%i)\n"
            "  ROOT %go = pred[] or(%is, %more)",
            11,
        ),
    ],
)
def test_decoding_until_a_length_or_until_all_are_finished(condition: str, trips: int) -> None:
    text = LOOP.format_map(UP | {"start": "constant(3)"}).replace(
        "  ROOT %go = pred[] compare(%i, %bound), direction=LT", condition
    )
    bodies, entry = computations(text)
    assert run_counts(bodies, entry)[0]["body"] == trips
