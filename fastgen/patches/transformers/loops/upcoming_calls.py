"""The calls of `generate` that a loop over batches makes, generated together where that is unseen.

A loop, such as an evaluation, calls `generate` for each batch, with tensors of the batch and the
same options. The first call shows whether it does. At the second one the batches that were read
ahead are known: their rows are sorted by length and generated together. Each call then receives
the output that it would have computed, if its arguments are those that were expected.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from transformers import GenerationConfig

from fastgen.decoding.batching.continuous_batching import reason_not_to_refill
from fastgen.models.build.introspection import reads_rows
from fastgen.models.specs.registry import spec_of
from fastgen.patches.engine import engine
from fastgen.patches.generation_call import requesting
from fastgen.patches.transformers import compat
from fastgen.patches.transformers.bild import bild_call
from fastgen.patches.transformers.generate import legacy_search
from fastgen.patches.transformers.planning.row_removal import looks_at_rows
from fastgen.patches.transformers.streaming.padding import Padding, eos_tokens_of
from fastgen.patches.transformers.streaming.refill import what_wraps_generate
from fastgen.patches.transformers.streaming.stream import generate_window

WIDENING = 8
"""Rows of a batch of short texts at most, as a multiple of the rows in the loop's own batches."""


class _Apart(Exception):
    """Calls have to run one by one; the message is the reason."""


@dataclass
class _Expected:
    """A call to come.

    Attributes:
        batch: The batch of the loop.
        tensors: Copies of the arguments that are tensors, as a loop may change its batches.
        output: What the call returns.
    """

    batch: Any
    tensors: dict[str, Tensor]
    output: Tensor


class UpcomingCalls:
    """The calls of a model's `generate` in one loop; the first call for each batch counts.

    Args:
        name: Name of the patch that runs the loop.
        model: The model.

    Attributes:
        recur: Whether a call for each batch is expected, so that reading ahead pays.
    """

    def __init__(self, name: str, model: Any) -> None:
        self.name, self.model = name, model
        self.restart()

    def restart(self) -> None:
        """Begin another loop."""
        self.recur = self._is_refused = False
        self._options: dict[str, Any] = {}
        self._batch: Any = None
        self._following: list[Any] = []
        self._expected: dict[int, _Expected] = {}
        self._known_state: Any = None
        self._is_called = True

    def proceed(self, batch: Any, following: list[Any]) -> None:
        """Note the batch that the loop has reached.

        Args:
            batch: The batch.
            following: The batches after it that are known.
        """
        self._batch, self._following, self._is_called = batch, following, False

    def output_of(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor | None:
        """Return the output of a call of `generate`; None if it has to run by itself.

        Args:
            args: Positional arguments of the call.
            kwargs: Its other arguments.
        """
        if self._is_called or self._is_refused:
            return None
        self._is_called = True
        expected = self._expected.pop(id(self._batch), None)
        try:
            tensors, options = _split(args, kwargs, self.model.generation_config)
            if self.recur and options != self._options:
                raise _Apart("the options of its calls of generate differ")
            if expected is not None:
                if not _are_equal(tensors, expected.tensors):
                    raise _Apart("generate is called with other tensors than those of the batch")
                if self._state() != self._known_state:
                    raise _Apart("the model changes between the batches")
                return expected.output
            if not _are_equal(tensors, _tensors_of(self._batch)):
                raise _Apart("generate is called with other tensors than those of the batch")
            if not self.recur:
                self._check(options)
                self.recur, self._options = True, options
            elif self._following:
                return self._together(options)
        except _Apart as reason:
            self._refuse(str(reason))
        return None

    def _refuse(self, reason: str) -> None:
        self._expected.clear()
        self._is_refused, self.recur = True, False
        engine.note_skipped(self.name, f"batches are generated one by one: {reason}")

    def _check(self, options: dict[str, Any]) -> None:
        """Raise _Apart where a row's output may depend on the others, or a call is seen."""
        config = compat.prepare_config(
            self.model, options.get("generation_config"), _given(options)
        )
        reason = _reason_of_model(self.model) or _reason_of_options(self.model, options, config)
        reason = reason or what_wraps_generate(self.model, config, options)
        if reason is not None:
            raise _Apart(reason)

    def _state(self) -> Any:
        """Return what outputs depend on beside the arguments: an equal one gives equal outputs."""
        weights: list[tuple[int, int]] = []
        settings: list[Any] = []
        modules: list[torch.nn.Module] = list(self.model.modules())
        for module in modules:
            own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
            if any(tensor.is_inference() for tensor in own):  # these have no version
                raise _Apart("changes of its weights cannot be noticed")
            weights += [(tensor.data_ptr(), tensor._version) for tensor in own]
            settings += map(_unchanging, vars(module).values())
        is_cast = torch.is_autocast_enabled(self.model.device.type)
        return self.model.generation_config.to_dict(), weights, settings, is_cast

    def _together(self, options: dict[str, Any]) -> Tensor | None:
        """Generate all batches that are known; return the output for the one that is reached."""
        batches = [self._batch, *self._following]
        tensors = [_tensors_of(batch) for batch in batches]
        model, state = self.model, self._state()
        config = compat.prepare_config(model, options.get("generation_config"), _given(options))
        padding = Padding.of(config, bool(model.config.is_encoder_decoder))
        rows = [_rows(each, model, padding) for each in tensors]
        count = max(len(each) for each in rows)
        longest = max(len(row) for each in rows for row in each)
        try:
            with requesting(model, upcoming=None):
                found = generate_window(
                    model,
                    [row for each in rows for row in each],
                    max_tokens=count * longest,
                    max_sentences=count * WIDENING,
                    **options,
                )
        except Exception as error:  # each call raises its own
            raise _Apart(f"{type(error).__name__} in another batch or this one") from None
        self._expected, begin = {}, 0
        for batch, arguments, own in zip(batches, tensors, rows, strict=True):
            sequences = found[begin : begin + len(own)]
            output = _output(model, arguments["input_ids"], own, sequences, _fill(config))
            copies = {name: tensor.clone() for name, tensor in arguments.items()}
            self._expected[id(batch)] = _Expected(batch, copies, output)
            begin += len(own)
        self._known_state = state
        engine.hit(self.name)
        return self._expected.pop(id(self._batch)).output


_TENSORS = ("input_ids", "attention_mask")


def _given(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name != "generation_config"}


def _split(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], settings: GenerationConfig
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors and the options of a call.

    `generate` takes labels, as an evaluation passes them, and ignores them.

    Args:
        args: Positional arguments of the call.
        kwargs: Its other arguments.
        settings: The model's generation config, which options may override by None.
    """
    if args:
        raise _Apart("generate is called with positional arguments")
    for name, value in kwargs.items():
        if value is None and getattr(settings, name, None) is not None:
            raise _Apart(f"{name}=None")
    given = {name: v for name, v in kwargs.items() if v is not None and name != "labels"}
    tensors = {name: value for name, value in given.items() if isinstance(value, Tensor)}
    options = {name: value for name, value in given.items() if name not in tensors}
    if (others := set(tensors) ^ set(_TENSORS)) != set():
        raise _Apart(f"{min(others)} is {'given' if others <= set(tensors) else 'not given'}")
    for name, value in options.items():
        if not _is_plain(value):
            raise _Apart(f"{name} is given")
    return tensors, options


def _unchanging(value: Any) -> Any:
    """Return a setting, or a copy of a list of them; None in place of other attributes."""
    if type(value) is list and _is_plain(value):
        return tuple(cast("list[Any]", value))
    return value if isinstance(value, (bool, int, float, str)) else None


def _is_plain(value: Any) -> bool:
    if type(value) is list or type(value) is tuple:
        return all(map(_is_plain, cast("Sequence[Any]", value)))
    return value is None or type(value) in _PLAIN


_PLAIN: tuple[type, ...] = (bool, int, float, str, GenerationConfig)


def _tensors_of(batch: Any) -> dict[str, Tensor]:
    if not isinstance(batch, Mapping):
        raise _Apart(f"a batch is a {type(batch).__name__}")
    given = cast("Mapping[str, Any]", batch)
    tensors: dict[str, Any] = {name: given[name] for name in _TENSORS if name in given}
    if len(tensors) < len(_TENSORS) or not all(_is_rows(each) for each in tensors.values()):
        raise _Apart("a batch has other tensors than input_ids and attention_mask (B, L) int64")
    return tensors


def _is_rows(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() == 2 and value.dtype == torch.int64


def _are_equal(tensors: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return all(
        tensor.dtype == expected[name].dtype
        and torch.equal(tensor, expected[name].to(tensor.device))
        for name, tensor in tensors.items()
    )


def _reason_of_model(model: Any) -> str | None:
    """Return why outputs of a model's rows may depend on the other rows, or None."""
    if (reason := reason_not_to_refill([model.device.type])) is not None:
        return reason
    if spec_of(model.config) is None:
        return f"{type(model).__name__} has no decode steps that are made from its weights"
    if model.training:
        return "the model is in training mode"
    config = model.config.get_text_config(decoder=True)
    if not model.config.is_encoder_decoder and compat.attention_of(config) == "eager":
        return "with eager attention, padding of prompts may change a text"
    dtypes = {tensor.dtype for tensor in model.parameters()} - {torch.float32, torch.float64}
    if dtypes or torch.is_autocast_enabled(model.device.type):
        return "in half precision and in int8, rounding depends on the batch"
    modules = model.get_encoder().modules() if model.config.is_encoder_decoder else ()
    of_encoder = next(filter(None, map(reads_rows, modules)), None)
    return f"{of_encoder} may look at the whole batch" if of_encoder else looks_at_rows(model)


def _reason_of_options(model: Any, options: dict[str, Any], config: Any) -> str | None:
    """Return why the rows of several calls cannot be generated together, or None.

    Args:
        model: The model.
        options: Options of the call.
        config: Its generation config, as `generate` prepares it.
    """
    if config.do_sample:
        return "sampling draws for the whole batch"
    if (method := legacy_search.method_of(config)) is not None:
        return method
    if bild_call.options_of(model, dict(options)) is not None:
        return "big-little decoding"
    for name in _UNKNOWN:
        if getattr(config, name, None) is not None:
            return f"{name} is given"
    if config.pad_token_id is None or config.pad_token_id < 0:
        return "there is no pad token"
    if isinstance(config.forced_bos_token_id, (list, tuple)):
        return "each row has a first token of its own"
    padding = Padding.of(config, bool(model.config.is_encoder_decoder))
    return "an option takes padding for text" if padding.same_length else None


_UNKNOWN = (
    "stop_strings", "guidance_scale", "prompt_lookup_num_tokens", "assistant_early_exit",
    "max_time", "cache_implementation", "watermarking_config",
)  # fmt: skip


def _rows(tensors: dict[str, Tensor], model: Any, padding: Padding) -> list[Tensor]:
    """Return the token ids (L,) int64 of each row without its padding."""
    on_right = bool(model.config.is_encoder_decoder)
    rows: list[Tensor] = []
    for ids, mask in zip(*(tensors[name].cpu() for name in _TENSORS), strict=True):
        count = int(mask.count_nonzero())
        text = slice(0, count) if on_right else slice(len(ids) - count, None)
        row = ids[text]
        if count == 0 or not bool((mask[text] == 1).all()):
            raise _Apart("an attention mask is not one of padding")
        if padding.length_of(row):
            raise _Apart("an option takes padding for text")
        rows.append(row)
    return rows


def _fill(config: Any) -> int:
    """Return the token after the end of a sequence, as the two decoding loops choose it."""
    if (config.num_beams or 1) == 1:
        return config.pad_token_id
    ends = eos_tokens_of(config)
    # As in transformers, a padding id of 0 counts as none.
    return config.pad_token_id or int(ends[0]) if len(ends) else -1


def _output(
    model: Any, ids: Tensor, rows: list[Tensor], sequences: list[Tensor], fill: int
) -> Tensor:
    """Return the output of a call from the sequences of its rows.

    Args:
        model: The model.
        ids: `input_ids` of the call (B, L).
        rows: Token ids of each row without its padding.
        sequences: Sequences (N, T) of each row, which of a decoder-only model begin with the row.
        fill: Token after the end of a sequence.

    Returns:
        (B * N, T) int64, on the device of `ids`.
    """
    copies, before = len(sequences[0]), 0
    if not model.config.is_encoder_decoder:
        before = ids.shape[1]
        sequences = [own[:, len(row) :] for own, row in zip(sequences, rows, strict=True)]
    width = before + max(own.shape[1] for own in sequences)
    output = torch.full((len(rows), copies, width), fill, dtype=torch.int64, device="cpu")
    if before:
        output[:, :, :before] = ids.cpu()[:, None]
    for row, own in enumerate(sequences):
        output[row, :, before : before + own.shape[1]] = own
    return output.flatten(0, 1).to(ids.device)
