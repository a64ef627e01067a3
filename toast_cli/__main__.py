"""`python -m toast_cli` is `toast`."""

from toast_cli.cli import command

if __name__ == "__main__":
    command()
