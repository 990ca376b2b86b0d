"""Run the calls of `tests.fuzz` under hypothesis, which shrinks a differing call."""

from random import Random

import pytest
import torch
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st

from fastgen.decoding.search.sampling import Sampling
from tests import fuzz
from tests.support import combined, families, zoo

EXAMPLES = 300


class Sparse(Random):
    """Mirrored random numbers of hypothesis: the simplest one, 0.0, chooses no option."""

    def __init__(self, source: Random) -> None:
        self.source = source
        self.choice, self.randint, self.randrange = source.choice, source.randint, source.randrange

    def random(self) -> float:
        return 1.0 - self.source.random()


@settings(
    max_examples=EXAMPLES,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)
@given(st.randoms(use_true_random=False))
@pytest.mark.slow
def test_nothing_changes(random: Random) -> None:
    call = fuzz.draw(Sparse(random), tuple(zoo.FAMILIES))
    note(str(call))
    fuzz.check(call, fuzz.ROUNDING)


def test_a_seed_is_one_call() -> None:
    assert str(fuzz.draw(Random(7))) == str(fuzz.draw(Random(7)))


def test_every_family_is_drawn() -> None:
    names = tuple(zoo.FAMILIES)
    assert {fuzz.draw(Random(seed), names).family for seed in range(300)} == set(names)
    assert {*zoo.FAMILIES, *zoo.MORE, *combined.COMBINED, "arcee"} < set(families.FAMILIES)


@pytest.mark.parametrize("name", ["falcon", "mixtral", "vit-trocr", "qwen2_vl", "arcee"])
def test_other_families(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert fuzz.main(["-n", "4", "--family", name]) == 0
    assert "4 calls" in capsys.readouterr().out


def test_a_difference_is_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The fuzz detects a changed token, prints the seed that reproduces it, and fails."""
    choose = Sampling._select

    def wrong(self: Sampling, *args: object) -> torch.Tensor:
        return (choose(self, *args) + 1) % zoo.VOCABULARY

    arguments = ["-n", "12", "--seed", "40", "--family", "gpt2"]
    assert fuzz.main(arguments) == 0
    assert "0 differences" in capsys.readouterr().out
    monkeypatch.setattr(Sampling, "_select", wrong)
    assert fuzz.main(arguments) == 1
    printed = capsys.readouterr()
    seeds = [line.split()[5] for line in printed.err.splitlines() if line.startswith("DIFFERENCE")]
    assert seeds
    assert str([int(seed) for seed in seeds]) in printed.out
    assert fuzz.main(["-n", "1", "--seed", seeds[0], "--family", "gpt2"]) == 1
