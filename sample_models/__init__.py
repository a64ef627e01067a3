"""Programs to try `toast` on, and the plain-JAX scripts that make them; sample_models/README.md lists them."""
