"""The error of this package. It stands alone: nothing of the runtime's error tree is imported."""


class BalanceError(ValueError):
    """Loads, sizes or settings the balancer cannot work with; the message names the first offender."""
