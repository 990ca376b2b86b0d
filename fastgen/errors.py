"""The error that the command prints without a traceback, and the warning that something does nothing."""


class CommandError(Exception):
    """Something the user has to put right; the message says what and how."""


class FastgenWarning(UserWarning):
    """fastgen as a whole, or for a whole decoding method, does nothing here; given once for each reason."""
