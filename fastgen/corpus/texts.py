"""Texts in, texts out: tokens are made, `generate` runs on batches of like lengths, texts are made of what it wrote.

The three stages are methods of their own, so that they can run beside each other on different texts. A text that
cannot be generated is a `Problem` in its place and leaves the others as they are.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import fastgen
from fastgen.corpus import models
from fastgen.corpus.languages import Names, Unknown
from fastgen.corpus.limits import limit_of
from fastgen.decoding.batching.batch_compaction import Wanted
from fastgen.errors import CommandError

if TYPE_CHECKING:
    from torch import Tensor

OnTokens = Callable[[int, list[int]], object]

_logger = logging.getLogger("fastgen")
NO_TEXT = "there is no text"
_UNLIMITED = 10**6  # a tokenizer's model_max_length above this stands for none


@dataclass(frozen=True)
class Options:
    """What an output depends on, beside its text.

    Attributes:
        model: folder of the model and its tokenizer, or their id on the hub.
        generation: arguments of `generate`, JSON-ready.
        dtype: the weights' type, as torch names it.
        batch_tokens: tokens of a batch, padding counted.
        max_source_tokens: a longer text is a problem, or is cut where `truncate`; None: what the tokenizer says.
        append_eos: end each source with the end token, for tokenizers that do not.
        prefix: text before each source, such as T5's task.
        forced_bos_token: the output's first token, by name.
        source_lang, target_lang: languages, as tokenizers that know such name them (NLLB, mBART, M2M100).
        targets: that each text has a first token of its own, named as a "language" or as a "token".
        scores: whether outputs have them.
        seed: of what is drawn where `generation` samples; each block draws from a state of its own.
        special_tokens: leave special tokens in the output. clean_up: take spaces before punctuation out of it.
        assistant: folder or id of a small model that drafts; `generation` has the options.
    """

    model: Path
    generation: dict[str, Any] = field(default_factory=dict)
    device: str | None = None
    dtype: str = "float32"
    threads: int | None = None
    batch_tokens: int = 4096
    max_source_tokens: int | None = None
    truncate: bool = False
    append_eos: bool = False
    prefix: str = ""
    forced_bos_token: str | None = None
    source_lang: str | None = None
    target_lang: str | None = None
    targets: Literal["language", "token"] | None = None
    scores: bool = False
    seed: int = 0
    special_tokens: bool = False
    clean_up: bool = False
    assistant: Path | None = None


@dataclass(frozen=True)
class Problem:
    """Why a text has no output."""

    reason: str


class Blank(Problem):
    """What a blank line of plain text is: no error, as its output is a blank line too."""


@dataclass(frozen=True)
class Source:
    """A text as a model takes it.

    first: the token that its output begins with; None where it is that of all texts, or any.
    """

    ids: list[int]
    first: int | None = None

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True)
class Output:
    """What was written for a text: its sequences, the best first, and their tokens together, special ones aside.

    scores: of each sequence, where they were asked for; see `generate_stream`. at_limit: whether the best one ended
    because it may not be longer.
    """

    texts: list[str]
    tokens: int
    scores: list[float] | None = None
    at_limit: bool = False


class Sequences(NamedTuple):
    """ids (N, L) int64, behind the start or the prompt; scores (N,), where asked for; at_limit: whether the best is."""

    ids: Tensor
    scores: Tensor | None
    at_limit: bool = False


def _is_of_the_machine(error: Exception, alone: bool) -> bool:
    """Whether a device has failed, or memory was not enough for one text `alone`, which says nothing of a text."""
    import torch

    from fastgen.models.memory.scratch import is_out_of_memory

    memory = isinstance(error, MemoryError) or is_out_of_memory(error)
    return alone if memory else isinstance(error, torch.AcceleratorError)


class TextGenerator:
    """A model and its tokenizer, which take texts.

    Args:
        serves: whether a text that alone takes more memory than there is has a problem, as others wait for theirs; else
            it ends all.

    Raises:
        CommandError: there is no such model, or it cannot be read, or an option does not fit it.
    """

    def __init__(self, options: Options, serves: bool = False) -> None:
        models.need("transformers")
        models.folder_of(options.model)
        self.options, self.serves = options, serves
        device = models.usable_device(options.device, options.threads)
        self.tokenizer = models.load_tokenizer(options.model)
        self.model = models.load_model(options.model, device, options.dtype)
        self.generation = dict(options.generation)
        self.names = Names(self.tokenizer, options.model)
        self._set_first_tokens()
        if options.assistant is not None:
            self.generation |= self._assistant(options.assistant, device)
        self.limit = limit_of(self.model, self.generation)
        self._say_what_transformers_would_guess()
        self._stream([])  # what is wrong with the options is said now
        self._end = self.tokenizer.eos_token_id
        self._special = set(self.tokenizer.all_special_ids) - {self.tokenizer.unk_token_id}
        if options.append_eos and self._end is None:
            raise CommandError("--append-eos: the tokenizer has no end token")

    def __call__(self, texts: Sequence[str], targets: Sequence[str] = ()) -> list[Output | Problem]:
        """The outputs of some texts, in their order; see `encode`."""
        return self.decode(self.generate(self.encode(texts, targets)))

    def encode(self, texts: Sequence[str], targets: Sequence[str] = ()) -> list[Source | Problem]:
        """The token ids of each text.

        targets: the name of the first token of each output, where `Options.targets` says what they name.
        """
        limit = self.options.max_source_tokens
        if limit is None and self.tokenizer.model_max_length < _UNLIMITED:
            limit = int(self.tokenizer.model_max_length)
        whole = [self.options.prefix + text for text in texts]
        found = (
            self.tokenizer(whole, verbose=False)["input_ids"] if texts else []
        )  # of long ones the problem speaks
        sources = [self._source(text, ids, limit) for text, ids in zip(texts, found, strict=True)]
        if self.options.targets is None:
            return sources
        first = {target: self._first_token(target) for target in set(targets)}
        return [
            _beginning(source, first[target])
            for source, target in zip(sources, targets, strict=True)
        ]

    def generate(
        self,
        sources: Sequence[Source | Problem],
        wanted: Wanted | None = None,
        on_tokens: OnTokens | None = None,
    ) -> list[Sequences | Problem]:
        """The sequences of each source.

        Where the model fails for some of them, each is tried alone.

        Args:
            sources: all with a first token, or none.
            wanted: whether somebody still waits for a source, by its place; see `generate_stream`.
            on_tokens: called with the place of a source and tokens of its output, as they come, where the model does
                not fail.
        """
        places = [place for place, source in enumerate(sources) if isinstance(source, Source)]
        good = [source for source in sources if isinstance(source, Source)]
        told = None if on_tokens is None else lambda i, tokens: on_tokens(places[i], tokens)
        made = iter(self._generated(good, _at(wanted, places), told))
        return [source if isinstance(source, Problem) else next(made) for source in sources]

    def decode(self, found: Sequence[Sequences | Problem]) -> list[Output | Problem]:
        """The texts of sequences."""
        return [one if isinstance(one, Problem) else self._text(one) for one in found]

    def _set_first_tokens(self) -> None:
        options, names = self.options, self.names
        if options.forced_bos_token is not None:
            self.generation["forced_bos_token_id"] = _known(
                "--forced-bos-token", names.token, options.forced_bos_token
            )
        if options.source_lang is not None:
            _known("--source-lang", names.language, options.source_lang)
            self.tokenizer.src_lang = names.code(options.source_lang)
        if options.target_lang is not None:
            name = "decoder_start_token_id" if names.begins_with_language else "forced_bos_token_id"
            self.generation[name] = _known("--target-lang", names.language, options.target_lang)
        if options.targets == "language":
            names.check_languages("--target-lang-column")
        elif options.targets not in (None, "token"):
            raise CommandError(f"targets={options.targets!r} must be 'language' or 'token'")

    def _assistant(self, model: Path, device: str) -> dict[str, Any]:
        """What `generate` gets for a small model; the tokenizers are compared here, and it does not need them."""
        from fastgen.patches.transformers.bild.bild_call import options_of

        small = {"assistant_model": models.load_model(model, device, self.options.dtype)}
        tokenizers = {
            "tokenizer": self.tokenizer,
            "assistant_tokenizer": models.load_tokenizer(model),
        }
        try:
            options_of(self.model, {**self.generation, **small, **tokenizers})
        except (TypeError, ValueError) as error:
            raise CommandError(str(error)) from error
        return small

    def _say_what_transformers_would_guess(self) -> None:
        """What transformers would warn of at every call, though it does the same."""
        config = self.model.generation_config
        if self.generation.get("max_new_tokens") is not None or self.limit.tokens is None:
            config.max_length = None
        if config.pad_token_id is None and "pad_token_id" not in self.generation and self.ends:
            found = self._said("eos_token_id")
            self.generation["pad_token_id"] = found[0] if isinstance(found, list) else found

    def _said(self, name: str) -> Any:
        """An argument of `generate`, as given or of the model's generation config."""
        return self.generation.get(name, getattr(self.model.generation_config, name, None))

    def _source(self, text: str, ids: list[int], limit: int | None) -> Source | Problem:
        if self.options.append_eos and ids[-1:] != [self._end]:
            ids = [*ids, self._end]
        if not text.strip() or not ids:
            return Problem(NO_TEXT)
        if limit is None or len(ids) <= limit:
            return Source(ids)
        if not self.options.truncate:
            return Problem(f"{len(ids)} tokens, {limit} at most")
        ends = len(list(itertools.takewhile(self._special.__contains__, reversed(ids))))
        ends = min(ends, limit)
        return Source([*ids[: limit - ends], *ids[len(ids) - ends :]])

    def _first_token(self, target: str) -> int | Problem:
        try:
            return (
                self.names.language(target)
                if self.options.targets == "language"
                else self.names.token(target)
            )
        except Unknown as error:
            return Problem(str(error))

    def _generated(
        self, sources: list[Source], wanted: Wanted | None, on_tokens: OnTokens | None = None
    ) -> list[Sequences | Problem]:
        try:
            return list(self._sequences(sources, wanted, on_tokens))
        except CommandError:
            raise
        except Exception as error:
            said = f"{type(error).__name__}: {models.first_line(error)}"
            if _is_of_the_machine(error, len(sources) == 1 and not self.serves):
                longest = max(map(len, sources))
                raise CommandError(
                    f"{said} (texts: {len(sources)}, tokens of the longest: {longest})"
                ) from error
            if len(sources) == 1:  # what a model raises for one text is a problem of that text
                return [Problem(said)]
            _logger.warning("%d texts one by one, after %s", len(sources), said)
        return [self._generated([source], _at(wanted, [i]))[0] for i, source in enumerate(sources)]

    def _sequences(
        self, sources: list[Source], wanted: Wanted | None, on_tokens: OnTokens | None
    ) -> Iterator[Sequences]:
        import torch

        start = 1 if self.model.config.is_encoder_decoder else 0
        ends = torch.tensor(sorted(self.ends), dtype=torch.int64, device="cpu")
        forced = (
            self._said("forced_eos_token_id") is not None
        )  # as the last token that there may be
        limits = {self.limit.of(len(source)) for source in sources}
        for source, found in zip(sources, self._stream(sources, wanted, on_tokens), strict=True):
            ids, scores = found if self.options.scores else (found, None)
            ids = ids[:, start or len(source) :]
            ended = torch.isin(ids[0], ends).nonzero()
            yield Sequences(ids, scores, not len(ended) or (forced and int(ended[0]) + 1 in limits))

    def _stream(
        self, sources: list[Source], wanted: Wanted | None = None, on_tokens: OnTokens | None = None
    ) -> Iterator[Any]:
        first = [source.first for source in sources if source.first is not None]
        own: dict[str, Any] = {"forced_bos_token_id": first} if first else {}
        if self.model.config.is_encoder_decoder and self.limit.tokens is None:
            own |= (
                {"max_new_tokens": self.limit.of}
                if self.generation.get("max_new_tokens") is None
                else {}
            )
        try:
            return fastgen.generate_stream(
                self.model, [source.ids for source in sources], max_tokens=self.options.batch_tokens,
                window=max(1, len(sources)), scores=self.options.scores, wanted=wanted, on_tokens=on_tokens,
                **{**self.generation, **own},
            )  # fmt: skip
        except (TypeError, ValueError) as error:
            raise CommandError(models.first_line(error)) from error

    def text(self, ids: Sequence[int]) -> str:
        """The text of some tokens, as it stands within an output."""
        return self.tokenizer.decode(
            ids, skip_special_tokens=not self.options.special_tokens,
            clean_up_tokenization_spaces=self.options.clean_up or None,
        )  # fmt: skip

    @property
    def ends(self) -> frozenset[int]:
        """The tokens that end a text."""
        found = self._said("eos_token_id")
        return frozenset(found if isinstance(found, list) else [] if found is None else [found])

    def _text(self, sequences: Sequences) -> Output:
        import torch

        texts = map(self.text, sequences.ids.tolist())
        special = torch.tensor(
            self.tokenizer.all_special_ids, dtype=torch.int64, device=sequences.ids.device
        )
        tokens = int((~torch.isin(sequences.ids, special)).sum())
        scores = None if sequences.scores is None else sequences.scores.tolist()
        return Output([text.strip() for text in texts], tokens, scores, sequences.at_limit)


def _beginning(source: Source | Problem, first: int | Problem) -> Source | Problem:
    """The source whose output has this first token; or the problem that there is, the source's before the token's."""
    if isinstance(source, Problem):
        return source
    return first if isinstance(first, Problem) else replace(source, first=first)


def _at(wanted: Wanted | None, places: Sequence[int]) -> Wanted | None:
    """The same for some sources among others."""
    return None if wanted is None else lambda i: wanted(places[i])


def _known(option: str, find: Callable[[str], int], name: str) -> int:
    try:
        return find(name)
    except Unknown as error:
        raise CommandError(f"{option} {error}") from error
