"""Answers in the format of OpenAI's completions API, and of /generate."""

from __future__ import annotations

import time
import uuid
from typing import Any


class CompletionResponse:
    """Answer, or events, for one completion request.

    Args:
        model: name of the model.
        counts: whether to send token counts in an event after the text, as `include_usage`
            requests.
    """

    def __init__(self, model: str, counts: bool = False) -> None:
        self._common = {
            "id": f"cmpl-{uuid.uuid4().hex}", "object": "text_completion",
            "created": int(time.time()), "model": model,
        }  # fmt: skip
        self._counts = counts

    def whole(self, texts: list[tuple[str, str]], usage: dict[str, int]) -> dict[str, Any]:
        """Return the answer for texts, each with its finish_reason."""
        choices = [_choice(index, text, reason) for index, (text, reason) in enumerate(texts)]
        return self._common | {"choices": choices, "usage": usage}

    def piece(self, text: str) -> dict[str, Any]:
        """Return the event for a piece of the text."""
        return self._event([_choice(0, text, None)], None)

    def end(self, text: str, reason: str, usage: dict[str, int]) -> list[dict[str, Any]]:
        """Return the last events: the rest of the text and, if requested, the token counts."""
        last = self._event([_choice(0, text, reason)], None)
        return [last, self._event([], usage)] if self._counts else [last]

    def error(self, message: str) -> dict[str, Any]:
        """Return the event for an error."""
        return {"error": {"message": message, "type": "server_error", "code": 500}}

    def _event(self, choices: list[dict[str, Any]], usage: dict[str, int] | None) -> dict[str, Any]:
        return self._common | {"choices": choices} | ({"usage": usage} if self._counts else {})


class GenerateStream:
    """Events of a stream of /generate."""

    def __init__(self, model: str) -> None:
        self._model = model

    def piece(self, text: str) -> dict[str, Any]:
        """Return the event for a piece of the text."""
        return {"text": text}

    def end(self, text: str, reason: str, usage: dict[str, int]) -> list[dict[str, Any]]:
        """Return the last event: the rest of the text, its finish_reason and the token counts."""
        return [{"text": text, "finish_reason": reason, "usage": usage, "model": self._model}]

    def error(self, message: str) -> dict[str, Any]:
        """Return the event for an error."""
        return {"error": message}


def usage(prompt: int, completion: int) -> dict[str, int]:
    """Return the token counts of a request and its answer."""
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }


def _choice(index: int, text: str, reason: str | None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": None, "finish_reason": reason}
