"""Disjoint sets."""

from hypothesis import given
from hypothesis import strategies as st

from toast_cli.program.values import DisjointSets


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
