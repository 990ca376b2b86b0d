"""Plain reference implementations of diverse, constrained and contrastive search.

They use no cache and no batch: each sentence is decoded alone, and each step reads the full text.
Totals are fp32, as in transformers 4. `tests/support/recorded` holds outputs of transformers 4 for
some calls, which `test_restored.py` compares.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

Text = list[int]
Phrases = list[list[int]]  # alternatives, one of which has to occur in the text


@dataclass
class Model:
    """A model and one sentence, which scores continuations of the prompt."""

    model: Any
    source: Text
    mask: list[int]
    process: Sequence[Callable[[Tensor, Tensor], Tensor]] = ()

    @property
    def prompt(self) -> Text:
        if self.model.config.is_encoder_decoder:
            return [self.model.config.decoder_start_token_id]
        return list(self.source)

    def read(self, text: Text) -> tuple[Tensor, Tensor]:
        """Return the logits (V,) of the next token, and the head's input at each token (L, C)."""
        ids, mask = torch.tensor([self.source]), torch.tensor([self.mask])
        with torch.no_grad():
            if self.model.config.is_encoder_decoder:
                given = {
                    "input_ids": ids,
                    "attention_mask": mask,
                    "decoder_input_ids": torch.tensor([text]),
                }
            else:
                mask = torch.tensor([self.mask + [1] * (len(text) - len(self.mask))])
                positions = (mask.cumsum(1) - 1).clamp(min=0)
                given = {
                    "input_ids": torch.tensor([text]),
                    "attention_mask": mask,
                    "position_ids": positions,
                }
            found = self.model(**given, output_hidden_states=True)
        states = (
            found.decoder_hidden_states
            if self.model.config.is_encoder_decoder
            else found.hidden_states
        )
        return found.logits[0, -1].float(), states[-1][0]

    def processed(
        self, text: Text, scores: Tensor, steps: Sequence[Callable[[Tensor, Tensor], Tensor]]
    ) -> Tensor:
        for step in steps:
            scores = step(torch.tensor([text]), scores[None].clone())[0]
        return scores


@dataclass
class Settings:
    beams: int
    returned: int
    longest: int  # in new tokens
    ends: list[int]
    length_penalty: float
    early_stopping: bool | str


@dataclass
class Shelf:
    """The pool of best finished hypotheses of a sentence."""

    size: int
    settings: Settings
    texts: list[tuple[float, Text]] = field(default_factory=list)
    done: bool = False

    def add(self, total: float, text: Text, new_tokens: int) -> None:
        score = total / new_tokens**self.settings.length_penalty
        if len(self.texts) < self.size:
            self.texts.append((score, text))
        elif score > min(self.texts)[0]:
            lowest = [score for score, _ in self.texts].index(min(self.texts)[0])
            self.texts = [*self.texts[:lowest], *self.texts[lowest + 1 :], (score, text)]

    def look(self, best: float, new_tokens: int) -> None:
        if len(self.texts) < self.size or self.done:
            return
        settings = self.settings
        length = (
            settings.longest
            if settings.early_stopping == "never" and settings.length_penalty > 0
            else new_tokens
        )
        could_be = best / length**settings.length_penalty
        self.done = settings.early_stopping is True or min(self.texts)[0] >= could_be


Beam = tuple[float, Text]


def ranked(beams: list[Beam], scores: list[Tensor], count: int) -> list[Beam]:
    """Return the best continuations, given the scores (V,) of each beam's next token."""
    totals = torch.stack(
        [of_beam + torch.tensor(total) for (total, _), of_beam in zip(beams, scores, strict=True)]
    )
    best = totals.flatten().topk(count)
    size = totals.shape[1]
    return [
        (value, [*beams[at // size][1], at % size])
        for value, at in zip(best.values.tolist(), best.indices.tolist(), strict=True)
    ]


def going_on(
    candidates: list[Beam], size: int, shelf: Shelf, prompt: int, may_end: Callable[[Text], bool]
) -> list[Beam]:
    """Return the candidates that continue; put those that end, if among the best, on the shelf."""
    found: list[Beam] = []
    for rank, (total, text) in enumerate(candidates):
        if len(found) == size:
            break
        if text[-1] not in shelf.settings.ends:
            found.append((total, text))
        elif rank < size and may_end(text[:-1]):
            shelf.add(total, text[:-1], len(text) - prompt)
    shelf.look(candidates[0][0], len(candidates[0][1]) - prompt)
    return found


def diverse(
    model: Model, settings: Settings, groups: int, penalty: float, before: int = 0
) -> list[Beam]:
    """Run diverse beam search, with `before` processors applied before the diversity penalty."""
    size, prompt = settings.beams // groups, model.prompt
    count = max(2, 1 + len(settings.ends)) * size
    shelves = [Shelf(size, settings) for _ in range(groups)]
    running = [[(0.0, prompt)] + [(-1.0e9, prompt)] * (size - 1) for _ in range(groups)]
    pad = model.model.generation_config.pad_token_id
    for _ in range(settings.longest):
        if all(shelf.done for shelf in shelves):
            break
        taken: Text = []
        for group, shelf in enumerate(shelves):
            if shelf.done:
                taken += [pad] * size
                continue
            scores: list[Tensor] = []
            for _, text in running[group]:
                of_text = model.processed(
                    text, torch.log_softmax(model.read(text)[0], -1), model.process[:before]
                )
                for token in set(taken):
                    of_text[token] -= penalty * taken.count(token)
                scores.append(model.processed(text, of_text, model.process[before:]))
            candidates = ranked(running[group], scores, count)
            running[group] = going_on(candidates, size, shelf, len(prompt), lambda _: True)
            taken += [text[-1] for _, text in running[group]]
    for shelf, beams in zip(shelves, running, strict=True):
        for total, text in beams if not shelf.done else []:
            shelf.add(total, text, len(text) - len(prompt))
    found = [kept for shelf in shelves for kept in shelf.texts]
    return sorted(found, key=lambda kept: kept[0])[::-1][: settings.returned]


def standing(text: Text, constraints: list[Phrases]) -> tuple[int, list[int], bool]:
    """Return a text's bank, the tokens that advance it, and whether all constraints are met."""
    waiting, met, current, begun = list(constraints), 0, None, []
    for token in text:
        if current is not None:
            if any(phrase[: len(begun) + 1] == [*begun, token] for phrase in current):
                begun = [*begun, token]
            else:
                waiting.append(current)
                current, begun = None, []
        else:
            current = next(
                (phrases for phrases in waiting if any(phrase[0] == token for phrase in phrases)),
                None,
            )
            if current is not None:
                waiting.remove(current)
                begun = [token]
        if current is not None and begun in current:
            met, current, begun = met + 1, None, []
        if not waiting and current is None:
            break
    longest = max(len(phrase) for phrases in constraints for phrase in phrases)
    bank = met * longest
    if current is not None:
        bank += longest - (max(map(len, current)) - len(begun))
        wanted = [phrase[len(begun)] for phrase in current if phrase[: len(begun)] == begun]
    else:
        wanted = [phrase[0] for phrases in waiting for phrase in phrases]
    return bank, wanted, not waiting and current is None


def constrained(model: Model, settings: Settings, constraints: list[Phrases]) -> list[Beam]:
    prompt, shelf = model.prompt, Shelf(settings.beams, settings)
    running = [(0.0, prompt)] + [(-1.0e9, prompt)] * (settings.beams - 1)
    count = max(2, 1 + len(settings.ends)) * settings.beams
    for _ in range(settings.longest):
        if shelf.done:
            break
        scores = [
            model.processed(text, torch.log_softmax(model.read(text)[0], -1), model.process)
            for _, text in running
        ]
        candidates = ranked(running, scores, count)
        chosen = going_on(
            candidates,
            settings.beams,
            shelf,
            len(prompt),
            lambda text: standing(text, constraints)[2],
        )
        forward: list[Beam] = []
        for (total, text), of_text in zip(running, scores, strict=True):
            _, wanted, complete = standing(text, constraints)
            for token in wanted if not complete else []:
                longer = [*text, token]
                if longer not in [other for _, other in (*chosen, *forward)]:
                    forward.append((float(of_text[token] + torch.tensor(total)), longer))
        running = (
            allocated([*chosen, *forward], constraints)[: settings.beams] if forward else chosen
        )
    if not shelf.done:
        whole = [beam for beam in running if standing(beam[1], constraints)[2]]
        others = (
            [beam for beam in running if beam not in whole]
            if len(whole) < settings.returned
            else []
        )
        for total, text in (*whole, *others):
            shelf.add(total, text, len(text) - len(prompt))
    return sorted(shelf.texts, key=lambda kept: kept[0])[::-1][: settings.returned]


def allocated(beams: list[Beam], constraints: list[Phrases]) -> list[Beam]:
    """Return the best beam of each bank, highest bank first, then the second best, and so on."""
    banks = torch.tensor([standing(text, constraints)[0] for _, text in beams])
    order = (
        (banks * 100 + torch.tensor([total for total, _ in beams]))
        .sort(descending=True, stable=True)
        .indices
    )
    seen: dict[int, int] = {}
    turns: list[tuple[int, int, int]] = []
    for place, at in enumerate(order.tolist()):
        bank = int(banks[at])
        turns.append((seen.get(bank, 0), place, at))
        seen[bank] = seen.get(bank, 0) + 1
    return [beams[at] for _, _, at in sorted(turns)]


def contrastive(model: Model, ends: list[int], longest: int, count: int, alpha: float) -> Text:
    text = model.prompt
    prompt, masked = len(text), [] if model.model.config.is_encoder_decoder else model.mask
    for _ in range(longest):
        scores = model.processed(text, model.read(text)[0], model.process)
        probabilities, tokens = torch.softmax(scores, -1).topk(count)
        found: list[float] = []
        for probability, token in zip(probabilities.tolist(), tokens.tolist(), strict=True):
            states = model.read([*text, token])[1]
            alike = torch.nn.functional.cosine_similarity(states[:-1], states[-1:], dim=1)
            seen = [place for place in range(len(text)) if place >= len(masked) or masked[place]]
            found.append((1.0 - alpha) * probability - alpha * float(alike[seen].max()))
        text = [*text, tokens.tolist()[found.index(max(found))]]
        if text[-1] in ends:
            break
    assert len(text) <= prompt + longest
    return text


def padded(texts: list[Text], ends: list[int], pad: int, longest: int) -> list[Text]:
    """Return hypotheses as `generate` does: each with an end token where it fits, then padded."""
    width = min(max(map(len, texts)) + 1, longest)
    return [(text + ends[:1] + [pad] * width)[:width] for text in texts]
