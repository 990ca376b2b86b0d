"""Check the random numbers that C makes from the state of torch's generator."""

import math
from random import Random

import pytest
import torch
from torch import Tensor

from fastgen.ops import native
from fastgen.ops.native import noise
from tests.ops.test_native import variant  # noqa: F401  a fixture

WORDS = slice(24, 24 + 8 * 624)  # of a generator's state, which holds each in 64 bits


def _reference(state: Tensor, count: int) -> tuple[Tensor, list[int]]:
    """Return exponential noise, and the words of the generator after it, by Python's twister."""
    words = state[WORDS].view(torch.int64).tolist()
    left = int(state[8:12].view(torch.int32))
    random, numbers = Random(), list[float]()
    random.setstate((3, (*words, 625 - left), None))
    for _ in range(count):
        high, low = random.getrandbits(32), random.getrandbits(32)
        numbers.append(-math.log1p(-(((high << 32) | low) % 2**53) * 2.0**-53))
    return torch.tensor(numbers), list(random.getstate()[1])


def _made(state: Tensor, count: int) -> Tensor:
    by = native.library()
    assert by is not None
    out = torch.full((count,), torch.nan)
    by.exponential_noise(by.run, 1, out.data_ptr(), state.data_ptr(), count)
    return out


@pytest.mark.parametrize("count", [1, 311, 312, 313, 2000])
@pytest.mark.parametrize("before", [0, 1, 623, 624, 625])
def test_numbers(variant: str, before: int, count: int) -> None:  # noqa: F811
    """The state may be that of a new generator, or in the middle or at the end of its words."""
    generator = torch.Generator().manual_seed(before)
    for _ in range(before):
        torch.empty(1, dtype=torch.int32).random_(generator=generator)  # one word
    state = generator.get_state()
    wanted, after = _reference(state, count)
    rest = state.clone()
    torch.testing.assert_close(_made(state, count), wanted, rtol=2e-7, atol=0)
    *words, place = after
    assert state[WORDS].view(torch.int64).tolist() == words
    assert (625 - int(state[8:12].view(torch.int32)), int(state[16:24].view(torch.int64))) == (
        place,
        place,
    )
    state[WORDS], state[8:12], state[16:24] = rest[WORDS], rest[8:12], rest[16:24]
    assert torch.equal(state, rest), "nothing else changes"
    generator.set_state(state)


def test_nothing(variant: str) -> None:  # noqa: F811
    state = torch.Generator().manual_seed(3).get_state()
    rest = state.clone()
    assert len(_made(state, 0)) == 0
    assert torch.equal(state, rest)


@pytest.mark.parametrize("left", [-5, 0, 625, 10**6])
def test_states_that_are_not_torchs(variant: str, left: int) -> None:  # noqa: F811
    """No number of words left leads beyond the state."""
    state = torch.Generator().manual_seed(3).get_state()
    state[8:12] = torch.tensor([left], dtype=torch.int32).view(torch.uint8)
    assert bool(_made(state, 400).isfinite().all())


def test_which_numbers_are_torchs(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """Numbers of another kind, and states of another form, are noticed."""
    by = native.library()
    assert by is not None
    found = noise.is_torchs(by)
    before = torch.get_rng_state()
    assert noise.is_torchs(by) == found
    assert torch.equal(before, torch.get_rng_state())

    def wrong(run: int, threads: int, out: int, state: int, count: int) -> None:
        by.exponential_noise(run, threads, out, state, count)
        if count:
            by.exponential_noise(run, threads, out, state, 1)

    assert not noise.is_torchs(by._replace(exponential_noise=wrong))
    monkeypatch.setattr(noise, "_STATE", 5048)
    assert not noise.is_torchs(by)


def test_draws_of_torch_here() -> None:
    """Where torch does not draw by MKL, its numbers are those of the reference."""
    by = native.library()
    if by is None or not noise.is_torchs(by):
        pytest.skip("torch draws other numbers here")
    generator = torch.Generator().manual_seed(7)
    wanted, _ = _reference(generator.get_state(), 1000)
    assert torch.equal(torch.empty(1000).exponential_(generator=generator), wanted)
