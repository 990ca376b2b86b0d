"""The loss that `Seq2SeqTrainer` computes after it has generated: one forward for each batch.

The forward runs on packed weights. For encoder-decoder models it skips what the loss does not
read: padding of the sources, and all positions of a text after its last label.
"""

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import Seq2SeqTrainer
from transformers.trainer_pt_utils import LabelSmoother

from fastgen.models.layers.read_rows import reading
from fastgen.models.routing.instance import Routed, install, own_forwards, restore
from fastgen.models.routing.routes import routed, touched_of
from fastgen.models.specs.registry import spec_of
from fastgen.patches.engine import engine
from fastgen.patches.generation_call import call_of
from fastgen.patches.transformers import compat
from fastgen.patches.transformers.encoders.unpadded_encoder import unpadded

NAME = "transformers.evaluation_loss"

_IGNORED = -100
"""Label of a position that the loss ignores."""


def compute_loss_context_manager(
    original: Callable[..., AbstractContextManager[Any]], /, self: Any
) -> AbstractContextManager[Any]:
    """Replace `Trainer.compute_loss_context_manager`, which an evaluation enters for each loss."""
    own, calls = original(self), call_of(self.model).upcoming
    is_generated = calls is not None and calls.recur
    return _on_packed_weights(self, own) if is_generated else own


@contextmanager
def _on_packed_weights(trainer: Any, own: AbstractContextManager[Any]) -> Generator[None]:
    model = trainer.model
    with own, routed(model, spec_of(model.config)) as count:
        before: dict[nn.Module, Any] = {}
        if count:
            engine.hit(NAME)
        if count and _reads_loss_alone(trainer):
            before = own_forwards([model])
            install({model: _LossForward(model)})
        try:
            yield
        finally:
            restore(before)


def _reads_loss_alone(trainer: Any) -> bool:
    """Return whether nothing but the loss is read of what the model's forward returns."""
    model, smoother = trainer.model, trainer.label_smoother
    return (
        cast(Any, type(trainer)).prediction_step is cast(Any, Seq2SeqTrainer).prediction_step
        and (smoother is None or type(smoother) is LabelSmoother)
        and type(model).__module__.startswith("transformers.")
        and model.config.is_encoder_decoder
        and not model.training
        and not compat.has_own_loss(model)
        and not touched_of(model)
    )


class _LossForward(Routed):
    """Forward of an encoder-decoder model of which only the loss is read."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        model = self.module
        forward: Any = cast(Any, type(model)).forward
        if args or not _is_known(kwargs) or torch.is_grad_enabled():
            return forward(model, *args, **kwargs)
        ids, mask, labels = (kwargs[name] for name in _GIVEN)
        own = model.get_encoder()
        encoder = unpadded(model, own)
        # Families without an encoder's spec may read padding, as a source of padding alone does.
        if encoder is own or not bool(mask.any(1).all()):
            return forward(model, *args, **kwargs)
        source = encoder(input_ids=ids, attention_mask=mask, return_dict=True)
        kwargs = kwargs | {"encoder_outputs": source}
        read = (labels != _IGNORED).flip(1).cumsum(1).flip(1) > 0
        hidden = source.last_hidden_state
        with reading(read, hidden.shape[-1], hidden, mask.bool()):
            return forward(model, **kwargs)


_GIVEN = ("input_ids", "attention_mask", "labels")


def _is_known(kwargs: dict[str, Any]) -> bool:
    """Return whether a forward gets sources, their mask, labels, and at most what follows them."""
    others = kwargs.keys() - {*_GIVEN, "decoder_input_ids", "num_items_in_batch", "return_dict"}
    return not any(kwargs[name] is not None for name in others) and all(
        isinstance(value := kwargs.get(name), Tensor)
        and value.dim() == 2
        and value.device.type == "cpu"
        for name in _GIVEN
    )
