"""Union-find with ordered splits: laws against a plain model in which every name is a row of binary digits."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toast_cli.dimensions.classes import Names
from toast_cli.program.values import DisjointSets

# One equation: whole name, names it is the product of (one: plain equality).
Equation = tuple[int, tuple[int, ...]]


@st.composite
def equations(draw: st.DrawFn) -> tuple[list[int], list[Equation]]:
    """Names of sizes 2**n (so that cut points always form a chain), and equations that fit their sizes."""
    bits = draw(st.lists(st.integers(1, 4), min_size=2, max_size=7))
    found: list[Equation] = []
    for _ in range(draw(st.integers(1, 6))):
        whole = draw(st.sampled_from(range(len(bits))))
        parts: list[int] = []
        left = bits[whole]
        while left:
            fitting = [n for n, size in enumerate(bits) if size <= left and n != whole]
            if not fitting:
                break
            parts.append(draw(st.sampled_from(fitting)))
            left -= bits[parts[-1]]
        if not left:
            found.append((whole, tuple(parts)))
    return bits, found


def solve(bits: list[int], wanted: list[Equation]) -> tuple[Names, list[int], bool]:
    names = Names()
    numbers = [names.new(2**size) for size in bits]
    aligned = True
    for whole, parts in wanted:
        aligned &= names.unify_product(numbers[whole], [numbers[p] for p in parts])
    return names, numbers, aligned


def digits(names: Names, name: int) -> list[tuple[int, int]]:
    """(class, place within it) of each binary digit of a name, most significant first."""
    return [(leaf, k) for leaf in names.leaves(name) for k in range(names.sizes[leaf].bit_length() - 1)]


def partition(rows: Sequence[Sequence[object]]) -> set[frozenset[tuple[int, int]]]:
    """Which (name, digit) pairs are the same thing."""
    same: dict[object, set[tuple[int, int]]] = {}
    for name, row in enumerate(rows):
        for place, digit in enumerate(row):
            same.setdefault(digit, set()).add((name, place))
    return {frozenset(group) for group in same.values()}


def model(bits: list[int], wanted: list[Equation]) -> set[frozenset[tuple[int, int]]]:
    """The same by equating digit with digit until nothing changes."""
    label = {(n, k): (n, k) for n, size in enumerate(bits) for k in range(size)}
    pairs = [
        (left, right)
        for whole, parts in wanted
        for left, right in zip(
            [(whole, k) for k in range(bits[whole])], [(p, k) for p in parts for k in range(bits[p])], strict=True
        )
    ]
    changed = True
    while changed:
        changed = False
        for left, right in pairs:
            low = min(label[left], label[right])
            if label[left] != low or label[right] != low:
                label[left] = label[right] = low
                changed = True
    return partition([[label[n, k] for k in range(size)] for n, size in enumerate(bits)])


@given(equations())
def test_equal_is_exactly_what_the_equations_say(drawn: tuple[list[int], list[Equation]]) -> None:
    bits, wanted = drawn
    names, numbers, aligned = solve(bits, wanted)
    found = partition([digits(names, n) for n in numbers])
    assert aligned
    assert found == model(bits, wanted)


@given(equations(), st.randoms(use_true_random=False))
def test_the_order_of_equations_does_not_matter(drawn: tuple[list[int], list[Equation]], random: Random) -> None:
    bits, wanted = drawn
    shuffled = list(wanted)
    random.shuffle(shuffled)
    results = []
    for order in (wanted, shuffled):
        names, numbers, _ = solve(bits, order)
        # Classes by the places they occupy: the cut points themselves must agree, not only what is equal.
        rows: list[list[object]] = [list(names.leaves(n)) for n in numbers]
        results.append((partition(rows), [[names.sizes[leaf] for leaf in names.leaves(n)] for n in numbers]))
    assert results[0] == results[1]


@given(equations())
def test_the_leaves_of_a_name_multiply_to_its_size(drawn: tuple[list[int], list[Equation]]) -> None:
    names, numbers, _ = solve(*drawn)
    for number in numbers:
        assert prod(names.sizes[leaf] for leaf in names.leaves(number)) == names.sizes[number]


# Two products of one name -> sizes of its parts afterwards, and whether the two lined up all the way.
REFINEMENTS = [
    ((4096,), (32, 128), (32, 128), True),  # heads x head size
    ((8, 4), (8, 4), (8, 4), True),
    ((8, 4), (2, 16), (2, 4, 4), True),  # 2 | 8: cut points 2, 8
    ((2, 3, 4), (6, 4), (2, 3, 4), True),
    ((6, 4), (2, 12), (2, 3, 4), True),
    ((4, 6), (6, 4), (4, 6), False),  # neither of 4 and 6 divides the other
    ((2, 3), (3, 2), (2, 3), False),
    ((2, 4, 3), (2, 3, 4), (2, 4, 3), False),  # equal on the major part, then no further
]


@pytest.mark.parametrize(("first", "second", "parts", "aligned"), REFINEMENTS)
def test_two_splits_meet_in_their_common_refinement(
    first: tuple[int, ...], second: tuple[int, ...], parts: tuple[int, ...], aligned: bool
) -> None:
    names = Names()
    whole = names.new(prod(first))
    left, right = ([names.new(size) for size in sizes] for sizes in (first, second))
    assert names.unify_product(whole, left)
    assert names.unify_product(whole, right) is aligned
    assert tuple(names.sizes[leaf] for leaf in names.leaves(whole)) == parts


def test_equality_stops_where_cut_points_do_not_line_up() -> None:
    names = Names()
    whole, two, four, three, *others = (names.new(size) for size in (24, 2, 4, 3, 2, 3, 4))
    names.unify_product(whole, [two, four, three])
    names.unify_product(whole, others)
    assert names.find(two) == names.find(others[0])
    assert len({names.find(n) for n in (four, three, *others[1:])}) == 4


def test_a_name_is_never_a_product_of_itself() -> None:
    names = Names()
    row, one = names.new(4), names.new(1)
    assert not names.unify_product(row, [row, one])
    assert names.leaves(row) == [row]


# -- disjoint sets


def test_the_first_ones_representative_stays() -> None:
    sets: DisjointSets[str] = DisjointSets()
    assert sets.find("a") == "a"
    assert sets.union("a", "b")
    assert sets.union("c", "b")
    assert not sets.union("a", "c")
    assert {sets.find(name) for name in "abc"} == {"c"}
    assert sets.find("d") == "d"


@given(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), max_size=30))
def test_items_are_together_where_a_chain_of_unions_leads_from_one_to_the_other(pairs: list[tuple[int, int]]) -> None:
    sets: DisjointSets[int] = DisjointSets()
    reached = {n: {n} for n in range(13)}
    for first, second in pairs:
        assert sets.union(first, second) is (second not in reached[first])
        for member in (joined := reached[first] | reached[second]):
            reached[member] = joined
    for first in range(13):
        assert {n for n in range(13) if sets.find(n) == sets.find(first)} == reached[first]
