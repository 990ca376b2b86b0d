"""Warnings, each shown once, that fastgen does not accelerate a toolkit or a decoding method."""

import warnings
from collections.abc import Mapping

from fastgen.errors import FastgenWarning
from fastgen.patches.engine.patch import Toolkit
from fastgen.patches.engine.status import Entry

_given: set[str] = set()

_SILENCE = (
    "To silence this: FASTGEN=0, or "
    'warnings.filterwarnings("ignore", category=fastgen.FastgenWarning).'
)


def warn_of_patch(entry: Entry, versions: Mapping[str, str]) -> None:
    """Warn that a patch whose absence costs users speed is not applied.

    Args:
        entry: The patch, either skipped or failed.
        versions: Installed version by toolkit name.
    """
    patch, toolkit = entry.patch, entry.patch.toolkit
    if entry.state == "skipped":
        _warn_once(f"fastgen accelerates nothing of {toolkit.name}: {entry.reason}.")
    else:
        installed = f"{toolkit.name} {versions.get(toolkit.name, 'of an unknown version')}"
        _warn_once(
            f"fastgen does not accelerate {patch.covers} of {installed}: "
            f"{patch.name} failed, {entry.reason}. {toolkit.versions} is supported and "
            f"{toolkit.tested} the newest tested; see `fastgen doctor`."
        )


def warn_of_difference(toolkit: Toolkit, version: str, part: str, found: str) -> None:
    """Warn that an untested newer toolkit runs its own code, because the canary found differences.

    Args:
        toolkit: The toolkit.
        version: Its installed version.
        part: What runs the toolkit's own code, such as a decoding method.
        found: Description of the difference.
    """
    _warn_once(
        f"fastgen leaves {part} to {toolkit.name} {version}: {found}. "
        f"{toolkit.tested} is the newest tested: a newer fastgen may support {version}, "
        f'or pip install "{toolkit.name}<={toolkit.tested}".'
    )


def _warn_once(text: str) -> None:
    if text not in _given:
        _given.add(text)
        warnings.warn(f"{text} {_SILENCE}", FastgenWarning, stacklevel=5)
