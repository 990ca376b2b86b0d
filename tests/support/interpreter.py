"""Triton's interpreter, made to spend its time on kernels."""

import functools
from types import ModuleType
from typing import Any

from triton import language
from triton.runtime import interpreter


def hasten() -> None:
    """Have the interpreter put its own functions in the place of Triton's language once, not at each call.

    It does so at each launch and at each call of a function from a kernel: a quarter of the time. No kernel is compiled
    in a process that interprets them, so that they can stay.
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
    of_number: Any = functools.cache(of_pointer)  # it makes a table of all types at each call

    def numpy_dtype(of: Any) -> Any:
        return (of_pointer if isinstance(of.scalar, language.pointer_type) else of_number)(
            of.scalar
        )

    interpreter._get_np_dtype = numpy_dtype
