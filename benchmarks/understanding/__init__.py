"""How well toast understands programs: what a person says of each, beside what toast says."""
