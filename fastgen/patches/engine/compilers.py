"""Helpers that make wrappers transparent to torch's compilers: they see the original function.

Dynamo traces through a wrapper like through any function. TorchScript reads the source of the
original and resolves its names in the wrapper's globals. This module does not import torch.
"""

import sys
from collections.abc import Callable
from types import FunctionType
from typing import Any


def is_traced_by_dynamo() -> bool:
    """Return whether torch.compile or torch.export is tracing, or is running code at a graph break.

    After a graph break, Python runs the frame itself, and Dynamo compiles the functions it calls.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        return False
    if torch.compiler.is_compiling():
        return True
    # A private function, which later torch versions may remove.
    callback = getattr(torch._C._dynamo.eval_frame, "get_eval_frame_callback", None)
    return callback is not None and callback() is not None


def is_traced_by_torchscript() -> bool:
    """Return whether torch.jit.trace is recording."""
    torch = sys.modules.get("torch")
    return torch is not None and torch.jit.is_tracing()


def skip_frames(wrapper: FunctionType) -> None:
    """Make Dynamo skip the wrapper's own frame and compile only the functions it calls.

    Dynamo can still inline the wrapper into another graph. Without this, every graph break in the
    original would cause a second one in the wrapper's frame.
    """
    torch = sys.modules.get("torch")
    if torch is None:  # all wrappers share one code object, so a later patch can do this
        return
    dynamo = torch._C._dynamo.eval_frame
    try:
        skip = dynamo._FrameExecStrategy(dynamo._FrameAction.SKIP, dynamo._FrameAction.DEFAULT)
        for function in (wrapper, is_traced_by_dynamo):
            dynamo.set_code_exec_strategy(function.__code__, skip)
    except (AttributeError, TypeError):  # private names; without them there are more graph breaks
        return


def with_globals_of(original: Callable[..., Any], wrapper: FunctionType) -> FunctionType:
    """Return a copy of the wrapper that uses the globals of the original.

    The wrapper must not reference globals of its own. Names in the original's source then resolve
    through both functions.
    """
    names: dict[str, Any] | None = getattr(original, "__globals__", None)
    if names is None:  # a callable that is not a Python function
        return wrapper
    return FunctionType(
        wrapper.__code__, names, wrapper.__name__, wrapper.__defaults__, wrapper.__closure__
    )
