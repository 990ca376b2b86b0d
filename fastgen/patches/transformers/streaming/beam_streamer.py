"""Streamers in beam search, which transformers rejects.

A streamer receives tokens as soon as they are final: transformers' own `generate` sends the prompt,
and our decode loop sends the generated tokens (`decoding.batching.stable_prefix`). The patch of
`GenerationMixin._validate_generation_mode` also counts calls of decode loops that fastgen does not
replace.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import GENERATION_MODES_MAPPING

from fastgen.decoding.plan import Unsupported
from fastgen.patches.engine import engine
from fastgen.patches.transformers import compat
from fastgen.patches.transformers.generate.legacy_search import method_of
from fastgen.patches.transformers.generate.resolve_setting import setting_of
from fastgen.patches.transformers.planning.supported import check_call, check_model

_NAME = "transformers.beam_streamer"
_BEAMS = (GenerationMode.BEAM_SEARCH, GenerationMode.BEAM_SAMPLE)


class BeamStreamer(BaseStreamer):
    """Wrapper around a caller's streamer in a call with several beams; forwards all tokens.

    Attributes:
        streamer: The caller's streamer.
        beams: Number of beams M of the text that it follows; 0 until a beam search of ours accepts
            the streamer.
    """

    def __init__(self, streamer: Any) -> None:
        self.streamer, self.beams = streamer, 0

    def put(self, value: Tensor) -> None:
        """Forward tokens to the streamer.

        Args:
            value: Tokens (N,), or the prompt (B * M, P) with one row per beam, whose first row is
                forwarded.

        Raises:
            ValueError: The batch has several sentences.
        """
        if self.beams and value.dim() > 1:
            if value.shape[0] > self.beams:
                raise ValueError(
                    f"a streamer follows one text, and the batch has {value.shape[0] // self.beams}"
                )
            value = value[:1]
        self.streamer.put(value)

    def end(self) -> None:
        self.streamer.end()


def wrapped(model: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of `generate` with the streamer wrapped if there are several beams."""
    if kwargs.get("streamer") is None or (setting_of(model, kwargs, "num_beams") or 1) == 1:
        return kwargs
    return kwargs | {"streamer": BeamStreamer(kwargs["streamer"])}


def followed_by(model_kwargs: dict[str, Any]) -> BeamStreamer | None:
    """Return the streamer that our beam search accepted, from its loop's arguments, or None."""
    streamer = model_kwargs.get("streamer")
    return streamer if isinstance(streamer, BeamStreamer) and streamer.beams else None


def validate(
    original: Callable[..., None],
    self: Any,
    generation_mode: Any,
    generation_config: Any,
    generation_mode_kwargs: dict[str, Any],
) -> None:
    """Replace `GenerationMixin._validate_generation_mode`: accept a streamer in our beam search."""
    _note_other(self, generation_mode, generation_config)
    mode_kwargs = generation_mode_kwargs
    try:
        mode_kwargs = accepted(self, generation_mode, generation_config, mode_kwargs)
    except Unsupported as unsupported:
        engine.fallback(_NAME, unsupported.reason)
    original(self, generation_mode, generation_config, mode_kwargs)
    if mode_kwargs is not generation_mode_kwargs:
        engine.hit(_NAME)


def _note_other(model: Any, mode: Any, config: Any) -> None:
    """Count a fallback if the call runs a decode loop that fastgen does not replace."""
    if GENERATION_MODES_MAPPING.get(mode) in compat.LOOPS:
        return
    name = (
        "prompt lookup decoding"
        if config.prompt_lookup_num_tokens is not None
        else _NAMES.get(mode) or str(mode.value)
    )
    reason = f"{name} runs transformers' own loop"
    engine.fallback("transformers.generate", reason, (type(model).__name__, name))


_NAMES = {GenerationMode.ASSISTED_GENERATION: "assisted decoding"}


def accepted(model: Any, mode: Any, config: Any, mode_kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the mode's arguments for transformers to validate, without a streamer that we accept.

    Args:
        model: The model.
        mode: transformers' `GenerationMode`.
        config: Generation config of the call.
        mode_kwargs: Arguments of the mode, as transformers passes them to its validation.

    Raises:
        Unsupported: transformers' own beam search would run, with the reason.
        ValueError: `num_return_sequences` is greater than 1.
    """
    streamer = mode_kwargs.get("streamer")
    if mode not in _BEAMS or not isinstance(streamer, BeamStreamer):
        return mode_kwargs
    for name in (_NAME, "transformers.beam_search"):
        if not engine.is_applied(name):
            raise Unsupported(f"{name} is not in place")
    if compat.has_own(model, compat.BEAM_LOOP):
        raise Unsupported(f"{type(model).__name__} has a beam search of its own")
    if (method := method_of(config)) is not None:
        raise Unsupported(f"{method} tells nothing before its end")
    check_model(model)
    check_call(model, "beam", None, config, mode_kwargs)
    if config.num_return_sequences > 1:
        raise ValueError(
            "a streamer follows one text, and num_return_sequences is "
            f"{config.num_return_sequences}"
        )
    streamer.beams = config.num_beams
    return {name: value for name, value in mode_kwargs.items() if name != "streamer"}
