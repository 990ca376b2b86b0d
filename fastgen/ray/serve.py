"""Serve a model over HTTP: merge requests into batches, and answer with texts or streams of tokens.

On this machine alone, or on a Ray cluster; see docs/cluster.md.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from typing import Any, get_args, get_origin

from pydantic import ValidationError

from fastgen.corpus import models
from fastgen.errors import CommandError
from fastgen.ray.cluster import Connection, connect, is_new
from fastgen.ray.settings import Settings

APPLICATION = "fastgen"


class NoAddress(CommandError):
    """Error: nothing can listen at a host and port."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run `python -m fastgen.ray.serve`, the same as `fastgen serve`; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m fastgen.ray.serve", description=__doc__)
    arguments(parser)
    try:
        return run(parser.parse_args(argv))
    except CommandError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2


def run(args: argparse.Namespace) -> int:
    """Serve until SIGINT or SIGTERM.

    Returns:
        The exit status; 1 if nothing can listen at the host and port.

    Raises:
        CommandError: a setting is invalid, or `start` raises it.
    """
    where = {name: getattr(args, name) for name in _WHERE}
    values = {name: getattr(args, name) for name in Settings.model_fields}
    try:
        settings = Settings(**{name: value for name, value in values.items() if value is not None})
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = str(first["loc"][0])
        raise CommandError(f"--{name.replace('_', '-')} {values[name]}: {first['msg']}") from error
    models.need("ray", "starlette", "prometheus_client")
    try:
        connection = start(
            settings.model_copy(update={"model": models.shared_name(settings.model)}), **where
        )
    except NoAddress as error:
        print(f"fastgen serve: {error}", file=sys.stderr)
        return 1
    stopped = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopped.set())
    base = f"http://{where['host']}:{where['port']}{where['route_prefix'].rstrip('/')}"
    print(f"serving {settings.shown_name} on {base}/generate", flush=True)
    stopped.wait()
    stop(connection, where["application"])
    return 0


def check_address(host: str, port: int) -> None:
    """Raise NoAddress if nothing can listen at a host and port of this machine."""
    try:
        addresses = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise NoAddress(
            f"--host {host}: {error.strerror if isinstance(error, OSError) else error}"
        ) from error
    if not 0 < port < 2**16:
        raise NoAddress(f"--port {port}: must be from 1 to 65535")
    family, kind, protocol, _, address = addresses[0]
    with socket.socket(family, kind, protocol) as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as Serve does
        try:
            listening.bind((address[0], port, *address[2:]))
            listening.listen()  # fails in any case if another socket listens there
        except OSError as error:
            name = "host" if error.errno == errno.EADDRNOTAVAIL else "port"
            raise NoAddress(
                f"--{name} {host if name == 'host' else port}: {error.strerror}"
            ) from error


def start(
    settings: Settings,
    *,
    address: str | None = None,
    host: str = "127.0.0.1",
    port: int = 8000,
    application: str = APPLICATION,
    route_prefix: str = "/",
) -> Connection:
    """Start an application of Ray Serve, and Ray if needed; return once the application answers.

    Args:
        settings: settings of the server.
        address: of a cluster; see `connect`.
        host: where Serve listens, if it does not run yet.
        port: likewise.
        application: its name, by which `stop` ends it.
        route_prefix: prefix of its paths.

    Raises:
        NoAddress: nothing can listen there, on a cluster that is started here.
        CommandError: there is no such cluster, it has an application of this name or at these
            paths, or no replica starts.
    """
    if is_new(address):  # else Serve itself may be listening there
        check_address(host, port)
    connection = connect(address)
    from ray import serve

    from fastgen.ray.server.deployment import app

    try:
        if application in serve.status().applications:
            raise CommandError(
                f"--application {application}: one of this name is running; "
                "stop it, or name another"
            )
        connection.check(settings.replicas, settings.cpus, settings.gpus)
    except CommandError:
        connection.close()
        raise
    try:
        serve.start(http_options={"host": host, "port": port})
        serve.run(app(settings), name=application, route_prefix=route_prefix)
    except RuntimeError as error:
        stop(connection, application)
        raise CommandError(str(error)) from error
    return connection


def stop(connection: Connection, application: str = APPLICATION) -> None:
    """Stop what `start` started, and nothing else that runs on the cluster."""
    from ray import serve
    from ray.exceptions import RayActorError

    if connection.alone:
        # The controller may be gone before it has answered.
        with contextlib.suppress(RayActorError):
            serve.shutdown()
    else:
        serve.delete(application)
    connection.close()


_WHERE = ("address", "host", "port", "application", "route_prefix")


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the model, the address, and all `Settings`."""
    parser.add_argument("model", metavar="MODEL", help=Settings.model_fields["model"].description)
    where = parser.add_argument_group("where")
    add = where.add_argument
    add("--host", default="127.0.0.1", help="address to listen on (%(default)s)")
    add("--port", type=int, default=8000, metavar="N", help="port to listen on (%(default)s)")
    add("--address", help="of a Ray cluster (default: RAY_ADDRESS, or this machine alone)")
    add(
        "--application", default=APPLICATION, metavar="NAME", help="name in Ray Serve (%(default)s)"
    )
    add(
        "--route-prefix",
        default="/",
        metavar="PATH",
        help="what all paths begin with (%(default)s)",
    )
    settings = parser.add_argument_group("settings")
    for name, each in Settings.model_fields.items():
        if name == "model":
            continue
        shown = (
            ""
            if each.default in (None, "", False) or each.default_factory
            else f" ({each.default})"
        )
        metavar = _METAVARS.get(_kind(each.annotation), "VALUE")
        settings.add_argument(
            f"--{name.replace('_', '-')}", help=f"{each.description}{shown}", metavar=metavar
        )


_METAVARS = {bool: "true|false", int: "N", float: "X", dict: "JSON"}


def _kind(annotation: Any) -> Any:
    """Return the type inside an optional or parametrised type."""
    kinds = [kind for kind in get_args(annotation) if kind is not type(None)]
    return (
        _kind(kinds[-1])
        if kinds and get_origin(annotation) is not dict
        else get_origin(annotation) or annotation
    )


if __name__ == "__main__":
    sys.exit(main())
