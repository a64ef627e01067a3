"""The plan leaves the tool: what enters is a `Source` and a `LoweredPlan`, what leaves is the bytes of a file.

`shardy` writes StableHLO with Shardy's shardings, `hlo` HLO text with GSPMD's, `specs` PartitionSpecs as JSON and `snippet` as
Python. The first two mark the module through `annotate`, which takes its marks off again; `constraints` picks the places to mark.
"""
