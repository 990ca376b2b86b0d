"""Start a server on this machine, or on a cluster: `python -m fastgen.ray.serve FOLDER`."""

from __future__ import annotations

import argparse
import signal
import sys
import threading
from collections.abc import Sequence

from pydantic import ValidationError

from fastgen.corpus import models
from fastgen.errors import CommandError
from fastgen.ray.cluster import connect
from fastgen.ray.settings import Settings


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until a signal says to stop; return the exit status, 2 for what the user must mend."""
    args = vars(_parser().parse_args(argv))
    address, host, port = (args.pop(name) for name in ("address", "host", "port"))
    try:
        settings = Settings(**{name: value for name, value in args.items() if value is not None})
        models.need("ray", "ray", "starlette")
        models.check_folder(settings.model)
        start(settings.model_copy(update={"model": settings.model.absolute()}), address, host, port)
    except (CommandError, ValidationError) as error:
        print(f"python -m fastgen.ray.serve: {error}", file=sys.stderr)
        return 2
    stopped = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopped.set())
    print(f"serving {settings.shown_name} on http://{host}:{port}/generate", flush=True)
    stopped.wait()
    stop()
    return 0


def start(settings: Settings, address: str | None = None, host: str = "127.0.0.1", port: int = 8000) -> None:
    """Start the application `fastgen`, and Ray where it does not run in this process; return once it answers.

    Raises:
        CommandError: there is no such cluster, or no replica comes up.
    """
    connect(address)
    from ray import serve

    from fastgen.ray.server import app

    serve.start(http_options={"host": host, "port": port})
    try:
        serve.run(app(settings), name="fastgen")
    except RuntimeError as error:
        stop()
        raise CommandError(str(error)) from error


def stop() -> None:
    """End what `start` started."""
    import ray
    from ray import serve

    serve.shutdown()
    ray.shutdown()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m fastgen.ray.serve", description=__doc__)
    parser.add_argument("model", help=Settings.model_fields["model"].description)
    parser.add_argument("--address", help="of the Ray cluster (default: RAY_ADDRESS, or this machine alone)")
    parser.add_argument("--host", default="127.0.0.1", help="default: %(default)s")
    parser.add_argument("--port", type=int, default=8000, help="default: %(default)s")
    for name, each in Settings.model_fields.items():
        if name != "model":
            shown = "" if each.default in (None, "") or each.default_factory else f" (default: {each.default})"
            parser.add_argument(f"--{name.replace('_', '-')}", help=f"{each.description}{shown}", metavar="VALUE")
    return parser


if __name__ == "__main__":
    sys.exit(main())
