"""The built-in tactics, each defined by the roles of dimensions and arguments."""

from __future__ import annotations

from dataclasses import replace

from toast_cli.errors import UsageError
from toast_cli.hardware.yamltree import nearest
from toast_cli.plan.decisions import Decision
from toast_cli.tactics.model import Look, Tactic

SEARCH = "search"


def _fsdp(look: Look) -> list[Decision]:
    return [*look.split("data"), *look.split("weights")]


def _hsdp(look: Look) -> list[Decision]:
    """Stores weights whole over the networks; on a mesh without any, over all axes but the last."""
    inside = [a for a in look.axes if all(link.kind != "network" for link in look.problem.mesh.axes[a].links)]
    within = tuple(inside) if 0 < len(inside) < len(look.axes) else look.axes[-1:]
    return [*look.split("data"), *replace(look, axes=within).split("weights")]


def _zero2(look: Look) -> list[Decision]:
    return [*_fsdp(look), *_kept(look)]


def _kept(look: Look) -> list[Decision]:
    """Stores weights replicated, in a program that also has state to split."""
    look.keep("state")
    return look.keep("weights")


_ALL = (
    Tactic("data-parallel", "the batch", lambda look: look.split("batch")),
    Tactic(
        "fsdp",
        "the batch; weights and optimizer state are sharded too (ZeRO-3)",
        _fsdp,
    ),
    Tactic("zero3", "the same as fsdp", _fsdp),
    Tactic(
        "hsdp",
        "the batch; weights and optimizer state are stored split inside a slice or host (else over the last axis) only",
        _hsdp,
    ),
    Tactic(
        "zero2",
        "the batch; optimizer state is sharded, weights are replicated; gradients are reduce-scattered",
        _zero2,
    ),
    Tactic("zero1", "within one step the same as zero2", _zero2),
    Tactic(
        "megatron",
        "widths of the weights but the model width (embed): heads, hidden widths, vocabulary",
        lambda look: look.split("inner"),
    ),
    Tactic(
        "sequence",
        "the sequence, where nothing else uses the axis: between the blocks that megatron splits",
        lambda look: look.split("seq"),
        place=1,
        companion=True,
    ),
    Tactic(
        "context", "the sequence, in attention too: devices exchange keys and values", lambda look: look.split("seq")
    ),
    Tactic(
        "expert",
        "experts; where the batch is split over the same axis, all-to-alls bring tokens to their experts",
        lambda look: look.experts(),
        place=-1,
        companion=True,
    ),
    Tactic(
        "edge",
        "the edges of a graph; what edges send to a node is summed over devices",
        lambda look: look.split("edges"),
    ),
    Tactic("vocabulary", "rows of embedding tables, and logits", lambda look: look.split("vocab"), companion=True),
    Tactic(
        "spatial",
        "the height of images; devices exchange the rows next to their own",
        lambda look: look.split("height"),
    ),
)
TACTICS = {tactic.name: tactic for tactic in _ALL}
# Common short name -> name.
ALIASES = {"dp": "data-parallel", "ddp": "data-parallel", "tp": "megatron", "ep": "expert", "cp": "context"}


def find_tactic(name: str, where: str = "tactic") -> Tactic:
    """The tactic of that name or alias. Raises UsageError that lists the known ones."""
    known = ALIASES.get(name, name)
    if known not in TACTICS:
        raise UsageError(f"unknown tactic {name!r}", where=where, hint=nearest(name, [*TACTICS, *ALIASES, SEARCH]))
    return TACTICS[known]
