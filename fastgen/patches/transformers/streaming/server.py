"""`transformers serve` under load: overload is answered with 503, and clients may leave."""

import asyncio
import queue
from collections.abc import Awaitable, Callable
from typing import Any

from fastgen.patches.transformers import compat

_Message = dict[str, Any]
_Receive = Callable[[], Awaitable[_Message]]
_App = Callable[[dict[str, Any], _Receive, Callable[[_Message], Awaitable[None]]], Awaitable[None]]

RETRY_AFTER = 1
"""Seconds after which a refused client is told to try again."""


def build_server(original: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Replace `transformers.cli.serving.server.build_server`."""
    from starlette.responses import JSONResponse

    def refuse(_: Any, error: Exception) -> JSONResponse:
        headers = {"Retry-After": str(RETRY_AFTER)}
        return JSONResponse({"error": str(error)}, 503, headers)

    app = original(*args, **kwargs)
    app.add_exception_handler(queue.Full, refuse)
    if compat.serves_batches(kwargs["generation_state"]):
        app.add_middleware(Cancellation, state=kwargs["generation_state"])
    return app


class Cancellation:
    """Cancels the task that answers a request once the client has left.

    When the server ends, it also stops the manager, whose thread would keep the process alive.

    Args:
        app: ASGI application.
        state: The server's `GenerationState`.
    """

    def __init__(self, app: _App, state: Any) -> None:
        self.app, self.state = app, state

    async def __call__(self, scope: dict[str, Any], receive: _Receive, send: Any) -> None:
        """Answer a request, as ASGI defines it."""
        if scope["type"] == "lifespan":
            try:
                return await self.app(scope, receive, send)
            finally:
                self.state.shutdown()
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        messages = asyncio.Queue[_Message]()
        answer = asyncio.ensure_future(self.app(scope, messages.get, send))
        watch = asyncio.ensure_future(_pass_on(receive, messages))
        try:
            await asyncio.wait((answer, watch), return_when=asyncio.FIRST_COMPLETED)
            if answer.done():
                answer.result()
        finally:
            watch.cancel()
            answer.cancel()


async def _pass_on(receive: _Receive, messages: asyncio.Queue[_Message]) -> None:
    """Pass messages of a client on until it leaves."""
    message: _Message = {"type": ""}
    while message["type"] != "http.disconnect":
        message = await receive()
        messages.put_nowait(message)


async def generate_non_streaming(
    original: Callable[..., Awaitable[Any]],
    /,
    self: Any,
    model: Any,
    processor: Any,
    inputs: dict[str, Any],
    gen_config: Any,
    request_id: str,
) -> Any:
    """Replace `CBGenerateManager.generate_non_streaming`: an answer nobody awaits is cancelled."""
    try:
        return await original(self, model, processor, inputs, gen_config, request_id)
    except BaseException:  # the client has left, or the queue is full
        compat.served_manager(self).cancel_request(request_id)
        raise
