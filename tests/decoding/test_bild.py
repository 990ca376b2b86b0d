"""Big-little decoding on toy models: tokens, events, and properties that hold for any models."""

import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from fastgen.decoding.search.stopping import Stop
from fastgen.decoding.speculative.adaptive_drafting import REST, TRIAL, DraftTiming, timing_of
from fastgen.decoding.speculative.bild import Bild
from fastgen.decoding.speculative.policies import Drawn, Likeliest, Noting, Rejection
from fastgen.models.runtime.ragged_step import Span
from tests.support.bild_oracle import Held, Toy, bild, greedy

EOS, PAD = 1, 0


@dataclass
class Pair:
    """Two toy models that agree to some degree, prompts for them, and the maximum length.

    Attributes:
        large: the large model.
        small: the small model.
        prompts: prompts of equal length.
        longest: maximum length of a text, prompt included.
        late: whether the large and the small model process a prompt's last token together with the
            first token of a text.
    """

    large: Toy
    small: Toy
    prompts: list[list[int]]
    longest: int
    late: tuple[bool, bool] = (False, False)

    def ends(self, text: Sequence[int]) -> bool:
        return text[-1] == EOS or len(text) >= self.longest

    def search(self, **options: Any) -> Bild:
        defaults: dict[str, Any] = {"policy": Likeliest(2.0), "fallback": 0.6, "max_draft": 10}
        stop = Stop(torch.tensor([EOS]), [lambda length: length >= self.longest])
        return Bild(
            large=Held(self.large, list(self.prompts), late=self.late[0]),
            small=Held(self.small, list(self.prompts), late=self.late[1]),
            prompt=torch.tensor(self.prompts),
            stop=stop,
            transforms=[],
            pad=PAD,
            vocabulary=self.large.vocabulary,
            events=[[] for _ in self.prompts],
            **defaults | options,
        )

    def texts(self, ids: torch.Tensor) -> list[list[int]]:
        """Return the generated tokens of each text, without padding."""
        rows = [row[len(self.prompts[0]) :] for row in ids.tolist()]
        ends = [row.index(EOS) + 1 if EOS in row else len(row) for row in rows]
        for row, end in zip(rows, ends, strict=True):
            assert set(row[end:]) <= {PAD}
        return [row[:end] for row, end in zip(rows, ends, strict=True)]


def pair(seed: int, rows: int | None = None) -> Pair:
    rng = random.Random(seed)
    vocabulary, length = rng.choice([5, 8, 13]), rng.choice([1, 3])
    large = Toy(vocabulary, 2 * seed)
    small = Toy(
        vocabulary + rng.choice([0, 0, -1]),
        2 * seed + 1,
        other=large,
        own=rng.choice([0.0, 0.2, 0.5, 1.0]),
    )
    prompts = [
        [rng.randrange(2, vocabulary - 1) for _ in range(length)]
        for _ in range(rows or rng.choice([1, 2, 9]))
    ]
    longest, late = length + rng.choice([1, 2, 5, 20]), (rng.random() < 0.5, rng.random() < 0.5)
    return Pair(large, small, prompts, longest, late)


@pytest.mark.parametrize("paper_compat", [False, True])
@pytest.mark.parametrize("seed", range(120))
def test_every_text_and_event_is_that_of_the_definition(seed: int, paper_compat: bool) -> None:
    rng, toys = random.Random(seed), pair(seed)
    fallback, rollback = (
        rng.choice([0.0, 0.3, 0.6, 0.9, 1.1]),
        rng.choice([0.0, 0.3, 0.69, 1.0, 2.0, math.inf]),
    )
    longest_draft = rng.choice([1, 2, 3, 10])
    search = toys.search(
        fallback=fallback,
        policy=Likeliest(rollback),
        max_draft=longest_draft,
        paper_compat=paper_compat,
    )
    texts = toys.texts(search.run())
    assert search.events is not None
    for row, prompt in enumerate(toys.prompts):
        expected = bild(
            toys.large,
            toys.small,
            prompt,
            toys.ends,
            fallback,
            rollback,
            longest_draft,
            paper_compat,
        )
        assert (texts[row], search.events[row]) == expected
        kinds, counts = Counter(kind for kind, _, _ in search.events[row]), search.counts[row]
        assert counts.tokens == len(texts[row])
        assert (counts.drafted, counts.fallbacks, counts.rollbacks) == (
            kinds["draft"], kinds["fallback"], kinds["rollback"]
        )  # fmt: skip
        assert counts.small_calls == kinds["draft"] + kinds["fallback"]
        assert counts.large_calls <= counts.tokens + 1


@pytest.mark.parametrize("rollback", [0.0, math.log(2.0)])
@pytest.mark.parametrize("seed", range(60))
def test_with_a_low_rollback_it_is_the_large_models_greedy_output(
    seed: int, rollback: float
) -> None:
    toys = pair(seed)
    found = toys.texts(toys.search(policy=Likeliest(rollback), fallback=0.3).run())
    assert found == [greedy(toys.large, prompt, toys.ends) for prompt in toys.prompts]


@pytest.mark.parametrize("seed", range(30))
def test_without_thresholds_and_limit_it_is_the_small_models(seed: int) -> None:
    toys = pair(seed)
    found = toys.texts(toys.search(policy=Likeliest(math.inf), fallback=0.0, max_draft=1000).run())
    assert found == [greedy(toys.small, prompt, toys.ends) for prompt in toys.prompts]


@pytest.mark.parametrize("seed", range(30))
def test_a_small_model_that_is_never_sure_leaves_all_to_the_large_one(seed: int) -> None:
    toys = pair(seed)
    search = toys.search(fallback=1.1)
    assert toys.texts(search.run()) == [
        greedy(toys.large, prompt, toys.ends) for prompt in toys.prompts
    ]
    assert [counts.large_calls for counts in search.counts] == [
        counts.tokens for counts in search.counts
    ]


@pytest.mark.parametrize("seed", range(30))
def test_a_model_rolls_nothing_of_its_own_back(seed: int) -> None:
    toys = pair(seed)
    toys.small = toys.large
    search = toys.search(policy=Likeliest(0.0), fallback=0.0)
    assert toys.texts(search.run()) == [
        greedy(toys.large, prompt, toys.ends) for prompt in toys.prompts
    ]
    assert all(counts.rollbacks == 0 for counts in search.counts)


@pytest.mark.parametrize("seed", range(20))
def test_a_text_knows_nothing_of_those_beside_it(seed: int) -> None:
    toys = pair(seed, rows=12)
    together = toys.search()
    texts = toys.texts(together.run())
    for row, prompt in enumerate(toys.prompts):
        solo = Pair(toys.large, toys.small, [prompt], toys.longest)
        alone = solo.search()
        assert solo.texts(alone.run()) == [texts[row]]
        assert alone.counts == [together.counts[row]]


def test_finished_texts_leave() -> None:
    toys = pair(3, rows=12)
    search = toys.search(fallback=0.0)
    search.run()
    assert isinstance(search.large, Held)
    assert len(search.large.prompts) < 12
    assert len({len(text.tokens) for text in search._all}) > 1, "they end at different lengths"


@pytest.mark.parametrize("seed", range(20))
def test_a_small_model_with_the_large_ones_keys_runs_no_token_twice(seed: int) -> None:
    toys = replace(pair(seed, rows=1), late=(seed % 2 == 0, True))
    search, apart = toys.search(shared=True), toys.search()
    assert isinstance(search.small, Held)
    assert isinstance(search.large, Held)
    search.large.texts = search.small.texts = [[]]
    assert toys.texts(search.run()) == toys.texts(apart.run())
    assert isinstance(apart.small, Held)
    assert sum(search.small.passes) <= sum(apart.small.passes)
    assert all(tokens == 1 for tokens in search.small.passes), "only the newest one is left to run"


def test_tokens_are_told_once_they_stand() -> None:
    toys, told = pair(5, rows=1), list[int]()
    search = toys.search(on_tokens=lambda _, tokens: told.extend(tokens))
    assert [told] == toys.texts(search.run())


@pytest.mark.parametrize("seed", range(20))
def test_scores_of_tokens_are_the_large_models(seed: int) -> None:
    toys = pair(seed, rows=3)
    policy = Noting(Likeliest(1.0))
    search = toys.search(policy=policy, fallback=0.2, max_draft=3)
    texts = toys.texts(search.run())
    assert texts == toys.texts(toys.search(policy=Likeliest(1.0), fallback=0.2, max_draft=3).run())
    for prompt, text, scores in zip(toys.prompts, texts, policy.scores_of(texts), strict=True):
        assert scores == [
            float(toys.large(prompt + text[:i])[token]) for i, token in enumerate(text)
        ]


def _frequencies(policy: Rejection | Likeliest | None, draws: int) -> torch.Tensor:
    """Return the frequency of each text of two tokens, under `policy` or the large model alone."""
    large = Toy(4, 11, sharpness=1.0)
    small = Toy(4, 12, sharpness=1.0, other=large, own=0.6)
    counts = torch.zeros(16)
    if policy is None:
        first = torch.softmax(large([3]), -1)
        for a in range(4):
            counts[4 * a : 4 * a + 4] = first[a] * torch.softmax(large([3, a]), -1)
        return counts
    prompts = [[3]] * draws
    search = Bild(
        Held(large, prompts), Held(small, prompts), torch.tensor(prompts),
        Stop(None, [lambda n: n >= 3]), [], policy, PAD, 0.0, 10,
    )  # fmt: skip
    for a, b in search.run()[:, 1:].tolist():
        counts[4 * a + b] += 1.0 / draws
    return counts


def test_drafts_that_are_drawn_change_nothing_about_the_large_models_distribution() -> None:
    torch.manual_seed(0)
    draws, exact = 4000, _frequencies(None, 0)
    found = _frequencies(Rejection(), draws)
    chi_square = float((draws * (found - exact) ** 2 / exact).sum())
    assert chi_square < 37.7, "15 degrees of freedom: above this once in a thousand"
    wrong = _frequencies(Likeliest(0.0), draws)
    assert float((draws * (wrong - exact) ** 2 / exact).sum()) > 37.7, "the test tells them apart"


def test_a_drawn_token_stands_if_it_is_cheap() -> None:
    torch.manual_seed(0)
    toys = pair(7, rows=2)
    search = toys.search(policy=Drawn(math.inf), fallback=0.0)
    search.run()
    assert all(counts.rollbacks == 0 for counts in search.counts)
    strict = toys.search(policy=Drawn(0.0), fallback=0.0)
    strict.run()
    assert strict.events is not None
    for row, prompt in enumerate(toys.prompts):
        text = list(prompt)
        for kind, place, token in strict.events[row]:
            if kind == "stand":
                assert token == int(toys.large(text[: len(prompt) + place]).argmax())
            if kind != "fallback":
                text[len(prompt) + place :] = [token]


def test_calls_that_lose_by_drafts_have_none_though_a_round_may_win() -> None:
    timing = DraftTiming()
    timing.note(False, 1, 1, 1.0)
    for _ in range(TRIAL):
        timing.note(True, 1, 3, 1.0)
    assert timing.may_draft(), "when one text is left"
    timing.note_call(False, 100, 10.0)
    for _ in range(TRIAL):
        assert timing.may_draft()
        timing.note_call(True, 100, 12.0)
    assert not timing.may_draft()
    for _ in range(REST):
        timing.note_call(False, 100, 10.0)
    assert not timing.may_draft(), "six seconds are too large a share of those so far"
    timing.note(False, 8, 8, 2000.0)
    assert timing.may_draft()


def test_a_trial_waits_for_what_the_small_models_prompts_cost() -> None:
    timing = DraftTiming()
    for _ in range(599):
        timing.note(False, 1, 1, 1.0)
    assert not timing.may_draft(), "a round, and the prompts, which may take two"
    timing.note(False, 1, 1, 1.0)
    assert timing.may_draft()
    timing.note_start(4.0, 100)
    timing.lost = 0.0
    assert not timing.may_draft()
    assert not timing.drafts(1)
    for _ in range(400):
        timing.note(False, 1, 1, 1.0)
    assert timing.drafts(1)


def test_calls_of_one_size_pay_for_their_own_trials() -> None:
    """The time saved by a thousand calls with one text does not pay for trials with a batch."""
    large, small = torch.nn.Identity(), torch.nn.Identity()
    alone, few, many = (timing_of(large, small, None, texts) for texts in (1, 9, 32))
    assert timing_of(large, small, None, 12) is few
    for _ in range(1000):
        alone.note(False, 1, 1, 1.0)
    few.note(False, 9, 9, 1.0)
    assert alone.may_draft()
    assert not few.may_draft()
    assert not many.may_draft()


class _Clock:
    """A clock that models advance as they run."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Timed(Held):
    """A toy model that takes `seconds` per pass and `of_token` seconds per token."""

    clock: _Clock = field(default_factory=_Clock)
    seconds: float = 1.0
    of_token: float = 0.0

    def prefill(self) -> torch.Tensor:
        self.clock.now += self.seconds
        return super().prefill()

    def extend(self, spans: Sequence[Span]) -> torch.Tensor:
        found = super().extend(spans)
        self.clock.now += self.seconds + self.of_token * len(found)
        return found


def _seconds(
    timing: DraftTiming | None,
    clock: _Clock,
    small_seconds: float,
    calls: int,
    fallback: float = 0.0,
) -> float:
    """Return the seconds that calls of two texts of 60 tokens take in all.

    Every second draft of the small model is wrong.
    """
    began = clock.now
    for seed in range(calls):
        toys = pair(seed, rows=2)
        toys.small, toys.longest = Toy(toys.large.vocabulary, 1, other=toys.large, own=0.3), 61
        search = toys.search(policy=Likeliest(0.0), fallback=fallback, max_draft=4, timing=timing)
        search.stop = Stop(None, [lambda length: length >= 61])
        search = replace(search)
        search.large = Timed(toys.large, list(toys.prompts), clock=clock, of_token=0.01)
        search.small = Timed(toys.small, list(toys.prompts), clock=clock, seconds=small_seconds)
        texts = search.run()[:, len(toys.prompts[0]) :].tolist()
        ends = lambda text: len(text) >= 61  # noqa: E731
        assert texts == [greedy(toys.large, prompt, ends) for prompt in toys.prompts]
    return clock.now - began


def test_drafts_that_do_not_pay_are_left_off() -> None:
    clock = _Clock()
    # The small model costs nothing and drafts nothing.
    alone = _seconds(None, clock, 0.0, calls=30, fallback=1.1)
    timing = DraftTiming(clock)
    _seconds(timing, clock, 0.9, calls=3)
    later = _seconds(timing, clock, 0.9, calls=30)
    assert alone / later >= 0.98
    assert _seconds(None, clock, 0.9, calls=30) > 1.2 * alone, "always drafting would lose"


@pytest.mark.slow
def test_drafts_that_pay_go_on() -> None:
    clock = _Clock()
    always = _seconds(None, clock, 0.05, calls=120)
    measured = _seconds(DraftTiming(clock), clock, 0.05, calls=120)
    assert always <= measured <= 1.15 * always, (
        "the first trial comes when it costs little of what there was"
    )
    assert _seconds(None, clock, 0.0, calls=120, fallback=1.1) > 1.5 * measured, "they do pay"


@pytest.mark.parametrize("small_seconds", [0.9, 3.0, 20.0])
def test_trials_cost_a_share_of_the_time_at_most(small_seconds: float) -> None:
    """The bound holds at any time, from the first call on."""
    clock = _Clock()
    timing, alone, spent = DraftTiming(clock), 0.0, 0.0
    for _ in range(40):
        alone += _seconds(None, clock, 0.0, calls=1, fallback=1.1)
        spent += _seconds(timing, clock, small_seconds, calls=1)
        assert spent <= 1.02 * alone + 5 * small_seconds, "and one trial"


def test_drafts_are_tried_again_when_they_have_become_cheap() -> None:
    clock, timing = _Clock(), DraftTiming()
    timing.clock = clock
    _seconds(timing, clock, 0.9, calls=3)
    _seconds(timing, clock, 0.05, calls=40)
    assert _seconds(timing, clock, 0.05, calls=5) < 0.75 * _seconds(
        None, clock, 0.0, calls=5, fallback=1.1
    )


def test_a_small_model_that_begins_late_holds_the_texts_that_are_left() -> None:
    toys = pair(3, rows=12)

    @dataclass
    class Late(DraftTiming):
        rounds: int = 0

        def drafts(self, texts: int) -> bool:
            self.rounds += 1
            return self.rounds > 2

    search = toys.search(policy=Likeliest(0.0), fallback=0.0, timing=Late())
    assert toys.texts(search.run()) == [
        greedy(toys.large, prompt, toys.ends) for prompt in toys.prompts
    ]
    assert isinstance(search.small, Held)
    assert search.small.passes, "it has drafted"
    assert len(search.small.prompts) < 12, "texts had left"


def test_the_small_models_prompt_counts() -> None:
    clock = _Clock()
    timing, alone = DraftTiming(clock), _short(None, clock, fallback=1.1)
    for _ in range(10):
        _short(timing, clock)
    assert _short(timing, clock) <= 1.05 * alone
    assert _short(None, clock) > 1.5 * alone, "always drafting would lose"


def _short(timing: DraftTiming | None, clock: _Clock, fallback: float = 0.0) -> float:
    """Return the seconds of a call of twelve tokens.

    The small model drafts well, but takes long to process its prompt.
    """
    toys, began = pair(4, rows=1), clock.now
    toys.small = toys.large
    search = toys.search(policy=Likeliest(0.0), fallback=fallback, max_draft=4, timing=timing)
    end = len(toys.prompts[0]) + 12
    search.stop = Stop(None, [lambda length: length >= end])
    search.large = Timed(toys.large, list(toys.prompts), clock=clock)
    search.small = Timed(toys.small, list(toys.prompts), clock=clock, seconds=0.05)
    read, search.small.prefill = (
        search.small.prefill,
        lambda: _late(clock, read) if fallback <= 1.0 else read(),
    )  # type: ignore[method-assign]
    search.run()
    return clock.now - began


def _late(clock: _Clock, read: Any) -> torch.Tensor:
    clock.now += 20.0
    return read()
