"""Ray Serve deployment of `Api`: Serve starts replicas, watches them and balances requests.

Examples:
    serve run fastgen.ray:app model=FOLDER cpus=2
    fastgen serve FOLDER --cpus 2
"""

# No postponed annotations: Serve parses its command's arguments by the class in `app`'s signature.
from collections.abc import AsyncIterator
from typing import Any

from prometheus_client.metrics_core import Metric
from ray import serve
from ray.serve.config import BackpressureConfig
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from fastgen.ray.server.api import Api
from fastgen.ray.settings import Settings

_TRIES = 2  # attempts to start a replica; more would not fix wrong settings

# Keeps proxies from buffering events.
_STREAMED = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}

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
        # The path after the application's prefix.
        path = request.url.path.removeprefix(request.scope.get("root_path", "")) or "/"
        answer = await self.api(request.method, path, await request.body())
        if isinstance(answer.content, AsyncIterator):
            return StreamingResponse(answer.content, answer.status, _STREAMED, "text/event-stream")
        if isinstance(answer.content, str):
            return Response(answer.content, answer.status, answer.headers)
        return JSONResponse(answer.content, answer.status, answer.headers)

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


Server: Any = serve.deployment(Replica, name="Server")
"""The deployment; `app` applies the limits and resources of the settings."""


def app(settings: Settings) -> serve.Application:
    """Return the application for `serve run fastgen.ray:app` and `serve.run`."""
    return Server.options(
        num_replicas=settings.replicas,
        max_ongoing_requests=settings.max_requests,
        max_queued_requests=settings.max_queued,
        backpressure_config=BackpressureConfig(status_code=503, retry_after_s=settings.retry_after),
        max_constructor_retry_count=_TRIES,
        ray_actor_options={"num_cpus": settings.cpus, "num_gpus": settings.gpus},
        logging_config={"enable_access_log": False},  # `Api` logs requests, with their paths
    ).bind(settings)
