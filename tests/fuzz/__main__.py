"""The long run: `python -m fuzz --inputs 10000` from the folder `tests` (or `make fuzz`).

Exit code 0: nothing was found; 1: something was, and lies in build/fuzz, one folder for each different complaint.
"""

from __future__ import annotations

import argparse
import multiprocessing
import pickle
import re
import sys
import time
from collections import Counter
from dataclasses import dataclass
from multiprocessing.queues import Queue
from pathlib import Path
from random import Random

from fuzz import seeds
from fuzz.cases import case
from fuzz.corpus import CORPUS
from fuzz.harness import ROOT, Case, Outcome, Server, wrong_with
from fuzz.strategies import drawn_cases

# Of all inputs, so many are drawn by Hypothesis from grammars; the rest are mutations.
DRAWN = 0.1


@dataclass(frozen=True)
class Tried:
    """A case, how it ended, and what is wrong with that."""

    case: Case
    outcome: Outcome
    wrong: list[str]


def inputs(count: int, seed: int, worker: int, workers: int) -> list[Case]:
    """This worker's share: of the corpus, of what Hypothesis draws, and of mutations."""
    drawn = drawn_cases(round(count * DRAWN / workers), seed + worker)
    mutations = [case(Random(f"{seed}/{number}")) for number in range(worker, round(count * (1 - DRAWN)), workers)]
    return [*(known.case for known in CORPUS[worker::workers]), *drawn, *mutations]


def work(count: int, seed: int, worker: int, workers: int, tree: Path, found: Queue[Tried | None]) -> None:
    """In a worker: runs its share on a server of its own."""
    with Server(tree) as server:
        for one in inputs(count, seed, worker, workers):
            outcome = server.run(one)
            found.put(Tried(one, outcome, wrong_with(outcome)))
    found.put(None)


def complaint(tried: Tried) -> str:
    """What findings have in common that have one cause: what is wrong, and the innermost line of toast that is
    named."""
    places = re.findall(r'(?:at |File ".*?/)(\w+\.py)(?::|", line )(\d+)', tried.outcome.said)
    reason = re.search(r"internal error: (\w+)", tried.outcome.said)
    return " ".join([*tried.wrong, reason[1] if reason else "", *(":".join(place) for place in places[-1:])])


def main() -> int:
    parser = argparse.ArgumentParser(prog="fuzz", description=__doc__)
    parser.add_argument("--inputs", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--tree", type=Path, default=ROOT, help="the checkout whose toast is run")
    parser.add_argument("--output", type=Path, default=ROOT / "build" / "fuzz")
    options = parser.parse_args()
    seeds.binaries()
    seeds.written()
    began = time.monotonic()
    context = multiprocessing.get_context("fork")
    found: Queue[Tried | None] = context.Queue()
    workers = [
        context.Process(target=work, args=(options.inputs, options.seed, n, options.jobs, options.tree, found))
        for n in range(options.jobs)
    ]
    for worker in workers:
        worker.start()
    codes: Counter[str] = Counter()
    complaints: Counter[str] = Counter()
    largest = total = 0.0
    slowest: Tried | None = None
    left = len(workers)
    while left:
        tried = found.get()
        if tried is None:
            left -= 1
            continue
        outcome = tried.outcome
        codes["signal" if outcome.signal else "hang" if outcome.hung else str(outcome.code)] += 1
        largest, total = max(largest, outcome.bytes), total + outcome.seconds
        if slowest is None or slowest.outcome.seconds < outcome.seconds:
            slowest = tried
        if tried.wrong:
            name = complaint(tried)
            complaints[name] += 1
            if complaints[name] == 1:
                keep(tried, options.output / re.sub(r"\W+", "-", name)[:80])
                print(f"{name}: {' '.join(tried.case.arguments)[:200]}", flush=True)
        if codes.total() % 1000 == 0:
            print(
                f"{codes.total():,} inputs, {time.monotonic() - began:.0f} s, exit codes {dict(sorted(codes.items()))}",
                flush=True,
            )
    assert slowest is not None
    keep(slowest, options.output / "slowest")
    print(
        f"{codes.total():,} inputs in {time.monotonic() - began:.0f} s ({total:.0f} s of processor time): exit codes "
        f"{dict(sorted(codes.items()))}; slowest {slowest.outcome.seconds:.1f} s, largest {largest / 2**20:.0f} MiB; "
        f"{complaints.total()} findings of {len(complaints)} kinds"
    )
    for name, times in complaints.most_common():
        print(f"{times:6} {name}")
    return 1 if complaints else 0


def keep(tried: Tried, folder: Path) -> None:
    """The files of a case, its command line and what it said, for whoever looks into it; `case.pickle` runs it
    again."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in tried.case.files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    (folder / "command.txt").write_text(repr(tried.case.arguments), errors="surrogateescape")
    (folder / "said.txt").write_bytes(tried.outcome.complaints)
    (folder / "case.pickle").write_bytes(pickle.dumps(tried.case))


if __name__ == "__main__":
    sys.exit(main())
