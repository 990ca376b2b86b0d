"""Fill uninitialised memory with NaN, or with an integer that no test expects."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor


def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make torch's `empty` and `empty_like` return poisoned memory."""

    def poisoned(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def made(*args: Any, **kwargs: Any) -> Tensor:
            t = make(*args, **kwargs)
            if t.is_floating_point():
                return t.fill_(torch.nan)
            return t.fill_(-128 if t.dtype == torch.int8 else -(2**30) - 7)

        return made

    for name in ("empty", "empty_like"):
        monkeypatch.setattr(torch, name, poisoned(getattr(torch, name)))
