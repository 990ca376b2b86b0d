"""The installed transformers: every private name of it that fastgen uses, and what its releases have changed.

A release that renames or reorders something is one more entry of `RELEASES`. No other module under
`patches/transformers` uses a private name of transformers or asks for its version, which `test_compat.py` checks;
the records in `__init__.py` name their targets, whose signatures are checked when they are patched.
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

import transformers
from packaging.version import Version
from torch import Tensor
from transformers import GenerationMixin
from transformers.utils import output_capturing


@dataclass(frozen=True)
class Release:
    """How a release of transformers, and those after it, do what others do differently.

    Attributes:
        since: the first release that does so.
        cache: what the KV cache is called among the arguments of `forward` and `generate`, and in their outputs.
        ranks_drawn_beams: whether beam sampling sorts the candidates that it has drawn, best first.
        bias_reaches_start: whether a bias (or ban) of several tokens also applies to a text of just the tokens before
            the last one; else only to a longer text.
        penalty_skips_padding: whether `repetition_penalty` leaves out the padding before a prompt.
    """

    since: str
    cache: str = "past_key_values"
    ranks_drawn_beams: bool = False
    bias_reaches_start: bool = False
    penalty_skips_padding: bool = False


_5_17 = Release("5.17")
_5_23 = replace(_5_17, since="5.23", bias_reaches_start=True, penalty_skips_padding=True)
_5_24 = replace(_5_23, since="5.24", cache="cache", ranks_drawn_beams=True)
RELEASES = (_5_17, _5_23, _5_24)
"""One entry for each release that changed something, oldest first."""


def release_of(version: str) -> Release:
    """Return the newest entry that a version has reached; a development version counts as the release it leads to.

    Raises:
        ValueError: the version is older than all entries.
    """
    found = [
        release
        for release in RELEASES
        if Version(version).release >= Version(release.since).release
    ]
    if not found:
        raise ValueError(
            f"transformers {version} is older than {RELEASES[0].since}, the oldest that is supported"
        )
    return found[-1]


INSTALLED = release_of(transformers.__version__)

# ---- the KV cache: arguments and outputs ----

CACHE = INSTALLED.cache
"""What the KV cache is called among the arguments of a forward and in the outputs of forwards and of `generate`."""

CACHE_ARGUMENTS = frozenset({CACHE, "past_key_values", "cache_params"})
"""The names under which `generate` takes a KV cache: its own, and older ones that it renames."""


def cache_of(arguments: Any) -> Any:
    """Return the KV cache among the arguments of a forward, or in an output; None where there is none."""
    return arguments.get(CACHE)


def is_user_provided(cache: Any) -> bool:
    """Whether a cache comes from the caller of `generate`, which marks it so."""
    return getattr(cache, "_is_user_defined", False)


# ---- a generation config, prepared ----


def eos_tokens(config: Any) -> Any:
    """Return the tokens (N,) int64 that end a text, of a config that `generate` has prepared, or None."""
    return config._eos_token_tensor


def pad_token(config: Any) -> Any:
    """Return the padding token () int64 of a config that `generate` has prepared, or None."""
    return config._pad_token_tensor


def length_of_mask(config: Any) -> int:
    """Return the length of the mask that `generate` made where the caller gave none; -1 where it made none."""
    return getattr(config, "_mask_length", -1)


def prepare_config(model: Any, config: Any, options: dict[str, Any]) -> Any:
    """Return the generation config of a call that is given a config, or None, and options."""
    return model._prepare_generation_config(config, **options)[0]


def compiles_everywhere(config: Any) -> bool:
    """Whether a generation config asks to compile the forward on a CPU too."""
    return getattr(config.compile_config, "_compile_all_devices", False)


# ---- what the decoding loops call of a model ----

BEAM_LOOP, SAMPLE_LOOP = "_beam_search", "_sample"
LOOPS: dict[str, Literal["beam", "sample"]] = {BEAM_LOOP: "beam", SAMPLE_LOOP: "sample"}
"""The methods of `GenerationMixin` that are patched decoding loops."""

CALLED_BY_LOOP = {
    "sample": ("_prefill", "_has_unfinished_sequences"),
    "beam": (
        "_prefill", "_get_top_k_continuations", "_get_running_beams_for_next_iteration", "_update_finished_beams",
        "_check_early_stop_heuristic", "_beam_search_has_unfinished_sequences",
    ),
}  # fmt: skip
"""The methods that transformers' loops call and the loops here do not, or not as often."""

STEP_METHODS = ("prepare_inputs_for_generation", "_update_model_kwargs_for_generation")
"""The methods that make the arguments of a decode step."""


def prefill(model: Any, input_ids: Tensor, config: Any, arguments: dict[str, Any]) -> Any:
    """Run the prompt through the model, in chunks where the config says so; return the outputs of its forward."""
    return model._prefill(input_ids, config, arguments, is_first_iteration=True)


def arguments_of_next(model: Any, outputs: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of the forward behind the one that gave `outputs`."""
    return model._update_model_kwargs_for_generation(
        outputs, arguments, is_encoder_decoder=model.config.is_encoder_decoder
    )


def expand(
    model: Any, rows: int, input_ids: Tensor, arguments: dict[str, Any]
) -> tuple[Tensor, dict[str, Any]]:
    """Return token ids and arguments with so many rows in the place of each."""
    return model._expand_inputs_for_generation(
        rows, model.config.is_encoder_decoder, input_ids, **arguments
    )


def decode_context(model: Any) -> AbstractContextManager[Any]:
    """Return the context in which transformers runs decode steps."""
    return getattr(model, "_optimize_model_for_decode", nullcontext)()


def warn_of_compilation(model: Any, config: Any, arguments: dict[str, Any]) -> None:
    """Have transformers say that nothing is compiled, where a call asks for it."""
    if config.compile_config is not None:
        model._valid_auto_compile_criteria(arguments, config)


# ---- what a model is ----


def has_own(model: Any, name: str) -> bool:
    """Whether a model's class overrides a method of `GenerationMixin`, which may be gone in a newer release."""
    return getattr(cast(Any, type(model)), name, None) is not getattr(GenerationMixin, name, None)


def reorders_its_cache(model: Any) -> bool:
    """Whether a model has code of its own that puts its cache in the order of the beams."""
    return hasattr(model, "_reorder_cache")


def has_states(model: Any) -> bool:
    """Whether a model keeps anything but keys and values between steps."""
    return getattr(model, "_is_stateful", False) or not model._supports_default_dynamic_cache()


def attention_of(config: Any) -> str:
    """Return the name of a model's attention function."""
    return config._attn_implementation


def set_attention(config: Any, name: str) -> None:
    """Set the name of a model's attention function, without loading anything."""
    config._attn_implementation = name


def collects_outputs() -> bool:
    """Whether hidden states or attentions of the modules that run are being collected."""
    return bool(cast(Any, output_capturing)._active_collector.get())


# ---- a model object on which `generate` prepares a call and runs nothing ----

VALIDATE = "_validate_generation_mode"
REPOSITORY = "_get_deprecated_gen_repo"
ENCODE_IMAGES = "_prepare_multimodal_encoder_kwargs_for_generation"
STATIC_CACHE_SHAPE = "_get_static_cache_init_shape"
"""The methods of a model that are replaced then."""
