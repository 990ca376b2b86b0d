"""Serve a model over HTTP: merge requests into batches, and answer with texts or streams of tokens.

See docs/cluster.md.
"""

import argparse

from fastgen.corpus import models

HELP = "serve a model over HTTP, with merged requests and token streaming"


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    models.need("ray", "pydantic")
    from fastgen.ray import serve

    serve.arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Serve until a signal arrives; return the exit status."""
    from fastgen.ray import serve

    return serve.run(args)
