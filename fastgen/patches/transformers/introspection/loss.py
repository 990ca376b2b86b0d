"""transformers' loss of language models where no gradients are wanted: without the log-probabilities of all tokens."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fastgen.ops.selection.token_scores import CHUNK, token_scores
from fastgen.patches.engine import engine
from fastgen.patches.transformers.encoders.encoder import is_transformed

NAME = "transformers.loss"


def causal(
    original: Callable[..., Tensor], /, logits: Tensor, labels: Any, vocab_size: int, *args: Any, **kwargs: Any
) -> Tensor:
    """`ForCausalLMLoss`, to the bit: its own sum runs over the one log-probability that each label needs."""
    if type(logits) is not Tensor or logits.requires_grad or is_transformed():
        return original(logits, labels, vocab_size, *args, **kwargs)  # training, which is not fastgen's business
    shifted, ignored = kwargs.get("shift_labels"), kwargs.get("ignore_index", -100)
    reason = _reason_off(logits, labels, vocab_size, shifted, ignored, args)
    if reason is not None:
        engine.left_alone(NAME, reason)
        return original(logits, labels, vocab_size, *args, **kwargs)
    if shifted is None:
        shifted = F.pad(labels, (0, 1), value=ignored)[..., 1:]
    flat, items = shifted.reshape(-1), kwargs.get("num_items_in_batch")
    wanted = flat != ignored
    # In fp32, whatever the logits are, as transformers computes it.
    scores = token_scores(logits.reshape(-1, vocab_size), flat.where(wanted, 0), torch.float32)
    targets = torch.zeros_like(flat).where(wanted, -100)
    reduction = "mean" if items is None else "sum"
    loss = F.nll_loss(scores[:, None], targets, ignore_index=-100, reduction=reduction)
    engine.hit(NAME)
    return loss if items is None else loss / items


def _reason_off(
    logits: Tensor, labels: Any, vocab_size: int, shifted: Any, ignored: int, args: tuple[Any, ...]
) -> str | None:
    """Why the original runs; None where it need not."""
    targets = labels if shifted is None else shifted
    if logits.device.type != "cpu":
        return "not on a CPU"
    if args or not isinstance(targets, Tensor) or targets.dtype != torch.int64 or targets.device != logits.device:
        return "labels of another kind"
    if logits.shape[-1] != vocab_size or logits.shape[:-1] != targets.shape:
        return "labels that do not fit the logits"
    if 4 * logits.numel() < 2 * CHUNK:
        return "too little to gain: the log-probabilities fit the cache"
    outside = (targets != ignored) & ((targets < 0) | (targets >= vocab_size))
    return "labels out of the vocabulary" if bool(outside.any()) else None
