"""What is said of kernels that cannot be read."""


class KernelError(Exception):
    """A kernel that is not what it should be; the message says why. It is computed whole."""
