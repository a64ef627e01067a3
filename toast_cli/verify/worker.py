"""The child process of a check: `python -m toast_cli.verify.worker TASK FOLDER` runs a task and writes the answer to
the folder.

Enters: the files that `child.ask` has written. Leaves: the answer, or the reason why there is none.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from toast_cli.process import end_with_parent
from toast_cli.verify.ahead import ahead_task
from toast_cli.verify.child import ANSWER, ERROR, FAILED, REQUEST
from toast_cli.verify.numbers import numbers_task
from toast_cli.verify.partitioned import partitioned_task

TASKS: dict[str, Callable[[dict[str, Any], Path], dict[str, Any]]] = {
    "ahead": ahead_task,
    "numbers": numbers_task,
    "partitioned": partitioned_task,
}


def main(arguments: list[str]) -> int:
    """Runs TASK FOLDER from the command line."""
    end_with_parent()
    return work(arguments[0], Path(arguments[1]))


def work(task: str, folder: Path) -> int:
    """Runs a task; returns the exit code."""
    try:
        facts = TASKS[task](json.loads((folder / REQUEST).read_text()), folder)
    except Exception as error:  # any error of the compiler's bindings is the verdict
        (folder / ERROR).write_text(str(error))
        return FAILED
    (folder / ANSWER).write_text(json.dumps(facts))
    return 0


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stderr.flush()
    os._exit(code)  # a compiler may still be at work in another thread
