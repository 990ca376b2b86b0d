"""Serve a model over HTTP: requests are merged into batches, and answered whole or as streams of tokens.

See docs/cluster.md.
"""

import argparse

from fastgen.corpus import models

HELP = "serve a model over HTTP, with merged requests and streams of tokens"


def arguments(parser: argparse.ArgumentParser) -> None:
    models.need("ray", "pydantic")
    from fastgen.ray import serve

    serve.arguments(parser)


def run(args: argparse.Namespace) -> int:
    from fastgen.ray import serve

    return serve.run(args)
