"""Import fastgen as soon as Python imports a toolkit.

`fastgen install-hook` has Python import this module at startup. The module does nothing else, and
has no effect in processes that use no toolkit.
"""

import sys

TOOLKITS = ("fairseq", "transformers")


class _Finder:
    """A finder that finds no module and notices the first import of a toolkit."""

    @classmethod
    def find_spec(cls, name, path=None, target=None):  # type: ignore[no-untyped-def]
        if name in TOOLKITS:
            sys.meta_path.remove(cls)
            try:
                import fastgen  # noqa: F401
            except Exception as error:  # the program continues without it
                print(
                    "fastgen: not active, since importing it failed: "
                    f"{type(error).__name__}: {error}",
                    file=sys.stderr,
                )


sys.meta_path.insert(0, _Finder)
