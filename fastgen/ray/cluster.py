"""Connection to the Ray cluster that a run or a server uses."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fastgen.corpus import models
from fastgen.errors import CommandError

_LOCAL = "local"  # address with which `ray.init` starts a new cluster on this machine


@dataclass(frozen=True)
class Connection:
    """Connection of this process to a cluster.

    Attributes:
        ours: whether it was made here and ends with `close`; else Ray was initialized already.
        alone: whether the cluster was started here, on this machine alone; else it may be shared.
    """

    ours: bool
    alone: bool

    def check(self, actors: int, cpus: float, gpus: float) -> None:
        """Check that the machines can hold the actors, which would otherwise be waited for forever.

        A shared cluster may still gain a machine. If none can hold one actor now, a warning goes to
        stderr.

        Args:
            actors: number of actors.
            cpus: processors of each actor.
            gpus: GPUs of each actor.

        Raises:
            CommandError: a cluster that was started here cannot hold them all.
        """
        import ray

        if self.alone:
            resources = ray.cluster_resources()
            if not _holds(resources, actors * cpus, actors * gpus):
                raise CommandError(
                    f"{actors} times {_said(cpus, gpus)} are asked for; this machine has "
                    f"{_said(resources.get('CPU', 0), resources.get('GPU', 0))}"
                )
        elif not any(
            node["Alive"] and _holds(node["Resources"], cpus, gpus) for node in ray.nodes()
        ):
            print(
                f"no machine of the cluster has {_said(cpus, gpus)} now: waiting for one",
                file=sys.stderr,
            )

    def close(self) -> None:
        """Disconnect, if the connection was made here."""
        if self.ours:
            import ray

            ray.shutdown()


def is_new(address: str | None) -> bool:
    """Return whether `connect` would start a cluster."""
    import ray

    return not ray.is_initialized() and _wanted(address) == _LOCAL


def _wanted(address: str | None) -> str:
    return address or os.environ.get("RAY_ADDRESS") or _LOCAL


def connect(address: str | None) -> Connection:
    """Connect this process to a cluster, or start one on this machine alone.

    The workers get this process's ``FASTGEN_*`` variables. If Ray is initialized already, that
    connection is used as it is.

    Args:
        address: as `ray.init` takes it. None: that of RAY_ADDRESS, or a new cluster on this machine
            alone, even if others run here.

    Raises:
        CommandError: there is no such cluster.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # no telemetry
    import ray

    if ray.is_initialized():
        return Connection(ours=False, alone=False)
    switches = {name: value for name, value in os.environ.items() if name.startswith("FASTGEN")}
    target = _wanted(address)
    options: dict[str, Any] = {"include_dashboard": False} if target == _LOCAL else {}
    try:
        ray.init(address=target, runtime_env={"env_vars": switches}, **options)
    except (ConnectionError, ValueError) as error:
        raise CommandError(f"--address {target}: {models.first_line(error)}") from error
    return Connection(ours=True, alone=target == _LOCAL)


def _holds(resources: Mapping[str, float], cpus: float, gpus: float) -> bool:
    return all(
        resources.get(name, 0) >= round(amount, 4)
        for name, amount in (("CPU", cpus), ("GPU", gpus))
    )


def _said(cpus: float, gpus: float) -> str:
    return f"{cpus:g} processors and {gpus:g} GPUs"
