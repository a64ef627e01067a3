"""Records what toast decides and writes for the stored samples, so that a redesign can be compared with it.

    python -m benchmarks.golden record build/before.json          # the whole list: less than ten processor minutes
    python -m benchmarks.golden record build/now.json --quick     # tiny twins on one mesh: less than one
    python -m benchmarks.golden compare build/before.json build/now.json

A case is a program, a mesh and a plan. The plan is a known strategy, or what MCTS finds with a seed and a fixed
number of iterations. A record holds for each case the report without durations, and a digest (SHA-256) of every form
written. All of it is exact: two runs of one version are equal in any process. A strategy that does not apply is
recorded with the reason. `compare` prints what differs, once for all cases that differ alike, and exits with 1 when
anything does.

This file uses nothing but `toast_cli`, so it can record other versions too:
`PYTHONPATH=ELSEWHERE python benchmarks/golden.py record FILE`. The samples are those beside this file unless
`--samples` names another folder. `--emitted FOLDER` keeps the written files, so that they can be read side by side.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import chdir, contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

SAMPLES = Path(__file__).resolve().parents[1] / "sample_models"
ENDINGS = (".mlirbc.zst", ".stablehlo.zst", ".mlir")
FORMS = ("stablehlo", "hlo", "specs", "python")
SCHEMA = "toast.golden/1"
# Full samples on which a case takes at most a second or two.
FULL = ("block_train", "itx_decode", "itx_prefill", "mlp_train", "rnn_train", "scan_train")
MESHES = ("v4-32", "v5e-16", "h100-8:pod=2,data=2,model=2")
# Strategies are named here and not asked from toast, so that two versions record the same cases.
STRATEGIES = (
    "data-parallel", "zero2", "fsdp", "megatron", "megatron+sequence", "context", "expert", "edge", "spatial",
    "vocabulary", "data-parallel+expert", "fsdp+expert", "data-parallel x megatron", "zero2 x megatron",
    "fsdp x megatron", "fsdp x context", "edge x megatron", "context:data+megatron:model",
    "data-parallel x spatial", "fsdp x megatron+sequence", "zero2 x megatron+sequence",
    "fsdp+expert x megatron", "data-parallel x fsdp x megatron", "fsdp x context x megatron",
)  # fmt: skip
QUICK_STRATEGIES = ("fsdp", "fsdp x megatron")
# Of full samples these, and the searches.
FULL_STRATEGIES = ("fsdp", "data-parallel x megatron", "fsdp x megatron+sequence")
SEEDS = (0, 1)
ITERATIONS = 160
# So many arrays alive at the peak are listed, the largest; of all there is a digest.
_LIVE = 16
# Fields of a report that tell how long something took here.
_TIMES = (("timings",), ("search", "seconds"))
# Parts of a report that many cases share; they are stored once.
_SHARED = ("arguments", "results", "analysis", "program", "mesh", "baselines")

Facts = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """One run. strategy: None where MCTS searches with this seed. forms: of the files to write."""

    program: str
    mesh: str
    strategy: str | None
    seed: int
    forms: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"{self.program} {self.mesh} {self.strategy or f'search, seed {self.seed}'}"


def main(arguments: list[str] | None = None) -> int:
    options = _options(arguments)
    if options.command == "record":
        record(options)
        return 0
    return compare(_read(options.before, options.only), _read(options.after, options.only), options.lines)


def record(options: argparse.Namespace) -> None:
    """Writes the record of the toast that Python finds."""
    import toast_cli

    target, emitted = options.file.absolute(), options.emitted and options.emitted.absolute()
    print(f"records {Path(toast_cli.__file__).parent}", file=sys.stderr)
    shared: dict[str, Any] = {}
    found: dict[str, Facts] = {}
    # Reports hold the paths as given: they are to be the same everywhere.
    with chdir(options.samples), _each_program_read_once():
        for case in cases(options.quick):
            if any(word not in case.name for word in options.only):
                continue
            facts, written = run(case)
            _note(f"{case.name}: {facts.get('error', 'recorded')}")
            found[case.name] = _shorten(facts, shared)
            if emitted:
                _keep(emitted, case, written)
    content = {"schema": SCHEMA, "cases": found, "shared": shared}
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps(content, separators=(",", ":"), ensure_ascii=False) + "\n")
    print(f"{len(found)} cases, {_processor_seconds():.0f} processor seconds: {options.file}", file=sys.stderr)


def cases(quick: bool) -> Iterator[Case]:
    """All cases, those of one program and mesh together."""
    names = sorted(programs(Path.cwd()))
    tiny = [name for name in names if name.endswith("_tiny")]
    meshes, strategies, forms = (MESHES[:1], QUICK_STRATEGIES, FORMS[:1]) if quick else (MESHES, STRATEGIES, FORMS)
    for name in tiny if quick else [*tiny, *(name for name in names if name in FULL)]:
        for mesh in meshes:
            for strategy in strategies if name in tiny else FULL_STRATEGIES:
                yield Case(name, mesh, strategy, 0, forms)
            for seed in SEEDS[:1] if quick else SEEDS:
                yield Case(name, mesh, None, seed, forms)


@cache
def programs(folder: Path) -> dict[str, str]:
    """Name -> name of the file, of the samples in a folder."""
    return {path.name.split(".")[0]: path.name for path in folder.iterdir() if path.name.endswith(ENDINGS)}


def run(case: Case) -> tuple[Facts, dict[str, bytes]]:
    """The facts of one case, and the files written; `error` alone where toast refuses the plan."""
    from toast_cli.base.errors import ToastError
    from toast_cli.pipeline import partition
    from toast_cli.request import Request

    spec, _, shape = case.mesh.partition(":")
    request = Request(
        programs(Path.cwd())[case.program],
        spec,
        shape or None,
        strategy=case.strategy,
        seed=case.seed,
        iterations=ITERATIONS,
    )
    try:
        outcome = partition(request)
    except ToastError as error:
        return {"error": str(error)}, {}
    written: dict[str, bytes] = {"plan": outcome.saved_plan()}
    refused: dict[str, str] = {}
    for form in case.forms:
        try:
            emitted = outcome.emit(form)
            if isinstance(emitted, bytes):  # versions whose outcomes changed with every file
                written[form] = emitted
            else:
                written[form], outcome = emitted.content, replace(outcome, report=emitted.report)
        except ToastError as error:
            refused[form] = f"refused: {error}"
    facts = outcome.report.to_json()  # after the files: it lists the constraints in them
    for *way, last in _TIMES:
        place = facts
        for step in way:
            place = place[step]
        place.pop(last)
    predicted = facts["predicted"]
    predicted["live_at_peak_digest"] = _digest(json.dumps(predicted["live_at_peak"]).encode())
    predicted["live_at_peak"] = predicted["live_at_peak"][:_LIVE]
    digests = {form: _digest(content) for form, content in written.items()}
    return {**facts, "emitted": {**digests, **refused}}, written


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


@contextmanager
def _each_program_read_once() -> Iterator[None]:
    """Reading a sample takes half of a case's time, and every case of it reads the same."""
    from toast_cli import pipeline

    load = pipeline.load
    pipeline.load = cache(load)
    try:
        yield
    finally:
        pipeline.load = load


def _keep(folder: Path, case: Case, written: dict[str, bytes]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for form, content in written.items():
        (folder / f"{case.name.replace(' ', '_')}.{form}").write_bytes(content)


def _processor_seconds() -> float:
    """Of this process and its children."""
    return sum(os.times()[:4])


def _note(text: str) -> None:
    print(f"{_processor_seconds():6.1f} s  {text}", file=sys.stderr, flush=True)


# --- one record as a file ---------------------------------------------------------------------------------------------


def _shorten(facts: Facts, shared: dict[str, Any]) -> Facts:
    """The facts with large parts replaced by their numbers in `shared`."""
    short = dict(facts)
    for part in _SHARED:
        if part in short:
            key = _digest(json.dumps(short[part]).encode())
            shared[key] = short[part]
            short[part] = {"shared": key}
    return short


def _read(path: Path, only: list[str]) -> dict[str, Facts]:
    """Case -> facts, of the cases whose names have all these words."""
    content = json.loads(path.read_text())
    if content.get("schema") != SCHEMA:
        raise SystemExit(f"{path} is no record of schema {SCHEMA}")
    shared = content["shared"]
    return {
        name: {
            key: shared[value["shared"]] if isinstance(value, dict) and set(value) == {"shared"} else value
            for key, value in facts.items()
        }
        for name, facts in content["cases"].items()
        if all(word in name for word in only)
    }


# --- two records against each other -----------------------------------------------------------------------------------


def compare(before: dict[str, Facts], after: dict[str, Facts], lines: int) -> int:
    """Prints what differs; 1 where something does. lines: so many cases, and fields, are listed of each group."""
    alone = {"only before": before.keys() - after.keys(), "only after": after.keys() - before.keys()}
    for words, names in alone.items():
        for name in sorted(names):
            print(f"{words}: {name}")
    both = [name for name in before if name in after]
    told: dict[tuple[str, str], list[str]] = {}  # field and change -> cases
    for name in both:
        for difference in differences(before[name], after[name]):
            told.setdefault(difference, []).append(name)
    groups: dict[tuple[str, ...], list[tuple[str, str]]] = {}  # cases -> what differs in just these
    for difference, names in told.items():
        groups.setdefault(tuple(names), []).append(difference)
    for names, found in sorted(groups.items(), key=lambda group: -len(group[0])):
        print(f"\n{', '.join(names[:lines])}" + (f" and {len(names) - lines} more" if len(names) > lines else ""))
        for field, change in found[:lines]:
            print(f"    {field}: {change}")
        if len(found) > lines:
            print(f"    … and {len(found) - lines} more fields (--lines)")
    fields: Counter[str] = Counter()
    for (field, _), names in told.items():
        fields[field] += len(names)
    if fields:
        print("\nfields, and in how many cases they differ:")
        for field, count in fields.most_common():
            print(f"{count:6}  {field}")
    differing = len({name for names in told.values() for name in names})
    print(f"\n{len(both)} cases in both, {differing} differ")
    return 1 if differing or any(alone.values()) else 0


def differences(before: Any, after: Any, field: str = "") -> Iterator[tuple[str, str]]:
    """(field, "old -> new") of every field that differs; of lists what went and what came."""
    if before == after:
        return
    if isinstance(before, dict) and isinstance(after, dict):
        for key in dict.fromkeys([*before, *after]):
            inner = f"{field}.{key}" if field else key
            yield from differences(before.get(key, _NOTHING), after.get(key, _NOTHING), inner)
    elif isinstance(before, list) and isinstance(after, list):
        yield field, _of_lists(before, after)
    elif field.startswith(("emitted.", "predicted.live_at_peak_digest")) and not any(
        str(side).startswith("refused") for side in (before, after)
    ):
        yield field, "differs"
    else:
        yield field, f"{_text(before)} -> {_text(after)}{_ratio(before, after)}"


_NOTHING = "(absent)"


def _of_lists(before: list[Any], after: list[Any]) -> str:
    if [_without_figures(entry) for entry in before] == [_without_figures(entry) for entry in after]:
        return "only figures of its entries" + "".join(_figures(before, after))
    old, new = (Counter(map(_text, side)) for side in (before, after))
    changes = [f"- {_times(count)}{text}" for text, count in (old - new).items()]
    changes += [f"+ {_times(count)}{text}" for text, count in (new - old).items()]
    if not changes:
        return "the same entries in another order"
    more = f"\n        … and {len(changes) - 12} more" if len(changes) > 12 else ""
    return "".join(f"\n        {change}" for change in changes[:12]) + more


def _without_figures(entry: Any) -> Any:
    return {k: v for k, v in entry.items() if not isinstance(v, float)} if isinstance(entry, dict) else entry


def _figures(before: list[Any], after: list[Any]) -> Iterator[str]:
    """Of every field with another figure the entry where it changed most."""
    changed: dict[str, tuple[float, float, float]] = {}
    for old, new in zip(before, after, strict=True):
        for key in old:
            if old[key] != new[key]:
                share = abs(new[key] / old[key] - 1) if old[key] else float("inf")
                changed[key] = max(changed.get(key, (0.0, 0.0, 0.0)), (share, old[key], new[key]))
    for key, (_, old_figure, new_figure) in changed.items():
        yield f"; {key} by up to {old_figure} -> {new_figure}{_ratio(old_figure, new_figure)}"


def _times(count: int) -> str:
    return f"{count} x " if count > 1 else ""


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return " ".join(f"{key}={_text(inner)}" for key, inner in value.items() if inner not in ("", [], {}))
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _ratio(before: Any, after: Any) -> str:
    numbers = isinstance(before, int | float) and isinstance(after, int | float)
    return f"  ({100 * (after / before - 1):+.2g} %)" if numbers and before else ""


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    recorder = commands.add_parser("record", help="record the toast that Python finds")
    recorder.add_argument("file", type=Path, help="where the record goes, as JSON")
    recorder.add_argument(
        "--quick", action="store_true", help="tiny twins, one mesh, a search and two strategies, StableHLO"
    )
    recorder.add_argument("--samples", type=Path, default=SAMPLES, metavar="FOLDER")
    recorder.add_argument("--emitted", type=Path, metavar="FOLDER", help="keep the written files here")
    comparer = commands.add_parser("compare", help="what differs between two records")
    comparer.add_argument("before", type=Path)
    comparer.add_argument("after", type=Path)
    comparer.add_argument("--lines", type=int, default=12, help="differing fields shown for each group of cases")
    for command in (recorder, comparer):
        command.add_argument(
            "--only", nargs="+", default=[], metavar="WORD", help="cases with all these in their names"
        )
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
