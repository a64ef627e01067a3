"""Searches over plans; all have one signature and stand in one registry.

    search(problem, evaluate, budget, rng, progress) -> SearchResult

Enters: a `Problem` and a function from plans to costs. Leaves: the best plan found. Every search is anytime: a deadline
or Ctrl-C ends it with the best plan so far.
"""

from toast_cli.request import SearchName
from toast_cli.search.exact import exact
from toast_cli.search.greedy import greedy
from toast_cli.search.mcts import mcts
from toast_cli.search.model import Budget, Search, SearchResult

SEARCHES: dict[str, Search] = {SearchName.mcts: mcts, SearchName.greedy: greedy, SearchName.exact: exact}

__all__ = ["SEARCHES", "Budget", "Search", "SearchResult"]
