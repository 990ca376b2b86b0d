"""Generation from texts: tokenize, run `generate` on batches of similar lengths, decode.

The three stages are separate methods, so that they can run concurrently on different texts. A text
that cannot be generated becomes a `Problem` in its place and does not affect the others.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import fastgen
from fastgen import config
from fastgen.corpus import models
from fastgen.corpus.languages import Names, Unknown
from fastgen.corpus.limits import limit_of
from fastgen.decoding.batching.batch_compaction import CancellationCallback
from fastgen.errors import CommandError

if TYPE_CHECKING:
    from torch import Tensor

OnTokens = Callable[[int, list[int]], object]

_logger = logging.getLogger("fastgen")
NO_TEXT = "there is no text"
_UNLIMITED = 10**6  # a tokenizer's model_max_length from here on means "no limit"


@dataclass(frozen=True)
class Options:
    """Everything that an output depends on besides its text.

    Attributes:
        model: folder of the model and its tokenizer, or their id on the hub.
        generation: arguments of `generate`, JSON-ready.
        device: device of the model; None for CUDA if available, else the CPU.
        dtype: dtype of the weights, as torch names it.
        precision: int8 to round weights on a CPU to int8, which changes the output; None for
            `FASTGEN_PRECISION`.
        threads: torch's CPU threads; None to leave them as they are.
        batch_tokens: source tokens of a batch, padding included.
        max_source_tokens: the most tokens of a source; None for the tokenizer's limit. A longer
            text is a problem.
        truncate: truncate longer texts instead.
        append_eos: end each source with the end token, for tokenizers that do not.
        prefix: text before each source, such as T5's task.
        forced_bos_token: the output's first token, by name.
        source_lang: language of the sources, as the tokenizer names it (NLLB, mBART, M2M100).
        target_lang: language of the outputs, likewise.
        targets: if set, each text has a first token of its own, named as a "language" or as a
            "token".
        scores: whether outputs have scores.
        seed: random seed for sampling; each block draws from a state of its own.
        special_tokens: keep special tokens in the output.
        clean_up: remove spaces before punctuation from the output.
        assistant: folder or id of a small model that drafts; its options are in `generation`.
    """

    model: Path
    generation: dict[str, Any] = field(default_factory=dict)
    device: str | None = None
    dtype: str = "float32"
    precision: config.Precision | None = None
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
    """A blank line of plain text. It is not an error: its output is a blank line too."""


@dataclass(frozen=True)
class Source:
    """Token ids of a text.

    Attributes:
        ids: the token ids.
        first: first token of the output; None if it is that of all texts, or not forced.
    """

    ids: list[int]
    first: int | None = None

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True)
class Output:
    """Generated texts for one source.

    Attributes:
        texts: the sequences, the best first.
        tokens: number of tokens in all sequences, without special ones.
        scores: score of each sequence, if requested; see `generate_stream`.
        at_limit: whether the best sequence reached its length limit.
    """

    texts: list[str]
    tokens: int
    scores: list[float] | None = None
    at_limit: bool = False


class Sequences(NamedTuple):
    """Generated sequences for one source.

    Attributes:
        ids: (N, L) int64, without the start token or the prompt.
        scores: (N,), if requested.
        at_limit: whether the best sequence reached its length limit.
    """

    ids: Tensor
    scores: Tensor | None
    at_limit: bool = False


def _is_of_the_machine(error: Exception, alone: bool) -> bool:
    """Return whether the machine failed, so that the error says nothing about a text.

    That is the case if a device has failed, or if memory ran out for a single text (`alone`).
    """
    import torch

    from fastgen.models.memory.scratch import is_out_of_memory

    memory = isinstance(error, MemoryError) or is_out_of_memory(error)
    return alone if memory else isinstance(error, torch.AcceleratorError)


class TextGenerator:
    """A model and its tokenizer, which generate from texts.

    Args:
        options: the model and the options of generation.
        serves: whether a single text that needs too much memory becomes a problem, since others
            wait for theirs. If False, it raises.

    Raises:
        CommandError: there is no such model, it cannot be read, or an option does not fit it.
    """

    def __init__(self, options: Options, serves: bool = False) -> None:
        models.need("transformers")
        models.folder_of(options.model)
        self.options, self.serves = options, serves
        if options.precision is not None:
            config.use_precision(options.precision)
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
        self._stream([])  # raises now if an option is invalid
        self._end = self.tokenizer.eos_token_id
        self._special = set(self.tokenizer.all_special_ids) - {self.tokenizer.unk_token_id}
        if options.append_eos and self._end is None:
            raise CommandError("--append-eos: the tokenizer has no end token")

    def __call__(self, texts: Sequence[str], targets: Sequence[str] = ()) -> list[Output | Problem]:
        """Return the outputs of some texts, in order; see `encode`."""
        return self.decode(self.generate(self.encode(texts, targets)))

    def encode(self, texts: Sequence[str], targets: Sequence[str] = ()) -> list[Source | Problem]:
        """Return the token ids of each text.

        Args:
            texts: the texts.
            targets: the name of each output's first token, if `Options.targets` is set.
        """
        limit = self.options.max_source_tokens
        if limit is None and self.tokenizer.model_max_length < _UNLIMITED:
            limit = int(self.tokenizer.model_max_length)
        prefixed = [self.options.prefix + text for text in texts]
        # Not verbose: sources that are too long are reported as problems.
        encoded = self.tokenizer(prefixed, verbose=False)["input_ids"] if texts else []
        sources = [self._source(text, ids, limit) for text, ids in zip(texts, encoded, strict=True)]
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
        wanted: CancellationCallback | None = None,
        on_tokens: OnTokens | None = None,
    ) -> list[Sequences | Problem]:
        """Return the generated sequences of each source.

        If the model fails for several sources, each is generated alone.

        Args:
            sources: the sources and problems. Either all sources have a first token, or none has.
            wanted: returns whether the source with an index is still needed; see `generate_stream`.
            on_tokens: called with the index of a source and new tokens of its output, as long as
                the model does not fail.
        """
        places = [place for place, source in enumerate(sources) if isinstance(source, Source)]
        good = [source for source in sources if isinstance(source, Source)]
        report = None if on_tokens is None else lambda i, tokens: on_tokens(places[i], tokens)
        generated = iter(self._generated(good, _at(wanted, places), report))
        return [source if isinstance(source, Problem) else next(generated) for source in sources]

    def decode(self, found: Sequence[Sequences | Problem]) -> list[Output | Problem]:
        """Return the texts of sequences."""
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
        """Return the arguments of `generate` for a small model.

        The tokenizers are compared here, so `generate` does not need them.
        """
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
        """Set explicitly what transformers would otherwise infer, with a warning at every call."""
        config = self.model.generation_config
        if self.generation.get("max_new_tokens") is not None or self.limit.tokens is None:
            config.max_length = None
        if config.pad_token_id is None and "pad_token_id" not in self.generation and self.ends:
            eos = self._generation_setting("eos_token_id")
            self.generation["pad_token_id"] = eos[0] if isinstance(eos, list) else eos

    def _generation_setting(self, name: str) -> Any:
        """Return an argument of `generate`, from the options or the model's generation config."""
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
        self,
        sources: list[Source],
        wanted: CancellationCallback | None,
        on_tokens: OnTokens | None = None,
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
            if len(sources) == 1:  # the text itself makes the model fail
                return [Problem(said)]
            _logger.warning("%d texts one by one, after %s", len(sources), said)
        return [self._generated([source], _at(wanted, [i]))[0] for i, source in enumerate(sources)]

    def _sequences(
        self, sources: list[Source], wanted: CancellationCallback | None, on_tokens: OnTokens | None
    ) -> Iterator[Sequences]:
        import torch

        start = 1 if self.model.config.is_encoder_decoder else 0
        ends = torch.tensor(sorted(self.ends), dtype=torch.int64, device="cpu")
        # A forced end token is the last token of a text that reaches its limit.
        forced = self._generation_setting("forced_eos_token_id") is not None
        limits = {self.limit.of(len(source)) for source in sources}
        for source, found in zip(sources, self._stream(sources, wanted, on_tokens), strict=True):
            ids, scores = found if self.options.scores else (found, None)
            ids = ids[:, start or len(source) :]
            ended = torch.isin(ids[0], ends).nonzero()
            yield Sequences(ids, scores, not len(ended) or (forced and int(ended[0]) + 1 in limits))

    def _stream(
        self,
        sources: list[Source],
        wanted: CancellationCallback | None = None,
        on_tokens: OnTokens | None = None,
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
                self.model, [source.ids for source in sources],
                max_tokens=self.options.batch_tokens, window=max(1, len(sources)),
                scores=self.options.scores, wanted=wanted, on_tokens=on_tokens,
                **{**self.generation, **own},
            )  # fmt: skip
        except (TypeError, ValueError) as error:
            raise CommandError(models.first_line(error)) from error

    def text(self, ids: Sequence[int]) -> str:
        """Return the text of some tokens, not stripped."""
        return self.tokenizer.decode(
            ids, skip_special_tokens=not self.options.special_tokens,
            clean_up_tokenization_spaces=self.options.clean_up or None,
        )  # fmt: skip

    @property
    def ends(self) -> frozenset[int]:
        """The tokens that end a text."""
        eos = self._generation_setting("eos_token_id")
        return frozenset(eos if isinstance(eos, list) else [] if eos is None else [eos])

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
    """Return the source with its first token; else the problem of the source or of the token."""
    if isinstance(source, Problem):
        return source
    return first if isinstance(first, Problem) else replace(source, first=first)


def _at(wanted: CancellationCallback | None, places: Sequence[int]) -> CancellationCallback | None:
    """Restrict `wanted` to the sources at some indices."""
    return None if wanted is None else lambda i: wanted(places[i])


def _known(option: str, find: Callable[[str], int], name: str) -> int:
    try:
        return find(name)
    except Unknown as error:
        raise CommandError(f"{option} {error}") from error
