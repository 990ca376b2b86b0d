"""Prompt lookup in fastgen's greedy search: `generate(prompt_lookup_num_tokens=...)`.

transformers runs these calls in a loop of its own, and so does fastgen where decode steps do not
run in C. Both return what greedy search returns.
"""

from typing import TYPE_CHECKING, Any

from torch import Tensor
from transformers.generation.configuration_utils import GenerationMode

from fastgen import config as settings
from fastgen.decoding.backends.drafted_sampling import Drafting
from fastgen.decoding.speculative.draft_length import DraftLength
from fastgen.decoding.speculative.drafts import PromptLookup
from fastgen.models.specs.registry import spec_of
from fastgen.ops import native

if TYPE_CHECKING:
    from fastgen.patches.transformers.generate.loop_call import Call

LARGEST = 3
"""Number of tokens that have to match at first, unless `max_matching_ngram_size` says another."""


def is_served(model: Any, config: Any, mode: GenerationMode, assistant: Any) -> bool:
    """Return whether greedy search with drafts runs a call in place of transformers' own loop.

    Args:
        model: The model.
        config: The generation config.
        mode: What transformers would run.
        assistant: The `assistant_model` of the call.
    """
    others = assistant, config.assistant_early_exit, getattr(config, "use_mtp", None) or None
    return (
        mode == GenerationMode.ASSISTED_GENERATION
        and all(each is None for each in others)
        and _is_count(config.prompt_lookup_num_tokens)
        and (config.max_matching_ngram_size is None or _is_count(config.max_matching_ngram_size))
        and not config.do_sample
        and (config.num_return_sequences or 1) == 1
        and config.use_cache is not False
        and config.cache_implementation is None
        and not (
            config.return_dict_in_generate
            and (config.output_attentions or config.output_hidden_states)
        )
        and spec_of(model.config) is not None
        and model.device.type == "cpu"
        and model.dtype in native.DTYPES
        and settings.settings().packs
        and settings.settings().step == "auto"
        and native.library() is not None
    )


def is_requested(config: Any) -> bool:
    """Return whether a call in fastgen's greedy search drafts by prompt lookup."""
    return not config.do_sample and _is_count(config.prompt_lookup_num_tokens)


def drafting_of(call: "Call", source: Tensor | None) -> Drafting | None:
    """Return how a call's tokens are drafted; None if it does not ask for prompt lookup.

    Args:
        call: The call.
        source: (B, S) int64, the encoder's input; None if there is none, or it is no text.
    """
    config, rows = call.config, len(call.input_ids)
    if not is_requested(config):
        return None
    if source is not None and (source.shape[:1] != (rows,) or _other_vocabulary(call.model)):
        source = None
    lookup = PromptLookup(config.max_matching_ngram_size or LARGEST, source)
    return Drafting(lookup, DraftLength(config.prompt_lookup_num_tokens))


def source_of(arguments: dict[str, Any], inputs: tuple[Any, ...]) -> Tensor | None:
    """Return the token ids that a call of `generate` gives to an encoder, or None."""
    given = [*inputs[:1], *(arguments.get(name) for name in ("inputs", "input_ids"))]
    return next(
        (
            each
            for each in given
            if isinstance(each, Tensor) and each.dim() == 2 and not each.is_floating_point()
        ),
        None,
    )


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _other_vocabulary(model: Any) -> bool:
    """Return whether the encoder of a model, if any, may read other token ids than it writes."""
    if not model.config.is_encoder_decoder:
        return True  # the prompt is part of the text
    embeddings = model.get_input_embeddings(), model.get_output_embeddings()
    sizes = {each.weight.shape[0] for each in embeddings if each is not None}
    return len(sizes) != 1
