"""The Ray Serve deployment: `Api` in replicas, which Serve starts, watches and shares the requests between.

serve run fastgen.ray:app model=FOLDER cpus=2
fastgen serve FOLDER --cpus 2
"""

# Without postponed annotations: Serve makes `app`'s settings of a command's words by the class it sees there.
from collections.abc import AsyncIterator
from typing import Any

from prometheus_client.metrics_core import Metric
from ray import serve
from ray.serve.config import BackpressureConfig
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from fastgen.ray.server.api import Api
from fastgen.ray.settings import Settings

_TRIES = 2  # to bring a replica up: wrong settings do not become right by trying

_STREAMED = {
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}  # that no proxy holds events back

_GATHERING = 10.0  # seconds that the replicas' metrics are waited for


class Replica:
    """A model behind HTTP; what it answers is in `fastgen.ray.server.api`.

    Args:
        settings: all but what `app` makes of them: replicas, their resources, and Serve's own limits.
    """

    def __init__(self, settings: Settings) -> None:
        self._context = serve.get_replica_context()
        self.api = Api(settings, self._context.replica_id.unique_id)
        if settings.replicas > 1:
            self.api.gather = self._gather

    async def __call__(self, request: Request) -> Response:
        path = (
            request.url.path.removeprefix(request.scope.get("root_path", "")) or "/"
        )  # behind the application's prefix
        answer = await self.api(request.method, path, await request.body())
        if isinstance(answer.content, AsyncIterator):
            return StreamingResponse(answer.content, answer.status, _STREAMED, "text/event-stream")
        if isinstance(answer.content, str):
            return Response(answer.content, answer.status, answer.headers)
        return JSONResponse(answer.content, answer.status, answer.headers)

    def check_health(self) -> None:
        """Serve asks this from time to time, and replaces a replica in which it raises."""
        self.api.check()

    def families(self) -> list[Metric]:
        """What this replica counts."""
        return self.api.metrics.families()

    async def _gather(self) -> list[list[Metric]]:
        """What all replicas count, but those that are gone."""
        handle = serve.get_deployment_handle(self._context.deployment, self._context.app_name)
        found = await handle.broadcast("families").results_async(
            timeout_s=_GATHERING, return_exceptions=True
        )
        return [one for one in found if isinstance(one, list)]


Server: Any = serve.deployment(Replica, name="Server")
"""The deployment; `app` gives it the limits and resources of its settings."""


def app(settings: Settings) -> serve.Application:
    """The application of `serve run fastgen.ray:app` and `serve.run`, with the limits of its settings."""
    return Server.options(
        num_replicas=settings.replicas,
        max_ongoing_requests=settings.max_requests,
        max_queued_requests=settings.max_queued,
        backpressure_config=BackpressureConfig(status_code=503, retry_after_s=settings.retry_after),
        max_constructor_retry_count=_TRIES,
        ray_actor_options={"num_cpus": settings.cpus, "num_gpus": settings.gpus},
        logging_config={"enable_access_log": False},  # which knows no paths: `Api` logs requests
    ).bind(settings)
