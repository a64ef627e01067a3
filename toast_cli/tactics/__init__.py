"""Named tactics that fix part of a plan, and the known strategies made of them; both depend only on the analysis.

In: a `Problem`, and tactics as users name them. Out: fixed decisions of every plan, or whole plans. The latter
are baselines in the report and starting points of the search.
"""

from toast_cli.tactics.model import ALIASES as ALIASES
from toast_cli.tactics.model import TACTICS as TACTICS
from toast_cli.tactics.model import DoesNotApply as DoesNotApply
from toast_cli.tactics.model import Look as Look
from toast_cli.tactics.model import Tactic as Tactic
from toast_cli.tactics.requests import PricedStrategy as PricedStrategy
from toast_cli.tactics.requests import TacticRequests as TacticRequests
from toast_cli.tactics.requests import parse_tactics as parse_tactics
from toast_cli.tactics.strategies import applicable as applicable
from toast_cli.tactics.strategies import priced_strategies as priced_strategies
from toast_cli.tactics.strategies import priced_strategy as priced_strategy
from toast_cli.tactics.strategies import starting_plans as starting_plans
from toast_cli.tactics.strategies import strategies as strategies
from toast_cli.tactics.strategies import strategy as strategy
