"""Calls of one new token that are so small that transformers' own code is faster."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from fastgen import config
from fastgen.patches.generation_call import GenerationCall, call_of
from fastgen.patches.transformers.generate.legacy_search import method_of
from fastgen.patches.transformers.generate.resolve_setting import (
    Settings,
    rows_at_most,
    setting_of,
)

REASON = "one new token of few texts and a narrow model: transformers' own code is faster"
"""What `status` counts these calls under."""

NARROW = 256
"""Largest hidden size of a model whose products take less time than a pass over its layers.

Ratios of one new token for models of 3 + 3 or 6 + 6 layers (Zen 4, two threads): with a hidden size
of 512, 1.15 to 2.2 for 16 to 1,024 tokens; with 128 and 256, 0.74 to 0.98 below the limits that
follow, and 1.03 to 2.0 beyond.
"""

FEW_ENCODED, FEW_PROMPTED = 64 * 1024, 24 * 1024
"""Most elements of hidden states, tokens times hidden size, of a call that is too small.

The first is of encoder-decoder models, counted for each beam. The second is of decoder-only models
with one row per text; with several, fastgen runs each prompt once and always gains.
"""


def is_too_small(model: Any, inputs: Sequence[Any], arguments: Mapping[str, Any]) -> bool:
    """Return whether a call gains nothing from fastgen.

    Calls that need a feature of fastgen never are too small.

    Args:
        model: The model.
        inputs: Positional arguments of `generate`.
        arguments: Keyword arguments of `generate`.
    """
    width: Any = getattr(model.config, "hidden_size", None)
    if (
        not (isinstance(width, int) and width <= NARROW)
        or setting_of(model, arguments, "max_new_tokens") != 1
        or _needs_fastgen(model, arguments)
        or (tokens := rows_at_most(model, inputs, arguments)) is None
    ):
        return False
    beams, samples = (
        setting_of(model, arguments, name) or 1 for name in ("num_beams", "num_return_sequences")
    )
    if model.config.is_encoder_decoder:
        return tokens * beams * width <= FEW_ENCODED
    return beams == samples == 1 and tokens * width <= FEW_PROMPTED


def _needs_fastgen(model: Any, arguments: Mapping[str, Any]) -> bool:
    """Return whether a call asks for what transformers' own code does not do."""
    call = call_of(model)
    return (
        call != GenerationCall(model, prefix_cache=call.prefix_cache)
        or arguments.get("streamer") is not None
        or arguments.get("custom_generate") is not None
        or config.settings().precision == "int8"
        or isinstance(setting_of(model, arguments, "forced_bos_token_id"), (list, Tensor))
        or method_of(Settings(model, arguments)) is not None
    )
