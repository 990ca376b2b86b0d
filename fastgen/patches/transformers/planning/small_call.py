"""Calls of one or two new tokens that are so small that transformers' own code is faster."""

from collections.abc import Mapping, Sequence
from types import NoneType
from typing import Any, NamedTuple

from fastgen import config
from fastgen.patches.generation_call import GenerationCall, call_of
from fastgen.patches.transformers.generate.legacy_search import method_of
from fastgen.patches.transformers.generate.resolve_setting import (
    Settings,
    rows_at_most,
    setting_of,
)

REASON = "one or two new tokens, few texts, a narrow model: transformers' own code is faster"
"""What `status` counts these calls under."""


class _Limits(NamedTuple):
    """The largest call that is too small.

    Attributes:
        width: Hidden size of the model.
        encoded: Elements of hidden states, tokens times hidden size, of encoder-decoder models,
            counted for each beam.
        prompted: The same of decoder-only models with one row per text. With several, fastgen runs
            each prompt once, which always pays.
    """

    width: int
    encoded: int
    prompted: int


LIMITS = {1: _Limits(256, 64 * 1024, 24 * 1024), 2: _Limits(256, 8 * 1024, 8 * 1024)}
"""By number of new tokens.

With one new token, ratios are 0.74 to 0.98 within these limits, 1.03 to 2.0 beyond the elements,
and 1.15 to 2.2 with a hidden size of 512. With two, they are 0.87 to 1.00 within, and 0.93 to 1.9
beyond (Marian of 3 + 3 and GPT-2 of 3 layers, Zen 4, two threads).
"""

_CODE = (
    "streamer",
    "custom_generate",
    "logits_processor",
    "stopping_criteria",
    "prefix_allowed_tokens_fn",
)
"""Arguments with code of the caller, which may itself call `generate` with a feature of fastgen."""


def is_too_small(model: Any, inputs: Sequence[Any], arguments: Mapping[str, Any]) -> bool:
    """Return whether a call gains nothing from fastgen.

    Calls that need a feature of fastgen never are too small.

    Args:
        model: The model.
        inputs: Positional arguments of `generate`.
        arguments: Keyword arguments of `generate`.
    """
    limits = LIMITS.get(setting_of(model, arguments, "max_new_tokens"))
    width: Any = getattr(model.config, "hidden_size", None)
    if (
        limits is None
        or not isinstance(width, int)
        or width > limits.width
        or _needs_fastgen(model, arguments)
        or (tokens := rows_at_most(model, inputs, arguments)) is None
    ):
        return False
    beams, samples = (
        setting_of(model, arguments, name) or 1 for name in ("num_beams", "num_return_sequences")
    )
    if model.config.is_encoder_decoder:
        return tokens * beams * width <= limits.encoded
    return beams == samples == 1 and tokens * width <= limits.prompted


def _needs_fastgen(model: Any, arguments: Mapping[str, Any]) -> bool:
    """Return whether a call asks for what transformers' own code does not do."""
    call = call_of(model)
    return (
        call != GenerationCall(model, prefix_cache=call.prefix_cache)
        or any(arguments.get(name) is not None for name in _CODE)
        or config.settings().precision == "int8"
        or not isinstance(setting_of(model, arguments, "forced_bos_token_id"), (int, NoneType))
        or method_of(Settings(model, arguments)) is not None
    )
