"""Reports as self-contained HTML pages: no network, no library; light and dark, from narrow to wide.

In: facts. Out: bytes. Python writes tables and the data of each chart; the scripts in this folder draw the
charts at full width, with zoom and tooltips.
"""
