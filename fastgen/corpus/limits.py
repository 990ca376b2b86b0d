"""Length limits of outputs: from the options, the model, or the length of the sources."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

PER_TOKEN, MORE = 2, 200
"""Default limit of an encoder-decoder: PER_TOKEN times the longest source's tokens, plus MORE."""

_UNSAID = 20
"""The max_length that older versions of transformers wrote into generation configs by default."""


@dataclass(frozen=True)
class Limit:
    """The most tokens of an output, without a decoder's prompt or start token.

    Attributes:
        origin: where the limit comes from, for messages.
        tokens: limit of every output; None if it depends on the sources, see `of`.
        most: if `tokens` is None, the most tokens that the model has positions for; None if
            positions are unlimited.
    """

    origin: str
    tokens: int | None = None
    most: int | None = None

    def of(self, longest: int) -> int:
        """Return the limit for a batch whose longest source has `longest` tokens."""
        if self.tokens is not None:
            return self.tokens
        limit = PER_TOKEN * longest + MORE
        return limit if self.most is None else min(limit, self.most)


def limit_of(model: Any, generation: Mapping[str, Any]) -> Limit:
    """Return the limit of a model's outputs.

    Args:
        model: the model.
        generation: arguments of `generate`, which take precedence over the model's generation
            config.
    """
    stored, start = model.generation_config, int(model.config.is_encoder_decoder)
    # If both are set, the first one takes precedence.
    for name, more in (("max_new_tokens", 0), ("max_length", start)):
        if (value := generation.get(name)) is not None:
            return Limit(f"--{name.replace('_', '-')} {value}", value - more)
        value = getattr(stored, name, None)
        if value is not None and (name, value) != ("max_length", _UNSAID):
            origin = (
                f"{name}={value} of the model's generation config; --max-new-tokens N sets another"
            )
            return Limit(origin, value - more)
    origin = (
        f"{MORE} tokens and {PER_TOKEN} for each of a batch's longest source; "
        "--max-new-tokens N sets another"
    )
    return Limit(origin, None, _positions(model.config))


def _positions(config: Any) -> int | None:
    """Return how many tokens a decoder can write after its start token; None if it is unlimited."""
    for name in ("max_decoder_position_embeddings", "max_position_embeddings"):
        if isinstance(value := getattr(config, name, None), int):
            return value - 1
    return None
