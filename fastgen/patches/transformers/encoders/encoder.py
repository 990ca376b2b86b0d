"""transformers' encoders: their layers from the weights, without the padding that nobody reads (`encoder`).

Two kinds of patches meet here. Those of the layers run them. Those around them, which know what is read of the output,
say so (`reading`): a sentence classifier reads each sentence's first position, the pipeline of token classification its
tokens, and so does `generate` of an encoder-decoder model.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from transformers.modeling_outputs import BaseModelOutput, BaseModelOutputWithPastAndCrossAttentions

from fastgen.context import assigned
from fastgen.models.build.encoder_builder import encoder_of
from fastgen.models.build.equivalence_check import Tried, outcome, verdict
from fastgen.models.build.introspection import NotFused, is_toolkits
from fastgen.models.build.patched_torch import replaced
from fastgen.models.layers import linear
from fastgen.models.runtime.encoder import (
    Encoder,
    Padding,
    Sentences,
    arranged,
    may_pay,
    pays,
    weights_of,
    whole,
)
from fastgen.models.specs.encoder_layouts import ENCODERS
from fastgen.patches.engine import engine
from fastgen.patches.transformers import compat
from fastgen.patches.transformers.generate.fused_decoder import not_known

_Original = Callable[..., Any]


class Reading(NamedTuple):
    """What an encoder may make of padding, by what is read of its output; name: of the patch that knows."""

    padding: Callable[[nn.Module], Padding]
    name: str


reading: ContextVar[Reading | None] = ContextVar("fastgen_reading", default=None)
"""What is read of an encoder's output in this context, where somebody knows."""

_WITHOUT_EFFECT = ("position_ids", "num_items_in_batch")
LITTLE = "too little to gain: its layers run as they are"
_OUTPUTS = {"distilbert": BaseModelOutput}


@functools.lru_cache(256)
def folder_of(kind: type[nn.Module]) -> str:
    """The name of the folder in transformers that a module's class, or one it is made from, lies in."""
    kinds = (kind.__module__.split(".") for kind in kind.__mro__)
    return next(path[2] for path in kinds if path[:2] == ["transformers", "models"])


def is_transformed() -> bool:
    """Whether a tracer, forward differentiation or one of torch.func's transforms looks on."""
    within = cast(Any, torch)._C._functorch.peek_interpreter_stack() is not None
    return within or cast(Any, torch.jit).is_tracing() or cast(Any, forward_ad)._current_level >= 0


def encode(
    original: _Original,
    self: Any,
    hidden_states: Tensor,
    attention_mask: Any = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """The layers of BERT's encoder and of those like it."""
    if self.training or is_transformed():  # which is not fastgen's business, and no fallback
        return original(self, hidden_states, attention_mask, *args, **kwargs)
    family, asked = folder_of(cast(Any, type(self))), reading.get()
    if is_small(hidden_states, asked is not None or attention_mask is not None):
        engine.left_alone(f"transformers.encoder.{family}", LITTLE)
        return original(self, hidden_states, attention_mask, *args, **kwargs)
    try:
        with engine.running("encoder"):
            check(self, hidden_states, args, kwargs)
            if not is_toolkits(original):
                raise NotFused("a forward that is not transformers'")
            padding = "run" if asked is None else asked.padding(self)
            found = _encode(original, self, family, hidden_states, attention_mask, padding)
    except (NotFused, Slower) as reason:
        count = engine.fallback if type(reason) is NotFused else engine.left_alone
        count(f"transformers.encoder.{family}", str(reason))
        return original(self, hidden_states, attention_mask, *args, **kwargs)
    engine.hit(f"transformers.encoder.{family}")
    if asked is not None and padding != "run":
        engine.hit(asked.name)
    return _OUTPUTS.get(family, BaseModelOutputWithPastAndCrossAttentions)(
        last_hidden_state=cast(Any, found)
    )


def check(encoder: Any, given: Tensor, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Raise NotFused where a call of an encoder asks for more than its output, or cannot run here."""
    config = _config(encoder)
    if type(given) not in (Tensor, nn.Parameter):
        raise NotForUs("a tensor of a class of its own")
    if torch.is_grad_enabled():
        raise NotForUs("gradients are wanted")
    if given.device.type != "cpu":
        raise NotForUs("not on a CPU")
    if compat.collects_outputs():
        raise NotForUs("hidden states or attentions are returned")
    if getattr(config, "is_decoder", False) or getattr(config, "add_cross_attention", False):
        raise NotFused("it is a decoder")
    if (reason := replaced() or not_known(encoder, config)) is not None:
        raise NotFused(reason)
    if any(value is not None for value in args):
        raise NotFused("the encoder gets arguments without a name")
    for name, value in kwargs.items():
        if name not in _WITHOUT_EFFECT and value is not None and value is not False:
            raise NotFused(f"the encoder gets {name}")


def _encode(
    original: _Original, encoder: Any, family: str, hidden: Tensor, mask: Any, padding: Padding
) -> Tensor:
    """Return (B, S, C) for hidden (B, S, C); (B, 1, C) where the first position alone is read.

    Raises:
        NotFused: the layers cannot be run so.
        Slower: it would not be faster.
    """
    shape = hidden.shape[0], hidden.shape[1]
    if (
        isinstance(mask, Tensor)
        and mask.dtype == torch.bool
        and compat.attention_of(_config(encoder)) == "eager"
    ):
        raise NotFused("an attention mask of its own")  # it would be added
    visible = visible_of(mask, *shape)
    if padding == "run" and visible is not None and _alike(hidden, visible):
        padding = "alike"
    check_gain(encoder.layer, visible, hidden.shape, padding)
    layers = encoder_of(encoder, ENCODERS[family.replace("_", "-")], shape[1])
    if outcome(layers) is None:
        one = slice(0, 1)
        own = original(encoder, hidden[one], mask if mask is None else mask[one]).last_hidden_state
        found = run(
            layers,
            hidden[one],
            sentences_of(None if visible is None else visible[one], (1, shape[1]), "run"),
        )
        prove(layers, found[0], own[0])
        if len(hidden) == 1:
            return own
    return run(layers, hidden, sentences_of(visible, shape, padding))


class Slower(Exception):
    """An encoder's own forward is the faster way."""


class NotForUs(NotFused):
    """A call of a kind that nothing is made faster of here: it is left alone, and is no fallback."""


def _config(encoder: nn.Module) -> Any:
    return next(
        cast(Any, module).config for module in encoder.modules() if hasattr(module, "config")
    )


def is_small(hidden: Tensor, padded: bool) -> bool:
    """Whether a call is over before anything else can be looked at."""
    return hidden.dim() == 3 and not may_pay(
        hidden.shape[0] * hidden.shape[1], hidden.shape[2], padded
    )


def check_gain(
    layers: nn.ModuleList, visible: Tensor | None, shape: Sequence[int], padding: Padding
) -> None:
    """Raise Slower where an encoder's own forward is the faster way for a batch (B, S, C)."""
    lengths = [shape[1]] * shape[0] if visible is None else lengths_of(visible)
    routed = linear.reason_off(layers) is None
    if not pays(lengths, shape[1], padding, weights_of(shape[2]), len(layers), routed):
        raise Slower(LITTLE)


def lengths_of(visible: Tensor) -> list[int]:
    """How many tokens each sentence has, by where they are (B, S)."""
    return cast("list[int]", cast(Any, visible.sum(1)).tolist())


def prove(encoder: Encoder, found: Tensor, own: Tensor) -> None:
    """Compare what was made of some positions (N, C) with the encoder's own output, once for all.

    Raises:
        NotFused: they differ.
    """
    reason = verdict(encoder, Tried([found]), own)
    if reason is not None:
        raise NotFused(reason)


def run(encoder: Encoder, hidden: Tensor, sentences: Sentences) -> Tensor:
    """What the layers make of hidden (B, S, C)."""
    return sentences.restored(encoder(sentences.chosen(hidden), sentences))


def sentences_of(visible: Tensor | None, shape: tuple[int, int], padding: Padding) -> Sentences:
    return (
        whole(shape, padding, torch.device("cpu"))
        if visible is None
        else arranged(visible, padding)
    )


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
    if (
        mask.shape[2] > 1
        and mask.stride(2)
        and not torch.equal(mask[:, 0], seen[:, None].expand_as(mask[:, 0]))
    ):
        raise NotFused("an attention mask that differs between positions")
    if not (mask.dtype == torch.bool or mask.is_floating_point()):
        raise NotFused("an attention mask of its own")
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
    few = slice(
        None, None, max(1, len(places) // 4)
    )  # in most families a look at a few shows that it does not
    return all(
        torch.equal(hidden[places[part, 0], places[part, 1]], hidden[places[part, 0], first[part]])
        for part in (few, slice(None))
    )


def read_as(padding: Callable[[nn.Module], Padding], name: str) -> assigned[Reading | None]:
    """Within it, `padding` says of an encoder what it may make of padding; name: of the patch that counts it."""
    return assigned(reading, Reading(padding, name))
