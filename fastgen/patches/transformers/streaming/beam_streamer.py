"""A streamer in beam search, which transformers refuses: it hears tokens as soon as they are certain.

The patch that validates a call's mode also counts calls of loops that nothing here replaces. transformers' own
`generate` calls the streamer with the prompt, and our loop with what follows (`decoding.batching.stable_prefix`).
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
from fastgen.patches.transformers.generate.decide import check_call, check_model
from fastgen.patches.transformers.generate.legacy_search import method_of
from fastgen.patches.transformers.generate.resolve_setting import said

_NAME = "transformers.beam_streamer"
_BEAMS = (GenerationMode.BEAM_SEARCH, GenerationMode.BEAM_SAMPLE)


class BeamStreamer(BaseStreamer):
    """Stands for a caller's streamer in a call with several beams; hands on what it hears.

    Attributes:
        beams: rows of the one text that it follows; 0 until `generate` has come to a beam search that takes it.
    """

    def __init__(self, streamer: Any) -> None:
        self.streamer, self.beams = streamer, 0

    def put(self, value: Tensor) -> None:
        """Hand tokens (N,) on; of the prompt (B * M, P), of which every beam has a row, the first row.

        Raises:
            ValueError: there are several sentences.
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
    """The arguments of `generate`, with a streamer that a beam search takes."""
    if kwargs.get("streamer") is None or (said(model, kwargs, "num_beams") or 1) == 1:
        return kwargs
    return kwargs | {"streamer": BeamStreamer(kwargs["streamer"])}


def followed_by(model_kwargs: dict[str, Any]) -> BeamStreamer | None:
    """The streamer that follows a beam search, from what `generate` hands to its loop."""
    streamer = model_kwargs.get("streamer")
    return streamer if isinstance(streamer, BeamStreamer) and streamer.beams else None


def validate(
    original: Callable[..., None],
    self: Any,
    generation_mode: Any,
    generation_config: Any,
    generation_mode_kwargs: dict[str, Any],
) -> None:
    """`GenerationMixin._validate_generation_mode`, which takes a streamer where our beam search runs."""
    _note_other(self, generation_mode, generation_config)
    given = generation_mode_kwargs
    try:
        given = accepted(self, generation_mode, generation_config, given)
    except Unsupported as unsupported:
        engine.fallback(_NAME, unsupported.reason)
    original(self, generation_mode, generation_config, given)
    if given is not generation_mode_kwargs:
        engine.hit(_NAME)


def _note_other(model: Any, mode: Any, config: Any) -> None:
    """Count a call that comes to a decoding loop which nothing here replaces."""
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
    """What transformers is to look at: the arguments of a mode, without a streamer that follows a beam search.

    Raises:
        Unsupported: the beam search is transformers' own, with the reason.
        ValueError: several sequences are to be returned.
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
            f"a streamer follows one text, and num_return_sequences is {config.num_return_sequences}"
        )
    streamer.beams = config.num_beams
    return {name: value for name, value in mode_kwargs.items() if name != "streamer"}
