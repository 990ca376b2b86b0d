"""fp32 linear layers on a CPU with packed weights, where that is faster than torch's default.

torch hands fp32 matrix products to MKL, which leaves AVX-512 unused on AMD processors, and is slow for a handful of
rows on every weight that does not fit the cache. oneDNN lies in the same torch, behind the operators that Inductor uses
for frozen weights. With the weight packed into oneDNN's own layout it is 2 to 5 times faster for 2 to 16 rows and 1.2
to 1.7 times for more (2 cores of an AMD EPYC, Zen 4, torch 2.13), on Zen 5 2 to 7 times and 2.2 to 3.3. Unpacked it
costs no memory and gains less.

On Intel's processors MKL leaves nothing unused, but lays the weight out anew in every product. With the weight packed
by MKL itself a product is 1.1 to 1.9 times as fast for 4 to 64 rows, 1.1 to 1.35 for more, and from 16 rows on, up to
768 inputs, the same bit by bit (2 cores of a Xeon with AVX-512, torch 2.13; oneDNN's: 0.4 to 1.9, 0.9 to 1.2).

Where there are operations in C (`ops.native`, on AMD's processors), products are among them: on Zen 5 a call takes 2 us
and not 12 to 15, so that it is 1.2 to 5 times as fast as oneDNN's up to 64 rows, and as fast beyond (250 GFLOP/s of a
thread).

oneDNN's and MKL's operators are private to torch (`ops.torch_private`), and checked once. `unusable`
says why a library is left out.
"""

import math
import mmap
import sys
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor
from torch.nn import functional as F

from fastgen.ops import native, processor, torch_private
from fastgen.ops.activation import FUNCTIONS, activation_, activation_reference
from fastgen.ops.dispatch import chosen, in_c, never, plain
from fastgen.ops.torch_private import operator

LEAST_ROWS = ((96 * 1024, 32), (384 * 1024, 2), (math.inf, 1))
"""Rows from which on oneDNN is faster, for weights of fewer elements than stand before them.

Small weights stay in the cache, where the fixed cost of a oneDNN call (about 10 us) is seldom won back; products of few
rows with large ones take as long as it takes to read them. Measured from 256 x 256 to 1024 x 50264 and 1 to 2,048 rows
(AMD EPYC): 4.4 times as fast at 256 x 5000, 2 rows."""

LEAST_ROWS_ZEN5 = (
    (24 * 1024, 128),
    (48 * 1024, 64),
    (96 * 1024, 32),
    (160 * 1024, 4),
    (math.inf, 1),
)
"""The same on Zen 5, from 128 x 128 to 512 x 10000, weights in the cache and not, one thread and two: calls of oneDNN's
take 15 us there, and reach 300 to 440 GFLOP/s from 64 rows on, torch's 110 to 190. With one row 256 x 1024 is 2.2 to
2.7 times as fast where the weight is read from memory, and 0.6 to 0.8 in the cache, where few models lie."""

LEAST_ROWS_NATIVE = ((8 * 1024, 16), (24 * 1024, 2), (math.inf, 1))
"""The same for products in C, from 64 x 64 to 4096 x 1024, one thread and two (Zen 5): a call takes 2 us, one of
oneDNN's 12 to 15."""

FILLED, SMALL_PANELS = 0.75, 64 * 1024
"""The share of its panels that a weight fills at least, to be packed for products in C; and numbers in its panels up to
which it is packed if it fills less, for decode steps that run in C as a whole.

A panel has 64 outputs, with AVX2 16, and is computed as a whole: 16 x 4096 takes up to three times as long as
elsewhere. By itself such a layer runs by torch's own product."""

FEWEST_OUTPUTS_NATIVE = 16
"""Outputs from which on weights are packed for products in C at all."""

LEAST_ROWS_MKL = ((24 * 1024, 64), (600 * 1024, 16), (math.inf, 4))
"""The same for weights packed by MKL, from 128 x 128 to 50,000 x 512, one thread and two (Xeon). With 1 to 3 rows a
weight is read once in any layout: 0.8 to 1.05 times as fast."""

LEAST_ROWS_MKL_NARROW = ((64 * 1024, 1024), (3 * 2**20, 16), (math.inf, 8))
"""The same where outputs are fewer than inputs: 100 x 400 is slower with any number of rows, 512 x 2048 with 8."""

FEWEST_OUTPUTS_MKL = 96
"""Outputs from which on there is such a number of rows at all: 32 x 4096 is slower from 128 on, 12 x 8192 with any."""

MOST_ROWS_MKL = ((600 * 1024, 256), (math.inf, 512))
"""Rows up to which they are faster there; with more, laying out the weight is next to nothing of a product."""

PACKED_ROWS_MKL = 64, 128
"""Rows that MKL lays a weight out for, with few outputs for each thread and with as many outputs as rows, or more.

128 is the fastest, or as fast, for 4 to 512 rows: laid out for 16, 4096 x 1024 takes 1.7 times as long with 24 rows.
But from 128 on MKL splits the rows among threads, too, where the outputs for each are fewer, and with half of the rows
leaves half of them idle (8 threads and 512 outputs, 16 and 1,024, by the time of each thread; not with 64)."""

DEAR = ("gelu", "gelu_tanh")
"""Activation functions that oneDNN computes along with a product for a half to a tenth of what torch takes for them.

Behind them weights are packed by oneDNN there, too: 1.1 to 3 times as fast from 16 rows of 256 x 1024 on, where MKL's
product with torch's function is 1.0 to 1.2 times (2048 x 512 to 4096 x 1024: 1.1 to 2.6, and 1.0 to 1.3)."""

DEAR_WORK, DEAR_ROWS = 2**21, 4
"""Rows times elements of the weight, and rows, from which on that is so."""

CHUNK, CHUNK_ROWS = 2 * 2**20, 64
"""Bytes of output, and rows at least, that `linear_into` computes at a time."""


_NAMES = {
    "mkl": "MKL's product",
    "onednn": "oneDNN's product with a packed weight",
    "plain": "oneDNN's product",
}

# How oneDNN's operator calls what comes behind a product.
_ACTIVATIONS: dict[str | None, tuple[str, str]] = {
    None: ("none", ""), "gelu": ("gelu", "none"), "gelu_tanh": ("gelu", "tanh"), "relu": ("relu", ""),
    "silu": ("swish", ""),
}  # fmt: skip


def linear_reference(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x (..., K) times weight (N, K) transposed plus bias (N,): `torch.nn.functional.linear`."""
    return F.linear(x, weight, bias)


class MklWeight(NamedTuple):
    """A weight (N, K) in MKL's layout, for any number of rows.

    layout: which only `linear` can read. sizes: (N, K), without memory.
    """

    layout: Tensor
    sizes: Tensor


class PanelWeight(NamedTuple):
    """A weight (N, K) in the layout of products in C.

    panels: (P, K, W), what `ops.native.packed` returns. outputs: N.
    """

    panels: Tensor
    outputs: int

    def unpacked(self) -> Tensor:
        """The weight, (N, K)."""
        return self.panels.transpose(1, 2).flatten(0, 1)[: self.outputs]


Packed = Tensor | MklWeight | PanelWeight
"""A packed weight."""


def reason_off() -> str | None:
    """Return why every product is torch's own; None where another one may be faster."""
    reason = unusable(
        "mkl" if by_mkl() else "plain"
    )  # for C as well, which leaves small weights to oneDNN
    return None if native.library() is not None else reason


def by_mkl() -> bool:
    """Whether torch's own product is MKL's, and packed weights are MKL's rather than oneDNN's: on Intel, but for C."""
    return processor.on_intel() and native.library() is None and torch.backends.mkl.is_available()


def packer() -> str | None:
    """Return what packs weights where no activation function decides it: native, mkl or onednn; None for nothing."""
    if native.library() is not None:
        return "native"
    return None if unusable(library := _library_for(None)) else library


def _library_for(activation: str | None) -> str:
    """The library in torch for packed weights that are not for C, if it can be used, with this activation behind."""
    return "mkl" if by_mkl() and (activation not in DEAR or unusable("onednn")) else "onednn"


def native_for(outputs: int, inputs: int) -> "native.Library | None":
    """The library in C that a weight is packed for; None where it is packed for another one, or for none."""
    by = native.library()
    if by is None or outputs < FEWEST_OUTPUTS_NATIVE:
        return None
    panels = _in_panels(by, outputs)
    return by if outputs >= FILLED * panels or panels * inputs <= SMALL_PANELS else None


def _in_panels(by: "native.Library", outputs: int) -> int:
    return -(-outputs // by.panel) * by.panel


def described(packed: bool = True) -> tuple[str, str | None]:
    """Say by what linear layers run where that is faster than torch's own product, and why not by more, if so.

    packed: whether weights may be packed.
    """
    if reason := reason_off():
        return "torch's own", reason
    without, by = "by oneDNN, weights unpacked", "by oneDNN"
    if packed and native.library() is not None:
        without, by = "in C alone", "in C"
    elif by_mkl():
        without, by = "by MKL", "by MKL or oneDNN"
    reason = unusable("onednn" if packed else "plain")
    return without if reason else by, reason


@cache
def unusable(library: str) -> str | None:
    """Return why products are not left to a library in torch, found once; None where they are.

    Args:
        library: mkl or onednn, for packed weights; plain, for oneDNN with weights as they are.
    """
    if library == "onednn" and (reason := unusable("plain")):
        return reason
    try:
        if _agrees(library):
            return None
        wrong = "differs from torch.nn.functional.linear"
    except LookupError as error:
        return str(error)
    except Exception as error:  # an operator may raise anything
        wrong = "fails: " + str(error).partition("\n")[0]
    return f"torch {torch.__version__}: {_NAMES[library]} {wrong}"


@torch.autocast("cpu", enabled=False)
def _agrees(library: str) -> bool:
    """Whether a library's products are torch's, with what comes behind. oneDNN compiles each, in 0.8 ms."""
    fixed: Any = {"dtype": torch.float32, "device": "cpu"}  # whatever the caller's defaults are
    x, weight = (torch.linspace(-1, 1, rows * 64, **fixed).view(rows, 64) for rows in (3, 32))
    bias = torch.ones(32, **fixed)
    own = F.linear(x, weight, bias)
    if library == "mkl":
        pairs = [(_product_by_mkl(x, _pack_for_mkl(weight, 16), bias), own)]
    else:
        form = weight if library == "plain" else _pack_for_onednn(weight, 16)
        pairs = [
            (_product_by_onednn(x, form, bias), own),
            (_product_by_onednn(x, form, bias, residual=own), own + own),
        ]
    for kind in (
        FUNCTIONS if library == "plain" else ()
    ):  # in fp64, as torch's gelu in fp32 is oneDNN's
        pairs.append(
            (_product_by_onednn(x, weight, bias, kind), activation_reference(own.double(), kind))
        )
    return all(
        y.shape == z.shape and torch.allclose(y.double(), z.double(), atol=1e-4) for y, z in pairs
    )


def useful_rows(
    outputs: int, inputs: int, activation: str | None = None, packed: bool = True
) -> range:
    """Rows of x with which a product with a packed weight (outputs, inputs) is faster than `F.linear`.

    Args:
        activation: the kind of it right behind the product; None for none.
        packed: False for a weight that `linear` gets plain, where C is of no use.
    """
    elements = outputs * inputs
    if packed and (by := native_for(outputs, inputs)) is not None:
        filled = outputs >= FILLED * _in_panels(by, outputs)
        return range(_at(LEAST_ROWS_NATIVE, elements) if filled else sys.maxsize, sys.maxsize)
    if not by_mkl() and not unusable("plain"):
        return range(
            _at(LEAST_ROWS_ZEN5 if processor.on_zen5() else LEAST_ROWS, elements), sys.maxsize
        )
    library = _library_for(activation)
    if (
        not (packed and by_mkl())
        or unusable(library)
        or (library == "mkl" and outputs < FEWEST_OUTPUTS_MKL)
    ):
        return range(sys.maxsize, sys.maxsize)
    if library == "onednn":
        return range(max(DEAR_ROWS, -(-DEAR_WORK // max(1, elements))), sys.maxsize)
    least = LEAST_ROWS_MKL_NARROW if outputs < inputs else LEAST_ROWS_MKL
    return range(_at(least, elements), _at(MOST_ROWS_MKL, elements) + 1)


def _at(table: Sequence[tuple[float, int]], elements: int) -> int:
    return next(rows for limit, rows in table if elements < limit)


def saved_share() -> float:
    """The share of the time of an encoder's layer that products with packed weights save at least."""
    return 0.03 if processor.on_intel() else 0.15


def pack(weight: Tensor, rows: int = 16, activation: str | None = None) -> Packed | None:
    """Return a packed copy of weight (N, K) fp32 that only `linear` can read; None where no library packs it.

    Args:
        weight: (N, K) fp32 on the CPU.
        rows: the number of rows of x that oneDNN lays out for; any other number works too.
        activation: the kind of it that is to follow; any other works too.
    """
    weight = weight.detach()
    by = native_for(*weight.shape)
    if by is not None:
        return PanelWeight(native.packed(by, weight), len(weight))
    weight = _contiguous(weight)
    library = _library_for(activation)
    if unusable(library):
        return None
    if library == "onednn":
        return _pack_for_onednn(weight, rows)
    few, many = PACKED_ROWS_MKL
    return _pack_for_mkl(weight, many if weight.shape[0] >= many * torch.get_num_threads() else few)


def _contiguous(weight: Tensor) -> Tensor:
    """A weight with its rows side by side, copied where need be to memory that goes back to the system at once.

    From the C library it would leave holes between packed copies (GPT-2: 130 MiB beside 471 of copies).
    """
    if weight.is_contiguous():
        return weight
    return (
        torch.frombuffer(mmap.mmap(-1, weight.nbytes), dtype=weight.dtype)
        .view(weight.shape)
        .copy_(weight)
    )


def packed_bytes(packed: Packed) -> int:
    """Bytes of a packed weight: of MKL's layout what is written, as it has room for more."""
    if isinstance(packed, PanelWeight):
        return 4 * packed.panels.numel()
    return 4 * (packed if isinstance(packed, Tensor) else packed.sizes).numel()


def bytes_to_pack(outputs: int, inputs: int) -> int:
    """Bytes that a weight (outputs, inputs) will have, packed."""
    by = native_for(outputs, inputs)
    return 4 * inputs * (outputs if by is None else _in_panels(by, outputs))


def suits(packed: Packed, outputs: int, inputs: int, activation: str | None = None) -> bool:
    """Whether `pack` would pack a weight (outputs, inputs) with the same library for this activation."""
    by = native_for(outputs, inputs)
    if by is not None or isinstance(packed, PanelWeight):
        return (
            isinstance(packed, PanelWeight)
            and by is not None
            and packed.panels.shape[2] == by.panel
        )
    return isinstance(packed, MklWeight) == (_library_for(activation) == "mkl")


def _pack_for_onednn(weight: Tensor, rows: int) -> Tensor:
    return operator(torch_private.ONEDNN_PACK)(weight, rows)


def _pack_for_mkl(weight: Tensor, rows: int) -> MklWeight:
    layout = operator(torch_private.MKL_PACK)(weight, rows)
    return MklWeight(layout, weight.new_empty(1).expand(weight.shape))


def linear(
    x: Tensor,
    weight: Packed,
    bias: Tensor | None = None,
    activation: str | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """Return x (..., K) fp32 times weight (N, K) transposed plus bias (N,), in C, by oneDNN or MKL, unchecked.

    Differs from `linear_reference` by fp32 rounding. What comes behind costs a pass over memory less with oneDNN: gelu
    at 128 x 512 x 1,024 33 us, by itself 83; the sum at 128 x 256 x 512 5 us, by itself 16.

    Args:
        weight: the result of `pack`; or plain, for oneDNN, or for torch's own product where oneDNN is not for it.
        activation: gelu, gelu_tanh, relu or silu, for that of the result.
        residual: (..., N), to be added to the result; not with an activation.
    """
    if isinstance(weight, PanelWeight):
        return _in_c(x, weight, bias, activation, residual)
    if isinstance(weight, MklWeight):
        return _finished(_product_by_mkl(x, weight, bias), activation, residual)
    if _is_own(weight):
        return _finished(F.linear(x, weight, bias), activation, residual)
    return _product_by_onednn(x, weight, bias, activation, residual)


def _product_by_mkl(x: Tensor, weight: MklWeight, bias: Tensor | None) -> Tensor:
    return operator(torch_private.MKL_LINEAR)(
        x, weight.layout, weight.sizes, bias, x.numel() // x.shape[-1]
    )


def _product_by_onednn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    # oneDNN reads a bias as if its elements lay side by side.
    bias = None if bias is None else bias.contiguous()
    if residual is not None:
        return operator(torch_private.ONEDNN_LINEAR_ADD)(x, residual, weight, bias, "add")
    name, algorithm = _ACTIVATIONS[activation]
    return operator(torch_private.ONEDNN_LINEAR)(x, weight, bias, name, [], algorithm)


def _in_c(
    x: Tensor,
    weight: PanelWeight,
    bias: Tensor | None,
    activation: str | None,
    residual: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    shape = *x.shape[:-1], weight.outputs
    by = chosen("linear", never, lambda: _covered_in_c(x, weight, bias, residual, out, shape), x)
    if not in_c(by):  # somebody records what is computed, or C has been switched off since
        y = _finished(F.linear(x, weight.unpacked(), bias), activation, residual)
        return y if out is None else out.copy_(y)
    out = x.new_empty(shape) if out is None else out
    return native.product(by, x, weight.panels, bias, activation, residual, out)


def _covered_in_c(
    x: Tensor,
    weight: PanelWeight,
    bias: Tensor | None,
    residual: Tensor | None,
    out: Tensor | None,
    shape: tuple[int, ...],
) -> bool:
    """Whether C reads these tensors; shape: of the result, (..., N)."""
    return (
        plain(x, weight.panels, None if bias is None else bias.data, residual, out)
        and x.shape[-1] == weight.panels.shape[1]
        and (bias is None or bias.shape == shape[-1:])
        and (residual is None or residual.shape == shape)
        and (out is None or (out.shape == shape and out.is_contiguous()))
    )


def _finished(y: Tensor, activation: str | None, residual: Tensor | None) -> Tensor:
    if activation is not None:
        y = activation_(y, activation, exactly=False)
    return y if residual is None else y.add_(residual)


def linear_into(
    y: Tensor,
    x: Tensor,
    weight: Tensor | PanelWeight,
    bias: Tensor | None = None,
    activation: str | None = None,
) -> None:
    """Write `linear(x, weight, bias, activation)` to y (..., N), contiguous; not of a weight that MKL has packed.

    oneDNN's operators return fresh memory; some rows at a time it stays in the cache, and the copies cost next to
    nothing (2,048 x 1,024 x 4,096: 81 ms, at once 85 ms). torch's own product writes to y at once.
    """
    target, rows = y.view(-1, y.shape[-1]), x.reshape(-1, x.shape[-1])
    if isinstance(weight, PanelWeight):
        _in_c(rows, weight, bias, activation, out=target)
        return
    if _is_own(weight):
        _own_product(rows, weight, bias, target)
        if activation is not None:
            activation_(target, activation, exactly=False)
        return
    step = max(CHUNK_ROWS, CHUNK // (4 * y.shape[-1]))
    for start in range(0, len(rows), step):
        target[start : start + step] = linear(rows[start : start + step], weight, bias, activation)


def _is_own(weight: Packed) -> TypeGuard[Tensor]:
    """Whether a weight is for torch's own product: a plain one, where that is MKL's, or oneDNN's cannot be used."""
    plain = isinstance(weight, Tensor) and weight.layout == torch.strided
    return plain and (by_mkl() or unusable("plain") is not None)


def _own_product(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> Tensor:
    return (
        torch.mm(x, weight.t(), out=out)
        if bias is None
        else torch.addmm(bias, x, weight.t(), out=out)
    )
