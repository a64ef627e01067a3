"""Searches over plans. All have one signature and are listed in one registry (`run.SEARCHES`).

    search(incumbent, rng) -> SearchResult

Every search is anytime: a deadline or Ctrl-C ends it with the best plan so far.
"""
