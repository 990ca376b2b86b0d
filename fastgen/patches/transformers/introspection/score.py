"""`fastgen.score`: log-probabilities of given texts, without storing the logits of all tokens.

The model runs without its LM head. The head then runs over `ROWS` tokens at a time, and only the
log-probability of the next token is kept for each.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastgen.context import isolated
from fastgen.models.build.equivalence_check import agree
from fastgen.models.routing.routes import routed
from fastgen.models.specs.registry import SPECS, spec_of
from fastgen.ops.selection.token_scores import token_scores
from fastgen.patches.engine import engine

ROWS = 64
"""Number of tokens per pass of the LM head. With fewer, its matrix product would be slow."""


@dataclass(frozen=True)
class TextScore:
    """The log-probabilities (natural logarithm) of the tokens of a text.

    Attributes:
        log_probs: (L,) fp32, or fp64 for fp64 models. Log-probability of each token given the
            tokens before it and the source, if any. NaN for the first token of a decoder-only
            model's text, which has no context.
    """

    log_probs: Tensor

    @property
    def tokens(self) -> int:
        """Number of tokens that have a log-probability."""
        return int((~self.log_probs.isnan()).sum())

    @property
    def total(self) -> float:
        """Sum of the log-probabilities."""
        return float(self.log_probs.nansum())


class _Window(NamedTuple):
    """A window over the tokens of a text.

    Attributes:
        text: Index of the text.
        start: Index of the first token.
        scored: Index of the first token that is scored in this window.
        end: Index after the last token.
    """

    text: int
    start: int
    scored: int
    end: int


def score(
    model: Any,
    texts: Iterable[Any],
    sources: Iterable[Any] | None,
    tokenizer: Any,
    max_length: int | None,
    stride: int | None,
    max_tokens: int,
) -> list[TextScore]:
    """See `fastgen.score`."""
    ids = list(_rows("texts", texts, tokenizer, "text" if sources is None else "text_target"))
    encoder_ids = None if sources is None else list(_rows("sources", sources, tokenizer, "text"))
    _check(model, ids, encoder_ids, max_length, stride, max_tokens)
    longest = max_length or getattr(
        model.config.get_text_config(decoder=True), "max_position_embeddings", None
    )
    if stride is not None and longest is not None and stride >= longest:
        raise ValueError(
            f"stride={stride}: from 1 to below {longest}, "
            "as many as there can be, or tokens are left out"
        )
    windows = [
        window
        for number, text in enumerate(ids)
        for window in _windows(number, len(text), longest, stride)
    ]
    if encoder_ids is not None and len(windows) > len(ids):
        raise ValueError(
            f"a target of {max(map(len, ids))} tokens, where {longest} is the most there can be"
        )
    wide = torch.promote_types(model.dtype, torch.float32)
    scores = [torch.full((len(text),), torch.nan, dtype=wide, device="cpu") for text in ids]

    def run() -> None:
        head = _Head(model)
        for batch in _batches(windows, max_tokens):
            for window, log_probs in zip(
                batch, _of_batch(model, head, batch, ids, encoder_ids), strict=True
            ):
                scores[window.text][window.scored : window.end] = log_probs.to("cpu", wide)

    with torch.no_grad():
        try:
            isolated(_accelerated, model, run)
        except engine.DisabledMeanwhile:
            run()
    return [TextScore(log_probs) for log_probs in scores]


def _accelerated(model: Any, run: Callable[[], None]) -> None:
    with engine.running("score"), routed(model, spec_of(model.config)):
        run()


def _rows(name: str, texts: Iterable[Any], tokenizer: Any, argument: str) -> Iterator[Tensor]:
    """Yield the token ids of each text.

    Args:
        name: Name of the caller's argument, for messages.
        texts: Strings or token ids.
        tokenizer: Tokenizer of the model, or None.
        argument: Name of the tokenizer's argument that takes a string.
    """
    if isinstance(texts, str):
        raise TypeError(f"{name} is a string, {texts[:40]!r}; it must be a list of texts")
    for number, text in enumerate(texts):
        if not isinstance(text, str):
            yield _ids(text)
        elif tokenizer is None:
            raise TypeError(
                f"{name}[{number}] is a string, {text[:40]!r}; pass tokenizer=..., "
                "or token ids such as tokenizer(text)['input_ids']"
            )
        else:
            yield _ids(tokenizer(**{argument: text})["input_ids"])


def _ids(text: Any) -> Tensor:
    ids = torch.as_tensor(text, dtype=torch.int64, device="cpu")
    if ids.dim() != 1 or not len(ids):
        raise ValueError(
            f"a text is a row of at least one token id; one has the shape {tuple(ids.shape)}"
        )
    return ids


def _check(
    model: Any,
    ids: Sequence[Tensor],
    sources: Sequence[Tensor] | None,
    max_length: int | None,
    stride: int | None,
    max_tokens: int,
) -> None:
    if model.training:
        raise ValueError(f"{type(model).__name__} is in training mode; model.eval() ends it")
    if bool(model.config.is_encoder_decoder) != (sources is not None):
        problem = "needs sources" if sources is None else "has no encoder for sources"
        raise ValueError(f"{type(model).__name__} {problem}")
    if sources is not None and len(sources) != len(ids):
        raise ValueError(f"{len(ids)} texts, {len(sources)} sources")
    if max_length is not None and max_length < 2:
        raise ValueError(f"max_length={max_length}: a token and one before it are the least")
    if stride is not None and (stride < 1 or (max_length is not None and stride >= max_length)):
        raise ValueError(
            f"stride={stride}: from 1 to below max_length={max_length}, "
            "or tokens have none before them"
        )
    if max_tokens < 1:
        raise ValueError(f"max_tokens={max_tokens}: 1 is the least")


def _windows(text: int, length: int, longest: int | None, stride: int | None) -> Iterator[_Window]:
    """Yield the windows of a text, each `stride` tokens after the previous one.

    Every token is scored in the first window that contains it.
    """
    longest = longest or length
    stride, start, scored = stride or max(1, longest // 2), 0, 0
    while scored < length:
        end = min(start + longest, length)
        yield _Window(text, start, scored, end)
        start, scored = start + stride, end


def _batches(windows: Sequence[_Window], max_tokens: int) -> Iterator[list[_Window]]:
    """Yield batches of windows of similar lengths, of at most `max_tokens` tokens with padding."""
    batch: list[_Window] = []
    for window in sorted(windows, key=lambda window: window.start - window.end):
        if batch and (len(batch) + 1) * (batch[0].end - batch[0].start) > max_tokens:
            yield batch
            batch = []
        batch.append(window)
    if batch:
        yield batch


def _of_batch(
    model: Any,
    head: "_Head",
    batch: Sequence[_Window],
    ids: Sequence[Tensor],
    sources: Sequence[Tensor] | None,
) -> Iterator[Tensor]:
    """Yield the log-probabilities of each window's scored tokens; NaN if there is no context."""
    device = model.device
    texts = [ids[window.text][window.start : window.end] for window in batch]
    padded, mask = _padded(texts, device)
    if sources is None:
        hidden, before = head.hidden(input_ids=padded, attention_mask=mask), 1
    else:
        from_ids, from_mask = _padded([sources[window.text] for window in batch], device)
        shifted = _behind_start(model, padded.where(mask.bool(), -100))
        hidden, before = (
            head.hidden(input_ids=from_ids, attention_mask=from_mask, decoder_input_ids=shifted),
            0,
        )
    for row, (window, text) in enumerate(zip(batch, texts, strict=True)):
        first = max(before, window.scored - window.start)
        log_probs = head.scores(
            hidden[row, first - before : len(text) - before], text[first:].to(device)
        )
        missing = window.end - window.scored - len(log_probs)
        yield torch.cat([log_probs.new_full((missing,), torch.nan), log_probs])


def _behind_start(model: Any, labels: Tensor) -> Tensor:
    """Return the decoder input ids for labels (B, L), as the model's own forward computes them."""
    if hasattr(model, "prepare_decoder_input_ids_from_labels"):
        return model.prepare_decoder_input_ids_from_labels(labels)
    start = labels.new_full((len(labels), 1), model.config.decoder_start_token_id)
    shifted = torch.cat([start, labels[:, :-1]], 1)
    return shifted.masked_fill(shifted == -100, model.config.pad_token_id)


def _padded(texts: Sequence[Tensor], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the texts padded on the right, (B, L), and their mask (B, L) int64."""
    pad = torch.nn.utils.rnn.pad_sequence
    ones = [torch.ones_like(text) for text in texts]
    return pad(list(texts), batch_first=True).to(device), pad(ones, batch_first=True).to(device)


class _Head:
    """The LM head of a model, applied to some of the last hidden states at a time."""

    def __init__(self, model: Any) -> None:
        self.model: Any = model
        self.spec = spec_of(model.config)
        self.proven = False

    def hidden(self, **inputs: Tensor) -> Tensor:
        """Return the hidden states that the head reads, (B, L, C)."""
        if not self.proven:
            self._prove({name: value[:1, :8] for name, value in inputs.items()})
        return self._states(**inputs)

    def _states(
        self, input_ids: Tensor, attention_mask: Tensor, decoder_input_ids: Tensor | None = None
    ) -> Tensor:
        model = self.model
        if decoder_input_ids is None:
            return model.base_model(
                input_ids=input_ids, attention_mask=attention_mask, use_cache=False
            )[0]
        source = model.get_encoder()(input_ids=input_ids, attention_mask=attention_mask)[0]
        return model.get_decoder()(
            input_ids=decoder_input_ids,
            encoder_hidden_states=source,
            encoder_attention_mask=attention_mask,
            use_cache=False,
        )[0]

    def scores(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        """Return the log-probabilities (N,) of tokens (N,) int64, given hidden states (N, C)."""
        parts = [slice(start, start + ROWS) for start in range(0, max(1, len(tokens)), ROWS)]
        return torch.cat([token_scores(self._logits(hidden[part]), tokens[part]) for part in parts])

    def _logits(self, hidden: Tensor) -> Tensor:
        model, spec = self.model, self.spec
        assert spec is not None
        scale, softcap = spec.head.scale(model), spec.head.softcap(model)
        logits = model.get_output_embeddings()(hidden if scale == 1.0 else hidden * scale)
        if spec.head.bias is not None:
            logits = logits + getattr(model, spec.head.bias)
        return logits if softcap is None else (logits / softcap).tanh() * softcap

    def _prove(self, inputs: dict[str, Tensor]) -> None:
        """Run the equivalence check: compare the logits of a few tokens with the model's own.

        Raises:
            ValueError: They differ, or the model family is unknown.
        """
        model = self.model
        kind, spec = model.config.model_type, self.spec
        if spec is None or spec.mask_token is not None or kind not in SPECS:
            known = sorted(name for name, spec in SPECS.items() if spec.mask_token is None)
            raise ValueError(f"model type {kind!r} is none of {', '.join(known)}")
        own = model(**inputs, use_cache=False).logits[0]
        if agree(self._logits(self._states(**inputs)[0]), own) is not True:
            raise ValueError(
                f"{type(model).__name__} makes its logits otherwise than others of its family"
            )
        self.proven = True
