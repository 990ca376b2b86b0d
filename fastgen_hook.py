"""What `fastgen install-hook` has Python import at its start: it imports fastgen once a toolkit is imported.

Nothing else happens at the start, and nothing at all in processes that use no toolkit.
"""

import sys

TOOLKITS = ("fairseq", "transformers")


class _Finder:
    """Finds no module; notices the first import of a toolkit."""

    @classmethod
    def find_spec(cls, name, path=None, target=None):  # type: ignore[no-untyped-def]
        if name in TOOLKITS:
            sys.meta_path.remove(cls)
            try:
                import fastgen
            except Exception as error:  # the user's program goes on without it
                print(
                    f"fastgen: not active, since importing it failed: {type(error).__name__}: {error}",
                    file=sys.stderr,
                )


sys.meta_path.insert(0, _Finder)
