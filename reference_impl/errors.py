"""The two kinds of error: what a user can mend, and what failed on some rank."""


class PeerError(RuntimeError):
    """Something failed on at least one rank; the message says on which and how. Raised on every rank."""


class UsageError(ValueError):
    """The configuration, the data, the model directory or the checkpoint cannot be used as asked; says what to do."""
