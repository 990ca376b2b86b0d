"""Decode steps of fairseq models over the shared cache.

The models are a single one or an ensemble, and optionally a language model.
"""

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
from fastgen.decoding.search.prediction import Prediction, StepOutput
from fastgen.models.build.equivalence_check import by_modules, record_verdict, trial
from fastgen.models.build.introspection import NotFused
from fastgen.models.cuda_graphs.kept_graphs import KeptGraphs
from fastgen.models.cuda_graphs.replay import Opened, Result
from fastgen.models.memory.scratch import ScratchPool, scratch_pool_of
from fastgen.models.runtime.decode_step import DecoderStep
from fastgen.models.runtime.native.multistep_job import Prepared
from fastgen.models.runtime.step_inputs import CallStepInputs
from fastgen.ops.selection.log_softmax import log_softmax
from fastgen.patches.fairseq.generator.attention import Layers
from fastgen.patches.fairseq.generator.fused_decoder import FusedDecoder
from fastgen.patches.generation_call import in_step

_PROJECTED = 128
"""Positions of a prompt whose log-probabilities are computed at a time, over all sentences."""


class Member:
    """A model with a transformer decoder of fairseq, its KV cache and its encoder's output.

    Args:
        model: The fairseq model.
        encoder_out: The encoder's output for B sentences; None for a language model.
        sentences: B.
        beams: M.
        longest: Maximum number of decode steps.
        temperature: Divides the logits.

    Attributes:
        plain: Whether log-probabilities are the log-softmax of the logits.
        fused: The fused decode steps; None before they are built, and if they are not used.
        left_off: Fallback reason for running decode steps through the modules; None otherwise.
    """

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
        self.memory: ScratchPool = scratch_pool_of(model)
        self.layers = Layers(attention_of(model.decoder), sentences, beams, longest, self.memory)
        self.dtype: torch.dtype = next(model.parameters()).dtype
        self.plain = _takes_log_softmax(model)
        self.longest = longest
        self.fused: FusedDecoder | None = None
        self.left_off: str | None = None

    def step(self, tokens: Tensor, ancestry: Ancestry | None) -> StepOutput:
        """Run one decode step.

        The first fused step also runs through the modules, for the equivalence check.

        Args:
            tokens: (R, L) int64, or (B, 1) in the first step.
            ancestry: The ancestry of beams; None in the first step.

        Returns:
            The prediction, and the cross-attention weights (R, S), or None.
        """
        self.layers.begin_step(ancestry, self.dtype)
        if ancestry is not None and self.fused is None and self.left_off is None:
            self.fuse()
        if ancestry is None or self.fused is None:
            logits, attention, extra = self._by_modules(tokens)
        elif self.fused.ready:
            (logits, attention), extra = self.fused(tokens), None
        else:
            unchecked = self.fused
            trial_result = trial(lambda: unchecked(tokens)[0], unchecked.text, unchecked.step.dtype)
            logits, attention, extra = self._by_modules(tokens)
            reason = record_verdict(unchecked.step, trial_result, logits[:, -1])
            unchecked.note_verdict(reason is None)
            if reason is not None:
                self.fused, self.left_off = None, by_modules(reason)
        return self.predicted(logits, extra), attention

    def begin_step(self, ancestry: Ancestry) -> CallStepInputs:
        """Open a fused step that is computed jointly with those of other batches."""
        assert self.fused is not None
        self.layers.begin_step(ancestry, self.dtype)
        return self.fused.context()

    def open_step(self, tokens: Tensor, ancestry: Ancestry) -> Opened:
        """Open a captured step of texts (R, L) that is replayed jointly with other batches."""
        assert self.fused is not None
        self.layers.begin_step(ancestry, self.dtype)
        return self.fused.open(tokens, ancestry)

    def end_step(self, logits: Tensor, weights: Tensor | None) -> StepOutput:
        """Convert the output of a joint step to that of `step`.

        Args:
            logits: (R, V).
            weights: The cross-attention weights (R, S), or None.
        """
        return self.predicted(logits), None if weights is None else weights.to(logits.dtype)

    def _by_modules(self, tokens: Tensor) -> tuple[Tensor, Tensor | None, Any]:
        """Run a step through the decoder's `forward`.

        Returns:
            The logits (R, 1, V), the cross-attention weights (R, S) or None, and the decoder's
            extras.
        """
        with in_step(self.layers):
            logits, extra = self.model.decoder.forward(
                tokens, encoder_out=self.encoder_out, incremental_state={}
            )
        attention = extra["attn"][0] if extra is not None and extra.get("attn") else None
        return logits[:, -1:], None if attention is None else attention[:, -1], extra

    def fuse(self) -> None:
        """Build the fused decode steps, or record the fallback reason."""
        try:
            if not self.plain:
                raise NotFused("log-probabilities of its own")
            self.fused = FusedDecoder(self.model, self.layers, self.longest)
        except NotFused as reason:
            self.left_off = by_modules(reason)

    def prefill(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Run texts (B, P + 1) in one pass.

        The output layer runs over chunks of positions: the logits of all would take the memory of P
        steps.

        Returns:
            The log-probabilities of the next token (B, V), and those of the texts' own tokens
            except the first (B, P).
        """
        self.layers.begin_step(None, self.dtype)
        with in_step(self.layers):
            features, _ = self.model.decoder.forward(tokens, encoder_out=None, features_only=True)
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
        """Return the prediction of logits (R, V), or (R, 1, V).

        Args:
            logits: The logits; divided by the temperature in place.
            extra: Further outputs of the decoder, for models that compute log-probabilities
                themselves.
        """
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
        """The reason why steps are no longer captured; None if they are, or it was not tried."""
        replay = None if self.fused is None else self.fused.replay
        return None if replay is None else replay.refused

    def keep(self, sentences: Tensor, in_order: bool) -> None:
        # `encoder_out` stays as it is: only the first step reads it.
        self.layers.keep(sentences, in_order)


class SharedStepper:
    """Decode steps of an ensemble, whose probabilities are averaged, and a language model.

    Args:
        members: The models of the ensemble.
        sentences: B.
        beams: M.
        longest: Maximum number of decode steps.
        device: Device of the search.
        language_model: A language model whose log-probabilities are added, or None.
        lm_weight: Factor of the language model's log-probabilities.
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
        self._began: list[tuple[int, float]] = []  # rows and start time (seconds) of each step

    @property
    def times(self) -> list[tuple[int, float]]:
        """Rows and seconds of each step, except the newest, whose end is not known."""
        each = zip(self._began, self._began[1:], strict=False)
        return [(rows, after - began) for (rows, began), (_, after) in each]

    @property
    def eager_selection(self) -> str | None:
        """Why tokens cannot be selected from the predictions in a CUDA graph; None if they can."""
        if len(self._all) > 1:
            return "predictions of several models are mixed"
        return None if self.members[0].plain else "log-probabilities of its own"

    def kept_graphs(self, logits: Tensor) -> KeptGraphs | None:
        """Return graphs of earlier calls that read the logits of a step; None for none."""
        fused = self.members[0].fused
        return None if fused is None or fused.replay is None else fused.replay.kept_graphs(logits)

    @property
    def supports_multistep(self) -> bool:
        """Whether C can run several decode steps per call, token selection included.

        Requires a single model with a temperature of 1.
        """
        (member, *others), fused = self._all, self.members[0].fused
        return (
            not others
            and member.temperature == 1.0
            and fused is not None
            and fused.supports_multistep
        )

    def begin_steps(self, most: int, weights: Tensor | None = None) -> Prepared | None:
        """Prepare up to `most` decode steps that C runs in one call.

        Args:
            most: Maximum number of steps.
            weights: (steps, B, M, S) fp32, buffer for the cross-attention weights; None if they are
                not needed.

        Returns:
            The prepared steps; None if steps have to run one at a time.
        """
        fused = self.members[0].fused
        assert fused is not None
        self._compact()
        return fused.prepared(
            room_for_steps(fused.text, self.ancestry, most), self.ancestry, weights
        )

    def end_steps(self, run: int, began: Sequence[float], is_open: bool) -> None:
        """Record the steps that C has run.

        Args:
            run: Number of steps.
            began: Start time of each step, in seconds.
            is_open: Whether the KV slots of the next tokens are open already.
        """
        fused = self.members[0].fused
        assert fused is not None
        self._began += [(self.ancestry.beams * fused.layers.sentences, second) for second in began]
        note_steps(fused.text, self.ancestry, run, is_open)

    def predicted(self, logits: Tensor) -> StepOutput:
        """Return the output of `step` for the logits (R, V) of a step that C has run.

        C writes the attention weights to their buffer itself.
        """
        return self.members[0].predicted(logits), None

    def step(self, ids: Tensor) -> StepOutput:
        """Run the newest token of ids (R, L), or (B, 1) in the first step."""
        self._began.append((ids.shape[0], time.perf_counter()))
        ancestry = None if self._first else self._opened()
        self._first = False
        return self._mixed([member.step(ids, ancestry) for member in self._all])

    @property
    def joinable(self) -> bool:
        """Whether the next step can run jointly with other batches: all models have fused steps."""
        return all(member.fused is not None and member.fused.ready for member in self._all)

    @property
    def decoders(self) -> list[DecoderStep]:
        return [member.fused.step for member in self._all if member.fused is not None]

    def is_replayed(self, rows: int) -> bool:
        replays = [member.fused.replay for member in self._all if member.fused is not None]
        return all(replay is not None and replay.supported(rows) for replay in replays)

    def begin_step(self, ids: Tensor) -> list[CallStepInputs]:
        """Open a step of the newest token of ids (R, L), computed jointly with other batches."""
        ancestry = self._opened()
        return [member.begin_step(ancestry) for member in self._all]

    def open_step(self, ids: Tensor) -> list[Opened]:
        """Open a captured step of the newest token of ids (R, L), replayed jointly."""
        ancestry = self._opened()
        return [member.open_step(ids, ancestry) for member in self._all]

    def end_step(self, results: Sequence[Result]) -> StepOutput:
        """Return the output of `step` for the results of each model."""
        return self._mixed(
            [member.end_step(*made) for member, made in zip(self._all, results, strict=True)]
        )

    def _opened(self) -> Ancestry:
        self._compact()
        self.ancestry.begin_step()
        return self.ancestry

    def _mixed(self, made: list[StepOutput]) -> StepOutput:
        """Combine the predictions and the attention weights of all models."""
        steps = made[: len(self.members)]
        prediction, attention = steps[0]
        if len(steps) > 1:
            stacked = torch.stack([each.log_probs() for each, _ in steps])
            mean = torch.logsumexp(stacked, 0) - math.log(len(steps))
            prediction = Prediction(lambda: mean)
            seen = [attention for _, attention in steps if attention is not None]
            attention = sum(seen[1:], seen[0]) / len(steps) if seen else None
        if self.language_model is not None:
            lm_prediction, _ = made[-1]
            total = prediction.log_probs() + lm_prediction.log_probs() * self.lm_weight
            prediction = Prediction(lambda: total)
        return prediction, attention

    def _compact(self) -> None:
        slots = self.ancestry.compact()
        if slots is not None:
            for member in self._all:
                member.layers.compact(slots)

    @property
    def prefills(self) -> bool:
        """Whether a prompt can be run in one pass: decoder-only models without a language model."""
        plain = all(member.plain and member.encoder_out is None for member in self.members)
        return plain and self.language_model is None

    def prefill(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Run texts (B, P + 1) in one pass; see `Member.prefill`."""
        self._first = False
        outputs = [member.prefill(tokens) for member in self.members]
        log_probs, token_log_probs = (
            torch.logsumexp(torch.stack(part), 0) for part in zip(*outputs, strict=True)
        )
        return log_probs - math.log(len(outputs)), token_log_probs - math.log(len(outputs))

    def reorder(self, parents: Tensor) -> None:
        if self.ancestry.steps:
            self.ancestry.reorder(parents)

    @property
    def left_off(self) -> tuple[str, ...]:
        """Disabled features, each with its fallback reason."""
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
    """Return the attention modules of a decoder's layers."""
    parts = (part for layer in decoder.layers for part in (layer.self_attn, layer.encoder_attn))
    return [part for part in parts if part is not None]


def _takes_log_softmax(model: Any) -> bool:
    """Return whether a model's log-probabilities are the log-softmax of its logits."""
    decoder = model.decoder
    own = (BaseFairseqModel, FairseqDecoder, TransformerModelBase)
    return getattr(decoder, "adaptive_softmax", None) is None and all(
        any(getattr(type(part), name) is getattr(kind, name) for kind in own)
        for part in (model, decoder)
        for name in ("get_normalized_probs", "get_normalized_probs_scriptable")
    )
