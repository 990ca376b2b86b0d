"""The version, alone in a file that every part may import and a build tool can read."""

__version__ = "0.1.0"
