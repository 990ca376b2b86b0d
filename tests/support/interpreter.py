"""Speed up Triton's interpreter."""

import functools
from types import ModuleType
from typing import Any

from triton import language
from triton.runtime import interpreter


def hasten() -> None:
    """Make the interpreter patch Triton's language once instead of at each call.

    By default it does so at each launch and at each call of a function from a kernel, which takes a
    quarter of the time. The patch can stay, as a process that interprets kernels compiles none.
    """
    patch, patched = interpreter._patch_lang, set[ModuleType]()

    def once(fn: Any) -> Any:
        of = {
            module
            for module in (language, language.core)
            if any(each is module for each in fn.__globals__.values())
        }
        if not of <= patched:
            patched.update(of)
            patch(fn)
        return interpreter._LangPatchScope()

    interpreter._patch_lang = once

    of_pointer: Any = interpreter._get_np_dtype
    # The original builds a table of all types at each call.
    of_number: Any = functools.cache(of_pointer)

    def numpy_dtype(of: Any) -> Any:
        return (of_pointer if isinstance(of.scalar, language.pointer_type) else of_number)(
            of.scalar
        )

    interpreter._get_np_dtype = numpy_dtype
