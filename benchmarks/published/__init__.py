"""Training steps that others measured on real chips and published, beside what toast predicts for them."""
