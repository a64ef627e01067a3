"""toast: decides how to split a large array program over a mesh of accelerators.

The pipeline, top to bottom, is `toast_cli.pipeline`; `toast_cli.cli` is the command line.
"""

__version__ = "0.1.0"
