"""Prefill of a transformers model into the shared cache, at one row per sentence."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

from torch import Tensor
from transformers.modeling_outputs import Seq2SeqLMOutput

from fastgen.decoding.plan import Plan
from fastgen.models.build.equivalence_check import (
    record_first_verdict,
    recorded_first_verdict,
    tried,
)
from fastgen.models.layers.read_rows import reading
from fastgen.models.runtime import first_token
from fastgen.models.runtime.decode_step import DecoderStep
from fastgen.patches.generation_call import call_of
from fastgen.patches.transformers import compat
from fastgen.patches.transformers.cache.shared_cache import SharedCache
from fastgen.patches.transformers.compat import CACHE
from fastgen.patches.transformers.generate.fused_decoder import source_mask
from fastgen.patches.transformers.planning import cached_prompt, common_prompt


class SharedPrefill:
    """Runs the prompts of a call by the model's forward, or fused if they are one token long.

    Args:
        plan: The plan of the call.
        generation_config: The generation config of the call.
        step: The fused decode step; None if the model's forward runs every prompt.

    Attributes:
        proven: Outcome of the equivalence check of fused prefill; None if it has not run.
        fingerprint: The model's, if the prefix cache keeps this call's prompt; else None.
    """

    def __init__(
        self, model: Any, plan: Plan, generation_config: Any, step: DecoderStep | None
    ) -> None:
        self.model, self.plan, self.config, self.step = model, plan, generation_config, step
        self.proven = None if step is None else recorded_first_verdict(step)
        self.fingerprint = cached_prompt.fingerprint_of(model) if plan.keeps_prefix else None

    def is_first_token(self, cache: SharedCache, prompt: int, kwargs: Mapping[str, Any]) -> bool:
        """Return whether the prompt is one token after a source and only its logits are needed.

        Args:
            cache: The shared cache, before prefill.
            prompt: Number of tokens of the prompts.
            kwargs: Arguments of the forward.
        """
        states, mask = kwargs.get("encoder_outputs"), kwargs.get("decoder_attention_mask")
        config = self.config
        returned = config.output_hidden_states or config.output_attentions
        return (
            self.step is not None and first_token.supported(self.step)
            and prompt == 1 and not cache.text and states is not None and mask is None
            and not (config.return_dict_in_generate and returned)
            and not kwargs.get("output_hidden_states")
            # Chunked prefill runs without the source's mask.
            and getattr(config, "prefill_chunk_size", None) is None
        )  # fmt: skip

    def reserve(self, cache: SharedCache, states: Tensor) -> None:
        """Compute and store cross-attention KV, and reserve room for the first token's KV.

        Args:
            states: (B, S, C), the encoder's output.
        """
        assert self.step is not None
        for layer, kept in enumerate(first_token.source_of(self.step, states)):
            cache.keep_source(layer, *kept)
        for layer, kept in enumerate(first_token.room_of(self.step, len(states))):
            cache.keep_text(layer, *kept)

    def __call__(self, cache: SharedCache, ids: Tensor, kwargs: dict[str, Any]) -> Any:
        """Return the outputs of the model's forward, or equivalent fused outputs.

        Args:
            ids: (B, P) int64, the prompts.
            kwargs: Arguments of the forward, at B rows.
        """
        if self.plan.common:
            return self._common_first(cache, ids, kwargs)
        step = self.step
        if step is None or not self.is_first_token(cache, ids.shape[1], kwargs):
            with self._reading(kwargs, ids.shape[1]):
                return compat.prefill(self.model, ids, self.config, kwargs)
        states, mask = kwargs["encoder_outputs"][0], source_mask(self.model, kwargs, step.dtype)
        if self.proven:
            self.reserve(cache, states)
            text, source = (
                [(layer.keys, layer.values) for layer in of] for of in (cache.text, cache.source)
            )
            logits = step(ids[:, 0], first_token.first_token(text, source, mask))
            return Seq2SeqLMOutput(
                logits=cast(Any, logits[:, None]), **{CACHE: cast(Any, cache.model_cache)}
            )
        outputs: Any = compat.prefill(self.model, ids, self.config, kwargs)
        if self.proven is None:
            attempt = tried(lambda: first_token.all_made(step, ids[:, 0], states, mask), step.dtype)
            own = [
                each
                for layer in (*cache.text, *cache.source)
                for each in (layer.keys, layer.values)
            ]
            record_first_verdict(step, attempt, [outputs.logits[:, -1], *own])
        return outputs

    def _reading(self, kwargs: Mapping[str, Any], tokens: int) -> AbstractContextManager[object]:
        """Return a context manager of a forward over the last tokens, which may skip padding.

        Args:
            kwargs: Arguments of the forward, at B rows.
            tokens: Number of tokens of each row.
        """
        mask = kwargs.get(common_prompt.BY_TOKEN[0])
        config = self.model.config.get_text_config(decoder=True)
        width = getattr(config, "hidden_size", 0)
        if (
            self.step is None  # it shows that the modules are the toolkit's own
            or not call_of(self.model).skips_padding
            or self.model.config.is_encoder_decoder
            or common_prompt.has_other_inputs(dict(kwargs))  # an encoder of images runs too
            or mask is None
            or mask.dim() != 2
            or mask.device.type != "cpu"
            or mask.shape[1] < tokens
            or len(mask) == 1  # its shape would not tell it from tokens that all rows share
            or not bool(mask[:, -1].all())  # attention that sees no token reads padding
            or compat.is_user_provided(kwargs.get(CACHE))
        ):
            return nullcontext()
        return reading(mask[:, -tokens:].bool(), width)

    def _common_first(self, cache: SharedCache, ids: Tensor, kwargs: dict[str, Any]) -> Any:
        """Run tokens that all prompts begin with once, unless the prefix cache has them."""
        common, tokens = self.plan.common, ids[0, : self.plan.common]
        known, count = cached_prompt.load(self.model, tokens) if self.plan.cached else ((), 0)
        with self._reading(kwargs, ids.shape[1] - common):
            outputs, once = common_prompt.prefill(self.model, ids, kwargs, self.plan, cache, known)
        if self.plan.sentences > 1 and count < common:
            self.keep(tokens, [(layer.keys, layer.values) for layer in cast(Any, once).layers])
        return outputs

    def keep(self, tokens: Tensor, layers: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Store the keys and values of a text in the prefix cache, if it is on.

        Args:
            tokens: (N,) int64.
            layers: Keys and values (1, Hkv, N or more, D) of each layer.
        """
        if self.fingerprint is not None:
            cached_prompt.keep(self.model, self.fingerprint, tokens, layers)
