"""Many machines, and a server: `fastgen.corpus` on Ray Data and Ray Serve.

generator   a stage of a Ray dataset: a column of texts in, their outputs beside it
engine      `fastgen generate --engine ray`: files in, a folder of files out
cluster     the Ray that both work on
tables      the input of a run
folder      the folder that a run writes, whole or not at all
merging     small requests become batches of like lengths
requests    bodies of requests
api         what they are answered
streaming   the text of a request as it comes
completions answers as OpenAI has them
metrics     what a server counts
settings    what a server is told
server      the Ray Serve deployment of both; `serve.py` starts one

    ray.data.Dataset.map_batches(fastgen.ray.Generator, ...)
    serve run fastgen.ray:app model=FOLDER

`import ray` within this folder is Ray itself, as all imports are absolute. It is imported when a name below is used.
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
