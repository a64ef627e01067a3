"""Reports: a `Report` (facts only, `model.py`) goes in; terminal text, JSON, and tables come out.

Nothing here computes a prediction. `terminal.py` shows a report to a person, `json_file.py` stores and reads it,
`toast_cli/folding.py` folds arguments that differ by a layer number only, `toast_cli/quantities.py` writes quantities
with units.
"""
