"""Whether fastgen can start in this environment: asked before anything is patched."""

import difflib
from importlib.util import find_spec

from fastgen.config import settings
from fastgen.errors import MissingPackageError, VariableError, needs
from fastgen.patches.engine.counts import entries

_REMOVED = {
    "fairseq.refine",
    "transformers.loss",
}  # patches of earlier releases: scripts may still skip them


def check() -> None:
    """Look at every variable, and for the package that import hooks need.

    Raises:
        VariableError: a variable holds a value that it cannot have.
        MissingPackageError: wrapt is not installed.
    """
    skip = settings().skip
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
