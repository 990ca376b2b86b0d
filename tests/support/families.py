"""Every family that fastgen accelerates, as a tiny random model, with inputs for it."""

import functools
import json
from random import Random
from typing import Any

import torch

from benchmarks.coverage import recipe
from benchmarks.coverage.record import FILE, FUSED, SHARED
from fastgen.models.specs.registry import spec_of
from tests.support import combined, zoo

_RECORDED: dict[str, Any] = json.loads(FILE.read_text())["families"]
_ZOO = {**zoo.FAMILIES, **zoo.STREAMS, **zoo.MORE}
_ROUNDED = ("codegen", "gpt_neo", "gptj", "xglm")
"""Families that compute attention in fp32, or fail in fp64."""

FAMILIES = (
    *_ZOO,
    *combined.COMBINED,
    *(
        name
        for name, found in _RECORDED.items()
        if found["how"] in (FUSED, SHARED) and name not in {*_ZOO, *zoo.SPEECH}
    ),
)
"""Names of models of tests, pairs and models with images, and other families of the record."""


def dtype_of(family: str, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which a family is compared: fp32 where it does not compute in fp64."""
    recorded = _RECORDED.get(family, {}).get("dtype")
    rounds = recorded == "float32" or family.startswith(_ROUNDED)
    is_fp64 = family in zoo.FAMILIES or not rounds
    return dtype if is_fp64 else torch.float32


def build(family: str, dtype: torch.dtype, seed: int = 0) -> Any:
    """Return a model of `FAMILIES`; those that the recipe builds have the same weights always."""
    if family in _ZOO:
        return zoo.build(family, dtype, seed)
    if family in combined.COMBINED:
        return combined.build(family, dtype)
    return recipe.enlarge(recipe.tiny(family)).to(dtype)


@functools.cache
def has_attention_interface(family: str) -> bool:
    """Return whether a model of tests can run another attention implementation."""
    spec = spec_of(build(family, torch.float32).config) if family in _ZOO else None
    return spec is not None and spec.attention_interface


def inputs_of(
    family: str, model: Any, sentences: int, length: int, padding: str, r: Random
) -> dict[str, torch.Tensor]:
    """Return random inputs of a model: token ids, or images or sound of `tests.support.combined`.

    Args:
        family: Its name.
        model: The model.
        sentences: B.
        length: Number of tokens of the longest text.
        padding: As in `zoo.batch`.
        r: Draws the tokens.
    """
    if family in combined.COMBINED:
        return combined.inputs_of(family, sentences, padding != "none", model.dtype)
    return zoo.batch(model, sentences, length, padding, seed=r.randrange(1 << 30))
