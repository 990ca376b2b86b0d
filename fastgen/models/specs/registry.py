"""The tables of supported architectures."""

from typing import Any

from fastgen.models.specs.combined import combined_spec
from fastgen.models.specs.decoder_only import DECODER_ONLY
from fastgen.models.specs.encoder_decoder import ENCODER_DECODER
from fastgen.models.specs.encoder_only import ENCODER_ONLY
from fastgen.models.specs.model_spec import ModelSpec, Stack

SPECS: dict[str, ModelSpec] = {**ENCODER_DECODER, **DECODER_ONLY}
"""Specs of models that generate, by the `model_type` of a transformers config.

A model type is in it once its decode steps are verified.
"""

ENCODERS: dict[str, Stack] = {
    **{name: spec.encoder for name, spec in SPECS.items() if spec.encoder is not None},
    **ENCODER_ONLY,
}
"""Specs of encoders, by `model_type`."""


def spec_of(config: Any) -> ModelSpec | None:
    """Return the spec of a model by its config; None for an unsupported one."""
    spec = SPECS.get(getattr(config, "model_type", ""))
    if spec is None:
        return combined_spec(config)
    return spec if spec.variant is None else spec.variant(spec, config)
