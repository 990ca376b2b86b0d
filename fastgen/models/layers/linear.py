"""Linear layers of a live model, run by `ops.linear`: which layers, and by which product.

Layers that are quantised, parametrised, hooked or overridden keep their own forward.
`models.routing.routes` installs the forwards.
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ClassVar, Protocol, cast

import torch
from torch import Tensor, nn

from fastgen import config
from fastgen.models.layers.packed_weights import (
    STOPPED,
    Int8Packed,
    Packed,
    has_stopped_packing,
    packed_of,
)
from fastgen.models.layers.read_rows import read_rows
from fastgen.models.memory.scratch import ScratchPool
from fastgen.models.routing.instance import Routed, untouched
from fastgen.ops import int8, native
from fastgen.ops import linear as ops
from fastgen.ops.activation import activation_
from fastgen.ops.native import products as native_products

MERGED = (0, 4 * 2**20)
"""Largest weight, in bytes, that is merged with others reading the same input: (CPU, device).

Merging saves kernel launches. On a CPU it gains nothing (4 to 128 rows, 256 x 256 three times, 2
cores).
"""

LARGE = 16 * 2**20
"""Smallest output, in bytes, that is placed in reusable memory (`models.memory.scratch`)."""


class Product(Protocol):
    """A linear layer with an optional fused epilogue.

    Attributes:
        fuses: Whether the activation function or the residual sum runs inside the product.
        outputs: N.
    """

    fuses: bool

    @property
    def outputs(self) -> int: ...

    def apply(
        self, x: Tensor, activation: str | None = None, residual: Tensor | None = None
    ) -> Tensor:
        """Return the fresh output (R, N) of the layer.

        Args:
            x: (R, K).
            activation: Kind of the activation function to apply, as in `ops.activation`; None for
                none.
            residual: (R, N), added to the output; None for none.
        """
        ...


class Packable:
    """A weight that is packed for C once it is used often.

    Attributes:
        copies: Class of the packed copy.
        module: Has the weight, as `weight`.
        weight_name: Name of that parameter.
        outputs: N.
        inputs: K.
        always: Whether to pack it regardless of the memory that is left.
        entry: The packed copy.
    """

    copies: ClassVar[type[Packed]] = Packed
    weight_name = "weight"
    module: Any
    outputs: int
    inputs: int
    always: bool
    entry: Packed | None

    def _copy(self, weight: Tensor, plain: Tensor, rows: int) -> Any:
        """Return the packed weight, packing it if it is used often; None where there is none."""
        entry = self.entry
        if entry is None or entry.is_stale(weight):
            entry = self.entry = packed_of(self.module, self.copies)
        copy = entry.copied(weight, plain, self.always, rows)
        suits = copy is not None and ops.suits(copy, self.outputs, self.inputs)
        return copy if suits else None


class Linear(Routed, Packable):
    """Routed forward of one linear layer.

    Attributes:
        transposed: Whether the weight is (K, N), as in GPT-2's Conv1D.
        least: Fewest elements of an input for which the product in C is faster.
        most: Most elements of an input for which it is faster.
        handed_on: Applied to the fresh output where a single reader may overwrite it; None for
            none.
    """

    fuses = True

    def __init__(self, module: nn.Module, transposed: bool, memory: ScratchPool) -> None:
        super().__init__(module)
        self.memory = memory
        self.transposed = transposed
        self.handed_on: Callable[[Tensor], Tensor] | None = None
        settings = config.settings()
        self.always = settings.linear == "packed"
        self.entry: Packed | None = None
        self.outputs, self.inputs = _sizes(module)
        self.dtype: torch.dtype = self.module.weight.dtype
        rows = ops.useful_rows(self.outputs, self.inputs, self.dtype)
        self.least, self.most = max(1, rows.start * self.inputs), (rows.stop - 1) * self.inputs
        self.own: TorchLinear | None = None

    def __call__(self, x: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            return type(self.module).forward(self.module, x)
        forward = read_rows.get()
        rows = None if forward is None else forward.of(x)
        y = self._all(x) if rows is None else rows.placed(self._all(rows.chosen(x)), x.shape[:-1])
        return y if self.handed_on is None or y.requires_grad else self.handed_on(y)

    def _all(self, x: Tensor) -> Tensor:
        form = self._form(x)
        return type(self.module).forward(self.module, x) if form is None else self._product(x, form)

    def apply(
        self, x: Tensor, activation: str | None = None, residual: Tensor | None = None
    ) -> Tensor:
        form = self._form(x)
        if form is not None:
            return self._product(x, form, activation, residual)
        if self.own is None:
            self.own = TorchLinear(self.module)
        return self.own.apply(x, activation, residual)

    def _product(
        self,
        x: Tensor,
        form: Any,
        activation: str | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        out = self.memory.take(x, *x.shape[:-1], self.outputs) if self._is_large(x) else None
        return ops.linear(x, form, self.module.bias, activation, residual, out)

    def _is_large(self, x: Tensor) -> bool:
        return x.element_size() * (x.numel() // x.shape[-1]) * self.outputs >= LARGE

    def _form(self, x: Tensor) -> Any:
        """Return the weight as `_product` takes it; None where the layer's own product runs."""
        # Test few rows of a small weight first: small calls consist mostly of such layers.
        if x.numel() < self.least:
            return None
        weight = self.module.weight
        if x.shape[-1] != self.inputs:  # the layer raises an error of its own
            return None
        if (
            not (x.dtype == weight.dtype == self.dtype)
            or torch.is_grad_enabled()
            or torch.is_autocast_enabled("cpu")
        ):
            return None
        plain = weight.t() if self.transposed else weight
        rows = x.numel() // self.inputs
        copy = self._copy(weight, plain, rows) if x.numel() <= self.most else None
        return plain if copy is None and self._is_large(x) else copy

    def in_panels(self, rows: int = 1) -> Any:
        """Return the weight as C reads it for this many rows; None where it is not packed so."""
        weight = self.module.weight
        return self._copy(weight, weight.t() if self.transposed else weight, rows)


class Int8Linear(Linear):
    """A linear layer whose product runs on a copy of the weight in int8; it replaces no forward.

    Without a copy, for lack of memory, the layer's own product runs.
    """

    copies = Int8Packed

    def __init__(self, of: Linear) -> None:
        # A call makes some hundred of them, so nothing is computed again.
        self.__dict__.update(of.__dict__ | {"entry": None, "own": None, "always": False})

    def _product(
        self,
        x: Tensor,
        form: native_products.Int8Weight,
        activation: str | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        return int8.int8_linear(x, form, self.module.bias, activation, residual)

    def _form(self, x: Tensor) -> native_products.Int8Weight | None:
        return self.in_panels()


class TorchLinear:
    """A linear layer by torch's own product, valid for one call.

    Rows (R, K) bypass the module, which costs about 2 us; a product of one row takes 5 to 50. The
    result equals the module's bit by bit.
    """

    fuses = False

    def __init__(self, module: nn.Module) -> None:
        self.module: Any = module
        self.outputs = _sizes(module)[0]
        weight, self.bias = self.module.weight, self.module.bias
        bare = type(weight) in (Tensor, nn.Parameter) and (
            type(module) is nn.Linear or is_transposed(module)
        )
        self.weight: Tensor | None = (
            (weight if is_transposed(module) else weight.t()) if bare else None
        )

    def apply(
        self, x: Tensor, activation: str | None = None, residual: Tensor | None = None
    ) -> Tensor:
        weight, bias = self.weight, self.bias
        if weight is None or x.dim() != 2:
            return _finished(type(self.module).forward(self.module, x), activation, residual)
        y = torch.mm(x, weight) if bias is None else torch.addmm(bias, x, weight)
        return _finished(y, activation, residual)


class MergedLinear:
    """Linear layers with the same input, merged into one product; valid for one call."""

    fuses = False

    def __init__(self, modules: Sequence[Any]) -> None:
        self.weight = torch.cat([module.weight.detach() for module in modules])
        biases = [module.bias for module in modules if module.bias is not None]
        self.bias = torch.cat([bias.detach() for bias in biases]) if biases else None

    @property
    def outputs(self) -> int:
        return self.weight.shape[0]

    def apply(
        self, x: Tensor, activation: str | None = None, residual: Tensor | None = None
    ) -> Tensor:
        return _finished(nn.functional.linear(x, self.weight, self.bias), activation, residual)


class Identity:
    """A product by the identity: the output projection of a sublayer that has none."""

    fuses = False

    def __init__(self, outputs: int) -> None:
        self.outputs = outputs

    def apply(
        self, x: Tensor, activation: str | None = None, residual: Tensor | None = None
    ) -> Tensor:
        return _finished(x, activation, residual)


def is_transposed(module: nn.Module) -> bool:
    """Return whether a module is GPT-2's linear layer, whose weight is (K, N)."""
    return _is_conv1d(type(module)) and hasattr(module, "nf")


@functools.cache
def _is_conv1d(kind: type) -> bool:
    return kind.__name__ == "Conv1D"


@functools.cache
def _is_falcon(kind: type) -> bool:
    return kind.__name__ == "FalconLinear" and kind.__module__.startswith("transformers.")


def _sizes(module: Any) -> tuple[int, int]:
    """Return the outputs and inputs of a linear layer."""
    # Faster than attribute access, which parametrised layers need.
    weight = module._parameters.get("weight")
    rows, columns = (module.weight if weight is None else weight).shape
    return (columns, rows) if is_transposed(module) else (rows, columns)


def is_linear(module: nn.Module) -> bool:
    """Return whether a module is a linear layer of torch, GPT-2 or Falcon.

    Falcon's rounds once more in half precision.
    """
    kind = type(module)
    return kind is nn.Linear or _is_falcon(kind) or is_transposed(module)


def product(module: nn.Module) -> Product:
    """Return the product of a linear layer: its route if there is one, else its own."""
    own = module.__dict__.get("forward")
    return own if isinstance(own, Linear) else TorchLinear(module)


def products(modules: Sequence[Any]) -> tuple[Product, ...]:
    """Return the products of linear layers that read the same input.

    On a device they are merged into one, unless the weights are too large.
    """
    first = modules[0].weight
    limit = MERGED[first.device.type != "cpu"]
    same_kind = all(
        type(module) is nn.Linear and module.weight.dtype == first.dtype for module in modules
    )
    if (
        len(modules) > 1
        and same_kind
        and len({module.bias is None for module in modules}) == 1
        and all(module.weight.nbytes <= limit for module in modules)
    ):
        return (MergedLinear(modules),)
    return tuple(product(module) for module in modules)


def _finished(y: Tensor, activation: str | None, residual: Tensor | None) -> Tensor:
    if activation is not None:
        y = activation_(y, activation, exactly=False)
    return y if residual is None else y.add_(residual)


def bytes_to_pack(module: nn.Module) -> int:
    """Return the size in bytes of a packed copy of a layer's weight."""
    return ops.bytes_to_pack(*_sizes(module), cast(Any, module).weight.dtype)


def is_plain(module: nn.Module) -> bool:
    """Return whether a linear layer can be routed."""
    weight, bias = module._parameters.get("weight"), module._parameters.get("bias")
    return (
        weight is not None
        and type(weight) is nn.Parameter
        and weight.dtype in native.DTYPES
        and weight.device.type == "cpu"
        and weight.is_contiguous()
        and not weight.is_inference()
        and (bias is None or bias.shape == (_sizes(module)[0],))
        and untouched(module)
    )


def layers(modules: Iterable[nn.Module]) -> Iterator[tuple[nn.Module, bool]]:
    """Yield (layer, transposed) for every linear layer that is packed for C.

    Even the smallest layers are, as a decode step in C needs all of them packed.
    """
    for module in modules:
        if is_linear(module) and is_plain(module) and ops.native_for(*_sizes(module)) is not None:
            yield module, is_transposed(module)


def reason_off(model: nn.Module, rows: float = 1) -> str | None:
    """Return why a model's linear layers keep torch's own product; None where they are routed.

    Args:
        model: The model.
        rows: Rows of the products in question.
    """
    settings = config.settings()
    if settings.linear in ("off", "plain"):
        return f"FASTGEN_LINEAR={settings.linear}"
    if settings.memory == 0:
        return "FASTGEN_MEMORY=0"
    if has_stopped_packing():
        return STOPPED
    weight = next(iter(model.parameters()), None)
    if weight is None or weight.device.type != "cpu":
        return "not on a CPU"
    if rows > native.most_rows(weight.dtype):
        return "torch's own product is the faster one for many rows in half precision"
    return ops.reason_off(weight.dtype)
