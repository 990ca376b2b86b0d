"""The first layers of a decoder as a decoder of its own, with the same embeddings and head.

It has no weights, keys or values but those of the whole.

Source: Kim et al. 2023 (BiLD), section 4.4.
"""

from dataclasses import replace

from fastgen.models.runtime.decode_step import DecoderStep
from fastgen.models.runtime.native_step import together


def early_exit(step: DecoderStep, layers: int) -> DecoderStep:
    """Return the step of the first layers; what the head reads is normed as behind the last layer of all.

    Raises:
        ValueError: there are not more than so many layers.
    """
    check_exit(layers, 1 + max(sublayer.layer for sublayer in step.sublayers))
    first = [sublayer for sublayer in step.sublayers if sublayer.layer < layers]
    if step.first is not None:  # norms come first: that behind the last layer is the decoder's own
        first[-1] = replace(first[-1], norm=step.sublayers[-1].norm)
    return replace(step, sublayers=first, together=together(first, step.first is not None))


def check_exit(layers: int, count: int) -> None:
    """Raise ValueError where the first `layers` are not some of `count`, and less than all."""
    if not 1 <= layers < count:
        raise ValueError(
            f"an exit behind layer {layers} of a decoder of {count}: it must be one of 1 to {count - 1}"
        )
