"""Decode steps of a transformers model through its own forward, as in transformers' own loops."""

import time
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor

from fastgen.decoding.kv_cache.ancestry import Ancestry
from fastgen.decoding.plan import Plan
from fastgen.models.cuda_graphs.kept_graphs import KeptGraphs
from fastgen.patches.transformers import compat
from fastgen.patches.transformers.cache.shared_cache import nbytes, select_rows
from fastgen.patches.transformers.cache.user_cache import IS_USER_PROVIDED
from fastgen.patches.transformers.compat import CACHE
from fastgen.patches.transformers.generate.report import CallReport
from fastgen.patches.transformers.planning import images


class ModuleStepper:
    """Runs prefill and decode steps of a model at B * M rows, over the toolkit's own cache, if any.

    Args:
        plan: The plan of the call.
        input_ids: (B * M, P) int64.
        model_kwargs: Arguments of the model's forward, as `generate` passes them to its loop: at
            B * M rows.

    Attributes:
        outputs: Attentions and hidden states of each forward, if the call returns them.
        last_hidden: (R or B, P or 1, C), last hidden states, if the forward returns them.
        eager_selection: Why the loop may not run a step after the last one, as captured token
            selection does: the caller sees the cache. None if it may.
    """

    def __init__(
        self,
        model: Any,
        plan: Plan,
        input_ids: Tensor,
        generation_config: Any,
        model_kwargs: dict[str, Any],
    ) -> None:
        self.model, self.plan, self.config = model, plan, generation_config
        self.input_ids, self.kwargs = input_ids, model_kwargs
        self.eager_selection: str | None = None
        if generation_config.return_dict_in_generate:
            self.eager_selection = "return_dict_in_generate=True"
        elif compat.is_user_provided(compat.cache_of(model_kwargs)):
            self.eager_selection = IS_USER_PROVIDED
        self.outputs: list[Any] | None = None
        self.last_hidden: Tensor | None = None
        self._began: list[tuple[int, float]] = []  # rows and time at the start of each step
        self._joined = 0  # number of steps that ran jointly with steps of other calls
        self._rows, self._peak = plan.rows, 0  # rows in the batch; peak bytes of the cache

    def kept_graphs(self, logits: Tensor) -> KeptGraphs | None:
        """Return graphs of earlier calls that read the logits of a step; None for none."""
        return None

    @property
    def joinable(self) -> bool:
        """Whether the next steps can run jointly with those of other calls."""
        return False

    @property
    def returned_cache(self) -> Any:
        """KV cache that the toolkit's loop would return."""
        return compat.cache_of(self.kwargs)

    @property
    def hidden(self) -> Tensor:
        """Newest input of the model's head: (R, 1, C); after prefill (R or B, P, C)."""
        assert self.last_hidden is not None
        return self.last_hidden

    @property
    def ancestry(self) -> Ancestry | None:
        """Ancestry table, if it is the only state that `reorder` changes; None otherwise."""
        return None

    def prefill(self) -> Tensor:
        """Run the prompt and return the logits (R, V) fp32 of the first new token.

        Raises:
            ValueError: The method is a beam search, and prefill left no cache.
        """
        logits = self._taken(compat.prefill(self.model, self.input_ids, self.config, self.kwargs))
        self._check_cache()
        return logits

    def _check_cache(self) -> None:
        """After prefill, raise the error of the toolkit's beam search if a chunk left no cache."""
        if "beam" in self.plan.method and self.kwargs.get(CACHE, self) is None:
            raise ValueError(
                f"{type(self.model).__name__} cannot use beam search with a cache currently, "
                "as the cache cannot be reordered"
            )

    def step(self, ids: Tensor) -> Tensor:
        """Run the newest token of ids (R, L) and return logits (R, V) fp32."""
        self._note_step(ids)
        return self._taken(self._forward(ids))

    def reorder(self, parents: Tensor) -> None:
        """Make row b * M + m continue beam parents[b, m]; parents is (B, M) int64."""
        cache = compat.cache_of(self.kwargs)
        if cache is not None:
            cache.reorder_cache(
                self._rows_of(
                    torch.arange(parents.shape[0], device=parents.device, dtype=torch.int64),
                    parents,
                )
            )

    def keep(self, sentences: Tensor) -> None:
        """Keep only the given sentences of the batch, (N,) int64 indices."""
        rows = self._rows_of(
            sentences, torch.arange(self.plan.beams, device=sentences.device, dtype=torch.int64)
        )
        self.keep_arguments(rows)
        self.keep_cache(sentences, rows)
        self._rows = rows.shape[0]

    def restore_user_cache(self) -> None:
        """Leave a user-provided cache as the toolkit's loop would, once the loop is over.

        Nothing to do here: the steps wrote to it directly.
        """

    def keep_text(self, sequences: Tensor) -> None:
        """Store a finished text for later calls, where the stepper has a way to do so.

        Args:
            sequences: (R, L) int64, the result of the search.
        """

    def report(self) -> CallReport:
        """Return the report of the call; to be called after its end."""
        times = [began for _, began in self._began] + [time.perf_counter()]
        steps = [(rows, times[i + 1] - times[i]) for i, (rows, _) in enumerate(self._began)]
        return CallReport(self.plan, *self._kv_bytes(), steps, self._joined)

    def _note_step(self, ids: Tensor) -> None:
        self._began.append((ids.shape[0], time.perf_counter()))

    def _forward(self, ids: Tensor) -> Any:
        newest = 1 if self.kwargs["use_cache"] else None
        inputs = self.model.prepare_inputs_for_generation(
            ids, next_sequence_length=newest, **self.kwargs
        )
        return self.model(**inputs, return_dict=True)

    def keep_arguments(self, rows: Tensor) -> None:
        """Keep only the given rows of the forward's arguments.

        Those with another number of rows belong to the images of prompts.
        """
        for name, value in self.kwargs.items():
            at = images.dimension_of_rows(name, value)
            if not isinstance(value, Tensor) or value.shape[at] == self._rows:
                self.kwargs[name] = _select(rows, value, at)

    def keep_cache(self, sentences: Tensor, rows: Tensor) -> None:
        """Keep only the given sentences in the cache.

        Args:
            sentences: (N,) int64.
            rows: (N * M,) int64, their rows.
        """
        cache = compat.cache_of(self.kwargs)
        if cache is not None:
            self._peak = max(self._peak, nbytes(cache))
            select_rows(cache, rows)

    def _kv_bytes(self) -> tuple[int, int]:
        """Return peak bytes of keys and values, and bytes that the toolkit's loop would use now."""
        by_now = nbytes(compat.cache_of(self.kwargs))
        return max(self._peak, by_now), by_now // max(self._rows, 1) * self.plan.rows

    def _rows_of(self, sentences: Tensor, beams: Tensor) -> Tensor:
        """Return the rows (N * M,) of beams (M,) or (N, M) of sentences (N,)."""
        return (sentences[:, None] * self.plan.beams + beams).flatten()

    def _taken(self, outputs: Any, repeat: int = 1) -> Tensor:
        """Update the arguments for the next step, and return the last token's logits (R, V) fp32.

        Args:
            outputs: What the model's forward returned.
            repeat: Number of rows that each row of the outputs stands for.
        """
        self.kwargs = compat.arguments_of_next(self.model, outputs, self.kwargs)
        if self.kwargs.get("output_hidden_states"):
            name = (
                "decoder_hidden_states" if self.model.config.is_encoder_decoder else "hidden_states"
            )
            self.last_hidden = outputs[name][-1]
        if self.outputs is not None:
            self.outputs.append({name: _repeat(repeat, outputs.get(name)) for name in _OBSERVED})
        # With several tokens, copy the last one's logits: a view would keep all logits alive.
        several = outputs.logits.shape[1] > 1
        logits = outputs.logits[:, -1].to(
            dtype=torch.float32, device=self.input_ids.device, copy=several
        )
        return logits.repeat_interleave(repeat, 0) if repeat > 1 else logits


_OBSERVED = (
    "hidden_states",
    "decoder_hidden_states",
    "attentions",
    "decoder_attentions",
    "cross_attentions",
)


def _select(rows: Tensor, value: Any, dim: int = 0) -> Any:
    if isinstance(value, Tensor):
        return value.index_select(dim, rows.to(value.device))
    if isinstance(value, Mapping):
        mapping = cast("Mapping[str, Any]", value)
        return cast(Any, type(mapping))(
            {k: _select(rows, v) if isinstance(v, Tensor) else v for k, v in mapping.items()}
        )
    return value


def _repeat(m: int, value: Any) -> Any:
    """Expand an output of prefill from B to B * M rows."""
    if m == 1 or value is None:
        return value
    if isinstance(value, Tensor):
        return value.repeat_interleave(m, 0)
    return tuple(_repeat(m, part) for part in value)
