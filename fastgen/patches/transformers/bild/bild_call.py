"""Parsing of the big-little decoding options of `generate`, and checks that two models match."""

from collections.abc import Mapping
from typing import Any, cast

from fastgen.decoding.speculative import bild_options
from fastgen.decoding.speculative.bild_options import Options
from fastgen.patches.transformers.generate.first_tokens import of_sentences
from fastgen.patches.transformers.generate.resolve_setting import setting_of

_PADDING = 1024
"""Maximum number of unused embedding rows, by which two models of one tokenizer may differ."""


def options_of(model: Any, arguments: dict[str, Any]) -> Options | None:
    """Remove and return the big-little decoding options from the arguments of `generate`.

    An option in the call requests big-little decoding. So does one in the generation config, if the
    call has an assistant. An `assistant_model` alone requests transformers' own assisted decoding.

    Args:
        model: The large model.
        arguments: Arguments of `generate`; modified.

    Returns:
        The options, or None if the call does not request big-little decoding.

    Raises:
        ValueError: An option has an invalid value, or the two models do not match.
        TypeError: An option has a value of the wrong type.
    """
    small, layers = arguments.get("assistant_model"), arguments.get("assistant_early_exit")
    in_call = {name: arguments.pop(name) for name in bild_options.NAMES if name in arguments}
    requested = {name: value for name, value in in_call.items() if value is not None}
    if all(value is False for value in requested.values()) and small is None and layers is None:
        return None
    configs = {"generation_config": arguments.get("generation_config")}
    stored = {name: setting_of(model, configs, name) for name in bild_options.NAMES}
    stored = {name: value for name, value in stored.items() if value is not None}
    if all(value is False for value in (*requested.values(), *stored.values())):
        return None
    for name in ("assistant_model", "assistant_early_exit"):
        arguments.pop(name, None)
    if (stored_exit := setting_of(model, arguments, "assistant_early_exit")) is not None:
        raise ValueError(
            f"assistant_early_exit={stored_exit} is in the generation config, where it is "
            "transformers' own assisted decoding: set it to None there, and give it in the call"
        )
    tokenizers = arguments.get("tokenizer"), arguments.pop("assistant_tokenizer", None)
    options = bild_options.options(
        small, layers, requested, stored, ("assistant_model", "assistant_early_exit")
    )
    if of_sentences(setting_of(model, arguments, "forced_bos_token_id")) is not None:
        raise ValueError(
            "big-little decoding has one forced_bos_token_id for all sentences, not a list of them"
        )
    beams, texts = (
        setting_of(model, arguments, name) or 1 for name in ("num_beams", "num_return_sequences")
    )
    if options.beams:
        _check_beams(requested, beams)
    if options.beams and not (options.lossless and small is not None):
        raise ValueError(
            "speculative_beams=True gives what the beam search gives: "
            "it needs lossless=True and a model"
        )
    if beams != 1 and not options.beams:
        raise ValueError(
            f"{bild_options.one_text('num_beams', beams)}; with speculative_beams=True and "
            "lossless=True the steps of the beam search are drafted"
        )
    if texts != 1 and beams == 1:
        raise ValueError(bild_options.one_text("num_return_sequences", texts))
    if small is not None:
        _check_pair(model, small, tokenizers)
    return options


def _check_beams(requested: Mapping[str, Any], beams: int) -> None:
    """Raise ValueError if a call has options that do not apply to drafts of a beam search."""
    if beams == 1:
        raise ValueError("speculative_beams drafts the steps of a beam search, and num_beams is 1")
    others = ", ".join(sorted(set(requested) - {"speculative_beams", "lossless"}))
    if others:
        raise ValueError(
            "speculative_beams drafts the best continuations of a step: "
            f"{others} says nothing of it"
        )


def _check_pair(large: Any, small: Any, tokenizers: tuple[Any, Any]) -> None:
    """Raise ValueError if two models visibly do not share their tokens."""
    if bool(large.config.is_encoder_decoder) != bool(small.config.is_encoder_decoder):
        raise ValueError(
            f"a {type(small).__name__} cannot draft for a {type(large).__name__}: "
            "one has an encoder"
        )
    if None not in tokenizers and tokenizers[0] is not tokenizers[1]:
        of_large, of_small = (tokenizer.get_vocab() for tokenizer in tokenizers)
        if of_large != of_small:
            token = next(t for t in (*of_large, *of_small) if of_large.get(t) != of_small.get(t))
            raise ValueError(
                f"big-little decoding needs two models of one tokenizer: {token!r} is "
                f"{of_large.get(token)} to the large one and {of_small.get(token)} to the small one"
            )
    sizes = [model.get_output_embeddings().weight.shape[0] for model in (large, small)]
    if abs(sizes[0] - sizes[1]) > _PADDING:
        raise ValueError(
            "big-little decoding needs two models of one tokenizer: "
            f"their vocabularies have {sizes[0]} and {sizes[1]} tokens"
        )
    for name in ("eos_token_id", "pad_token_id", "decoder_start_token_id"):
        ids = [getattr(model.generation_config, name, None) for model in (large, small)]
        sets = [set(cast("list[int]", i) if isinstance(i, list) else [i]) - {None} for i in ids]
        if all(sets) and not sets[0] & sets[1]:
            raise ValueError(
                "big-little decoding needs two models of one tokenizer: "
                f"{name} is {ids[0]} and {ids[1]}"
            )
