"""Compatibility layer: private names of transformers, and differences between its releases.

A release that renames or reorders something becomes one more entry of `RELEASES`. No other module
under `patches/transformers` uses a private name of transformers or checks its version;
`test_compat.py` enforces this. The exception is the patch table in `__init__.py`: it names the
patch targets, and the engine checks their signatures when it patches them.
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
    """Behaviour of transformers from one release on.

    Attributes:
        since: First release that behaves this way.
        cache: Name of the KV cache in the arguments of `forward` and `generate` and in their
            outputs.
        ranks_drawn_beams: Whether beam sampling sorts the drawn candidates, best first.
        bias_reaches_start: Whether a bias (or ban) of n tokens already applies to a text of n - 1
            tokens. Otherwise the text must be longer.
        penalty_skips_padding: Whether `repetition_penalty` ignores the padding before a prompt.
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
"""One entry per release that changed something, oldest first."""


def release_of(version: str) -> Release:
    """Return the newest entry that applies to a version.

    A development version counts as the release that it leads to.

    Raises:
        ValueError: The version is older than every entry.
    """
    reached = [
        release
        for release in RELEASES
        if Version(version).release >= Version(release.since).release
    ]
    if not reached:
        raise ValueError(
            f"transformers {version} is older than {RELEASES[0].since}, "
            "the oldest that is supported"
        )
    return reached[-1]


INSTALLED = release_of(transformers.__version__)

# The KV cache in arguments and outputs.

CACHE = INSTALLED.cache
"""Name of the KV cache in the arguments of `forward` and in outputs."""

CACHE_ARGUMENTS = frozenset({CACHE, "past_key_values", "cache_params"})
"""Names under which `generate` accepts a KV cache: the current one, and older ones it renames."""


def cache_of(arguments: Any) -> Any:
    """Return the KV cache from forward arguments or from an output; None if there is none."""
    return arguments.get(CACHE)


def is_user_provided(cache: Any) -> bool:
    """Return whether the caller of `generate` provided a cache; `generate` marks such caches."""
    return getattr(cache, "_is_user_defined", False)


# Generation configs.


def eos_tokens(config: Any) -> Any:
    """Return the eos tokens (N,) int64 of a config that `generate` has prepared, or None."""
    return config._eos_token_tensor


def pad_token(config: Any) -> Any:
    """Return the padding token () int64 of a config that `generate` has prepared, or None."""
    return config._pad_token_tensor


def length_of_mask(config: Any) -> int:
    """Return the length of the mask that `generate` made by default; -1 if it made none."""
    return getattr(config, "_mask_length", -1)


def prepare_config(model: Any, config: Any, options: dict[str, Any]) -> Any:
    """Return the generation config of a call.

    Args:
        config: The generation config passed to `generate`, or None.
        options: The keyword arguments passed to `generate`.
    """
    return model._prepare_generation_config(config, **options)[0]


def compiles_everywhere(config: Any) -> bool:
    """Return whether a generation config asks to compile the forward on CPUs too."""
    return getattr(config.compile_config, "_compile_all_devices", False)


# Model methods that the decoding loops call.

BEAM_LOOP, SAMPLE_LOOP = "_beam_search", "_sample"
LOOPS: dict[str, Literal["beam", "sample"]] = {BEAM_LOOP: "beam", SAMPLE_LOOP: "sample"}
"""Decoding loops of `GenerationMixin` that fastgen patches, by method name."""

CALLED_BY_LOOP = {
    "sample": ("_prefill", "_has_unfinished_sequences"),
    "beam": (
        "_prefill", "_get_top_k_continuations", "_get_running_beams_for_next_iteration",
        "_update_finished_beams", "_check_early_stop_heuristic",
        "_beam_search_has_unfinished_sequences",
    ),
}  # fmt: skip
"""Methods that transformers' loops call and fastgen's loops call less often or never."""

STEP_METHODS = ("prepare_inputs_for_generation", "_update_model_kwargs_for_generation")
"""Methods that make the arguments of a decode step."""


def prefill(model: Any, input_ids: Tensor, config: Any, arguments: dict[str, Any]) -> Any:
    """Run prefill, in chunks if the config says so, and return the outputs of the forward."""
    return model._prefill(input_ids, config, arguments, is_first_iteration=True)


def arguments_of_next(model: Any, outputs: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of the forward that follows the one that returned `outputs`."""
    return model._update_model_kwargs_for_generation(
        outputs, arguments, is_encoder_decoder=model.config.is_encoder_decoder
    )


def expand(
    model: Any, rows: int, input_ids: Tensor, arguments: dict[str, Any]
) -> tuple[Tensor, dict[str, Any]]:
    """Return token ids and arguments with every row repeated `rows` times."""
    return model._expand_inputs_for_generation(
        rows, model.config.is_encoder_decoder, input_ids, **arguments
    )


def decode_context(model: Any) -> AbstractContextManager[Any]:
    """Return the context manager in which transformers runs decode steps."""
    return getattr(model, "_optimize_model_for_decode", nullcontext)()


def warn_of_compilation(model: Any, config: Any, arguments: dict[str, Any]) -> None:
    """Have transformers log that nothing is compiled, if a call asks for compilation."""
    if config.compile_config is not None:
        model._valid_auto_compile_criteria(arguments, config)


# Properties of a model.


def has_own(model: Any, name: str) -> bool:
    """Return whether a model's class overrides a method of `GenerationMixin`.

    A newer release may have removed the method.
    """
    return getattr(cast(Any, type(model)), name, None) is not getattr(GenerationMixin, name, None)


def reorders_its_cache(model: Any) -> bool:
    """Return whether a model has its own code to reorder the cache by beams."""
    return hasattr(model, "_reorder_cache")


def has_states(model: Any) -> bool:
    """Return whether a model keeps state other than keys and values between steps."""
    return getattr(model, "_is_stateful", False) or not model._supports_default_dynamic_cache()


def attention_of(config: Any) -> str:
    """Return the name of the attention function in a model config."""
    return config._attn_implementation


def set_attention(config: Any, name: str) -> None:
    """Set the name of the attention function in a model config, without loading anything."""
    config._attn_implementation = name


def is_paged(model: Any) -> bool:
    """Return whether a model's attention is set to one that needs a paged KV cache."""
    return attention_of(model.config).startswith("paged|")


def is_tensor_parallel(model: Any) -> bool:
    """Return whether a model is distributed over a mesh of devices."""
    return getattr(model, "_device_mesh", None) is not None


def serves_batches(state: Any) -> bool:
    """Return whether a `GenerationState` of `transformers serve` uses continuous batching."""
    return bool(state._continuous_batching)


def served_manager(generate_manager: Any) -> Any:
    """Return the `ContinuousBatchingManager` of a server's `CBGenerateManager`."""
    return generate_manager._cb


def kept_manager(model: Any) -> Any:
    """Return the manager of continuous batching that a model keeps between calls, or None."""
    return getattr(model, "_cached_continuous_batching_manager", None)


def keep_manager(model: Any, manager: Any) -> None:
    """Have a model keep a manager of continuous batching between calls."""
    model._cached_continuous_batching_manager = manager


def collects_outputs() -> bool:
    """Return whether hidden states or attentions of running modules are being collected."""
    return bool(cast(Any, output_capturing)._active_collector.get())


# Methods of a model that `introspection.prepared` replaces, so that `generate` prepares a call
# without running anything.

VALIDATE = "_validate_generation_mode"
REPOSITORY = "_get_deprecated_gen_repo"
ENCODE_IMAGES = "_prepare_multimodal_encoder_kwargs_for_generation"
STATIC_CACHE_SHAPE = "_get_static_cache_init_shape"


def has_own_loss(model: Any) -> bool:
    """Return whether a model's loss function was replaced."""
    return getattr(model, "_loss_function", None) is not None


def placeholder_token(model: Any, modality: str) -> Any:
    """Return the token that stands for parts of an image, for example; None if there is none."""
    names = (f"{modality}_token_id", f"{modality}_token_index")
    return next(
        (getattr(model.config, name) for name in names if hasattr(model.config, name)), None
    )
