"""`generate_stream`: generate many sentences in batches of similar lengths, in input order."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import islice, takewhile
from typing import Any, cast

import torch
from torch import Tensor

from fastgen.context import isolated
from fastgen.decoding.batching.batch_compaction import CancellationCallback
from fastgen.decoding.kv_cache import common_prefix
from fastgen.patches.engine import engine
from fastgen.patches.generation_call import requesting
from fastgen.patches.transformers import compat
from fastgen.patches.transformers.bild import bild_call
from fastgen.patches.transformers.compat import CACHE_ARGUMENTS
from fastgen.patches.transformers.generate import first_tokens
from fastgen.patches.transformers.generate.outputs import Scored, scored_by_transformers
from fastgen.patches.transformers.generate.resolve_setting import setting_of
from fastgen.patches.transformers.streaming.padding import Padding, eos_tokens_of
from fastgen.patches.transformers.streaming.refill import Batch, Refill, what_wraps_generate
from fastgen.patches.transformers.streaming.suspend import SuspendedDecode

MAX_TOKENS = 4096
"""Default maximum number of tokens in a batch, including padding."""

WINDOW = 1024
"""Default number of sentences that are read ahead and sorted by length."""


def generate_stream(
    model: Any,
    inputs: Iterable[Sequence[int] | Tensor],
    *,
    max_tokens: int = MAX_TOKENS,
    window: int = WINDOW,
    scores: bool = False,
    wanted: CancellationCallback | None = None,
    on_tokens: Callable[[int, list[int]], object] | None = None,
    **generate_kwargs: Any,
) -> Iterator[Any]:
    """Yield the result of ``model.generate(**generate_kwargs)`` for each of `inputs`, in order.

    Reads `window` sentences at a time, sorts them by length, and generates them in batches of at
    most `max_tokens` tokens. The output for a sentence does not depend on the other sentences,
    except for rounding.

    Args:
        model: A transformers model that can generate.
        inputs: Token ids of each sentence, without padding: the source or, for a decoder-only
            model, the prompt.
        max_tokens: Maximum number of tokens in a batch, including padding. A longer sentence is a
            batch by itself.
        window: Number of sentences to read ahead.
        scores: Whether to return a score with each sequence: the `sequences_scores` of a beam
            search, otherwise the sum of the log-probabilities of its tokens, as computed by
            `compute_transition_scores(..., normalize_logits=True)`. In fastgen's loops, this stores
            no per-step scores.
        wanted: Cancellation callback. Takes the index of a sentence, from 0, and returns whether
            its result is still wanted; called after every decode step. A cancelled sentence leaves
            the batch like a finished one, and the value yielded for it is meaningless.
            `docs/stream.md` lists the cases in which sentences cannot be cancelled.
        on_tokens: Called with the index of a sentence and newly generated tokens, as soon as they
            are final. It gets each token once, in order, and all tokens of a sentence before the
            sentence is yielded. Runs in the thread that generates.
        generate_kwargs: Arguments of `generate` other than the inputs and their mask.
            `forced_bos_token_id` can also be an iterable with one token per sentence, which is read
            in step with `inputs`; a list of one token applies to all. `max_new_tokens` can also be
            a function of the number of tokens of the longest sentence in a batch. Output that
            reaches that limit depends on the other sentences of the batch.

    Yields:
        Sequences (N, L) int64 on the CPU, N = num_return_sequences, padded to the longest of the N.
        Those of a decoder-only model begin with the prompt. With `scores`, a `Scored` pair of the
        sequences and their scores (N,).

    Raises:
        TypeError: An argument is not supported; the message names it.
        ValueError: A sentence has no tokens, a size is not positive, or `on_tokens` is combined
            with several sequences per sentence; the message contains the value. Errors of a
            sentence, and exceptions of `inputs`, are raised after the results of all sentences
            before it. Also raised if the numbers of first tokens and sentences differ, before
            anything in that window is generated.
    """
    # Validates the arguments here instead of at the first sentence.
    stream = _Stream(model, max_tokens, window, scores, wanted, on_tokens, generate_kwargs)
    return stream.run(iter(inputs))


def generate_window(
    model: Any,
    sentences: Sequence[Tensor],
    *,
    max_tokens: int,
    max_sentences: int,
    **generate_kwargs: Any,
) -> list[Tensor]:
    """Return the sequences (N, L) int64 of each of a number of sentences, as `generate_stream`.

    Args:
        model: A transformers model that can generate.
        sentences: Token ids (L,) int64 of each sentence, without padding.
        max_tokens: Maximum number of tokens in a batch, including padding.
        max_sentences: Maximum number of sentences in a batch.
        generate_kwargs: Arguments of `generate` other than the inputs and their mask.

    Raises:
        TypeError: An argument is not supported.
    """
    stream = _Stream(model, max_tokens, len(sentences), False, None, None, generate_kwargs)
    stream.max_sentences = max_sentences
    return list(stream.run(iter(sentences)))


class _Stream:
    def __init__(
        self,
        model: Any,
        max_tokens: int,
        window: int,
        scores: bool,
        wanted: CancellationCallback | None,
        on_tokens: Callable[[int, list[int]], object] | None,
        kwargs: dict[str, Any],
    ) -> None:
        for name, value in (("max_tokens", max_tokens), ("window", window)):
            if value < 1:
                raise ValueError(f"{name} = {value} must be at least 1")
        kwargs = {name: value for name, value in kwargs.items() if value is not None}
        self.model, self.max_tokens, self.window, self.kwargs = model, max_tokens, window, kwargs
        self.wanted, self.begun = wanted, 0  # begun: number of sentences in earlier windows
        self.max_sentences: int | None = None
        limit = kwargs.get("max_new_tokens")
        self.limit = limit if callable(limit) else None
        if self.limit is not None:
            kwargs["max_new_tokens"] = self.limit(1)  # `_generate` sets the limit of each batch
        # told: number of tokens reported so far, by sentence.
        self.on_tokens, self.told = on_tokens, dict[int, int]()
        self.encoder_decoder = bool(model.config.is_encoder_decoder)
        vocabulary = model.config.get_text_config(decoder=True).vocab_size
        self.first = first_tokens.beside(setting_of(model, kwargs, _FIRST), vocabulary)
        self.drafts = False
        if self.first is not None:
            kwargs[_FIRST] = 0  # `_generate` sets the tokens of each batch
            # Big-little decoding takes one first token for the whole batch.
            self.drafts = bild_call.options_of(model, dict(kwargs)) is not None
        config = compat.prepare_config(model, kwargs.get("generation_config"), _settings(kwargs))
        if config.return_dict_in_generate:
            raise TypeError("return_dict_in_generate=True: a stream yields sequences alone")
        for name in _REFUSED & set(kwargs):
            raise TypeError(f"{name}: a stream cannot have it")
        if not self.encoder_decoder and config.max_new_tokens is None:
            raise TypeError(
                "max_new_tokens is needed: a prompt's padding would count in max_length"
            )
        if not self.encoder_decoder and config.min_length:
            raise TypeError(
                f"min_length = {config.min_length} would count a prompt's padding; "
                "say min_new_tokens"
            )
        self.padding = Padding.of(config, self.encoder_decoder, "logits_processor" in kwargs)
        self.ends = eos_tokens_of(config)
        self.copies = config.num_return_sequences or 1
        if on_tokens is not None and self.copies > 1:
            raise ValueError(
                "on_tokens follows one text of a sentence, "
                f"and num_return_sequences is {self.copies}"
            )
        self.scores, self.config = scores, config
        self.by_transformers = False  # whether scores are known to come from transformers' loops

        self.refill = Refill(model, max_tokens, self._generate, config, kwargs)

    def run(self, inputs: Iterator[Sequence[int] | Tensor]) -> Iterator[Any]:
        error = None
        while error is None and (waiting := self._window(inputs)):
            results: dict[int, Any] = {}
            for batch, output in self._generated(waiting):
                results.update(zip(batch.places, self._each(batch, output), strict=True))
            for i in range(len(waiting.sentences)):
                yield results.pop(i)
            self.begun, error = self.begun + len(waiting.sentences), waiting.error
        if error is not None:
            raise error

    def _generated(self, waiting: "_Waiting") -> list[tuple[Batch, Any]]:
        """Generate the sentences of a window; return each batch with the output for it."""
        done: list[tuple[Batch, Any]] = []

        def note(batch: Batch, output: Any) -> None:
            done.append((batch, output))

        isolated(self.refill.run, waiting.take, note)
        return done

    def _window(self, inputs: Iterator[Sequence[int] | Tensor]) -> "_Waiting | None":
        """Read the next window of sentences; return None if there are no more."""
        sentences, first, error = list[Tensor](), list[int](), None
        read = islice(inputs, self.window)
        while error is None:
            try:
                sentences.append(token_ids(next(read)))
            except StopIteration:
                break
            except Exception as read_error:
                if not sentences:
                    raise
                error = read_error  # raised after the results of the sentences before it
            else:
                if self.first is not None:
                    first.append(self.first.take())
        if self.first is not None and error is None and len(sentences) < self.window:
            self.first.end()
        apart = self.first is not None and (
            self.drafts or not engine.is_applied("transformers.first_tokens")
        )
        if not sentences:
            return None
        return _Waiting(
            sentences, first, self.max_tokens, self.max_sentences, self.padding, apart,
            self._groups(sentences), error,
        )  # fmt: skip

    def _groups(self, sentences: list[Tensor]) -> list[list[int]]:
        """Return groups of sentences that begin alike and are best generated apart."""
        if self.encoder_decoder or self.model.device.type != "cpu" or self.config.do_sample:
            return []
        width = getattr(self.model.config.get_text_config(decoder=True), "hidden_size", 0)
        texts: list[list[int]] = [cast(Any, sentence).tolist() for sentence in sentences]
        return common_prefix.groups(texts, self.config.max_new_tokens, width)

    def _generate(self, batch: Batch) -> Any:
        inputs, kwargs = batch.inputs(self.model, self.padding.fill), self.kwargs
        if self.limit is not None:
            kwargs = kwargs | {"max_new_tokens": self.limit(batch.width)}
        if batch.first:
            kwargs = kwargs | {_FIRST: batch.first if len(set(batch.first)) > 1 else batch.first[0]}
        with self._awaited(batch):
            return self._called(inputs, kwargs)

    def _awaited(self, batch: Batch) -> AbstractContextManager[Any]:
        wanted, begun = self.wanted, self.begun
        no_callbacks = wanted is None and self.on_tokens is None
        if no_callbacks or what_wraps_generate(self.model, self.config, self.kwargs) is not None:
            return nullcontext()

        def is_wanted(row: int) -> bool:
            assert wanted is not None
            return wanted(begun + batch.places[row])

        def tell(row: int, place: int, ids: Sequence[int]) -> None:
            self._tell(begun + batch.places[row], place, ids)

        return requesting(
            self.model, wanted=wanted and is_wanted, on_tokens=self.on_tokens and tell
        )

    def _tell(self, number: int, place: int, tokens: Sequence[int]) -> None:
        """Report the tokens of a sentence that have not been reported yet.

        A batch that was restarted produces its tokens again.

        Args:
            number: Index of the sentence.
            place: Position of the first of `tokens` in its generated text.
            tokens: Token ids.
        """
        reported = self.told.get(number, 0)
        if self.on_tokens is not None and (new := list(tokens[reported - place :])):
            self.told[number] = reported + len(new)
            self.on_tokens(number, new)

    def _called(self, inputs: dict[str, Tensor], kwargs: dict[str, Any]) -> Any:
        """Call `generate`.

        Returns:
            The output of `generate`, `Scored` sequences if scores were requested, or a
            `SuspendedDecode`.
        """
        if not self.scores:
            return self.model.generate(**inputs, **kwargs)
        if not (self.by_transformers or engine.is_disabled()):
            if what_wraps_generate(self.model, self.config, kwargs) is None:
                with requesting(self.model, scored=True):
                    result = self.model.generate(**inputs, **kwargs)
                if isinstance(result, Scored | SuspendedDecode):
                    return result
            self.by_transformers = True
        return scored_by_transformers(self.model, inputs, kwargs, self.ends)

    def _each(self, batch: Batch, output: Any) -> Iterator[Any]:
        """Return the results to yield for the sentences of a batch."""
        if not self.scores:
            return self._cut(batch, output.cpu())
        scores = output.scores.cpu().split(self.copies)
        return map(Scored, self._cut(batch, output.sequences.cpu()), scores)

    def _cut(self, batch: Batch, found: Tensor) -> Iterator[Tensor]:
        """Yield the sequences of each sentence without their padding, given those of the batch."""
        for row, sentence in enumerate(batch.sentences):
            own = found[row * self.copies : (row + 1) * self.copies]
            prompt = 1
            if not self.encoder_decoder:
                own, prompt = own[:, batch.width - len(sentence) :], len(sentence)
            own = own[:, : self._length(own, prompt)]
            self._tell_rest(self.begun + batch.places[row], own[0, prompt:])
            yield own.clone()

    def _tell_rest(self, number: int, tokens: Tensor) -> None:
        if self.on_tokens is not None and (self.wanted is None or self.wanted(number)):
            self._tell(number, 0, cast(Any, tokens).tolist())
        self.told.pop(number, None)

    def _length(self, sequences: Tensor, prompt: int) -> int:
        """Return the length of the longest sequence, up to and including its end token."""
        generated = sequences[:, prompt:]
        if not generated.numel():
            return prompt
        ended = torch.isin(generated, self.ends).to(torch.int8)
        first = torch.where(ended.any(1), ended.argmax(1) + 1, generated.shape[1])
        return prompt + int(first.max())


class _Waiting:
    """The sentences of a window that have not started, the longest first.

    Args:
        sentences: Token ids (L,) int64 of each sentence.
        first: First token of each output, or empty.
        max_tokens: Maximum number of tokens in a batch, including padding.
        max_sentences: Maximum number of sentences in a batch; None for any.
        padding: How sentences of different lengths may be padded.
        apart: Whether all sentences of a batch must have the same first token.
        groups: Sentences that begin alike, and share a batch with no others.
        error: The exception that ended the inputs after these sentences, or None.
    """

    def __init__(
        self,
        sentences: list[Tensor],
        first: list[int],
        max_tokens: int,
        max_sentences: int | None,
        padding: Padding,
        apart: bool,
        groups: list[list[int]],
        error: Exception | None,
    ) -> None:
        self.sentences, self.first, self.error = sentences, first, error
        self.max_tokens, self.max_sentences = max_tokens, max_sentences
        lengths = [len(sentence) for sentence in sentences]
        group_of = {i: number for number, group in enumerate(groups) for i in group}
        self.kinds = [
            (first[i] if apart else 0, group_of.get(i, 0), padding.length_of(sentence))
            for i, sentence in enumerate(sentences)
        ]
        # Those that may share a batch come one after the other.
        self.order = sorted(
            range(len(sentences)),
            key=lambda i: (*self.kinds[i][:2], self.kinds[i][2] > 0, -lengths[i]),
        )

    def take(self, room: int) -> Batch | None:
        """Return the next batch of at most `room` tokens, or None if no sentence fits or is left.

        With `room` = `max_tokens`, a single sentence always fits.
        """
        if not self.order:
            return None
        longest = self.order[0]
        count = room // len(self.sentences[longest])
        if room == self.max_tokens:
            count = max(1, count)
        if self.max_sentences is not None:
            count = min(count, self.max_sentences)
        places = list(takewhile(lambda i: self.kinds[i] == self.kinds[longest], self.order[:count]))
        self.order = self.order[len(places) :]
        if not places:
            return None
        return Batch(
            places,
            [self.sentences[i] for i in places],
            [self.first[i] for i in places] if self.first else [],
        )


_FIRST = "forced_bos_token_id"

_REFUSED = {
    "inputs",
    "input_ids",
    "attention_mask",
    "inputs_embeds",
    "encoder_outputs",
    "decoder_input_ids",
    "decoder_inputs_embeds",
    "decoder_attention_mask",
    "position_ids",
    "token_type_ids",
    "streamer",
    *CACHE_ARGUMENTS,
    "stopping_criteria",
    "stop_strings",
    "prefix_allowed_tokens_fn",
}
"""Unsupported arguments of `generate`: inputs, which a stream creates itself; criteria that end a
text without an end token; and arguments that depend on the order of sentences in a batch."""


def _settings(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in kwargs.items() if name != "generation_config"}


def token_ids(sentence: Sequence[int] | Tensor) -> Tensor:
    """Return the token ids (L,) int64 of a sentence.

    Raises:
        TypeError: They are not integers.
        ValueError: They are not one row of at least one token id.
    """
    if isinstance(sentence, str | Mapping):
        raise TypeError(f"a sentence must be token ids, not a {type(sentence).__name__}")
    ids = torch.as_tensor(cast(Any, sentence), device="cpu")
    if ids.numel() and (ids.is_floating_point() or ids.dtype == torch.bool):
        raise TypeError(f"token ids must be integers, not {ids.dtype}")
    ids = ids.to(torch.int64)
    if ids.dim() != 1 or len(ids) == 0:
        raise ValueError(
            f"a sentence must be one row of at least one token id, not of shape {tuple(ids.shape)}"
        )
    return ids
