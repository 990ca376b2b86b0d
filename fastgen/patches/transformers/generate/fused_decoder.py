"""Fused decode steps of transformers models (`models.runtime.decode_step`) over a shared cache."""

import sys
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from fastgen import config
from fastgen.models.build.equivalence_check import recorded_verdict
from fastgen.models.build.int8_step import step_to_run
from fastgen.models.build.introspection import NotFused, is_toolkits
from fastgen.models.build.step_builder import step_of
from fastgen.models.cuda_graphs import graph
from fastgen.models.cuda_graphs.graph_buffers import GraphInputs
from fastgen.models.cuda_graphs.replay import Opened, Replay
from fastgen.models.runtime.decode_step import DecoderStep
from fastgen.models.runtime.native.multistep_job import Prepared, prepared, supports_steps
from fastgen.models.runtime.ragged_step import RaggedStepInputs, Span
from fastgen.models.runtime.step_inputs import CallStepInputs
from fastgen.models.specs.registry import spec_of
from fastgen.ops import native
from fastgen.patches.transformers import compat
from fastgen.patches.transformers.cache.shared_cache import SharedCache, windows_of
from fastgen.patches.transformers.compat import CACHE
from fastgen.patches.transformers.generate.legacy_search import method_of

# Arguments of the forward that fused decode steps support or do not need. The key says whether the
# model is an encoder-decoder.
_ARGUMENTS = {
    True: {
        "attention_mask",
        "decoder_attention_mask",
        "encoder_outputs",
        "global_attention_mask",
        CACHE,
        "use_cache",
    },
    False: {
        "attention_mask",
        "inputs_embeds",
        "logits_to_keep",
        CACHE,
        "position_ids",
        "use_cache",
    },
}
_OF_LOOP = {"streamer", "synced_gpus", "tokenizer"}
_NOT_FORWARDED = {"labels"}  # trainers pass whole batches; `generate` drops these
_ATTENTION = ("eager", "sdpa")


def not_known(model: Any, config: Any) -> str | None:
    """Return why the attention function that a model's config names is unsupported, or None."""
    name = compat.attention_of(config)
    eager = getattr(sys.modules.get(type(model).__module__), "eager_attention_forward", None)
    function = cast(Any, ALL_ATTENTION_FUNCTIONS).get(name, eager if name == "eager" else None)
    if name not in _ATTENTION:
        return f"attention implementation {name!r}"
    return (
        None
        if function is None or is_toolkits(function)
        else f"an attention function {name!r} of its own"
    )


def step(model: Any, generation_config: Any, kwargs: dict[str, Any], longest: int) -> DecoderStep:
    """Return the fused decode step of a call.

    Args:
        kwargs: Arguments of the model's forward.
        longest: Maximum number of tokens of a text.

    Raises:
        NotFused: The model or the call does not support fused steps; the message is the reason.
    """
    if config.settings().step == "module":
        raise NotFused("FASTGEN_STEP=module")
    check_arguments(model, generation_config, kwargs)
    spec = spec_of(model.config)
    if spec is None:
        raise NotFused(f"there is no spec of model type {model.config.model_type!r}")
    if spec.encoder_decoder != bool(model.config.is_encoder_decoder):
        raise NotFused("a decoder without its encoder")
    check_preparation(model)
    if (reason := not_known(model, model.config)) is not None:
        raise NotFused(reason)
    if spec.prefix_lm:
        longest += kwargs["encoder_outputs"][0].shape[1]
    fused = step_of(model, spec, longest, windows_of(model, kwargs[CACHE]))
    if fused.tokens > 1 and method_of(generation_config) == "contrastive search":
        raise NotFused("contrastive search looks at tokens, and the head at what asks behind them")
    mask = kwargs.get("attention_mask")
    if fused.counts_padding and mask is not None and bool((mask[:, 1:] < mask[:, :-1]).any()):
        raise NotFused("padding that is not on the left")
    return fused


def check_arguments(model: Any, generation_config: Any, kwargs: dict[str, Any]) -> None:
    """Raise NotFused if a step must return more than logits, or gets unsupported arguments."""
    returned = generation_config.output_hidden_states or generation_config.output_attentions
    by_default = any(
        getattr(model.config, name, False) for name in ("output_hidden_states", "output_attentions")
    )
    if by_default or (returned and generation_config.return_dict_in_generate):
        raise NotFused("hidden states or attentions are returned")
    spec = spec_of(model.config)
    prompts_only = frozenset[str]() if spec is None else spec.prompts_only
    arguments = _ARGUMENTS[bool(model.config.is_encoder_decoder)] | _OF_LOOP
    for name, value in kwargs.items():
        if name in _NOT_FORWARDED or name in prompts_only:
            continue
        if value is not None and value != {} and name not in arguments:
            raise NotFused(f"the model gets {name}")
        # `inputs_embeds` belong to the prompt only, and images have positions of three dimensions.
        any_form = name == "inputs_embeds" or (name == "position_ids" and prompts_only)
        if isinstance(value, Tensor) and value.dim() != 2 and not any_form:
            raise NotFused(f"{name} has {value.dim()} dimensions")


def check_preparation(model: Any) -> None:
    """Raise NotFused if a model has its own code to prepare decode steps."""
    spec = spec_of(model.config)
    for name in compat.STEP_METHODS:
        method: Any = getattr(cast(Any, type(model)), name)
        harmless = spec is not None and spec.prepares_inputs and is_toolkits(method)
        if name in vars(model) or (compat.has_own(model, name) and not harmless):
            raise NotFused(f"{type(model).__name__} has its own {name}")
    if type(model).__call__ is not nn.Module.__call__:
        raise NotFused(f"{type(model).__name__} has its own __call__")


class FusedDecoder:
    """Decode steps of a model after prefill: token ids in, logits out.

    Args:
        step: The fused decode step.
        model: The model, for its config.
        cache: The shared cache, after prefill.
        kwargs: Arguments of the model's forward in the first decode step.

    Attributes:
        ready: Whether the step has passed the equivalence check; otherwise the next one runs both
            ways.
        first: Position of the first token after the prompt; (B,) int64 if sentences differ.
        prefix_mask: (B, 1, 1, P) additive; None if all of the prompt is visible.
        source_mask: (B, 1, 1, S) additive; None if all of the source is visible.
        hidden: (R, C), the newest input of the model's head, if the call needs it.
        replay: Capture and replay of the steps as CUDA graphs; None on a CPU, for example.

    Raises:
        NotFused: Prefill wrote other layers than the step has, or the mask does not have the length
            of the text.
    """

    def __init__(
        self, step: DecoderStep, model: Any, cache: SharedCache, kwargs: dict[str, Any]
    ) -> None:
        if (len(cache.text), len(cache.source)) != step.layers:
            raise NotFused(f"its cache has {len(cache.text)} layers")
        self.step, self.cache, self.prefix = step, cache, cache.text[0].prefix
        self.longest = self.prefix + cache.longest
        self.ready = False
        self.note_verdict(bool(recorded_verdict(step)))
        self.encoder_decoder = bool(model.config.is_encoder_decoder)
        spec = spec_of(model.config)
        assert spec is not None  # as there is a step
        text = kwargs.get("decoder_attention_mask" if self.encoder_decoder else "attention_mask")
        text = text if spec.masks_prompt else None
        source = _mask_of_source(model, kwargs) if self.encoder_decoder else None
        positions = kwargs.get("position_ids")
        if source is not None and spec.prefix_lm:  # it may be padded on either side
            text = torch.nn.functional.pad(source, (0, self.prefix - source.shape[1]), value=1)
            source, positions = None, text.sum(1, keepdim=True)
        elif text is not None and text.shape[1] != self.prefix + 1:
            # It may mask generated tokens.
            raise NotFused(f"a mask of {text.shape[1] - 1} tokens for a text of {self.prefix}")
        self.prefix_mask = (
            None if text is None else _additive(text[:: cache.beams, : self.prefix], step.dtype)
        )
        self.source_mask = None if source is None else _additive(source[:: cache.beams], step.dtype)
        counted = None if text is None else text[:, : self.prefix].sum(1, keepdim=True)
        places = spec.decoder.positions
        skips_padding = places.skips_padding or step.counts_padding
        self.first = self._first(counted if skips_padding else positions) + places.begin
        self.seeing = bool(kwargs.get("output_hidden_states"))  # whether `hidden` is needed
        self.hidden: Tensor | None = None
        replayed = graph.enabled(cache.text[0].own[0]) and not self.seeing
        # Whether C runs the steps from token ids to logits.
        self._written = not self.seeing and not replayed and supports_steps(step)
        self.replay = Replay(step, cache.text, cache.longest) if replayed else None

    def note_verdict(self, ready: bool) -> None:
        """Note whether the step has passed the equivalence check; then it runs in its precision."""
        self.ready = ready
        if ready:
            self.step = step_to_run(self.step)

    def __call__(self, ids: Tensor) -> Tensor:
        """Run one step.

        Args:
            ids: (R, L) int64. The cache holds all tokens but the newest.

        Returns:
            Logits (R, V), fp32; of the model's dtype if the step is captured.
        """
        if self.replay is not None and self.ready and self.replay.supported(len(ids)):
            return self.replay(ids[:, -1], self._reads)[0]
        if not self.seeing:
            return self.step(ids[:, -1], self.context()).float()
        self.hidden = self.step.hidden(ids[:, -1], self.context())
        return self.step.logits(self.hidden).float()

    def open(self, ids: Tensor) -> Opened:
        """Open a step for the newest token of ids (R, L), to be captured jointly with others."""
        assert self.replay is not None
        return self.replay.open(ids[:, -1], self._reads)

    @property
    def _reads(self) -> GraphInputs:
        cache = self.cache
        return GraphInputs(
            cache.sentences,
            cache.text,
            cache.source,
            cache.ancestry,
            self.first,
            self.prefix_mask,
            self.source_mask,
        )

    def context(self) -> CallStepInputs:
        """Return the inputs of the next step."""
        cache, ancestry, steps = self.cache, self.cache.ancestry, self.cache.text[0].steps
        return CallStepInputs(
            cache.sentences, self.prefix + steps + 1, self.prefix, self._position(steps),
            cache.text, cache.source, self._text_mask(steps), self.source_mask,
            None if ancestry is None else ancestry.slot_steps,
        )  # fmt: skip

    def _position(self, steps: int) -> int | Tensor:
        """Return the newest token's position after `steps` decode steps; (R,) if rows differ."""
        at = self.first + steps
        return at.repeat_interleave(self.cache.beams) if isinstance(at, Tensor) else at

    @property
    def supports_multistep(self) -> bool:
        """Whether C can run decode steps from token ids to logits, several of them per call."""
        return self.ready and self._written and native.library() is not None

    def prepared(self, steps: int, step: DecoderStep | None = None) -> Prepared | None:
        """Prepare decode steps for C.

        Args:
            steps: Maximum number of steps; the cache has room for them.
            step: Another decode step over the same cache; None for the model's own.

        Returns:
            The prepared steps; None if C cannot run them.
        """
        cache, ancestry, text = self.cache, self.cache.ancestry, self.cache.text[0]
        mask = None
        if ancestry is not None:
            mask, own = ancestry.behind(self.prefix, self.prefix_mask), ancestry.own
        else:
            own = torch.zeros(1, 1, dtype=torch.float32, device=cache.device)
            if self.prefix_mask is not None:
                mask = torch.nn.functional.pad(self.prefix_mask[:, 0], (0, text.steps + steps))
        context = CallStepInputs(
            cache.sentences, self.prefix + text.steps + 1, self.prefix, self._position(text.steps),
            cache.text, cache.source, None, self.source_mask,
            None if ancestry is None else ancestry.slot_steps,
        )  # fmt: skip
        return prepared(step or self.step, context, mask, own, steps)

    def extend(self, spans: Sequence[Span], step: DecoderStep | None = None) -> Tensor:
        """Run spans of tokens, with one beam per sentence.

        Args:
            spans: At most one span per sentence, N tokens in total.
            step: A step of the first layers only, for early exit; None for all layers.

        Returns:
            Logits (N, V) fp32 after each token.
        """
        cache, step = self.cache, step or self.step
        text, source = step.layers
        inputs = RaggedStepInputs(
            cache.sentences, spans, self.first, cache.text[:text], cache.source[:source],
            self.prefix_mask, self.source_mask,
        )  # fmt: skip
        ids = torch.tensor(
            [token for span in spans for token in span.tokens],
            device=inputs.device,
            dtype=torch.int64,
        )
        return step(ids, inputs).float()

    def verify(self, ids: Tensor, drafts: Tensor) -> Tensor:
        """Run the newest token of ids (R, L) and its drafts (R, K), with one beam per sentence.

        Returns:
            Logits (R, K + 1, V) fp32 after each.
        """
        tokens: list[list[int]] = cast(Any, torch.cat([ids[:, -1:], drafts], 1)).tolist()
        steps = self.cache.text[0].steps
        logits = self.extend([Span(row, steps, span) for row, span in enumerate(tokens)])
        return logits.view(len(ids), -1, logits.shape[1])

    def keep(self, sentences: Tensor) -> None:
        """Keep only the given sentences, (N,) int64 indices."""
        self.prefix_mask, self.source_mask = (
            None if mask is None else mask[sentences]
            for mask in (self.prefix_mask, self.source_mask)
        )
        if isinstance(self.first, Tensor):
            self.first = self.first[sentences]

    def _first(self, position_ids: Tensor | None) -> int | Tensor:
        """Return the position of the first token after the prompt; (B,) if sentences differ."""
        if position_ids is None:
            return self.prefix
        if position_ids.dim() > 2:  # by time, height and width, which are equal behind images
            if not bool((position_ids[-3:, :, -1] == position_ids[-1, :, -1]).all()):
                raise NotFused("multimodal position ids")
            position_ids = position_ids[-1]
        first = position_ids[:: self.cache.beams, -1]
        return int(first[0]) if bool((first == first[0]).all()) else first

    def _text_mask(self, steps: int) -> Tensor | None:
        """Return the self-attention mask after `steps` decode steps; None if all is visible."""
        prefix, ancestry = self.prefix_mask, self.cache.ancestry
        if ancestry is None:
            return None if prefix is None else torch.nn.functional.pad(prefix, (0, steps + 1))
        visible = ancestry.visible[:, None].to(self.step.dtype)
        shared = visible.new_zeros(1) if prefix is None else prefix
        return torch.cat([shared.expand(*visible.shape[:3], self.prefix), visible], 3)


def source_mask(model: Any, kwargs: Mapping[str, Any], dtype: torch.dtype) -> Tensor | None:
    """Return the additive cross-attention mask (R, 1, 1, S); None if everything is visible.

    Args:
        kwargs: Arguments of the model's forward.
    """
    mask = _mask_of_source(model, kwargs)
    return None if mask is None else _additive(mask, dtype)


def _mask_of_source(model: Any, kwargs: Mapping[str, Any]) -> Tensor | None:
    """Return the mask (R, S) of the encoder's output, true where visible; None for none."""
    mask, spec = kwargs.get("attention_mask"), spec_of(model.config)
    assert spec is not None  # as there is a step
    if mask is None or not spec.masks_source:
        return None
    if spec.source_mask is None:
        return mask
    return spec.source_mask(model, mask, kwargs["encoder_outputs"][0].shape[1])


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor | None:
    """Return mask (B, N), true where visible, as additive (B, 1, 1, N); None if all is visible."""
    hidden = ~mask.to(torch.bool)
    if not bool(hidden.any()):
        return None
    return torch.zeros(hidden.shape, dtype=dtype, device=mask.device).masked_fill_(
        hidden, -torch.inf
    )[:, None, None]
