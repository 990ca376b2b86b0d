"""What a call of `generate` says of its settings, before `generate` has put them together."""

from collections.abc import Mapping
from typing import Any


def said(model: Any, arguments: Mapping[str, Any], name: str) -> Any:
    """What a call says of one of its settings: itself, by its generation config, or by the model's."""
    found = arguments.get(name)
    for config in (arguments.get("generation_config"), model.generation_config):
        found = getattr(config, name, None) if found is None else found
    return found


class Settings:
    """What a call says of all its settings, by name, as a generation config would; transformers' top_k is 50."""

    def __init__(self, model: Any, arguments: Mapping[str, Any]) -> None:
        self._model, self._arguments = model, arguments

    def __getattr__(self, name: str) -> Any:
        found = said(self._model, self._arguments, name)
        return 50 if name == "top_k" and found is None else found
