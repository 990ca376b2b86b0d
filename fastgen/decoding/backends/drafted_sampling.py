"""Backend of greedy search and sampling with drafts that one pass of the model verifies.

The model runs the newest token and the draft of every text at once, which reads its weights once.
The search then selects token after token as it always does, for as long as the draft has the same
tokens; logits processors and stopping criteria see nothing else than in a search without drafts.
All texts advance by the same number of tokens. The keys and values of rejected tokens are
overwritten. Sampling draws each token from the model's own probabilities with the random numbers of
a search without drafts, so the samples are the same, too.

Source: Stern et al. 2018 (blockwise parallel decoding); Leviathan et al. 2023.
"""

import time
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from fastgen.decoding.backends import decode_backend
from fastgen.decoding.backends.native_multistep import MOST
from fastgen.decoding.backends.native_sampling import NativeSampling
from fastgen.decoding.search.sampling import Sampling
from fastgen.decoding.speculative.adaptive_drafting import DraftTiming
from fastgen.decoding.speculative.draft_length import DraftLength
from fastgen.decoding.speculative.drafts import Draft


@dataclass
class Drafting:
    """How the tokens of a call are drafted, and what came of it.

    Attributes:
        draft: The source of drafts; None if the call only measures what tokens cost without.
        length: How many tokens are drafted.
        timing: Decides before each round whether to draft; None to draft always.
        rounds: Passes that verified a draft.
        steps: Tokens that each text gained without a draft.
        drafted: Drafted tokens of all texts.
        accepted: How many of them stand.
    """

    draft: Draft | None
    length: DraftLength
    timing: DraftTiming | None = None
    rounds: int = 0
    steps: int = 0
    drafted: int = 0
    accepted: int = 0

    def counts(self) -> dict[str, int]:
        """Return the counters of `status()`, by name."""
        return {
            "tokens_drafted": self.drafted,
            "tokens_accepted": self.accepted,
            "passes": self.rounds + self.steps,
        }


class DraftedModel(Protocol):
    """Stepper that can run several successive tokens of each text in one pass."""

    drafting: Drafting | None

    @property
    def verifies(self) -> bool:
        """Whether `verify` may run now. Checked before every round, so it must be cheap."""
        ...

    def most_drafted(self, texts: int) -> int:
        """Return the most tokens of a draft that a pass over this number of texts may verify."""
        ...

    def verify(self, ids: Tensor, drafts: Tensor) -> Tensor:
        """Run the newest token of ids (R, L) and drafts (R, K).

        Returns:
            Logits (R, K + 1, V) fp32 of the token after each.
        """
        ...

    def accept(self, tokens: int) -> None:
        """Keep the keys and values of the first `tokens` tokens of the last pass."""
        ...


class DraftedSampling(decode_backend.DecodeBackend[Sampling]):
    """Backend of a `Sampling` whose model has a source of drafts."""

    description = "after each pass over a draft"

    def __init__(self, search: Sampling, model: DraftedModel) -> None:
        super().__init__(search, model)
        assert model.drafting is not None
        self.drafting = model.drafting
        native = NativeSampling.supports(search, model)
        self._plain = (NativeSampling if native else decode_backend.Eager)(search, cast(Any, model))
        self._misses = 0  # consecutive rounds without a draft
        eos = search.stop.eos
        self._ends: list[int] = [] if eos is None else cast(Any, eos).tolist()

    @classmethod
    def supports(cls, search: decode_backend.Search, model: Any) -> bool:
        """Return whether the model has a source of drafts for this search."""
        return (
            isinstance(search, Sampling)
            and getattr(model, "drafting", None) is not None
            # Rows that leave within a draft would change the random numbers of the others.
            and not (search.sample and search.may_drop)
        )

    def advance(self) -> bool:
        """Run one round: a draft and its verification, or plain steps."""
        drafting = self.drafting
        texts, began = self.search.batch_size, time.perf_counter()
        drafts = self._draft(drafting) if self.model.verifies else None
        if drafts is None:
            return self._plain_steps(drafting, texts, began)
        return self._verify(drafting, drafts, texts, began)

    def _draft(self, drafting: Drafting) -> Tensor | None:
        """Return the draft of this round (R, K); None if there is none."""
        search = self.search
        texts = search.batch_size
        longest = search.longest if search.stop.longest is None else search.stop.longest
        # The pass that verifies K tokens gives K + 1.
        most = min(longest - search.ids.shape[1] - 1, self.model.most_drafted(texts))
        if drafting.draft is None or most < 1 or not self._may_draft(drafting):
            return None
        length = min(most, drafting.length.best())
        drafts = self._up_to_ends(drafting.draft.propose(search, self.model, length))
        if drafts.shape[1] == 0:
            self._misses += 1
            return None
        self._misses = 0
        return drafts

    def _may_draft(self, drafting: Drafting) -> bool:
        timing = drafting.timing
        return drafting.draft is not None and (
            timing is None or timing.drafts(self.search.batch_size)
        )

    def _up_to_ends(self, drafts: Tensor) -> Tensor:
        """Pad texts after their end, and drop the tokens at which all texts have ended."""
        search = self.search
        if search.pad is None or not self._ends:
            return drafts
        ends = search.stop.hits(drafts, False)
        is_over = (ends.cumsum(1) - ends.long() > 0) | ~search.running[:, None]
        drafts = torch.where(is_over, search.pad, drafts)
        return drafts[:, : int((~is_over).any(0).sum())]

    def _plain_steps(self, drafting: Drafting, texts: int, began: float) -> bool:
        search = self.search
        length = search.ids.shape[1]
        if isinstance(self._plain, NativeSampling):
            self._plain.most = self._most_plain(drafting)
        goes_on = self._plain.advance()
        made = search.ids.shape[1] - length
        seconds = time.perf_counter() - began
        drafting.steps += made
        drafting.length.note(0, 0, 0.0, seconds / made)
        if drafting.timing is not None:
            for _ in range(made):
                drafting.timing.note(False, texts, texts, seconds / made)
        return goes_on

    def _most_plain(self, drafting: Drafting) -> int:
        """Return for how many plain steps no draft is made: more after many misses."""
        if not self._may_draft(drafting):
            return MOST
        return min(1 << (self._misses // 4), 8)

    def _verify(self, drafting: Drafting, drafts: Tensor, texts: int, began: float) -> bool:
        search, model, count = self.search, self.model, drafts.shape[1]
        drafted = time.perf_counter()
        logits = model.verify(search.ids, drafts)
        goes_on, stands, made = True, True, 0
        # The logits have rows for all texts, so those that end leave the batch after the round.
        may_drop, search.may_drop = search.may_drop, False
        while goes_on and stands:
            goes_on = search.advance(model, logits[:, made])
            stands = made < count and torch.equal(search.ids[:, -1], drafts[:, made])
            made += 1
        model.accept(made)
        search.may_drop = may_drop
        if goes_on and may_drop:
            search.drop_finished(model, search.alive(search.running))
        now, accepted = time.perf_counter(), made - (not stands)
        drafting.rounds += 1
        drafting.drafted += texts * count
        drafting.accepted += texts * accepted
        drafting.length.note(count, accepted, drafted - began, now - drafted)
        if drafting.timing is not None:
            drafting.timing.note(True, texts, texts * made, now - began)
        return goes_on
