"""What a server answers: JSON in, JSON out, and the limits between.

    POST /generate  {"text": "..."}            {"output": "...", "outputs": ["..."], "tokens": 7, "model": "..."}
                    {"texts": ["...", ...]}    {"answers": [{"output": ...}, ...], "model": "..."}
                    with "options": {"num_beams": 4, ...} (`Wanted`)
    GET /health     {"status": "ok", "model": ..., "version": ..., "waiting": 0}
    GET /status     `fastgen.status()`, and what became of the texts so far

400: the request is not as above; 404, 405: no such address or method; 413: it is too long; 500: the model failed;
503: too many wait, with Retry-After. All of these answer {"error": "..."}.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError

import fastgen
from fastgen.corpus.languages import Unknown
from fastgen.corpus.texts import Output, Problem, Sequences, Source, TextGenerator
from fastgen.errors import CommandError
from fastgen.ray.merging import Merger, QueueFull
from fastgen.ray.settings import Settings


class _Alike(NamedTuple):
    """What the texts of a batch have in common.

    begins: that each output has a first token of its own.
    """

    generation: tuple[tuple[str, Any], ...]
    begins: bool


_NAMES = {"target_lang", "forced_bos_token"}  # options that say how outputs begin

_MAX_SOURCE = 1024  # tokens, where neither the settings nor the tokenizer say how many


class Wanted(BaseModel):
    """The options of a request, as `generate` knows them.

    Sampling is not among them: what is drawn depends on the neighbours in a batch, and each text is answered as if it
    were alone.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    num_beams: int | None = Field(default=None, ge=1)
    num_return_sequences: int | None = Field(default=None, ge=1)
    max_new_tokens: int | None = Field(default=None, ge=1)
    min_new_tokens: int | None = Field(default=None, ge=0)
    no_repeat_ngram_size: int | None = Field(default=None, ge=0)
    length_penalty: float | None = Field(default=None, allow_inf_nan=False)
    repetition_penalty: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    early_stopping: bool | Literal["never"] | None = None
    target_lang: str | None = None
    forced_bos_token: str | None = None


class Asked(BaseModel):
    """The body of a request."""

    model_config = ConfigDict(extra="forbid", strict=True)

    text: str | None = None
    texts: list[str] | None = Field(default=None, min_length=1)
    options: Wanted = Wanted()


@dataclass(frozen=True)
class Answer:
    """A status of HTTP and what is sent with it."""

    status: int
    content: dict[str, Any]
    headers: dict[str, str] = field(default_factory=dict)


class Refused(Exception):
    """A request that is answered with an error."""

    def __init__(self, status: int, error: str) -> None:
        super().__init__(error)
        self.status = status


class Api:
    """A model that answers requests.

    Raises:
        CommandError: there is no such model, or it cannot generate with the settings' arguments.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._failed: str | None = None
        self.generator = TextGenerator(settings.options(), serves=True)
        limit = settings.max_source_tokens or min(self.generator.tokenizer.model_max_length, _MAX_SOURCE)
        self.generator.options = replace(self.generator.options, max_source_tokens=limit)
        (first,) = self.generator(["."])  # a wrong argument is found here, not by the first client
        if isinstance(first, Problem):
            raise CommandError(f"{settings.shown_name} cannot generate: {first.reason}")
        self.merger = Merger[Source, _Alike, Sequences | Problem](
            self._generate, batch_tokens=settings.batch_tokens, most=settings.max_waiting, linger=settings.linger
        )

    async def __call__(self, method: str, path: str, body: bytes = b"") -> Answer:
        """Answer a request."""
        known = {"/generate": "POST", "/health": "GET", "/status": "GET"}.get(path)
        try:
            if known is None:
                raise Refused(404, f"there is no {path}")
            if method != known:
                raise Refused(405, f"{path} is asked for by {known}")
            if path == "/generate":
                return Answer(200, await self._answer(self._read(body)))
            return Answer(200, self.health() if path == "/health" else self._status())
        except Refused as refused:
            return Answer(refused.status, {"error": str(refused)})
        except CommandError as failed:
            return Answer(500, {"error": str(failed)})
        except QueueFull as full:
            return Answer(503, {"error": str(full)}, {"Retry-After": str(self.settings.retry_after)})

    def check(self) -> None:
        """Raise RuntimeError where requests would wait for ever, or none be answered any more."""
        self.merger.check()
        if self._failed is not None:
            raise RuntimeError(f"the device has failed: {self._failed}")

    def health(self) -> dict[str, Any]:
        return {
            "status": "ok",
            "model": self.settings.shown_name,
            "version": fastgen.__version__,
            "waiting": len(self.merger.waiting),
        }

    def _status(self) -> dict[str, Any]:
        counts = {name: getattr(self.merger, name) for name in ("batches", "generated", "left", "dropped")}
        return {"texts": counts, "fastgen": fastgen.status().to_dict()}

    def _read(self, body: bytes) -> Asked:
        """The request of a body, within the limits but for tokens."""
        settings = self.settings
        if len(body) > settings.max_bytes:
            raise Refused(413, f"{len(body)} bytes, {settings.max_bytes} at most")
        try:
            asked = Asked.model_validate_json(body)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(map(str, first["loc"]))
            raise Refused(400, f"{where}: {first['msg']}" if where else first["msg"]) from error
        if (asked.text is None) == (asked.texts is None):
            raise Refused(400, "say either text or texts")
        if len(asked.texts or ()) > settings.max_texts:
            raise Refused(413, f"{len(asked.texts or ())} texts, {settings.max_texts} at most")
        for name, most in (("max_new_tokens", settings.max_new_tokens), ("num_beams", settings.max_beams)):
            if (getattr(asked.options, name) or 0) > most:
                raise Refused(400, f"options.{name} = {getattr(asked.options, name)}, {most} at most")
        if asked.options.target_lang is not None and asked.options.forced_bos_token is not None:
            raise Refused(400, "say either options.target_lang or options.forced_bos_token")
        beams, sequences = (self._in_force(name, asked.options) or 1 for name in ("num_beams", "num_return_sequences"))
        drawn = beams == 1 and self._in_force("do_sample", asked.options)  # as many as one likes
        if sequences > beams and not drawn:
            raise Refused(400, f"num_return_sequences = {sequences}, {beams} at most, as many as num_beams")
        return asked

    def _in_force(self, name: str, options: Wanted) -> Any:
        """An argument of `generate`: the request's, else the settings', else the model's own."""
        stored = getattr(self.generator.model.generation_config, name, None)
        said = self.generator.generation | options.model_dump(exclude_none=True)
        return said.get(name, stored)

    async def _answer(self, asked: Asked) -> dict[str, Any]:
        texts = asked.texts if asked.texts is not None else [asked.text or ""]
        generation = asked.options.model_dump(exclude_none=True, exclude=_NAMES)
        first = self._first_token(asked.options)
        sources = [replace(source, first=first) for source in self._encoded(texts)]
        sequences = await self.merger.submit(sources, _Alike(tuple(generation.items()), first is not None))
        found = [_shown(one) for one in self.generator.decode(sequences)]
        model = {"model": self.settings.shown_name}
        if asked.texts is not None:
            return {"answers": found} | model
        if "problem" in found[0]:
            raise Refused(500, found[0]["problem"])
        return found[0] | model

    def _first_token(self, options: Wanted) -> int | None:
        """What outputs begin with, by the request or else for all; None where that is not said, or they do not."""
        names = self.generator.names
        try:
            if options.target_lang is not None:
                names.check_languages("options.target_lang")
                return names.language(options.target_lang)
            if options.forced_bos_token is not None:
                return names.token(options.forced_bos_token)
        except (CommandError, Unknown) as error:
            raise Refused(400, str(error)) from error
        found = self._in_force("forced_bos_token_id", options)
        return found if isinstance(found, int) else None

    def _encoded(self, texts: Sequence[str]) -> list[Source]:
        for place, text in enumerate(texts):
            if not text.strip():
                raise Refused(400, f"text {place + 1} is empty")
        sources = self.generator.encode(texts)
        for place, source in enumerate(sources):
            if isinstance(source, Problem):
                raise Refused(413, f"text {place + 1}: {source.reason}")
        return [source for source in sources if not isinstance(source, Problem)]

    def _generate(
        self, sources: list[Source], alike: _Alike, wanted: Callable[[int], bool]
    ) -> list[Sequences | Problem]:
        """Sequences of some sources; tokenizers are left to the other thread."""
        generator = copy.copy(self.generator)
        generator.generation = generator.generation | dict(alike.generation)
        try:
            return generator.generate(sources, wanted)
        except CommandError as error:
            if isinstance(error.__cause__, torch.AcceleratorError):
                self._failed = str(error)
            raise


def _shown(found: Output | Problem) -> dict[str, Any]:
    if isinstance(found, Problem):
        return {"problem": found.reason}
    return {"output": found.texts[0], "outputs": found.texts, "tokens": found.tokens}
