"""What a user can mend: the base of every error whose message says what was seen and what to do."""


class UsageError(ValueError):
    """The configuration, the data, the model directory or the checkpoint cannot be used as asked."""
