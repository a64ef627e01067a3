"""What each neighbourhood of the search is worth: searches without it, one at a time (see `toast_cli.search.moves`).

One row for each: how much longer the step is without it than with all, in the mean and at most, over programs, meshes
and seeds. Plans are worse by chance, too: figures of a fraction of a per cent need several seeds.
"""

from __future__ import annotations

import argparse
import sys
from math import exp, log
from pathlib import Path
from statistics import mean

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import Row, choose, note, show, write_json
from toast_cli.dimensions import analyse
from toast_cli.frontend import load
from toast_cli.hardware import load_spec, parse_shape
from toast_cli.plan.problem import make_problem
from toast_cli.price.evaluator import Evaluator
from toast_cli.search.moves import NEIGHBOURHOODS
from toast_cli.search.run import PLANS, Settings, run_search
from toast_cli.tactics import starting_plans

COLUMNS = {"without": "{without}", "mean %": "{mean:+.2f}", "most %": "{most:+.2f}", "where": "{where}"}


def main(arguments: list[str] | None = None) -> int:
    options = _options(arguments)
    table, losses = dict(NEIGHBOURHOODS), dict[str, dict[str, float]]()
    for name, path in choose(options.programs, tiny=False).items():
        program = load(str(path)).program
        dimensions = analyse(program)
        for mesh in options.mesh:
            spec, _, shape = mesh.partition(":")
            problem = make_problem(program, dimensions, load_spec(spec).mesh(parse_shape(shape) if shape else None))
            evaluator, starts = Evaluator(problem), starting_plans(problem)
            for seed in range(options.seeds):
                settings, steps = Settings(seed=seed, effort=options.effort), dict[str, float]()
                for without in ("", *(options.without or table)):
                    NEIGHBOURHOODS.pop(without, None)
                    result = run_search(evaluator, settings, starts)
                    steps[without] = result.cost.step_seconds if result.fits else float("inf")
                    NEIGHBOURHOODS.clear()
                    NEIGHBOURHOODS.update(table)
                if steps[""] == float("inf"):
                    continue
                losses[f"{name} {mesh}, seed {seed}"] = {key: log(of / steps[""]) for key, of in steps.items() if key}
                note(f"{name} {mesh}, seed {seed}: {1e3 * steps['']:.3f} ms")
    rows = [row_of(without, losses) for without in (options.without or table)] if losses else []
    show(f"searches without one neighbourhood, {options.effort} effort", COLUMNS, rows)
    write_json(options.json, rows)
    return 0


def row_of(without: str, losses: dict[str, dict[str, float]]) -> Row:
    """losses: where -> neighbourhood -> log of the step without it over the step with all."""
    where = max(losses, key=lambda place: losses[place][without])
    middle = mean(of[without] for of in losses.values())
    most = losses[where][without]
    return {"without": without, "mean": 100 * (exp(middle) - 1), "most": 100 * (exp(most) - 1), "where": where}


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("programs", nargs="*", help="sample models by name, or files (default: all but the tiny twins)")
    parser.add_argument("--mesh", nargs="+", default=("v4-32", "v5e-16"), help="NAME or NAME:axis=size,...")
    parser.add_argument("--without", nargs="+", choices=list(NEIGHBOURHOODS), help="only these (default: each)")
    parser.add_argument("--effort", choices=list(PLANS), default="medium")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--json", metavar="FILE")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
