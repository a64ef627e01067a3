"""Measurements too slow for the tests; docs/accuracy.md shows what they print and what is aimed at."""
