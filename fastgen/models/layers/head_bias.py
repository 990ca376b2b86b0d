"""In-place addition of the bias that a model adds to the output of its head; skipped if it is zero.

`lm_head(x) + final_logits_bias` writes as many values as the head has computed (30 MB per step for
128 rows and 58,101 tokens), and most models add zeros.
"""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

from fastgen.models.specs.model_spec import Head


class _AwaitingBias(Tensor):
    """Fresh output of a head: a plain tensor except for `+` with one particular bias."""

    bias: Tensor
    is_zero: bool
    # Results computed from it are plain tensors.
    __torch_function__ = cast(Any, torch._C)._disabled_torch_function_impl

    def __add__(self, other: Any) -> Any:
        plain = self.as_subclass(Tensor)
        if other is not self.bias:
            return plain + other
        return plain if self.is_zero else plain.add_(other)


def head_and_handing_on(
    model: nn.Module, spec: Head
) -> tuple[nn.Module, Callable[[Tensor], Tensor]] | None:
    """Return a model's head and the function that marks its output for the in-place bias.

    Args:
        model: The model.
        spec: Names of the head, and of the buffer that only the model's own forward adds to its
            output.

    Returns:
        None where the model may do anything else with that output.
    """
    if (
        spec.bias is None
        or not type(model).__module__.startswith("transformers.")
        or "forward" in model.__dict__
    ):
        return None
    head, bias = model._modules.get(spec.projection), model._buffers.get(spec.bias)
    if head is None or bias is None or bias.dtype != torch.float32:
        return None
    is_zero = not bool(bias.any())

    def awaiting(y: Tensor) -> Tensor:
        waiting = y.as_subclass(_AwaitingBias)
        waiting.bias, waiting.is_zero = bias, is_zero
        return waiting

    return head, awaiting
