"""Compiles the best plans ahead of time and chooses among them by the compiler's own figures.

Enters: an evaluator, the best plans of a search, a `Compiler`. Leaves: a `Confirmation`: predicted and compiled figures
of every plan compiled, and the best plan by the compiled ones. The differences correct the model for this program
(`cost.corrections`), so that another search can find better plans.
"""

from toast_cli.confirm.model import Candidate, Compiled, Confirmation, ConfirmedRow
from toast_cli.confirm.run import Confirmer, Limits

__all__ = ["Candidate", "Compiled", "Confirmation", "ConfirmedRow", "Confirmer", "Limits"]
