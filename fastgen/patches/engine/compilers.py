"""What torch's compilers see of a patched function: the original, as if no wrapper lay around it.

Dynamo traces through a wrapper as it traces through any function. TorchScript reads the source of the original, and
looks its names up in the globals of the wrapper. This module does not import torch.
"""

import sys
from collections.abc import Callable
from types import FunctionType
from typing import Any


def is_traced_by_dynamo() -> bool:
    """Whether torch.compile or torch.export traces, or runs what lies between two of the graphs that it made.

    Behind a graph break Python runs a frame by itself, and Dynamo compiles the functions that it calls.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        return False
    if torch.compiler.is_compiling():
        return True
    callback = getattr(
        torch._C._dynamo.eval_frame, "get_eval_frame_callback", None
    )  # private: it may go
    return callback is not None and callback() is not None


def is_traced_by_torchscript() -> bool:
    """Whether torch.jit.trace records what runs."""
    torch = sys.modules.get("torch")
    return torch is not None and torch.jit.is_tracing()


def skip_frames(wrapper: FunctionType) -> None:
    """Have Dynamo trace through a wrapper, but compile no frame of it by itself, only the functions that it calls.

    A frame of ours would otherwise break the graph once more wherever the original breaks it.
    """
    torch = sys.modules.get("torch")
    if torch is None:  # which a later patch will find
        return
    dynamo = torch._C._dynamo.eval_frame
    try:
        skip = dynamo._FrameExecStrategy(dynamo._FrameAction.SKIP, dynamo._FrameAction.DEFAULT)
        for function in (wrapper, is_traced_by_dynamo):
            dynamo.set_code_exec_strategy(function.__code__, skip)
    except (AttributeError, TypeError):  # private names, without which graphs break more often
        return


def with_globals_of(original: Callable[..., Any], wrapper: FunctionType) -> FunctionType:
    """Return a wrapper that uses no globals of its own with those of the original.

    The names in the original's source are then found through either of the two.
    """
    names: dict[str, Any] | None = getattr(original, "__globals__", None)
    if names is None:  # a callable of another kind
        return wrapper
    return FunctionType(
        wrapper.__code__, names, wrapper.__name__, wrapper.__defaults__, wrapper.__closure__
    )
