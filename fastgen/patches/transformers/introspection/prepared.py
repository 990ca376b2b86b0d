"""Arguments that `generate` passes to its decode loop, found without running the model.

transformers' own `generate` prepares the call on a probe: a copy of the model object that shares
all attributes with the model. The decode loops of the probe capture their arguments, and its
encoder returns placeholder outputs. If `generate` runs its loop several times, the first one
counts.
"""

import contextlib
import copy
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Literal, NoReturn, cast

import torch
from torch import Tensor
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import GENERATION_MODES_MAPPING, GenerationMixin
from transformers.modeling_outputs import BaseModelOutput

from fastgen.decoding.plan import Unsupported
from fastgen.models.build.introspection import is_toolkits
from fastgen.models.specs.registry import spec_of
from fastgen.patches.engine import engine
from fastgen.patches.transformers import compat
from fastgen.patches.transformers.drafting import prompt_lookup
from fastgen.patches.transformers.generate import legacy_loops, legacy_search
from fastgen.patches.transformers.generate.loop_call import Call
from fastgen.patches.transformers.generate.resolve_setting import Settings
from fastgen.patches.transformers.generate.stopping_criteria import normalized_config
from fastgen.patches.transformers.planning.decide import rows_of
from fastgen.patches.transformers.planning.supported import check_model
from fastgen.patches.transformers.streaming import beam_streamer


@dataclass
class Prepared:
    """The arguments that `generate` passes to one of its decode loops."""

    loop: Literal["beam", "sample"]
    input_ids: Tensor
    logits_processor: Any
    stopping_criteria: Any
    config: Any
    kwargs: dict[str, Any]

    @property
    def sentences(self) -> int:
        return self.input_ids.shape[0] // rows_of(self.loop, self.config)


def without_wrappers(model: Any) -> Any:
    """Return the model inside wrappers of PEFT and torch.compile."""
    model = getattr(model, "_orig_mod", model)
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def prepare(bare: Any, model: Any, kwargs: dict[str, Any]) -> Prepared:
    """Let `generate` prepare a call, and return the arguments of its decode loop.

    Args:
        bare: The model without wrappers.
        model: The model, possibly wrapped.
        kwargs: Arguments of `generate`.

    Raises:
        Unsupported: The call would not reach a decode loop that fastgen patches.
    """
    # Legacy methods support any model, or report themselves why they do not.
    if legacy_search.method_of(Settings(model, kwargs)) is None:
        check_model(bare)
    generate = cast(Any, type(bare)).generate
    if generate is not _MIXIN.generate and not generates_segments(bare):
        raise Unsupported(f"{type(bare).__name__} has a generate of its own")
    if kwargs.get("custom_generate") is not None:
        raise Unsupported("custom_generate is given")
    if kwargs.get("cache_implementation") == "paged":
        raise Unsupported("cache_implementation='paged'")
    attention = compat.attention_of(bare.config)
    try:
        with engine.disabled():
            generate(_probe(bare, model.generation_config), **_arguments_of(model, kwargs))
    except _Reached as reached:
        return reached.prepared
    finally:  # undo a change of attention by the model's own `generate`
        if compat.attention_of(bare.config) != attention:
            compat.set_attention(bare.config, attention)
    raise Unsupported(f"the generate of {type(bare).__name__} comes to no loop")


def generates_segments(bare: Any) -> bool:
    """Return whether the model class has a `generate` of its own that decodes segment by segment.

    It must be transformers' code, and calls `GenerationMixin.generate` for each segment.
    """
    spec = spec_of(bare.config)
    generate = cast(Any, type(bare)).generate
    return (
        spec is not None
        and spec.generates_segments
        and generate is not _MIXIN.generate
        and is_toolkits(generate)
    )


def _arguments_of(model: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Copy the arguments that `generate` modifies, drop PEFT's, and silence the streamer."""
    kwargs = {
        name: value
        for name, value in kwargs.items()
        if name not in getattr(model, "special_peft_forward_args", ())
    }
    for name in ("encoder_outputs", *compat.CACHE_ARGUMENTS):  # `generate` modifies these in place
        if kwargs.get(name) is not None:
            kwargs[name] = copy.copy(kwargs[name])
    if kwargs.get("streamer") is not None:
        kwargs["streamer"] = beam_streamer.BeamStreamer(_Silent())
    return kwargs


def _probe(model: Any, generation_config: Any) -> Any:
    """Return a copy of the model that shares its attributes; `generate` runs no decoder on it."""

    def get_encoder(_: Any, *args: Any, **kwargs: Any) -> _Encoder:
        return _Encoder(model.get_encoder(*args, **kwargs))

    def validate(_: Any, mode: Any, config: Any, mode_kwargs: dict[str, Any]) -> None:
        mode = legacy_search.MODES.get(mode, mode)
        with contextlib.suppress(Unsupported):  # transformers' own check then rejects it
            mode_kwargs = beam_streamer.accepted(model, mode, config, mode_kwargs)
        getattr(model, compat.VALIDATE)(mode, config, mode_kwargs)

    kind = cast(Any, type(model))
    methods: dict[str, Any] = {
        name: _loop(name)
        for name in GENERATION_MODES_MAPPING.values()
        if name in _LOOPS or not _is_repository(name)
    }
    methods |= {
        "__module__": kind.__module__,
        "get_encoder": get_encoder,
        compat.VALIDATE: validate,
        "detect_language": _any_language,
        "load_custom_generate": _load_custom_generate,
        compat.REPOSITORY: _repository,
        # The originals compute image features, extend the prompt by generating, and allocate the
        # memory of a static cache.
        compat.ENCODE_IMAGES: _without_images,
        "heal_tokens": _as_they_are,
        compat.STATIC_CACHE_SHAPE: _unknown_shape,
    }
    probe: Any = object.__new__(type(kind.__name__, (kind,), methods))
    probe.__dict__ = vars(model) | {"generation_config": generation_config}
    return probe


def _is_repository(method: str) -> bool:
    return "/" in method


class _Reached(Exception):
    """Raised by the probe's decode loops with the captured arguments."""

    def __init__(self, prepared: Prepared) -> None:
        self.prepared = prepared


def _loop(name: str) -> Callable[..., NoReturn]:
    """Return a function that replaces a decode loop and raises `_Reached`."""

    def prepared(
        self: Any,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        synced_gpus: bool = False,
        streamer: Any = None,
        **kwargs: Any,
    ) -> NoReturn:
        loop = _LOOPS.get(name)
        if loop is None and prompt_lookup.is_served(
            self, generation_config, GenerationMode.ASSISTED_GENERATION, kwargs.get(_ASSISTANT)
        ):
            kwargs.pop("inputs_tensor", None)
            loop = "sample"
        if loop is None:
            raise Unsupported(f"{name} is not patched")
        legacy_search.check(generation_config)
        if legacy_search.method_of(generation_config) == "contrastive search":
            others = logits_processor, stopping_criteria, generation_config, synced_gpus, kwargs
            widened = legacy_loops.widened(Call(self, input_ids, *others))
            input_ids, kwargs = widened.input_ids, widened.model_kwargs
        kwargs |= {"synced_gpus": synced_gpus, "streamer": streamer}
        config = normalized_config(loop, generation_config, stopping_criteria)
        raise _Reached(
            Prepared(loop, input_ids, logits_processor, stopping_criteria, config, kwargs)
        )

    return prepared


_ASSISTANT = "assistant_model"

# The annotations of its methods fit no model class of transformers.
_MIXIN: Any = GenerationMixin

# The legacy modes keep their own loop names, because nothing is patched on the probe.
_LOOPS: dict[str, Literal["beam", "sample"]] = {
    **compat.LOOPS,
    **{
        GENERATION_MODES_MAPPING[mode]: compat.LOOPS[GENERATION_MODES_MAPPING[loop_mode]]
        for mode, loop_mode in legacy_search.MODES.items()
    },
}


def _repository(self: Any, mode: Any, *args: Any) -> str | None:
    return (
        None
        if mode in legacy_search.MODES
        else getattr(_MIXIN, compat.REPOSITORY)(self, mode, *args)
    )


def _load_custom_generate(self: Any, repository: str, *args: Any, **kwargs: Any) -> Any:
    raise Unsupported(f"{repository} runs a loop of its own")


def _without_images(self: Any, model_kwargs: dict[str, Any]) -> dict[str, Any]:
    has_images = any(name.startswith(("pixel_values", "image_patches")) for name in model_kwargs)
    model_kwargs.setdefault(
        "mm_encoder_outputs", {"image": SimpleNamespace()} if has_images else {}
    )
    for modality in ("image", "video"):  # drop the inputs of these encoders, as transformers does
        encode = getattr(self.base_model, f"get_{modality}_features", None)
        for name in () if encode is None else inspect.signature(encode).parameters:
            model_kwargs.pop(name, None)
    return model_kwargs


def _any_language(self: Any, generation_config: Any, **inputs: Any) -> Tensor:
    """Return the first language for each text, without running the model."""
    texts: Any = next(
        value for value in inputs.values() if value is not None and not isinstance(value, int)
    )
    rows = len(texts if isinstance(texts, Tensor) else texts[0])
    return torch.full(
        (rows,), next(iter(generation_config.lang_to_id.values())), dtype=torch.int64, device="cpu"
    )


def _as_they_are(self: Any, input_ids: Tensor, *args: Any) -> Tensor:
    return input_ids


def _unknown_shape(self: Any) -> None:
    return None


class _Silent(BaseStreamer):
    """Stand-in for the user's streamer, which must receive nothing: the call does not run."""

    def put(self, value: Tensor) -> None: ...

    def end(self) -> None: ...


class _Encoder:
    """Stand-in for an encoder whose outputs have the right length and take no memory.

    An encoder of images or sound runs on one row, as its config does not tell the length.
    """

    def __init__(self, encoder: Any) -> None:
        self.encoder = encoder
        self.forward = encoder.forward  # for its signature
        self._hf_hook = SimpleNamespace()  # accelerate sets an attribute on it

    def __call__(self, **inputs: Any) -> BaseModelOutput:
        names = ("input_features", "inputs_embeds", "input_ids", "pixel_values", "input_values")
        name = next(name for name in names if inputs.get(name) is not None)
        rows, length = inputs[name].shape[:2]
        positions = getattr(self.encoder.config, "max_source_positions", None)
        if name == "input_features" and positions is not None:  # all segments have one length
            length = positions
        elif name not in ("inputs_embeds", "input_ids"):  # one row shows the length
            first = {key: x[:1] if isinstance(x, Tensor) else x for key, x in inputs.items()}
            length = self.encoder(**first)[0].shape[1]
        hidden = torch.empty(rows, length, 1, device="meta", dtype=torch.float32)
        return BaseModelOutput(last_hidden_state=cast(Any, hidden))
