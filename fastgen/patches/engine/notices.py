"""One warning for each reason why fastgen as a whole, or a whole decoding method, does nothing."""

import warnings
from collections.abc import Mapping

from fastgen.errors import FastgenWarning
from fastgen.patches.engine.patch import Toolkit
from fastgen.patches.engine.status import Entry

_given: set[str] = set()

_SILENCE = 'To silence this: FASTGEN=0, or warnings.filterwarnings("ignore", category=fastgen.FastgenWarning).'


def warn_of_patch(entry: Entry, versions: Mapping[str, str]) -> None:
    """Warn that a patch which users would miss is not in place; versions: toolkit name -> version found."""
    patch, toolkit = entry.patch, entry.patch.toolkit
    if entry.state == "skipped":
        _warn_once(f"fastgen accelerates nothing of {toolkit.name}: {entry.reason}.")
    else:
        found = f"{toolkit.name} {versions.get(toolkit.name, 'of an unknown version')}"
        _warn_once(
            f"fastgen does not accelerate {patch.covers} of {found}: {patch.name} failed, {entry.reason}. "
            f"{toolkit.versions} is supported and {toolkit.tested} the newest tested; see `fastgen doctor`."
        )


def warn_of_difference(toolkit: Toolkit, version: str, part: str, found: str) -> None:
    """Warn that fastgen gives something else than a toolkit newer than tested, which therefore runs its own code."""
    _warn_once(
        f"fastgen leaves {part} to {toolkit.name} {version}: {found}. {toolkit.tested} is the newest tested: a newer "
        f'fastgen may support {version}, or pip install "{toolkit.name}<={toolkit.tested}".'
    )


def _warn_once(text: str) -> None:
    if text not in _given:
        _given.add(text)
        warnings.warn(f"{text} {_SILENCE}", FastgenWarning, stacklevel=5)
