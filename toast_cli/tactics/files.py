"""User-defined tactics: reads them from a YAML or Python file.

A Python file is run when the user names it, and only then.
"""

from __future__ import annotations

import runpy

from toast_cli.errors import InputError, ToastError
from toast_cli.hardware.yamltree import YamlValue, nearest, read_yaml
from toast_cli.inputs import TEXT_BYTES, read_file, text_of
from toast_cli.plan.decisions import Decision, Replicate, Shard
from toast_cli.tactics.model import Decide, DoesNotApply, Look, Tactic

_PLACES = {"first": -1, "given": 0, "last": 1}
_STEPS = ("split", "keep", "use")


def read_tactics(path: str) -> dict[str, Tactic]:
    """The tactics of a file, by name. Raises ToastError with the line that cannot be read."""
    text = text_of(read_file(path, TEXT_BYTES), path, InputError)
    return _from_python(path) if path.endswith(".py") else _from_yaml(text, path)


def find_in_file(path: str, name: str) -> Tactic:
    """One tactic of a file."""
    tactics = read_tactics(path)
    if name not in tactics:
        raise InputError(f"has no tactic {name!r}", where=path, hint=nearest(name, tactics))
    return tactics[name]


def _from_yaml(text: str, path: str) -> dict[str, Tactic]:
    if not text.strip():
        raise InputError("is empty", where=path, hint="see docs/howto/tactics.md for what belongs in it")
    top = read_yaml(text, path).section("tactics")
    if "tactics" not in top:
        raise InputError("has no tactics", where=path, hint="write them under the key tactics")
    return {name: _read_tactic(name, entry, path) for name, entry in top["tactics"].mapping().items()}


def _read_tactic(name: str, entry: YamlValue, path: str) -> Tactic:
    """A tactic from its entry: `steps` alone, or a mapping with `about`, `place` and `steps`."""
    if entry.is_sequence:
        return Tactic(name, "", _decide(entry), source=path)
    keys = entry.section("about", "place", "steps")
    if "steps" not in keys:
        raise entry.error(f"{name} has no steps", "list them: split, keep or use")
    place = _PLACES[keys["place"].choice(_PLACES)] if "place" in keys else 0
    about = keys["about"].scalar("one line of text") if "about" in keys else ""
    return Tactic(name, about, _decide(keys["steps"]), place, source=path)


def _decide(steps: YamlValue) -> Decide:
    """The function that a list of steps stands for.

    Unknown words raise an error only when it runs on a program, since they may name its dimensions.
    """
    read: list[tuple[str, list[str], YamlValue]] = []
    for step in steps.items():
        ((kind, words),) = _one(step).items()
        read.append((kind, [word.scalar("a name") for word in words.items()], step))

    def decide(look: Look) -> list[Decision]:
        found: list[Decision] = []
        for kind, words, step in read:
            try:
                found += {"split": look.split, "keep": look.keep, "use": look.use}[kind](*words)
            except ToastError as error:
                raise step.error(error.what, error.hint) from None
        return found

    return decide


def _one(step: YamlValue) -> dict[str, YamlValue]:
    found = step.section(*_STEPS)
    if len(found) != 1:
        raise step.error(f"a step has {len(found)} keys", "one of split, keep, use each")
    return found


def _from_python(path: str) -> dict[str, Tactic]:
    try:
        values = runpy.run_path(path)
    except ToastError:
        raise
    except (Exception, SystemExit) as error:
        where = f"{path}:{error.lineno}" if isinstance(error, SyntaxError) else path
        raise InputError(f"cannot be run: {type(error).__name__}: {error}", where=where) from None
    found = {
        value.name: _guarded(value, path) for value in values.values() if isinstance(value, Tactic) and not value.source
    }
    if not found:
        raise InputError(
            "defines no tactics",
            where=path,
            hint='e.g. mine = Tactic("mine", "what it does", lambda look: look.split("batch"))',
        )
    return found


def _guarded(tactic: Tactic, path: str) -> Tactic:
    """The same tactic, whose exceptions are reported as errors in the file."""

    def decide(look: Look) -> list[Decision]:
        try:
            found = list(tactic.decide(look))
        except (ToastError, DoesNotApply):
            raise
        except (Exception, SystemExit) as error:
            raise InputError(f"tactic {tactic.name!r} failed: {type(error).__name__}: {error}", where=path) from None
        wrong = next((d for d in found if not isinstance(d, Shard | Replicate)), None)
        if wrong is not None:
            raise InputError(
                f"tactic {tactic.name!r} decided {wrong!r}",
                where=path,
                hint="return what look.split and look.keep give",
            )
        return found

    return Tactic(tactic.name, tactic.about, decide, tactic.place, tactic.companion, path)
