"""Models and calls that transformers' own loop must run."""

from typing import Any, Literal

import torch
from torch import Tensor

from fastgen.decoding.plan import Unsupported
from fastgen.models.build.patched_torch import replaced
from fastgen.models.routing.routes import why_compiled
from fastgen.models.specs.registry import spec_of
from fastgen.patches.transformers import compat
from fastgen.patches.transformers.compat import CACHE
from fastgen.patches.transformers.generate.legacy_search import Method
from fastgen.patches.transformers.unlisted.families import (
    is_listed,
    reason_not_supported,
)


def check_call(
    model: Any,
    loop: Literal["beam", "sample"],
    method: Method | None,
    config: Any,
    kwargs: dict[str, Any],
) -> None:
    """Raise Unsupported if the arguments of a call show that transformers' loop must run it."""
    for name in compat.CALLED_BY_LOOP[loop]:
        if name in vars(model) or compat.has_own(model, name):
            raise Unsupported(f"{type(model).__name__} has its own {name}")
    if (default := torch.get_default_device()).type not in ("cpu", model.device.type):
        raise Unsupported(f"the default device is {default}, and the model is on {model.device}")
    if kwargs.get("synced_gpus"):
        raise Unsupported("synced_gpus=True")
    if config.is_assistant:
        raise Unsupported("the model is the assistant of another")
    cache = compat.cache_of(kwargs)
    if loop == "beam":
        if config.low_memory and method is None:
            raise Unsupported("low_memory=True")
        if CACHE in kwargs and not hasattr(cache, "reorder_cache"):
            raise Unsupported(f"a {type(cache).__name__} cannot be reordered")
    elif (
        getattr(cache, "is_compileable", False)
        and not config.disable_compile
        and (model.device.type != "cpu" or compat.compiles_everywhere(config))
    ):
        raise Unsupported("transformers compiles the forward")


def check_source(model: Any, input_ids: Tensor, kwargs: dict[str, Any]) -> None:
    """Raise Unsupported if encoder outputs do not have the rows of the text or the mask's shape."""
    outputs, mask = kwargs.get("encoder_outputs"), kwargs.get("attention_mask")
    states = outputs[0] if outputs and model.config.is_encoder_decoder else None
    if not isinstance(states, Tensor) or states.dim() < 2:
        return
    spec, (rows, length) = spec_of(model.config), states.shape[:2]
    fits = rows == len(input_ids)
    if spec is None or not spec.masks_source or spec.source_mask is not None:
        mask = None  # it has another length, or masks nothing
    if isinstance(mask, Tensor) and mask.dim() == 2:
        fits = fits and mask.shape == (rows, length)
    if not fits:
        raise Unsupported("encoder outputs of other rows or lengths than the text or the mask")


def check_model(model: Any) -> None:
    """Raise Unsupported if fastgen runs no call of this model, whatever its arguments."""
    if (reason := replaced()) is not None:
        raise Unsupported(reason)
    if not is_listed(model) and (reason := reason_not_supported(model)) is not None:
        raise Unsupported(reason)
    if model.device.type == "meta":
        raise Unsupported("the model's first weights are offloaded")
    if compat.reorders_its_cache(model):
        raise Unsupported(f"{type(model).__name__} reorders its cache itself")
    if (reason := why_compiled(model)) is not None:
        raise Unsupported(reason)
    if len(set(getattr(model, "hf_device_map", {}).values())) > 1:
        raise Unsupported("the model lies on several devices")
