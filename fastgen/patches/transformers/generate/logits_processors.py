"""Translation of transformers' logits processors and stopping criteria.

Processors become the logits transforms of `decoding.logits.transforms`, criteria a `Stop`.
"""

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

# Processors that handle each row by its own text alone, so that rows may leave the batch.
_ROWWISE = (
    lp.MinLengthLogitsProcessor, lp.MinNewTokensLengthLogitsProcessor, lp.TemperatureLogitsWarper,
    lp.TopPLogitsWarper, lp.TopKLogitsWarper, lp.MinPLogitsWarper, lp.TypicalLogitsWarper,
    lp.EpsilonLogitsWarper, lp.EtaLogitsWarper, lp.NoRepeatNGramLogitsProcessor,
    lp.SequenceBiasLogitsProcessor, lp.NoBadWordsLogitsProcessor, lp.ForcedBOSTokenLogitsProcessor,
    lp.ForcedEOSTokenLogitsProcessor, lp.InfNanRemoveLogitsProcessor,
    lp.ExponentialDecayLengthPenalty, lp.LogitNormalization,
    lp.SuppressTokensAtBeginLogitsProcessor, lp.SuppressTokensLogitsProcessor,
    lp.WhisperTimeStampLogitsProcessor, lp.RepetitionPenaltyLogitsProcessor,
)  # fmt: skip


# Processors that depend on the scores alone and never synchronize with the device.
_STATIC = (
    lp.TemperatureLogitsWarper, lp.TopPLogitsWarper, lp.TopKLogitsWarper, lp.MinPLogitsWarper,
    lp.TypicalLogitsWarper, lp.EpsilonLogitsWarper, lp.InfNanRemoveLogitsProcessor,
    lp.LogitNormalization,
)  # fmt: skip


def kind_of(thing: Any) -> Any:
    """Return the class of a processor or criterion; None if its `__call__` is not toolkit code."""
    kind = cast(Any, type(thing))
    return kind if is_toolkits(kind.__call__) else None


def transforms_of(
    processors: Sequence[Any], vocabulary: Callable[[], int]
) -> list[LogitsTransform]:
    """Translate logits processors, in order.

    A processor without a transform of its own is called as it is.

    Args:
        vocabulary: Returns the size of the vocabulary; called only if a processor needs it.
    """
    return [transform for processor in processors for transform in _edits(processor, vocabulary)]


def rowwise(processors: Sequence[Any]) -> str | None:
    """Return the class name of a processor that forbids rows to leave the batch, or None."""
    return next((type(p).__name__ for p in processors if kind_of(p) not in _ROWWISE), None)


def has_rows(processor: Any) -> bool:
    """Return whether a row-wise processor holds state per row."""
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
        token_id: Any = processor.bos_token_id
        tokens = of_sentences(token_id)
        if tokens is not None:
            return Force(tokens, lambda length: length == 1, by_sentence=True)
        device = token_id.device if isinstance(token_id, Tensor) else "cpu"
        return Force(torch.as_tensor(token_id, device=device), lambda length: length == 1)
    if kind is lp.ForcedEOSTokenLogitsProcessor:
        return Force(processor.eos_token_id, lambda length: length == processor.max_length - 1)
    if kind is lp.RepetitionPenaltyLogitsProcessor:
        start = processor.prompt_ignore_length
        return Penalty(processor.penalty, 0 if start is None else start, _called(processor))
    if kind is lp.TopPLogitsWarper and processor.filter_value == -torch.inf:
        return TopP(processor.top_p, processor.min_tokens_to_keep, _called(processor))
    return Call(_called(processor), static=kind in _STATIC)


def _called(processor: Any) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a processor as a function of (ids, scores).

    The toolkit's list checks its parameters and raises as in the toolkit's own loops.
    """
    return cast(Any, lp.LogitsProcessorList([processor]))


def _biases(processor: Any, vocabulary: int) -> list[LogitsTransform]:
    """Translate a bias of token sequences, or the -inf biases of banned sequences."""
    biases: dict[tuple[int, ...], float] = processor.sequence_bias
    if any(not sequence or max(sequence) >= vocabulary for sequence in biases):
        # It raises; newer releases of transformers skip empty sequences instead.
        return [Call(_called(processor))]
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
    """Return a text (B, S) of the n-grams of the encoder's input, each followed by -1.

    None if a token is beyond the vocabulary, for which the processor may raise.
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
    """Return the token that fills sequences after their end."""
    eos, pad = compat.eos_tokens(config), compat.pad_token(config)
    if loop == "sample":
        return -1 if pad is None else int(pad)
    # As in transformers, a padding id of 0 counts as none.
    return -1 if eos is None else int(pad or eos[0])


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
"""Maximum length of texts whose length is not limited."""


def bounded(loop: Literal["beam", "sample"], config: Any, criteria: Sequence[Any]) -> Any:
    """Return a generation config with Python integers as counts and the length at which texts end.

    With sampling, `MaxLengthCriteria` determine that length, rounded up; the config's `max_length`
    counts only if there are none.

    Raises:
        TypeError: `max_length` of a beam search is not an integer, as in transformers.
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
    """Return the class name of a criterion that is not known to be row-wise, or None.

    The known ones depend on a row's newest token, the length and the time only.
    """
    kinds = (sc.EosTokenCriteria, sc.MaxLengthCriteria, sc.MaxTimeCriteria)
    return next((type(c).__name__ for c in criteria if kind_of(c) not in kinds), None)


def _reaches(criterion: Any) -> Callable[[int], bool]:
    # Call the criterion with a dummy row: it also warns of lengths that the model was not made for.
    probe = torch.zeros(1, 1, dtype=torch.int64, device="cpu")
    return lambda length: bool(criterion(probe.expand(1, length), None))


def _expires(criterion: Any) -> Callable[[int], bool]:
    return lambda _: time.time() - criterion.initial_timestamp > criterion.max_time
