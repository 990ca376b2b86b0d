"""Texts that begin alike go to the same replica, which may hold their keys and values already."""

# No postponed annotations: Serve reads the signature of `Front.__call__`.
import hashlib
import json
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, TypeVar

from ray.serve.exceptions import BackPressureError
from ray.serve.experimental.consistent_hash_router import ConsistentHashRouter
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request
from starlette.responses import Response

from fastgen.ray.server.answers import Answer, path_of, response
from fastgen.ray.settings import Settings

CHARACTERS = 256
"""Texts that agree in so many characters at their beginning go to the same replica."""

MORE = 8
"""A replica with more than so many requests more than another gets no further ones for now."""

_Replicas = TypeVar("_Replicas")


def beginning_of(body: bytes) -> str:
    """Return a name for how the text of a request begins; empty if there is no text."""
    text: Any = None
    with suppress(ValueError, TypeError, AttributeError, LookupError):
        request = json.loads(body)
        text = request.get("text") or request.get("texts") or request.get("prompt")
        text = text if isinstance(text, str) else text[0]
    if not isinstance(text, str):
        return ""
    return hashlib.blake2b(text[:CHARACTERS].encode(), digest_size=8).hexdigest()


def by_load(ranks: Sequence[_Replicas], requests: Sequence[int]) -> list[_Replicas]:
    """Return replicas in their order, those with many more requests than another last.

    Args:
        ranks: Replicas, the preferred first.
        requests: Number of requests that each has.
    """
    most = min(requests, default=0) + MORE
    order = sorted(range(len(ranks)), key=lambda place: requests[place] > most)
    return [ranks[place] for place in order]


class PrefixRouter(ConsistentHashRouter):
    """Ray's router of sessions to replicas, with a limit of how much busier one may be."""

    async def choose_replicas(
        self, candidate_replicas: list[Any], pending_request: Any = None
    ) -> list[list[Any]]:
        """Return the replicas for a request, the preferred first."""
        ranks = await super().choose_replicas(candidate_replicas, pending_request)
        if pending_request is None:
            return ranks
        known = self.replica_queue_len_cache
        return by_load(ranks, [known.get(one.replica_id) or 0 for (one,) in ranks])


class Front:
    """Receives requests over HTTP, and names the session that `PrefixRouter` goes by.

    Ray's proxies route a request before they have read its body.

    Args:
        server: The deployment of replicas.
        settings: Settings of the server.
    """

    def __init__(self, server: DeploymentHandle, settings: Settings) -> None:
        self.server, self.settings = server, settings

    async def __call__(self, request: Request) -> Response:
        body = await request.body()
        handle = self.server.options(stream=True, session_id=beginning_of(body))
        answers: Any = handle.answer.remote(request.method, path_of(request), body)
        is_streamed = False
        try:
            answer: Answer = await anext(answers)
            is_streamed = answer.content is None
            return response(answer, answers)
        except BackPressureError as error:
            headers = {"Retry-After": str(self.settings.retry_after)}
            return response(Answer(503, {"error": str(error)}, headers))
        finally:
            if not is_streamed:
                answers.cancel()  # if the client has left
