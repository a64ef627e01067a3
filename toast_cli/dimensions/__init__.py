"""The named-dimension analysis (TOAST, arXiv:2508.15010): which dimensions must be split alike, and which conflict.

Enters: a `Program`. Leaves: `Dimensions`: every dimension of every value as an ordered product of *classes*, mirrored
classes joined into *groups*, and for every group the *components* of its conflicts with their sides.
"""

from toast_cli.dimensions.analysis import analyse
from toast_cli.dimensions.model import Dimensions, Form, Group, Resolution, Strand

__all__ = ["Dimensions", "Form", "Group", "Resolution", "Strand", "analyse"]
