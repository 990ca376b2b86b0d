"""The fused first token of encoder-decoder models, including the cross-attention keys and values.

Running it through the model's modules takes up to twice as long, which matters in short calls. A
model that has not been compared yet runs its first token through its own forward, which is then
compared with the fused one (`models.build.equivalence_check`).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from fastgen.models.layers.linear import Product
from fastgen.models.layers.positions import AttentionBias
from fastgen.models.runtime.decode_step import DecoderStep
from fastgen.models.runtime.step_inputs import CallStepInputs, Scoring
from fastgen.models.runtime.sublayers import CrossAttention, SelfAttention
from fastgen.ops.rotation import Rotation, rotated

KeysValues = tuple[Tensor, Tensor]
"""Keys and values (B, Hkv, N, D) of one layer."""


def supported(step: DecoderStep) -> bool:
    """Return whether the first token of a decoder can run as a fused step."""
    mixers = [sublayer.mixer for sublayer in step.sublayers]
    sources = [mixer for mixer in mixers if isinstance(mixer, CrossAttention)]
    return (
        type(step) is DecoderStep
        and bool(sources)
        and all(mixer.kv_projections is not None for mixer in sources)
        and sum(type(mixer) is SelfAttention for mixer in mixers) == len(sources)
    )


def source_of(step: DecoderStep, states: Tensor) -> list[KeysValues]:
    """Compute the cross-attention keys and values of each layer from encoder states (B, S, C)."""
    sentences, length = states.shape[:2]
    rows = states.reshape(sentences * length, -1)

    def made(product: Product, dims: int) -> Tensor:
        return product.apply(rows).view(sentences, length, -1, dims).transpose(1, 2)

    mixers = (sublayer.mixer for sublayer in step.sublayers)
    layers = (
        (mixer.kv_projections, mixer.dims) for mixer in mixers if isinstance(mixer, CrossAttention)
    )
    return [
        (made(makers[0], dims), made(makers[1], dims))
        for makers, dims in layers
        if makers is not None
    ]


def room_of(step: DecoderStep, texts: int) -> list[KeysValues]:
    """Allocate the self-attention keys and values of the first token of each layer."""
    mixers = (sublayer.mixer for sublayer in step.sublayers)
    shapes = ((mixer.key_heads, mixer.dims) for mixer in mixers if isinstance(mixer, SelfAttention))
    make = step.embedding.tokens.new_zeros
    return [(make(texts, heads, 1, dims), make(texts, heads, 1, dims)) for heads, dims in shapes]


@dataclass
class PreallocatedLayer:
    """A cache layer over preallocated keys and values.

    Attributes:
        keys: (B, Hkv, N, D).
        values: (B, Hkv, N, D).
        slots: Number of slots that are filled.
        beams: Beams per sentence.
        begun: Whether the buffers are allocated, as in `LayerKV`.
        common: None: no keys and values are stored once for all sentences, as `LayerKV` may do.
    """

    keys: Tensor
    values: Tensor
    slots: int = 0
    beams: int = 1
    begun: bool = True
    common: None = None

    @property
    def capacity_buffers(self) -> KeysValues:
        return self.keys, self.values

    @property
    def own(self) -> KeysValues:
        return self.capacity_buffers

    def ensure_capacity(self) -> None:
        """Do nothing: there is room for the only token."""

    def note_step(self) -> None:
        self.slots += 1

    def append(self, keys: Tensor, values: Tensor) -> None:
        self.keys.copy_(keys)
        self.values.copy_(values)
        self.note_step()

    def reserve(self, keys: Tensor, values: Tensor) -> None:
        self.note_step()

    def append_rotated(
        self, query: Tensor, key: Tensor, value: Tensor, rotation: Rotation
    ) -> Tensor:
        self.append(rotated(key, rotation)[:, :, None], value[:, :, None])
        return rotated(query, rotation)


class FirstTokenInputs(CallStepInputs):
    """Inputs of a step on the first token of B texts, which attends to itself only."""

    def text_mask_with(self, bias: AttentionBias | None) -> None:
        """Return None: a single key has weight 1, whatever its score."""

    def self_attention(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scoring: Scoring,
        rotation: Rotation | None = None,
    ) -> Tensor:
        if rotation is None:
            self.text[layer].append(key[:, :, None], value[:, :, None])
        else:
            self.text[layer].append_rotated(query, key, value, rotation)
        # The only key has weight 1.
        return value.repeat_interleave(query.shape[1] // value.shape[1], 1).flatten(1)


def first_token(
    text: Sequence[KeysValues], source: Sequence[KeysValues], source_mask: Tensor | None
) -> FirstTokenInputs:
    """Return the inputs of a step on the first token.

    Args:
        text: Buffers for the self-attention keys and values of each layer, (B, Hkv, 1, D).
        source: Cross-attention keys and values of each layer.
        source_mask: Additive mask of the source (B, 1, 1, S); None if everything is visible.
    """
    rooms, sources = (
        [PreallocatedLayer(*kept) for kept in text],
        [PreallocatedLayer(*kept, slots=kept[0].shape[2]) for kept in source],
    )
    return FirstTokenInputs(len(source[0][0]), 1, 0, 0, rooms, sources, None, source_mask)


def all_made(
    step: DecoderStep, ids: Tensor, states: Tensor, source_mask: Tensor | None
) -> list[Tensor]:
    """Run the first token, including the keys and values of the source.

    Args:
        step: Fused decode step of the decoder.
        ids: (B,) int64, the first tokens.
        states: Encoder output (B, S, C).
        source_mask: Additive mask of the source (B, 1, 1, S); None if everything is visible.

    Returns:
        The logits (B, V), then keys and values of each layer: self-attention, then cross-attention.
    """
    source = source_of(step, states)
    text = room_of(step, len(states))
    logits = step(ids, first_token(text, source, source_mask))
    return [logits, *(kept for pair in (*text, *source) for kept in pair)]
