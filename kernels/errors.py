"""KernelError: what a kernel raises when its arguments cannot be right."""


class KernelError(ValueError):
    """A shape, dtype or setting that an operation does not accept, or an operation that does not exist."""
