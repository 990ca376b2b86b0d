"""The store that the processes of a run share: numbers and texts by name, in the process that leads or in one alone."""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import Any, Protocol

_JOIN = timedelta(seconds=60)


class Store(Protocol):
    """What is used of the stores of `torch.distributed`."""

    def add(self, key: str, amount: int, /) -> int: ...
    def check(self, keys: list[str], /) -> bool: ...
    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes: ...
    def get(self, key: str, /) -> bytes: ...
    def set(self, key: str, value: str, /) -> None: ...


def alone() -> Store:
    """The store of a process that has no others beside it."""
    from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]

    return HashStore()


def held() -> tuple[Store, int]:
    """Return a store that this process holds for others of this machine, and the port where they find it.

    It gets a socket that listens on the loopback interface: one of its own would listen on all interfaces.
    """
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

    listening = socket.create_server(("127.0.0.1", 0))
    port: int = listening.getsockname()[1]
    server = listening.detach()  # the store closes it
    return TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=server), port


def joined(port: int) -> Store:
    """The store that another process of this machine holds."""
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

    return TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=_JOIN)


def found(rank: int, world: int) -> Store:
    """The store of MASTER_ADDR and MASTER_PORT, which the first process holds, or torchrun itself."""
    from torch.distributed.rendezvous import rendezvous

    stores: Any = rendezvous("env://", rank, world)
    return next(stores)[0]
