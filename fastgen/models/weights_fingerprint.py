"""Fingerprint of a model's weights: tells whether results of an earlier call are still valid."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fastgen.models.build.peft_layers import is_of_peft, lora_parts

PROBES = 64
"""Elements of each tensor that are compared, to notice writes through `.data`."""


class WeightsFingerprint(NamedTuple):
    """What tells whether a model's weights have changed.

    Attributes:
        layout: Addresses, versions and shapes of all parameters and buffers, and the active
            adapters of PEFT.
        probes: (N,) fp64, some elements of each of them.
    """

    layout: tuple[object, ...]
    probes: Tensor

    def is_same(self, other: "WeightsFingerprint | None") -> bool:
        """Return whether the weights of both fingerprints are the same."""
        return (
            other is not None
            and self.layout == other.layout
            and torch.equal(self.probes, other.probes)
        )


def weights_fingerprint(model: nn.Module) -> WeightsFingerprint:
    """Return the fingerprint of a model's weights in their present state.

    Writes through `.data` do not change a tensor's version. They are noticed if they reach one of
    the probed elements.
    """
    tensors = [*model.parameters(), *model.buffers()]
    layout: list[object] = [_state(tensor) for tensor in tensors]
    layout += [_adapters(module) for module in model.modules() if is_of_peft(module)]
    probes = [probe for tensor in tensors if (probe := _probe(tensor)) is not None]
    empty = torch.empty(0, dtype=torch.float64, device="cpu")
    return WeightsFingerprint(tuple(layout), torch.cat(probes) if probes else empty)


def _state(tensor: Tensor) -> object:
    version = None if tensor.is_inference() else tensor._version
    return tensor.data_ptr(), version, tensor.shape, tensor.dtype, tensor.device


def _adapters(module: Any) -> object:
    parts = lora_parts(module)
    return parts and [(id(part.down), id(part.up), part.scaling) for part in parts]


def _probe(tensor: Tensor) -> Tensor | None:
    """Return `PROBES` elements as fp64; None for a tensor that is not dense, or has no numbers."""
    if not (tensor.is_floating_point() and tensor.numel() and tensor.layout is torch.strided):
        return None
    flat = tensor.detach()
    if not flat.is_contiguous():
        if not (flat.dim() == 2 and flat.T.is_contiguous()):
            return None
        flat = flat.T
    return flat.reshape(-1)[:: -(-flat.numel() // PROBES)].double()
