"""The Ray cluster that a run or a server works on."""

from __future__ import annotations

import os
from typing import Any

from fastgen.corpus import models
from fastgen.errors import CommandError


def connect(address: str | None) -> bool:
    """Connect this process to a cluster, or start one of this machine alone; return whether that was left to do.

    The workers get this process's ``FASTGEN_*`` variables. Where Ray is initialized already, nothing is done.

    Args:
        address: as `ray.init` takes it; None: that of RAY_ADDRESS, or this machine alone.

    Raises:
        CommandError: there is no such cluster.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # what is started here reports to nobody
    import ray

    if ray.is_initialized():
        return False
    switches = {name: value for name, value in os.environ.items() if name.startswith("FASTGEN")}
    alone: dict[str, Any] = {} if address or os.environ.get("RAY_ADDRESS") else {"include_dashboard": False}
    try:
        ray.init(address=address, runtime_env={"env_vars": switches}, **alone)
    except (ConnectionError, ValueError) as error:
        raise CommandError(f"--address {address}: {models.first_line(error)}") from error
    return True
