"""The number of tokens to draft: as many as give the most tokens per second."""

from dataclasses import dataclass, field

FORGET = 0.97
"""Weight of what was known after each new observation."""

SHARE, CERTAINTY = 0.04, 100.0
"""Prior of the regression of a pass's cost on its length.

`SHARE` is the expected cost of one more token, relative to the fixed cost of a pass. `CERTAINTY` is
its weight: the sum of squared deviations of observed lengths that would weigh as much.
"""


@dataclass
class DraftLength:
    """Acceptance and cost of drafts, and the best length that follows from them.

    Acceptance is the probability that a drafted token stands if all before it do. A pass over n
    tokens is taken to cost a constant plus a part for each token, which a regression finds.

    Args:
        most: Maximum length.

    Attributes:
        acceptance: Probability of a token to stand; a guess at first.
        cost: Seconds of drafting per token.
    """

    most: int
    acceptance: float = 0.9
    cost: float = 0.0
    _weight: float = field(default=8.0, init=False)  # tokens that `acceptance` stands for
    # Weighted sums over passes: 1, n, n^2, seconds, n * seconds.
    _sums: list[float] = field(default_factory=lambda: [0.0] * 5, init=False)

    def best(self) -> int:
        """Return the number of tokens to draft next, 1 to `most`."""
        lengths = range(1, self.most + 1)
        if self._sums[0] < 2.0:  # there is nothing to go by yet
            return min(self.most, 8)
        constant, each = self._pass()
        return max(
            lengths,
            key=lambda k: self.expected(k) / (constant + each * (k + 1) + self.cost * k + 1e-12),
        )

    def expected(self, length: int) -> float:
        """Return the expected number of tokens of a round that drafts `length` tokens."""
        p = min(self.acceptance, 0.9999)
        return (1.0 - p ** (length + 1)) / (1.0 - p)

    def note(self, drafted: int, accepted: int, drafting: float, verifying: float) -> None:
        """Record a round.

        Args:
            drafted: Number of drafted tokens; 0 for a plain step.
            accepted: How many of them stand.
            drafting: Seconds that the draft took.
            verifying: Seconds of the pass that verified them.
        """
        if drafted:
            tried = min(accepted + 1, drafted)
            self._weight = min(self._weight * FORGET**tried, 64.0)
            total = self._weight + tried
            self.acceptance += (accepted - tried * self.acceptance) / total
            self._weight = total
            each, first = drafting / drafted, self.cost == 0.0
            # A slower draft may have been interrupted, a faster one was not.
            self.cost += (1.0 if first or each < self.cost else 0.1) * (each - self.cost)
        n = float(drafted + 1)
        added = (1.0, n, n * n, verifying, n * verifying)
        self._sums = [FORGET * old + new for old, new in zip(self._sums, added, strict=True)]

    def _pass(self) -> tuple[float, float]:
        """Return the constant and the part of each token of the seconds of a pass."""
        weight, n, squares, seconds, products = self._sums
        expected = SHARE * seconds / (weight + SHARE * n)
        spread, product = squares - n * n / weight, products - n * seconds / weight
        slope = max(0.0, (product + CERTAINTY * expected) / (spread + CERTAINTY))
        return max(0.0, (seconds - slope * n) / weight), slope
