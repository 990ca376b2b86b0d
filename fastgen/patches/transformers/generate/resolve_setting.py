"""Settings of a call of `generate`, resolved before `generate` itself merges them."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from fastgen.patches.transformers.compat import CACHE_ARGUMENTS


def setting_of(model: Any, arguments: Mapping[str, Any], name: str) -> Any:
    """Return a setting of a call; None if it is not set.

    The arguments come first, then the call's generation config, then the model's.
    """
    value = arguments.get(name)
    for config in (arguments.get("generation_config"), model.generation_config):
        value = getattr(config, name, None) if value is None else value
    return value


_SEVERAL = ("assistant_model", "assistant_early_exit", "prompt_lookup_num_tokens")
_UNKNOWN = ("encoder_outputs", *CACHE_ARGUMENTS)


def rows_at_most(model: Any, inputs: Sequence[Any], arguments: Mapping[str, Any]) -> int | None:
    """Return the maximum number of rows of a matrix product in a call; None if unknown.

    It is the number of tokens in the largest input or the number of rows in the decode steps.

    Args:
        inputs: Positional arguments of `generate`.
        arguments: Keyword arguments of `generate`.
    """
    if any(setting_of(model, arguments, name) is not None for name in _SEVERAL):
        return None
    tensors = [value for value in (*inputs, *arguments.values()) if isinstance(value, Tensor)]
    if not tensors or any(value.dim() != 2 or value.is_floating_point() for value in tensors):
        return None
    if any(arguments.get(name) is not None for name in _UNKNOWN):
        return None
    rows = max(
        setting_of(model, arguments, name) or 1 for name in ("num_beams", "num_return_sequences")
    )
    return max(len(tensors[0]) * rows, *(value.numel() for value in tensors))


class Settings:
    """All settings of a call as attributes, as a generation config has them.

    An unset `top_k` is 50, transformers' default.
    """

    def __init__(self, model: Any, arguments: Mapping[str, Any]) -> None:
        self._model, self._arguments = model, arguments

    def __getattr__(self, name: str) -> Any:
        value = setting_of(self._model, self._arguments, name)
        return 50 if name == "top_k" and value is None else value
