"""The first token of texts that have a source: made from the weights too, keys and values of the source included.

Through the modules that takes up to twice as long, which a short call notices. A model whose first token has not been
compared runs it through its own forward, and is compared then (`models.build.equivalence_check`).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from fastgen.models.layers.linear import Product
from fastgen.models.layers.positions import Bias
from fastgen.models.runtime.decode_step import Context, DecoderStep, SourceAttention, TextAttention
from fastgen.ops.rotation import Rotation, rotated

Kept = tuple[Tensor, Tensor]
"""Keys and values (B, Hkv, N, D) of a layer."""


def able(step: DecoderStep) -> bool:
    """Whether a decoder's first token can be made as its steps are."""
    mixes = [sublayer.mix for sublayer in step.sublayers]
    sources = [mix for mix in mixes if isinstance(mix, SourceAttention)]
    return (
        type(step) is DecoderStep
        and bool(sources)
        and all(mix.made_by is not None for mix in sources)
        and sum(type(mix) is TextAttention for mix in mixes) == len(sources)
    )


def source_of(step: DecoderStep, states: Tensor) -> list[Kept]:
    """Each layer's keys and values of an encoder's output (B, S, C)."""
    sentences, length = states.shape[:2]
    rows = states.reshape(sentences * length, -1)

    def made(product: Product, dims: int) -> Tensor:
        return product.apply(rows).view(sentences, length, -1, dims).transpose(1, 2)

    mixes = (sublayer.mix for sublayer in step.sublayers)
    found = ((mix.made_by, mix.dims) for mix in mixes if isinstance(mix, SourceAttention))
    return [
        (made(makers[0], dims), made(makers[1], dims))
        for makers, dims in found
        if makers is not None
    ]


def room_of(step: DecoderStep, texts: int) -> list[Kept]:
    """Each layer's keys and values of first tokens that have yet to be run."""
    mixes = (sublayer.mix for sublayer in step.sublayers)
    found = ((mix.key_heads, mix.dims) for mix in mixes if isinstance(mix, TextAttention))
    make = step.embedding.tokens.new_zeros
    return [(make(texts, heads, 1, dims), make(texts, heads, 1, dims)) for heads, dims in found]


@dataclass
class Room:
    """Keys and values (B, Hkv, N, D) of a layer where they will lie: `slots` of them are there."""

    keys: Tensor
    values: Tensor
    slots: int = 0
    beams: int = 1
    begun: bool = True

    @property
    def room(self) -> Kept:
        return self.keys, self.values

    def make_room(self) -> None:
        """There is room."""

    def note_step(self) -> None:
        self.slots += 1

    def append(self, keys: Tensor, values: Tensor) -> None:
        self.keys.copy_(keys)
        self.values.copy_(values)
        self.note_step()

    def reserve(self, keys: Tensor, values: Tensor) -> None:
        self.note_step()

    def append_turned(
        self, query: Tensor, key: Tensor, value: Tensor, rotation: Rotation
    ) -> Tensor:
        self.append(rotated(key, rotation)[:, :, None], value[:, :, None])
        return rotated(query, rotation)


class FirstToken(Context):
    """What the first token of B texts reads, which is all that there is to see of them."""

    def text_mask_with(self, bias: Bias | None) -> None:
        """None: one key has all the weight, whatever is added to its score."""

    def self_attention(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, bias: Bias | None, scale: float,
        softcap: float | None, rotation: Rotation | None = None,
    ) -> Tensor:  # fmt: skip
        if rotation is None:
            self.text[layer].append(key[:, :, None], value[:, :, None])
        else:
            self.text[layer].append_turned(query, key, value, rotation)
        return value.repeat_interleave(query.shape[1] // value.shape[1], 1).flatten(
            1
        )  # which has all the weight


def first_token(
    text: Sequence[Kept], source: Sequence[Kept], source_mask: Tensor | None
) -> FirstToken:
    """What the first token reads of a source, and where its own keys and values come to lie.

    Args:
        text: room for each layer's, (B, Hkv, 1, D). source: each layer's.
        source_mask: additive, (B, 1, 1, S); None where all is seen.
    """
    rooms, sources = (
        [Room(*kept) for kept in text],
        [Room(*kept, slots=kept[0].shape[2]) for kept in source],
    )
    return FirstToken(len(source[0][0]), 1, 0, 0, rooms, sources, None, source_mask)


def all_made(
    step: DecoderStep, ids: Tensor, states: Tensor, source_mask: Tensor | None
) -> list[Tensor]:
    """The logits (B, V) of first tokens ids (B,), and what the layers keep, of the text and of the source, in order."""
    source = source_of(step, states)
    text = room_of(step, len(states))
    logits = step(ids, first_token(text, source, source_mask))
    return [logits, *(kept for pair in (*text, *source) for kept in pair)]
