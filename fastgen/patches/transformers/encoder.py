"""transformers' encoders: their layers from the weights, without the padding that nobody reads (`models.encoder`).

Two kinds of patches meet here. Those of the layers run them. Those around them, which know what is read of the output,
say so (`reading`): a sentence classifier reads each sentence's first position, the pipeline of token classification its
tokens, and so does `generate` of an encoder-decoder model.
"""

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutput, BaseModelOutputWithPastAndCrossAttentions
from transformers.utils import output_capturing

from fastgen.models.encoder import Encoder, Padding, Sentences, arranged, whole
from fastgen.models.encoder_reader import encoder_of
from fastgen.models.layouts import ENCODERS
from fastgen.models.proof import outcome, verdict
from fastgen.models.reader import NotFused
from fastgen.patches import _engine

_Original = Callable[..., Any]

reading: ContextVar[tuple[nn.Module, Padding] | None] = ContextVar("fastgen_reading", default=None)
"""An encoder of which not all of the output is read in this context, and what becomes of its padding."""

_ATTENTION = ("eager", "sdpa")
_WITHOUT_EFFECT = ("position_ids", "num_items_in_batch")
_OUTPUTS = {"distilbert": BaseModelOutput}


def family_of_code(original: _Original) -> str:
    """The name of a family's folder in transformers, by one of its methods."""
    return original.__module__.split(".")[-2]


def encode(
    original: _Original, self: Any, hidden_states: Tensor, attention_mask: Any = None, *args: Any, **kwargs: Any
) -> Any:
    """The layers of BERT's encoder and of those like it."""
    if self.training:  # which is not fastgen's business, and no fallback
        return original(self, hidden_states, attention_mask, *args, **kwargs)
    family = family_of_code(original)
    try:
        with _engine.running("encoder"):
            check(self, hidden_states, args, kwargs)
            found = _encode(original, self, family, hidden_states, attention_mask)
    except NotFused as reason:
        _engine.fallback(f"transformers.encoder.{family}", str(reason))
        return original(self, hidden_states, attention_mask, *args, **kwargs)
    _engine.hit(f"transformers.encoder.{family}")
    if _padding_for(self) == "first":
        _engine.hit(f"transformers.classifier.{family}")
    return _OUTPUTS.get(family, BaseModelOutputWithPastAndCrossAttentions)(last_hidden_state=cast(Any, found))


def check(encoder: Any, given: Tensor, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Raise NotFused where a call of an encoder asks for more than its output, or cannot run here."""
    config = next(module.config for module in encoder.modules() if hasattr(module, "config"))
    if torch.jit.is_tracing() or type(given) not in (Tensor, nn.Parameter):
        raise NotFused("the forward is traced")
    if torch.is_grad_enabled():
        raise NotFused("gradients are wanted")
    if given.device.type != "cpu":
        raise NotFused("not on a CPU")
    if output_capturing._active_collector.get():  # pyright: ignore[reportPrivateUsage]
        raise NotFused("hidden states or attentions are returned")
    if getattr(config, "is_decoder", False) or getattr(config, "add_cross_attention", False):
        raise NotFused("it is a decoder")
    if config._attn_implementation not in _ATTENTION:
        raise NotFused(f"attention implementation {config._attn_implementation!r}")
    if any(value is not None for value in args):
        raise NotFused("the encoder gets arguments without a name")
    for name, value in kwargs.items():
        if name not in _WITHOUT_EFFECT and value is not None and value is not False:
            raise NotFused(f"the encoder gets {name}")


def _encode(original: _Original, encoder: Any, family: str, hidden: Tensor, mask: Any) -> Tensor:
    """Return (B, S, C) for hidden (B, S, C); (B, 1, C) where the first position alone is read."""
    visible = visible_of(mask, hidden.shape[0], hidden.shape[1])
    layers = encoder_of(encoder, ENCODERS[family.replace("_", "-")], hidden.shape[1])
    if outcome(layers) is None:
        of_one = None if visible is None else visible[:1]
        own = original(encoder, hidden[:1], mask if mask is None else mask[:1]).last_hidden_state
        found = run(layers, hidden[:1], sentences_of(of_one, (1, hidden.shape[1]), "run"))
        _raise(verdict(layers, found.flatten(0, 1), own.flatten(0, 1)))
    padding = _padding_for(encoder)
    if padding == "run" and visible is not None and _alike(hidden, visible):
        padding = "alike"
    return run(layers, hidden, sentences_of(visible, (hidden.shape[0], hidden.shape[1]), padding))


def _padding_for(encoder: nn.Module) -> Padding:
    asked = reading.get()
    return asked[1] if asked is not None and asked[0] is encoder else "run"


def _raise(reason: str | None) -> None:
    if reason is not None:
        raise NotFused(reason)


def run(encoder: Encoder, hidden: Tensor, sentences: Sentences) -> Tensor:
    """What the layers make of hidden (B, S, C)."""
    return sentences.restored(encoder(sentences.chosen(hidden), sentences))


def sentences_of(visible: Tensor | None, shape: tuple[int, int], padding: Padding) -> Sentences:
    return whole(shape, padding, torch.device("cpu")) if visible is None else arranged(visible, padding)


def visible_of(mask: Any, sentences: int, length: int) -> Tensor | None:
    """Where tokens are, (B, S) bool, by the mask that transformers made for attention; None for everywhere.

    Raises:
        NotFused: it is not the mask of padding alone.
    """
    if mask is None:
        return None
    if not isinstance(mask, Tensor) or mask.dim() != 4 or mask.shape[1] != 1:
        raise NotFused("an attention mask of its own")
    seen = mask[:, 0, 0]
    if mask.shape[2] > 1 and not torch.equal(mask[:, 0], seen[:, None].expand_as(mask[:, 0])):
        raise NotFused("an attention mask that differs between positions")
    if mask.dtype != torch.bool:
        visible = seen == 0
        if not bool((visible | (seen == torch.finfo(mask.dtype).min)).all()):
            raise NotFused("an attention mask of its own")
    else:
        visible = seen
    if visible.shape != (sentences, length):
        raise NotFused("an attention mask of its own")
    if not bool(visible.any(1).all()):
        raise NotFused("a sentence of padding alone")
    return None if bool(visible.all()) else visible


def _alike(hidden: Tensor, visible: Tensor) -> bool:
    """Whether all padding of a sentence goes in alike, as in families that count positions without it."""
    padding = ~visible
    places = padding.nonzero()
    first = padding.int().argmax(1)[places[:, 0]]
    few = slice(None, None, max(1, len(places) // 4))  # in most families a look at a few shows that it does not
    return all(
        torch.equal(hidden[places[part, 0], places[part, 1]], hidden[places[part, 0], first[part]])
        for part in (few, slice(None))
    )


@contextmanager
def reading_of(encoder: nn.Module, padding: Padding) -> Generator[None]:
    token = reading.set((encoder, padding))
    try:
        yield
    finally:
        reading.reset(token)
