"""The version, in a file of its own: every module can import it and a build tool can read it."""

__version__ = "0.1.0"
