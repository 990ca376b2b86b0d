"""fairseq models that make decode steps over the shared cache: one, an ensemble, and a language model beside them."""

import math
import time
from collections.abc import Sequence
from typing import Any

import torch
from fairseq.models.fairseq_decoder import FairseqDecoder
from fairseq.models.fairseq_model import BaseFairseqModel
from fairseq.models.transformer import TransformerModelBase
from torch import Tensor

from fastgen.decoding.kv_cache.ancestry import Ancestry
from fastgen.decoding.kv_cache.layer_kv import note_steps, room_for_steps
from fastgen.decoding.search.first_finished import Prediction, StepOutput
from fastgen.models.build.equivalence_check import by_modules, trial, verdict
from fastgen.models.build.introspection import NotFused
from fastgen.models.cuda_graphs.replay import Opened, Result
from fastgen.models.memory.scratch import Memory, memory_of
from fastgen.models.runtime.decode_step import Context, DecoderStep
from fastgen.models.runtime.native_multistep_job import Prepared
from fastgen.ops.selection.log_softmax import log_softmax
from fastgen.patches.fairseq.generator.attention import Layers, current_step
from fastgen.patches.fairseq.generator.fused_decoder import FusedDecoder

_PROJECTED = 128
"""Positions that a prompt's log-probabilities are computed for at a time, over all sentences."""


class Member:
    """A model with a decoder of fairseq's transformer, its cache and the encoder's output at B rows, if any."""

    def __init__(
        self,
        model: Any,
        encoder_out: Any,
        sentences: int,
        beams: int,
        longest: int,
        temperature: float = 1.0,
    ) -> None:
        self.model, self.encoder_out, self.temperature = model, encoder_out, temperature
        self.memory: Memory = memory_of(model)
        self.layers = Layers(attention_of(model.decoder), sentences, beams, longest, self.memory)
        self.dtype: torch.dtype = next(model.parameters()).dtype
        self.plain = _takes_log_softmax(model)
        self.longest = longest
        self.fused: FusedDecoder | None = None
        self.left_off: str | None = None

    def step(self, tokens: Tensor, ancestry: Ancestry | None) -> StepOutput:
        """Return the prediction for R rows, and attention over the source (R, S) or None."""
        self.layers.begin_step(ancestry, self.dtype)
        if ancestry is not None and self.fused is None and self.left_off is None:
            self.fuse()
        if ancestry is None or self.fused is None:
            logits, attention, extra = self._by_modules(tokens)
        elif self.fused.ready:
            (logits, attention), extra = self.fused(tokens), None
        else:
            tried = self.fused
            found = trial(lambda: tried(tokens)[0], tried.text, tried.step.dtype)
            logits, attention, extra = self._by_modules(tokens)
            reason = verdict(tried.step, found, logits[:, -1])
            tried.ready = reason is None
            if reason is not None:
                self.fused, self.left_off = None, by_modules(reason)
        return self.predicted(logits, extra), attention

    def begin_step(self, ancestry: Ancestry) -> Context:
        """Open a step that is made from the weights together with those of others."""
        assert self.fused is not None
        self.layers.begin_step(ancestry, self.dtype)
        return self.fused.context()

    def open_step(self, tokens: Tensor, ancestry: Ancestry) -> Opened:
        """The same for texts (R, L) and a step that is captured."""
        assert self.fused is not None
        self.layers.begin_step(ancestry, self.dtype)
        return self.fused.open(tokens, ancestry)

    def end_step(self, logits: Tensor, weights: Tensor | None) -> StepOutput:
        """Return what `step` does of logits (R, V) and attention over the source (R, S) or None."""
        return self.predicted(logits), None if weights is None else weights.to(logits.dtype)

    def _by_modules(self, tokens: Tensor) -> tuple[Tensor, Tensor | None, Any]:
        """Logits (R, 1, V), attention over the source and what else the decoder returns, by its own forward."""
        token = current_step.set(self.layers)
        try:
            logits, extra = self.model.decoder.forward(
                tokens, encoder_out=self.encoder_out, incremental_state={}
            )
        finally:
            current_step.reset(token)
        attention = extra["attn"][0] if extra is not None and extra.get("attn") else None
        return logits[:, -1:], None if attention is None else attention[:, -1], extra

    def fuse(self) -> None:
        """Have the steps behind the first one made from the weights, or note why not."""
        try:
            if not self.plain:
                raise NotFused("log-probabilities of its own")
            self.fused = FusedDecoder(self.model, self.layers, self.longest)
        except NotFused as reason:
            self.left_off = by_modules(reason)

    def prefill(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Run texts (B, P + 1); return log-probabilities of what follows, (B, V), and of all but the first, (B, P).

        Positions pass the output layer some at a time: those of all would take the memory of P steps.
        """
        self.layers.begin_step(None, self.dtype)
        token = current_step.set(self.layers)
        try:
            features, _ = self.model.decoder.forward(tokens, encoder_out=None, features_only=True)
        finally:
            current_step.reset(token)
        found: list[Tensor] = []
        size = max(1, _PROJECTED // max(1, tokens.shape[0]))
        for at in range(0, tokens.shape[1] - 1, size):
            end = min(at + size, tokens.shape[1] - 1)
            logits = self.model.decoder.output_layer(features[:, at:end]).div_(self.temperature)
            log_probs = torch.log_softmax(logits, -1, dtype=torch.float32)
            found.append(log_probs.gather(2, tokens[:, at + 1 : end + 1, None])[:, :, 0])
        last = self.model.decoder.output_layer(features[:, -1:]).div_(self.temperature)
        return torch.log_softmax(last[:, -1], -1, dtype=torch.float32), torch.cat(found, 1)

    def predicted(self, logits: Tensor, extra: Any = None) -> Prediction:
        """What logits (R, V), or (R, 1, V), say of the next tokens; extra: what else the decoder returns."""
        if self.temperature != 1.0:
            logits = logits.div_(self.temperature)
        if not self.plain:
            return Prediction(
                lambda: self.model.get_normalized_probs(
                    (logits, extra), log_probs=True, sample=None
                )[:, -1]
            )
        rows = logits.flatten(0, -2)
        return Prediction(lambda: self._log_softmax(rows), rows)

    def _log_softmax(self, logits: Tensor) -> Tensor:
        out = self.memory.take(logits.new_empty(0, dtype=torch.float32), *logits.shape)
        return log_softmax(logits, torch.float32, out)

    @property
    def not_captured(self) -> str | None:
        """That steps are not captured, and why, where it was tried."""
        replay = None if self.fused is None else self.fused.replay
        return None if replay is None else replay.refused

    def keep(self, sentences: Tensor, in_order: bool) -> None:
        self.layers.keep(
            sentences, in_order
        )  # the encoder's output stays: only the first step reads it


class Stepper:
    """Members that share their texts: an ensemble's probabilities are averaged, a language model's are added.

    Args:
        language_model: of weight `lm_weight`; None for none.
    """

    def __init__(
        self,
        members: list[Member],
        sentences: int,
        beams: int,
        longest: int,
        device: torch.device,
        language_model: Member | None = None,
        lm_weight: float = 1.0,
    ) -> None:
        self.members, self.language_model, self.lm_weight = members, language_model, lm_weight
        self.longest = longest
        self.ancestry = Ancestry(sentences, beams, longest, device)
        self._first = True
        self._began: list[tuple[int, float]] = []  # rows and time at the start of each step

    @property
    def times(self) -> list[tuple[int, float]]:
        """Rows and seconds of each step so far but the newest, whose end is not known."""
        each = zip(self._began, self._began[1:], strict=False)
        return [(rows, after - began) for (rows, began), (_, after) in each]

    @property
    def supports_multistep(self) -> bool:
        """Whether C may make several steps in a row, choices and all: of one model, as it is."""
        (member, *others), fused = self._all, self.members[0].fused
        return (
            not others
            and member.temperature == 1.0
            and fused is not None
            and fused.supports_multistep
        )

    def begin_steps(self, most: int, weights: Tensor | None = None) -> Prepared | None:
        """Have at most so many of them ready; None where they have to be made one at a time.

        weights: (steps, B, M, S) fp32, room for attention over the source in as many steps; None where none is wanted.
        """
        fused = self.members[0].fused
        assert fused is not None
        self._compact()
        return fused.prepared(
            room_for_steps(fused.text, self.ancestry, most), self.ancestry, weights
        )

    def end_steps(self, run: int, began: Sequence[float], is_open: bool) -> None:
        """So many have been made, which began then; is_open: whether slots of the next tokens are open."""
        fused = self.members[0].fused
        assert fused is not None
        self._began += [(self.ancestry.beams * fused.layers.sentences, second) for second in began]
        note_steps(fused.text, self.ancestry, run, is_open)

    def predicted(self, logits: Tensor) -> StepOutput:
        """Return what `step` does of the logits (R, V) of a step in C, whose attention is where it belongs."""
        return self.members[0].predicted(logits), None

    def step(self, ids: Tensor) -> StepOutput:
        """Run the newest token of ids (R, L), in the first step (B, 1)."""
        self._began.append((ids.shape[0], time.perf_counter()))
        ancestry = None if self._first else self._opened()
        self._first = False
        return self._mixed([member.step(ids, ancestry) for member in self._all])

    @property
    def joinable(self) -> bool:
        """Whether the next step can be made together with those of others: from the weights of all models."""
        return all(member.fused is not None and member.fused.ready for member in self._all)

    @property
    def decoders(self) -> list[DecoderStep]:
        return [member.fused.step for member in self._all if member.fused is not None]

    def is_replayed(self, rows: int) -> bool:
        replays = [member.fused.replay for member in self._all if member.fused is not None]
        return all(replay is not None and replay.able(rows) for replay in replays)

    def begin_step(self, ids: Tensor) -> list[Context]:
        """Open a step of the newest token of ids (R, L), which is made together with those of others."""
        ancestry = self._opened()
        return [member.begin_step(ancestry) for member in self._all]

    def open_step(self, ids: Tensor) -> list[Opened]:
        """The same, for a step that is captured."""
        ancestry = self._opened()
        return [member.open_step(ids, ancestry) for member in self._all]

    def end_step(self, results: Sequence[Result]) -> StepOutput:
        """Return what `step` does of what each model has made."""
        return self._mixed(
            [member.end_step(*made) for member, made in zip(self._all, results, strict=True)]
        )

    def _opened(self) -> Ancestry:
        self._compact()
        self.ancestry.begin_step()
        return self.ancestry

    def _mixed(self, made: list[StepOutput]) -> StepOutput:
        """The ensemble's prediction and attention, of those of all models."""
        steps = made[: len(self.members)]
        prediction, attention = steps[0]
        if len(steps) > 1:
            stacked = torch.stack([of_member.log_probs() for of_member, _ in steps])
            mean = torch.logsumexp(stacked, 0) - math.log(len(steps))
            prediction = Prediction(lambda: mean)
            seen = [attention for _, attention in steps if attention is not None]
            attention = sum(seen[1:], seen[0]) / len(steps) if seen else None
        if self.language_model is not None:
            beside, _ = made[-1]
            total = prediction.log_probs() + beside.log_probs() * self.lm_weight
            prediction = Prediction(lambda: total)
        return prediction, attention

    def _compact(self) -> None:
        slots = self.ancestry.compact()
        if slots is not None:
            for member in self._all:
                member.layers.compact(slots)

    @property
    def prefills(self) -> bool:
        """Whether a prompt can be run at once: by language models."""
        plain = all(member.plain and member.encoder_out is None for member in self.members)
        return plain and self.language_model is None

    def prefill(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Run texts (B, P + 1), as `Member.prefill`."""
        self._first = False
        found = [member.prefill(tokens) for member in self.members]
        log_probs, of_tokens = (
            torch.logsumexp(torch.stack(part), 0) for part in zip(*found, strict=True)
        )
        return log_probs - math.log(len(found)), of_tokens - math.log(len(found))

    def reorder(self, parents: Tensor) -> None:
        if self.ancestry.steps:
            self.ancestry.reorder(parents)

    @property
    def left_off(self) -> tuple[str, ...]:
        """What does not run, each with its reason."""
        reasons = (
            reason for member in self._all for reason in (member.left_off, member.not_captured)
        )
        return tuple(dict.fromkeys(reason for reason in reasons if reason is not None))

    def keep(self, sentences: Tensor, in_order: bool) -> None:
        self.ancestry.keep(sentences)
        for member in self._all:
            member.keep(sentences, in_order)

    @property
    def _all(self) -> list[Member]:
        return self.members if self.language_model is None else [*self.members, self.language_model]


def attention_of(decoder: Any) -> list[Any]:
    """The attention modules of a decoder's layers."""
    parts = (part for layer in decoder.layers for part in (layer.self_attn, layer.encoder_attn))
    return [part for part in parts if part is not None]


def _takes_log_softmax(model: Any) -> bool:
    """Whether a model's log-probabilities are the log-softmax of its logits."""
    decoder = model.decoder
    own = (BaseFairseqModel, FairseqDecoder, TransformerModelBase)
    return getattr(decoder, "adaptive_softmax", None) is None and all(
        any(getattr(type(part), name) is getattr(kind, name) for kind in own)
        for part in (model, decoder)
        for name in ("get_normalized_probs", "get_normalized_probs_scriptable")
    )
