"""The sublayers of a decode step or of an encoder in one native call, on a CPU.

In torch, a step of a small model takes some 200 operations of a few microseconds each, plus the
Python between them. Where C cannot run the sublayers, `models.runtime.decode_step` and
`models.runtime.encoder` run them operation by operation.
"""

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeGuard, cast

import torch
from torch import Tensor

from fastgen.models.layers.experts import Experts
from fastgen.models.layers.positions import rotation_once
from fastgen.models.runtime.joint_step import JointStepInputs
from fastgen.models.runtime.native.layers import is_left_to_torch, strides, supports_sublayers
from fastgen.models.runtime.native.records import Records, Rows
from fastgen.models.runtime.ragged_step import RaggedStepInputs
from fastgen.models.runtime.step_inputs import CallStepInputs, StepInputs
from fastgen.models.runtime.sublayers import FeedForward, LatentAttention, SelfAttention, Sublayer
from fastgen.ops import native
from fastgen.ops.dispatch import in_c, plain, select_backend, unsupported
from fastgen.ops.native import step as c

RunLayers = Callable[[Tensor, Tensor, StepInputs], Tensor | None]
"""Function that runs all sublayers, given their input, the residual stream and the step's inputs.

It returns the input of the head (R, C), or None if it does not support the step. It may overwrite
the first two arguments.
"""

BIASES = 2**20
"""Maximum elements of a bias table for the steps of one job, unless a single step has more."""

Part = CallStepInputs | RaggedStepInputs
"""The inputs of one call in a step: of beams, or of spans that start at the same place."""

Reference = weakref.ReferenceType[Tensor] | None
"""A weak reference to a tensor."""


def native_step(sublayers: Sequence[Sublayer], norm_first: bool) -> RunLayers | None:
    """Return a function that runs the sublayers of a decode step in C, for the duration of a call.

    Args:
        sublayers: Sublayers in the order in which they run.
        norm_first: Whether the model is pre-norm.

    Returns:
        The function; None if C does not implement the sublayers.
    """
    if not supports_sublayers(sublayers):
        return None
    return NativeStep(Records(sublayers, norm_first))


class _Place(NamedTuple):
    """An attention sublayer and the cache layer of one call that it reads."""

    mixer: Any
    of_text: bool
    part: Part
    layer: Any


class NativeStep:
    """The sublayers of a decode step in C; as `native_step` returns it."""

    def __init__(self, records: Records) -> None:
        self.records = records
        mixers: list[tuple[int, Any, int]] = [
            (i, each.mixer, each.layer) for i, each in enumerate(records.sublayers)
        ]
        self.attending = [
            (i, mixer, isinstance(mixer, SelfAttention), layer)
            for i, mixer, layer in mixers
            if type(mixer) not in (FeedForward, Experts)
        ]
        self.seen: Any = ()  # `c.KVRecord` records, of each attention sublayer for each call.
        self._checked: list[Reference] = []  # Keys that were found readable by C.
        self._placed: list[Reference] = []  # Keys whose addresses are in `seen`.
        self._attention = 0  # Multiplications of the largest attention of a step.

    def __call__(self, x: Tensor, stream: Tensor, context: StepInputs) -> Tensor | None:
        parts, by = _parts(context), native.library()
        if parts is None or by is None or is_left_to_torch(x):
            return None
        places = self._places(parts)
        heads = lambda layer: parts[0].source[layer].keys.shape[1]  # noqa: E731
        calls = [_rows(part) for part in parts]
        rows, turned = sum(call.sentences * call.beams for call in calls), list[Tensor | None]()
        supported = lambda: (  # noqa: E731
            plain(x, stream, dtype=self.records.dtype)
            and len(x) == rows
            and x.is_contiguous()
            and stream.is_contiguous()
            and self._covers(places, 1)
            and self.records.fits(x, stream)
            and self.records.ready(by, heads)
            and self._rotate(context, x, turned)
        )
        if not in_c(select_backend("decoder_step", unsupported, supported, x)):
            return None
        held, dtype = [*turned, *self._open(parts, places)], x.dtype
        x, stream = x.float(), stream.float()
        self.records.run(by, x, stream, self.seen, calls, self._attention)
        del held  # Kept alive until C has read it.
        return x.to(dtype)

    def prepare_steps(
        self, by: native.Library, context: CallStepInputs, mask: Tensor | None, steps: int
    ) -> list[Tensor | None] | None:
        """Prepare decode steps of one call, before any of their slots is reserved.

        Args:
            by: The native library.
            context: Inputs of the first step.
            mask: (B, M, N) additive mask of the keys of the text in all steps; None if everything
                is visible.
            steps: Number of decode steps.

        Returns:
            Tensors to keep alive while C runs the steps; None if it cannot run them.
        """
        places = self._places([context])
        heads = lambda layer: context.source[layer].keys.shape[1]  # noqa: E731
        if not (self._covers(places, 0) and self.records.ready(by, heads)):
            return None
        added = {
            id(mixer.bias): mixer.bias
            for _, mixer, of_text, _ in self.attending
            if of_text and mixer.bias is not None
        }
        biases = {key: context.biases(bias, steps).float() for key, bias in added.items()}
        held: list[Tensor | None] = []
        if not self._covers_steps(context, mask, biases, steps) or not self._rotate_steps(
            context, steps, held
        ):
            return None
        for i, (mixer, of_text, _, layer) in enumerate(places):
            at, read = self.seen[i], mask if of_text else context.source_mask
            self._point(i, layer)
            at.count, at.weights, at.mask, at.bias = layer.slots, None, None, None
            if (
                not of_text
                and context.weights is not None
                and context.alignment_layer is not None
                and context.source[context.alignment_layer] is layer
            ):
                at.weights = context.weights.data_ptr()
            if read is not None:
                read = (read[:, None] if of_text else read).float()
                read = read if read.stride(3) == 1 else read.contiguous()
                held.append(read)
                at.mask = read.data_ptr()
                at.mask_b, at.mask_h, at.mask_m = strides(read)
            if of_text and mixer.bias is not None:
                bias = biases[id(mixer.bias)]
                at.bias = bias.data_ptr()
                at.bias_b, at.bias_h, at.bias_step = strides(bias)
        return [*held, *biases.values()]

    def steps_within(self, context: CallStepInputs, steps: int) -> int:
        """Return how many of `steps` steps one job may have, so that its bias tables stay small."""
        heads = [
            mixer.bias.table.shape[0]
            for _, mixer, of_text, _ in self.attending
            if of_text and mixer.bias is not None
        ]
        if not heads:
            return steps
        slots = context.text[0].keys.shape[2] + steps * _beams(context)
        sentences = (
            1
            if context.slot_steps is None and not isinstance(context.position, Tensor)
            else context.sentences
        )
        return max(1, min(steps, BIASES // (sentences * max(heads) * slots)))

    def _point(self, i: int, layer: Any) -> None:
        """Write the addresses and strides of a layer's keys and values to `seen`."""
        at, (keys, values) = self.seen[i], layer.own
        if not _is(self._placed[i], keys):
            at.keys, at.values, at.common = keys.data_ptr(), values.data_ptr(), 0
            at.keys_b, at.keys_h, at.keys_n, _ = keys.stride()
            at.values_b, at.values_h, at.values_n, _ = values.stride()
            if layer.common is not None:
                common, of_common = layer.common
                at.common_keys, at.common_values = common.data_ptr(), of_common.data_ptr()
                at.common, at.common_h = common.shape[2], common.stride(1)
                # Slots are counted from the first common key on.
                at.keys -= at.common * at.keys_n * keys.element_size()
                at.values -= at.common * at.values_n * values.element_size()
            self._placed[i] = weakref.ref(keys)

    def _places(self, parts: Sequence[Part]) -> list[_Place]:
        """Return a place for each attention sublayer and each call."""
        return [
            _Place(mixer, of_text, part, (part.text if of_text else part.source)[number])
            for _, mixer, of_text, number in self.attending
            for part in parts
        ]

    def _covers_steps(
        self, context: CallStepInputs, mask: Tensor | None, biases: Mapping[int, Tensor], steps: int
    ) -> bool:
        """Return whether C can read masks and biases of the steps, and write attention weights."""
        b, m, layer = context.sentences, _beams(context), context.text[0]
        slots = cast(Any, layer).slots + steps * m
        if mask is not None and not (
            mask.dtype in native.DTYPES
            and plain(mask, dtype=mask.dtype)
            and mask.dim() == 3
            and mask.shape[0] in (1, b)
            and mask.shape[1] in (1, m)
            and mask.shape[2] >= slots
        ):
            return False
        for _, mixer, of_text, _ in self.attending:
            if of_text and mixer.bias is not None:
                bias = biases[id(mixer.bias)]
                sizes = (
                    len(bias) in (1, b)
                    and bias.shape[1] in (1, mixer.heads)
                    and bias.shape[2:] == (steps, slots)
                )
                if not (sizes and plain(bias) and bias.stride(3) == 1):
                    return False
        weights, alignment_layer = context.weights, context.alignment_layer
        if weights is None or alignment_layer is None:
            return True
        shape = b, m, cast(Any, context.source[alignment_layer]).slots
        return (
            plain(weights)
            and weights.is_contiguous()
            and len(weights) >= steps
            and weights.shape[1:] == shape
        )

    def _covers(self, places: Sequence[_Place], steps: int) -> bool:
        """Return whether C can read all keys, values and masks.

        Args:
            places: Attention sublayers and cache layers.
            steps: Tokens per beam that the masks of the text cover but that have no slots yet.
        """
        masks = set[tuple[int, int]]()  # Checked masks: id of the tensor, number of keys.
        if len(self._checked) != len(places):
            count = len(places)
            self.seen, self._checked, self._placed = (
                (c.KVRecord * count)(),
                [None] * count,
                [None] * count,
            )
        for i, place in enumerate(places):
            mixer, of_text, part, layer = place
            mask = part.text_mask if of_text else part.source_mask
            # A cache layer of another kind, or one whose buffers are not allocated yet.
            if not getattr(layer, "begun", False):
                return False
            keys, values = layer.own
            if mask is not None:
                later = steps if of_text and isinstance(part, CallStepInputs) else 0
                count = _slots(place) + later * _beams(part)
                if (id(mask), count) not in masks and not _is_mask(mask, part, mixer.heads, count):
                    return False
                masks.add((id(mask), count))
            at_once = _beams(part) if isinstance(part, CallStepInputs) else 1
            # C divides the heads of latent attention.
            heads_at_once = 1 if _is_latent(mixer) else mixer.heads // keys.shape[1]
            if at_once * heads_at_once > native.ROWS or not (of_text or layer.slots):
                return False
            if _is(self._checked[i], keys):
                continue
            heads = keys.shape[1]
            dims = mixer.cached_dims if of_text else (mixer.dims, mixer.dims)
            if not (
                mixer.heads % heads == 0
                and (not of_text or heads == mixer.key_heads)
                and keys.shape[:3] == values.shape[:3]
                and keys.shape[0] == part.sentences
                and (keys.shape[3], values.shape[3]) == dims
                and keys.stride(3) == values.stride(3) == 1
                and keys.dtype == values.dtype == self.records.dtype
                and keys.is_cpu
                and values.is_cpu
                and (layer.common is None or _continue(layer.common, (keys, values)))
            ):
                return False
            self._checked[i] = weakref.ref(keys)
        return True

    def _rotate(self, context: StepInputs, x: Tensor, held: list[Tensor | None]) -> bool:
        """Write the rotation of this step's queries and keys to the records.

        Args:
            context: Inputs of the step.
            x: Input of the first sublayer (R, C).
            held: Gets the tensors to keep alive while C runs the step.

        Returns:
            Whether C can read the rotation.
        """
        rotation = lambda rotary: context.rotation(rotary, x)  # noqa: E731
        return self._rotated(rotation, lambda cosine: cosine.shape[0] > 1, (1, len(x)), held)

    def _rotate_steps(self, context: CallStepInputs, steps: int, held: list[Tensor | None]) -> bool:
        """Write the rotation of several steps, concatenated, to the records; as `_rotate`."""
        position, known = context.position, dict[int, tuple[Tensor, Tensor]]()
        apart = isinstance(position, Tensor)  # Whether rows of a step may differ.
        if isinstance(position, Tensor) and position.shape != (
            context.sentences * _beams(context),
        ):
            return False
        first = (
            position[None]
            if isinstance(position, Tensor)
            else torch.full((1, 1), position, dtype=torch.int64, device="cpu")
        )
        positions = (
            first + torch.arange(steps, dtype=torch.int64, device="cpu")[:, None]
        ).flatten()
        like = torch.empty(0, dtype=self.records.dtype, device="cpu")
        rotation = lambda rotary: rotation_once(known, rotary, positions, like)  # noqa: E731
        return self._rotated(rotation, lambda _: apart, (len(positions),), held)

    def _rotated(
        self,
        rotation: Callable[[Any], tuple[Tensor, Tensor]],
        apart: Callable[[Tensor], bool],
        rows: Sequence[int],
        held: list[Tensor | None],
    ) -> bool:
        """Write a rotation to the records; see `_rotate`.

        Args:
            rotation: Returns cosines and sines for a `Rotary`.
            apart: Returns, given the cosines, whether each row of a step has its own.
            rows: Row counts that the cosines may have.
            held: Gets the tensors to keep alive.
        """
        for index, mixer, of_text, _ in self.attending:
            if of_text and mixer.rotary is not None:
                cosine, sine = rotation(mixer.rotary)
                if not plain(cosine, sine, dtype=cosine.dtype) or cosine.dtype not in (
                    self.records.dtype,
                    torch.float32,
                ):
                    return False
                # As in `ops.rotation`.
                wide = mixer.rotates_fp32 or cosine.dtype != self.records.dtype
                cosine, sine = (part.float().contiguous() for part in (cosine, sine))
                turned = cosine.shape[-1]
                if not (
                    turned % 2 == 0
                    and cosine.shape == sine.shape == (len(cosine), 1, turned)
                    and len(cosine) in rows
                    and (turned == mixer.rope_dim if _is_latent(mixer) else turned <= mixer.dims)
                ):
                    return False
                record = self.records.made[index]
                record.cosine, record.sine = cosine.data_ptr(), sine.data_ptr()
                record.turned, record.turned_wide = turned, wide
                record.turn_row = turned if apart(cosine) else 0
                held += (cosine, sine)
        return True

    def _open(self, parts: Sequence[Part], places: Sequence[_Place]) -> list[Tensor]:
        """Reserve the slots of the newest tokens and fill `seen`; return masks to keep alive."""
        for part in parts:
            if isinstance(part, CallStepInputs):
                _open(part)
        masks: dict[int, tuple[Tensor, list[int]]] = {}
        self._attention = 0
        for i, (mixer, of_text, part, layer) in enumerate(places):
            at = self.seen[i]
            self._point(i, layer)
            at.count = count = _slots(places[i])
            at.slot, at.bias = count - _beams(part), None
            self._attention = max(
                self._attention,
                part.sentences * _beams(part) * mixer.heads * layer.own[0].shape[3] * count,
            )
            mask, at.mask = part.text_mask_with(mixer.bias) if of_text else part.source_mask, None
            if mask is not None:
                if id(mask) not in masks:
                    readable = mask.float()
                    readable = readable if readable.stride(3) == 1 else readable.contiguous()
                    masks[id(mask)] = readable, strides(readable)
                readable, (at.mask_b, at.mask_h, at.mask_m) = masks[id(mask)]
                at.mask = readable.data_ptr()
            at.weights = None
            if isinstance(part, RaggedStepInputs) or of_text or part.alignment_layer is None:
                continue
            if part.source[part.alignment_layer] is layer:
                rows = part.sentences * _beams(part)
                part.weights = torch.empty(rows, at.count, dtype=torch.float32, device="cpu")
                at.weights = part.weights.data_ptr()
        return [mask for mask, _ in masks.values()]


def _is(known: Reference, tensor: Tensor) -> bool:
    return known is not None and known() is tensor


def _continue(common: Sequence[Tensor], own: Sequence[Tensor]) -> bool:
    """Return whether C can read common keys and values (1, Hkv, C, D) before those of sentences."""
    return all(
        plain(first, dtype=rest.dtype)
        and (len(first), first.shape[1], first.shape[3]) == (1, rest.shape[1], rest.shape[3])
        and (first.shape[1] == 1 or first.stride(1) == common[0].stride(1))
        and first.stride()[2:] == rest.stride()[2:]
        for first, rest in zip(common, own, strict=True)
    )


def _is_latent(mixer: Any) -> TypeGuard[LatentAttention]:
    return isinstance(mixer, LatentAttention)


def _parts(context: StepInputs) -> Sequence[Part] | None:
    """Return the inputs of all calls in a step; None for other kinds of `StepInputs`."""
    if isinstance(context, CallStepInputs) or (
        isinstance(context, RaggedStepInputs) and context.level
    ):
        return [context]
    return context.parts if type(context) is JointStepInputs else None


def _rows(part: Part) -> Rows:
    return Rows(part.sentences, _beams(part), isinstance(part, RaggedStepInputs))


def _beams(part: Part) -> int:
    """Return the rows per sentence: beams, or tokens of a span."""
    return part.queries if isinstance(part, RaggedStepInputs) else part.text[0].beams


def _slots(place: _Place) -> int:
    """Return the number of slots in use; of the text in a pass over spans, those up to its end."""
    part, layer = place.part, place.layer
    return part.end if isinstance(part, RaggedStepInputs) and place.of_text else layer.slots


def _open(part: CallStepInputs) -> None:
    """Reserve a slot for the newest token of every beam in each self-attention layer."""
    for layer in part.text:
        placed: Any = layer
        placed.ensure_capacity()
        placed.note_step()


def _is_mask(mask: Tensor, part: Part, heads: int, count: int) -> bool:
    """Return whether C can read a mask of `count` keys, broadcastable to (B, H, M, N)."""
    sizes = part.sentences, heads, _beams(part)
    return (
        mask.dtype in native.DTYPES
        and plain(mask, dtype=mask.dtype)
        and mask.dim() == 4
        and mask.shape[3] == count
        and all(size in (1, full) for size, full in zip(mask.shape, sizes, strict=False))
    )
