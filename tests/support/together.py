"""Batches that run side by side, as tests want them."""

from typing import Any

import pytest

from fastgen.decoding.batching import continuous_batching


def start_soon(monkeypatch: pytest.MonkeyPatch, freed: float = 0.2) -> list[int]:
    """Let batches start once such a share of the tokens is free; return how many each step of several will be of."""
    seen, step = list[int](), continuous_batching.step

    def noted(running: Any, replay: Any) -> Any:
        seen.append(len(running))
        return step(running, replay)

    monkeypatch.setattr(continuous_batching, "step", noted)
    monkeypatch.setattr(continuous_batching, "FREED", freed)
    monkeypatch.setattr(continuous_batching, "OCCUPIED", 2.0)
    return seen
