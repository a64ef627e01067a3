"""Folding arrays by pattern: what each row says, and that no array is lost."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from toast_cli.program.quantities import NamedArray, fold

CASES = {
    "one number in every name": (
        [(f"params['layers'][{n}]['wq']", "a") for n in range(4)],
        [("params['layers'][*]['wq']", 4)],
    ),
    "a number that never varies stays": (
        [(f"layers[{n}]['w2']", "a") for n in range(3)] + [(f"layers[{n}]['w1']", "b") for n in range(3)],
        [("layers[*]['w2']", 3), ("layers[*]['w1']", 3)],
    ),
    "a layer of another kind": (
        [("l[0]", "first"), *((f"l[{n}]", "rest") for n in range(1, 18))],
        [("l[0]", 1), ("l[1..17]", 17)],
    ),
    "scattered numbers": (
        [(f"l[{n}]", "a" if n in (0, 1, 5) else "b") for n in range(6)],
        [("l[0..1,5]", 3), ("l[2..4]", 3)],
    ),
    "every ninth": (
        [(f"arg{n}", str(n % 9)) for n in range(36)][:36:1],
        [(f"arg{n},{n + 9}..{n + 27}", 4) for n in range(9)],
    ),
    "too many numbers to read": (
        [(f"l[{n}]", "a" if n in (0, 2, 5, 7, 11) else "b") for n in range(12)],
        [("l[0,2,…,11]", 5), ("l[1,3..4,…,8..10]", 7)],
    ),
    "a pattern that would match too much is split": (
        [("a0b0", "x"), ("a1b1", "x"), ("a0b1", "y"), ("a1b0", "y")],
        [("a0b0", 1), ("a1b1", 1), ("a0b1", 1), ("a1b0", 1)],
    ),
    "trees of one shape": (
        [(f"{tree}['layers'][{n}]['w']", "a") for tree in ("params", "opt.mu", "opt.nu") for n in range(2)],
        [("{params,opt.mu,opt.nu}['layers'][*]['w']", 6)],
    ),
    "trees with one root": (
        [(f"params['{half}']['layers'][{n}]", "a") for half in ("enc", "dec") for n in range(2)],
        [("params{['enc'],['dec']}['layers'][*]", 4)],
    ),
    "slashes": (
        [(f"{tree}/block_{n}/kernel", "a") for tree in ("params", "mu") for n in range(2)],
        [("{params,mu}/block_*/kernel", 4)],
    ),
    "endings alike but of two kinds": ([("params['w']", "a"), ("mu['w']", "b")], [("params['w']", 1), ("mu['w']", 1)]),
    "many trees": (
        [(f"{tree}['w']", "a") for tree in ("p", "q", "r", "s", "t")],
        [("{p,q,r,…,t}['w']", 5)],
    ),
    "equal names of two kinds": ([("x", "a"), ("x", "b"), ("x", "a")], [("x", 2), ("x", 1)]),
    "no names": ([("", "a"), ("", "a")], [("", 2)]),
    "nothing": ([], []),
}


@pytest.mark.parametrize(("entries", "expected"), CASES.values(), ids=CASES.keys())
def test_fold(entries: list[tuple[str, str]], expected: list[tuple[str, int]]) -> None:
    rows = fold([NamedArray(name, (kind,)) for name, kind in entries])
    assert [(row.pattern, len(row.members)) for row in rows] == expected


PARTS = st.lists(st.sampled_from(["[0]", "[1]", "[2]", "[3]", ".0", ".1", ".2", "/c"]), max_size=3).map("".join)
NAMES = st.builds(str.__add__, st.sampled_from("ab"), PARTS)


@settings(max_examples=40)
@given(st.lists(st.tuples(NAMES, st.sampled_from("xy")), max_size=30))
def test_every_entry_is_in_one_row_with_its_like(entries: list[tuple[str, str]]) -> None:
    rows = fold([NamedArray(name, (kind,)) for name, kind in entries])
    assert sorted(member for row in rows for member in row.members) == list(range(len(entries)))
    assert all(len({entries[member][1] for member in row.members}) == 1 for row in rows)
    assert [row.members[0] for row in rows] == sorted(row.members[0] for row in rows)
