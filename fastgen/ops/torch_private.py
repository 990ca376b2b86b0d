"""Private operators of torch, used only with the schemas that fastgen was written for.

Any release of torch may rename such an operator, change its arguments, or drop it. If `operator`
raises, the caller runs something else and reports the message as the reason.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

# Schemas as torch prints them. Inductor uses these operators for frozen weights.
ONEDNN_LINEAR = (
    "mkldnn::_linear_pointwise(Tensor X, Tensor W, Tensor? B, str attr, Scalar?[] scalars, "
    "str? algorithm) -> Tensor Y"
)
ONEDNN_LINEAR_ADD = (
    "mkldnn::_linear_pointwise.binary(Tensor X, Tensor other, Tensor W, Tensor? B, str attr) "
    "-> Tensor Y"
)
ONEDNN_PACK = "mkldnn::_reorder_linear_weight(Tensor self, int? batch_size=None) -> Tensor Y"
MKL_LINEAR = (
    "mkl::_mkl_linear(Tensor X, Tensor MKL_W, Tensor ORI_W, Tensor? B, int batch_size) -> Tensor"
)
MKL_PACK = "mkl::_mkl_reorder_linear_weight(Tensor X, int batch_size) -> Tensor"

_functions: Any = torch._C


@cache
def operator(schema: str) -> Callable[..., Tensor]:
    """Return torch's operator with this schema.

    Raises:
        LookupError: this torch has no such operator, or one with another schema; the message says
            which.
    """
    name = schema.partition("(")[0]
    library, _, packet = name.partition("::")
    packet, _, overload = packet.partition(".")
    try:
        function = getattr(getattr(getattr(torch.ops, library), packet), overload or "default")
        actual = str(function._schema)
    except AttributeError:
        raise LookupError(f"torch {torch.__version__} has no operator {name}") from None
    if actual != schema:
        raise LookupError(f"the operator of torch {torch.__version__} is {actual}, not {schema}")
    return function


def is_observed() -> bool:
    """Return whether tracing, a dispatch mode or a functorch transform is active.

    Raises:
        AttributeError: this torch does not provide the information.
    """
    return (
        _functions._get_tracing_state() is not None
        or _functions._len_torch_dispatch_stack() > 0
        or _functions._functorch.peek_interpreter_stack() is not None
    )
