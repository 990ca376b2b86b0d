"""The memory that a computation takes, found by running it on tensors that have none.

Whatever is of floating-point numbers, or made from such, has a shape and no values; what it would take is added up as
long as somebody holds it. Integers alone are computed: masks, positions and token ids decide what runs, and are small.

Source: PyTorch, fake tensors (`torch._subclasses.FakeTensorMode`).
"""

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Self, cast

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from fastgen.ops.dispatch import uncounted

_MOST: dict[str, bool | int | float] = {"bool": True, "int": sys.maxsize, "float": float("inf")}
"""What is read where no value was computed: the most that it can be."""


_TAKEN_OVER = "_fastgen_taken_over"


def is_planned(tensor: Tensor) -> bool:
    """Whether a tensor has no values."""
    return isinstance(tensor, FakeTensor)


def taken_over(y: Tensor, other: Tensor) -> Tensor:
    """Note that a sum of y, without values, and `other` will lie in y's memory; return y."""
    setattr(y, _TAKEN_OVER, other)
    return y


class Footprint(TorchDispatchMode):
    """Adds up, while it is entered, the bytes of tensors that come to be.

    Attributes:
        now, peak: bytes of those that somebody holds, and the most there were. Tensors of before are not among them,
            nor is most of what operators take for themselves while they run.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._known: dict[int, weakref.ref[Any]] = {}

    def __enter__(self) -> Self:
        self._token = uncounted.set(True)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        uncounted.reset(self._token)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [*_tensors(args), *_tensors(kwargs.values())]
        for tensor in given:
            self._note(tensor, 0)
        if any(isinstance(tensor, FakeTensor) or tensor.is_floating_point() for tensor in given):
            result = self._without_values(func, args, kwargs)
        elif given:
            result = func(*args, **kwargs)
        else:
            with self._fake:
                result = func(*args, **kwargs)
            if isinstance(result, Tensor) and not result.is_floating_point():
                result = func(*args, **kwargs)
        for tensor in _tensors((result,)):
            self._note(tensor, tensor.untyped_storage().nbytes())
        if func.name() in _TEMPORARY:
            self.peak = max(self.peak, self.now + _TEMPORARY[func.name()](*args, **kwargs))
        return result

    def _without_values(self, func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
        name = func.name()
        if name == "aten::_local_scalar_dense":
            if not isinstance(args[0], FakeTensor):
                return func(*args)
            return _MOST["bool" if args[0].dtype == torch.bool else "float" if args[0].is_floating_point() else "int"]
        if name == "aten::add.Tensor" and getattr(args[0], _TAKEN_OVER, None) is args[1]:
            return args[0]
        args = [self._stand_in(value) for value in args]
        kwargs = {key: self._stand_in(value) for key, value in kwargs.items()}
        if name in _SHAPES:
            return _SHAPES[name](*args, **kwargs)
        # torch keeps what it has found for arguments, and with it a storage that is one of them.
        self._fake.cache_enabled = name != "aten::set_.source_Storage_storage_offset"
        return self._fake.__torch_dispatch__(func, (), args, kwargs)

    def _stand_in(self, value: Any) -> Any:
        """The same without values, where it is a tensor or holds some."""
        if isinstance(value, list | tuple):
            return [self._stand_in(part) for part in cast("list[Any]", value)]
        if not isinstance(value, Tensor) or isinstance(value, FakeTensor):
            return value
        fake = self._fake.from_tensor(value, static_shapes=True)
        self._note(fake, 0)  # the tensor itself is counted, or was there before
        return fake

    def _note(self, tensor: Tensor, size: int) -> None:
        """Count a storage that is not known yet, as long as it lives."""
        if tensor.layout != torch.strided:
            return
        storage = tensor.untyped_storage()
        if id(storage) in self._known:
            return
        self.now += size
        self.peak = max(self.peak, self.now)

        def gone(_: Any, key: int = id(storage)) -> None:
            del self._known[key]
            self.now -= size

        self._known[id(storage)] = weakref.ref(storage, gone)


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    """The tensors among the arguments or results of an operator."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(cast("list[Any]", value))


def _linear(x: Tensor, weight: Tensor, *_: Any) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


def _like_residual(x: Tensor, residual: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(residual)


def _as_if_true(x: Tensor) -> Tensor:
    return x.new_empty(x.numel(), x.dim(), dtype=torch.int64)


_SHAPES: dict[str, Callable[..., Tensor]] = {
    "aten::nonzero": _as_if_true,
    "mkldnn::_linear_pointwise": _linear,
    "mkldnn::_linear_pointwise.binary": _like_residual,
}
"""Operators of which torch does not say what shape comes out."""


def _copy_of_mask(*args: Any, attn_mask: Tensor | None = None, **_: Any) -> int:
    return 0 if attn_mask is None or attn_mask.stride(-1) in (0, 1) else attn_mask.nbytes


_TEMPORARY: dict[str, Callable[..., int]] = {"aten::_scaled_dot_product_flash_attention_for_cpu": _copy_of_mask}
"""Bytes that operators take for themselves while they run, where it can be as much as what they return."""
