"""Explains a plan: the saving of each decision, the reason for an array's sharding, the cause of a collective, and the
contents of the memory peak.

In: an evaluator and a plan. Out: an `Explanation`, which the terminal and JSON show. Every figure is the cost of
a whole plan that differs in the one thing explained; nothing else is searched again.
"""

from toast_cli.explain.model import Change as Change
from toast_cli.explain.model import Explanation as Explanation
from toast_cli.explain.model import Item as Item
from toast_cli.explain.study import Study as Study
