"""The last word is the compiler's: plans are compiled ahead of time, and the plan is chosen by the compiler's own
figures.

Enters: an evaluator, the plans that the search found best, a `Compiler`. Leaves: a `Confirmation`: predicted beside
compiled figures of every plan looked at, and the plan that is best by the compiled ones. What the compilations show
corrects the model for this program (`cost.corrections`), so that one more search can look for something better.
"""

from toast_cli.confirm.model import Candidate, Compiled, Confirmation, ConfirmedRow
from toast_cli.confirm.run import Confirmer, Limits

__all__ = ["Candidate", "Compiled", "Confirmation", "ConfirmedRow", "Confirmer", "Limits"]
