"""Plans: ordered decisions, and their lowering to what each op computes on and which collectives it needs."""
