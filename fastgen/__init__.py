"""fastgen: `import fastgen`, and `generate` gives the same output sooner.

Importing it declares what can be patched and, unless ``FASTGEN=0``, patches the toolkits that are or will be imported.
It imports no toolkit and not torch.

    status()            what is patched, how often it ran, and why it did not
    explain(model, **)  what a `model.generate(**)` would run, and its memory, without running it
    generate_stream(model, inputs, **)  many sentences in batches of like lengths, results in their order
    disable(), enable() take the patches out, put them back
    disabled()          a context in which the toolkit's own code runs
    release()           drop the memory kept between calls
"""

from collections.abc import Iterable, Iterator
from typing import Any

from fastgen._version import __version__
from fastgen.config import settings
from fastgen.patches import disable, disabled, enable, release, status

__all__ = ["__version__", "disable", "disabled", "enable", "explain", "generate_stream", "release", "status"]


def explain(model: Any, **generate_kwargs: Any) -> Any:
    """Say what ``model.generate(**generate_kwargs)`` would run and the memory it would take, without running it.

    Args:
        model: a transformers model that can generate.
        generate_kwargs: what `generate` would be given.
    """
    from fastgen.patches.transformers.explain import explain as explain_transformers

    return explain_transformers(model, **generate_kwargs)


def generate_stream(model: Any, inputs: Iterable[Any], **options: Any) -> Iterator[Any]:
    """Yield what ``model.generate`` gives for each of `inputs`, in their order, from batches of like lengths.

    Args:
        model: a transformers model that can generate.
        inputs: the token ids of each sentence, without padding.
        options: ``max_tokens`` of a batch, ``window`` of sentences to sort by length, and what `generate` takes.

    Yields:
        (N, L) int64: the sequences of a sentence; see `fastgen.patches.transformers.stream`.
    """
    from fastgen.patches.transformers.stream import generate_stream as stream

    return stream(model, inputs, **options)


if settings().enabled:
    enable()
