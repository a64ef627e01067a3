"""Writes the sample programs: `python sample_models/make.py [NAME...]`, all without a name; `--table` lists them."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from sample_models.common import Sample, histogram, main, read

SCRIPTS = (
    "t2b", "t7b", "gns", "unet", "itx", "mlp", "moe", "vit", "resnet50", "scan", "rnn", "ssm", "long", "block", "flash",
)  # fmt: skip


def samples() -> dict[str, Sample]:
    """Every sample by name."""
    modules = [import_module(f"sample_models.{script}") for script in SCRIPTS]
    return {sample.name: sample for module in modules for sample in module.SAMPLES}


def chosen(names: list[str]) -> list[Sample]:
    """The samples of these names, all of them for an empty list; exits with the names there are when one is unknown."""
    known = samples()
    unknown = [name for name in names if name not in known]
    if unknown:
        raise SystemExit(f"no sample {', '.join(unknown)}; there are {', '.join(known)}")
    return [known[name] for name in names] if names else list(known.values())


def table() -> str:
    """The stored samples as the Markdown table of sample_models/README.md."""
    lines = ["| file | what it is | parameters | ops | bytes |", "|---|---|--:|--:|--:|"]
    for sample in samples().values():
        ops, size = sum(histogram(read(sample)).values()), sample.path.stat().st_size
        lines.append(f"| `{sample.path.name}` | {sample.about} | {sample.parameter_count():,} | {ops:,} | {size:,} |")
    return "\n".join(lines)


if __name__ == "__main__":
    if sys.argv[1:] == ["--table"]:
        print(table())
    else:
        main(chosen(sys.argv[1:]))
