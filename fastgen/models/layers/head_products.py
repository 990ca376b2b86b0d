"""Products of latent attention with weights of each head, in C."""

from typing import Any

import torch
from torch import Tensor, nn

from fastgen import config
from fastgen.models.layers.linear import Packable
from fastgen.models.layers.packed_weights import LatentKeysPacked, LatentValuesPacked


class HeadProducts(Packable):
    """The products of each head's queries with its weights of keys, which only C computes.

    Their outputs are in the space of latent vectors.

    Args:
        module: The linear layer that maps latent vectors (C) to the keys (N) and values (D) of all
            heads.
        heads: Number of heads H.
        key_dims: N.

    Attributes:
        count: H.
        each: Outputs per head.
    """

    copies = LatentKeysPacked

    def __init__(self, module: nn.Module, heads: int, key_dims: int) -> None:
        self.module: Any = module
        self.entry, self.always = None, config.settings().linear == "packed"
        self.count, self._key_dims = heads, key_dims
        _, self.each, self.inputs = self._plain.shape
        self.outputs = self.count * self.each
        self.dtype: torch.dtype = self.module.weight.dtype

    def in_panels(self, rows: int = 1) -> Any:
        """Return the weights as C reads them for this many rows; None where they are not packed."""
        return self._copy(self.module.weight, self._plain, rows)

    @property
    def _plain(self) -> Tensor:
        return self._of_heads[:, : self._key_dims].transpose(1, 2)

    @property
    def _of_heads(self) -> Tensor:
        weight: Tensor = self.module.weight
        return weight.view(self.count, -1, weight.shape[1])


class HeadValues(HeadProducts):
    """The products of each head's attention output with its weights of values."""

    copies = LatentValuesPacked

    @property
    def _plain(self) -> Tensor:
        return self._of_heads[:, self._key_dims :]
