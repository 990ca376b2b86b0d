"""How likely a model finds texts that are given, token by token, without the logits of all tokens.

The model runs without its head. The head then runs over some tokens at a time, and of each the log-probability of the
token that follows is kept.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastgen.context import isolated
from fastgen.models.build.equivalence_check import agree
from fastgen.models.routing.routes import routed
from fastgen.models.specs.decoder_layouts import LAYOUTS, Layout, layout_of
from fastgen.models.specs.families import family_of
from fastgen.ops.selection.token_scores import token_scores
from fastgen.patches.engine import engine

ROWS = 64
"""Tokens of which the head makes logits at a time: fewer would leave its product slow."""


@dataclass(frozen=True)
class TextScore:
    """The log-probabilities of a text, natural.

    Attributes:
        log_probs: (L,) of each token given those before it (and a source, where there is one); NaN for the first token
            of a decoder-only model's text, which nothing precedes. fp32, of fp64 models fp64.
    """

    log_probs: Tensor

    @property
    def tokens(self) -> int:
        """How many tokens have a log-probability."""
        return int((~self.log_probs.isnan()).sum())

    @property
    def total(self) -> float:
        """The sum of the log-probabilities."""
        return float(self.log_probs.nansum())


class _Window(NamedTuple):
    """Tokens start to end of a text, of which those from `scored` on are scored."""

    text: int
    start: int
    scored: int
    end: int


def score(
    model: Any, texts: Iterable[Any], sources: Iterable[Any] | None, tokenizer: Any, max_length: int | None,
    stride: int | None, max_tokens: int,
) -> list[TextScore]:  # fmt: skip
    """See `fastgen.score`."""
    ids = list(_rows("texts", texts, tokenizer, "text" if sources is None else "text_target"))
    given = None if sources is None else list(_rows("sources", sources, tokenizer, "text"))
    _check(model, ids, given, max_length, stride, max_tokens)
    longest = max_length or getattr(
        model.config.get_text_config(decoder=True), "max_position_embeddings", None
    )
    if stride is not None and longest is not None and stride >= longest:
        raise ValueError(
            f"stride={stride}: from 1 to below {longest}, as many as there can be, or tokens are left out"
        )
    windows = [
        window
        for number, text in enumerate(ids)
        for window in _windows(number, len(text), longest, stride)
    ]
    if given is not None and len(windows) > len(ids):
        raise ValueError(
            f"a target of {max(map(len, ids))} tokens, where {longest} is the most there can be"
        )
    wide = torch.promote_types(model.dtype, torch.float32)
    scores = [torch.full((len(text),), torch.nan, dtype=wide, device="cpu") for text in ids]

    def run() -> None:
        head = _Head(model)
        for batch in _batches(windows, max_tokens):
            for window, found in zip(batch, _of_batch(model, head, batch, ids, given), strict=True):
                scores[window.text][window.scored : window.end] = found.to("cpu", wide)

    with torch.no_grad():
        try:
            isolated(_accelerated, model, run)
        except engine.DisabledMeanwhile:
            run()
    return [TextScore(found) for found in scores]


def _accelerated(model: Any, run: Callable[[], None]) -> None:
    with engine.running("score"), routed(model, family_of(model.config.model_type)):
        run()


def _rows(name: str, texts: Iterable[Any], tokenizer: Any, argument: str) -> Iterator[Tensor]:
    """Yield the token ids of each text.

    Args:
        name: what the caller calls the texts. argument: of the tokenizer, which it gives a string by.
    """
    if isinstance(texts, str):
        raise TypeError(f"{name} is a string, {texts[:40]!r}; it must be a list of texts")
    for number, text in enumerate(texts):
        if not isinstance(text, str):
            yield _ids(text)
        elif tokenizer is None:
            raise TypeError(
                f"{name}[{number}] is a string, {text[:40]!r}; pass tokenizer=..., or token ids such as "
                "tokenizer(text)['input_ids']"
            )
        else:
            yield _ids(tokenizer(**{argument: text})["input_ids"])


def _ids(text: Any) -> Tensor:
    found = torch.as_tensor(text, dtype=torch.int64, device="cpu")
    if found.dim() != 1 or not len(found):
        raise ValueError(
            f"a text is a row of at least one token id; one has the shape {tuple(found.shape)}"
        )
    return found


def _check(
    model: Any, ids: Sequence[Tensor], sources: Sequence[Tensor] | None, max_length: int | None, stride: int | None,
    max_tokens: int,
) -> None:  # fmt: skip
    if model.training:
        raise ValueError(f"{type(model).__name__} is in training mode; model.eval() ends it")
    if bool(model.config.is_encoder_decoder) != (sources is not None):
        wanted = "needs sources" if sources is None else "has no encoder for sources"
        raise ValueError(f"{type(model).__name__} {wanted}")
    if sources is not None and len(sources) != len(ids):
        raise ValueError(f"{len(ids)} texts, {len(sources)} sources")
    if max_length is not None and max_length < 2:
        raise ValueError(f"max_length={max_length}: a token and one before it are the least")
    if stride is not None and (stride < 1 or (max_length is not None and stride >= max_length)):
        raise ValueError(
            f"stride={stride}: from 1 to below max_length={max_length}, or tokens have none before them"
        )
    if max_tokens < 1:
        raise ValueError(f"max_tokens={max_tokens}: 1 is the least")


def _windows(text: int, length: int, longest: int | None, stride: int | None) -> Iterator[_Window]:
    """Windows of a text, each `stride` further than the one before; every token is scored in the first that has it."""
    longest = longest or length
    stride, start, scored = stride or max(1, longest // 2), 0, 0
    while scored < length:
        end = min(start + longest, length)
        yield _Window(text, start, scored, end)
        start, scored = start + stride, end


def _batches(windows: Sequence[_Window], max_tokens: int) -> Iterator[list[_Window]]:
    """Windows of like lengths, of so many tokens together, padding counted."""
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
    """Yield the log-probabilities of each window's scored tokens; NaN for a token that nothing precedes."""
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
        found = head.scores(
            hidden[row, first - before : len(text) - before], text[first:].to(device)
        )
        missing = window.end - window.scored - len(found)
        yield torch.cat([found.new_full((missing,), torch.nan), found])


def _behind_start(model: Any, labels: Tensor) -> Tensor:
    """What a decoder reads for labels (B, L), as the model's own forward makes it."""
    if hasattr(model, "prepare_decoder_input_ids_from_labels"):
        return model.prepare_decoder_input_ids_from_labels(labels)
    start = labels.new_full((len(labels), 1), model.config.decoder_start_token_id)
    shifted = torch.cat([start, labels[:, :-1]], 1)
    return shifted.masked_fill(shifted == -100, model.config.pad_token_id)


def _padded(texts: Sequence[Tensor], device: torch.device) -> tuple[Tensor, Tensor]:
    """Texts (B, L) padded behind, and where they are (B, L)."""
    pad = torch.nn.utils.rnn.pad_sequence
    ones = [torch.ones_like(text) for text in texts]
    return pad(list(texts), batch_first=True).to(device), pad(ones, batch_first=True).to(device)


class _Head:
    """What a model does with its last hidden states, some of them at a time."""

    def __init__(self, model: Any) -> None:
        self.model: Any = model
        self.layout: Layout | None = layout_of(model.config)
        self.proven = False

    def hidden(self, **inputs: Tensor) -> Tensor:
        """Return (B, L, C), the hidden states that the head reads."""
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
            input_ids=decoder_input_ids, encoder_hidden_states=source, encoder_attention_mask=attention_mask,
            use_cache=False,
        )[0]  # fmt: skip

    def scores(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        """Return log-probabilities (N,) of tokens (N,) for hidden (N, C)."""
        parts = [slice(start, start + ROWS) for start in range(0, max(1, len(tokens)), ROWS)]
        return torch.cat([token_scores(self._logits(hidden[part]), tokens[part]) for part in parts])

    def _logits(self, hidden: Tensor) -> Tensor:
        model, layout = self.model, self.layout
        assert layout is not None
        scale, softcap = layout.scale(model), layout.softcap(model)
        logits = model.get_output_embeddings()(hidden if scale == 1.0 else hidden * scale)
        if layout.bias is not None:
            logits = logits + getattr(model, layout.bias)
        return logits if softcap is None else (logits / softcap).tanh() * softcap

    def _prove(self, inputs: dict[str, Tensor]) -> None:
        """Compare a few tokens with the model's own logits.

        Raises:
            ValueError: they differ, or there is no record of the family.
        """
        model = self.model
        if self.layout is None or self.layout.mask is not None:
            known = sorted(name for name, layout in LAYOUTS.items() if layout.mask is None)
            raise ValueError(
                f"model type {model.config.model_type!r} is none of {', '.join(known)}"
            )
        own = model(**inputs, use_cache=False).logits[0]
        if agree(self._logits(self._states(**inputs)[0]), own) is not True:
            raise ValueError(
                f"{type(model).__name__} makes its logits otherwise than others of its family"
            )
        self.proven = True
