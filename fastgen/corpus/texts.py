"""Texts in, texts out: tokens are made, `generate` runs on batches of like lengths, texts are made of what it wrote.

The three stages are methods of their own, so that they can run beside each other on different texts. A text that
cannot be generated is a `Problem` in its place and leaves the others as they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fastgen
from fastgen.corpus import models
from fastgen.errors import CommandError

if TYPE_CHECKING:
    from torch import Tensor

_UNLIMITED = 10**6  # a tokenizer's model_max_length above this stands for none


@dataclass(frozen=True)
class Options:
    """What an output depends on, beside its text.

    Attributes:
        model: folder of the model and its tokenizer.
        generation: arguments of `generate`, JSON-ready.
        dtype: the weights' type, as torch names it.
        batch_tokens: tokens of a batch, padding counted.
        max_source_tokens: a longer text is a problem, or is cut where `truncate`; None: what the tokenizer says.
        append_eos: end each source with the end token, for tokenizers that do not.
        prefix: text before each source, such as T5's task.
        forced_bos_token: the output's first token, by name, such as NLLB's language.
        seed: of what is drawn where `generation` samples; each block draws from a state of its own.
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
    seed: int = 0


@dataclass(frozen=True)
class Problem:
    """Why a text has no output."""

    reason: str


@dataclass(frozen=True)
class Output:
    """What was written for a text: its sequences, the best first, and their tokens together, special ones aside."""

    texts: list[str]
    tokens: int


class TextGenerator:
    """A model and its tokenizer, which take texts.

    Raises:
        CommandError: the folder holds no model that can be read, or an option does not fit it.
    """

    def __init__(self, options: Options) -> None:
        models.check_folder(options.model)
        models.need("transformers", "transformers")
        self.options = options
        device = models.usable_device(options.device, options.threads)
        self.tokenizer = models.load_tokenizer(options.model)
        self.model = models.load_model(options.model, device, options.dtype)
        self.generation = dict(options.generation)
        if options.forced_bos_token is not None:
            self.generation["forced_bos_token_id"] = self._token(options.forced_bos_token)
        self._end = self.tokenizer.eos_token_id
        if options.append_eos and self._end is None:
            raise CommandError("--append-eos: the tokenizer has no end token")

    def __call__(self, texts: Sequence[str]) -> list[Output | Problem]:
        """The outputs of some texts, in their order."""
        return self.decode(self.generate(self.encode(texts)))

    def encode(self, texts: Sequence[str]) -> list[list[int] | Problem]:
        """The token ids of each text."""
        limit = self.options.max_source_tokens
        if limit is None and self.tokenizer.model_max_length < _UNLIMITED:
            limit = int(self.tokenizer.model_max_length)
        found = self.tokenizer([self.options.prefix + text for text in texts])["input_ids"] if texts else []
        return [self._source(text, ids, limit) for text, ids in zip(texts, found, strict=True)]

    def generate(self, sources: Sequence[list[int] | Problem]) -> list[Tensor | Problem]:
        """The sequences (N, L) of each source, behind the start or the prompt.

        Where the model fails for some of them, each is tried alone.
        """
        good = [source for source in sources if not isinstance(source, Problem)]
        made = iter(self._generated(good))
        return [source if isinstance(source, Problem) else next(made) for source in sources]

    def decode(self, found: Sequence[Tensor | Problem]) -> list[Output | Problem]:
        """The texts of sequences."""
        return [one if isinstance(one, Problem) else self._text(one) for one in found]

    def _token(self, name: str) -> int:
        found = self.tokenizer.convert_tokens_to_ids(name)
        if found is None or (found == self.tokenizer.unk_token_id and name != self.tokenizer.unk_token):
            raise CommandError(f"--forced-bos-token {name!r} is no token of {self.options.model}")
        return int(found)

    def _source(self, text: str, ids: list[int], limit: int | None) -> list[int] | Problem:
        if self.options.append_eos and ids[-1:] != [self._end]:
            ids = [*ids, self._end]
        if not text.strip() or not ids:
            return Problem("there is no text")
        if limit is None or len(ids) <= limit:
            return ids
        if not self.options.truncate:
            return Problem(f"{len(ids)} tokens, {limit} at most")
        ends = ids[-1] == self._end
        return [*ids[: limit - ends], *ids[len(ids) - ends :]]

    def _generated(self, sources: list[list[int]]) -> list[Tensor | Problem]:
        try:
            return list(self._stream(sources))
        except Exception as error:  # what a model raises is its own affair: of one text, the text's
            if len(sources) == 1:
                return [Problem(f"{type(error).__name__}: {models.first_line(error)}")]
        return [self._generated([source])[0] for source in sources]

    def _stream(self, sources: list[list[int]]) -> Iterator[Tensor]:
        stream = fastgen.generate_stream(
            self.model, sources, max_tokens=self.options.batch_tokens, window=max(1, len(sources)), **self.generation
        )
        start = 1 if self.model.config.is_encoder_decoder else 0
        for source, sequences in zip(sources, stream, strict=True):
            yield sequences[:, start or len(source) :]

    def _text(self, sequences: Tensor) -> Output:
        import torch

        texts = self.tokenizer.batch_decode(sequences, skip_special_tokens=True)
        special = torch.tensor(self.tokenizer.all_special_ids)
        return Output([text.strip() for text in texts], int((~torch.isin(sequences, special)).sum()))
