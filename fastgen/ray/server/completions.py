"""Answers as OpenAI's API for completions has them."""

from __future__ import annotations

import time
import uuid
from typing import Any


class Completions:
    """The answers, or the events, to one request.

    Args:
        model: its name.
        counts: whether an event of its own behind the text counts tokens, as `include_usage` asks for.
    """

    def __init__(self, model: str, counts: bool = False) -> None:
        self._common = {
            "id": f"cmpl-{uuid.uuid4().hex}", "object": "text_completion", "created": int(time.time()), "model": model,
        }  # fmt: skip
        self._counts = counts

    def whole(self, texts: list[tuple[str, str]], usage: dict[str, int]) -> dict[str, Any]:
        """The answer of texts, each with why it ended."""
        choices = [_choice(index, text, reason) for index, (text, reason) in enumerate(texts)]
        return self._common | {"choices": choices, "usage": usage}

    def piece(self, text: str) -> dict[str, Any]:
        return self._event([_choice(0, text, None)], None)

    def end(self, text: str, reason: str, usage: dict[str, int]) -> list[dict[str, Any]]:
        last = self._event([_choice(0, text, reason)], None)
        return [last, self._event([], usage)] if self._counts else [last]

    def error(self, message: str) -> dict[str, Any]:
        return {"error": {"message": message, "type": "server_error", "code": 500}}

    def _event(self, choices: list[dict[str, Any]], usage: dict[str, int] | None) -> dict[str, Any]:
        return self._common | {"choices": choices} | ({"usage": usage} if self._counts else {})


class Own:
    """The events of /generate."""

    def __init__(self, model: str) -> None:
        self._model = model

    def piece(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def end(self, text: str, reason: str, usage: dict[str, int]) -> list[dict[str, Any]]:
        return [{"text": text, "finish_reason": reason, "usage": usage, "model": self._model}]

    def error(self, message: str) -> dict[str, Any]:
        return {"error": message}


def usage(prompt: int, completion: int) -> dict[str, int]:
    """Tokens of a request, and of its answer."""
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }


def _choice(index: int, text: str, reason: str | None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": None, "finish_reason": reason}
