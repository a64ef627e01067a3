"""Promised collectives beside compiled ones: sums, shares, and what is named as different."""

from __future__ import annotations

import pytest

from toast_cli.ask_xla.collectives import CompiledCollective
from toast_cli.ask_xla.verdict import TrafficComparison, compare_traffic, judged_traffic, place_of
from toast_cli.plan.partitioned import CollectiveFacts

MESH = {"data": 4, "model": 2}
MB = 1_000_000


def promised(kind: str, axes: str, size: int, count: int = 1, place: str = "") -> CollectiveFacts:
    return CollectiveFacts(kind, axes.split("+"), size, count, 0.0, place)


def compiled(
    kind: str, axes: str, size: int, count: float = 1.0, place: str = "", name: str = ""
) -> CompiledCollective:
    return CompiledCollective(kind, tuple(axes.split("+")), size, count, name, place)


def compared(one: list[CollectiveFacts], other: list[CompiledCollective]) -> TrafficComparison:
    return compare_traffic(one, other, MESH)


# What each device sends for a result of 4 MB over 4 devices (2 for "model"), in rings.
SENT = [
    ("all-reduce", "data", 6 * MB),
    ("all-reduce", "model", 4 * MB),
    ("all-reduce", "data+model", 7 * MB),
    ("all-gather", "data", 3 * MB),
    ("reduce-scatter", "data", 12 * MB),
    ("all-to-all", "data", 3 * MB),
    ("collective-permute", "data", 4 * MB),
]


@pytest.mark.parametrize(("kind", "axes", "sent"), SENT)
def test_bytes_sent(kind: str, axes: str, sent: int) -> None:
    found = compared([], [compiled(kind, axes, 4 * MB)])
    assert (found.promised_bytes, found.compiled_bytes, found.extra_bytes, found.missing_bytes) == (0, sent, sent, 0)
    assert found.share == 0.0


@pytest.mark.parametrize("kind", ["all-gather", "reduce-scatter"])
def test_one_axis_after_the_other_is_the_same(kind: str) -> None:
    """Scattered to 1 MB over 4 x 2: first over 4 to 2 MB, then over 2 to 1 MB. Gathered to 8 MB: to 2 MB over model, to
    8 MB over data.
    """
    size, steps = {"reduce-scatter": (MB, (2 * MB, MB)), "all-gather": (8 * MB, (8 * MB, 2 * MB))}[kind]
    one_by_one = [promised(kind, "data", steps[0]), promised(kind, "model", steps[1])]
    found = compared(one_by_one, [compiled(kind, "model+data", size)])
    assert found.share == 1.0 and found.differences == []


@pytest.mark.parametrize(("axes", "pieces"), [("data", {"data": MB}), ("data+model", {"data": MB, "model": MB // 2})])
def test_a_sum_may_be_scattered(axes: str, pieces: dict[str, int]) -> None:
    """An all-reduce of 4 MB, of which each device keeps a piece, is compiled as one reduce-scatter for each axis."""
    sums = [promised("all-reduce", axes, 4 * MB, count=3), promised("all-reduce", axes, 4 * MB)]
    scattered = [compiled("reduce-scatter", axis, size, count=3) for axis, size in pieces.items()]
    found = compared(sums, [*scattered, compiled("all-reduce", axes, 4 * MB)])
    assert found.share == 1.0 and found.differences == []
    assert compared([promised("all-reduce", axes, 2 * MB)], scattered).share < 1.0


def test_loops_count() -> None:
    found = compared([promised("all-gather", "data", MB, 10)], [compiled("all-gather", "data", MB, 10.0)])
    assert found.share == 1.0
    assert [(r.promised_count, r.compiled_count) for r in found.rows] == [(10, 10)]


def test_differences_are_named() -> None:
    """Equal ones of one line are struck off first, then equal ones of any line; what is left is named, the largest
    first.
    """
    found = compared(
        [
            promised("all-gather", "data", MB, 2, "a.py:1 (f/dot)"),
            promised("all-gather", "data", MB, 1, "a.py:2 (f/mul)"),
            promised("all-reduce", "model", MB, 1, "a.py:3 (f/sum)"),
        ],
        [
            compiled("all-gather", "data", MB, 2.0, "a.py:1", "f/dot"),
            compiled("all-gather", "data", MB, 1.0, "a.py:9", "f/other"),
            compiled("all-gather", "data", 4 * MB, 3.0, "a.py:5", "f/gather"),
        ],
    )
    assert [(d.side, d.kind, d.axes, d.bytes, d.count, d.place) for d in found.differences] == [
        ("extra", "all-gather", ("data",), 4 * MB, 3.0, "a.py:5 (f/gather)"),
        ("missing", "all-reduce", ("model",), MB, 1.0, "a.py:3 (f/sum)"),
    ]
    assert found.differences[0].sent_bytes == 9 * MB


@pytest.mark.parametrize(
    ("one", "other", "outcome"),
    [
        ([], [], "agreed"),
        ([promised("all-reduce", "data", MB)], [compiled("all-reduce", "data", MB)], "agreed"),
        ([promised("all-reduce", "data", MB)], [compiled("all-reduce", "data", 1_040_000)], "agreed"),
        ([promised("all-reduce", "data", MB)], [compiled("all-reduce", "data", 1_070_000)], "disagreed"),
        ([promised("all-reduce", "data", MB)], [compiled("all-reduce", "data", 1_200_000)], "disagreed"),
        ([promised("all-reduce", "data", MB)], [compiled("all-reduce", "data", 800_000)], "disagreed"),
        ([promised("all-reduce", "data", MB)], [compiled("all-reduce", "model", MB)], "disagreed"),
        ([promised("all-reduce", "data", MB)], [], "disagreed"),
        ([promised("all-reduce", "data", 1000)], [], "unchecked"),
        (
            [promised("all-reduce", "data", MB)],
            [compiled("all-reduce", "data", MB), compiled("all-gather", "?", 10)],
            "agreed",
        ),
    ],
)
def test_verdicts(one: list[CollectiveFacts], other: list[CompiledCollective], outcome: str) -> None:
    assert judged_traffic(compared(one, other))[0] == outcome


@pytest.mark.parametrize(
    ("name", "location", "expected"),
    [
        ("jit(f)/transpose(jvp(mlp))/dot_general", "m.py:3", "m.py:3 (bwd mlp/dot_general)"),
        ("jit(f)/transpose(jvp(mlp))/dot_general", "", "bwd mlp/dot_general"),
        ("jit(f)", "m.py:3", "m.py:3"),
    ],
)
def test_compiled_collectives_have_places_as_the_report_writes_them(name: str, location: str, expected: str) -> None:
    assert place_of(CompiledCollective("all-gather", ("data",), 8, 1.0, name, location)) == expected
