"""Programs to try `toast` on, and the plain-JAX scripts that make them; `docs/sample-models.md` lists them."""
