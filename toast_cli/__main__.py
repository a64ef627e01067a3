"""`python -m toast_cli` is `toast`."""

import sys

from toast_cli.cli import main

if __name__ == "__main__":
    sys.exit(main())
