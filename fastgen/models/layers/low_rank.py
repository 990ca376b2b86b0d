"""Low-rank adapters beside the weight of a linear layer.

Source: Hu et al. 2021 (LoRA), section 4.1.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor

from fastgen.models.layers.linear import Product
from fastgen.ops.activation import activation_


@dataclass(frozen=True)
class Adapter:
    """A low-rank product: up(down(x)) * scaling.

    Attributes:
        down: Product with `rank` outputs.
        up: Product of the result.
        scaling: Factor of its output.
    """

    down: Product
    up: Product
    scaling: float


@dataclass(frozen=True)
class LowRank:
    """A linear layer plus the low-rank products of its active adapters, in the order of PEFT.

    Attributes:
        base: Product of the layer's own weight.
        adapters: The active adapters.
    """

    base: Product
    adapters: Sequence[Adapter]
    fuses = False

    @property
    def outputs(self) -> int:
        return self.base.outputs

    @property
    def inputs(self) -> int:
        """K."""
        return cast(Any, self.base).inputs

    @property
    def products(self) -> list[Product]:
        """The layer's own product, then both of each adapter."""
        return [self.base, *(each for a in self.adapters for each in (a.down, a.up))]

    def apply(
        self, x: Tensor, activation: str | None = None, residual: Tensor | None = None
    ) -> Tensor:
        y = self.base.apply(x)
        for each in self.adapters:
            y = y + each.up.apply(each.down.apply(x)) * each.scaling
        if activation is not None:
            y = activation_(y, activation, exactly=False)
        return y if residual is None else y.add_(residual)
