"""A pipeline that runs nothing, for tests of the command line around it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from report_sample import make_report

from toast_cli.pipeline import Emitted
from toast_cli.report.model import Report
from toast_cli.request import Request


@dataclass
class Pipeline:
    """Stands for `toast_cli.pipeline`: gives `report`, or raises `error`; remembers the requests."""

    report: Report = field(default_factory=make_report)
    error: BaseException | None = None
    requests: list[Request] = field(default_factory=list)
    emitted: list[str] = field(default_factory=list)
    annotated: list[str] = field(default_factory=list)
    notices: tuple[str, ...] = ()
    original: None = None
    source: str = "the program that was read"

    def partition(
        self,
        request: Request,
        tell: Callable[..., None] | None = None,
        said: Callable[..., None] | None = None,
        **_: Any,
    ) -> Pipeline:
        self.requests.append(request)
        if tell is not None:
            tell("search", 0.5, 0.0234, 1234, 1.0)
        if self.error is not None:
            raise self.error
        return self

    def emit(self, format: str, annotate: str = "minimal") -> Emitted:
        self.emitted.append(format)
        self.annotated.append(annotate)
        return Emitted(f"program as {format}\n".encode(), self.report)


def install(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Pipeline:
    """A stand-in for the pipeline, in an otherwise empty working directory that holds `model.mlir`."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.delenv("TOAST_DEBUG", raising=False)
    (folder / "model.mlir").write_text("module {}\n")
    fake = Pipeline()
    monkeypatch.setattr("toast_cli.pipeline.partition", fake.partition)
    return fake
