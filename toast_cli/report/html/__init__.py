"""Reports as self-contained HTML pages: no network, no library; light and dark, from narrow to wide.

In: facts. Out: bytes. Python writes tables and the data of the chart; the scripts in this folder draw it at
full width, with zoom and tooltips.
"""
