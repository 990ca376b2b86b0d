"""fastgen: `import fastgen`, and `generate` gives the same output sooner.

Importing it declares what can be patched and, unless ``FASTGEN=0``, patches the toolkits that are or will be imported.
It imports no toolkit and not torch.

    status()            what is patched, how often it ran, and why it did not
    explain(model, **)  what a `model.generate(**)` would run, and its memory, without running it
    disable(), enable() take the patches out, put them back
    disabled()          a context in which the toolkit's own code runs
    release()           drop the memory kept between calls
"""

from typing import Any

from fastgen._version import __version__
from fastgen.config import settings
from fastgen.patches import disable, disabled, enable, release, status

__all__ = ["__version__", "disable", "disabled", "enable", "explain", "release", "status"]


def explain(model: Any, **generate_kwargs: Any) -> Any:
    """Say what ``model.generate(**generate_kwargs)`` would run and the memory it would take, without running it.

    Args:
        model: a transformers model that can generate.
        generate_kwargs: what `generate` would be given.
    """
    from fastgen.patches.transformers.explain import explain as explain_transformers

    return explain_transformers(model, **generate_kwargs)


if settings().enabled:
    enable()
