"""Start a server on this machine, or on a cluster: `python -m fastgen.ray.serve FOLDER`."""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
import threading
from collections.abc import Sequence

from pydantic import ValidationError

from fastgen.corpus import models
from fastgen.errors import CommandError
from fastgen.ray.cluster import Connection, connect
from fastgen.ray.settings import Settings

APPLICATION = "fastgen"


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until a signal says to stop; return the exit status, 2 for what the user must mend."""
    args = vars(_parser().parse_args(argv))
    where = {name: args.pop(name) for name in ("address", "host", "port", "application", "route_prefix")}
    try:
        settings = Settings(**{name: value for name, value in args.items() if value is not None})
        models.need("ray", "starlette")
        connection = start(settings.model_copy(update={"model": models.shared_name(settings.model)}), **where)
    except (CommandError, ValidationError) as error:
        print(f"python -m fastgen.ray.serve: {error}", file=sys.stderr)
        return 2
    stopped = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopped.set())
    base = f"http://{where['host']}:{where['port']}{where['route_prefix'].rstrip('/')}"
    print(f"serving {settings.shown_name} on {base}/generate", flush=True)
    stopped.wait()
    stop(connection, where["application"])
    return 0


def start(
    settings: Settings,
    *,
    address: str | None = None,
    host: str = "127.0.0.1",
    port: int = 8000,
    application: str = APPLICATION,
    route_prefix: str = "/",
) -> Connection:
    """Start an application of Ray Serve, and Ray where it does not run in this process; return once it answers.

    Args:
        address: of a cluster; see `connect`.
        host, port: where Serve listens, if it does not run there yet.
        application: its name, by which `stop` ends it.
        route_prefix: the beginning of its paths.

    Raises:
        CommandError: there is no such cluster, it has an application of this name or at these paths, or no replica
            comes up.
    """
    connection = connect(address)
    from ray import serve

    from fastgen.ray.server import app

    try:
        if application in serve.status().applications:
            raise CommandError(f"--application {application}: one of this name is running; stop it, or name another")
        connection.check(settings.replicas, settings.cpus, settings.gpus)
    except CommandError:
        connection.close()
        raise
    serve.start(http_options={"host": host, "port": port})
    try:
        serve.run(app(settings), name=application, route_prefix=route_prefix)
    except RuntimeError as error:
        stop(connection, application)
        raise CommandError(str(error)) from error
    return connection


def stop(connection: Connection, application: str = APPLICATION) -> None:
    """End what `start` started, and nothing else that runs on the cluster."""
    from ray import serve
    from ray.exceptions import RayActorError

    if connection.alone:
        with contextlib.suppress(RayActorError):  # its controller may be gone before it has answered
            serve.shutdown()
    else:
        serve.delete(application)
    connection.close()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m fastgen.ray.serve", description=__doc__)
    parser.add_argument("model", help=Settings.model_fields["model"].description)
    parser.add_argument("--address", help="of the Ray cluster (default: RAY_ADDRESS, or this machine alone)")
    parser.add_argument("--host", default="127.0.0.1", help="default: %(default)s")
    parser.add_argument("--port", type=int, default=8000, help="default: %(default)s")
    parser.add_argument("--application", default=APPLICATION, help="its name in Ray Serve (default: %(default)s)")
    parser.add_argument("--route-prefix", default="/", help="the beginning of its paths (default: %(default)s)")
    for name, each in Settings.model_fields.items():
        if name != "model":
            shown = "" if each.default in (None, "") or each.default_factory else f" (default: {each.default})"
            parser.add_argument(f"--{name.replace('_', '-')}", help=f"{each.description}{shown}", metavar="VALUE")
    return parser


if __name__ == "__main__":
    sys.exit(main())
