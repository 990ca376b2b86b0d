"""Fill uninitialised memory with NaN, or with an integer that no test expects."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor


def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make torch's `empty` and `empty_like` return poisoned memory."""

    def poisoned(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda *args, **kwargs: (
            t.fill_(torch.nan)
            if (t := make(*args, **kwargs)).is_floating_point()
            else t.fill_(-(2**30) - 7)
        )

    for name in ("empty", "empty_like"):
        monkeypatch.setattr(torch, name, poisoned(getattr(torch, name)))
