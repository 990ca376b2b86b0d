"""Argument parser for commands with many options.

Accepts `--a_b` for `--a-b`, and answers unknown options with a hint.
"""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Mapping, Sequence
from typing import Any


class CommandParser(argparse.ArgumentParser):
    """ArgumentParser that rejects unknown options with hints once `answer` was called."""

    _hints: Mapping[str, str] | None = None

    def answer(self, hints: Mapping[str, str]) -> None:
        """Accept underscores for dashes, reject abbreviated options, and answer unknown options.

        Args:
            hints: the message for an option that does not exist, by its name with dashes.
        """
        self._hints, self.allow_abbrev = hints, False

    def parse_known_args(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, args: Any = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """Parse as argparse does; after `answer`, end with a hint for each unknown option."""
        if self._hints is None or args is None:
            return super().parse_known_args(args, namespace)
        found, unknown = super().parse_known_args(_dashed(args), namespace)
        if unknown:
            self.error("; ".join(self._answer(word) for word in unknown))
        return found, unknown

    def _answer(self, word: str) -> str:
        name = word.partition("=")[0]
        if not name.startswith("--"):
            return f"{word!r} is not expected there"
        if (hint := (self._hints or {}).get(name.removeprefix("--"))) is not None:
            return f"{name} is not an option here: {hint}"
        close_matches = difflib.get_close_matches(name, self._option_string_actions, 3)
        return f"there is no option {name}" + (
            f"; there is {', '.join(close_matches)}" if close_matches else ""
        )


def _dashed(args: Sequence[str]) -> list[str]:
    """Return the words with dashes in place of underscores in the names of options."""
    done: list[str] = []
    for i, word in enumerate(args):
        if word == "--":
            return [*done, *args[i:]]
        name, equals, value = word.partition("=")
        done.append(name.replace("_", "-") + equals + value if name.startswith("--") else word)
    return done
