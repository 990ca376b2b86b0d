"""Answers of a server: JSON in, JSON or server-sent events out, within the limits of its settings.

    POST /generate
        {"text": "..."}
            answer: {"output": "...", "outputs": ["..."], "tokens": 7, "model": "..."}
        {"texts": ["...", ...]}
            answer: {"answers": [{"output": ...}, ...], "model": "..."}
        with "options": {"num_beams": 4, ...} (`RequestOptions`); with "stream": true, events
    POST /v1/completions
        as OpenAI's, with the options of `RequestOptions` in addition
    GET /health
        {"status": "ok", "model": ..., "version": ..., "waiting": 0}
    GET /status
        `fastgen.status()`, and counts of the texts so far
    GET /metrics
        `metrics.Metrics` in Prometheus' text format

Errors are 400 for an invalid request, 404 and 405 for an unknown path or method, 413 for a request
that is too long, 500 if the model failed, and 503 with Retry-After if too many texts wait. The
answer is {"error": "..."}; for completions the error is an object, as OpenAI's. After the first
event of a stream, an error is sent as the stream's last event.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from prometheus_client.metrics_core import Metric

import fastgen
from fastgen.corpus.languages import Unknown
from fastgen.corpus.texts import Output, Problem, Sequences, Source, TextGenerator
from fastgen.errors import CommandError
from fastgen.ray.server.answers import Answer
from fastgen.ray.server.completions import CompletionResponse, GenerateStream, usage
from fastgen.ray.server.merging import QueueFull, RequestBatcher, Tell
from fastgen.ray.server.metrics import CONTENT_TYPE, Metrics, exposition
from fastgen.ray.server.requests import CompletionRequest, GenerateRequest, Refused, RequestOptions
from fastgen.ray.server.streaming import DONE, Pieces, Stream, event
from fastgen.ray.settings import Settings


class _BatchKey(NamedTuple):
    """What the texts of a batch have in common.

    Attributes:
        generation: options of the request as (name, value) pairs.
        begins: whether each output has a first token of its own.
    """

    generation: tuple[tuple[str, Any], ...]
    begins: bool


_NAMES = {"target_lang", "forced_bos_token"}  # options that set the first token of an output

# The most tokens of a source, unless the settings set a limit or the tokenizer's is lower.
_MAX_SOURCE = 1024

_METHODS = {
    "/generate": "POST",
    "/v1/completions": "POST",
    "/health": "GET",
    "/status": "GET",
    "/metrics": "GET",
}

_CLIENT_CLOSED_REQUEST = 499
"""Status that is logged and counted if the client disconnected before its answer."""

_log = logging.getLogger("ray.serve")


class Api:
    """A model that answers requests.

    Args:
        settings: settings of the server.
        replica: name of the replica, for its metrics.

    Attributes:
        gather: returns the metrics of all replicas.

    Raises:
        CommandError: there is no such model, or it cannot generate with the settings' arguments.
    """

    def __init__(self, settings: Settings, replica: str = "") -> None:
        self.settings = settings
        self._failed: str | None = None
        self.generator = TextGenerator(settings.options(), serves=True)
        limit = settings.max_source_tokens or min(
            self.generator.tokenizer.model_max_length, _MAX_SOURCE
        )
        self.generator.options = replace(self.generator.options, max_source_tokens=limit)
        (first,) = self.generator(["."])  # finds wrong arguments before the first request does
        if isinstance(first, Problem):
            raise CommandError(f"{settings.shown_name} cannot generate: {first.reason}")
        self.metrics = Metrics(settings.shown_name, replica, lambda: len(self.batcher.waiting))
        self.gather: Callable[[], Awaitable[list[list[Metric]]]] = self._own_metrics
        self.batcher = RequestBatcher[Source, _BatchKey, Sequences | Problem](
            self._generate, batch_tokens=settings.batch_tokens, most=settings.max_waiting,
            linger=settings.linger, on_batch=self.metrics.batches.observe,
        )  # fmt: skip

    async def __call__(self, method: str, path: str, body: bytes = b"") -> Answer:
        """Answer a request; log and count it once the whole answer is sent."""
        began = time.perf_counter()
        try:
            answer = await self._answer(method, path, body)
        except BaseException as error:
            self._note(
                method,
                path,
                _CLIENT_CLOSED_REQUEST if isinstance(error, asyncio.CancelledError) else 500,
                began,
            )
            raise
        if isinstance(answer.content, AsyncIterator):
            return replace(answer, content=self._noted(answer.content, method, path, began))
        self._note(method, path, answer.status, began)
        return answer

    async def _answer(self, method: str, path: str, body: bytes) -> Answer:
        try:
            if path not in _METHODS:
                raise Refused(404, f"there is no {path}")
            if method != _METHODS[path]:
                raise Refused(405, f"{path} is asked for by {_METHODS[path]}")
            if path == "/metrics":
                return Answer(200, exposition(await self.gather()), {"Content-Type": CONTENT_TYPE})
            if path in ("/health", "/status"):
                return Answer(200, self.health() if path == "/health" else self._status())
            if len(body) > self.settings.max_bytes:
                raise Refused(413, f"{len(body)} bytes, {self.settings.max_bytes} at most")
            return Answer(
                200, await (self._own(body) if path == "/generate" else self._completion(body))
            )
        except Refused as refused:
            return _error(path, refused.status, refused)
        except CommandError as failed:
            return _error(path, 500, failed)
        except QueueFull as full:
            return _error(path, 503, full, {"Retry-After": str(self.settings.retry_after)})

    async def _noted(
        self, events: AsyncIterator[str], method: str, path: str, began: float
    ) -> AsyncIterator[str]:
        """Yield the events of a stream; log and count it at its end."""
        status, first = _CLIENT_CLOSED_REQUEST, True
        try:
            async for one in events:
                if first:
                    first = False
                    self.metrics.first_token.labels(path).observe(time.perf_counter() - began)
                yield one
            status = 200
        finally:
            # Closing the generator cancels the answer that it waits for.
            await events.aclose()  # type: ignore[attr-defined]
            self._note(method, path, status, began)

    def _note(self, method: str, path: str, status: int, began: float) -> None:
        seconds, name = time.perf_counter() - began, path if path in _METHODS else "other"
        self.metrics.requests.labels(name, str(status)).inc()
        self.metrics.seconds.labels(name).observe(seconds)
        _log.info("%s %s %d %.1fms", method, path, status, 1000 * seconds)

    async def _own_metrics(self) -> list[list[Metric]]:
        return [self.metrics.families()]

    def check(self) -> None:
        """Raise RuntimeError if requests would wait forever, or none can be answered any more."""
        self.batcher.check()
        if self._failed is not None:
            raise RuntimeError(f"the device has failed: {self._failed}")

    def health(self) -> dict[str, Any]:
        """Return the answer to /health."""
        return {
            "status": "ok",
            "model": self.settings.shown_name,
            "version": fastgen.__version__,
            "waiting": len(self.batcher.waiting),
        }

    def _status(self) -> dict[str, Any]:
        counts = {
            name: getattr(self.batcher, name)
            for name in ("batches", "generated", "left", "dropped")
        }
        return {"texts": counts, "fastgen": fastgen.status().to_dict()}

    async def _own(self, body: bytes) -> dict[str, Any] | AsyncIterator[str]:
        """Answer a request to /generate."""
        request = GenerateRequest.read(body)
        model = self.settings.shown_name
        if request.stream:
            return self._stream(request, GenerateStream(model))
        _, sequences = await self._sequences(request)
        found = [_shown(one) for one in self._outputs(sequences)]
        if request.texts is not None:
            return {"answers": found, "model": model}
        if "problem" in found[0]:
            raise Refused(500, found[0]["problem"])
        return found[0] | {"model": model}

    async def _completion(self, body: bytes) -> dict[str, Any] | AsyncIterator[str]:
        """Answer a request to /v1/completions."""
        completion = CompletionRequest.read(body, self.settings.shown_name)
        request, wanted = completion.request(), completion.stream_options
        if wanted is not None and not request.stream:
            raise Refused(400, "stream_options is for stream=true")
        shown = CompletionResponse(
            self.settings.shown_name, wanted is not None and wanted.include_usage
        )
        if request.stream:
            return self._stream(request, shown)
        sources, sequences = await self._sequences(request)
        texts, tokens = list[tuple[str, str]](), 0
        for found, output in zip(sequences, self._outputs(sequences), strict=True):
            if isinstance(found, Problem) or isinstance(output, Problem):
                raise Refused(500, found.reason if isinstance(found, Problem) else "")
            reasons = [self._reason(ids, request.options) for ids in found.ids.tolist()]
            texts += zip(output.texts, reasons, strict=True)
            tokens += output.tokens
        return shown.whole(texts, usage(sum(map(len, sources)), tokens))

    async def _sequences(
        self, request: GenerateRequest
    ) -> tuple[list[Source], list[Sequences | Problem]]:
        sources, key = self._sources(request)
        return sources, await self.batcher.submit(sources, key)

    def _stream(
        self, request: GenerateRequest, shown: GenerateStream | CompletionResponse
    ) -> AsyncIterator[str]:
        """Enqueue a request and return its events.

        Raises:
            Refused: the request is invalid, or has more than one output.
            QueueFull: too many texts wait.
        """
        if len(request.sources) > 1:
            raise Refused(400, f"{len(request.sources)} texts: a stream has one")
        if (several := self._in_force("num_return_sequences", request.options) or 1) > 1:
            raise Refused(400, f"num_return_sequences = {several}: a stream has one")
        (source,), key = self._sources(request)
        cleans = self.generator.options.clean_up or bool(
            getattr(self.generator.tokenizer, "clean_up_tokenization_spaces", False)
        )
        stream = Stream(Pieces(self.generator.text, cleans), self.generator.ends)
        (answer,) = self.batcher.enqueue([source], key, stream.hear)
        return self._events(request, source, stream, answer, shown)

    async def _events(
        self,
        request: GenerateRequest,
        source: Source,
        stream: Stream,
        answer: asyncio.Future[Sequences | Problem],
        shown: GenerateStream | CompletionResponse,
    ) -> AsyncIterator[str]:
        try:
            async for piece in stream.read(answer):
                yield event(shown.piece(piece))
            try:
                found = answer.result()
            except Exception as error:
                _log.exception("a stream has failed")
                found = Problem(str(error))
            (output,) = self._outputs([found])
            if isinstance(found, Problem) or isinstance(output, Problem):
                yield event(shown.error(found.reason if isinstance(found, Problem) else ""))
                return
            (ids,) = found.ids.tolist()
            # After a failure of the model, the text was generated a second time.
            if ids[: len(stream.tokens)] != stream.tokens:
                yield event(shown.error("the text was generated anew and has become another"))
                return
            counted = usage(len(source), output.tokens)
            reason = self._reason(ids, request.options)
            for one in shown.end(stream.pieces.end(output.texts[0]), reason, counted):
                yield event(one)
            yield DONE
        finally:
            answer.cancel()  # if the client has disconnected

    def _reason(self, ids: Sequence[int], options: RequestOptions) -> str:
        """Return why a text ended, as OpenAI's finish_reason: "length" or "stop"."""
        end = next((place for place, token in enumerate(ids) if token in self.generator.ends), None)
        # A forced end token ends a text that reaches its length limit.
        forced = self._in_force("forced_eos_token_id", options) is not None
        cut = end is None or (forced and end + 1 >= self._in_force("max_new_tokens", options))
        return "length" if cut else "stop"

    def _outputs(self, found: Sequence[Sequences | Problem]) -> list[Output | Problem]:
        outputs = self.generator.decode(found)
        self.metrics.tokens.inc(sum(one.tokens for one in outputs if isinstance(one, Output)))
        return outputs

    def _sources(self, request: GenerateRequest) -> tuple[list[Source], _BatchKey]:
        """Return the sources of a request, and what they must share with the others in their batch.

        Raises:
            Refused: the request exceeds a limit.
        """
        self._check(request)
        generation = request.options.model_dump(exclude_none=True, exclude=_NAMES)
        first = self._first_token(request.options)
        sources = [replace(source, first=first) for source in self._encoded(request.sources)]
        return sources, _BatchKey(tuple(generation.items()), first is not None)

    def _check(self, request: GenerateRequest) -> None:
        """Raise Refused if a request exceeds a limit other than that of source tokens."""
        settings, options = self.settings, request.options
        if len(request.sources) > settings.max_texts:
            raise Refused(413, f"{len(request.sources)} texts, {settings.max_texts} at most")
        for name, most in (
            ("max_new_tokens", settings.max_new_tokens),
            ("num_beams", settings.max_beams),
        ):
            if (getattr(options, name) or 0) > most:
                raise Refused(400, f"{name} = {getattr(options, name)}, {most} at most")
        if options.target_lang is not None and options.forced_bos_token is not None:
            raise Refused(400, "say either target_lang or forced_bos_token")
        beams, sequences = (
            self._in_force(name, options) or 1 for name in ("num_beams", "num_return_sequences")
        )
        drawn = beams == 1 and self._in_force("do_sample", options)  # any number of sequences
        if sequences > beams and not drawn:
            raise Refused(
                400, f"num_return_sequences = {sequences}, {beams} at most, as many as num_beams"
            )

    def _in_force(self, name: str, options: RequestOptions) -> Any:
        """Return an argument of `generate`: the request's, the settings' or the model's own."""
        stored = getattr(self.generator.model.generation_config, name, None)
        arguments = self.generator.generation | options.model_dump(exclude_none=True)
        return arguments.get(name, stored)

    def _first_token(self, options: RequestOptions) -> int | None:
        """Return the first token of the outputs; None if neither request nor settings set one."""
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
        self,
        sources: list[Source],
        key: _BatchKey,
        wanted: Callable[[int], bool],
        tell: Tell | None,
    ) -> list[Sequences | Problem]:
        """Generate sequences for a batch in the batcher's thread; the other thread tokenizes."""
        generator = copy.copy(self.generator)
        generator.generation = generator.generation | dict(key.generation)
        try:
            return generator.generate(sources, wanted, tell)
        except CommandError as error:
            if isinstance(error.__cause__, torch.AcceleratorError):
                self._failed = str(error)
            raise


def _shown(found: Output | Problem) -> dict[str, Any]:
    if isinstance(found, Problem):
        return {"problem": found.reason}
    return {"output": found.texts[0], "outputs": found.texts, "tokens": found.tokens}


def _error(
    path: str, status: int, error: Exception, headers: dict[str, str] | None = None
) -> Answer:
    found: Any = str(error)
    if path.startswith("/v1/"):
        found = {
            "message": found,
            "type": "server_error" if status >= 500 else "invalid_request_error",
            "code": status,
        }
    return Answer(status, {"error": found}, headers or {})
