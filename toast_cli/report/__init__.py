"""Reports: a `Report` (facts only, `model`) goes in; terminal text, JSON, tables and HTML pages come out.

Nothing here computes a prediction. `build` gathers the facts of a run, `terminal` shows them to a person, `model`
stores and reads them, `explain` says what in a plan causes what, `html` draws pages.
"""
