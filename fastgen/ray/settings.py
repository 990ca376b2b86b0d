"""Settings of a server: one table for Python, `serve run` and the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, Json

from fastgen.corpus.texts import Options


class Settings(BaseModel):
    """The model of a server, how it runs, and what a request may ask for.

    Raises:
        pydantic.ValidationError: a ValueError; there is no such setting, or its value is invalid.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: Path = Field(
        description="folder of the model and its tokenizer, as every machine sees it, "
        "or their id on the hub"
    )
    name: str = Field("", description="the model's name in answers (default: the folder's)")
    generation: Json[dict[str, Any]] | dict[str, Any] = Field(
        default_factory=dict,
        description="arguments of generate, as JSON; a request may change some of them",
    )
    dtype: str = Field("float32", description="type of the weights, as torch names it")
    device: str | None = Field(
        None, description="cpu, cuda or cuda:N (default: cuda where there is one)"
    )
    prefix: str = Field("", description="text before each source, such as T5's task")
    append_eos: bool = Field(False, description="end each source with the end token")
    forced_bos_token: str | None = Field(None, description="the output's first token, by name")
    source_lang: str | None = Field(
        None,
        description="language of the sources, for tokenizers that know languages, as they name it",
    )
    target_lang: str | None = Field(
        None, description="language of the outputs, likewise; a request may name another"
    )
    batch_tokens: int = Field(4096, ge=1, description="tokens of a batch at most, padding counted")
    linger: float = Field(
        0.005, ge=0, description="seconds that a text waits for others while nothing runs"
    )
    max_source_tokens: int | None = Field(
        None,
        ge=1,
        description="tokens of a text at most (default: the tokenizer's limit, at most 1024)",
    )
    max_new_tokens: int = Field(
        512,
        ge=1,
        description="new tokens that a request may ask for, and gets at most without asking",
    )
    max_beams: int = Field(8, ge=1, description="beams that a request may ask for")
    max_texts: int = Field(64, ge=1, description="texts of a request at most")
    max_bytes: int = Field(1_000_000, ge=1, description="bytes of a request's body at most")
    max_waiting: int = Field(
        1024, ge=1, description="texts that may wait in a replica; more are refused with 503"
    )
    max_requests: int = Field(1024, ge=1, description="requests that a replica handles at once")
    max_queued: int = Field(
        1024, ge=1, description="requests that may wait for a replica; more are refused with 503"
    )
    retry_after: int = Field(
        1, ge=1, description="seconds after which a refused client is told to try again"
    )
    replicas: int = Field(1, ge=1, description="processes, each with a model")
    prefix_routing: bool = Field(
        False,
        description="send texts that begin alike to the same replica, as long as it is not busier",
    )
    cpus: float = Field(
        1.0, ge=0, description="processors of a replica; torch gets as many threads"
    )
    gpus: float = Field(0.0, ge=0, description="GPUs of a replica; parts of one are possible")

    @property
    def shown_name(self) -> str:
        """The model's name in answers."""
        return self.name or self.model.name

    def options(self) -> Options:
        """Return the options of `TextGenerator`."""
        shared = (
            "model",
            "dtype",
            "device",
            "prefix",
            "append_eos",
            "forced_bos_token",
            "source_lang",
            "target_lang",
            "batch_tokens",
            "max_source_tokens",
        )
        values = {name: getattr(self, name) for name in shared}
        return Options(
            **values, generation={"max_new_tokens": self.max_new_tokens} | self.generation
        )
