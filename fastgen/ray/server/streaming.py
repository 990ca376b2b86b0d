"""The text of one request as it comes: tokens become pieces of text, and pieces become server-sent events."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable, Collection
from typing import Any

import torch

from fastgen.corpus.texts import Problem, Sequences

DONE = "data: [DONE]\n\n"
"""The last event of a stream that was not cut off."""

_CONTEXT = 8  # tokens before the newest ones that are decoded with them
_OPEN = re.compile(r"[\s\N{REPLACEMENT CHARACTER}]+$")
_LONGEST = len(" n ' t")  # of what a tokenizer takes spaces out of


def event(content: dict[str, Any]) -> str:
    """A server-sent event."""
    return f"data: {json.dumps(content, ensure_ascii=False)}\n\n"


class Pieces:
    """The text of tokens that come one by one, in pieces that together are the text of all.

    Held back are bytes that are no whole character yet, whitespace at the end, which an output does not have, and a
    short end, where the tokenizer takes spaces before punctuation out.

    Args:
        decode: the text of some tokens, special ones left out.
        cleans: whether the tokenizer takes spaces before punctuation out.
    """

    def __init__(self, decode: Callable[[list[int]], str], cleans: bool = False) -> None:
        self._decode, self._cleans = decode, cleans
        self._recent, self._before = (
            list[int](),
            "",
        )  # the newest tokens, and the text before theirs
        self.sent = ""

    def add(self, tokens: list[int]) -> str:
        """Return the next piece, which may be empty."""
        self._recent += tokens
        whole = self._before + self._decode(self._recent)
        if len(self._recent) > 2 * _CONTEXT:
            self._forget(whole)
        found = _OPEN.sub("", whole.lstrip())
        if self._cleans and (space := found.find(" ", max(0, len(found) - _LONGEST))) >= 0:
            found = found[:space]
        return self.end(found)

    def end(self, text: str) -> str:
        """Return what is missing of a text; nothing where it is not the text of these tokens."""
        piece = text[len(self.sent) :] if text.startswith(self.sent) else ""
        self.sent += piece
        return piece

    def _forget(self, whole: str) -> None:
        """Decode old tokens no more, where the text of the newest does not depend on them."""
        tail = self._decode(self._recent[-_CONTEXT:])
        if tail and whole.endswith(tail):
            self._before, self._recent = whole[: -len(tail)], self._recent[-_CONTEXT:]


class Stream:
    """The tokens of a text under way.

    Args:
        ends: the tokens that end a text.
    """

    def __init__(self, pieces: Pieces, ends: Collection[int]) -> None:
        self.pieces, self.ends = pieces, ends
        self.tokens: list[int] = []
        self._news = asyncio.Event()

    def hear(self, tokens: list[int]) -> Sequences | None:
        """Take tokens; return the answer, where the text is at its end: others of its batch may not be."""
        self.tokens += tokens
        self._news.set()
        if self.tokens[-1] not in self.ends:
            return None
        return Sequences(torch.tensor([self.tokens], dtype=torch.int64, device="cpu"), None)

    async def read(self, answer: asyncio.Future[Sequences | Problem]) -> AsyncIterator[str]:
        """Yield pieces until the text is answered; what is missing then, `Pieces.end` has."""
        answer.add_done_callback(lambda _: self._news.set())
        read = 0
        while not answer.done():
            await self._news.wait()
            self._news.clear()
            new, read = self.tokens[read:], len(self.tokens)
            if piece := self.pieces.add(new):
                yield piece
