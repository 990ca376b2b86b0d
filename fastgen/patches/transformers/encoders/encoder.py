"""Encoders of transformers: runs their layers from the weights, without padding that is not read.

Two kinds of patches work together. Patches of an encoder's layers run them (`encode`). Patches of
the code around an encoder declare which positions of its output they read (`reading`): a sentence
classifier reads the first position of each sentence, and the token-classification pipeline reads
the tokens. `unpadded_encoder` uses the functions of this module inside `generate` of
encoder-decoder models, where only the tokens are read as well.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from transformers.modeling_outputs import BaseModelOutput, BaseModelOutputWithPastAndCrossAttentions

from fastgen.context import changed
from fastgen.models.build.encoder_builder import encoder_of
from fastgen.models.build.equivalence_check import TrialOutputs, record_verdict, recorded_verdict
from fastgen.models.build.int8_step import encoder_to_run
from fastgen.models.build.introspection import NotFused, is_toolkits
from fastgen.models.build.patched_torch import replaced
from fastgen.models.layers import linear
from fastgen.models.runtime.encoder import (
    Encoder,
    Padding,
    UnpaddedBatch,
    may_pay,
    pays,
    unpad,
    weights_of,
    whole,
)
from fastgen.models.specs.registry import ENCODERS
from fastgen.patches.engine import engine
from fastgen.patches.generation_call import GenerationCall, current
from fastgen.patches.transformers import compat
from fastgen.patches.transformers.generate.fused_decoder import not_known

_Original = Callable[..., Any]


class EncoderConsumer(NamedTuple):
    """Code around an encoder that declares which positions of the encoder's output it reads.

    Attributes:
        padding: Returns, for an encoder, how padding may be treated.
        name: Name of the patch that makes the declaration.
    """

    padding: Callable[[nn.Module], Padding]
    name: str


_WITHOUT_EFFECT = ("position_ids", "num_items_in_batch")
LITTLE = "too little to gain: its layers run as they are"
_OUTPUTS = {"distilbert": BaseModelOutput}


@functools.lru_cache(256)
def folder_of(kind: type[nn.Module]) -> str:
    """Return the model folder in transformers that defines a module's class or one of its bases."""
    kinds = (kind.__module__.split(".") for kind in kind.__mro__)
    return next(path[2] for path in kinds if path[:2] == ["transformers", "models"])


def is_transformed() -> bool:
    """Return whether a tracer, forward-mode AD or a torch.func transform is active."""
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
    """Replace the forward of BERT's encoder layers, and of encoders like it."""
    if self.training or is_transformed():  # out of scope, so not counted as a fallback
        return original(self, hidden_states, attention_mask, *args, **kwargs)
    family, consumer = folder_of(cast(Any, type(self))), current.get().encoder_consumer
    if is_small(hidden_states, consumer is not None or attention_mask is not None):
        engine.note_skipped(f"transformers.encoder.{family}", LITTLE)
        return original(self, hidden_states, attention_mask, *args, **kwargs)
    try:
        with engine.running("encoder"):
            check(self, hidden_states, args, kwargs)
            if not is_toolkits(original):
                raise NotFused("a forward that is not transformers'")
            padding = "run" if consumer is None else consumer.padding(self)
            hidden = _encode(original, self, family, hidden_states, attention_mask, padding)
    except (NotFused, Slower) as reason:
        count = engine.fallback if type(reason) is NotFused else engine.note_skipped
        count(f"transformers.encoder.{family}", str(reason))
        return original(self, hidden_states, attention_mask, *args, **kwargs)
    engine.hit(f"transformers.encoder.{family}")
    if consumer is not None and padding != "run":
        engine.hit(consumer.name)
    return _OUTPUTS.get(family, BaseModelOutputWithPastAndCrossAttentions)(
        last_hidden_state=cast(Any, hidden)
    )


def check(encoder: Any, given: Tensor, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Check that fastgen can run a call of an encoder.

    Args:
        encoder: The encoder module.
        given: Its first input.
        args: Its other positional arguments, after the mask.
        kwargs: Its keyword arguments.

    Raises:
        NotFused: The call needs more than the output, or cannot run here.
    """
    config = _config(encoder)
    if type(given) not in (Tensor, nn.Parameter):
        raise NotForUs("a tensor of a class of its own")
    if torch.is_grad_enabled():
        raise NotForUs("gradients are enabled")
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
    """Run an encoder's layers.

    Args:
        original: The encoder's own forward.
        encoder: The encoder module.
        family: Its folder in transformers.
        hidden: Embeddings (B, S, C).
        mask: Attention mask that transformers made, or None.
        padding: How padding is treated.

    Returns:
        (B, S, C), or (B, 1, C) if only the first position is read.

    Raises:
        NotFused: The layers cannot run from the weights.
        Slower: The encoder's own forward is faster.
    """
    shape = hidden.shape[0], hidden.shape[1]
    if (
        isinstance(mask, Tensor)
        and mask.dtype == torch.bool
        and compat.attention_of(_config(encoder)) == "eager"
    ):
        raise NotFused("an attention mask of its own")  # eager attention would add it
    visible = visible_of(mask, *shape)
    if padding == "run" and visible is not None and _alike(hidden, visible):
        padding = "alike"
    check_gain(encoder.layer, visible, hidden.shape, padding)
    layers = encoder_of(encoder, ENCODERS[family.replace("_", "-")], shape[1])
    if recorded_verdict(layers) is None:
        one = slice(0, 1)
        own = original(encoder, hidden[one], mask if mask is None else mask[one]).last_hidden_state
        ours = run(
            layers,
            hidden[one],
            sentences_of(None if visible is None else visible[one], (1, shape[1]), "run"),
        )
        prove(layers, ours[0], own[0])
        if len(hidden) == 1:
            return own
    return run(layers, hidden, sentences_of(visible, shape, padding))


class Slower(Exception):
    """Raised when an encoder's own forward is faster."""


class NotForUs(NotFused):
    """Raised for calls out of scope, which are skipped and not counted as fallbacks."""


def _config(encoder: nn.Module) -> Any:
    return next(
        cast(Any, module).config for module in encoder.modules() if hasattr(module, "config")
    )


def is_small(hidden: Tensor, padded: bool) -> bool:
    """Return whether a call is too small for any analysis to pay off.

    Args:
        hidden: Embeddings (B, S, C).
        padded: Whether the batch may have padding.
    """
    return hidden.dim() == 3 and not may_pay(
        hidden.shape[0] * hidden.shape[1], hidden.shape[2], padded
    )


def check_gain(
    layers: nn.ModuleList, visible: Tensor | None, shape: Sequence[int], padding: Padding
) -> None:
    """Check that running the layers from the weights is faster for a batch.

    Args:
        layers: The encoder's layers.
        visible: (B, S) bool, True for tokens; None if there is no padding.
        shape: (B, S, C).
        padding: How padding is treated.

    Raises:
        Slower: The encoder's own forward is faster.
    """
    lengths = [shape[1]] * shape[0] if visible is None else lengths_of(visible)
    routed = linear.reason_off(layers, math.inf) is None
    if not pays(lengths, shape[1], padding, weights_of(shape[2]), len(layers), routed):
        raise Slower(LITTLE)


def lengths_of(visible: Tensor) -> list[int]:
    """Return the number of tokens of each sentence, given `visible` (B, S) bool."""
    return cast("list[int]", cast(Any, visible.sum(1)).tolist())


def prove(encoder: Encoder, found: Tensor, own: Tensor) -> None:
    """Run the equivalence check of an encoder and record its verdict.

    Args:
        encoder: The encoder built from the weights.
        found: Its output (N, C) at some positions.
        own: The output of the encoder's own forward at these positions, (N, C).

    Raises:
        NotFused: They differ.
    """
    reason = record_verdict(encoder, TrialOutputs([found]), own)
    if reason is not None:
        raise NotFused(reason)


def run(encoder: Encoder, hidden: Tensor, sentences: UnpaddedBatch) -> Tensor:
    """Run the layers over the selected rows of hidden (B, S, C); return (B, S, C) or (B, 1, C)."""
    return sentences.restored(encoder_to_run(encoder)(sentences.chosen(hidden), sentences))


def sentences_of(visible: Tensor | None, shape: tuple[int, int], padding: Padding) -> UnpaddedBatch:
    """Return the rows to run of a batch (B, S), given `visible` (B, S) bool or None."""
    return (
        whole(shape, padding, torch.device("cpu")) if visible is None else unpad(visible, padding)
    )


def visible_of(mask: Any, sentences: int, length: int) -> Tensor | None:
    """Recover which positions are tokens from transformers' attention mask.

    Args:
        mask: Attention mask (B, 1, Q, S), bool or additive, or None.
        sentences: B.
        length: S.

    Returns:
        (B, S) bool, True for tokens; None if there is no padding.

    Raises:
        NotFused: The mask hides more than padding.
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
    """Return whether all padding positions of a sentence have equal embeddings.

    This holds for families whose position counts skip padding.
    """
    padding = ~visible
    places = padding.nonzero()
    first = padding.int().argmax(1)[places[:, 0]]
    # Compare a few positions first. In most families they already differ.
    few = slice(None, None, max(1, len(places) // 4))
    return all(
        torch.equal(hidden[places[part, 0], places[part, 1]], hidden[places[part, 0], first[part]])
        for part in (few, slice(None))
    )


def consuming(padding: Callable[[nn.Module], Padding], name: str) -> changed[GenerationCall]:
    """Return a context manager that declares which positions of an encoder's output are read.

    Args:
        padding: Returns, for an encoder, how padding may be treated.
        name: Name of the patch that counts the hits.
    """
    return changed(current, encoder_consumer=EncoderConsumer(padding, name))
