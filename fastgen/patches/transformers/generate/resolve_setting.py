"""What a call of `generate` says of its settings, before `generate` has put them together."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from fastgen.patches.transformers.compat import CACHE_ARGUMENTS


def said(model: Any, arguments: Mapping[str, Any], name: str) -> Any:
    """What a call says of one of its settings: itself, by its generation config, or by the model's."""
    found = arguments.get(name)
    for config in (arguments.get("generation_config"), model.generation_config):
        found = getattr(config, name, None) if found is None else found
    return found


_SEVERAL = ("assistant_model", "assistant_early_exit", "prompt_lookup_num_tokens")
_UNKNOWN = ("encoder_outputs", *CACHE_ARGUMENTS)


def rows_at_most(model: Any, inputs: Sequence[Any], arguments: Mapping[str, Any]) -> int | None:
    """How many rows a product has at most in a call with such inputs: its tokens, or beams; None if unknown."""
    if any(said(model, arguments, name) is not None for name in _SEVERAL):
        return None
    given = [value for value in (*inputs, *arguments.values()) if isinstance(value, Tensor)]
    if not given or any(value.dim() != 2 or value.is_floating_point() for value in given):
        return None
    if any(arguments.get(name) is not None for name in _UNKNOWN):
        return None
    rows = max(said(model, arguments, name) or 1 for name in ("num_beams", "num_return_sequences"))
    return max(len(given[0]) * rows, *(value.numel() for value in given))


class Settings:
    """What a call says of all its settings, by name, as a generation config would; transformers' top_k is 50."""

    def __init__(self, model: Any, arguments: Mapping[str, Any]) -> None:
        self._model, self._arguments = model, arguments

    def __getattr__(self, name: str) -> Any:
        found = said(self._model, self._arguments, name)
        return 50 if name == "top_k" and found is None else found
