"""How many tokens an output may have: as asked for, as the model says, or by the length of the sources."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

PER_TOKEN, MORE = 2, 200
"""Of an encoder-decoder's output where nobody says: so many tokens for each of the longest source's, and more."""

_UNSAID = 20
"""The max_length that older versions of transformers wrote into generation configs where nobody had set one."""


@dataclass(frozen=True)
class Limit:
    """Tokens that an output may have, without a decoder's prompt or start token.

    Attributes:
        said: where the limit comes from, for messages.
        tokens: of every output; None: by the sources, see `of`.
        most: where `tokens` is None, what the model has positions for; None: it has no last one.
    """

    said: str
    tokens: int | None = None
    most: int | None = None

    def of(self, longest: int) -> int:
        """Return the limit of a batch, by the tokens of its longest source."""
        if self.tokens is not None:
            return self.tokens
        found = PER_TOKEN * longest + MORE
        return found if self.most is None else min(found, self.most)


def limit_of(model: Any, generation: Mapping[str, Any]) -> Limit:
    """Return the limit of a model's outputs.

    Args:
        generation: arguments of `generate`, which go before the model's generation config.
    """
    stored, start = model.generation_config, int(model.config.is_encoder_decoder)
    for name, more in (
        ("max_new_tokens", 0),
        ("max_length", start),
    ):  # where both are set, the first holds
        if (value := generation.get(name)) is not None:
            return Limit(f"--{name.replace('_', '-')} {value}", value - more)
        value = getattr(stored, name, None)
        if value is not None and (name, value) != ("max_length", _UNSAID):
            said = (
                f"{name}={value} of the model's generation config; --max-new-tokens N sets another"
            )
            return Limit(said, value - more)
    said = f"{MORE} tokens and {PER_TOKEN} for each of a batch's longest source; --max-new-tokens N sets another"
    return Limit(said, None, _positions(model.config))


def _positions(config: Any) -> int | None:
    """Return how many tokens a decoder can write behind its start token; None where positions have no end."""
    for name in ("max_decoder_position_embeddings", "max_position_embeddings"):
        if isinstance(value := getattr(config, name, None), int):
            return value - 1
    return None
