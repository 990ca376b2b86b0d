"""The Ray cluster that a run or a server works on."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fastgen.corpus import models
from fastgen.errors import CommandError

_LOCAL = "local"  # what `ray.init` calls a new cluster of this machine


@dataclass(frozen=True)
class Connection:
    """This process's way to a cluster.

    Attributes:
        ours: it was made here, and ends with `close`; else Ray was initialized already.
        alone: the cluster was started here, of this machine alone; else others may use it.
    """

    ours: bool
    alone: bool

    def check(self, actors: int, cpus: float, gpus: float) -> None:
        """See whether the machines can hold actors that would be waited for without end.

        Of a cluster that others share a machine may yet come: a warning goes to standard error where none can hold one
        actor now.

        Raises:
            CommandError: a cluster that was started here cannot hold them all.
        """
        import ray

        if self.alone:
            found = ray.cluster_resources()
            if not _holds(found, actors * cpus, actors * gpus):
                raise CommandError(f"{actors} times {_said(cpus, gpus)} are asked for; this machine has "
                                   f"{_said(found.get('CPU', 0), found.get('GPU', 0))}")  # fmt: skip
        elif not any(
            node["Alive"] and _holds(node["Resources"], cpus, gpus) for node in ray.nodes()
        ):
            print(
                f"no machine of the cluster has {_said(cpus, gpus)} now: waiting for one",
                file=sys.stderr,
            )

    def close(self) -> None:
        if self.ours:
            import ray

            ray.shutdown()


def is_new(address: str | None) -> bool:
    """Whether `connect` would start a cluster."""
    import ray

    return not ray.is_initialized() and _wanted(address) == _LOCAL


def _wanted(address: str | None) -> str:
    return address or os.environ.get("RAY_ADDRESS") or _LOCAL


def connect(address: str | None) -> Connection:
    """Connect this process to a cluster, or start one of this machine alone.

    The workers get this process's ``FASTGEN_*`` variables. Where Ray is initialized already, nothing is done.

    Args:
        address: as `ray.init` takes it; None: that of RAY_ADDRESS, or a new one of this machine alone, whatever else
            runs here.

    Raises:
        CommandError: there is no such cluster.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # what is started here reports to nobody
    import ray

    if ray.is_initialized():
        return Connection(ours=False, alone=False)
    switches = {name: value for name, value in os.environ.items() if name.startswith("FASTGEN")}
    wanted = _wanted(address)
    quiet: dict[str, Any] = {"include_dashboard": False} if wanted == _LOCAL else {}
    try:
        ray.init(address=wanted, runtime_env={"env_vars": switches}, **quiet)
    except (ConnectionError, ValueError) as error:
        raise CommandError(f"--address {wanted}: {models.first_line(error)}") from error
    return Connection(ours=True, alone=wanted == _LOCAL)


def _holds(resources: Mapping[str, float], cpus: float, gpus: float) -> bool:
    return all(
        resources.get(name, 0) >= round(amount, 4)
        for name, amount in (("CPU", cpus), ("GPU", gpus))
    )


def _said(cpus: float, gpus: float) -> str:
    return f"{cpus:g} processors and {gpus:g} GPUs"
