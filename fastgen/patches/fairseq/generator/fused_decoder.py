"""Fused decode steps of a fairseq model (`models.runtime.decode_step`) over the shared cache."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fastgen import config
from fastgen.decoding.kv_cache.ancestry import Ancestry
from fastgen.models.build.equivalence_check import recorded_verdict
from fastgen.models.build.int8_step import step_to_run
from fastgen.models.build.introspection import NotFused
from fastgen.models.build.step_builder import step_of
from fastgen.models.cuda_graphs import graph
from fastgen.models.cuda_graphs.graph_buffers import GraphInputs
from fastgen.models.cuda_graphs.replay import Opened, Replay
from fastgen.models.runtime.decode_step import DecoderStep
from fastgen.models.runtime.native.multistep_job import Prepared, prepared, supports_steps
from fastgen.models.runtime.ragged_step import RaggedStepInputs, Span
from fastgen.models.runtime.step_inputs import CallStepInputs
from fastgen.models.specs.encoder_decoder import FAIRSEQ
from fastgen.ops import native
from fastgen.patches.fairseq.generator.attention import Layers


class FusedDecoder:
    """Fused decode steps of one model.

    The first step must have run through the model's modules: it fills the cross-attention KV cache.

    Args:
        model: The fairseq model.
        layers: Its attention layers.
        longest: Maximum number of decode steps.

    Attributes:
        ready: Whether the equivalence check has passed. Until then the next step runs both ways.

    Raises:
        NotFused: No fused step can be built from the weights; the message holds the fallback
            reason.
    """

    def __init__(self, model: Any, layers: Layers, longest: int) -> None:
        if config.settings().step == "module":
            raise NotFused("FASTGEN_STEP=module")
        self.step, self.layers = step_of(model, FAIRSEQ, longest), layers
        if self.step.called:
            raise NotFused(f"a {self.step.called[0]} in place of a linear layer")
        modules: list[Any] = list(model.decoder.layers)
        self.text = [layers.of[layer.self_attn] for layer in modules]
        self.source = [
            layers.of[layer.encoder_attn] for layer in modules if layer.encoder_attn is not None
        ]
        self.ready = False
        self.note_verdict(bool(recorded_verdict(self.step)))
        first = self.text[0]
        self.replay = Replay(self.step, self.text, longest) if graph.enabled(first.keys) else None
        self._written = self.replay is None and supports_steps(self.step)  # C runs ids to logits

    def note_verdict(self, ready: bool) -> None:
        """Note whether the step has passed the equivalence check; then it runs in its precision."""
        self.ready = ready
        if ready:
            self.step = step_to_run(self.step)

    def __call__(self, tokens: Tensor) -> tuple[Tensor, Tensor | None]:
        """Run one decode step.

        Args:
            tokens: (R, L) int64; the newest token of each row is run.

        Returns:
            The logits (R, V), and the last layer's cross-attention weights (R, S), or None.
        """
        ancestry = self.layers.ancestry
        if (
            self.replay is not None
            and self.ready
            and self.replay.supported(len(tokens))
            and ancestry is not None
        ):
            return self.replay(tokens[:, -1], self._reads(ancestry))
        context = self.context()
        logits, weights = self.step(tokens[:, -1], context), context.weights
        return logits, None if weights is None else weights.to(logits.dtype)

    def open(self, tokens: Tensor, ancestry: Ancestry) -> Opened:
        """Open a captured step of texts (R, L) that is replayed jointly with other batches."""
        assert self.replay is not None
        return self.replay.open(tokens[:, -1], self._reads(ancestry))

    def _reads(self, ancestry: Ancestry) -> GraphInputs:
        layers = self.layers
        return GraphInputs(
            layers.sentences, self.text, self.source, ancestry, self.text[0].prefix,
            source_mask=layers.source_mask, alignment_layer=self._alignment_layer,
        )  # fmt: skip

    @property
    def _alignment_layer(self) -> int | None:
        return len(self.source) - 1 if self.source else None

    def context(self) -> CallStepInputs:
        """Return the inputs of the next step."""
        layers, prefix = self.layers, self.text[0].prefix
        at = prefix + self.text[0].steps
        return CallStepInputs(
            layers.sentences, at + 1, prefix, at, self.text, self.source,
            layers.text_mask, layers.source_mask, alignment_layer=self._alignment_layer,
        )  # fmt: skip

    @property
    def supports_multistep(self) -> bool:
        """Whether C can run several decode steps per call, token selection included."""
        return self.ready and self._written and native.library() is not None

    def prepared(self, steps: int, ancestry: Ancestry, weights: Tensor | None) -> Prepared | None:
        """Prepare up to `steps` decode steps that C runs in one call.

        Args:
            steps: Maximum number of steps; the KV cache must have room for them.
            ancestry: The ancestry of beams.
            weights: (steps, B, M, S) fp32, buffer for the last layer's cross-attention weights;
                None if they are not needed.

        Returns:
            The prepared steps; None if C cannot run them.
        """
        layers, text = self.layers, self.text[0]
        context = CallStepInputs(
            layers.sentences, text.prefix + text.steps + 1, text.prefix, text.prefix + text.steps,
            self.text, self.source, None, layers.source_mask, ancestry.slot_steps,
            alignment_layer=len(self.source) - 1, weights=weights,
        )  # fmt: skip
        return prepared(self.step, context, ancestry.behind(text.prefix, None), ancestry.own, steps)

    def extend(self, spans: Sequence[Span], step: DecoderStep | None = None) -> Tensor:
        """Run spans of tokens, with one beam per sentence.

        Args:
            spans: The tokens to run, N in total.
            step: A decode step of the first layers only; None for all layers.

        Returns:
            (N, V), the logits after each token.
        """
        layers, step = self.layers, step or self.step
        text, source = step.layers
        around = RaggedStepInputs(
            layers.sentences, spans, self.text[0].prefix, self.text[:text], self.source[:source],
            source_mask=layers.source_mask,
        )  # fmt: skip
        ids = torch.tensor(
            [token for span in spans for token in span.tokens],
            device=around.device,
            dtype=torch.int64,
        )
        return step(ids, around)
