"""The search over plans: tree search, then local search.

It is anytime: a deadline or Ctrl-C ends it with the best plan so far.
"""
