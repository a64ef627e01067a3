"""Explains a plan: the saving of each decision, the reason for an array's sharding, the cause of a collective, and the
contents of the memory peak.

Every figure is the cost of a whole plan that differs in the one thing explained; nothing else is searched again.
"""
