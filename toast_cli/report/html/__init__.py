"""Reports as HTML pages that stand alone: no network, no library; light and dark, from narrow to wide.

Enters: facts. Leaves: bytes. Python writes tables and the numbers of each chart; the scripts beside it draw the charts
as wide as there is room, with zoom and words under the pointer.
"""
