"""Why a plan is as it is: what each decision is worth, why an array is split so, what causes a collective, what
makes the peak.

Enters: an evaluator and a plan. Leaves: an `Explanation`, which the terminal and JSON show. Every figure is the cost
of a whole plan that differs in the one thing spoken of; nothing else is searched anew.
"""

from toast_cli.explain.model import Change, Explanation, Item
from toast_cli.explain.study import Study

__all__ = ["Change", "Explanation", "Item", "Study"]
