"""Read single layers: linear layers with their adapters, norms and activation functions."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from fastgen.models.build.introspection import NotFused, name_of
from fastgen.models.build.peft_layers import is_of_peft, lora_parts, without_peft
from fastgen.models.layers import activation
from fastgen.models.layers.called import ModuleLinear, sizes_of
from fastgen.models.layers.linear import Product, is_linear, product, products
from fastgen.models.layers.low_rank import Adapter, LowRank
from fastgen.models.layers.norm import ModuleNorm, Norm, norm_of


class LayerReader:
    """Reads single layers, and records which modules were read and what their values are.

    Args:
        dtype: Dtype of the stack's weights.
        device: Device type of the weights, such as "cpu".

    Attributes:
        calls: Whether layers that are not read may run as modules, on a CPU.
        read: Modules that were read.
        called: Layers that run as modules.
        free: Modules of other packages that may run, or do not.
        fingerprint: Values that the step depends on and that no tensor holds.
    """

    calls = False

    def __init__(self, dtype: torch.dtype, device: str) -> None:
        self.dtype, self.device = dtype, device
        self.read: set[nn.Module] = set()
        self.called: list[nn.Module] = []
        self.free: set[nn.Module] = set()
        self.fingerprint: list[object] = [dtype, device]

    def opened(self, outer: nn.Module) -> Any:
        """Return the layer that runs in place of one of PEFT, whose parts count as read."""
        self.read.update(parts := list(outer.modules()))
        self.free.update(part for part in parts if is_of_peft(part))
        return without_peft(outer)

    def products(self, modules: Sequence[Any]) -> tuple[Product, ...]:
        """Return the products of linear layers that read the same input."""
        made = tuple(map(self.product, modules))
        plain = list(map(without_peft, modules))
        return products(plain) if all(map(self.is_plain, plain)) else made

    def product(self, module: Any) -> Product:
        module = self.opened(module)
        if any(parameter.is_meta for parameter in module.parameters()):
            raise NotFused("weights that are offloaded")
        if (parts := lora_parts(module)) is not None:
            self.fingerprint.append(("low rank", len(parts)))
            adapters = [Adapter(product(down), product(up), s) for down, up, s in parts]
            return LowRank(self.product(module.base_layer), adapters)
        if not is_linear(module) or type(module.weight) is not nn.Parameter:
            return self.call(module)
        if module.weight.dtype != self.dtype:
            raise NotFused(f"weights in {module.weight.dtype} beside others in {self.dtype}")
        return product(module)

    def call(self, module: Any) -> Product:
        """Return the product of a layer that runs as a module.

        Raises:
            NotFused: Its sizes are unknown, or no layer of this stack may run as a module.
        """
        sizes = sizes_of(module)
        if sizes is None or self.device != "cpu" or not self.calls:
            if is_linear(module):
                raise NotFused(f"a weight that is a {type(module.weight).__name__}")
            raise NotFused(f"a {name_of(module)} in place of a linear layer")
        self.called.append(module)
        self.free.update(module.modules())
        self.fingerprint.append(type(module))
        return ModuleLinear(module, sizes[0])

    def is_plain(self, module: Any) -> bool:
        """Return whether a layer is a linear one, with a weight of the stack's dtype."""
        plain = is_linear(module) and type(module.weight) is nn.Parameter
        return plain and module.weight.dtype == self.dtype

    def is_product(self, module: Any) -> bool:
        """Return whether a layer is a linear one, with or without low-rank adapters."""
        return self.is_plain(module if lora_parts(module) is None else module.base_layer)

    def inputs(self, module: Any) -> int:
        """Return the number of inputs of a linear layer, or of a layer in its place."""
        module = without_peft(module)
        sizes = (module.nf, module.nx) if hasattr(module, "nx") else sizes_of(module)
        if sizes is None:
            raise NotFused(f"a {name_of(module)} in place of a linear layer")
        return sizes[1]

    def norm(self, module: Any) -> Any:
        if module is None:
            return None
        module = self.opened(module)
        if any(parameter.is_meta for parameter in module.parameters()):
            raise NotFused("weights that are offloaded")
        if type(module) is nn.LayerNorm:
            self.fingerprint.append(module.eps)
            return Norm(module.weight, module.bias, module.eps)
        if type(module).__name__ == "CohereLayerNorm" and module.weight.dim() > 1:
            self.fingerprint.append(module.variance_epsilon)
            return ModuleNorm(module)  # It has weights of its own for each head.
        norm = norm_of(module)
        if norm is None:
            raise NotFused(f"a {name_of(module)} in place of a norm")
        self.fingerprint += (norm.eps, norm.rms, norm.offset)
        # Toolkit norms compute float64 in float32.
        return ModuleNorm(module) if self.dtype == torch.float64 else norm

    def activation(self, function: Any) -> str:
        if isinstance(function, nn.Module):
            self.read.update(function.modules())
        kind = activation.kind(function)
        if kind is None:
            raise NotFused(
                f"an activation function {getattr(function, '__name__', None) or name_of(function)}"
            )
        self.fingerprint.append(kind)
        return kind
