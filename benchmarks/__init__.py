"""Measurements too slow for the tests; docs/benchmarks.md shows what they print and what is aimed at."""
