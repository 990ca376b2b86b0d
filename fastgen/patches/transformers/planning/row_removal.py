"""Whether finished sentences can leave the batch of a call, and the reason if they cannot."""

import functools
from typing import Any

from torch import Tensor, nn

from fastgen.models.build.introspection import is_toolkits, name_of, reads_rows
from fastgen.patches.transformers import compat
from fastgen.patches.transformers.cache import user_cache
from fastgen.patches.transformers.generate import captured_module_step
from fastgen.patches.transformers.generate.logits_processors import batchwise_processor
from fastgen.patches.transformers.generate.stopping_criteria import unknown_criterion
from fastgen.patches.transformers.planning import images
from fastgen.patches.transformers.planning.sharing import other_kind_of


def reason_not_to_drop(
    input_ids: Tensor,
    processors: Any,
    criteria: Any,
    config: Any,
    kwargs: dict[str, Any],
    samples: int,
    prompts_only: frozenset[str] = frozenset(),
    draws_apart: bool = False,
) -> str | None:
    """Return why finished sentences stay in the batch, or None if they leave it.

    Args:
        samples: Number of samples per sentence.
        prompts_only: Names of arguments of the forward that matter for prompts alone.
        draws_apart: Whether samples need not be those that the whole batch would draw.
    """
    if config.do_sample and not draws_apart:
        return "sampling draws for the whole batch"
    if samples > 1:
        return "several sequences per sentence"
    if config.return_dict_in_generate:
        return "return_dict_in_generate=True"
    if kwargs.get("streamer") is not None:
        return "a streamer is set"
    cache = compat.cache_of(kwargs)
    if compat.is_user_provided(cache):
        return user_cache.IS_USER_PROVIDED
    if cache is not None and (reason := other_kind_of(cache)) is not None:
        return reason
    if (name := _not_by_rows(kwargs, input_ids.shape[0], prompts_only)) is not None:
        return f"{name} has no entry for each row"
    name = batchwise_processor(processors) or unknown_criterion(criteria)
    return None if name is None else f"{name} may look at the whole batch"


def looks_at_rows(model: Any) -> str | None:
    """Return why unknown code in a model's modules may depend on the rows of the batch, or None."""
    for module in captured_module_step.of_steps(model):
        kind, part = type(module), module is not model  # the model's class may be a user's own
        if part and not _is_by_rows(kind):
            return f"{name_of(module)} may look at the whole batch"
        if (user_code := reads_rows(module)) is not None:
            return f"{user_code} may look at the whole batch"
        if part and not (is_toolkits(kind.forward) or kind.__module__.startswith("peft.")):
            return f"a replaced forward of a {kind.__name__} may look at the whole batch"
    return None


@functools.cache
def _is_by_rows(kind: type[nn.Module]) -> bool:
    """Return whether modules of a class process each row independently of the others."""
    return kind.__module__.startswith(("torch.nn.", "transformers.", "peft.", "fastgen."))


def _not_by_rows(kwargs: dict[str, Any], rows: int, prompts_only: frozenset[str]) -> str | None:
    """Return the name of a model argument from which rows cannot be removed, or None."""
    # Decode steps read nothing about images if they have a cache, and positions of their own.
    unread = kwargs["use_cache"] and kwargs.get("position_ids") is not None
    for name, value in kwargs.items():
        if not isinstance(value, Tensor) or (unread and name in prompts_only):
            continue
        at = images.dimension_of_rows(name, value)
        if value.shape[at : at + 1] != (rows,):
            return name
    # Without a cache the model reads the images again in every step.
    read = not kwargs["use_cache"] and kwargs.get(images.ENCODED)
    return images.ENCODED if read else None
