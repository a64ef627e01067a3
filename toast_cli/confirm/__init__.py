"""Compiles the best plans ahead of time and chooses among them by the compiler's own figures.

In: an evaluator, the best plans of a search, a `Compiler`. Out: a `Confirmation`: predicted and compiled figures
of every plan compiled, and the best plan by the compiled ones. The differences correct the model for this program
(`cost.corrections`), so that another search can find better plans.
"""

from toast_cli.confirm.model import Candidate as Candidate
from toast_cli.confirm.model import Compiled as Compiled
from toast_cli.confirm.model import Confirmation as Confirmation
from toast_cli.confirm.model import ConfirmedRow as ConfirmedRow
from toast_cli.confirm.run import Confirmer as Confirmer
from toast_cli.confirm.run import Limits as Limits
