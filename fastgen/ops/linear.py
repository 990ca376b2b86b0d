"""Linear layers on a CPU: products in C with packed weights, where they are faster than torch.

torch dispatches products in fp32 to MKL, which reads a weight as it lies: slow for a handful of
rows of every weight that does not fit the cache, and without the widest vectors on processors that
MKL does not recognize. Packed once into panels, a weight is read in the order of the computation
(`ops/native/product.c`); in bf16 and fp16 it has half of the bytes. `cpu_rules` holds the shapes
for which that is faster, with measurements.
"""

import math
import sys
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from fastgen.ops import cpu_rules, native, processor
from fastgen.ops.activation import activation_
from fastgen.ops.dispatch import in_c, plain, select_backend, unsupported
from fastgen.ops.native import products as native_products


def linear_reference(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x (..., K) times weight (N, K) transposed plus bias (N,), by `F.linear`."""
    return F.linear(x, weight, bias)


class PanelWeight(NamedTuple):
    """A weight (N, K) in the layout of products in C.

    Attributes:
        panels: The result of `ops.native.products.packed`.
        outputs: N.
        inputs: K.
    """

    panels: Tensor
    outputs: int
    inputs: int

    @property
    def nbytes(self) -> int:
        """Bytes of memory."""
        return self.panels.nbytes

    def unpacked(self) -> Tensor:
        """Return the weight, (N, K)."""
        # (P, K, W), or (P, ceil(K / 2), W, 2).
        rows = self.panels.transpose(1, 2).flatten(0, 1).flatten(1)
        return rows[: self.outputs, : self.inputs]


def reason_off(dtype: torch.dtype = torch.float32) -> str | None:
    """Return why every product is torch's own; None if products in C may be faster."""
    if dtype not in native.DTYPES:
        return f"weights are {str(dtype).removeprefix('torch.')}, not float32"
    return native.why_off() or None


def native_for(outputs: int, inputs: int) -> "native.Library | None":
    """Return the C library that a weight is packed for; None if it is not packed."""
    by = native.library()
    if by is None or outputs < cpu_rules.FEWEST_OUTPUTS:
        return None
    panels = _in_panels(by, outputs)
    is_filled = outputs >= cpu_rules.FILLED * panels
    return by if is_filled or panels * inputs <= cpu_rules.SMALL_PANELS else None


def _in_panels(by: "native.Library", outputs: int) -> int:
    return -(-outputs // by.panel) * by.panel


def described(dtype: torch.dtype = torch.float32) -> str:
    """Describe in a few words what runs linear layers of a dtype on this CPU."""
    if reason_off(dtype) is not None:
        return "torch's own"
    if dtype != torch.float32:
        rows = native.most_rows(dtype)
        return "in C" if rows == math.inf else f"in C up to {rows} rows, beyond by torch"
    if not processor.mkl_is_native():
        return "in C"
    most = cpu_rules.MOST_ROWS_BESIDE_MKL[-1][1]
    return f"in C up to {most} rows, beyond by MKL"


def useful_rows(outputs: int, inputs: int, dtype: torch.dtype = torch.float32) -> range:
    """Return the numbers of rows for which a product in C is faster than `F.linear`.

    Args:
        outputs: N of the weight.
        inputs: K of the weight.
        dtype: dtype of the weight.
    """
    by, elements = native_for(outputs, inputs), outputs * inputs
    if by is None or outputs < cpu_rules.FILLED * _in_panels(by, outputs):
        return range(sys.maxsize, sys.maxsize)
    beyond = sys.maxsize
    if dtype != torch.float32:
        beyond = int(min(native.most_rows(dtype) + 1, sys.maxsize))
    elif processor.mkl_is_native():
        beyond = cpu_rules.at(cpu_rules.MOST_ROWS_BESIDE_MKL, elements) + 1
    return range(cpu_rules.at(cpu_rules.LEAST_ROWS, elements), beyond)


def saved_share() -> float:
    """Return the least share of an encoder layer's time that products in C save."""
    return cpu_rules.SAVED_BESIDE_MKL if processor.mkl_is_native() else cpu_rules.SAVED_BY_PRODUCTS


def pack(weight: Tensor) -> PanelWeight | None:
    """Return a packed copy of a weight that only `linear` can read; None if it is not packed.

    Args:
        weight: (N, K) on the CPU, fp32, bf16 or fp16.
    """
    weight = weight.detach()
    by = native_for(*weight.shape)
    return None if by is None else PanelWeight(native_products.packed(by, weight), *weight.shape)


def bytes_to_pack(outputs: int, inputs: int, dtype: torch.dtype = torch.float32) -> int:
    """Return the bytes that a weight (outputs, inputs) takes when packed; 0 if it is not packed."""
    by = native_for(outputs, inputs)
    if by is None:
        return 0
    return dtype.itemsize * native_products.padded_inputs(inputs, dtype) * _in_panels(by, outputs)


def suits(packed: "PanelWeight | native_products.Int8Weight", outputs: int, inputs: int) -> bool:
    """Return whether C would read a weight (outputs, inputs) packed as `packed` is."""
    by = native_for(outputs, inputs)
    return by is not None and packed.panels.shape[2] == by.panel


def linear(
    x: Tensor,
    weight: PanelWeight | Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    residual: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Return x times weight transposed plus bias; arguments are unchecked.

    The result differs from `linear_reference` by rounding.

    Args:
        x: (..., K), of the weight's dtype.
        weight: the result of `pack`, for the product in C; or (N, K), for torch's own.
        bias: (N,), or None.
        activation: a key of `ops.activation.FUNCTIONS`, applied to the result; or None.
        residual: (..., N), added to the result; not with an activation.
        out: (..., N) contiguous, receives the result; None to allocate it.

    Returns:
        (..., N).
    """
    if isinstance(weight, Tensor):
        return _by_torch(x, weight, bias, activation, residual, out)
    shape = *x.shape[:-1], weight.outputs
    backend = select_backend(
        "linear", unsupported, lambda: _covered_in_c(x, weight, bias, residual, out, shape), x
    )
    if not in_c(backend):  # operations are observed, or C was switched off after packing
        return _by_torch(x, weight.unpacked(), bias, activation, residual, out)
    out = x.new_empty(shape) if out is None else out
    return native_products.product(backend, x, weight.panels, bias, activation, residual, out)


def _covered_in_c(
    x: Tensor,
    weight: PanelWeight,
    bias: Tensor | None,
    residual: Tensor | None,
    out: Tensor | None,
    shape: tuple[int, ...],
) -> bool:
    """Whether C can read these tensors.

    Args:
        shape: the shape of the result, (..., N).
    """
    return (
        plain(
            x,
            weight.panels,
            None if bias is None else bias.data,
            residual,
            out,
            dtype=weight.panels.dtype,
        )
        and x.shape[-1] == weight.inputs
        and (bias is None or bias.shape == shape[-1:])
        and (residual is None or residual.shape == shape)
        and (out is None or (out.shape == shape and out.is_contiguous()))
    )


def _by_torch(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    residual: Tensor | None,
    out: Tensor | None,
) -> Tensor:
    if out is None:
        y = F.linear(x, weight, bias)
    else:
        y, rows, target = out, x.reshape(-1, x.shape[-1]), out.view(-1, out.shape[-1])
        if bias is None:
            torch.mm(rows, weight.t(), out=target)
        else:
            torch.addmm(bias, rows, weight.t(), out=target)
    if activation is not None:
        y = activation_(y, activation, exactly=False)
    return y if residual is None else y.add_(residual)
