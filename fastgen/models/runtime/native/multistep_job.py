"""Jobs of many decode steps in C, from token ids to logits, for a search that selects tokens in C.

Python between two steps takes a good part of a small model's step. C therefore runs many steps per
Python call, until there is something for Python to decide.

Source: Wang et al. 2021 (LightSeq), section 2.1.
"""

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastgen import config
from fastgen.models.layers.linear import Linear, Packable
from fastgen.models.layers.norm import Norm, NormLike, unnormed
from fastgen.models.layers.packed_weights import STOPPED, has_stopped_packing, shortage_of
from fastgen.models.runtime.decode_step import DecoderStep, Embedding
from fastgen.models.runtime.head_bounds import bounds_of
from fastgen.models.runtime.native.layers import is_norm, norm_fits, norm_of, weight_of
from fastgen.models.runtime.native.records import Rows
from fastgen.models.runtime.native.step import NativeStep
from fastgen.models.runtime.step_inputs import CallStepInputs
from fastgen.ops import native
from fastgen.ops.dispatch import in_c, plain, select_backend, unsupported
from fastgen.ops.native import search as c


class Prepared(NamedTuple):
    """A job of decode steps that C can run for one call.

    Attributes:
        by: The native library.
        decoder: Arguments of the library.
        steps: Maximum number of decode steps.
        logits: (R, V) fp32, output of the newest step, rounded to the dtype of the weights.
        began: (steps + 1,) fp64, start time of each step in seconds.
        mask: (B, M, N) additive mask of the text for each beam; None if everything is visible.
        own: (M, M) additive mask of the newest slots.
        prefix: Number of keys of the shared prefix.
        filled: Number of slots after the prefix that are in use.
        held: Tensors whose addresses `decoder` contains.
    """

    by: native.Library
    decoder: c.Decoder
    steps: int
    logits: Tensor
    began: Tensor
    mask: Tensor | None
    own: Tensor
    prefix: int
    filled: int
    held: Sequence[Any]


def prepared(
    step: DecoderStep, context: CallStepInputs, mask: Tensor | None, own: Tensor, steps: int
) -> Prepared | None:
    """Prepare a job of decode steps in C, before any of their slots is reserved.

    Args:
        step: Decode step of a decoder for which `supports_steps` holds.
        context: Inputs of the first step.
        mask: (B, M, N) additive mask of the keys of the text after all steps, prefix included; None
            if everything is visible.
        own: (M, M) additive mask of the newest slots, between the beams of a sentence.
        steps: Maximum number of decode steps.

    Returns:
        The job, possibly of fewer steps; None if C cannot run it.
    """
    inner, embedding = step.run_layers, step.embedding
    assert isinstance(inner, NativeStep)
    beams, tokens = context.text[0].beams, embedding.tokens.data
    rows = context.sentences * beams
    head: Any = step.head
    if embedding.positions is not None:
        steps = min(steps, _rows_left(embedding, embedding.positions, context.position))
    steps = inner.steps_within(context, steps)
    biases = head.module.bias, step.bias
    positions = None if embedding.positions is None else embedding.positions.data
    read = [each if each is None else each.data for each in (tokens, positions, *biases)]
    dtype = inner.records.dtype
    by = native.library()
    widths = [
        width
        for width, x in zip((inner.records.width,) * 2 + (head.outputs,) * 2, read, strict=True)
        if x is not None
    ]
    supported = lambda: (  # noqa: E731
        plain(*read, dtype=dtype)
        and all(x is None or x.stride(-1) == 1 for x in read)
        and [x.shape[-1] for x in read if x is not None] == widths
        and head.inputs == inner.records.width
        and head.dtype == dtype
        and all(norm_fits(norm, head.inputs, dtype) for norm in (embedding.norm, step.first))
    )
    if (
        steps < 1
        or rows > native.most_rows(dtype)
        or by is None
        or not in_c(select_backend("search", unsupported, supported, tokens))
    ):
        return None
    if (panels := head.in_panels()) is None:
        return None
    seen = inner.prepare_steps(by, context, mask, steps)
    if seen is None:
        return None
    held: list[Any] = [*read, *seen, panels]
    memory = inner.records.memory
    began = torch.empty(steps + 1, dtype=torch.float64, device="cpu")
    like = torch.empty(0, dtype=torch.float32, device="cpu")
    bias = next((each for each in read[2:] if each is not None), None)
    bounds = bounds_of(by, step, rows, bias)
    x, logits = (
        memory.take(like, 2, rows, tokens.shape[1]),
        memory.take(like, 2 * rows if bounds else rows, head.outputs),
    )
    step_args, step_held = inner.records.given(
        x[0], x[1], inner.seen, [Rows(context.sentences, beams)]
    )
    decoder = c.Decoder(
        step=ctypes.addressof(step_args),
        seen=ctypes.addressof(inner.seen),
        tokens=tokens.data_ptr(),
        vocabulary=len(tokens),
        token_row=tokens.stride(0),
        padding=-1,
        scale=embedding.scale,
        embedded=_norm(embedding.norm, held),
        first=_norm(step.first, held),
        norm_tokens=embedding.norm_tokens,
        work=inner.records.work,
        head_scale=step.scale,
        softcap=step.softcap or 0.0,
        logits=logits.data_ptr(),
        began=began.data_ptr(),
    )
    decoder.head = weight_of(by, panels, bias)
    if bounds is not None:
        held.append(bounds)
        decoder.bounds = ctypes.addressof(bounds.record)
    if positions is not None:
        at = (
            torch.as_tensor(embedding.first + context.position, dtype=torch.int64, device="cpu")
            .expand(rows)
            .contiguous()
        )
        held.append(at)
        decoder.positions, decoder.position_row, decoder.position = (
            positions.data_ptr(), positions.stride(0), at.data_ptr(),
        )  # fmt: skip
        if embedding.padding is not None:
            decoder.padding = embedding.padding
            decoder.padding_row = -1 if embedding.padding_row is None else embedding.padding_row
    text: Any = context.text[0]
    held += (x, step_args, step_held)
    logits = logits[:rows]
    return Prepared(by, decoder, steps, logits, began, mask, own, text.prefix, text.filled, held)


def why_not_in_c(step: DecoderStep) -> str:
    """Return why decode steps on a CPU run as torch operations instead of in C.

    Returns:
        The reason; empty if they run in C or on another device.
    """
    if step.embedding.tokens.device.type != "cpu":
        return ""
    if step.dtype not in native.DTYPES:
        return f"the weights are {str(step.dtype).removeprefix('torch.')}, which C does not read"
    if reason := native.why_off():
        return reason
    if has_stopped_packing():
        return STOPPED
    if not config.settings().packs:
        return "FASTGEN_MEMORY=0" if config.settings().memory == 0 else "FASTGEN_LINEAR=plain"
    if step.called:
        return f"a {step.called[0]} is called as a module"
    if step.run_layers is None:
        return "its layers are not written in C"
    if isinstance(step.run_layers, NativeStep) and (by := native.library()) is not None:
        reason = step.run_layers.records.why_not_packable(by)
        if reason is not None:
            return reason
    products: list[Any] = [
        *(step.run_layers.records.products if isinstance(step.run_layers, NativeStep) else ()),
        step.head,
    ]
    shortage = shortage_of(
        (product.module, product.copies) for product in products if isinstance(product, Packable)
    )
    return "" if shortage is None else f"not all weights are packed: {shortage}"


def supports_steps(step: DecoderStep) -> bool:
    """Return whether C implements all of a decoder's step, from token ids to logits."""
    norms = [step.embedding.norm, step.first]
    return (
        type(step) is DecoderStep
        and step.embedding.called is None
        and isinstance(step.run_layers, NativeStep)
        and all(norm is None or norm is unnormed or is_norm(norm) for norm in norms)
        and isinstance(step.head, Linear)
        and (step.bias is None or step.head.module.bias is None)
    )


def _rows_left(embedding: Embedding, positions: Tensor, position: int | Tensor) -> int:
    """Return for how many steps there are position embeddings; 0 if a text has none now."""
    at = (
        [int(position.min()), int(position.max())]
        if isinstance(position, Tensor)
        else [position, position]
    )
    first, newest = (embedding.first + number for number in at)
    # Padding may use the row before that of its position.
    before = embedding.padding is not None and embedding.padding_row is None
    return 0 if first < before else len(positions) - newest


def _norm(norm: NormLike | None, held: list[Any]) -> c.Norm:
    if isinstance(norm, Norm):
        held.append(norm)
    return norm_of(norm, lambda tensor: None if tensor is None else tensor.data_ptr())
