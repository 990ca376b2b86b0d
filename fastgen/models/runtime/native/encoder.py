"""The sublayers of an encoder in one native call, on a CPU."""

from collections.abc import Callable, Sequence

from torch import Tensor

from fastgen.models.runtime.encoder import EncoderSelfAttention, UnpaddedBatch
from fastgen.models.runtime.native.layers import (
    copied,
    is_left_to_torch,
    strides,
    supports_sublayers,
)
from fastgen.models.runtime.native.records import Records, Rows
from fastgen.models.runtime.sublayers import Sublayer
from fastgen.ops import native
from fastgen.ops.dispatch import in_c, plain, select_backend, unsupported
from fastgen.ops.native import step as c


def native_encoder(
    sublayers: Sequence[Sublayer], norm_first: bool
) -> "Callable[[Tensor, Tensor, UnpaddedBatch], Tensor | None] | None":
    """Return a function that runs the sublayers of an encoder in C; as `native_step`."""
    return NativeEncoder(Records(sublayers, norm_first)) if supports_sublayers(sublayers) else None


class NativeEncoder:
    """The sublayers of an encoder in C.

    The library treats each group of sentences of equal length as a call of its own.
    """

    def __init__(self, records: Records) -> None:
        self.records = records
        self.attending: list[EncoderSelfAttention] = [
            sublayer.mixer
            for sublayer in records.sublayers
            if isinstance(sublayer.mixer, EncoderSelfAttention)
        ]

    def __call__(self, x: Tensor, stream: Tensor, sentences: UnpaddedBatch) -> Tensor | None:
        """Run the sublayers without changing x (R, C) or stream (R, C).

        Returns:
            The output (R, C); None if C does not support these inputs.
        """
        records, by = self.records, native.library()
        if (
            by is None
            or is_left_to_torch(x)
            or sentences.first is not None
            or any(group.padding for group in sentences.groups)
        ):
            return None
        supported = lambda: (  # noqa: E731
            self._covers(x, stream, sentences)
            and records.fits(x, stream)
            and records.ready(by, lambda _: 0, len(x))
        )
        if not in_c(select_backend("encoder", unsupported, supported, x)):
            return None
        dtype, x, stream = x.dtype, copied(x), copied(stream) if records.norm_first else stream
        masks = [
            None if mixer.bias is None else mixer.bias.table.float() for mixer in self.attending
        ]
        calls = [Rows(group.sentences, group.tokens) for group in sentences.groups]
        seen = (c.KVRecord * (len(self.attending) * len(calls)))()
        for i, mask in enumerate(masks):
            if mask is not None:
                for at in seen[i * len(calls) : (i + 1) * len(calls)]:
                    at.mask, (_, at.mask_h, at.mask_m) = mask.data_ptr(), strides(mask)
        work = max(call.sentences * call.beams**2 for call in calls) * max(
            mixer.heads * mixer.dims for mixer in self.attending
        )
        records.run(by, x, stream, seen, calls, work)
        return x.to(dtype)

    def _covers(self, x: Tensor, stream: Tensor, sentences: UnpaddedBatch) -> bool:
        """Return whether x has a row for each token, and biases cover all pairs of tokens."""
        longest = max((group.tokens for group in sentences.groups), default=0)
        dtype = self.records.dtype
        if not plain(x, stream, dtype=dtype) or x.shape[0] != sentences.tokens or not longest:
            return False
        for mixer in self.attending:
            if mixer.bias is not None:
                table = mixer.bias.table
                heads, *tokens = table.shape[1:]
                if not (
                    plain(table.detach(), dtype=dtype)
                    and heads in (1, mixer.heads)
                    and len(table) == 1
                    and min(tokens) >= longest
                ):
                    return False
        return True
