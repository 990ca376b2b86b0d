"""Translation of transformers' logits processors to logits transforms (`decoding/logits/`).

`_PROCESSORS` is the table. A processor that is not in it is called as it is.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from transformers.generation import logits_process as lp

from fastgen.decoding.logits.forced_tokens import ForcedTokens
from fastgen.decoding.logits.min_p import MinP
from fastgen.decoding.logits.ngram_block import NGramBlock
from fastgen.decoding.logits.processor_call import ProcessorCall
from fastgen.decoding.logits.repetition_penalty import RepetitionPenalty
from fastgen.decoding.logits.sequence_bias import SequenceBias
from fastgen.decoding.logits.token_ban import TokenBan
from fastgen.decoding.logits.top_p import TopP
from fastgen.decoding.logits.transform import LogitsTransform, Warper
from fastgen.models.routing.instance import toolkit_class
from fastgen.patches.transformers.compat import INSTALLED
from fastgen.patches.transformers.generate.first_tokens import of_sentences

Vocabulary = Callable[[], int]
"""Returns the size of the vocabulary."""

_Transforms = LogitsTransform | Sequence[LogitsTransform] | None


def transforms_of(processors: Sequence[Any], vocabulary: Vocabulary) -> list[LogitsTransform]:
    """Translate logits processors, in order.

    Args:
        processors: The processors.
        vocabulary: Returns the size of the vocabulary; called only if a processor needs it.
    """
    return [transform for each in processors for transform in _translated(each, vocabulary)]


def batchwise_processor(processors: Sequence[Any]) -> str | None:
    """Return the class name of a processor that forbids rows to leave the batch, or None."""
    return next((type(each).__name__ for each in processors if not _row_of(each).rowwise), None)


def has_rows(processor: Any) -> bool:
    """Return whether a row-wise processor holds state per row."""
    return isinstance(getattr(processor, "prompt_ignore_length", None), Tensor)


def _translated(processor: Any, vocabulary: Vocabulary) -> Sequence[LogitsTransform]:
    row = _row_of(processor)
    transforms = row.translate(processor, vocabulary)
    if transforms is None:
        return [ProcessorCall(_called(processor), row.static)]
    return [transforms] if isinstance(transforms, LogitsTransform) else transforms


def _row_of(processor: Any) -> "_Row":
    return _PROCESSORS.get(toolkit_class(processor), _UNKNOWN)


def _called(processor: Any) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a processor as a function of (ids, scores).

    The toolkit's list checks its parameters and raises as in the toolkit's own loops.
    """
    return cast(Any, lp.LogitsProcessorList([processor]))


def _encoder_ngrams(processor: Any, vocabulary: Vocabulary) -> LogitsTransform | None:
    source = _source_of(processor, vocabulary())
    return None if source is None else NGramBlock(processor.ngram_size, source)


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


def _in_vocabulary(biases: dict[tuple[int, ...], float], vocabulary: Vocabulary) -> bool:
    """Return whether the processor of these biases raises nothing.

    Newer releases of transformers skip empty sequences; older ones raise.
    """
    size = vocabulary()
    return all(len(sequence) > 0 and max(sequence) < size for sequence in biases)


def _sequence_bias(processor: Any, vocabulary: Vocabulary) -> LogitsTransform | None:
    biases: dict[tuple[int, ...], float] = processor.sequence_bias
    if not _in_vocabulary(biases, vocabulary):
        return None
    return SequenceBias(biases, 0 if INSTALLED.bias_reaches_start else 1)


def _bad_words(processor: Any, vocabulary: Vocabulary) -> Sequence[LogitsTransform] | None:
    """Translate banned sequences, which the processor holds as biases of -inf."""
    biases: dict[tuple[int, ...], float] = processor.sequence_bias
    if not _in_vocabulary(biases, vocabulary):
        return None
    by_length: dict[int, list[tuple[int, ...]]] = {}
    for sequence in biases:
        by_length.setdefault(len(sequence), []).append(sequence)
    transforms: list[LogitsTransform] = []
    for n, sequences in by_length.items():
        words = torch.tensor(sequences, dtype=torch.int64, device="cpu")
        if n == 1:
            transforms.append(TokenBan(words[:, 0]))
        else:
            shortest = n - 1 if INSTALLED.bias_reaches_start else n
            source = torch.nn.functional.pad(words, (0, 1), value=-1).view(1, -1)
            transforms.append(NGramBlock(n, source, shortest))
    return transforms


def _first_tokens(processor: Any, _: Vocabulary) -> LogitsTransform:
    token_id: Any = processor.bos_token_id
    tokens = of_sentences(token_id)
    if tokens is not None:
        return ForcedTokens(tokens, lambda length: length == 1, by_sentence=True)
    device = token_id.device if isinstance(token_id, Tensor) else "cpu"
    return ForcedTokens(torch.as_tensor(token_id, device=device), lambda length: length == 1)


def _penalty(processor: Any, _: Vocabulary) -> LogitsTransform:
    start = processor.prompt_ignore_length
    return RepetitionPenalty(processor.penalty, 0 if start is None else start, _called(processor))


def _temperature(processor: Any, _: Vocabulary) -> LogitsTransform:
    return ProcessorCall(
        _called(processor), static=True, warper=Warper("temperature", processor.temperature)
    )


def _top_k(processor: Any, _: Vocabulary) -> LogitsTransform:
    removes = processor.filter_value == -torch.inf
    return ProcessorCall(
        _called(processor), True, Warper("top-k", processor.top_k) if removes else None
    )


def _top_p(processor: Any, _: Vocabulary) -> LogitsTransform | None:
    if processor.filter_value != -torch.inf:
        return None
    return TopP(processor.top_p, processor.min_tokens_to_keep, _called(processor))


@dataclass(frozen=True)
class _Row:
    """What is known about a class of processors.

    Attributes:
        translate: Returns the transforms of a processor; None if it has to be called as it is.
        rowwise: Whether it handles each row by its own text alone, so that rows may leave the
            batch.
        static: Whether it depends on the scores alone and never synchronizes with the device.
    """

    translate: Callable[[Any, Vocabulary], _Transforms] = lambda _processor, _vocabulary: None
    rowwise: bool = True
    static: bool = False


_UNKNOWN = _Row(rowwise=False)

_PROCESSORS: dict[Any, _Row] = {
    lp.NoRepeatNGramLogitsProcessor: _Row(lambda p, _: NGramBlock(p.ngram_size)),
    lp.EncoderNoRepeatNGramLogitsProcessor: _Row(_encoder_ngrams, rowwise=False),
    lp.NoBadWordsLogitsProcessor: _Row(_bad_words),
    lp.SequenceBiasLogitsProcessor: _Row(_sequence_bias),
    lp.RepetitionPenaltyLogitsProcessor: _Row(_penalty),
    lp.MinLengthLogitsProcessor: _Row(
        lambda p, _: TokenBan(p.eos_token_id, lambda length: length < p.min_length)
    ),
    lp.MinNewTokensLengthLogitsProcessor: _Row(
        lambda p, _: TokenBan(
            p.eos_token_id, lambda length: length - p.prompt_length_to_skip < p.min_new_tokens
        )
    ),
    lp.SuppressTokensLogitsProcessor: _Row(lambda p, _: TokenBan(p.suppress_tokens)),
    lp.SuppressTokensAtBeginLogitsProcessor: _Row(
        lambda p, _: TokenBan(
            p.begin_suppress_tokens, lambda length: length == p.begin_index, skipped=True
        )
    ),
    lp.ForcedBOSTokenLogitsProcessor: _Row(_first_tokens),
    lp.ForcedEOSTokenLogitsProcessor: _Row(
        lambda p, _: ForcedTokens(p.eos_token_id, lambda length: length == p.max_length - 1)
    ),
    lp.TemperatureLogitsWarper: _Row(_temperature, static=True),
    lp.TopKLogitsWarper: _Row(_top_k, static=True),
    lp.TopPLogitsWarper: _Row(_top_p, static=True),
    lp.MinPLogitsWarper: _Row(lambda p, _: MinP(p.min_p, p.min_tokens_to_keep, p.filter_value)),
    lp.TypicalLogitsWarper: _Row(static=True),
    lp.EpsilonLogitsWarper: _Row(static=True),
    lp.EtaLogitsWarper: _Row(),
    lp.InfNanRemoveLogitsProcessor: _Row(static=True),
    lp.LogitNormalization: _Row(static=True),
    lp.ExponentialDecayLengthPenalty: _Row(),
    lp.WhisperTimeStampLogitsProcessor: _Row(),
}
"""Every class of processors that is translated or known; subclasses do not count."""
