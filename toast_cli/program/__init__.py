"""The program as plain frozen data, for the analysis, the plan, the cost model and the search.

In: nothing from MLIR (the frontend builds a `Program`). Out: `Program`, `Op`, `Value`, `Rule`.
"""

from toast_cli.program.model import Op as Op
from toast_cli.program.model import Program as Program
from toast_cli.program.model import Rule as Rule
from toast_cli.program.model import Value as Value
