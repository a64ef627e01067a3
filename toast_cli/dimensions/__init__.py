"""The named-dimension analysis (TOAST, arXiv:2508.15010): which dimensions must be split alike, and which conflict.

In: a `Program`. Out: `Dimensions`: every dimension of every value as an ordered product of *classes*, mirrored
classes joined into *groups*, and for every group the *components* of its conflicts with their sides.
"""

from toast_cli.dimensions.analysis import analyse as analyse
from toast_cli.dimensions.model import Dimensions as Dimensions
from toast_cli.dimensions.model import Form as Form
from toast_cli.dimensions.model import Group as Group
from toast_cli.dimensions.model import Resolution as Resolution
from toast_cli.dimensions.model import Strand as Strand
