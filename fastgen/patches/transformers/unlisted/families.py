"""Families without a spec: which calls of them may share keys and values, and what was found out.

Such a family is not known to work over the shared cache, so its first call runs both ways
(`checked_stepper`). The verdict holds for all models of its class that compute alike.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fastgen import config
from fastgen.models.build.equivalence_check import UNDECIDED
from fastgen.models.specs.registry import spec_of
from fastgen.models.state import CachedState, cached_state_of, process_state
from fastgen.patches.transformers import compat

DIFFERS = "its first steps over the shared cache differ from the model's own"
"""Reason why a family that failed the check has a cache of its own."""

NOT_COMPARABLE = "its config holds objects, so that it cannot be compared"
"""Reason why a model is not checked."""

Key = tuple[object, ...]
"""What a verdict depends on."""


@dataclass(eq=False)
class FamilyVerdicts(CachedState):
    """What was found out about families without a spec.

    Attributes:
        verdicts: "" where both ways agreed, else the reason not to share.
        agreed: Number of decode steps so far in which both ways agreed.
    """

    verdicts: dict[Key, str] = field(default_factory=dict[Key, str])
    agreed: dict[Key, int] = field(default_factory=dict[Key, int])


@dataclass(eq=False)
class Undecided(CachedState):
    """Kept of a model whose logits could not be compared, as they were not finite."""

    keys: set[Key] = field(default_factory=set[Key])


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


def key_of(model: Any, beams: int, kwargs: dict[str, Any]) -> Key | None:
    """Return what a verdict depends on: how the model computes, and the kind of call.

    Args:
        model: The model.
        beams: Rows per sentence M.
        kwargs: Arguments of the model's forward.

    Returns:
        The key; None if the model's config cannot be compared.
    """
    try:
        config_text = model.config.to_json_string(use_diff=False)
    except (TypeError, ValueError):  # it holds objects
        return None
    given = tuple(sorted(name for name, value in kwargs.items() if _is_given(name, value)))
    masked = tuple(
        name
        for name in given
        if name.endswith("mask") and isinstance(kwargs[name], Tensor) and not kwargs[name].all()
    )
    kinds: list[Any] = [module.__class__ for module in model.modules()]
    modules = hash(tuple((each, each.forward) for each in kinds))
    kind, attentions = model.device.type, tuple(map(compat.attention_of, configs_of(model)))
    autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    how = attentions, modules, model.dtype, kind, autocast
    return model.__class__, config_text, how, beams > 1, given, masked


def _is_given(name: str, value: Any) -> bool:
    return value is not None and value != {} and name not in _OF_LOOP


_OF_LOOP = ("synced_gpus", "streamer")


def verdict(model: Any, key: Key | None) -> str | None:
    """Return the verdict on a key, "" if both ways agreed; None if it has not been checked."""
    if key is None:
        return NOT_COMPARABLE
    undecided = cached_state_of(model, Undecided)
    if undecided is not None and key in undecided.keys:
        return UNDECIDED
    found = process_state().of(FamilyVerdicts).verdicts.get(key)
    return "" if found is None and config.settings().unknown == "trust" else found


def record(key: Key, reason: str) -> None:
    """Record a verdict: "" if both ways agreed, else the reason not to share, which stands."""
    verdicts = process_state().of(FamilyVerdicts).verdicts
    if reason:
        verdicts[key] = reason
    else:
        verdicts.setdefault(key, "")


def count_agreed(key: Key) -> int:
    """Count a decode step in which both ways agreed; return how many there were."""
    agreed = process_state().of(FamilyVerdicts).agreed
    agreed[key] = agreed.get(key, 0) + 1
    return agreed[key]
