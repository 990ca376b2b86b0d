"""A transformers model that makes decode steps over the shared cache, through its own forward."""

import time
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor

from fastgen.decoding.plan import Plan, Unsupported
from fastgen.models.attention import BeamAttention
from fastgen.patches.transformers.attention import current_step
from fastgen.patches.transformers.cache import SharedCache
from fastgen.patches.transformers.decide import computes_alone, refused
from fastgen.patches.transformers.report import CallReport


class TransformersStepper:
    """A model, the keyword arguments of its forward at B * M rows, and its cache.

    Args:
        input_ids: (B * M, P). model_kwargs: as `generate` hands them to its loop, expanded to B * M rows.
    """

    def __init__(
        self, model: Any, plan: Plan, input_ids: Tensor, generation_config: Any, model_kwargs: dict[str, Any]
    ) -> None:
        self.model, self.plan, self.config = model, plan, generation_config
        self.input_ids, self.kwargs = input_ids, model_kwargs
        longest = generation_config.max_length - input_ids.shape[1]
        encoder_decoder = model.config.is_encoder_decoder
        self.cache = SharedCache(plan.sentences, plan.beams, longest, model.device, encoder_decoder)
        self.outputs: list[Any] | None = None
        self._began: list[tuple[int, float]] = []  # rows and time at the start of each step

    def prefill(self) -> Tensor:
        m = self.plan.beams
        first = {name: _every(m, value) for name, value in self.kwargs.items()}
        first["past_key_values"] = self.cache.past_key_values
        self.kwargs["past_key_values"] = None
        outputs = self.model._prefill(self.input_ids[::m], self.config, first, is_first_iteration=True)
        self.cache.begin_decoding()
        if "encoder_outputs" in self.kwargs:
            self.kwargs["encoder_outputs"] = _unreadable(self.kwargs["encoder_outputs"])
        return self._taken(outputs, repeat=m)

    def report(self) -> CallReport:
        """What this call did; to be asked when it has ended."""
        times = [began for _, began in self._began] + [time.perf_counter()]
        steps = [(rows, times[i + 1] - times[i]) for i, (rows, _) in enumerate(self._began)]
        return CallReport(self.plan, self.cache.peak_nbytes, self.cache.stock_nbytes, steps)

    def step(self, ids: Tensor) -> Tensor:
        self._began.append((ids.shape[0], time.perf_counter()))
        inputs = self.model.prepare_inputs_for_generation(ids, next_sequence_length=1, **self.kwargs)
        self.cache.begin_step()
        ancestry = self.cache.ancestry
        if ancestry is None:
            outputs = self.model(**inputs, return_dict=True)
        else:
            attention = BeamAttention(self.cache.sentences, self.cache.beams, ancestry.visible)
            token = current_step.set(attention)
            try:
                outputs = self.model(**inputs, return_dict=True)
            finally:
                current_step.reset(token)
            if len(self._began) == 1:
                self._check(attention.attended)
        return self._taken(outputs)

    def _check(self, attended: int) -> None:
        """Refuse a model that did not take all its keys from the shared cache, as a changed forward might not.

        Nothing of the step has been used by then; the toolkit's own loop begins anew.
        """
        if attended != self.cache.layers:
            refused.add(self.model.__class__)
            raise Unsupported(computes_alone(self.model))

    def reorder(self, parents: Tensor) -> None:
        self.cache.reorder(parents)

    def keep(self, sentences: Tensor) -> None:
        self.cache.keep(sentences)
        m = self.plan.beams
        rows = (sentences[:, None] * m + torch.arange(m, device=sentences.device)).flatten()
        self.kwargs = {name: _select(rows, value) for name, value in self.kwargs.items()}

    def _taken(self, outputs: Any, repeat: int = 1) -> Tensor:
        """Note what the next step needs and return the logits (R, V) fp32 of the last token."""
        self.kwargs = self.model._update_model_kwargs_for_generation(
            outputs, self.kwargs, is_encoder_decoder=self.model.config.is_encoder_decoder
        )
        self.kwargs["past_key_values"] = self.cache.past_key_values
        if self.outputs is not None:
            self.outputs.append({name: _repeat(repeat, outputs.get(name)) for name in _OBSERVED})
        logits = outputs.logits[:, -1].to(dtype=torch.float32, device=self.input_ids.device)
        return logits.repeat_interleave(repeat, 0) if repeat > 1 else logits


_OBSERVED = ("hidden_states", "decoder_hidden_states", "attentions", "decoder_attentions", "cross_attentions")


def _every(m: int, value: Any) -> Any:
    """Undo the expansion of `generate`: every m-th row of a tensor, and of the tensors in a mapping."""
    if m == 1:
        return value
    if isinstance(value, Tensor):
        return value[::m].contiguous()  # once, and not in every layer that reads the encoder's output
    if isinstance(value, Mapping):
        mapping = cast("Mapping[str, Any]", value)
        return cast(Any, type(mapping))({k: _every(m, v) if isinstance(v, Tensor) else v for k, v in mapping.items()})
    return value


def _select(rows: Tensor, value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.index_select(0, rows.to(value.device))
    if isinstance(value, Mapping):
        mapping = cast("Mapping[str, Any]", value)
        return cast(Any, type(mapping))(
            {k: _select(rows, v) if isinstance(v, Tensor) else v for k, v in mapping.items()}
        )
    return value


def _repeat(m: int, value: Any) -> Any:
    """Expand what the prompt's forward returned at B rows to B * M rows."""
    if m == 1 or value is None:
        return value
    if isinstance(value, Tensor):
        return value.repeat_interleave(m, 0)
    return tuple(_repeat(m, part) for part in value)


def _unreadable(encoder_outputs: Any) -> Any:
    """Encoder outputs of the same shape that hold no memory.

    Once the keys of cross-attention are cached nothing may read them, and what does gets NaN.
    """
    return type(encoder_outputs)(
        {
            name: torch.full((1,) * value.dim(), torch.nan, dtype=value.dtype, device=value.device).expand(value.shape)
            if isinstance(value, Tensor) and value.is_floating_point()
            else value
            for name, value in encoder_outputs.items()
        }
    )
