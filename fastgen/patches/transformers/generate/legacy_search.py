"""Methods of decoding that transformers 5 has taken out of its library: which one a call asks for.

Diverse and constrained beam search were last in 4.56, contrastive search in 4.55. transformers 5 still takes their
options, and wants to load code from its Hub for them.
"""

from collections.abc import Callable
from typing import Any, Literal, cast

from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.utils import GENERATION_MODES_MAPPING, GenerationMixin

from fastgen.constraints import constraints_of
from fastgen.patches.engine import engine
from fastgen.patches.transformers.generate.generation_call import current_call

Method = Literal["diverse beam search", "constrained beam search", "contrastive search"]

_METHODS: dict[GenerationMode, Method] = {
    GenerationMode.GROUP_BEAM_SEARCH: "diverse beam search",
    GenerationMode.CONSTRAINED_BEAM_SEARCH: "constrained beam search",
    GenerationMode.CONTRASTIVE_SEARCH: "contrastive search",
}
METHODS = frozenset(_METHODS.values())

_LOOPS: dict[
    Method, tuple[GenerationMode, str]
] = {  # the loop of transformers' own that prepares a call as the method needs it, and the patch that runs there
    "diverse beam search": (GenerationMode.BEAM_SEARCH, "transformers.beam_search"),
    "constrained beam search": (GenerationMode.BEAM_SEARCH, "transformers.beam_search"),
    "contrastive search": (GenerationMode.GREEDY_SEARCH, "transformers.sample"),
}
MODES = {mode: _LOOPS[method][0] for mode, method in _METHODS.items()}
"""The modes of these methods, and those that take their places on the way to a loop."""


def generation_mode(
    original: Callable[..., GenerationMode], self: Any, *args: Any, **kwargs: Any
) -> GenerationMode:
    """`GenerationConfig.get_generation_mode` inside of `generate`: one of a loop where fastgen's runs.

    Raises:
        ValueError: options that do not go together, as they raised it where transformers had these methods.
    """
    mode, call = original(self, *args, **kwargs), current_call()
    if not call.resolves_legacy_modes:
        return mode
    check(self)
    if mode not in _METHODS or not engine.is_applied(_LOOPS[_METHODS[mode]][1]):
        return mode
    loop = GENERATION_MODES_MAPPING[MODES[mode]]
    if getattr(cast(Any, type(call.model)), loop) is not getattr(GenerationMixin, loop):
        return mode  # a loop of its own would run another method
    engine.hit("transformers.generation_mode")
    return MODES[mode]


def method_of(config: Any) -> Method | None:
    """The method that a generation config asks for; None where it is one that transformers has."""
    if _given(config, "constraints") or _given(config, "force_words_ids"):
        return "constrained beam search"
    if (config.num_beams or 1) > 1:
        return "diverse beam search" if (config.num_beam_groups or 1) > 1 else None
    contrastive = (
        not config.do_sample and (config.top_k or 0) > 1 and (config.penalty_alpha or 0) > 0
    )
    return "contrastive search" if contrastive else None


def check(config: Any) -> None:
    """Raise ValueError or TypeError where a config has options that do not go together, or one that cannot be.

    The message has their values.
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
        for name, value, wanted in (
            ("do_sample", config.do_sample, False),
            ("num_beam_groups", groups, 1),
        ):
            if (value or wanted) != wanted:
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
