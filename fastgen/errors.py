"""The error that the command prints without a traceback."""


class CommandError(Exception):
    """Something the user has to put right; the message says what and how."""
