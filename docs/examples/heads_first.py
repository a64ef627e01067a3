"""A tactic of your own: `toast partition … --tactic docs/examples/heads_first.py:heads-first:model`."""

from toast_cli.tactics import DoesNotApply, Look, Tactic


def decide(look: Look):
    """Heads over the given axes, then hidden widths. `look.problem` is everything that the search sees."""
    heads = look.groups("heads")
    if not heads:
        raise DoesNotApply("there is no attention here")
    return [*look.split("heads"), *look.split("ff")]


heads_first = Tactic("heads-first", "heads, then hidden widths", decide)
