"""Check of the environment that runs before anything is patched."""

import difflib
from importlib.util import find_spec

from fastgen.config import settings
from fastgen.errors import MissingPackageError, VariableError, needs
from fastgen.patches.engine.registry import registry

# Patches of earlier releases, which existing scripts may still list in FASTGEN_SKIP.
_REMOVED = {"fairseq.refine", "transformers.loss"}


def check() -> None:
    """Validate all environment variables, and check that wrapt is installed.

    Raises:
        VariableError: A variable has an invalid value.
        MissingPackageError: wrapt, which the import hooks need, is not installed.
    """
    skip, entries = settings().skip, registry.entries
    for name in skip:
        if name not in _REMOVED and not any(entry.patch.within(name) for entry in entries.values()):
            close = difflib.get_close_matches(name, entries, n=1)
            remedy = (
                f"did you mean {close[0]}?"
                if close
                else "unset it, and `fastgen status --all` lists the names"
            )
            raise VariableError(
                "FASTGEN_SKIP", ",".join(skip), f"no patch is named {name!r}", remedy
            )
    if find_spec("wrapt") is None:
        raise MissingPackageError(needs("wrapt"), name="wrapt")
