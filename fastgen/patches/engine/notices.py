"""Warnings, each shown once, that fastgen does not accelerate a toolkit or a decoding method."""

import warnings

from fastgen.errors import FastgenWarning
from fastgen.patches.engine.patch import Toolkit
from fastgen.patches.engine.registry import Entry, registry

_SILENCE = (
    "To silence this: FASTGEN=0, or "
    'warnings.filterwarnings("ignore", category=fastgen.FastgenWarning).'
)


def warn_of_patch(entry: Entry) -> None:
    """Warn that a patch, skipped or failed, whose absence costs users speed is not applied."""
    patch, toolkit = entry.patch, entry.patch.toolkit
    if entry.state == "skipped":
        _warn_once(f"fastgen accelerates nothing of {toolkit.name}: {entry.reason}.")
    else:
        installed = f"{toolkit.name} {registry.versions.get(toolkit.name, 'of an unknown version')}"
        _warn_once(
            f"fastgen does not accelerate {patch.covers} of {installed}: "
            f"{patch.name} failed, {entry.reason}. {toolkit.versions} is supported and "
            f"{toolkit.tested} the newest tested; see `fastgen doctor`."
        )


def warn_of_difference(toolkit: Toolkit, version: str, part: str, reason: str) -> None:
    """Warn that an untested newer toolkit runs its own code, because the canary found differences.

    Args:
        toolkit: The toolkit.
        version: Its installed version.
        part: What runs the toolkit's own code, such as a decoding method.
        reason: Description of the difference.
    """
    _warn_once(
        f"fastgen leaves {part} to {toolkit.name} {version}: {reason}. "
        f"{toolkit.tested} is the newest tested: a newer fastgen may support {version}, "
        f'or pip install "{toolkit.name}<={toolkit.tested}".'
    )


def _warn_once(text: str) -> None:
    if is_new(text):
        warnings.warn(f"{text} {_SILENCE}", FastgenWarning, stacklevel=5)


def is_new(text: str) -> bool:
    """Return whether a warning of this text has not been issued yet, and record that it is now."""
    with registry.lock:
        new = text not in registry.warnings
        registry.warnings.add(text)
        return new
