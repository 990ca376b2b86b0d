"""The bias that a model adds to the output of its head: in the output's own memory, or not at all where it is zero.

`lm_head(x) + final_logits_bias` writes as many values once more as the head has computed (30 MB per step for 128 rows
and 58,101 tokens), in most models to add zeros.
"""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn


class _AwaitingBias(Tensor):
    """The fresh output of a head: a plain tensor to everything but `+` with the one bias it is waiting for."""

    bias: Tensor
    is_zero: bool
    __torch_function__ = cast(
        Any, torch._C
    )._disabled_torch_function_impl  # what is computed from it is plain

    def __add__(self, other: Any) -> Any:
        plain = self.as_subclass(Tensor)
        if other is not self.bias:
            return plain + other
        return plain if self.is_zero else plain.add_(other)


def head_and_handing_on(
    model: nn.Module, names: tuple[str, str] | None
) -> tuple[nn.Module, Callable[[Tensor], Tensor]] | None:
    """Return a model's head and what makes its output wait for the bias; None where the model may do anything else.

    Args:
        names: of the head and of the buffer that the model's own forward adds to its output, and nothing else reads.
    """
    if (
        names is None
        or not type(model).__module__.startswith("transformers.")
        or "forward" in model.__dict__
    ):
        return None
    head, bias = model._modules.get(names[0]), model._buffers.get(names[1])
    if head is None or bias is None or bias.dtype != torch.float32:
        return None
    is_zero = not bool(bias.any())

    def awaiting(y: Tensor) -> Tensor:
        waiting = y.as_subclass(_AwaitingBias)
        waiting.bias, waiting.is_zero = bias, is_zero
        return waiting

    return head, awaiting
