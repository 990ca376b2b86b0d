"""Options of `generate_batch` and of a manager's requests, and what only transformers' can do."""

import copy
from dataclasses import dataclass
from typing import Any

from transformers import GenerationConfig

from fastgen.patches.transformers import compat


@dataclass(frozen=True)
class RequestOptions:
    """How all requests of a call are generated.

    Attributes:
        config: Generation config for `generate`, which merges it with the model's.
        resolved: The same config as `generate` prepares it.
        encoder_decoder: Whether the model is an encoder-decoder model.
    """

    config: GenerationConfig
    resolved: Any
    encoder_decoder: bool

    @property
    def beams(self) -> int:
        return self.resolved.num_beams or 1

    @property
    def new_tokens(self) -> int:
        """Maximum number of generated tokens."""
        return self.resolved.max_new_tokens or self.resolved.max_length - 1

    @property
    def is_open_ended(self) -> bool:
        """Whether fewer new tokens would be the beginning of the same text."""
        return self.beams == 1 and self.resolved.forced_eos_token_id is None

    @property
    def sequences(self) -> int:
        """Number of sequences N per request."""
        return self.resolved.num_return_sequences or 1


def options_of(
    model: Any, config: GenerationConfig | None, arguments: dict[str, Any]
) -> RequestOptions:
    """Return the options of a call.

    Args:
        model: The model.
        config: The call's generation config, or None.
        arguments: Other arguments of the call. Those that are no generation options are ignored.
    """
    given = {name: value for name, value in arguments.items() if name in OPTIONS}
    given = {name: value for name, value in given.items() if value is not None}
    own: Any = GenerationConfig() if config is None else copy.deepcopy(config)
    own.update(**given)
    if own.cache_implementation == "paged":
        own.cache_implementation = None
    own.return_dict_in_generate = False
    own.use_cache = None  # `transformers serve` unsets it, as paged attention has its own
    resolved = compat.prepare_config(model, own, {})
    return RequestOptions(own, resolved, bool(model.config.is_encoder_decoder))


OPTIONS = frozenset(GenerationConfig().to_dict())
"""Names of generation options."""


def check_beams(options: RequestOptions, reason: str) -> None:
    """Raise ValueError if several beams are requested that transformers' own code would ignore.

    Args:
        options: Options of the call.
        reason: Why transformers' own code has to run.
    """
    if options.beams > 1:
        raise ValueError(
            f"num_beams = {options.beams} would be ignored by transformers' continuous batching, "
            f"which has to run: {reason}"
        )


def batching_of(model: Any, config: Any, batching: Any) -> Any:
    """Return the `ContinuousBatchingConfig` of a call, which may be in its generation config."""
    config = model.generation_config if config is None else config
    return batching or getattr(config, "continuous_batching_config", None)


def reason_for_paged(model: Any, options: RequestOptions, batching: Any) -> str | None:
    """Return why transformers' own paged attention has to run; None if it does not.

    Args:
        model: The model.
        options: Options of the call.
        batching: Its `ContinuousBatchingConfig`, or None.
    """
    config = options.resolved
    if model.device.type != "cpu" and options.beams == 1 and not options.encoder_decoder:
        return f"on {model.device.type} it has not been measured against paged attention"
    if config.max_new_tokens is None and not options.encoder_decoder:
        return "max_new_tokens is not given"
    for name in _UNKNOWN:
        if getattr(config, name, None) is not None:
            return f"{name} is given"
    if config.min_length and not options.encoder_decoder:
        return f"min_length = {config.min_length} counts a prompt's tokens"
    if compat.is_paged(model) or compat.is_tensor_parallel(model):
        return "the model has paged attention or is tensor parallel"
    for name in ("varlen_compile_config", "decode_compile_config", "default_compile_level"):
        if getattr(batching, name, None):
            return f"{name} is given"
    if getattr(batching, "return_logprobs", False):
        return "return_logprobs=True"
    if config.do_sample and getattr(batching, "seed", None) is not None:
        return "a seed for draws is given"
    return None


_UNKNOWN = ("stop_strings", "guidance_scale", "prompt_lookup_num_tokens", "assistant_early_exit")
"""Options that `generate` cannot apply to several token lists, or needs more arguments for."""
