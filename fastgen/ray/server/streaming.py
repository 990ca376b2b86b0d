"""Text of one request while it is generated: tokens become pieces of text, then events."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable, Collection
from typing import Any

import torch

from fastgen.corpus.texts import Problem, Sequences

DONE = "data: [DONE]\n\n"
"""The last event of a stream that did not fail."""

_CONTEXT = 8  # earlier tokens that are decoded together with the newest ones
_UNFINISHED = re.compile(r"[\s\N{REPLACEMENT CHARACTER}]+$")
_LONGEST = len(" n ' t")  # the longest text from which a tokenizer's clean-up removes spaces


def event(content: dict[str, Any]) -> str:
    """Return a server-sent event."""
    return f"data: {json.dumps(content, ensure_ascii=False)}\n\n"


class Pieces:
    """Incremental decoder: the pieces of text that it returns add up to the whole text.

    It holds back incomplete UTF-8 characters, trailing whitespace (which outputs are stripped of)
    and, if the tokenizer removes spaces before punctuation, a short end of the text.

    Args:
        decode: decodes tokens without the special ones.
        cleans: whether the tokenizer removes spaces before punctuation.
    """

    def __init__(self, decode: Callable[[list[int]], str], cleans: bool = False) -> None:
        self._decode, self._cleans = decode, cleans
        # The newest tokens, and the text before theirs.
        self._recent, self._before = list[int](), ""
        self.sent = ""

    def add(self, tokens: list[int]) -> str:
        """Return the next piece, which may be empty."""
        self._recent += tokens
        whole = self._before + self._decode(self._recent)
        if len(self._recent) > 2 * _CONTEXT:
            self._forget(whole)
        found = _UNFINISHED.sub("", whole.lstrip())
        if self._cleans and (space := found.find(" ", max(0, len(found) - _LONGEST))) >= 0:
            found = found[:space]
        return self.end(found)

    def end(self, text: str) -> str:
        """Return the rest of the whole text; empty if the text does not begin with what is sent."""
        piece = text[len(self.sent) :] if text.startswith(self.sent) else ""
        self.sent += piece
        return piece

    def _forget(self, whole: str) -> None:
        """Stop decoding old tokens if the text of the newest does not depend on them."""
        tail = self._decode(self._recent[-_CONTEXT:])
        if tail and whole.endswith(tail):
            self._before, self._recent = whole[: -len(tail)], self._recent[-_CONTEXT:]


class Stream:
    """Tokens of a text that is being generated.

    Args:
        pieces: decodes the tokens.
        ends: the tokens that end a text.
    """

    def __init__(self, pieces: Pieces, ends: Collection[int]) -> None:
        self.pieces, self.ends = pieces, ends
        self.tokens: list[int] = []
        self._news = asyncio.Event()

    def hear(self, tokens: list[int]) -> Sequences | None:
        """Add tokens; return the answer once the text ends, even if the batch goes on."""
        self.tokens += tokens
        self._news.set()
        if self.tokens[-1] not in self.ends:
            return None
        return Sequences(torch.tensor([self.tokens], dtype=torch.int64, device="cpu"), None)

    async def read(self, answer: asyncio.Future[Sequences | Problem]) -> AsyncIterator[str]:
        """Yield pieces until the text is answered; `Pieces.end` then returns the rest."""
        answer.add_done_callback(lambda _: self._news.set())
        read = 0
        while not answer.done():
            await self._news.wait()
            self._news.clear()
            new, read = self.tokens[read:], len(self.tokens)
            if piece := self.pieces.add(new):
                yield piece
