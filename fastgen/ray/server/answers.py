"""Answers of a server, and how they go over HTTP."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

# Keeps proxies from buffering events.
_STREAMED = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


@dataclass(frozen=True)
class Answer:
    """HTTP status and body: JSON, text, or the events of a stream; None if these come apart."""

    status: int
    content: dict[str, Any] | str | AsyncIterator[str] | None
    headers: dict[str, str] = field(default_factory=dict)


def path_of(request: Request) -> str:
    """Return the path of a request after the application's prefix."""
    return request.url.path.removeprefix(request.scope.get("root_path", "")) or "/"


def response(answer: Answer, events: AsyncIterator[str] | None = None) -> Response:
    """Return an answer over HTTP.

    Args:
        answer: The answer.
        events: Its events, if it has no content.
    """
    content = events if answer.content is None else answer.content
    if isinstance(content, AsyncIterator):
        return StreamingResponse(content, answer.status, _STREAMED, "text/event-stream")
    if isinstance(content, str):
        return Response(content, answer.status, answer.headers)
    return JSONResponse(content, answer.status, answer.headers)
