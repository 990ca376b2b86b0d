"""Logits transforms and token selection of `SequenceGenerator`."""

from typing import Any

import torch
from torch import Tensor

from fastgen.decoding.logits.ngram_block import NGramBlock
from fastgen.decoding.logits.pipeline import apply_transforms, bans_alone, phases, sparse_updates
from fastgen.decoding.logits.sequence_bias import SequenceBias
from fastgen.decoding.logits.text import Text
from fastgen.decoding.logits.token_ban import OnlyToken, TokenBan
from fastgen.decoding.logits.transform import LogitsTransform
from fastgen.decoding.search.candidates import Candidates, best, best_of_logits, count_of
from fastgen.decoding.search.first_finished import FirstFinished
from fastgen.decoding.search.prediction import Prediction
from fastgen.ops.selection.kbest import fused


class Beam:
    """Beam search: logits transforms, then the best candidates of each sentence.

    Kernels and C receive the transforms in sparse form, and log-probabilities are not materialized.

    Args:
        generator: fairseq's generator.
        prefix_tokens: (B, P) int64, or None.
        longest: Maximum tokens of a hypothesis, without its end.
        device: Device of the search.
    """

    plain = True

    def __init__(
        self, generator: Any, prefix_tokens: Tensor | None, longest: int, device: torch.device
    ) -> None:
        self.generator, self.prefix_tokens, self.longest = generator, prefix_tokens, longest
        blocker = generator.repeat_ngram_blocker
        self.ngram = 0 if blocker is None else int(blocker.no_repeat_ngram_size)
        # fairseq's options, in its order. Those in `free` do not apply within a prefix.
        self.first: list[LogitsTransform] = [
            TokenBan(torch.tensor([generator.pad], device=device, dtype=torch.int64))
        ]
        if generator.unk_penalty:
            self.first.append(SequenceBias({(generator.unk,): -generator.unk_penalty}))
        self.first.append(OnlyToken(generator.eos, lambda length: length > longest))
        self.free: list[LogitsTransform] = [
            TokenBan(
                torch.tensor([generator.eos], device=device, dtype=torch.int64),
                lambda length: length <= generator.min_len,
            )
        ]
        if generator.token_indices_to_suppress is not None:
            self.free.append(
                TokenBan(
                    _in_vocabulary(generator.token_indices_to_suppress, generator.vocab_size).to(
                        device
                    )
                )
            )
        self.last: list[LogitsTransform] = (
            [NGramBlock(self.ngram)] if self.ngram > 1 else []
        )  # fairseq never blocks single tokens

    def __call__(self, prediction: Prediction, state: FirstFinished) -> Candidates:
        count, logits = len(state.running), prediction.logits
        if logits is not None and not self._in_prefix(state.step):
            rows, text = logits.view(count, -1, logits.shape[1]), _text(state, logits)
            if fused(rows, count_of(rows, state.beams), bans_alone(self.transforms, text)):
                return self.of_logits(rows, text, state.running_scores(rows.shape[1]), state.beams)
        log_probs = self.apply_transforms(prediction.log_probs(), state)
        if state.step == 0 and log_probs.shape[0] != count:
            log_probs = log_probs[:: state.beams]  # all beams are still equal
        rows = log_probs.view(count, -1, log_probs.shape[1])
        return best(rows, state.running_scores(rows.shape[1]), state.beams)

    def of_logits(self, logits: Tensor, text: Text, scores: Tensor, beams: int) -> Candidates:
        transforms = sparse_updates(self.transforms, text, logits.shape[2])
        assert transforms is not None  # none is dense, and no bias can be followed by a penalty
        return best_of_logits(logits, scores, beams, transforms)

    @property
    def eager_selection(self) -> str | None:
        return None

    def phase(self, step: int) -> tuple[int, ...] | None:
        return None if self._in_prefix(step) else phases(self.transforms, step + 1)

    def forced(self, tokens: Tensor, longest: int) -> int:
        """Return how many prefix tokens of all sentences can be prefilled in one pass.

        Args:
            tokens: (B, P + 1) int64, the start token and the prefix.
            longest: Upper bound of the result.

        Returns:
            The number of leading tokens that every prefix has and no option can change; 0 if an
            option may interfere.
        """
        generator, n = self.generator, self.ngram
        free = tokens[:, 1:].eq(generator.pad) | tokens[:, 1:].eq(generator.eos)
        count = min(int((~free).long().cumprod(1).sum(1).min()), longest)
        if 2 * generator.beam_size >= generator.vocab_size:
            return 0
        for row in tokens[:, : count + 1].tolist() if n > 1 else ():
            grams = list(zip(*(row[i:] for i in range(n)), strict=False))
            if len(set(grams)) < len(grams):  # n-gram blocking would ban tokens of the prefix
                return 0
        return count

    @property
    def transforms(self) -> list[LogitsTransform]:
        """The logits transforms of tokens outside of a prefix, in fairseq's order."""
        return [*self.first, *self.free, *self.last]

    def apply_transforms(self, log_probs: Tensor, state: FirstFinished) -> Tensor:
        """Apply the generator's options to log-probabilities, in fairseq's order.

        Works in place. Within a prefix, log-probabilities (B, V) are expanded to (R, V) first.
        """
        without_nan(log_probs)
        log_probs = apply_transforms(log_probs, _text(state, log_probs), self.first)
        if self._in_prefix(state.step):
            if log_probs.shape[0] != state.tokens.shape[0]:
                log_probs = log_probs.repeat_interleave(state.beams, 0)
            log_probs, state.tokens, state.scores = self.generator._prefix_tokens(
                state.step, log_probs, state.scores, state.tokens, self.prefix_tokens, state.beams
            )
        else:
            log_probs = apply_transforms(log_probs, _text(state, log_probs), self.free)
        return apply_transforms(log_probs, _text(state, log_probs), self.last)

    def _in_prefix(self, step: int) -> bool:
        """Return whether a prefix may determine the next token."""
        prefix = self.prefix_tokens
        return prefix is not None and step < min(prefix.shape[1], self.longest)

    def keep(self, sentences: Tensor) -> None:
        if self.prefix_tokens is not None:
            self.prefix_tokens = self.prefix_tokens[sentences]

    def reorder(self, order: Tensor) -> None:
        pass


class Toolkits(Beam):
    """`Beam`'s logits transforms, with token selection by another search of fairseq or of the user.

    The search receives the same arguments as in fairseq. Sentences leave the batch when fairseq's
    would, and in order: a search may draw random numbers for all sentences, or keep a state for
    each.
    """

    plain = False

    def __init__(
        self,
        generator: Any,
        prefix_tokens: Tensor | None,
        longest: int,
        ids: Any,
        source_lengths: Tensor,
    ) -> None:
        super().__init__(generator, prefix_tokens, longest, source_lengths.device)
        self.source_lengths = source_lengths
        count = torch.arange(
            source_lengths.shape[0], dtype=torch.int64, device=source_lengths.device
        ).type_as(source_lengths)
        self.sentences = ids if isinstance(ids, Tensor) else count

    def __call__(self, prediction: Prediction, state: FirstFinished) -> Candidates:
        generator, count = self.generator, len(state.running)
        log_probs = self.apply_transforms(prediction.log_probs(), state)
        if log_probs.shape[0] == count:
            log_probs = log_probs.repeat_interleave(state.beams, 0)
        if generator.should_set_src_lengths:
            generator.search.set_src_lengths(self.source_lengths)
        scores, tokens, beams = generator.search.step(
            state.step,
            log_probs.view(count, -1, generator.vocab_size),
            state.scores.view(count, state.beams, -1)[:, :, : state.step],
            state.tokens[:, : state.step + 1],
            self.sentences,
        )
        return Candidates(scores, tokens, beams)

    @property
    def eager_selection(self) -> str:
        return f"{type(self.generator.search).__name__} selects the tokens"

    def phase(self, step: int) -> None:
        return None

    def keep(self, sentences: Tensor) -> None:
        super().keep(sentences)
        self.source_lengths, self.sentences = (
            self.source_lengths[sentences],
            self.sentences[sentences],
        )
        self.generator.search.prune_sentences(sentences)

    def reorder(self, order: Tensor) -> None:
        self.generator.search.update_constraints(order)


def _text(state: FirstFinished, rows: Tensor) -> Text:
    """Return the tokens of rows (R, V), or of (B, V) in the first step."""
    each = state.tokens.shape[0] // rows.shape[0]
    return Text(state.tokens[::each, : state.step + 1], 1)


def without_nan(log_probs: Tensor) -> None:
    """Replace NaN by -inf in place, as fairseq does."""
    # A NaN logit makes its whole row of log-probabilities NaN, so that one column shows it.
    if log_probs.device.type == "cpu":
        bad = log_probs[:, 0].isnan()
        if bool(bad.any()):
            log_probs[bad] = torch.where(log_probs[bad].isnan(), -torch.inf, log_probs[bad])
    else:
        log_probs.masked_fill_(log_probs.isnan(), -torch.inf)


def _in_vocabulary(tokens: Tensor, count: int) -> Tensor:
    """Convert indices into a vocabulary to non-negative ones; IndexError if one is out of range."""
    if len(tokens) and not -count <= int(tokens.min()) <= int(tokens.max()) < count:
        raise IndexError(
            f"token_indices_to_suppress {tokens.tolist()}: the vocabulary has {count} tokens"
        )
    return tokens % count
