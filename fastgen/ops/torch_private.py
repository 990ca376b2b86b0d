"""Private functions of torch; a release of torch that lacks one leaves the operations in C off."""

from typing import Any

import torch

_functions: Any = torch._C


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
