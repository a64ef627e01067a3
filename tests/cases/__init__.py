"""The corpus: small programs, one for each situation that real programs were seen in, by kind.

`test_cases` reads, plans, writes, compiles and runs each of them in every form. A new kind of program that went wrong
belongs here, in the smallest program that shows it.
"""

from __future__ import annotations

from cases.arrays import ARRAYS
from cases.bodies import BODIES
from cases.calls import CALLS
from cases.control import CONTROL
from cases.indexing import INDEXING
from cases.linear import LINEAR
from cases.model import Situation
from cases.types import TYPES

TABLES = (ARRAYS, BODIES, CALLS, CONTROL, INDEXING, LINEAR, TYPES)
SITUATIONS: dict[str, Situation] = {name: situation for table in TABLES for name, situation in table.items()}
assert len(SITUATIONS) == sum(map(len, TABLES)), "two situations have one name"
