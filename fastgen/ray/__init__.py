"""Generation on many machines, and a server: `fastgen.corpus` on Ray Data and Ray Serve.

generator          stage of a Ray dataset: a column of texts in, their outputs in columns beside it
engine             `fastgen generate --engine ray`: files in, a folder of files out
cluster            connection to Ray, for both of these and the server
tables             input of a run
folder             output folder of a run, which is complete or absent
settings           settings of a server
serve              `fastgen serve`: starts the server
server.merging     merges small requests into batches of similar lengths
server.requests    request bodies
server.api         what the answers to requests are
server.answers     answers, and how they go over HTTP
server.streaming   text of a request while it is generated
server.completions answers in the format of OpenAI's API
server.metrics     metrics of a server
server.routing     which replica gets a request
server.deployment  Ray Serve deployment

    ray.data.Dataset.map_batches(fastgen.ray.Generator, ...)
    serve run fastgen.ray:app model=FOLDER

Within this folder `import ray` imports Ray itself, since all imports are absolute. Ray is imported
when a name below is first used.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fastgen.ray.generator import Generator
    from fastgen.ray.server.deployment import Server, app

__all__ = ["Generator", "Server", "app"]


def __getattr__(name: str) -> Any:
    if name == "Generator":
        from fastgen.ray.generator import Generator

        return Generator
    if name in ("Server", "app"):
        from fastgen.ray.server import deployment

        return getattr(deployment, name)
    raise AttributeError(f"module 'fastgen.ray' has no attribute {name!r}")
