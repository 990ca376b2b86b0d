"""Decoding methods that transformers 5 removed, and which of them a call requests.

Diverse and constrained beam search were last in 4.56, contrastive search in 4.55. transformers 5
still accepts their options, but wants to load code from its Hub to run them.
"""

from collections.abc import Callable
from typing import Any, Literal, cast

from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.utils import GENERATION_MODES_MAPPING, GenerationMixin

from fastgen.constraints import constraints_of
from fastgen.patches.engine import engine
from fastgen.patches.generation_call import current
from fastgen.patches.transformers.drafting import prompt_lookup

Method = Literal["diverse beam search", "constrained beam search", "contrastive search"]

_METHODS: dict[GenerationMode, Method] = {
    GenerationMode.GROUP_BEAM_SEARCH: "diverse beam search",
    GenerationMode.CONSTRAINED_BEAM_SEARCH: "constrained beam search",
    GenerationMode.CONTRASTIVE_SEARCH: "contrastive search",
}
METHODS = frozenset(_METHODS.values())

# By method: the mode whose preparation of a call suits it, and the patch of that mode's loop.
_LOOPS: dict[Method, tuple[GenerationMode, str]] = {
    "diverse beam search": (GenerationMode.BEAM_SEARCH, "transformers.beam_search"),
    "constrained beam search": (GenerationMode.BEAM_SEARCH, "transformers.beam_search"),
    "contrastive search": (GenerationMode.GREEDY_SEARCH, "transformers.sample"),
}
MODES = {mode: _LOOPS[method][0] for mode, method in _METHODS.items()}
"""By mode of a removed method: the mode that replaces it on the way to a decoding loop."""


def generation_mode(
    original: Callable[..., GenerationMode], self: Any, *args: Any, **kwargs: Any
) -> GenerationMode:
    """Replace `GenerationConfig.get_generation_mode` within `generate`.

    Returns:
        For a removed method that fastgen runs, the mode of the loop that it runs in; for prompt
        lookup that fastgen runs, greedy search.

    Raises:
        ValueError: Options contradict each other, as in releases of transformers that had these
            methods.
        TypeError: A constraint has the wrong type.
    """
    mode, call = original(self, *args, **kwargs), current.get()
    if not call.resolves_legacy_modes:
        return mode
    assistant = args[0] if args else kwargs.get("assistant_model")
    greedy = GENERATION_MODES_MAPPING[GenerationMode.GREEDY_SEARCH]
    if (
        prompt_lookup.is_served(call.model, self, mode, assistant)
        and engine.is_applied("transformers.sample")
        and getattr(cast(Any, type(call.model)), greedy) is getattr(GenerationMixin, greedy)
    ):
        engine.hit("transformers.generation_mode")
        return GenerationMode.GREEDY_SEARCH
    check(self)
    if mode not in _METHODS or not engine.is_applied(_LOOPS[_METHODS[mode]][1]):
        return mode
    loop = GENERATION_MODES_MAPPING[MODES[mode]]
    if getattr(cast(Any, type(call.model)), loop) is not getattr(GenerationMixin, loop):
        return mode  # the model's own loop would run another method
    engine.hit("transformers.generation_mode")
    return MODES[mode]


def method_of(config: Any) -> Method | None:
    """Return the removed method that a generation config requests; None if it requests none."""
    if _given(config, "constraints") or _given(config, "force_words_ids"):
        return "constrained beam search"
    if (config.num_beams or 1) > 1:
        return "diverse beam search" if (config.num_beam_groups or 1) > 1 else None
    contrastive = (
        not config.do_sample and (config.top_k or 0) > 1 and (config.penalty_alpha or 0) > 0
    )
    return "contrastive search" if contrastive else None


def check(config: Any) -> None:
    """Check the options of the removed methods.

    Raises:
        ValueError: Options contradict each other; the message has their values.
        TypeError: A constraint has the wrong type.
    """
    beams, groups, penalty = (
        config.num_beams or 1,
        config.num_beam_groups or 1,
        config.diversity_penalty or 0.0,
    )
    method = method_of(config)
    if method == "constrained beam search":
        constraints_of(config.constraints, config.force_words_ids)
        if beams == 1:
            raise ValueError(
                f"constraints and force_words_ids need several beams, and num_beams is {beams}"
            )
        for name, value, expected in (
            ("do_sample", config.do_sample, False),
            ("num_beam_groups", groups, 1),
        ):
            if (value or expected) != expected:
                raise ValueError(f"constraints and force_words_ids do not go with {name}={value}")
    elif beams > 1 and groups > 1:
        if config.do_sample:
            raise ValueError(
                f"num_beam_groups={groups}: diverse beam search does not go with do_sample=True"
            )
        if beams % groups:
            raise ValueError(f"num_beams={beams} cannot be divided by num_beam_groups={groups}")
        if not penalty > 0.0:
            raise ValueError(
                f"diversity_penalty={penalty} must be greater than 0, or groups would be the same"
            )
    elif method == "contrastive search" and config.use_cache is False:
        raise ValueError("contrastive search needs use_cache=True, and it is False")


def _given(config: Any, name: str) -> bool:
    return getattr(config, name, None) is not None
