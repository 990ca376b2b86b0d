"""transformers' logits processors and stopping criteria as the edits of `transforms` and a `stopping`."""

import copy
import math
import operator
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal, cast

import torch
from torch import Tensor
from transformers.generation import logits_process as lp
from transformers.generation import stopping_criteria as sc

from fastgen.decoding.logits.transforms import (
    Ban,
    Call,
    Force,
    LogitsTransform,
    NGramBlock,
    Penalty,
    SequenceShift,
    TokenBias,
    TopP,
)
from fastgen.decoding.search.stopping import Stop
from fastgen.models.build.introspection import is_toolkits
from fastgen.patches.transformers import compat
from fastgen.patches.transformers.compat import INSTALLED
from fastgen.patches.transformers.generate.first_tokens import of_sentences

# Processors that treat every row alike and by its own text alone, so that rows may leave the batch.
_ROWWISE = (
    lp.MinLengthLogitsProcessor, lp.MinNewTokensLengthLogitsProcessor, lp.TemperatureLogitsWarper, lp.TopPLogitsWarper,
    lp.TopKLogitsWarper, lp.MinPLogitsWarper, lp.TypicalLogitsWarper, lp.EpsilonLogitsWarper, lp.EtaLogitsWarper,
    lp.NoRepeatNGramLogitsProcessor, lp.SequenceBiasLogitsProcessor, lp.NoBadWordsLogitsProcessor,
    lp.ForcedBOSTokenLogitsProcessor, lp.ForcedEOSTokenLogitsProcessor, lp.InfNanRemoveLogitsProcessor,
    lp.ExponentialDecayLengthPenalty, lp.LogitNormalization, lp.SuppressTokensAtBeginLogitsProcessor,
    lp.SuppressTokensLogitsProcessor, lp.WhisperTimeStampLogitsProcessor, lp.RepetitionPenaltyLogitsProcessor,
)  # fmt: skip


# Functions of the scores alone that ask for no value.
_STATIC = (
    lp.TemperatureLogitsWarper, lp.TopPLogitsWarper, lp.TopKLogitsWarper, lp.MinPLogitsWarper, lp.TypicalLogitsWarper,
    lp.EpsilonLogitsWarper, lp.InfNanRemoveLogitsProcessor, lp.LogitNormalization,
)  # fmt: skip


def kind_of(thing: Any) -> Any:
    """The class of a processor or criterion; None where its `__call__` is not a toolkit's code."""
    kind = cast(Any, type(thing))
    return kind if is_toolkits(kind.__call__) else None


def transforms_of(
    processors: Sequence[Any], vocabulary: Callable[[], int]
) -> list[LogitsTransform]:
    """Translate the processors, in order; those without an edit of their own are called as they are.

    vocabulary: says how many tokens there are, if one asks.
    """
    return [edit for processor in processors for edit in _edits(processor, vocabulary)]


def rowwise(processors: Sequence[Any]) -> str | None:
    """None when rows may leave the batch under these processors, else the name of one that forbids it."""
    return next((type(p).__name__ for p in processors if kind_of(p) not in _ROWWISE), None)


def has_rows(processor: Any) -> bool:
    """Whether a processor that treats every row by itself holds something of each."""
    return isinstance(getattr(processor, "prompt_ignore_length", None), Tensor)


def _edits(processor: Any, vocabulary: Callable[[], int]) -> list[LogitsTransform]:
    kind = kind_of(processor)
    if kind in (lp.NoBadWordsLogitsProcessor, lp.SequenceBiasLogitsProcessor):
        return _biases(processor, vocabulary())
    return [_edit(processor, kind, vocabulary)]


def _edit(processor: Any, kind: Any, vocabulary: Callable[[], int]) -> LogitsTransform:
    if kind is lp.NoRepeatNGramLogitsProcessor:
        return NGramBlock(processor.ngram_size)
    if kind is lp.EncoderNoRepeatNGramLogitsProcessor:
        source = _source_of(processor, vocabulary())
        if source is not None:
            return NGramBlock(processor.ngram_size, source)
    if kind is lp.MinLengthLogitsProcessor:
        return Ban(processor.eos_token_id, lambda length: length < processor.min_length)
    if kind is lp.MinNewTokensLengthLogitsProcessor:
        return Ban(
            processor.eos_token_id,
            lambda length: length - processor.prompt_length_to_skip < processor.min_new_tokens,
        )
    if kind is lp.SuppressTokensLogitsProcessor:
        return Ban(processor.suppress_tokens, lambda _: True)
    if kind is lp.SuppressTokensAtBeginLogitsProcessor:
        return Ban(
            processor.begin_suppress_tokens,
            lambda length: length == processor.begin_index,
            passes=True,
        )
    if kind is lp.ForcedBOSTokenLogitsProcessor:
        first: Any = processor.bos_token_id
        tokens = of_sentences(first)
        if tokens is not None:
            return Force(tokens, lambda length: length == 1, by_sentence=True)
        device = first.device if isinstance(first, Tensor) else "cpu"
        return Force(torch.as_tensor(first, device=device), lambda length: length == 1)
    if kind is lp.ForcedEOSTokenLogitsProcessor:
        return Force(processor.eos_token_id, lambda length: length == processor.max_length - 1)
    if kind is lp.RepetitionPenaltyLogitsProcessor:
        start = processor.prompt_ignore_length
        return Penalty(processor.penalty, 0 if start is None else start, _called(processor))
    if kind is lp.TopPLogitsWarper and processor.filter_value == -torch.inf:
        return TopP(processor.top_p, processor.min_tokens_to_keep, _called(processor))
    return Call(_called(processor), static=kind in _STATIC)


def _called(processor: Any) -> Callable[[Tensor, Tensor], Tensor]:
    """The processor as a function; the toolkit's list checks what arguments it wants, and raises as stock does."""
    return cast(Any, lp.LogitsProcessorList([processor]))


def _biases(processor: Any, vocabulary: int) -> list[LogitsTransform]:
    """A bias of sequences of tokens; bans where it is -inf."""
    biases: dict[tuple[int, ...], float] = processor.sequence_bias
    if any(not sequence or max(sequence) >= vocabulary for sequence in biases):
        return [
            Call(_called(processor))
        ]  # it raises, but in newer versions passes over what is empty
    if type(processor) is lp.SequenceBiasLogitsProcessor:
        if any(len(sequence) > 1 for sequence in biases):
            return [SequenceShift(biases, 0 if INSTALLED.bias_reaches_start else 1)]
        tokens = torch.tensor([sequence[0] for sequence in biases], dtype=torch.int64, device="cpu")
        return [
            TokenBias(
                tokens, torch.tensor(list(biases.values()), dtype=torch.float32, device="cpu")
            )
        ]
    by_length: dict[int, list[tuple[int, ...]]] = {}
    for sequence in biases:
        by_length.setdefault(len(sequence), []).append(sequence)
    transforms: list[LogitsTransform] = []
    for n, sequences in by_length.items():
        words = torch.tensor(sequences, dtype=torch.int64, device="cpu")
        if n == 1:
            transforms.append(Ban(words[:, 0], lambda _: True))
        else:
            shortest = n - 1 if INSTALLED.bias_reaches_start else n
            transforms.append(
                NGramBlock(
                    n, torch.nn.functional.pad(words, (0, 1), value=-1).view(1, -1), shortest
                )
            )
    return transforms


def _source_of(processor: Any, vocabulary: int) -> Tensor | None:
    """A text (B, S) with the n-grams of the encoder's input that the processor has kept, each followed by -1.

    None where a token lies beyond the vocabulary, at which the processor may raise.
    """
    texts: list[list[int]] = []
    for ngrams in cast("list[dict[tuple[int, ...], list[int]]]", processor.generated_ngrams):
        texts.append(
            [
                token
                for before, after in ngrams.items()
                for last in after
                for token in (*before, last, -1)
            ]
        )
        if any(not 0 <= last < vocabulary for after in ngrams.values() for last in after):
            return None
    longest = max((len(text) for text in texts), default=0)
    return torch.tensor(
        [text + [-1] * (longest - len(text)) for text in texts], dtype=torch.int64, device="cpu"
    )


def fill_of(loop: Literal["beam", "sample"], config: Any) -> int:
    """The token behind the end of a sequence."""
    eos, pad = compat.eos_tokens(config), compat.pad_token(config)
    if loop == "sample":
        return -1 if pad is None else int(pad)
    return (
        -1 if eos is None else int(pad or eos[0])
    )  # as stock has it, a padding id of 0 counts as none


def stop_of(criteria: Sequence[Any]) -> Stop:
    """Translate the stopping criteria."""
    eos: list[Tensor] = []
    at_length: list[Callable[[int], bool]] = []
    others: list[Callable[[Tensor, object], Tensor]] = []
    lengths: list[float] = []
    for criterion in criteria:
        kind = kind_of(criterion)
        if kind is sc.EosTokenCriteria:
            eos.append(criterion.eos_token_id)
        elif kind is sc.MaxLengthCriteria:
            at_length.append(_reaches(criterion))
            lengths.append(criterion.max_length)
        elif kind is sc.MaxTimeCriteria:
            at_length.append(_expires(criterion))
        else:
            others.append(criterion)
    longest = math.ceil(min(min(lengths), _NO_END)) if len(lengths) == len(at_length) > 0 else None
    return Stop(torch.cat(eos) if eos else None, at_length, others, longest)


_COUNTS = ("num_beams", "num_beam_groups", "num_return_sequences", "top_k")

_NO_END = 2**62
"""The length of texts without one, which would be infinite."""


def bounded(loop: Literal["beam", "sample"], config: Any, criteria: Sequence[Any]) -> Any:
    """A generation config whose counts are integers of Python's, and whose length is that at which texts end.

    Samples end where criteria say so, a caller's own before the config's, and at the first length that is no less.

    Raises:
        TypeError: a length of beams is a fraction, as in stock.
    """
    if loop == "beam":
        longest = operator.index(config.max_length)
    else:
        lengths = [
            criterion.max_length
            for criterion in criteria
            if isinstance(criterion, sc.MaxLengthCriteria)
        ]
        longest = math.ceil(min([*(lengths or [config.max_length]), _NO_END]))
    counts = {name: getattr(config, name, None) for name in _COUNTS}
    plain = {
        name: operator.index(cast(Any, count))
        for name, count in counts.items()
        if hasattr(count, "__index__")
    }
    plain["max_length"] = longest
    others = {
        name: count for name, count in plain.items() if type(getattr(config, name)) is not int
    }
    if not others and longest == config.max_length:
        return config
    config = copy.copy(config)
    for name, value in plain.items():
        setattr(config, name, value)
    return config


def known(criteria: Sequence[Any]) -> str | None:
    """None when the criteria look at a row's newest token and the length alone, else the name of one that does not."""
    kinds = (sc.EosTokenCriteria, sc.MaxLengthCriteria, sc.MaxTimeCriteria)
    return next((type(c).__name__ for c in criteria if kind_of(c) not in kinds), None)


def _reaches(criterion: Any) -> Callable[[int], bool]:
    # Asked with an empty row of that length, as the criterion also warns of lengths that the model was not made for.
    probe = torch.zeros(1, 1, dtype=torch.int64, device="cpu")
    return lambda length: bool(criterion(probe.expand(1, length), None))


def _expires(criterion: Any) -> Callable[[int], bool]:
    return lambda _: time.time() - criterion.initial_timestamp > criterion.max_time
