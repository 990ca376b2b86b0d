"""Control continuous batching in tests."""

from typing import Any

import pytest

from fastgen.decoding.batching import continuous_batching


def start_soon(monkeypatch: pytest.MonkeyPatch, freed: float = 0.2) -> list[int]:
    """Start batches as soon as a share `freed` of the tokens is free.

    Returns:
        A list that gets the number of batches in each joint step.
    """
    seen, step = list[int](), continuous_batching.step

    def noted(running: Any, replay: Any) -> Any:
        seen.append(len(running))
        return step(running, replay)

    monkeypatch.setattr(continuous_batching, "step", noted)
    monkeypatch.setattr(continuous_batching, "FREED", freed)
    monkeypatch.setattr(continuous_batching, "OCCUPIED", 2.0)
    return seen
