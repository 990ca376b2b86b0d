"""The decode step of a fairseq model from its weights (`models.step`), over the shared cache."""

from typing import Any

from torch import Tensor

from fastgen import config
from fastgen.models.layouts import LAYOUTS
from fastgen.models.proof import outcome
from fastgen.models.reader import NotFused, step_of
from fastgen.models.step import Context
from fastgen.patches.fairseq.attention import Layers


class FusedDecoder:
    """A model's steps behind the first one, in which the keys of the source were made.

    Args:
        longest: tokens of a text at most.

    Raises:
        NotFused: the step cannot be made from the weights; with the reason.
    """

    def __init__(self, model: Any, layers: Layers, longest: int) -> None:
        if config.settings().step == "module":
            raise NotFused("FASTGEN_STEP=module")
        self.step, self.layers = step_of(model, LAYOUTS["fairseq"], longest), layers
        modules: list[Any] = list(model.decoder.layers)
        self.text = [layers.of[layer.self_attn] for layer in modules]
        self.source = [layers.of[layer.encoder_attn] for layer in modules if layer.encoder_attn is not None]
        self.ready = bool(outcome(self.step))  # else the next step is made both ways

    def __call__(self, tokens: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return logits (R, V), and the last layer's attention over the source (R, S) or None, for texts (R, L)."""
        layers = self.layers
        context = Context(
            layers.sentences, tokens.shape[1], self.text[0].prefix, tokens.shape[1] - 1, self.text, self.source,
            layers.text_mask, layers.source_mask,
            watched=len(self.source) - 1 if self.source else None,
        )  # fmt: skip
        logits = self.step(tokens[:, -1], context)
        return logits, None if context.weights is None else context.weights.to(logits.dtype)
