"""The decode step of a fairseq model from its weights (`models.runtime.decode_step`), over the shared cache."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fastgen import config
from fastgen.decoding.kv_cache.ancestry import Ancestry
from fastgen.models.build.equivalence_check import outcome
from fastgen.models.build.introspection import NotFused
from fastgen.models.build.step_builder import step_of
from fastgen.models.cuda_graphs import graph
from fastgen.models.cuda_graphs.graph_buffers import Reads
from fastgen.models.cuda_graphs.replay import Opened, Replay
from fastgen.models.runtime.decode_step import Context, DecoderStep
from fastgen.models.runtime.native_multistep_job import Prepared, is_written, prepared
from fastgen.models.runtime.ragged_step import Ragged, Span
from fastgen.models.specs.decoder_layouts import LAYOUTS
from fastgen.ops import native
from fastgen.patches.fairseq.generator.attention import Layers


class FusedDecoder:
    """A model's steps behind the first one, in which the keys of the source were made.

    Args:
        longest: tokens of a text at most.

    Raises:
        NotFused: the step cannot be made from the weights; with the reason.
    """

    def __init__(self, model: Any, layers: Layers, longest: int) -> None:
        if config.settings().step == "module":
            raise NotFused("FASTGEN_STEP=module")
        self.step, self.layers = step_of(model, LAYOUTS["fairseq"], longest), layers
        modules: list[Any] = list(model.decoder.layers)
        self.text = [layers.of[layer.self_attn] for layer in modules]
        self.source = [
            layers.of[layer.encoder_attn] for layer in modules if layer.encoder_attn is not None
        ]
        self.ready = bool(outcome(self.step))  # else the next step is made both ways
        kept = self.text[0]
        self.replay = Replay(self.step, self.text, longest) if graph.wanted(kept.keys) else None
        self._written = self.replay is None and is_written(self.step)  # from ids to logits in C

    def __call__(self, tokens: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return logits (R, V), and the last layer's attention over the source (R, S) or None, for texts (R, L)."""
        ancestry = self.layers.ancestry
        if (
            self.replay is not None
            and self.ready
            and self.replay.able(len(tokens))
            and ancestry is not None
        ):
            return self.replay(tokens[:, -1], self._reads(ancestry))
        context = self.context()
        logits, weights = self.step(tokens[:, -1], context), context.weights
        return logits, None if weights is None else weights.to(logits.dtype)

    def open(self, tokens: Tensor, ancestry: Ancestry) -> Opened:
        """Open a step of texts (R, L) that is captured together with those of others."""
        assert self.replay is not None
        return self.replay.open(tokens[:, -1], self._reads(ancestry))

    def _reads(self, ancestry: Ancestry) -> Reads:
        layers = self.layers
        return Reads(
            layers.sentences, self.text, self.source, ancestry, self.text[0].prefix, source_mask=layers.source_mask,
            watched=self._watched,
        )  # fmt: skip

    @property
    def _watched(self) -> int | None:
        return len(self.source) - 1 if self.source else None

    def context(self) -> Context:
        """What the next step reads."""
        layers, prefix = self.layers, self.text[0].prefix
        at = prefix + self.text[0].steps
        return Context(
            layers.sentences, at + 1, prefix, at, self.text, self.source, layers.text_mask, layers.source_mask,
            watched=self._watched,
        )  # fmt: skip

    @property
    def supports_multistep(self) -> bool:
        """Whether C may make several steps in a row, choices and all."""
        return self.ready and self._written and native.library() is not None

    def prepared(self, steps: int, ancestry: Ancestry, weights: Tensor | None) -> Prepared | None:
        """Have at most so many steps ready, for which there is room; None where C cannot run.

        weights: (steps, B, M, S) fp32, where the last layer's attention over the source is written; None for nowhere.
        """
        layers, text = self.layers, self.text[0]
        context = Context(
            layers.sentences, text.prefix + text.steps + 1, text.prefix, text.prefix + text.steps, self.text,
            self.source, None, layers.source_mask, ancestry.times, watched=len(self.source) - 1, weights=weights,
        )  # fmt: skip
        return prepared(self.step, context, ancestry.behind(text.prefix, None), ancestry.own, steps)

    def extend(self, spans: Sequence[Span], step: DecoderStep | None = None) -> Tensor:
        """Return logits (N, V) of what follows the tokens of spans, with one beam per sentence.

        step: one of the first layers alone; None for all.
        """
        layers, step = self.layers, step or self.step
        text, source = step.layers
        around = Ragged(
            layers.sentences, spans, self.text[0].prefix, self.text[:text], self.source[:source],
            source_mask=layers.source_mask,
        )  # fmt: skip
        ids = torch.tensor(
            [token for span in spans for token in span.tokens],
            device=around.device,
            dtype=torch.int64,
        )
        return step(ids, around)
