"""The frontend: reads a program file.

In: a path, or `-`. Out: a `Source`: one normalised MLIR module and the `Program` read from it.
"""

from toast_cli.frontend.loading import content_of as content_of
from toast_cli.frontend.loading import load as load
from toast_cli.frontend.loading import program_pins as program_pins
from toast_cli.frontend.loading import symbols_in as symbols_in
from toast_cli.frontend.source import Source as Source
from toast_cli.frontend.source import Use as Use
