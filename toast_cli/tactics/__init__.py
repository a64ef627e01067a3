"""Named tactics that fix part of a plan, and the expert strategies made of them; both depend only on the analysis.

Enters: a `Problem`, and tactics as users name them. Leaves: fixed decisions of every plan, or whole plans. The latter
are baselines in the report and starting points of the search.
"""

from toast_cli.tactics.assignments import Expert
from toast_cli.tactics.model import DoesNotApply, Look, Tactic
from toast_cli.tactics.named import ALIASES, TACTICS
from toast_cli.tactics.strategies import applicable, expert, experts, starting_plans, strategies, strategy
from toast_cli.tactics.wishes import Wishes, parse_wishes

__all__ = [
    "ALIASES",
    "TACTICS",
    "DoesNotApply",
    "Expert",
    "Look",
    "Tactic",
    "Wishes",
    "applicable",
    "expert",
    "experts",
    "parse_wishes",
    "starting_plans",
    "strategies",
    "strategy",
]
