"""Random command lines on damaged inputs: a random generator goes in, a `Case` comes out."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from random import Random

import zstandard
from fuzz import seeds
from fuzz.harness import Case
from fuzz.mutate import WORDS, mutated, mutated_gently, mutated_json

QUICK = "--iterations 3"
V4 = f"partition m.mlir --mesh v4-32 {QUICK}"
MESHES = ("v4-32", "v5e-16", "h100-8", "v2-8")
FORMATS = ("stablehlo", "bytecode", "hlo", "specs", "python", "spmd", "nonsense")
ENDINGS = ("mlir", "mlirbc", "hlo", "json", "py", "mlir.gz", "txt")


def words(line: str) -> tuple[str, ...]:
    return tuple(line.split())


def a_program(rng: Random) -> bytes:
    """A damaged program in some format, now and then compressed."""
    kind = rng.choice(("text", "text", "text", "bytecode", "portable", "hlo", "hlo", "proto"))
    intact = seeds.texts() if kind == "text" else seeds.binaries()[kind]
    small = [one for one in intact if len(one) < 4000]
    chosen = rng.choice(small if rng.random() < 0.8 else intact)
    if kind in ("text", "hlo") and rng.random() < 0.6:
        return mutated_gently(chosen, rng)
    data = mutated(chosen, small, rng, text=kind in ("text", "hlo"))
    packed = rng.random()
    if packed < 0.02:
        data = gzip.compress(data)
    elif packed < 0.04:
        data = zstandard.ZstdCompressor().compress(data)
    return mutated(data, (), rng, text=False) if packed < 0.02 else data


def program_case(rng: Random) -> Case:
    """A damaged program under a command that reads one."""
    run = f"partition m.mlir --mesh {rng.choice(MESHES)}"
    line = rng.choice(
        (
            "inspect m.mlir", "inspect m.mlir --json -", "inspect m.mlir --verbose",
            f"{run} {QUICK} -o o.{rng.choice(ENDINGS)}",
            f"{run} {QUICK} -o o.mlir --annotate {rng.choice(('full', 'minimal', 'arguments'))}",
            f"{run} {QUICK} -o o --format {rng.choice(FORMATS)}",
            f"{run} {QUICK} -o o --format {rng.choice(FORMATS)}",
            f"{run} {QUICK} --html h.html --trace t.json",
            f"{run} {QUICK} --keep-shardings -o -",
            f"{run} {QUICK} --json r.json --verbose",
            f"explain m.mlir --mesh {rng.choice(MESHES)} {QUICK}",
            f"{run} --strategy {rng.choice(('fsdp', 'megatron', 'fsdp+megatron', 'data'))}",
        )
    )  # fmt: skip
    return Case(words(line), {"m.mlir": a_program(rng)})


def intact_program(rng: Random) -> bytes:
    return rng.choice((seeds.program(), seeds.program(), seeds.OPS.encode(), seeds.SHARDED.encode()))


def spec_case(rng: Random) -> Case:
    """A damaged mesh specification."""
    line = rng.choice(("mesh show s.yaml", "mesh validate s.yaml", f"partition m.mlir --mesh s.yaml {QUICK}"))
    damaged = mutated(seeds.SPEC, (seeds.TACTICS,), rng, text=True)
    return Case(words(line), {"m.mlir": intact_program(rng), "s.yaml": damaged})


def tactics_case(rng: Random) -> Case:
    """A damaged file of tactics."""
    option = f"t.yaml:{rng.choice(('mine', 'other', 'none'))}:{rng.choice(('data', 'model', 'x'))}"
    line = rng.choice(("tactics --file t.yaml", f"{V4} --tactic {option}", "tactics m.mlir --mesh v4-32 --file t.yaml"))
    damaged = mutated(seeds.TACTICS, (seeds.SPEC,), rng, text=True)
    return Case(words(line), {"m.mlir": intact_program(rng), "t.yaml": damaged})


def report_case(rng: Random) -> Case:
    """A damaged report, saved plan or log."""
    made = seeds.written()
    kind = rng.choice(("r.json", "r.json", "p.json", "l.jsonl"))
    data = made[kind]
    damaged = mutated_json(data, rng) if kind != "l.jsonl" and rng.random() < 0.7 else mutated(data, (), rng, text=True)
    files = {"m.mlir": seeds.texts()[3], "r.json": made["r.json"], kind: damaged}
    check = f"check m.mlir --mesh v4-32 {QUICK} --against r.json"
    lines = {
        "r.json": ["diff r.json r.json", "explain m.mlir --mesh v4-32 --report r.json", check, f"{check} --update"],
        "p.json": [f"{V4} --plan p.json", f"{V4} --plan p.json --complete"],
        "l.jsonl": [f"sweep m.mlir --mesh v4-32 {QUICK} --jsonl l.jsonl"],
    }
    return Case(words(rng.choice(lines[kind])), files)


def verify_case(rng: Random) -> Case:
    """A damaged program or report under `verify`, which starts compilers and so costs seconds."""
    made = seeds.written()
    files = {"o.mlir": made["o.mlir"], "r.json": made["r.json"]}
    if rng.random() < 0.5:
        files["r.json"] = mutated_json(made["r.json"], rng)
    else:
        files["o.mlir"] = mutated(made["o.mlir"], (), rng, text=True)
    return Case(words("verify o.mlir --compiler cpu --report r.json"), files)


def command_case(rng: Random) -> Case:
    """A command line of options that toast knows, with values that may make no sense, over intact files."""
    from fuzz.options import commands

    name, options, positional = rng.choice(commands())
    files = {
        "m.mlir": seeds.program(),
        "s.yaml": seeds.SPEC,
        "t.yaml": seeds.TACTICS,
        **{k: v for k, v in seeds.written().items() if k != "o.mlir"},
    }
    values = [
        *words("""m.mlir s.yaml v4-32 r.json p.json o.mlir - x 0 -1 3 1e9 data=4,model=4 data=16 auto all 5% 28GiB 20ms
        *=data,None fsdp:data t.yaml:mine:data medium json peak_memory step_time<=1s communication[data] . /nowhere/x
        é --"""),
        "",
        "\udcff",
        "9" * 50,
        "a" * 3000,
    ]
    arguments = [*name, *(rng.choice(("m.mlir", "m.mlir", "m.mlir", rng.choice(values))) for _ in range(positional))]
    if any(option.endswith("--mesh") for option in options) and rng.random() < 0.9:
        arguments += ["--mesh", rng.choice(("v4-32", "h100-8", "s.yaml"))]
    if "--iterations" in options:
        arguments += QUICK.split()
    for _ in range(rng.randrange(4) if options else 0):
        option = rng.choice(sorted(options))
        if option in ("--verify", "--confirm", "--budget", "--jobs"):
            continue
        arguments += (
            [option]
            if options[option]
            else [option, rng.choice((rng.choice(values), rng.choice(WORDS).decode("utf-8", "surrogateescape")))]
        )
    return Case(tuple(argument.replace("\0", "") for argument in arguments), files)


# How often each kind of case is drawn, of 1000.
KINDS: list[tuple[int, Callable[[Random], Case]]] = [
    (650, program_case),
    (90, spec_case),
    (60, tactics_case),
    (90, report_case),
    (105, command_case),
    (5, verify_case),
]


def case(rng: Random) -> Case:
    """One case of any kind."""
    return rng.choices([kind for _, kind in KINDS], [weight for weight, _ in KINDS])[0](rng)
