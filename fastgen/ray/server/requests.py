"""The bodies of requests: fastgen's own, and completions as OpenAI has them."""

from __future__ import annotations

from typing import Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError


class Refused(Exception):
    """A request that is answered with an error."""

    def __init__(self, status: int, error: str) -> None:
        super().__init__(error)
        self.status = status


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
    """The body of a request to /generate."""

    model_config = ConfigDict(extra="forbid", strict=True)

    text: str | None = None
    texts: list[str] | None = Field(default=None, min_length=1)
    options: Wanted = Wanted()
    stream: bool = False

    @classmethod
    def read(cls, body: bytes) -> Asked:
        """The request of a body.

        Raises:
            Refused: it is none, or says neither text nor texts, or both.
        """
        asked = _validated(cls, body)
        if (asked.text is None) == (asked.texts is None):
            raise Refused(400, "say either text or texts")
        return asked

    @property
    def sources(self) -> list[str]:
        return self.texts if self.texts is not None else [self.text or ""]


class StreamOptions(BaseModel):
    """include_usage: whether an event behind the text counts tokens."""

    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: bool = False


class Completion(Wanted):
    """The body of a request to /v1/completions: OpenAI's names, and the options of `Wanted` beside them."""

    prompt: str | list[str] = Field(min_length=1)
    model: str | None = None
    max_tokens: int | None = Field(default=None, ge=1)
    n: int | None = Field(default=None, ge=1)
    temperature: float | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None

    @classmethod
    def read(cls, body: bytes, served: str) -> Completion:
        """The request of a body.

        Args:
            served: the model's name.

        Raises:
            Refused: it is none, asks for another model, or for what no request may ask for.
        """
        found = _validated(cls, body)
        if found.model not in (None, served):
            raise Refused(404, f"there is no model {found.model!r}, but {served!r}")
        if found.temperature:
            raise Refused(
                400,
                f"temperature = {found.temperature:g}: a request cannot ask for sampling; 0 is greedy",
            )
        return found

    def asked(self) -> Asked:
        """The same in fastgen's words."""
        own = self.model_dump(include=set(Wanted.model_fields))
        own["max_new_tokens"] = self.max_tokens or self.max_new_tokens
        own["num_return_sequences"] = self.n or self.num_return_sequences
        texts = [self.prompt] if isinstance(self.prompt, str) else self.prompt
        return Asked(texts=texts, options=Wanted(**own), stream=self.stream)


_Body = TypeVar("_Body", bound=BaseModel)


def _validated(kind: type[_Body], body: bytes) -> _Body:
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise Refused(400, f"{where}: {first['msg']}" if where else first["msg"]) from error
