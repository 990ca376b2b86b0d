"""Early exit: the first layers of a decoder as a decoder of their own.

It shares the embeddings, head, weights and KV cache of the full decoder.

Source: Kim et al. 2023 (BiLD), section 4.4.
"""

from dataclasses import replace

from fastgen.models.runtime.decode_step import DecoderStep
from fastgen.models.runtime.native.step import native_step


def early_exit(step: DecoderStep, layers: int) -> DecoderStep:
    """Return the decode step of the first layers, with the final norm and head of the full decoder.

    Args:
        step: Decode step of the full decoder.
        layers: Number of layers to run.

    Raises:
        ValueError: `layers` is less than 1, or not less than the number of layers.
    """
    check_exit(layers, 1 + max(sublayer.layer for sublayer in step.sublayers))
    first = [sublayer for sublayer in step.sublayers if sublayer.layer < layers]
    if step.first is not None:  # In a pre-norm model the last norm is the decoder's final norm.
        first[-1] = replace(first[-1], norm=step.sublayers[-1].norm)
    return replace(step, sublayers=first, run_layers=native_step(first, step.first is not None))


def check_exit(layers: int, count: int) -> None:
    """Raise ValueError unless 1 <= layers < count, where `count` is the number of layers."""
    if not 1 <= layers < count:
        raise ValueError(
            f"an exit behind layer {layers} of a decoder of {count}: "
            f"it must be one of 1 to {count - 1}"
        )
