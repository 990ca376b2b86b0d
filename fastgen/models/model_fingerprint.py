"""Fingerprint of a model: tells whether results of an earlier call are still valid."""

from collections.abc import Iterator, Sequence
from types import FunctionType, MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fastgen.models.routing.instance import Routed

PROBES = 64
"""Elements of each tensor that are compared, to notice writes through `.data`."""

PROBED = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
"""Dtypes of the tensors of which elements are compared."""

MOST = 64
"""Maximum number of elements of a container that is compared."""


class ModelFingerprint(NamedTuple):
    """What tells whether a model has changed.

    Attributes:
        modules: Type, options and hooks of each module.
        tensors: All parameters and buffers. They are kept alive, so that no other tensor gets the
            address of one.
        states: Address, version, shape and dtype of each of them.
        probes: (N,) int64, bits of some elements of each.
    """

    modules: tuple[object, ...]
    tensors: tuple[Tensor, ...]
    states: tuple[object, ...]
    probes: Tensor

    def with_options(self, *options: object) -> "ModelFingerprint":
        """Return the fingerprint with more values that have to be equal."""
        return self._replace(modules=(*self.modules, *options))

    def is_same(self, other: "ModelFingerprint | None") -> bool:
        """Return whether both are fingerprints of the same model in the same state."""
        return (
            other is not None
            and len(self.tensors) == len(other.tensors)
            and all(one is two for one, two in zip(self.tensors, other.tensors, strict=True))
            and self.states == other.states
            and self.modules == other.modules
            and torch.equal(self.probes, other.probes)
        )


def model_fingerprint(model: nn.Module) -> ModelFingerprint | None:
    """Return the fingerprint of a model in its present state.

    Options are the attributes of modules that are numbers, texts, functions, or small containers of
    them, such as `eps`, `training` or the active adapters of PEFT. Writes through `.data` do not
    change a tensor's version. They are noticed if they reach one of the probed elements.

    Returns:
        The fingerprint; None if a weight is offloaded, or of a class whose state is unknown.
    """
    tensors = (*model.parameters(), *model.buffers())
    if any(type(each) not in (Tensor, nn.Parameter) or each.is_meta for each in tensors):
        return None
    modules = tuple((type(module), *_options(module)) for module in model.modules())
    return ModelFingerprint(modules, tensors, tuple(map(_state, tensors)), _probes(tensors))


_TORCHS = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")


def _options(module: nn.Module) -> Iterator[object]:
    for name, value in vars(module).items():
        is_empty = value is None or (isinstance(value, dict) and not value)  # most hooks
        if not is_empty and name not in _TORCHS and not isinstance(value, Routed):
            yield name, _option(value)


def _option(value: Any) -> object:
    """Return a value to compare: the value itself, or that of its elements."""
    kind: Any = type(value)
    if value is None or kind in (bool, int, float, str, torch.dtype, FunctionType, MethodType):
        return value
    if isinstance(value, (list, tuple, set, frozenset)):
        return kind, tuple(map(_option, value)) if len(value) <= MOST else len(value)
    if isinstance(value, dict):
        return tuple((key, _option(each)) for key, each in list(value.items())[:MOST]), len(value)
    return kind, id(value)


def _state(tensor: Tensor) -> object:
    version = None if tensor.is_inference() else tensor._version
    return tensor.data_ptr(), version, tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def _probes(tensors: Sequence[Tensor]) -> Tensor:
    """Return the bits of some elements of each tensor whose elements can be read, (N,) int64."""
    views: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        if (probe := _probe(tensor)) is not None:
            views.setdefault((probe.dtype, probe.device), []).append(probe)
    probes = [torch.cat(group).double().cpu() for group in views.values()]
    empty = torch.empty(0, dtype=torch.float64, device="cpu")
    return torch.cat([empty, *probes]).view(torch.int64)


def _probe(tensor: Tensor) -> Tensor | None:
    """Return a view of some elements; None for a tensor without any that can be read."""
    if not (tensor.dtype in PROBED and tensor.numel() and tensor.layout is torch.strided):
        return None
    flat = tensor.detach()
    if not flat.is_contiguous():
        if not (flat.dim() == 2 and flat.T.is_contiguous()):
            return None
        flat = flat.T
    return flat.view(-1)[:: -(-flat.numel() // PROBES)]
