"""Ray Serve deployment of `Api`: Serve starts replicas, watches them and balances requests.

Examples:
    serve run fastgen.ray:app model=FOLDER cpus=2
    fastgen serve FOLDER --cpus 2
"""

# No postponed annotations: Serve parses its command's arguments by the class in `app`'s signature.
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any, cast

from prometheus_client.metrics_core import Metric
from ray import serve
from ray.serve.config import BackpressureConfig, RequestRouterConfig
from starlette.requests import Request
from starlette.responses import Response

from fastgen.ray.server.answers import Answer, path_of, response
from fastgen.ray.server.api import Api
from fastgen.ray.server.routing import Front, PrefixRouter
from fastgen.ray.settings import Settings

_TRIES = 2  # attempts to start a replica; more would not fix wrong settings

_QUIET = {"enable_access_log": False}  # `Api` logs requests, with their paths

_GATHERING = 10.0  # seconds to wait for the metrics of all replicas


class Replica:
    """A model behind HTTP; `fastgen.ray.server.api` defines its answers.

    Args:
        settings: settings of the server. `app` applies the number of replicas, their resources, and
            Serve's own limits.
    """

    def __init__(self, settings: Settings) -> None:
        self._context = serve.get_replica_context()
        self.api = Api(settings, self._context.replica_id.unique_id)
        if settings.replicas > 1:
            self.api.gather = self._gather

    async def __call__(self, request: Request) -> Response:
        return response(await self.api(request.method, path_of(request), await request.body()))

    async def answer(self, method: str, path: str, body: bytes) -> AsyncIterator[Answer | str]:
        """Yield the answer to a request; the events of a stream follow an answer without content.

        See `Api` for the arguments.
        """
        answer = await self.api(method, path, body)
        if not isinstance(answer.content, AsyncIterator):
            yield answer
            return
        yield replace(answer, content=None)
        async for event in answer.content:
            yield event

    def check_health(self) -> None:
        """Raise if the replica must be replaced. Serve calls this regularly."""
        self.api.check()

    def families(self) -> list[Metric]:
        """Return the metrics of this replica."""
        return self.api.metrics.families()

    async def _gather(self) -> list[list[Metric]]:
        """Return the metrics of all replicas that answer in time."""
        handle = serve.get_deployment_handle(self._context.deployment, self._context.app_name)
        found = await handle.broadcast("families").results_async(
            timeout_s=_GATHERING, return_exceptions=True
        )
        return [one for one in found if isinstance(one, list)]


_Front: Any = serve.deployment(Front, name="Front")

Server: Any = serve.deployment(Replica, name="Server")
"""The deployment; `app` applies the limits and resources of the settings."""


def app(settings: Settings) -> serve.Application:
    """Return the application for `serve run fastgen.ray:app` and `serve.run`."""
    shares = settings.replicas > 1 and settings.prefix_routing
    router = RequestRouterConfig(
        request_router_class=cast(Any, PrefixRouter),
        request_router_kwargs={"num_fallback_replicas": settings.replicas - 1},
    )
    server = Server.options(
        num_replicas=settings.replicas,
        max_ongoing_requests=settings.max_requests,
        max_queued_requests=settings.max_queued,
        backpressure_config=BackpressureConfig(status_code=503, retry_after_s=settings.retry_after),
        max_constructor_retry_count=_TRIES,
        ray_actor_options={"num_cpus": settings.cpus, "num_gpus": settings.gpus},
        logging_config=_QUIET,
        **({"request_router_config": router} if shares else {}),
    ).bind(settings)
    if not shares:
        return server
    return _Front.options(
        max_ongoing_requests=settings.replicas * settings.max_requests,
        ray_actor_options={"num_cpus": 0},
        logging_config=_QUIET,
    ).bind(server, settings)
