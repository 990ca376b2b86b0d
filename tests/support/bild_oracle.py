"""Reference implementation of big-little decoding, and toy models for it.

It follows the definition: a single text, and nothing cached.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fastgen.models.runtime.ragged_step import Span

Scores = Callable[[Sequence[int]], Tensor]
"""Map a text, prompt included, to the scores (V,) of its next token."""


def bild(
    large: Scores,
    small: Scores,
    prompt: Sequence[int],
    ends: Callable[[Sequence[int]], bool],
    fallback: float,
    rollback: float,
    max_draft: int,
    paper_compat: bool = False,
) -> tuple[list[int], list[tuple[str, int, int]]]:
    """Return the tokens after the prompt, and the events that led to them."""
    y, events, p = list(prompt), list[tuple[str, int, int]](), len(prompt)

    def put(kind: str, token: int) -> None:
        events.append((kind, len(y) - p, token))
        y.append(token)

    def over() -> bool:
        return len(y) > p and ends(y)

    if paper_compat:
        put("write", int(large(y).argmax()))
    while True:
        drafted = 0
        while drafted < max_draft and not over():
            probabilities = torch.softmax(small(y), -1)
            token = int(probabilities.argmax())
            if float(probabilities.max()) < fallback:
                events.append(("fallback", len(y) - p, token))
                break
            put("draft", token)
            drafted += 1
        if over() and (drafted == 0 or paper_compat):
            return y[p:], events
        begin, rolled_back = len(y) - drafted, False
        for place in range(begin, len(y)):
            scores = torch.log_softmax(large(y[:place]), -1)
            if -float(scores[y[place]]) > rollback and int(scores.argmax()) != y[place]:
                del y[place:]
                put("rollback", int(scores.argmax()))
                rolled_back = True
                break
            events.append(("stand", place - p, y[place]))
        if not rolled_back:
            if over():
                return y[p:], events
            put("write", int(large(y).argmax()))


def greedy(
    model: Scores, prompt: Sequence[int], ends: Callable[[Sequence[int]], bool]
) -> list[int]:
    """Return the most likely tokens after the prompt."""
    y = list(prompt)
    while len(y) == len(prompt) or not ends(y):
        y.append(int(model(y).argmax()))
    return y[len(prompt) :]


@dataclass
class Toy:
    """A toy model whose scores depend on the last three tokens and the length.

    Attributes:
        vocabulary: V.
        seed: seed of the scores.
        sharpness: standard deviation of the scores.
        other: a model to imitate, or None.
        own: weight of this model's own scores; those of `other` get the rest.
    """

    vocabulary: int
    seed: int
    sharpness: float = 3.0
    other: "Toy | None" = None
    own: float = 1.0

    def __call__(self, text: Sequence[int]) -> Tensor:
        key = hashlib.sha256(repr((self.seed, len(text), *text[-3:])).encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(key[:7]))
        scores = self.sharpness * torch.randn(
            self.vocabulary, generator=generator, dtype=torch.float64
        )
        if self.other is None:
            return scores
        return self.own * scores + (1.0 - self.own) * self.other(text)[: self.vocabulary]


@dataclass
class Held:
    """A toy model that decodes R texts from a cache it imitates.

    It records the tokens that it was given for each text and can continue from nowhere else.

    Attributes:
        toy: the scores.
        prompts: prompt of each text.
        texts: tokens held for each text, from its prompt's last token on; two models that hold the
            same share it.
        passes: tokens processed by each call of `extend`.
        late: whether the last token of each prompt is processed together with the first token of a
            text.
    """

    toy: Scores
    prompts: list[list[int]]
    texts: list[list[int]] = field(default_factory=list[list[int]])
    passes: list[int] = field(default_factory=list[int])
    late: bool = False

    def prefill(self) -> Tensor | None:
        self.texts = self.texts or [[] for _ in self.prompts]
        if self.late:
            return None
        for prompt, text in zip(self.prompts, self.texts, strict=True):
            text[:] = text or prompt[-1:]
        return torch.stack([self.toy(prompt) for prompt in self.prompts])

    def extend(self, spans: Sequence[Span]) -> Tensor:
        assert [span.row for span in spans] == sorted({span.row for span in spans})
        found: list[Tensor] = []
        for row, start, tokens in spans:
            assert tokens
            prompt, held = self.prompts[row], self.texts[row]
            assert start < len(held)
            held[start + 1 :] = tokens
            assert held[0] == prompt[-1]
            behind = len(prompt) + start + 1
            found += [self.toy((prompt[:-1] + held)[: behind + i]) for i in range(len(tokens))]
        self.passes.append(len(found))
        return torch.stack(found)

    def keep(self, rows: Tensor) -> None:
        self.prompts = [self.prompts[row] for row in rows.tolist()]
        self.texts = [self.texts[row] for row in rows.tolist()]
