"""Writes the sample programs: `python -m sample_models.make [NAME...]`, all of them without a name."""

from __future__ import annotations

import sys
from importlib import import_module

from sample_models.common import Sample, main

SCRIPTS = (
    "t2b", "t7b", "gns", "unet", "itx", "mlp", "moe", "vit", "resnet50", "scan", "rnn", "ssm", "long", "block",
)  # fmt: skip


def samples() -> dict[str, Sample]:
    """Every sample by name."""
    modules = [import_module(f"sample_models.{script}") for script in SCRIPTS]
    return {sample.name: sample for module in modules for sample in module.SAMPLES}


def chosen(names: list[str]) -> list[Sample]:
    known = samples()
    unknown = [name for name in names if name not in known]
    if unknown:
        raise SystemExit(f"no sample {', '.join(unknown)}; there are {', '.join(known)}")
    return [known[name] for name in names] if names else list(known.values())


if __name__ == "__main__":
    main(chosen(sys.argv[1:]))
