"""The error for kernels that cannot be read."""


class KernelError(Exception):
    """A kernel cannot be read; the message says why. It is computed replicated."""
