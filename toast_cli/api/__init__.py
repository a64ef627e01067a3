"""The Python interface, one file a call: `partition` is in `plan`, `jit` in `jit`, `load` in `load`."""
