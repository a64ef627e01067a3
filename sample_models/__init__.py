"""Programs to try `toast` on, and the plain-JAX scripts that make them; docs/reference/sample-models.md lists them."""
