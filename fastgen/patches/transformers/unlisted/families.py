"""Families without a spec: which calls of them may share keys and values, and what was found out.

Such a family is not known to work over the shared cache, so its first call runs both ways
(`checked_stepper`). The verdict holds for all models of its class that compute alike.
"""

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from fastgen import config
from fastgen.models.build.equivalence_check import UNDECIDED
from fastgen.models.specs.registry import spec_of
from fastgen.models.state import Kept, kept_of, process_state
from fastgen.patches.transformers import compat

DIFFERS = "its first steps over the shared cache differ from the model's own"
"""Reason why a family that failed the check has a cache of its own."""

_Key = tuple[object, ...]


@dataclass(eq=False)
class FamilyVerdicts(Kept):
    """The verdicts on families without a spec: "" where both ways agreed, else the reason."""

    verdicts: dict[_Key, str] = field(default_factory=dict[_Key, str])


@dataclass(eq=False)
class Undecided(Kept):
    """Kept of a model whose logits could not be compared, as they were not finite."""

    keys: set[_Key] = field(default_factory=set[_Key])


def configs_of(model: Any) -> tuple[Any, ...]:
    """Return the model's config and, if it has sub-configs, its text config.

    `get_text_config` makes a copy, so it is called only if there are sub-configs.
    """
    return (
        (model.config, model.config.get_text_config(decoder=True))
        if model.config.sub_configs
        else (model.config,)
    )


def is_listed(model: Any) -> bool:
    """Return whether a model's family, or that of its decoder, has a spec."""
    return any(spec_of(part) is not None for part in configs_of(model))


def reason_not_supported(model: Any) -> str | None:
    """Return why no call of a model of an unlisted family is accelerated; None if some may be."""
    if config.settings().unknown == "off":
        return f"model type {model.config.model_type!r} is not supported"
    if compat.has_states(model):
        return f"{type(model).__name__} keeps other state than keys and values"
    return None


def key_of(model: Any, beams: int, kwargs: dict[str, Any]) -> _Key:
    """Return what a verdict depends on: class, config, dtype, device, and the kind of call.

    Args:
        model: The model.
        beams: Rows per sentence M.
        kwargs: Arguments of the model's forward.
    """
    given = tuple(sorted(name for name, value in kwargs.items() if _is_given(name, value)))
    masked = tuple(
        name
        for name in given
        if name.endswith("mask") and isinstance(kwargs[name], Tensor) and not kwargs[name].all()
    )
    how = compat.attention_of(model.config), model.dtype, model.device.type
    kind = model.__class__
    return kind, model.config.to_json_string(use_diff=False), how, beams > 1, given, masked


def _is_given(name: str, value: Any) -> bool:
    return value is not None and value != {} and name not in _OF_LOOP


_OF_LOOP = ("synced_gpus", "streamer")


def verdict(model: Any, key: _Key) -> str | None:
    """Return the verdict on a key, "" if both ways agreed; None if it has not been checked."""
    if config.settings().unknown == "trust":
        return ""
    undecided = kept_of(model, Undecided)
    if undecided is not None and key in undecided.keys:
        return UNDECIDED
    return process_state().of(FamilyVerdicts).verdicts.get(key)


def record(key: _Key, reason: str) -> None:
    """Record a verdict: "" if both ways agreed, else the reason not to share."""
    process_state().of(FamilyVerdicts).verdicts[key] = reason
