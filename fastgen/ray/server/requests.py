"""Request bodies: fastgen's own, and completions in the format of OpenAI's API."""

from __future__ import annotations

from typing import Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError


class Refused(Exception):
    """A request that is answered with an HTTP error.

    Args:
        status: the HTTP status.
        error: the message.
    """

    def __init__(self, status: int, error: str) -> None:
        super().__init__(error)
        self.status = status


class RequestOptions(BaseModel):
    """Options of a request, named as in `generate`.

    Sampling is not among them: random draws depend on the other texts in a batch, but each text
    must be answered as if it were alone.
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


class GenerateRequest(BaseModel):
    """Body of a request to /generate."""

    model_config = ConfigDict(extra="forbid", strict=True)

    text: str | None = None
    texts: list[str] | None = Field(default=None, min_length=1)
    options: RequestOptions = RequestOptions()
    stream: bool = False

    @classmethod
    def read(cls, body: bytes) -> GenerateRequest:
        """Parse a request.

        Raises:
            Refused: the body is invalid, or has neither or both of text and texts.
        """
        request = _validated(cls, body)
        if (request.text is None) == (request.texts is None):
            raise Refused(400, "say either text or texts")
        return request

    @property
    def sources(self) -> list[str]:
        """The texts of the request."""
        return self.texts if self.texts is not None else [self.text or ""]


class StreamOptions(BaseModel):
    """Options of a stream; `include_usage` adds an event with token counts after the text."""

    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: bool = False


class CompletionRequest(RequestOptions):
    """Body of a request to /v1/completions: OpenAI's fields and `RequestOptions`."""

    prompt: str | list[str] = Field(min_length=1)
    model: str | None = None
    max_tokens: int | None = Field(default=None, ge=1)
    n: int | None = Field(default=None, ge=1)
    temperature: float | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None

    @classmethod
    def read(cls, body: bytes, served: str) -> CompletionRequest:
        """Parse a request.

        Args:
            body: the JSON text.
            served: name of the model.

        Raises:
            Refused: the body is invalid, or requests another model or sampling.
        """
        completion = _validated(cls, body)
        if completion.model not in (None, served):
            raise Refused(404, f"there is no model {completion.model!r}, but {served!r}")
        if completion.temperature:
            raise Refused(
                400,
                f"temperature = {completion.temperature:g}: a request cannot ask for sampling; "
                "0 is greedy",
            )
        return completion

    def request(self) -> GenerateRequest:
        """Return the equivalent request to /generate."""
        own = self.model_dump(include=set(RequestOptions.model_fields))
        own["max_new_tokens"] = self.max_tokens or self.max_new_tokens
        own["num_return_sequences"] = self.n or self.num_return_sequences
        texts = [self.prompt] if isinstance(self.prompt, str) else self.prompt
        return GenerateRequest(texts=texts, options=RequestOptions(**own), stream=self.stream)


_Body = TypeVar("_Body", bound=BaseModel)


def _validated(kind: type[_Body], body: bytes) -> _Body:
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise Refused(400, f"{where}: {first['msg']}" if where else first["msg"]) from error
