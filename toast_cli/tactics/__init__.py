"""Named expert strategies as plans, told from the analysis alone, not from names in the program.

Enters: a `Problem`. Leaves: plans. They serve as baselines in the report and as yardsticks for the search.
"""

from toast_cli.tactics.strategies import data_parallel, fsdp, fsdp_megatron, megatron, strategies

__all__ = ["data_parallel", "fsdp", "fsdp_megatron", "megatron", "strategies"]
