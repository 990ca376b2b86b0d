"""The first token of texts that have a source: made from the weights too, keys and values of the source included.

Through the modules that takes up to twice as long, which a short call notices. A model whose first token has not been
compared runs it through its own forward, and is compared then (`models.proof`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from fastgen.models.linear import Product
from fastgen.models.positions import Bias, Rotary, turned_once
from fastgen.models.step import DecoderStep, SourceAttention, TextAttention
from fastgen.ops.beam_attention import beam_attention

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
    return [(made(makers[0], dims), made(makers[1], dims)) for makers, dims in found if makers is not None]


def room_of(step: DecoderStep, texts: int) -> list[Kept]:
    """Each layer's keys and values of first tokens that have yet to be run."""
    mixes = (sublayer.mix for sublayer in step.sublayers)
    found = ((mix.key_heads, mix.dims) for mix in mixes if isinstance(mix, TextAttention))
    rooms = (step.embedding.tokens.new_zeros(texts, heads, 1, dims) for heads, dims in found)
    return [(room, room) for room in rooms]


@dataclass
class FirstToken:
    """`Surroundings` of the first token of B texts, which is all that there is to see of them.

    Attributes:
        source: keys and values of each layer.
        source_mask: additive, (B, 1, 1, S); None where all is seen.
        keep: gets the keys and values (B, Hkv, 1, D) that each layer makes, by the layer's index.
    """

    source: Sequence[Kept]
    source_mask: Tensor | None
    keep: Callable[[int, Tensor, Tensor], object]
    position: int = 0
    rotations: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict[int, tuple[Tensor, Tensor]])

    def rotation(self, rotary: Rotary, x: Tensor) -> tuple[Tensor, Tensor]:
        return turned_once(self.rotations, rotary, self.position, x)

    def over_text(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, bias: Bias | None, scale: float,
        softcap: float | None,
    ) -> Tensor:  # fmt: skip
        self.keep(layer, key[:, :, None], value[:, :, None])
        return value.repeat_interleave(query.shape[1] // value.shape[1], 1).flatten(1)  # which has all the weight

    def over_source(self, layer: int, query: Tensor, scale: float) -> Tensor:
        keys, values = self.source[layer]
        return beam_attention(query[:, None], keys, values, self.source_mask, scale).flatten(1)


def all_made(step: DecoderStep, ids: Tensor, states: Tensor, source_mask: Tensor | None) -> list[Tensor]:
    """The logits (B, V) of first tokens ids (B,), and what the layers keep, of the text and of the source, in order."""
    text: list[Tensor] = []
    source = source_of(step, states)
    logits = step(ids, FirstToken(source, source_mask, lambda _, *kept: text.extend(kept)))
    return [logits, *text, *(kept for pair in source for kept in pair)]
